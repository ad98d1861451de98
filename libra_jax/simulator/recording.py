"""Reads a run's files for calibration and replay: config, steps, groups, streams of tokens.

A replay needs every group that took the machines' time, and the times on one uninterrupted timeline. So `read`
refuses runs that replaced groups, or that repeated steps after a crash.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning.costs import calibration
from libra_jax.simulator import scripts, traces
from libra_jax.telemetry import files, metrics, trace
from libra_jax.telemetry.report import timeline
from libra_jax.utils import checksums

LEAST_STEPS = 4
"""Least steps of a recording: half of them calibrate, the others are predicted."""

CONFIG_FILE = "config.json"

_Streams: TypeAlias = tuple[calibration.RequestStay, ...]

Work = tuple[tuple[int, tuple[tuple[int, int, str | None], ...]], ...]
"""Work of a step: of each trajectory, its prompt tokens, and each turn's generated tokens, payload and tool."""


@dataclass(frozen=True)
class RecordedSeconds:
    """Seconds of a training step.

    Attributes:
      total: from the end of the step before to its own end, without evaluations and checkpoints.
      rollout: time in which at least one group ran.
      train: time of the trainer's step.
      sync: time of the weight sync.
    """

    total: float
    rollout: float
    train: float
    sync: float


@dataclass(frozen=True)
class RecordedStep:
    """One training step.

    Attributes:
      number: number of the step, from 1.
      parts: its seconds.
      lengths: tokens of each trajectory that it trained on, without the masked ones (`task.cut_off`).
      work: equal for steps that did the same work.
      scripts: scripts of its trajectories.
    """

    number: int
    parts: RecordedSeconds
    lengths: tuple[int, ...]
    work: Work
    scripts: tuple[scripts.Script, ...]


@dataclass(frozen=True)
class Recording:
    """A finished run.

    Attributes:
      steps: steps in order.
      groups: scripts of each group's rollouts, in the order of dispatch.
      streams: streams on all instances, in order of their starts; `usable` is False if a weight update interrupted the
        stream.
      loads: (end, seconds) of each instance's part in each weight update.
      ends: end of each step's training, on the clock of the streams.
    """

    config: config_lib.RunConfig
    steps: tuple[RecordedStep, ...]
    groups: tuple[tuple[scripts.Script, ...], ...]
    streams: _Streams
    loads: tuple[tuple[float, float], ...]
    ends: tuple[float, ...]

    def streams_of(self, steps: int) -> _Streams:
        """Returns the streams of the first `steps` steps. A stream that ends later keeps its place, with `usable`
        False."""
        end = self.ends[steps - 1]
        return tuple(
            stream if stream.end <= end else dataclasses.replace(stream, usable=False)
            for stream in self.streams
            if stream.start < end
        )

    def script(self, task_index: int, sample: int) -> scripts.Script:
        """Returns the recorded rollout's script: a recording is a `scripts.Workload`."""
        return self.groups[task_index][sample]

    def degree(self, instance: str) -> int:
        """Returns the tensor-parallel degree of an instance, which is named by its place in the layout.

        Raises:
          DataError: the layout has no such instance.
        """
        place, degrees = instance.rpartition("-")[2], self.config.rollout.tensor_parallel
        if not place.isdecimal() or int(place) >= len(degrees):
            raise protocols.DataError(
                f"{timeline.TIMELINE_FILE}: tokens came from {instance!r}, and rollout.tensor_parallel has "
                f"{len(degrees)} instances; give the files of one run"
            )
        return degrees[int(place)]


