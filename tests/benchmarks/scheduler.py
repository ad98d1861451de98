"""Scheduler decisions: how many a second of CPU time, how late the slowest come, how much memory they keep.

A decision is one event handled: an arrival, a tool call (it frees a slot, which goes to someone who waits), a tool
return (its evidence is taken in, its request routed and placed) or a finish. Tool returns, the dearest of the frequent
ones, are reported apart too. Progress while a request decodes is left out: nearly all of it is one comparison.

Both are measured, the scheduler as it is and compiled (`setup.py`), one after the other.
"""

from __future__ import annotations

import array
import gc
import itertools
import json
import random
import sys
import tempfile
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import cli

import psutil

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling import registry
from tests.benchmarks import compiled

LIVE = 100_000
AWAY = 60_000
RETURNS = 1_000_000
TURNS = 20
LAYOUT: Mapping[int, int] = {1: 126, 2: 63, 4: 42, 8: 21}
SLOTS = 32
BOUNDS = (3_000, 8_000, 20_000)
SECONDS = 3_600.0
"""Deadline of the compiled scheduler's process, which takes about a minute."""

SETTINGS = ("policy", "live_requests", "tool_returns")
STATUSES: Sequence[protocols.ToolStatus] = ("success", "success", "success", "failure", "timeout")


Times = dict[str, "array.array[int]"]
"""Nanoseconds of CPU time that each event took, by the event's name."""


class Load:
    """Requests that go round: waiting, decoding, away, back; the event loop's part of a run without anything else.

    Args:
      scheduler: serves `LIVE` requests at any time, each of `TURNS` turns in the mean. `AWAY` of them have a tool
        running.
    """

    def __init__(self, scheduler: protocols.Scheduler) -> None:
        self.scheduler = scheduler
        self.nanoseconds: Times = {}
        self.now = 0.0
        self._random = random.Random(0)
        self._numbers = itertools.count()
        self._generated: dict[str, int] = {}
        self._decoding: OrderedDict[str, None] = OrderedDict()
        self._away: deque[str] = deque()
        instances = [
            protocols.Instance(f"{degree}-{index}", degree, SLOTS)
            for degree, count in LAYOUT.items()
            for index in range(count)
        ]
        self._decide(scheduler.on_instance_change, instances)
        for _ in range(LIVE):
            self._arrive()

    def returns(self, count: int) -> None:
        """So many tool returns, and everything else that happens meanwhile."""
        while count:
            request, _ = self._decoding.popitem(last=False)
            self._generated[request] += self._random.randrange(50, 1_000)
            if self._random.random() * TURNS < 1:
                self._decide(self.scheduler.on_finish, request, self._generated.pop(request))
                self._arrive()
            else:
                self._away.append(request)
                self._decide(self.scheduler.on_tool_call, request, self._generated[request])
            while len(self._away) > AWAY and count:
                request = self._away.popleft()
                draw = self._random
                causal = protocols.CausalState("bash", draw.randrange(1, 16_000), draw.choice(STATUSES))
                self._decide(self.scheduler.on_tool_return, request, causal, 2_000 + 2 * self._generated[request])
                count -= 1

    def _arrive(self) -> None:
        number = next(self._numbers)
        group, request = number // 16, f"{number // 16}/{number % 16}"
        self._generated[request] = 0
        info = protocols.RequestInfo(request, f"prompt-{group}", group, 2_000, dispatch_version=group // 3_000)
        self._decide(self.scheduler.on_arrival, info)

    def _decide(self, event: Callable[..., list[protocols.Placement]], *arguments: Any) -> None:
        self.now += 1e-3
        start = time.thread_time_ns()
        placements = event(*arguments, self.now)
        spent = time.thread_time_ns() - start
        self.nanoseconds.setdefault(event.__name__, array.array("Q")).append(spent)
        for placement in placements:
            self._decoding.pop(placement.request_id, None)
            if placement.instance:
                self._decoding[placement.request_id] = None


def measure(policy: str = "cmlfq", returns: int = RETURNS) -> dict[str, Any]:
    """The figures of the scheduler as it is and, in a process of its own, compiled; the latter's names say so."""
    figures = _measured(policy, returns)
    with tempfile.TemporaryDirectory(prefix="libra-jax-compiled-") as name:
        try:
            compiled.build(Path(name))
        except protocols.ConfigError as error:
            return {**figures, "compiled": str(error)}
        made = compiled.run(Path(name), ["-m", "tests.benchmarks.scheduler", policy, str(returns)], seconds=SECONDS)
    if made.returncode:
        raise protocols.LibraError(f"the compiled scheduler could not be measured: {made.stderr.strip()[-300:]}")
    own = json.loads(made.stdout)
    return {**figures, **{f"compiled_{name}": own[name] for name in own if name not in SETTINGS}}


def _measured(policy: str, returns: int) -> dict[str, Any]:
    """A million tool returns among 100,000 live requests on 252 instances; then memory, over a tenth as many more.

    Memory is the process's resident set, which has what the load itself keeps of each request in it.
    """
    config = config_lib.SchedulerConfig(policy=policy, max_remaining_tokens=BOUNDS, ageing_seconds=1e9)
    load = Load(registry.create(config))
    load.nanoseconds.clear()
    load.returns(returns)
    spent, clock = dict(load.nanoseconds), _clock_nanoseconds()
    load.nanoseconds.clear()
    before = _resident_mib()
    load.returns(returns // 10)
    grown = _resident_mib() - before
    return {
        "policy": policy,
        "live_requests": LIVE,
        "tool_returns": returns,
        **_figures("decisions", itertools.chain(*spent.values()), clock),
        **_figures("tool_returns", spent["on_tool_return"], clock),
        "clock_nanoseconds": clock,
        "resident_mib": before,
        "resident_mib_grown_in_last_tenth": grown,
    }


def _resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


def _clock_nanoseconds() -> int:
    """What reading the clock adds to each event: the median of many readings of nothing."""
    start = [time.thread_time_ns() for _ in range(10_001)]
    return sorted(after - before for before, after in itertools.pairwise(start))[5_000]


def _figures(name: str, nanoseconds: Iterable[int], clock: int) -> dict[str, float]:
    """Rate, median and 99th percentile of events, the clock's own cost taken off each."""
    spent = sorted(max(0, item - clock) for item in nanoseconds)
    return {
        f"{name}_per_second": len(spent) / (1e-9 * sum(spent)),
        f"{name}_microseconds_p50": 1e-3 * spent[len(spent) // 2],
        f"{name}_microseconds_p99": 1e-3 * spent[len(spent) * 99 // 100],
    }


if __name__ == "__main__":  # the compiled scheduler is measured in a process of its own
    gc.set_threshold(*cli.GARBAGE_THRESHOLDS)
    print(json.dumps(_measured(sys.argv[1], int(sys.argv[2]))))
