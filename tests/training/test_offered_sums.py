"""Gradient sums that a core is offered over a gradient channel: what is not what it asked for, it computes itself."""

import asyncio
import dataclasses
import threading

import hybrid_doubles as doubles
import jax
import numpy as np
import pytest

from libra_jax import protocols
from libra_jax.weights import gradient_channel


class Forger:
    """A training side's end of the channel in this process, which sends whatever a test likes."""

    def __init__(self, core, generation=1):
        address = asyncio.run(core.listen("r", generation))
        asyncio.run(core.connect("r", generation, address))
        self.address = address
        self.channel = gradient_channel.Channel(address, 1, 20)
        self.channel.wait(20)
        self._threads = []

    def send(self, *sums):
        """Sends headers with their arrays, one after the other, on a thread."""

        def work():
            try:
                for header, arrays in sums:
                    self.channel.send(header, arrays, 20)
            except gradient_channel.ChannelError:
                pass  # the core had enough

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def end(self):
        for thread in self._threads:
            thread.join(20)
        self.channel.close()


@pytest.fixture
def forge(pair, hybrid_config):
    """A forger that has joined the core, the step's batch, and the header and arrays of true sums."""
    core, _ = pair
    version = core._version
    doubles.publish(core, version)
    batch = doubles.batch(version)
    _, indices = doubles.ranges(hybrid_config, batch, [doubles.share()])
    arrays, report = doubles.sums(core, hybrid_config, batch, indices)
    digest = core.running().weights.digest(version)
    header = gradient_channel.Header(
        "r", 1, version, digest, indices.start, indices.stop, report["metrics"], report["maxima"]
    )
    forger = Forger(core)
    yield forger, batch, header, arrays
    forger.end()
    asyncio.run(core.dismiss("r"))


WRONG = {
    "version": lambda header: {"version": header.version + 1},
    "digest": lambda header: {"digest": "0" * 32},
    "generation": lambda header: {"generation": 2},
    "worker": lambda header: {"worker": "q"},
    "micro-batches": lambda header: {"first": header.first - 1},
}


@pytest.mark.parametrize("name", WRONG)
def test_sums_of_anything_else_are_refused_and_the_step_is_the_cores_own(pair, forge, name):
    core, alone = pair
    forger, batch, header, arrays = forge
    forger.send((dataclasses.replace(header, **WRONG[name](header)), [np.full_like(array, 1e9) for array in arrays]))
    metrics = core.train_step(batch, [doubles.share()])
    wanted = alone.train_step(batch)
    assert (metrics["shares/refused"], metrics["shares/late"], metrics["shares/micro_batches"]) == (2, 0, 0)
    # The worker that offered the sums was part of the step, with its devices.
    assert metrics.pop("train/devices") > wanted.pop("train/devices")
    # Row lengths are compiled in the background: how many there are, and the same, is seen when that has ended.
    assert metrics.pop("compiled_shapes") >= 1 <= wanted.pop("compiled_shapes")
    learners = [actor.running().learner for actor in pair]
    assert all(learner.ahead.wait(120.0) for learner in learners)
    first, second = ({(name, str(shapes)) for name, shapes in learner.programs.shapes} for learner in learners)
    assert first >= second, "the core has compiled what the other one has"
    assert {name: value for name, value in metrics.items() if not name.startswith("shares/")} == wanted
    doubles.assert_equal_params(core, alone)
    forger.end()
    doubles.eventually(lambda: doubles.refused(forger.address))
    again = doubles.batch(core._version)
    assert core.train_step(again, [doubles.share()])["shares/late"] == 2, "it was dismissed, and no one waits for it"
    alone.train_step(again)
    doubles.assert_equal_params(core, alone)


def test_a_loss_that_is_not_finite_is_not_believed(pair, forge):
    core, alone = pair
    forger, batch, header, arrays = forge
    forger.send((header, [np.full_like(array, np.nan) for array in arrays]))
    metrics = core.train_step(batch, [doubles.share()])
    assert (metrics["shares/refused"], metrics["skipped"]) == (2, 0)
    alone.train_step(batch)
    doubles.assert_equal_params(core, alone)