def read(workdir: Path) -> Recording:
    """Reads a finished run's files.

    Raises:
      DataError: a file is missing, or the run cannot be replayed from its files; the message says why and what to
        do.
    """
    config = _config(workdir / CONFIG_FILE)
    for name, chosen, usual in (
        ("algorithm.budget", config.algorithm.budget, "uniform"),
        ("algorithm.replay", config.algorithm.replay, "none"),
        ("task.order", config.task.order, "sequential"),
    ):
        if chosen != usual:
            raise protocols.DataError(
                f"{workdir / CONFIG_FILE}: a twin has groups of one size, in the order of the tasks, and the run has "
                f"{name}={chosen}; record one with {name}={usual}"
            )
    if config.rollout.accelerators:
        raise protocols.DataError(
            f"{workdir / CONFIG_FILE}: costs are fitted by tensor-parallel degree, and the run has unlike accelerators "
            "(rollout.accelerators); record one on one kind"
        )
    if any(decision.get("moved") for decision in files.whole_json_lines(workdir / files.PLANS_FILE)):
        raise protocols.DataError(
            f"{workdir / files.PLANS_FILE}: the run moved to another plan, and a twin has one layout; record a run "
            "with planner.shadow, or with planner.period at 0"
        )
    if any(change.get("outcome") == "done" for change in files.whole_json_lines(workdir / files.TRANSITIONS_FILE)):
        raise protocols.DataError(
            f"{workdir / files.TRANSITIONS_FILE}: workers changed sides or size in the run, and a twin has one layout; "
            "record a run with elastic.hybrid at 0"
        )
    numbers = _numbers(workdir / metrics.METRICS_FILE, config)
    # Twice, as records and as scripts, in the same order.
    records = trace.read(workdir / trace.TRACE_FILE)
    played = [script for _, script in traces.read(workdir / trace.TRACE_FILE)]
    groups = _groups(workdir / trace.TRACE_FILE, records, played, config)
    spans = list(timeline.read(workdir / timeline.TIMELINE_FILE))
    streams = calibration.read_streams(spans, records)
    if not streams:
        raise protocols.DataError(
            f"{workdir / timeline.TIMELINE_FILE}: no stream of tokens is in it; a run writes one, so take the file "
            "over with the others of its workdir"
        )
    by_step = collections.defaultdict(list)
    for record, script in zip(records, played, strict=True):
        by_step[record["step"]].append((record, script))
    steps = [_step(number, parts, by_step[number], config.task.masks) for number, parts in numbers.items()]
    updates = [span for span in spans if span.track == "weights"]
    return Recording(
        config=config,
        steps=tuple(steps),
        groups=tuple(groups),
        # The time of a stream that an update interrupted says nothing about steps.
        streams=tuple(
            dataclasses.replace(stream, usable=False)
            if any(update.start < stream.end and stream.start < update.end for update in updates)
            else stream
            for stream in streams
        ),
        loads=tuple((span.end, span.end - span.start) for span in updates),
        ends=_ends(workdir / timeline.TIMELINE_FILE, spans, config),
    )


def _config(path: Path) -> config_lib.RunConfig:
    try:
        values = checksums.read_object(path)
        # A run of an earlier version may use names that have changed since.
        return config_lib.parse(config_lib.RunConfig, config_lib.renamed(values))
    except OSError as error:
        raise protocols.DataError(
            f"{path}: cannot be read ({error.strerror or error}); give the --workdir of a finished run"
        ) from error
    except (ValueError, AttributeError, RecursionError, protocols.ConfigError) as error:
        raise protocols.DataError(f"{path}: is not the config of a run of this version ({error})") from error


def _numbers(path: Path, config: config_lib.RunConfig) -> dict[int, RecordedSeconds]:
    """Returns each step's seconds."""
    table = metrics.read(path)
    step_numbers = [number for number in table if number > 0]
    if not step_numbers:
        raise protocols.DataError(f"{path}: holds no training step; give the --workdir of a finished run")
    if step_numbers != list(range(1, config.steps + 1)):
        raise protocols.DataError(
            f"{path}: {len(step_numbers)} of the run's {config.steps} steps are recorded; let it finish, with the same "
            "command"
        )
    if config.steps < LEAST_STEPS:
        raise protocols.DataError(
            f"{path}: {config.steps} steps are too few, as half of them calibrate and the others are predicted; "
            f"record at least {LEAST_STEPS} (--config.steps)"
        )
    replaced = sum(table[number].get("groups/replaced", 0.0) for number in step_numbers)
    if replaced:
        raise protocols.DataError(
            f"{path}: {replaced:.0f} groups were replaced, and what they took of the machines is in no trace; record a "
            "run that replaces none (algorithm.filter=none)"
        )
    parts = {}
    for number in step_numbers:
        scalars, names = table[number], ("rollout/seconds", "train/seconds", "sync/seconds", "step/seconds")
        for name in names:
            if not math.isfinite(scalars.get(name, math.nan)):
                raise protocols.DataError(f'{path}: step {number} has no "{name}"; give the metrics of a run')
        rollout, train, sync, step = (scalars[name] for name in names)
        besides = scalars.get("evaluation/seconds", 0.0) + scalars.get("checkpoint/seconds", 0.0)
        # Groups run while a checkpoint is written and an evaluation goes on, so only a part of that time is beside the
        # stages.
        waited = scalars.get("rollout/wait_seconds", 0.0) if config.coordinator.max_staleness else rollout
        parts[number] = RecordedSeconds(max(step - besides, min(step, train + sync + waited)), rollout, train, sync)
    return parts


