"""Sandboxes in control groups that the kernel keeps, on a machine that lets this process make some."""

import asyncio
import dataclasses

import pytest
import sandboxes

from libra_jax.tools.sandbox import limits, pool

pytestmark = pytest.mark.skipif(
    limits.delegated() is None,
    reason="takes a control group of version 2 with memory and pids that is delegated to this process (Delegate=yes)",
)

SMALL = dataclasses.replace(sandboxes.SMALL, seconds=60.0, cpu_seconds=60.0, start_seconds=120.0)
FORKS = """
import os, time
try:
    for _ in range(12):
        if os.fork() == 0:
            time.sleep(60)
except BlockingIOError:
    print("refused")
"""


class Watched(limits.ControlGroup):
    """A control group that keeps what its files say at its end."""

    def close(self):
        self.killed = self.ran_out()
        self.refused = int(dict(map(str.split, (self.path / "pids.events").read_text().splitlines()))["max"])
        super().close()


@pytest.fixture
def groups(monkeypatch):
    """The control groups that are made. Each has half of the limits, or the sandbox's own counts could come first."""
    sandboxes.skip_without_bubblewrap()
    made = []

    def make(parent, given, pid):
        assert given == SMALL
        half = dataclasses.replace(given, memory_mib=given.memory_mib // 2, processes=given.processes // 2)
        made.append(Watched(parent, half, pid))
        return made[-1]

    monkeypatch.setattr(limits, "ControlGroup", make)
    return made


def test_the_kernel_ends_what_takes_more_memory(groups):
    async def work():
        async with pool.Sandbox(SMALL, warm=1) as sandbox, sandbox.session() as session:
            inside = set(map(int, (groups[0].path / "cgroup.procs").read_text().split()))
            assert inside & {process.pid for process in sandboxes.processes_of(sandbox)}
            return [await session.python(f"held = b'x' * ({mebibytes} * 2**20)") for mebibytes in (64, 192)]

    little, much = asyncio.run(work())
    assert little.status == "success", little.text
    assert (much.status, much.broken) == ("failure", False), much.text
    assert groups[0].killed, much.text
    assert not groups[0].path.exists()


def test_the_kernel_makes_no_more_processes(groups):
    async def work():
        async with pool.Sandbox(SMALL, warm=1) as sandbox:
            return await sandbox.run(FORKS)

    outcome = asyncio.run(work())
    assert groups[0].refused > 0
    assert "refused" in outcome.text
    assert not any(group.path.exists() for group in groups)
