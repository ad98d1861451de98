"""A hybrid replica in another process and the core that it helps, against a core that trains alone."""

import asyncio
import dataclasses
import functools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import connection

import jax
import numpy as np
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.interop import side_channel
from libra_jax.models import hf
from libra_jax.training import learner as learner_lib
from libra_jax.training import members, prepare, replica, shares, trainer

SCRIPT = pathlib.Path(__file__).parent / "replica_process.py"
SECONDS = 120
"""Deadline of a call to the replica's process."""


class RemoteReplica:
    """A replica's process. Calls return at once; `result` waits for the answer of the last one."""

    def __init__(self, config, fast):
        here, there = socket.socketpair()
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(there.fileno())], pass_fds=[there.fileno()], env=environment
        )
        there.close()
        self._calls = connection.Connection(here.detach())
        self._calls.send((config_lib.to_dict(config), "r", fast))

    def begin(self, method, *arguments):
        self._calls.send((method, arguments))

    def result(self):
        assert self._calls.poll(SECONDS), "the replica did not answer in time"
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
def config(small, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small"
    hf.save(small.params, small.shape, path)
    made = small.config(
        trainer={"data": 2, "fsdp": 2, "rows_per_micro_batch": 4, "row_buckets": (64,), "pack": False},
        model={"path": str(path)},
        optimizer=config_lib.OptimizerConfig(learning_rate=1e-3, eps=1e-6),
        elastic=config_lib.ElasticConfig(hybrid=0, late_seconds=SECONDS),
        steps=100,
    )
    rollout = dataclasses.replace(made.rollout, tensor_parallel=(1, 1))
    elastic = dataclasses.replace(made.elastic, hybrid=1)
    return dataclasses.replace(made, rollout=rollout, elastic=elastic)


@pytest.fixture(scope="module")
def start(config, small):
    """Makes and starts trainers, compiled fast; shuts them down in the end."""
    running = []

    def make():
        with pytest.MonkeyPatch.context() as patch:
            fast = functools.partial(learner_lib.Learner, compiler_options=small.fast)
            patch.setattr(learner_lib, "Learner", fast)
            made = trainer.create(config_lib.to_dict(config), workdir="unused")
            running.append(made)
            made.start()
        return made

    yield make
    for made in running:
        made.shutdown()


@pytest.fixture(scope="module")
def pair(start):
    """A core, and one that trains alone; tests step both."""
    return start(), start()


@pytest.fixture(scope="module")
def remote(config, small):
    """A started replica's process, which several tests use."""
    made = RemoteReplica(config, small.fast)
    info = made("start")
    assert info.mesh == {"data": 1, "fsdp": 2, "tensor": 1, "context": 1}
    made("init_weight_transfer", {"kind": "memfd"})
    yield made
    made("shutdown")
    made.end()


def _trajectory(name, rng, version):
    trajectory = protocols.Trajectory(trajectory_id=name, prompt_id=name.split("/")[0])
    trajectory.append_text(rng.integers(0, 16, 3).tolist(), protocols.TokenSource.PROMPT)
    count = int(rng.integers(4, 20))
    log_probs = tuple(rng.normal(-np.log(16), 0.2, count).tolist())
    tokens = tuple(rng.integers(0, 16, count).tolist())
    trajectory.append_sampled(protocols.TokenDelta(tokens, log_probs, (version,) * count))
    # For even tokens, so that there is something to learn and the loss is not all noise.
    trajectory.reward = float(np.mean(np.array(tokens) % 2 == 0))
    return trajectory


def _batch(version):
    rng = np.random.default_rng(version)
    groups = tuple(
        protocols.Group(
            group_id=number,
            task=protocols.Task(f"p{number}", {}),
            dispatch_version=version,
            trajectories=[_trajectory(f"p{number}/{index}", rng, version) for index in range(4)],
        )
        for number in range(6)
    )
    return protocols.TrainBatch(version, groups)


def _share(epoch=1, fraction=0.4, member="r"):
    return protocols.Share(member, epoch, fraction)


def _publish(core, version, remote=None):
    """Publishes a version, to a replica or to nobody."""
    count = core.open_weights(version)
    buckets = [core.stage_weights(version, index) for index in range(count)]
    if remote is not None:
        remote("start_weight_update", version)
        for bucket in buckets:
            remote("update_weights", bucket)
        remote("finish_weight_update", version)
    core.close_weights(version)


def _admit(core, remote, epoch):
    address = asyncio.run(core.listen("r", epoch))
    asyncio.run(core.connect("r", epoch, address))
    remote("join", epoch, address)
    return address


def _params(core):
    return [np.array(leaf) for leaf in jax.tree.leaves(core._started().params)]


def _assert_equal_params(core, alone):
    for leaf, wanted in zip(_params(core), _params(alone), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


def _refused(address):
    with socket.socket() as probe:
        return probe.connect_ex((address["host"], address["port"])) != 0


def _eventually(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def _sums(core, config, batch, indices):
    """Sums over some micro-batches, computed by the core itself."""
    learner = core._started()
    prepared = prepare.prepare(config, batch, 16)
    sums, report = learner.sums(learner_lib.POLICY, learner.params, prepared.packed, prepared.extras, indices)
    return [np.array(leaf) for leaf in jax.tree.leaves(sums)], report


def _ranges(config, batch, given):
    return shares.split(prepare.prepare(config, batch, 16).work, given)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_replicas_sums_are_those_that_the_core_computes(start, remote, config):
    core = start()
    batch, given = _batch(0), [_share(epoch=3)]
    _publish(core, 0, remote)
    remote("warm")
    listener = side_channel.Listener("r", 3, ranks=2)
    channel = side_channel.Channel(listener.address, 0, SECONDS, listener)
    remote("join", 3, listener.address)
    remote.begin("contribute", batch, given)
    header, arrays = channel.receive(members.array_kinds(core._started().layout.accumulator), SECONDS)
    told = remote.result()
    own, indices = _ranges(config, batch, given)
    assert (len(own), len(indices)) == (4, 2)
    assert (header.first, header.last, header.version, header.epoch) == (4, 6, 0, 3)
    assert header.digest == core._publisher.digest(0)
    assert told["micro_batches"] == 2
    assert told["bytes"] == sum(array.nbytes for array in arrays) + side_channel.HEADER_BYTES
    wanted, report = _sums(core, config, batch, indices)
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
def test_sixty_steps_with_a_replica_that_comes_and_goes_four_times_learn_as_the_core_does_alone(start, remote):
    core, alone = start(), start()
    losses, wanted, helped = [], [], 0
    for version in range(60):
        batch = _batch(version)
        wanted.append(alone.train_step(batch)["loss"])
        period, epoch = version % 15, 10 + version // 15
        given = [_share(epoch, 0.3 + 0.05 * (version // 15))] if 3 <= period < 12 else []
        if given:
            _publish(core, version, remote)
            if period == 3:
                _admit(core, remote, epoch)
            remote.begin("contribute", batch, given)
        metrics = core.train_step(batch, given)
        losses.append(metrics["loss"])
        if given:
            told = remote.result()
            assert metrics["shares/micro_batches"] == told["micro_batches"] > 0
            assert metrics["shares/late"] == metrics["shares/refused"] == 0
            assert metrics["shares/bytes"] == told["bytes"] - side_channel.HEADER_BYTES
            helped += 1
        else:
            assert not [name for name in metrics if name.startswith("shares/")]
        if period == 11:
            asyncio.run(core.dismiss("r"))
            remote("leave")
    assert helped == 36
    assert max(wanted) - min(wanted) > 1e-2, "it has to learn something"
    typical = float(np.mean(np.abs(wanted)))
    np.testing.assert_allclose(losses, wanted, rtol=1e-3, atol=1e-4 * typical)  # a policy loss crosses zero


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_replica_that_stands_still_or_is_killed_is_late_and_the_step_is_the_cores_own(
    pair, config, small, monkeypatch
):
    core, alone = pair
    remote = RemoteReplica(config, small.fast)
    remote("start")
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):
        version = core._version
        epoch = 20 + version
        batch, given = _batch(version), [_share(epoch)]
        _publish(core, version)
        address = _admit(core, remote, epoch)
        remote.process.send_signal(signal_number)
        if signal_number == signal.SIGKILL:
            assert remote.process.wait(20) == -9
        else:
            monkeypatch.setattr(members.Members, "late_after", lambda self, own_seconds: 0.3)
        metrics = core.train_step(batch, given)
        monkeypatch.undo()
        assert (metrics["shares/late"], metrics["shares/micro_batches"], metrics["shares/bytes"]) == (2, 0, 0)
        alone.train_step(batch)
        _assert_equal_params(core, alone)
        _eventually(lambda address=address: _refused(address))
        if signal_number == signal.SIGSTOP:
            remote.process.send_signal(signal.SIGCONT)
    remote.end()


class Forger:
    """A replica's end of the channel in this process, which sends whatever a test likes."""

    def __init__(self, core, epoch=1):
        address = asyncio.run(core.listen("r", epoch))
        asyncio.run(core.connect("r", epoch, address))
        self.address = address
        self.channel = side_channel.Channel(address, 1, 20)
        self.channel.wait(20)
        self._threads = []

    def send(self, *sums):
        """Sends headers with their arrays, one after the other, on a thread."""

        def work():
            try:
                for header, arrays in sums:
                    self.channel.send(header, arrays, 20)
            except side_channel.SideChannelError:
                pass  # the core had enough

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def end(self):
        for thread in self._threads:
            thread.join(20)
        self.channel.close()


@pytest.fixture
def forge(pair, config):
    """A forger that has joined the core, the step's batch, and the header and arrays of true sums."""
    core, _ = pair
    version = core._version
    _publish(core, version)
    batch = _batch(version)
    _, indices = _ranges(config, batch, [_share()])
    arrays, report = _sums(core, config, batch, indices)
    digest = core._publisher.digest(version)
    header = side_channel.Header(
        "r", 1, version, digest, indices.start, indices.stop, report["metrics"], report["maxima"]
    )
    forger = Forger(core)
    yield forger, batch, header, arrays
    forger.end()
    asyncio.run(core.dismiss("r"))


WRONG = {
    "version": lambda header: {"version": header.version + 1},
    "digest": lambda header: {"digest": "0" * 32},
    "epoch": lambda header: {"epoch": 2},
    "member": lambda header: {"member": "q"},
    "micro-batches": lambda header: {"first": header.first - 1},
}


@pytest.mark.parametrize("name", WRONG)
def test_sums_of_anything_else_are_refused_and_the_step_is_the_cores_own(pair, forge, name):
    core, alone = pair
    forger, batch, header, arrays = forge
    forger.send((dataclasses.replace(header, **WRONG[name](header)), [np.full_like(array, 1e9) for array in arrays]))
    metrics = core.train_step(batch, [_share()])
    wanted = alone.train_step(batch)
    assert (metrics["shares/refused"], metrics["shares/late"], metrics["shares/micro_batches"]) == (2, 0, 0)
    assert {name: value for name, value in metrics.items() if not name.startswith("shares/")} == wanted
    _assert_equal_params(core, alone)
    forger.end()
    _eventually(lambda: _refused(forger.address))
    again = _batch(core._version)
    assert core.train_step(again, [_share()])["shares/late"] == 2, "it was dismissed, and nobody waits for it"
    alone.train_step(again)
    _assert_equal_params(core, alone)


def test_a_loss_that_is_not_finite_is_not_believed(pair, forge):
    core, alone = pair
    forger, batch, header, arrays = forge
    forger.send((header, [np.full_like(array, np.nan) for array in arrays]))
    metrics = core.train_step(batch, [_share()])
    assert (metrics["shares/refused"], metrics["skipped"]) == (2, 0)
    alone.train_step(batch)
    _assert_equal_params(core, alone)


def test_sums_of_an_older_step_are_dropped_and_those_of_this_one_added(pair, forge, config):
    core, alone = pair
    forger, batch, header, arrays = forge
    older = dataclasses.replace(header, version=header.version - 1)
    forger.send((older, [np.full_like(array, 1e9) for array in arrays]), (header, arrays))
    own, _ = _ranges(config, batch, [_share()])
    before, _ = _sums(core, config, batch, own)
    wanted = float(before[-2] + arrays[-2]) / float(before[-1] + arrays[-1])
    metrics = core.train_step(batch, [_share()])
    assert (metrics["shares/micro_batches"], metrics["shares/late"], metrics["shares/refused"]) == (2, 0, 0)
    assert metrics["loss"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["loss"] == pytest.approx(alone.train_step(batch)["loss"], rel=1e-4, abs=1e-7)
    _level(core, alone)


def _level(core, alone):
    """Gives both the same state again, after a step whose sums were added in another order."""
    alone._started().state = jax.tree.map(lambda leaf: leaf.copy(), core._started().state)


def test_a_connection_that_breaks_in_the_middle_of_a_sum_is_late(pair, forge, monkeypatch):
    core, alone = pair
    forger, batch, header, arrays = forge
    monkeypatch.setattr(side_channel, "PART_BYTES", 1000)
    until, parts = side_channel.Channel._until, []

    def break_off(channel, deadline, works):
        until(channel, deadline, works)
        if channel is forger.channel:
            parts.append(len(works))  # a work that is held would hold the connection
            if len(parts) == 3:
                channel.close("it broke")

    monkeypatch.setattr(side_channel.Channel, "_until", break_off)
    forger.send((header, arrays))
    metrics = core.train_step(batch, [_share()])
    assert len(parts) == 3
    assert (metrics["shares/late"], metrics["shares/refused"]) == (2, 0)
    alone.train_step(batch)
    _assert_equal_params(core, alone)


def test_a_replica_that_never_comes_is_late_and_leaves_neither_port_nor_thread(pair, monkeypatch):
    core, alone = pair
    _publish(core, core._version)
    address = asyncio.run(core.listen("r", 5))
    asyncio.run(core.connect("r", 5, address))
    monkeypatch.setattr(members.Members, "late_after", lambda self, own_seconds: 0.1)
    batch = _batch(core._version)
    assert core.train_step(batch, [_share(5)])["shares/late"] == 2
    alone.train_step(batch)
    _assert_equal_params(core, alone)
    _eventually(lambda: _refused(address))
    _eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("connect to")])


def test_parameters_that_were_not_published_are_nobodys(pair, forge):
    core, alone = pair
    forger, batch, header, arrays = forge
    core.train_step(batch)
    alone.train_step(batch)
    batch = _batch(core._version)  # of a version that only the core has
    forger.send((dataclasses.replace(header, version=core._version), arrays))
    assert core.train_step(batch, [_share()])["shares/refused"] == 2
    alone.train_step(batch)
    _assert_equal_params(core, alone)


def test_what_the_step_raises_leaves_the_trainer_as_it_was(pair, forge):
    core, alone = pair
    _, batch, _, _ = forge
    with pytest.raises(protocols.ConfigError, match="leave a part to the core"):
        core.train_step(batch, [_share(fraction=0.6), _share(member="q", fraction=0.4)])
    core.train_step(batch)
    alone.train_step(batch)
    _assert_equal_params(core, alone)


def test_a_replica_without_a_part_in_the_step_says_why(config):
    actor = replica.create(config_lib.to_dict(config), workdir="unused", name="r")
    with pytest.raises(protocols.LibraError, match="replica r is not running: call start first"):
        actor.contribute(_batch(0), [_share()])
    assert actor.start().mesh["data"] == 1
    with pytest.raises(protocols.LibraError, match="r holds policy version None, and the batch is for 0"):
        actor.contribute(_batch(0), [_share()])
    actor._version = 0
    listener = side_channel.Listener("r", 4, ranks=2)
    with pytest.raises(protocols.LibraError, match=r"side channel of r \(epoch 4\) is not that of r in epoch 5"):
        actor.join(5, listener.address)
    with pytest.raises(protocols.LibraError, match="r has no part in this step: it has not joined"):
        actor.contribute(_batch(0), [_share(4)])
    core = side_channel.Channel(listener.address, 0, 20, listener)
    actor.join(4, listener.address)
    for given in ([_share(5)], [_share(4, member="q")]):
        with pytest.raises(protocols.LibraError, match="r has no part in this step"):
            actor.contribute(_batch(0), given)
    nothing = {"seconds": 0.0, "bytes": 0.0, "micro_batches": 0.0}
    assert actor.contribute(_batch(0), [_share(4, 0.01)]) == nothing, "less than half a micro-batch"
    actor.leave()
    actor.shutdown()
    core.close()


def test_an_address_of_another_member_or_epoch_is_refused(pair):
    core, _ = pair
    address = asyncio.run(core.listen("r", 8))
    for member, epoch in (("q", 8), ("r", 9)):
        with pytest.raises(protocols.LibraError, match=r"side channel of r \(epoch 8, 2 ends\) is not the one"):
            asyncio.run(core.connect(member, epoch, address))
    asyncio.run(core.dismiss("r"))
    _eventually(lambda: _refused(address))


def test_a_closed_trainer_leaves_no_port(start):
    core = start()
    addresses = [asyncio.run(core.listen("r", 1)), asyncio.run(core.listen("q", 1))]
    asyncio.run(core.connect("q", 1, addresses[1]))
    core.shutdown()
    asyncio.run(core.dismiss("q"))
    for address in addresses:
        _eventually(lambda address=address: _refused(address))
