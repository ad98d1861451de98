"""Suggests what to do about a limit that is reached on a large cluster (`scale`), with the resulting numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from libra_jax.planning import scale

BUSY = 0.7
"""Share of a core that the coordinator may use after a remedy: an event loop that is never idle answers late."""


def remedy(costs: scale.Costs, work: scale.Work, settings: scale.Settings, accelerators: int, part: str) -> str:
    """Returns a sentence on what to do about a part on this many accelerators, with its numbers."""
    here = scale.loads(costs, work, settings, accelerators)
    if here.parts[part].ratio <= (BUSY if part == "coordinator" else 1.0):
        return f"none needed at {accelerators:,}"
    value = here.parts[part].value
    made = _REMEDIES[part](costs, work, settings, here)
    return f"{made} (now {value:.3g} {here.parts[part].unit})"


def _changed(
    costs: scale.Costs, work: scale.Work, settings: scale.Settings, here: scale.Loads, **changes: Any
) -> scale.Loads:
    return scale.loads(costs, work, dataclasses.replace(settings, **changes), here.accelerators)


def _fewer_deltas(costs: scale.Costs, work: scale.Work, settings: scale.Settings, here: scale.Loads) -> str:
    """Returns the smallest sufficient interval; an interval beyond a turn's own length does not help."""
    interval = settings.stream_interval
    while interval < work.generated_tokens / work.turns:
        interval *= 2
        cores = _changed(costs, work, settings, here, stream_interval=interval).parts["coordinator"].value
        if cores <= BUSY:
            return f"rollout.stream_interval={interval}: {cores:.2g} cores"
    left = _changed(costs, work, settings, here, stream_interval=interval).parts["coordinator"].value
    shards = math.ceil(left / BUSY)
    return f"rollout.stream_interval={interval} and {shards} coordinators, each of a share of the groups and engines"


def _larger_buckets(costs: scale.Costs, work: scale.Work, settings: scale.Settings, here: scale.Loads) -> str:
    mib = settings.chunk_mib
    while scale.buckets(work, dataclasses.replace(settings, chunk_mib=mib)) > 1:
        mib *= 2
        part = _changed(costs, work, settings, here, chunk_mib=mib).parts["publication"]
        if part.ratio <= 1.0:
            return f"rollout.chunk_mib={mib}: {part.value:.3g} s"
    targets = scale.hosts(work, settings, here.accelerators / work.accelerators)
    part = _changed(costs, work, settings, here, chunk_mib=mib).parts["publication"]
    return (
        f"rollout.chunk_mib={mib} leaves {part.value:.3g} s; relays that call their host's engines would make it one "
        f"call for each of {targets:,.0f} hosts instead of {here.engines / targets:.3g} times as many"
    )


def _more_starters(costs: scale.Costs, work: scale.Work, settings: scale.Settings, here: scale.Loads) -> str:
    whole = sum(here.start.values())
    serial = whole - here.start["engines"]
    room = settings.start_limit - here.start["engines"]
    if room <= 0:
        return "raise deadlines.engine_start: engines alone take longer"
    return f"{math.ceil(serial / room)} coordinators that make actors, or deadlines.engine_start above {whole:.0f}"


def _slices(costs: scale.Costs, work: scale.Work, settings: scale.Settings, here: scale.Loads) -> str:
    part = here.parts["batch"]
    return f"hand the batch over in {math.ceil(part.ratio)} slices, between which the event loop answers"


def _beside(costs: scale.Costs, work: scale.Work, settings: scale.Settings, here: scale.Loads) -> str:
    share = here.parts["planner"].value / work.step_seconds
    return f"search in a process of its own: it takes {share:.2g} of a step's time there"


def _spread(costs: scale.Costs, work: scale.Work, settings: scale.Settings, here: scale.Loads) -> str:
    return f"{math.ceil(here.parts['memory'].ratio)} coordinators, each on a host of its own"


_REMEDIES: Mapping[str, Callable[[scale.Costs, scale.Work, scale.Settings, scale.Loads], str]] = {
    "coordinator": _fewer_deltas,
    "publication": _larger_buckets,
    "start-up": _more_starters,
    "batch": _slices,
    "planner": _beside,
    "memory": _spread,
}
