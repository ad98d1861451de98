"""Calls between rooms are typed: mypy refuses a wrong method, keyword or argument at each client, and a double's too.

Each seam has calls that are right and calls that are wrong. One run of mypy checks all of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from mypy import api

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent

IMPORTS = """
from libra_jax import protocols
from libra_jax.coordinator import elasticity, instances, parts, saving
from libra_jax.hybrid import hybrid, transitions
from libra_jax.engines import client as engines_client
from libra_jax.trainer_control import client, handover, recovery, resize
from libra_jax.weights import relay_tree; from libra_jax.coordinator import weight_sync as sync
"""


@dataclasses.dataclass(frozen=True)
class Seam:
    """A typed seam.

    Attributes:
      name: of the seam.
      given: the names and types that a call uses.
      right: expressions that are allowed.
      wrong: expressions that are not, each with a part of mypy's sentence.
    """

    name: str
    given: str
    right: Sequence[str]
    wrong: Sequence[tuple[str, str]]


def trainer_calls(of: str) -> tuple[Sequence[str], Sequence[tuple[str, str]]]:
    """Right and wrong calls of a trainer's client."""
    right = [
        f"await {of}.train_step(batch)",
        f"await {of}.train_step(batch, shares=[])",
        f"(await {of}.open_weights(3)) + 1",
        f"(await {of}.restore('path')) + 1",
    ]
    wrong = [
        (f"await {of}.train_stepp(batch)", "has no attribute"),
        (f"await {of}.train_step(batch, share=[])", "Unexpected keyword"),
        (f"await {of}.train_step([batch])", "has incompatible type"),
        (f"await {of}.open_weights('3')", "has incompatible type"),
        (f"(await {of}.restore('path')).step", "has no attribute"),
        (f"await {of}.stage_weights(3)", "argument"),
        (f"await {of}.lock.aquire()", "has no attribute"),
    ]
    return right, wrong


