"""A hybrid replica in another process and the core that it helps, against a core that trains alone."""

import asyncio
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import connection

import hybrid_doubles as doubles
import numpy as np
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import batch as batch_lib
from libra_jax.training import learner as learner_lib
from libra_jax.training import training_side
from libra_jax.weights import gradient_channel

SCRIPT = pathlib.Path(__file__).parent / "training_side_process.py"
SECONDS = 120
"""Deadline of a call to the replica's process."""


class RemoteTrainingSide:
    """A training side's process. Calls return at once; `result` waits for the answer of the last one."""

    def __init__(self, config):
        here, there = socket.socketpair()
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(there.fileno())], pass_fds=[there.fileno()], env=environment
        )
        there.close()
        self._calls = connection.Connection(here.detach())
        self._calls.send((config_lib.to_dict(config), "r"))

    def begin(self, method, *arguments):
        self._calls.send((method, arguments))

    def result(self):
        assert self._calls.poll(SECONDS), "the training side did not answer in time"
        value, error = self._calls.recv()
        if error is not None:
            raise protocols.LibraError(error)
        return value

    def __call__(self, method, *arguments):
        self.begin(method, *arguments)
        return self.result()

    def end(self):
        self._calls.close()
        self.process.kill()
        self.process.wait(20)


@pytest.fixture(scope="module")
def remote(hybrid_config, small):
    """A started training side's process, which several tests use."""
    made = RemoteTrainingSide(hybrid_config)
    info = made("start")
    assert info.mesh == {"data": 1, "fsdp": 1, "tensor": 1, "context": 2}
    made("init_weight_transfer", {"kind": "memfd"})
    yield made
    made("shutdown")
    made.end()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_replicas_sums_are_those_that_the_core_computes(start_core, remote, hybrid_config):
    core = start_core()
    batch, given = doubles.batch(0), [doubles.share(generation=3)]
    doubles.publish(core, 0, remote)
    remote("warm")
    listener = gradient_channel.ChannelListener("r", 3, ranks=2)
    channel = gradient_channel.Channel(listener.address, 0, SECONDS, listener)
    remote("join", 3, listener.address)
    remote.begin("contribute", batch, given)
    header, arrays = channel.receive(doubles.array_kinds(core), SECONDS)
    told = remote.result()
    own, indices = doubles.ranges(hybrid_config, batch, given)
    assert (len(own), len(indices)) == (4, 2)
    assert (header.first, header.last, header.version, header.generation) == (4, 6, 0, 3)
    assert header.digest == core.running().weights.digest(0)
    assert told["micro_batches"] == 2
    assert told["bytes"] == sum(array.nbytes for array in arrays) + gradient_channel.HEADER_BYTES
    wanted, report = doubles.sums(core, hybrid_config, batch, indices)
    scale = max(np.abs(leaf).max() for leaf in wanted)
    assert scale > 1e-3
    for array, leaf in zip(arrays, wanted, strict=True):
        np.testing.assert_allclose(array, leaf, atol=1e-5 * max(1.0, scale), rtol=1e-5)
    assert header.metrics.keys() == report["metrics"].keys()
    for name, pair in report["metrics"].items():
        assert header.metrics[name] == pytest.approx(pair, rel=1e-4, abs=1e-5), name
    assert header.maxima == pytest.approx(report["maxima"], rel=1e-4)
    channel.close()
    with pytest.raises(protocols.LibraError, match=r"the connection broke"):
        remote("contribute", batch, given)
    remote("leave")
    with pytest.raises(protocols.LibraError, match="r holds policy version None, and the batch is for 0"):
        remote("contribute", batch, given)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_thirty_steps_with_a_replica_that_comes_and_goes_twice_learn_as_the_core_does_alone(start_core, remote):
    core, alone = start_core(), start_core()
    losses, wanted, helped = [], [], 0
    for version in range(30):
        batch = doubles.batch(version)
        wanted.append(alone.train_step(batch)["loss"])
        period, generation = version % 15, 10 + version // 15
        given = [doubles.share(generation, 0.3 + 0.05 * (version // 15))] if 3 <= period < 12 else []
        if version % 2:  # a streamed step, of which the replica takes a share of the rest
            core.accumulate(batch.of((4, 1)))
            batch = dataclasses.replace(batch, begun=(4, 1))
        if given:
            doubles.publish(core, version, remote)
            if period == 3:
                doubles.admit(core, remote, generation)
            remote.begin("contribute", batch, given)
        metrics = core.train_step(batch, given)
        losses.append(metrics["loss"])
        if given:
            told = remote.result()
            assert metrics["shares/micro_batches"] == told["micro_batches"] > 0
            assert metrics["shares/late"] == metrics["shares/refused"] == 0
            assert metrics["shares/bytes"] == told["bytes"] - gradient_channel.HEADER_BYTES
            helped += 1
        else:
            assert not [name for name in metrics if name.startswith("shares/")]
        if period == 11:
            asyncio.run(core.dismiss("r"))
            remote("leave")
    assert helped == 18
    assert max(wanted) - min(wanted) > 1e-2, "it has to learn something"
    typical = float(np.mean(np.abs(wanted)))
    np.testing.assert_allclose(losses, wanted, rtol=1e-3, atol=1e-4 * typical)  # a policy loss crosses zero


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_replica_that_stands_still_or_is_killed_is_late_and_the_step_is_the_cores_own(
    pair, hybrid_config, small, monkeypatch
):
    core, alone = pair
    remote = RemoteTrainingSide(hybrid_config)
    remote("start")
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):
        version = core._version
        generation = 20 + version
        batch, given = doubles.batch(version), [doubles.share(generation)]
        doubles.publish(core, version)
        address = doubles.admit(core, remote, generation)
        remote.process.send_signal(signal_number)
        if signal_number == signal.SIGKILL:
            assert remote.process.wait(20) == -9
        else:
            doubles.hurry(monkeypatch, core, 0.3)
        metrics = core.train_step(batch, given)
        monkeypatch.undo()
        assert (metrics["shares/late"], metrics["shares/micro_batches"], metrics["shares/bytes"]) == (2, 0, 0)
        alone.train_step(batch)
        doubles.assert_equal_params(core, alone)
        doubles.eventually(lambda address=address: doubles.refused(address))
        if signal_number == signal.SIGSTOP:
            remote.process.send_signal(signal.SIGCONT)
    remote.end()


def test_a_replica_without_a_part_in_the_step_says_why(hybrid_config):
    actor = training_side.create(config_lib.to_dict(hybrid_config), workdir="unused", name="r")
    with pytest.raises(protocols.LibraError, match="hybrid worker r is not running: call start first"):
        actor.contribute(doubles.batch(0), [doubles.share()])
    assert actor.start().mesh["data"] == 1
    with pytest.raises(protocols.LibraError, match="r holds policy version None, and the batch is for 0"):
        actor.contribute(doubles.batch(0), [doubles.share()])
    actor._version = 0
    listener = gradient_channel.ChannelListener("r", 4, ranks=2)
    with pytest.raises(
        protocols.LibraError, match=r"gradient channel of r \(generation 4\) is not that of r in generation 5"
    ):
        actor.join(5, listener.address)
    with pytest.raises(protocols.LibraError, match="r has no part in this step: it has not joined"):
        actor.contribute(doubles.batch(0), [doubles.share(4)])
    core = gradient_channel.Channel(listener.address, 0, 20, listener)
    actor.join(4, listener.address)
    for given in ([doubles.share(5)], [doubles.share(4, worker="q")]):
        with pytest.raises(protocols.LibraError, match="r has no part in this step"):
            actor.contribute(doubles.batch(0), given)
    nothing = {"seconds": 0.0, "bytes": 0.0, "micro_batches": 0.0}
    assert actor.contribute(doubles.batch(0), [doubles.share(4, 0.01)]) == nothing, "less than half a micro-batch"
    actor.leave()
    actor.shutdown()
    core.close()


def test_the_seconds_of_a_share_go_from_the_batch_to_the_end_of_the_sending_without_the_wait_for_the_core(
    hybrid_config, monkeypatch
):
    class Slow:
        generation, closed = 4, ""

        def send(self, header, arrays, seconds):
            time.sleep(0.6)
            return gradient_channel.SendCost(10, waited=0.4)

        def close(self, why):
            pass

    actor = training_side.create(config_lib.to_dict(hybrid_config), workdir="unused", name="r")
    actor.start()
    actor._version, actor._channel = 0, Slow()
    readies = batch_lib.prepare

    def slowly(*arguments):
        time.sleep(0.3)
        return readies(*arguments)

    monkeypatch.setattr(batch_lib, "prepare", slowly)
    monkeypatch.setattr(learner_lib.Learner, "sums", lambda *_: ([], {"metrics": {}, "maxima": {}}))
    began = time.monotonic()
    told = actor.contribute(doubles.batch(0), [doubles.share(4)])
    assert 0.5 <= told["seconds"] <= time.monotonic() - began - 0.4
    assert told["bytes"] == 10
    actor.shutdown()


def test_a_closed_trainer_leaves_no_port(start_core):
    core = start_core()
    addresses = [asyncio.run(core.listen("r", 1)), asyncio.run(core.listen("q", 1))]
    asyncio.run(core.connect("q", 1, addresses[1]))
    core.shutdown()
    asyncio.run(core.dismiss("q"))
    for address in addresses:
        doubles.eventually(lambda address=address: doubles.refused(address))
