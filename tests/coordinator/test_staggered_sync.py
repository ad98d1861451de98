"""Weight syncs in which some engines of a host go on while others take the new version (`rollout.sync_at_once`)."""

from __future__ import annotations

import asyncio

import coordinator_doubles as doubles
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import fake_engine

GATHER, LOAD, CHUNKS, ENGINES, STEPS = 0.5, 0.1, 3, 4, 3


class Gathering(doubles.RecordingTrainer):
    """Takes a while for each chunk."""

    async def stage_weights(self, policy_version, index):
        await asyncio.sleep(GATHER)
        return await super().stage_weights(policy_version, index)


class Loading(fake_engine.FakeEngine):
    """Takes a while to load a chunk."""

    def __init__(self, name: str) -> None:
        super().__init__(name, doubles.chatter, 4, 256, 1, 2, 200.0, None)

    async def update_weights(self, chunk):
        await asyncio.sleep(LOAD)
        await super().update_weights(chunk)


def run(tmp_path, at_once):
    """Returns the bench after its run, and for each sync when each engine stopped and went on."""
    config = doubles.make_config(steps=STEPS, rollout={"sync_at_once": at_once}, coordinator={"max_staleness": 1})
    specs = [
        protocols.ActorSpec(f"e{number}", f"{__name__}:Loading", {"name": f"e{number}"}) for number in range(ENGINES)
    ]
    bench = doubles.Bench(config, tmp_path, specs=specs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubles, "make_trainer", lambda log: Gathering(0.05, CHUNKS, log))
        bench.run()
    syncs: dict[int, list[tuple[float, float]]] = {}
    for track, name, start, end, arguments in bench.recorder.spans:
        if track == "weights" and name.startswith("sync e"):
            syncs.setdefault(arguments["policy_version"], []).append((start, end))
    return bench, syncs


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_more_engines_stop_at_once_and_all_take_every_version(tmp_path, at_once):
    bench, syncs = run(tmp_path, at_once)
    assert list(syncs) == list(range(STEPS + 1))
    for paused in syncs.values():
        assert len(paused) == ENGINES
        for start, _ in paused:
            assert sum(begin <= start < end for begin, end in paused) <= at_once
    assert len(bench.trained["prompts"]) == len(set(bench.trained["prompts"])) == 3 * STEPS


def test_engines_after_the_first_stop_for_the_load_alone(tmp_path):
    together, apart = (run(tmp_path / str(at_once), at_once)[0] for at_once in (0, 1))
    paused, alone = (
        [metrics["sync/paused_seconds"] for _, metrics in bench.recorder.steps if "sync/paused_seconds" in metrics]
        for bench in (together, apart)
    )
    # The first stops with the first chunk, so it waits for the others, and loads the last one.
    first = (CHUNKS - 1) * GATHER + LOAD
    assert paused == pytest.approx([first] * STEPS)
    assert alone == pytest.approx([(first + (ENGINES - 1) * CHUNKS * LOAD) / ENGINES] * STEPS)


def test_other_transports_are_refused_by_name():
    with pytest.raises(protocols.ConfigError, match=r"rollout\.sync_at_once: .*nccl; leave it at 0"):
        config_lib.RunConfig(rollout=config_lib.RolloutConfig(transport="nccl", sync_at_once=1))