SEAMS = [
    Seam(
        "cluster",
        "actor: protocols.ActorHandle, batch: protocols.TrainBatch, cluster: protocols.Cluster, "
        "spec: protocols.ActorSpec",
        [
            "await actor.call(protocols.Trainer.train_step, batch, shares=())",
            "(await actor.call(protocols.Trainer.restore, 'path')) + 1",
            "(await cluster.spawn(spec)).name",
        ],
        [
            ("await actor.train_step(batch)", "has no attribute"),
            ("await actor.call('train_step', batch)", "has incompatible type"),
            ("await actor.call(protocols.Trainer.train_stepp, batch)", "has no attribute"),
            ("await actor.call(protocols.Trainer.train_step, batch, share=())", "Unexpected keyword"),
            ("await actor.call(protocols.Trainer.restore, 3)", "has incompatible type"),
            ("actor.stream(protocols.Trainer.restore, 'path')", "has incompatible type"),
            ("await (await cluster.spawn(spec)).train_step(batch)", "has no attribute"),
        ],
    ),
    Seam(
        "trainer's protocol", "trainer: protocols.TrainerClient, batch: protocols.TrainBatch", *trainer_calls("trainer")
    ),
    Seam(
        "trainer's client", "trainer: client.TrainerActorClient, batch: protocols.TrainBatch", *trainer_calls("trainer")
    ),
    Seam("run's trainer", "run: parts.RunParts, batch: protocols.TrainBatch", *trainer_calls("run.trainer")),
    Seam("workers' trainer", "run: parts.RunWorkers, batch: protocols.TrainBatch", *trainer_calls("run.trainer")),
    *(
        Seam(f"trainer of {room}", f"part: {room}, batch: protocols.TrainBatch", *trainer_calls(f"part.{trainer}"))
        for room, trainer in (
            ("elasticity.Elasticity", "_trainer"),
            ("recovery.Recovery", "_trainer"),
            ("resize.Inside", "trainer"),
            ("resize.Resizing", "_trainer"),
            ("saving.Saver", "_trainer"),
            ("transitions.Transitions", "_trainer"),
        )
    ),
    *(
        Seam(
            f"{end} trainer of a hand-over", "part: handover.Handover, batch: protocols.TrainBatch", *trainer_calls(of)
        )
        for end, of in (("serving", "part._serving"), ("succeeding", "part._successor"))
    ),
    *(
        Seam(
            f"hybrid worker's {kind}",
            f"replica: {kind}, batch: protocols.TrainBatch",
            [
                "await replica.contribute(batch, [])",
                "await replica.join(1, {'port': 80})",
                "await replica.join(generation=1, address={})",
            ],
            [
                ("await replica.contribut(batch, [])", "has no attribute"),
                ("await replica.contribute(batch, share=[])", "Unexpected keyword"),
                ("await replica.contribute([batch], [])", "has incompatible type"),
                ("await replica.join('1', {})", "has incompatible type"),
                ("await replica.train_step(batch)", "has no attribute"),
            ],
        )
        for kind in ("protocols.HybridClient", "client.HybridActorClient")
    ),
    *(
        Seam(
            f"engine's {kind}",
            f"engine: {kind}, request: protocols.GenerationRequest, chunk: protocols.WeightChunk",
            [
                "(await engine.start()).slots + 1",
                "await engine.generate(request).aclose()",
                "await engine.update_weights(chunk)",
                "await engine.start_weight_update(policy_version=3)",
                "(await engine.health())['running'] + 1",
            ],
            [
                ("await engine.start_weight_updates(3)", "has no attribute"),
                ("await engine.start_weight_update(version=3)", "Unexpected keyword"),
                ("await engine.start_weight_update('3')", "has incompatible type"),
                ("await engine.update_weights(chunk.entries)", "has incompatible type"),
                ("engine.generate([1, 2])", "has incompatible type"),
                ("await engine.sleep(20.0)", "Too many arguments"),
                ("(await engine.start()).slot", "has no attribute"),
            ],
        )
        for kind in ("protocols.EngineClient", "engines_client.EngineActorClient")
    ),
    *(
        Seam(
            f"relay's {kind}",
            f"relay: {kind}, chunk: protocols.WeightChunk",
            [
                "await relay.send(chunk, 'relay-1')",
                "(await relay.receive(chunk)).index + 1",
                "await relay.connect(child='relay-1', generation=2, address={})",
            ],
            [
                ("await relay.sends(chunk, 'relay-1')", "has no attribute"),
                ("await relay.send(chunk, to='relay-1')", "Unexpected keyword"),
                ("await relay.send('relay-1', chunk)", "has incompatible type"),
                ("await relay.listen('1')", "has incompatible type"),
                ("(await relay.receive(chunk)).number", "has no attribute"),
            ],
        )
        for kind in ("protocols.RelayClient", "relay_tree.RelayActorClient")
    ),
    Seam(
        "engine of the coordinator",
        "engine: instances.RolloutInstance, chunk: protocols.WeightChunk",
        ["assert engine.client and await engine.client.health()"],
        [
            ("assert engine.client and await engine.client.healthy()", "has no attribute"),
            ("await engine.client.update_weights(chunk)", "has no attribute"),
        ],
    ),
    Seam(
        "weight sync",
        "weights: sync.WeightSync, tree: relay_tree.RelayTree, source: protocols.WeightSource",
        ["(await weights.sync_weights(3)) + 1.0", "await source.stage_weights(3, index=0)", "tree.serve(2)"],
        [
            ("await weights.publish(3)", "has no attribute"),
            ("await weights.sync_weights('3')", "has incompatible type"),
            ("await source.stage_weights(3, number=0)", "Unexpected keyword"),
            ("await source.train_step(3)", "has no attribute"),
            ("await tree.ready('host-2')", "has incompatible type"),
        ],
    ),
    Seam(
        "resize",
        "resizing: resize.Resizing, sizes: protocols.MeshSizes",
        ["resizing.resize(sizes, 'why', hold=True).go()", "await resizing.resize(sizes, 'why').done"],
        [
            ("resizing.resize(4, 'why')", "has incompatible type"),
            ("resizing.resize(sizes, 'why', held=True)", "Unexpected keyword"),
            ("resizing.resize(sizes, 'why').start()", "has no attribute"),
        ],
    ),
    Seam(
        "recovery",
        "lost: recovery.Recovery, saver: saving.Saver",
        ["await lost.through(saver.commit)"],
        [
            ("await lost.through(saver.commit())", "has incompatible type"),
            ("await lost.trough(saver.commit)", "has no attribute"),
        ],
    ),
    Seam(
        "events",
        "events: protocols.Events, saver: saving.Saver",
        ["events.subscribe(protocols.TrainerReplaced, lambda event: print(event.lost))"],
        [
            ("events.subscribe(protocols.TrainerReplaced, lambda event: print(event.step))", "has no attribute"),
            ("events.subscribe(protocols.TrainerReplacd, print)", "has no attribute"),
        ],
    ),
]

