"""Peers end with this process and their children, and say how they ended."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from libra_jax import protocols
from libra_jax.utils import processes


def starts_a_child(pipe):
    child = subprocess.Popen(["sleep", "600"])
    pipe.send(child.pid)
    pipe.recv()


def squares(number):
    if number < 0:
        raise ValueError("negative")
    return number**2


def waits(pipe):
    pipe.recv()


def end_by_sigkill(_):
    os.kill(os.getpid(), signal.SIGKILL)


def has_ended(pid, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("fork", [True, False])
def test_a_peer_is_killed_with_what_it_started(fork):
    with processes.Peer(starts_a_child, name="the peer", fork=fork) as peer:
        child = peer.receive(60.0)
        with pytest.raises(protocols.DeadlineMissed, match="the peer did not answer within 0 s"):
            peer.receive(0.0)
    assert has_ended(child)


def test_a_peer_dies_with_a_killed_parent():
    code = (
        "import sys, test_processes\nfrom libra_jax.utils import processes\n"
        "peer = processes.Peer(test_processes.waits, name='x', fork=True)\n"
        "print(peer._process.pid, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
    )
    with parent:
        try:
            peer = int(parent.stdout.readline())
        finally:
            parent.kill()
    assert has_ended(peer)


def test_a_pool_passes_errors_on_and_tells_how_a_worker_ended():
    with processes.pool(2) as pool:
        assert list(pool.map(squares, range(5))) == [0, 1, 4, 9, 16]
        with pytest.raises(ValueError, match="negative"):
            pool.submit(squares, -1).result(60)
        with pytest.raises(protocols.WorkerLost, match="a worker of the pool ended: killed by SIGKILL"):
            pool.submit(end_by_sigkill, 0).result(60)
