"""What the tests of sandboxes share: small limits, whether bubblewrap runs here, and what is left of one."""

import asyncio
import functools

import psutil
import pytest

from libra_jax import protocols
from libra_jax.tools.sandbox import limits, pool

SMALL = limits.Limits(
    seconds=2.0,
    cpu_seconds=1.0,
    memory_mib=256,
    processes=16,
    file_mib=4,
    workspace_mib=8,
    files=500,
    input_bytes=65_536,
    output_bytes=4096,
)
GONE_SECONDS, POLL_SECONDS = 10.0, 0.02


@functools.cache
def unavailable():
    """Why bubblewrap cannot run on this machine; empty where it can."""

    async def attempt():
        async with pool.Sandbox(SMALL, warm=1):
            pass

    try:
        asyncio.run(attempt())
    except protocols.ConfigError as error:
        return str(error)
    return ""


def skip_without_bubblewrap():
    if unavailable():
        pytest.skip(unavailable())


def with_session(work, **arguments):
    """Runs `work(sandbox, session)`."""

    async def body():
        arguments.setdefault("limits", SMALL)
        made = pool.Sandbox(warm=arguments.pop("warm", 1), **arguments)
        async with made as sandbox, sandbox.session() as session:
            return await work(sandbox, session)

    return asyncio.run(body())


def processes_of(sandbox):
    """Every process of its sandboxes that this machine has."""
    return [found for live in sandbox._live for found in descendants(live.process.pid)]


def groups_of(sandbox):
    """The processes of each of its sandboxes that still runs."""
    return [found for live in sandbox._live if (found := descendants(live.process.pid))]


def descendants(pid):
    """The process and all that come from it; none if it has ended."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def marked(text):
    """Every process whose command has the text."""
    return [one for one in psutil.process_iter(["cmdline"]) if any(text in word for word in one.info["cmdline"] or ())]


def alive(found):
    """Those of the processes that have not ended; ids that were given out again do not count."""
    return [one for one in found if _is_alive(one)]


def _is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def gone(found):
    """Waits for the processes to end; what is left after the deadline."""
    for _ in range(int(GONE_SECONDS / POLL_SECONDS)):
        if not alive(found):
            break
        await asyncio.sleep(POLL_SECONDS)
    return alive(found)
