"""Gradient sums over gloo: what comes is what was sent; whatever goes wrong closes the channel, never the process."""

import itertools
import json
import pathlib
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

import numpy as np
import pytest
import torch

from libra_jax.weights import gradient_channel

PEER = pathlib.Path(__file__).parent / "gradient_channel_peer.py"
KINDS = [("float32", (1000,)), ("float32", ())]
HEADER = gradient_channel.Header("r", 7, 3, "d", 0, 1, {"entropy": (1.5, 2.0)}, {"ratio": 1.25})


def _refused(address):
    with socket.socket() as probe:
        return probe.connect_ex((address["host"], address["port"])) != 0


def _eventually(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@pytest.fixture
def peer(monkeypatch):
    """Connects this process, the core, to a peer process in a mode; ends the process."""
    processes, channels = [], []

    def start(mode, part_bytes=1 << 20, seconds=60):
        monkeypatch.setattr(gradient_channel, "PART_BYTES", part_bytes)
        listener = gradient_channel.ChannelListener("r", 7, ranks=2)
        channel = gradient_channel.Channel(listener.address, 0, seconds, listener)
        process = subprocess.Popen(
            [sys.executable, str(PEER), mode, json.dumps(listener.address), str(part_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        channels.append(channel)
        assert process.stdout.readline().strip() == ("announced" if mode == "announced" else "connected")
        return channel, process, listener.address

    yield start
    for channel in channels:
        channel.close()
    for process in processes:
        process.kill()
        process.communicate(timeout=20)


@pytest.fixture
def ends():
    """Both ends of a channel in this process: (core, replica, address)."""
    listener = gradient_channel.ChannelListener("r", 7, ranks=2)
    core = gradient_channel.Channel(listener.address, 0, 20, listener)
    replica = gradient_channel.Channel(listener.address, 1, 10)
    core.wait(20)
    replica.wait(20)
    yield core, replica, listener.address
    core.close()
    replica.close()


def _sending(replica, header, arrays, seconds=20):
    """Sends on a thread; returns it and where its error, if any, will be."""
    errors = []

    def send():
        try:
            replica.send(header, arrays, seconds)
        except gradient_channel.ChannelError as error:
            errors.append(str(error))

    thread = threading.Thread(target=send)
    thread.start()
    return thread, errors


@pytest.mark.multiprocess
@pytest.mark.parametrize("part_bytes", [1 << 20, 1000], ids=["one message", "messages"])
def test_sums_arrive_one_after_the_other_as_they_were_sent(peer, part_bytes):
    channel, _, _ = peer("sends", part_bytes)
    for version in (3, 4):
        header, (vector, scalar) = channel.receive(KINDS, 10)
        assert header == gradient_channel.Header(**{**vars(HEADER), "version": version})
        np.testing.assert_array_equal(vector, np.arange(1000, dtype=np.float32) + version)
        assert (scalar.shape, float(scalar)) == ((), version)
    assert not channel.closed


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", ["dies_in_header", "dies_in_message"])
def test_a_sender_killed_in_the_middle_closes_the_channel_and_leaves_no_port(peer, mode):
    channel, process, address = peer(mode, part_bytes=1000)
    with pytest.raises(gradient_channel.ChannelError, match=r"of r \(generation 7\) is closed: the connection broke"):
        channel.receive(KINDS, 10)
    assert process.wait(20) == -9
    with pytest.raises(gradient_channel.ChannelError, match="the connection broke"):
        channel.receive(KINDS, 10)
    assert not channel.ready
    _eventually(lambda: _refused(address))


@pytest.mark.multiprocess
def test_a_sender_that_is_silent_is_late_and_then_it_is_too_late(peer):
    channel, process, address = peer("silent")
    with pytest.raises(gradient_channel.ChannelError, match="the other side took too long"):
        channel.receive(KINDS, 0.2)
    assert process.poll() is None
    assert not channel.ready
    _eventually(lambda: _refused(address))


@pytest.mark.multiprocess
def test_a_replica_killed_while_it_connects_ends_the_meeting_and_leaves_neither_port_nor_thread(peer, monkeypatch):
    monkeypatch.setattr(gradient_channel, "MEETING_SECONDS", 1.0)
    channel, process, address = peer("announced")
    process.kill()
    with pytest.raises(gradient_channel.ChannelError, match="could not be connected"):
        channel.wait(20)
    assert not channel._thread.is_alive()
    _eventually(lambda: _refused(address))


def test_a_replica_that_never_comes_is_given_up_at_once_or_at_the_deadline():
    listener = gradient_channel.ChannelListener("r", 7, ranks=2)
    assert gradient_channel.ChannelListener("r", 7, ranks=2).address["port"] != listener.address["port"]
    channel = gradient_channel.Channel(listener.address, 0, 60, listener)
    assert not channel.ready
    assert not channel.closed
    channel.close("it changed its mind")
    _eventually(lambda: not channel._thread.is_alive())
    assert _refused(listener.address)
    assert channel.closed == "the gradient channel of r (generation 7) is closed: it changed its mind."
    listener = gradient_channel.ChannelListener("r", 7, ranks=2)
    channel = gradient_channel.Channel(listener.address, 0, 0.1, listener)
    with pytest.raises(gradient_channel.ChannelError, match=r"not everybody came to it within 0\.1 s"):
        channel.wait(20)
    _eventually(lambda: _refused(listener.address))


def test_a_replica_of_a_channel_that_is_gone_is_told_so():
    listener = gradient_channel.ChannelListener("r", 7, ranks=2)
    listener.close()
    _eventually(lambda: _refused(listener.address))
    channel = gradient_channel.Channel(listener.address, 1, 1.0)
    with pytest.raises(gradient_channel.ChannelError, match="could not be connected"):
        channel.wait(20)


def test_a_host_that_is_not_this_one_cannot_listen():
    with pytest.raises(gradient_channel.ChannelError, match=r"can listen at 192\.0\.2\.1"):
        gradient_channel.ChannelListener("r", 7, ranks=2, host="192.0.2.1")


def test_the_port_is_open_on_the_given_address_only():
    listener = gradient_channel.ChannelListener("r", 7, ranks=2)
    assert not _refused(listener.address)
    assert _refused({**listener.address, "host": "127.0.0.2"})
    listener.close()
    _eventually(lambda: _refused(listener.address))


def _text(**changes):
    kinds = changes.pop("arrays", KINDS)
    return gradient_channel._encode(gradient_channel.Header(**{**vars(HEADER), **changes}), kinds)


GARBAGE = {
    "zeros": (np.zeros(gradient_channel.HEADER_BYTES, np.uint8), "no header"),
    "noise": (np.random.default_rng(0).integers(0, 256, gradient_channel.HEADER_BYTES).astype(np.uint8), "no header"),
    "nesting": (np.full(gradient_channel.HEADER_BYTES, ord("["), np.uint8), "no header"),
    "a list": (np.frombuffer(b"[]".ljust(gradient_channel.HEADER_BYTES), np.uint8), "no header"),
    "sizes of another model": (_text(arrays=[("float32", (1001,)), ("float32", ())]), "other arrays"),
    "sizes without end": (_text(arrays=[("float32", (10**15,)), ("float32", ())]), "other arrays"),
    "negative sizes": (_text(arrays=[("float32", (-1000,)), ("float32", ())]), "other arrays"),
    "another dtype": (_text(arrays=[("int32", (1000,)), ("float32", ())]), "other arrays"),
    "infinite numbers": (_text(first=float("inf")), "no header"),
    "text for metrics": (_text(metrics={"entropy": ("much", 1.0)}), "no header"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_header_of_garbage_closes_the_channel(ends, name):
    core, replica, address = ends
    message, sentence = GARBAGE[name]
    tensor = torch.from_numpy(np.array(message))
    work = replica._group.send([tensor], 0, tensor.nbytes)  # one that is let go is not sent
    with pytest.raises(gradient_channel.ChannelError, match=sentence):
        core.receive(KINDS, 10)
    del work
    replica.close()
    _eventually(lambda: _refused(address))


@pytest.mark.parametrize("size", [10, gradient_channel.HEADER_BYTES + 1, 1 << 20])
def test_a_message_of_another_size_is_never_received(ends, size):
    core, replica, _ = ends
    tensor = torch.zeros(size, dtype=torch.uint8)
    work = replica._group.send([tensor], 0, tensor.nbytes)
    with pytest.raises(gradient_channel.ChannelError, match="took too long"):
        core.receive(KINDS, 0.3)
    del work


def test_a_sender_is_told_when_the_core_closes_or_takes_too_long(ends):
    core, replica, _ = ends
    big = [np.zeros(1000, np.float32), np.float32(0)]
    thread, errors = _sending(replica, HEADER, [np.asarray(array) for array in big])
    core.close("enough")
    thread.join(20)
    assert "the connection broke" in errors[0]
    with pytest.raises(gradient_channel.ChannelError, match="the connection broke"):
        replica.send(HEADER, big, 10)


def test_what_a_sender_waits_for_the_core_is_told_apart_from_what_the_sum_takes(ends):
    core, replica, _ = ends
    arrays = [np.zeros(1000, np.float32), np.zeros((), np.float32)]
    with futures.ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        sending = pool.submit(replica.send, HEADER, arrays, 20)
        time.sleep(0.5)
        core.receive(KINDS, 20)
        sent = sending.result(20)
        took = time.monotonic() - began
    assert sent.nbytes == gradient_channel.HEADER_BYTES + 4004
    assert 0.4 < sent.waited <= took


@pytest.mark.parametrize("look", [1, 2, 3])
def test_a_channel_that_is_dismissed_between_a_look_and_its_use_says_so(ends, monkeypatch, look):
    core, _, _ = ends
    looks = itertools.count(1)

    def closed_after_it(channel):
        stands = channel._group is not None
        if next(looks) == look:
            channel.close("the core dismissed it")
        return stands

    monkeypatch.setattr(gradient_channel.Channel, "ready", property(closed_after_it))
    with pytest.raises(gradient_channel.ChannelError, match=r"dismissed it|took too long"):
        core.receive(KINDS, 0.3)


def test_a_core_that_does_not_take_a_sum_in_time_loses_the_replica(ends):
    _, replica, _ = ends
    with pytest.raises(gradient_channel.ChannelError, match="the other side took too long"):
        replica.send(HEADER, [np.zeros(1000, np.float32), np.zeros((), np.float32)], 0.2)


def test_a_header_that_does_not_fit_is_a_fault_of_the_program(ends):
    _, replica, _ = ends
    header = gradient_channel.Header(**{**vars(HEADER), "metrics": {f"m{i}": (0.0, 0.0) for i in range(9000)}})
    with pytest.raises(ValueError, match="a header of"):
        replica.send(header, [], 1)


def test_every_process_of_the_core_gets_the_sum():
    listener = gradient_channel.ChannelListener("r", 7, ranks=3)
    channels = [gradient_channel.Channel(listener.address, rank, 20, None if rank else listener) for rank in range(3)]
    for channel in channels:
        channel.wait(20)
    vector = np.arange(1000, dtype=np.float32)
    thread, errors = _sending(channels[2], HEADER, [vector, np.zeros((), np.float32)])
    with futures.ThreadPoolExecutor(2) as core:
        for header, arrays in core.map(lambda channel: channel.receive(KINDS, 20), channels[:2]):
            assert header == HEADER
            np.testing.assert_array_equal(arrays[0], vector)
    thread.join(20)
    assert not errors
    for channel in channels:
        channel.close()
