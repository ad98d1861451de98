"""What a batch costs on its way to the trainer's processes: nanoseconds a token, by the number of processes.

  python -m tests.benchmarks.handover [--processes=1,2,4]     # a minute; starts Ray

A batch of 64 rollouts of ten turns, 1.2 million tokens, goes to actors that make arrays of the tokens that they get:
those of their own rows, or with one process and where settings need it (`data.dividing`), all. `call` is until all
have done so. `loop` is the coordinator's CPU time in it. The last line is for a batch of many short rollouts:
microseconds a rollout in the coordinator, and in a process that has no token of it.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import create
from libra_jax.data import dividing, packing, sequences
from libra_jax.models import config as model_config

GROUPS, SIZE, TURNS, GENERATED, RETURNED, PROMPT, DELTA = 4, 16, 10, 700, 1_100, 1_500, 16
VOCABULARY, VERSION, ROUNDS = 150_000, 5, 5
MANY = 2_048
"""Groups of the batch of short rollouts."""

CONFIG = config_lib.RunConfig(
    rollout=config_lib.RolloutConfig(max_context=24_576),
    trainer=config_lib.TrainerConfig(row_tokens=24_576, rows_per_micro_batch=16),
)
ROWS = CONFIG.trainer.micro_batch_rows

_PROCESSES = flags.DEFINE_list("processes", ["1", "2", "4"], "Numbers of processes.")


class Receiver:
    """Stands for a process of the trainer."""

    def __init__(self) -> None:
        self._model = model_config.load_preset("Qwen3-14B", "model")

    async def tokens(self, batch: protocols.TrainBatch) -> int:
        """Makes the micro-batches, and returns the tokens in them."""
        rollouts = [rollout for group in batch.groups for rollout in group.trajectories]
        packed = packing.pack(sequences.examples(rollouts, VERSION, self._model), CONFIG.trainer)
        return len(packed.columns.place_C)


def main(argv: list[str]) -> None:
    del argv
    made = batch(GROUPS, TURNS)
    count = tokens(made)
    print(f"{count:,} tokens")
    for processes in map(int, _PROCESSES.value):
        for divided in (False, True) if processes > 1 else (False,):
            call, loop = asyncio.run(handed_over(made, processes, divided=divided))
            each = "own rows" if divided else "all rows"
            print(f"{processes} processes, {each}: call {1e9 * call / count:.0f}, loop {1e9 * loop / count:.0f}")
    many = batch(MANY, 0)
    print(
        f"{MANY * SIZE:,} rollouts: {1e6 * coordinator_seconds(many) / MANY / SIZE:.1f} us in the coordinator, "
        f"{1e6 * outline_seconds(many) / MANY / SIZE:.1f} us in each process"
    )


def tokens(made: protocols.TrainBatch) -> int:
    return sum(len(rollout.token_ids) for group in made.groups for rollout in group.trajectories)


def shares(processes: int) -> Sequence[Sequence[int]]:
    """Returns the rows of each process."""
    each = ROWS // processes
    return [range(first, first + each) for first in range(0, ROWS, each)]


async def handed_over(made: protocols.TrainBatch, processes: int, *, divided: bool) -> tuple[float, float]:
    """Returns the seconds until all processes have arrays of the batch, and the caller's CPU seconds; medians."""
    cluster = create.create(config_lib.ClusterConfig(backend="ray"))
    try:
        specs = [
            protocols.ActorSpec(f"trainer.{number}", "tests.benchmarks.handover:Receiver", {}, cpus=0.1)
            for number in range(processes)
        ]
        actors = [await cluster.spawn(spec) for spec in specs]
        calls, loops = [], []
        for _ in range(ROUNDS + 1):
            again = protocols.TrainBatch(made.policy_version, made.groups)
            began, cpu = time.perf_counter(), time.process_time()
            given: Sequence[Any] = [again] * processes
            if divided:
                given = dividing.divide(CONFIG, again, shares(processes)) or given
            await asyncio.gather(
                *(actor.call(Receiver.tokens, part) for actor, part in zip(actors, given, strict=True))
            )
            calls.append(time.perf_counter() - began)
            loops.append(time.process_time() - cpu)
        return statistics.median(calls[1:]), statistics.median(loops[1:])
    finally:
        await cluster.shutdown()


def coordinator_seconds(made: protocols.TrainBatch) -> float:
    """Returns the CPU seconds of dividing a batch among many processes and pickling its outlines; a median."""
    spent = []
    for _ in range(ROUNDS):
        began = time.process_time()
        parts = dividing.divide(CONFIG, made, shares(ROWS))
        assert parts is not None
        pickle.dumps(parts[0].outlines, protocol=5)
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def outline_seconds(made: protocols.TrainBatch) -> float:
    """Returns the CPU seconds of a process that reads a batch's outlines and places them, without a token; a median."""
    parts = dividing.divide(CONFIG, made, shares(ROWS))
    assert parts is not None
    sent, spent = pickle.dumps(parts[0].outlines, protocol=5), []
    shape = model_config.load_preset("Qwen3-14B", "model")
    for _ in range(ROUNDS):
        began = time.process_time()
        joined = protocols.BatchPart(pickle.loads(sent), {}).joined()
        rollouts = [rollout for group in joined.groups for rollout in group.trajectories]
        packing.pack(sequences.examples(rollouts, VERSION, shape), CONFIG.trainer)
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def batch(groups: int, turns: int) -> protocols.TrainBatch:
    """Returns a batch whose rollouts grew delta by delta as in a run; without turns, short ones."""
    drawn, made = random.Random(0), []
    for number in range(groups):
        task = protocols.Task(f"p{number}", {})
        rollouts = [_rollout(f"p{number}/{sample}", task.prompt_id, drawn, turns) for sample in range(SIZE)]
        made.append(protocols.Group(number, task, VERSION, rollouts))
    return protocols.TrainBatch(VERSION, tuple(made))


def _rollout(name: str, prompt_id: str, drawn: random.Random, turns: int) -> protocols.Trajectory:
    made = protocols.Trajectory(name, prompt_id, reward=1.0)
    if not turns:
        made.append_text([1], protocols.TokenSource.PROMPT)
        made.append_sampled(protocols.TokenDelta((2,), (-1.0,), (VERSION,)))
        return made
    made.append_text([drawn.randrange(VOCABULARY) for _ in range(PROMPT)], protocols.TokenSource.PROMPT)
    for _ in range(turns):
        for first in range(0, GENERATED, DELTA):
            count = min(DELTA, GENERATED - first)
            ids = tuple(drawn.randrange(VOCABULARY) for _ in range(count))
            made.append_sampled(
                protocols.TokenDelta(ids, tuple(-drawn.random() for _ in range(count)), (VERSION,) * count)
            )
        made.append_text([drawn.randrange(VOCABULARY) for _ in range(RETURNED)], protocols.TokenSource.TOOL)
        made.turns.append(protocols.Turn(GENERATED, "bash", "success", RETURNED, 1.0, 2.0))
    return made


if __name__ == "__main__":
    app.run(main)