def _groups(
    path: Path,
    records: Sequence[Mapping[str, Any]],
    played: Sequence[scripts.Script],
    config: config_lib.RunConfig,
) -> list[tuple[scripts.Script, ...]]:
    """Returns the groups in the order of dispatch, their rollouts in the order of their samples."""
    rows: dict[int, dict[int, scripts.Script]] = collections.defaultdict(dict)
    for record, script in zip(records, played, strict=True):
        sample = record["trajectory_id"].rpartition("/")[2]
        numbered = all(isinstance(record.get(name), int) for name in ("group_id", "step"))
        if not (numbered and sample.isdecimal()):
            raise protocols.DataError(
                f'{path}: {record["trajectory_id"]} has no "group_id", "step" or number of its sample; only the trace '
                "that a run wrote tells what was dispatched when"
            )
        rows[record["group_id"]][int(sample)] = script
    limits = config.coordinator
    count, size = config.steps * limits.groups_per_step, limits.group_size
    if sorted(rows) != list(range(count)) or any(sorted(row) != list(range(size)) for row in rows.values()):
        raise protocols.DataError(
            f"{path}: holds {sum(map(len, rows.values()))} trajectories of {len(rows)} groups, and the run's "
            f"{config.steps} steps trained {count} groups of {size}; give trace and config of the same run"
        )
    return [tuple(rows[group][sample] for sample in range(size)) for group in range(count)]


def _step(
    number: int,
    parts: RecordedSeconds,
    rollouts: Sequence[tuple[Mapping[str, Any], scripts.Script]],
    masks: Callable[[str | None], bool],
) -> RecordedStep:
    """Returns a step with the lengths and the work of its rollouts."""
    lengths, work = [], []
    for record, script in rollouts:
        turns = record["turns"]
        if not masks(script.limit):
            # Tokens after the last sampled one are not trained, so the last turn's payload does not count.
            payload = sum(turn["payload_tokens"] for turn in turns[:-1])
            generated = sum(turn["generated_tokens"] for turn in turns)
            # Tokens that segments share are trained once.
            several = script.own_tokens if script.segments else 0
            lengths.append(several or int(record["prompt_tokens"] + generated + payload))
        # Sorted below: the order in which rollouts ended is chance, and the same work must compare equal.
        done = tuple((turn["generated_tokens"], turn["payload_tokens"], turn["tool"]) for turn in turns)
        work.append((record["prompt_tokens"], done))
    return RecordedStep(
        number, parts, tuple(lengths), tuple(sorted(work, key=repr)), tuple(script for _, script in rollouts)
    )


def _ends(path: Path, spans: Sequence[protocols.Span], config: config_lib.RunConfig) -> tuple[float, ...]:
    ends = collections.defaultdict(list)
    for span in spans:
        if span.name == "train step" and isinstance(span.arguments.get("step"), int):
            ends[span.arguments["step"]].append(span.end)
    twice = sorted(number for number, times in ends.items() if len(times) > 1)
    if twice:
        raise protocols.DataError(
            f"{path}: step {twice[0]} was taken twice, because the run was resumed; record one that is not interrupted"
        )
    if sorted(ends) != list(range(1, config.steps + 1)):
        raise protocols.DataError(
            f"{path}: shows {len(ends)} training steps of the run's {config.steps}; give timeline and config of the "
            "same run"
        )
    return tuple(ends[number][0] for number in sorted(ends))