def test_sums_of_an_older_step_are_dropped_and_those_of_this_one_added(pair, forge, hybrid_config):
    core, alone = pair
    forger, batch, header, arrays = forge
    older = dataclasses.replace(header, version=header.version - 1)
    forger.send((older, [np.full_like(array, 1e9) for array in arrays]), (header, arrays))
    own, _ = doubles.ranges(hybrid_config, batch, [doubles.share()])
    before, _ = doubles.sums(core, hybrid_config, batch, own)
    wanted = float(before[-2] + arrays[-2]) / float(before[-1] + arrays[-1])
    metrics = core.train_step(batch, [doubles.share()])
    assert (metrics["shares/micro_batches"], metrics["shares/late"], metrics["shares/refused"]) == (2, 0, 0)
    assert metrics["loss"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["loss"] == pytest.approx(alone.train_step(batch)["loss"], rel=1e-4, abs=1e-7)
    _level(core, alone)


def _level(core, alone):
    """Gives both the same state again, after a step whose sums were added in another order."""
    alone.running().learner.state = jax.tree.map(lambda leaf: leaf.copy(), core.running().learner.state)


def test_a_connection_that_breaks_in_the_middle_of_a_sum_is_late(pair, forge, monkeypatch):
    core, alone = pair
    forger, batch, header, arrays = forge
    monkeypatch.setattr(gradient_channel, "PART_BYTES", 1000)
    pass_, parts = gradient_channel.Channel._pass, []

    def break_off(channel, verb, message, deadline):
        pass_(channel, verb, message, deadline)
        if channel is forger.channel:
            parts.append(verb)
            if len(parts) == 3:
                channel.close("it broke")

    monkeypatch.setattr(gradient_channel.Channel, "_pass", break_off)
    forger.send((header, arrays))
    metrics = core.train_step(batch, [doubles.share()])
    assert len(parts) == 3
    assert (metrics["shares/late"], metrics["shares/refused"]) == (2, 0)
    alone.train_step(batch)
    doubles.assert_equal_params(core, alone)


def test_a_replica_that_never_comes_is_late_and_leaves_neither_port_nor_thread(pair, monkeypatch):
    core, alone = pair
    doubles.publish(core, core._version)
    address = asyncio.run(core.listen("r", 5))
    asyncio.run(core.connect("r", 5, address))
    doubles.hurry(monkeypatch, core, 0.1)
    batch = doubles.batch(core._version)
    assert core.train_step(batch, [doubles.share(5)])["shares/late"] == 2
    alone.train_step(batch)
    doubles.assert_equal_params(core, alone)
    doubles.eventually(lambda: doubles.refused(address))
    doubles.eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("connect to")])


def test_parameters_that_were_not_published_are_nobodys(pair, forge):
    core, alone = pair
    forger, batch, header, arrays = forge
    core.train_step(batch)
    alone.train_step(batch)
    batch = doubles.batch(core._version)  # of a version that only the core has
    forger.send((dataclasses.replace(header, version=core._version), arrays))
    assert core.train_step(batch, [doubles.share()])["shares/refused"] == 2
    alone.train_step(batch)
    doubles.assert_equal_params(core, alone)


def test_what_the_step_raises_leaves_the_trainer_as_it_was(pair, forge):
    core, alone = pair
    _, batch, _, _ = forge
    with pytest.raises(protocols.ConfigError, match="leave a part to the core"):
        core.train_step(batch, [doubles.share(fraction=0.6), doubles.share(worker="q", fraction=0.4)])
    core.train_step(batch)
    alone.train_step(batch)
    doubles.assert_equal_params(core, alone)


def test_an_address_of_another_member_or_epoch_is_refused(pair):
    core, _ = pair
    address = asyncio.run(core.listen("r", 8))
    for worker, generation in (("q", 8), ("r", 9)):
        with pytest.raises(
            protocols.LibraError, match=r"gradient channel of r \(generation 8, 2 ends\) is not the one"
        ):
            asyncio.run(core.connect(worker, generation, address))
    asyncio.run(core.dismiss("r"))
    doubles.eventually(lambda: doubles.refused(address))
