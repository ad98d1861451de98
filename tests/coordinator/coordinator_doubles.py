"""Doubles for the coordinator's tests: a trainer that writes down what it trains on, tiny tasks, a token-wise text."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.coordinator import parts
from libra_jax.coordinator import run as run_module
from libra_jax.engines import client as engines_client
from libra_jax.rollouts import rollouts
from libra_jax.scheduling import registry
from libra_jax.simulator import clock
from libra_jax.telemetry import memory
from libra_jax.trainer_control import client

Clock = clock.Clock
run_on_clock = clock.run


class DirectCluster:
    """Actors are the objects themselves."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.spawned: list[str] = []

    async def spawn(self, spec: protocols.ActorSpec) -> protocols.ActorHandle:
        module, _, name = spec.factory.partition(":")
        assert spec.name not in self.actors
        self.spawned.append(spec.name)
        self.actors[spec.name] = getattr(importlib.import_module(module), name)(**spec.arguments)
        return protocols.DirectHandle(spec.name, self.actors[spec.name])

    async def stop(self, name: str) -> None:
        actor = self.actors.pop(name, None)
        if actor is not None:
            await actor.shutdown()

    async def kill(self, name: str) -> None:
        self.actors.pop(name, None)

    async def shutdown(self) -> None:
        for name in list(self.actors):
            await self.stop(name)


def run_context(
    config: config_lib.RunConfig,
    cluster: Any = None,
    recorder: protocols.Recorder | None = None,
    workdir: Path = Path("unused"),
) -> parts.CoordinatorContext:
    """What parts of a run share, when a test makes them without a coordinator."""
    return parts.CoordinatorContext(config, cluster or DirectCluster(), recorder or memory.MemoryRecorder(), workdir)