DOUBLES = [
    ("libra_jax.simulator.trainer", "SimulatedTrainer", "protocols.Trainer"),
    ("libra_jax.simulator.training_side", "SimulatedTrainingSide", "protocols.TrainingSide"),
    ("libra_jax.simulator.engine", "SimulatedEngine", "protocols.RolloutEngine"),
    ("libra_jax.engines.fake_engine", "FakeEngine", "protocols.RolloutEngine"),
    ("libra_jax.engines.client", "EngineActorClient", "protocols.EngineClient"),
    ("libra_jax.weights.relay_tree", "RelayActorClient", "protocols.RelayClient"),
    ("relay_doubles", "Relay", "protocols.Relay"),
    ("coordinator_doubles", "RecordingTrainer", "protocols.Trainer"),
    ("mortal_trainers", "Trainer", "protocols.Trainer"),
    ("movable_trainers", "Trainer", "protocols.TrainerProcess"),
    ("libra_jax.trainer_control.client", "TrainerActorClient", "protocols.TrainerClient"),
    ("libra_jax.trainer_control.client", "HybridActorClient", "protocols.HybridClient"),
    ("gateway_doubles", "Scripted", "protocols.Conversation"),
    ("gateway_doubles", "Scripts", "protocols.Conversations"),
]
"""Module, class, and the protocol that it has to have every method of."""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says against each expression and each double."""
    lines, subjects = [*IMPORTS.strip().splitlines(), ""], {}
    for number, seam in enumerate(SEAMS):
        for order, expression in enumerate([*seam.right, *(wrong for wrong, _ in seam.wrong)]):
            lines += [f"async def seam_{number}_{order}({seam.given}) -> None:", f"    {expression}", ""]
            subjects[len(lines) - 1] = f"{seam.name}: {expression}"
    for number, (module, name, protocol) in enumerate(DOUBLES):
        lines += [
            f"import {module} as double_{number}",
            f"conforms_{number}: type[{protocol}] = double_{number}.{name}",
        ]
        subjects[len(lines)] = f"{module}.{name}"
    file = tmp_path_factory.mktemp("seams") / "planted.py"
    file.write_text("\n".join(lines) + "\n")
    paths = [ROOT, *(ROOT / "tests" / room for room in ("coordinator", "harness", "trainer_control"))]
    before, folder = os.environ.get("MYPYPATH"), os.getcwd()
    os.environ["MYPYPATH"] = os.pathsep.join(map(str, paths))
    os.chdir(ROOT)
    try:
        said, failed, _ = api.run(["--config-file", "pyproject.toml", "--no-error-summary", str(file)])
    finally:
        os.chdir(folder)
        os.environ.pop("MYPYPATH") if before is None else os.environ.update(MYPYPATH=before)
    assert not failed, failed
    found: dict[str, list[str]] = {subject: [] for subject in subjects.values()}
    for line in said.splitlines():
        if planted := re.match(r".*planted\.py:(\d+): error: (.*)", line):
            found[subjects[int(planted[1])]].append(planted[2])
    return found


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_wrong_method_keyword_or_argument_is_refused_and_a_right_one_is_not(refused, seam):
    for expression in seam.right:
        assert refused[f"{seam.name}: {expression}"] == []
    for expression, sentence in seam.wrong:
        assert sentence in " ".join(refused[f"{seam.name}: {expression}"]), expression


@pytest.mark.parametrize("double", DOUBLES, ids=lambda case: f"{case[0]}.{case[1]}")
def test_clients_and_doubles_have_every_method_of_their_protocol(refused, double):
    assert refused[f"{double[0]}.{double[1]}"] == []
