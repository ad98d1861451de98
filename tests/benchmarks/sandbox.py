"""Python calls a second in sandboxes, afresh and in a session, over a plain subprocess that contains nothing."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import workload
from libra_jax import protocols
from libra_jax.tools.sandbox import backends, limits, pool
from libra_jax.utils import deadlines

CODE = "print(sum(range(100)))"
CALLS = {"stateless": 40, "session": 400, "subprocess": 20}
"""Calls a round of each side: each then takes about the same time."""
AT_ONCE = 2
DEADLINE_SECONDS = 60.0


async def measure(rounds: int) -> dict[str, Any]:
    """Medians over rounds; the sides alternate.

    Args:
      rounds: alternations of each pair of sides.

    Raises:
      ConfigError: bubblewrap does not run here.
      LibraError: a call came back with anything but its answer.
    """
    async with pool.Sandbox(limits.Limits(), warm=AT_ONCE) as sandbox, sandbox.session() as session:

        async def stateless() -> None:
            for _ in range(CALLS["stateless"]):
                _check((await sandbox.run(CODE)).text)

        async def persistent() -> None:
            for _ in range(CALLS["session"]):
                _check((await session.python(CODE)).text)

        fresh, plain = await workload.alternate_async(rounds, stateless, _plain)
        kept, plain_again = await workload.alternate_async(rounds, persistent, _plain)
        both, plain_both = await workload.alternate_async(rounds, _several(stateless), _several(_plain))
    rates = {
        "stateless": _rate("stateless", fresh),
        "session": _rate("session", kept),
        "subprocess": _rate("subprocess", plain + plain_again),
    }
    return {
        **{f"{name}_calls_per_second": rate for name, rate in rates.items()},
        "stateless_ratio_over_subprocess": _ratio("stateless", plain, fresh),
        "session_ratio_over_subprocess": _ratio("session", plain_again, kept),
        "stateless_calls_per_second_two_at_once": AT_ONCE * _rate("stateless", both),
        "subprocess_calls_per_second_two_at_once": AT_ONCE * _rate("subprocess", plain_both),
        "rounds": rounds,
    }


def _check(text: str) -> None:
    if text != "4950\n":
        raise protocols.LibraError(f"a call in the sandbox returned {text!r} instead of 4950")


async def _plain() -> None:
    """The same code in plain subprocesses, one after the other."""
    await deadlines.cancel_after(DEADLINE_SECONDS, deadlines.off_loop(_subprocesses))


def _subprocesses() -> None:
    command = [backends.INTERPRETER, "-I", "-c", CODE]
    for _ in range(CALLS["subprocess"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True)
        _check(done.stdout)


def _several(side: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        await asyncio.gather(*(side() for _ in range(AT_ONCE)))

    return work


def _rate(side: str, seconds: list[float]) -> float:
    return CALLS[side] / statistics.median(seconds)


def _ratio(side: str, plain: list[float], ours: list[float]) -> float:
    return workload.median_ratio(plain, ours) * CALLS[side] / CALLS["subprocess"]