class TokenText:
    """Token n is the text "n", 99 any other word; 2 stops."""

    vocab_size = 100
    stop_token_ids = (2,)
    pad_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [int(word) if word.isdigit() else 99 for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def render(self, messages: Sequence[protocols.Message], *, first: bool, generation_prompt: bool) -> list[int]:
        tokens = [1] if first else []
        for message in messages:
            tokens += self.encode(message.content)
        return [*tokens, 1] if generation_prompt else tokens

    def render_output(
        self, before: Sequence[protocols.Message], output: protocols.Message, *, first: bool
    ) -> list[int]:
        return [*self.encode(output.content), *self.stop_token_ids]


class Tasks:
    """Task n shows the digits of n."""

    def task(self, index: int) -> protocols.Task:
        return protocols.Task(f"task-{index}", {"index": index})

    def evaluation_task(self, index: int) -> protocols.Task:
        return protocols.Task(f"held-out-{index}", {"index": index})

    def demonstration(self, task: protocols.Task) -> Sequence[protocols.Message]:
        return [protocols.Message("user", "5 6"), protocols.Message("assistant", "7 8")]


class TwoTurns:
    """A tool call, its return, an answer; the reward is 1 for an odd last token."""

    tool_seconds: Callable[[int], float] = staticmethod(lambda index: 0.01)
    running_tool = "echo"

    def __init__(self) -> None:
        self._turns = 0

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        self._index = task.payload["index"]
        digits = " ".join(str(10 + int(digit)) for digit in str(task.payload["index"]))
        return [protocols.Message("user", digits)]

    async def step(self, output: str) -> protocols.StepResult:
        self._turns += 1
        if self._turns == 1:
            await asyncio.sleep(self.tool_seconds(self._index))
            return protocols.StepResult(tool_returns=[protocols.ToolReturn("look", "success", "50 51")])
        last = (output.split() or ["0"])[-1]
        return protocols.StepResult(done=True, reward=float(int(last) % 2), metrics={"odd": float(int(last) % 2)})

    async def close(self) -> None:
        pass


class RecordingTrainer:
    """A trainer whose whole state is its version and the prompts and staleness it was given; saves them as JSON."""

    def __init__(self, seconds: float, chunks: int, log: str) -> None:
        self._seconds = seconds
        self._chunks = chunks
        self._log = log
        self._saving: tuple[Path, str] | None = None
        self.state: dict[str, Any] = {"version": 0, "prompts": [], "staleness": [], "warm": 0}
        self.open_version: int | None = None
        self.begun: list[int] = []
        self.busy = False
        self.meshes: list[tuple[int, protocols.MeshSizes]] = []
        self.cancelled = 0

    async def start(self) -> protocols.TrainerInfo:
        return protocols.TrainerInfo(0, 1, {"data": 1}, "cpu")

    async def stand_by(self) -> protocols.TrainerInfo:
        return protocols.TrainerInfo(0, 1, {"data": 1}, "cpu")

    async def policy_version(self) -> int:
        return self.state["version"]

    async def _one_call(self) -> None:
        assert not self.busy, "the trainer takes one call at a time"
        self.busy = True
        await asyncio.sleep(self._seconds)
        self.busy = False

    async def begin_resize(self, sizes: protocols.MeshSizes) -> protocols.ResizeEstimate:
        """Refuses a mesh of six; compiles for as many looks as its tensor size says, for ever if that is 8."""
        assert not self.busy
        if sizes.devices == 6:
            raise protocols.ConfigError("a mesh of six cannot be")
        self.wanted, self.looks = sizes, 0
        return protocols.ResizeEstimate(100, 50, 10)

    async def resize_progress(self) -> protocols.ResizeProgress:
        assert not self.busy
        self.looks += 1
        return protocols.ResizeProgress(
            self.looks, 8, ready=self.wanted.tensor <= self.looks and self.wanted.tensor < 8
        )

    async def finish_resize(self, seconds: float) -> protocols.ResizePhases:
        await self._one_call()
        self.meshes.append((self.state["version"], self.wanted))
        return protocols.ResizePhases(3.0, 0.0, self._seconds, 50)

    async def cancel_resize(self) -> None:
        self.cancelled += 1

    async def warm_start_step(self, sequences: Sequence[protocols.Trajectory]) -> Mapping[str, float]:
        await self._one_call()
        self.state["warm"] += 1
        return {"loss": 1.0}

    async def accumulate(self, batch: protocols.TrainBatch) -> None:
        assert batch.policy_version == self.state["version"]
        await self._one_call()
        self.begun += [group.group_id for group in batch.groups]

    async def train_step(
        self, batch: protocols.TrainBatch, shares: Sequence[protocols.Share] = ()
    ) -> Mapping[str, float]:
        assert batch.policy_version == self.state["version"]
        assert set(self.begun) <= set(batch.begun), "it holds sums of groups that are not in the step"
        self.begun = []
        await self._one_call()
        for group in batch.groups:
            for trajectory in group.trajectories:
                check_whole(trajectory)
            self.state["prompts"].append(group.task.prompt_id)
            self.state["staleness"].append(batch.policy_version - group.dispatch_version)
        self.state["version"] += 1
        return {"loss": 0.5}

    async def abort_step(self) -> bool:
        return False

    async def listen(self, worker: str, generation: int) -> Mapping[str, Any]:
        return {}

    async def connect(self, worker: str, generation: int, address: Mapping[str, Any]) -> None:
        pass

    async def dismiss(self, worker: str) -> None:
        pass

    async def open_weights(self, policy_version: int, destinations: Sequence[protocols.WeightDestination] = ()) -> int:
        assert policy_version == self.state["version"]
        assert self.open_version is None
        self.open_version = policy_version
        return self._chunks

    async def stage_weights(self, policy_version: int, index: int) -> protocols.WeightChunk:
        assert policy_version == self.open_version
        return protocols.WeightChunk(policy_version, index, self._chunks, (), 0, {"kind": "none"})

    async def close_weights(self, policy_version: int) -> None:
        assert policy_version == self.open_version
        self.open_version = None

    async def save(self, path: str) -> None:
        self._saving = Path(path), json.dumps(self.state)

    async def wait_saved(self) -> None:
        assert self._saving is not None
        path, text = self._saving
        write(path / "state.json", text)

    async def restore(self, path: str) -> int:
        self.state = read(path)
        return self.state["version"]

    async def export(self, path: str) -> None:
        write(Path(path) / "config.json", "{}")

    async def shutdown(self) -> None:
        if self._log:
            write(Path(self._log), json.dumps(self.state))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(path: str) -> dict[str, Any]:
    return json.loads((Path(path) / "state.json").read_text())


def check_whole(trajectory: protocols.Trajectory) -> None:
    """A trajectory fit to train on: scored, its columns aligned, every turn's tokens accounted for."""
    assert trajectory.reward is not None
    for segment in trajectory.segments:
        columns = (segment.sources, segment.loss_mask, segment.log_probs, segment.policy_versions)
        assert {len(values) for values in columns} == {len(segment.token_ids)}
        taught = len(segment.token_ids) if "teacher/seconds" in trajectory.metrics else 0
        assert len(segment.teacher_log_probs) == taught
        assert sum(turn.generated_tokens for turn in segment.turns) == segment.generated_tokens
        for version, sampled in zip(segment.policy_versions, segment.loss_mask, strict=True):
            assert (version >= 0) == sampled


def make_trainer(seconds: float = 0.05, chunks: int = 3, log: str = "") -> RecordingTrainer:
    return RecordingTrainer(seconds, chunks, log)


class Handed:
    """A cluster whose only actor is there already."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def spawn(self, spec: protocols.ActorSpec) -> protocols.ActorHandle:
        return protocols.DirectHandle(spec.name, self._actor)

    async def stop(self, name: str) -> None:
        pass

    async def kill(self, name: str) -> None:
        pass

    async def shutdown(self) -> None:
        pass


async def engine_client(engine: Any, config: config_lib.RunConfig) -> engines_client.EngineActorClient:
    """A client of an engine that is there already."""
    made = engines_client.EngineActorClient(Handed(engine), protocols.ActorSpec(engine.name, "", {}), config.deadlines)
    await made.make()
    return made


async def alone(
    trainer: protocols.Trainer, limits: config_lib.DeadlineConfig | None = None
) -> client.TrainerActorClient:
    """Returns the client of a trainer of one process, which is made."""
    processes = client.TrainerProcesses(Handed(trainer), lambda *_: protocols.ActorSpec("trainer", "", {}))
    made = client.TrainerActorClient(processes, limits or config_lib.DeadlineConfig())
    await made.make()
    return made


def chatter(token_ids: Sequence[int], sampling: protocols.SamplingParams) -> int:
    """The fake engine's script: noise of tokens 3..99 that stops after four tokens on average."""
    digest = zlib.crc32(repr(tuple(token_ids)).encode())
    stops = digest % 4 == 0 and sampling.stop_token_ids
    return sampling.stop_token_ids[0] if stops else 3 + digest // 4 % 97


def rambling(token_ids: Sequence[int], sampling: protocols.SamplingParams) -> int:
    """A script that stops at once for tasks whose last digit is 3 and after a tool return, and never for the others."""
    return sampling.stop_token_ids[0] if token_ids[-2:] in ([13, 1], [51, 1]) else 7


def make_config(**changes: Any) -> config_lib.RunConfig:
    """A tiny run; nested groups are given as dicts."""
    values: dict[str, Any] = {
        "steps": 4,
        "rollout": {"engine": "fake", "slots": 4, "max_context": 256, "max_tokens": 32, "stream_interval": 2},
        "coordinator": {"groups_per_step": 3, "group_size": 2},
        "checkpoint": {"every": 0},
        "deadlines": {"shutdown": 5.0},
    }
    for name, change in changes.items():
        values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
    return config_lib.parse(config_lib.RunConfig, values)


def engine_specs(config: config_lib.RunConfig, count: int = 2, **arguments: Any) -> list[protocols.ActorSpec]:
    rollout = {
        "slots": config.rollout.slots,
        "max_context": config.rollout.max_context,
        "stream_interval": config.rollout.stream_interval,
    }
    return [
        protocols.ActorSpec(
            f"engine-{index}",
            "libra_jax.engines.fake_engine:create",
            {
                "name": f"engine-{index}",
                "model_config": {},
                "rollout": rollout,
                "tensor_parallel": 1,
                "seed": index,
                "script": "coordinator_doubles:chatter",
                **arguments,
            },
        )
        for index in range(count)
    ]


def make_coordinator(
    config: config_lib.RunConfig,
    *,
    cluster: protocols.Cluster,
    trainer_spec: protocols.ActorSpec,
    engine_specs: Sequence[protocols.ActorSpec],
    recorder: protocols.Recorder,
    workdir: Path,
    make_environment: Callable[[], protocols.Environment] = TwoTurns,
    **further: Any,
) -> run_module.Coordinator:
    """Returns a coordinator over doubles; `further` are fields of its context, its specs and its agent, by their names.

    Also: `scheduler` and `planner`.
    """
    tasks = Tasks()
    chosen = {"tasks": tasks, "demonstrator": tasks, "tokenizer": TokenText(), **further}
    scheduler = chosen.pop("scheduler", None) or registry.create(config.scheduler)
    planner = chosen.pop("planner", None)

    def given(kind: type) -> dict[str, Any]:
        return {item.name: chosen.pop(item.name) for item in dataclasses.fields(kind) if item.name in chosen}

    made = run_module.Coordinator(
        parts.CoordinatorContext(config, cluster, recorder, workdir, **given(parts.CoordinatorContext)),
        parts.WorkerSpecs(trainer_spec, engine_specs, **given(parts.WorkerSpecs)),
        rollouts.Agent(make_environment=make_environment, **given(rollouts.Agent)),
        scheduler,
        planner,
    )
    assert not chosen, f"no such field: {', '.join(chosen)}"
    return made


class Bench:
    """A coordinator on doubles, and what it left behind."""

    def __init__(
        self,
        config: config_lib.RunConfig,
        workdir: Path,
        *,
        make_environment: Callable[[], protocols.Environment] = TwoTurns,
        specs: Sequence[protocols.ActorSpec] | None = None,
        trainer: Mapping[str, Any] | None = None,
        trainer_factory: str = "coordinator_doubles:make_trainer",
        recorder: protocols.Recorder | None = None,
        **further: Any,
    ) -> None:
        self.workdir = workdir
        self.recorder: Any = recorder or memory.MemoryRecorder()
        self.cluster = DirectCluster()
        log = workdir / "trainer.json"
        spec = protocols.ActorSpec("trainer", trainer_factory, {"log": str(log), **(trainer or {})})
        engines = engine_specs(config) if specs is None else specs
        self.coordinator = make_coordinator(
            config,
            cluster=self.cluster,
            trainer_spec=spec,
            engine_specs=engines,
            recorder=self.recorder,
            workdir=workdir,
            make_environment=make_environment,
            **further,
        )

    def run(self) -> run_module.RunSummary:
        try:
            return run_on_clock(self.coordinator.run())
        finally:
            assert not self.cluster.actors, "an actor was left behind"

    @property
    def trained(self) -> dict[str, Any]:
        """The trainer's state at its end."""
        return json.loads((self.workdir / "trainer.json").read_text())


def reference_tokens(tmp_path: Path) -> dict[str, Any]:
    """Tokens per turn of every attempt in a run where nothing breaks; the script depends on the context alone."""
    bench = Bench(make_config(), tmp_path / "reference")
    bench.run()
    return turns_of(bench)


def turns_of(bench: Bench) -> dict[str, Any]:
    """Tokens per turn of every attempt, and its reward."""
    return {
        record["trajectory_id"]: ([turn["generated_tokens"] for turn in record["turns"]], record["reward"])
        for record in bench.recorder.trajectories
    }
