"""Plain lines about a run, for a pipe or a log. `screen.py` draws a live picture on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from libra_jax.telemetry import escapes, files, sinks

STATUS_SECONDS = 5.0
"""Shortest time in seconds between two status lines in plain output."""

RATE_STEPS = 10
"""Number of steps whose mean duration gives the estimate of the remaining time."""

NUMBERS = {
    "reward/mean": ("reward {}", "reward", "z.3f"),
    "evaluation/accuracy": ("held-out {}", "held-out", "z.3f"),
    "tokens_per_second": ("mean {} tokens/s", "mean tokens/s", ",.0f"),
    "train/tokens_per_second": ("trained {}/s", "trained/s", ",.0f"),
    "train/tokens_per_second_per_device": ("({} a device)", "a device", ",.0f"),
    "train/mfu": ("MFU {}", "MFU", ".0%"),
    "staleness/max": ("staleness {}", "staleness", ".0f"),
    "loss": ("loss {}", "loss", ".4g"),
    "mismatch/kl": ("mismatch {}", "mismatch KL", ".1e"),
    "step/seconds": ("", "step", ".1f"),
}
"""For each metric: part of a step's line (empty: only the screen has it), name on the screen, and format."""

TIMES = {"rollout/wait_seconds": "wait", "train/seconds": "train", "sync/seconds": "sync"}
"""Metrics of the parts of a step's time in a line, and their names. The report uses the same parts."""

WIDTH = 120
"""Largest number of columns of a step's line."""

LESS_IMPORTANT = (
    "train/tokens_per_second",
    "mismatch/kl",
    "routing/moves",
    "loss",
    "train/mfu",
    "staleness/max",
    *reversed(TIMES),
)
"""Parts that a step's line leaves out if it is too long, in this order."""

LOST = "console"
"""Key of the warning that the console itself is lost."""

SPARKS = "▁▂▃▄▅▆▇█"


def seconds_text(seconds: float) -> str:
    """Returns a duration for people: "0.4 s", "12 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        # From ten minutes on, the seconds are noise.
        return f"{total // 60} min {total % 60} s" if total < 600 and total % 60 else f"{total // 60} min"
    return f"{total // 3600} h {total % 3600 // 60} min"


def sparkline(values: list[float]) -> str:
    """Returns one block character per value, scaled from the smallest to the largest value."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    # Equal values all draw the lowest block; their scale would divide by zero.
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((v - low) * scale)] if abs(v) < float("inf") else "?" for v in values)


class RunPace:
    """The progress of a run and its remaining time, from the times at which steps ended.

    Args:
      steps: Number of training steps of the whole run.
      now: Time of the session's start in seconds.
    """

    def __init__(self, steps: int, now: float) -> None:
        self.steps = steps
        self.started = now
        self.done = 0
        # One more than the number of steps: n durations lie between n + 1 ends.
        self._ends: deque[tuple[int, float]] = deque(maxlen=RATE_STEPS + 1)

    def step_ended(self, step: int, now: float) -> None:
        """Counts a step that has ended."""
        self.done = max(self.done, step)
        self._ends.append((step, now))

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds that the remaining steps take at the recent pace. None until two steps have ended."""
        if len(self._ends) < 2:
            return None
        # Of the last steps only: the first ones compile, and would make the estimate far too long.
        (first, start_time), (last, end_time) = self._ends[0], self._ends[-1]
        return (self.steps - last) * (end_time - start_time) / (last - first) if last > first else None


class TokenRate:
    """Generated tokens per second over the last `RATE_STEPS` steps.

    A single step says little: an asynchronous step may train on earlier rollouts and generate nothing itself.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=RATE_STEPS)
        self._told: float | None = None

    def step_ended(self, scalars: Mapping[str, float]) -> None:
        """Counts a step by its numbers. A step without its generated tokens replaces all others with its own speed."""
        tokens, seconds = scalars.get("tokens/generated"), scalars.get("step/seconds")
        if tokens is None or not seconds:
            self._steps.clear()
            self._told = scalars.get("tokens_per_second", self._told)
        else:
            self._steps.append((tokens, seconds))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second. None while the speed is not known."""
        if not self._steps:
            return self._told
        # The ratio of sums: a mean of the steps' rates would count a short step as much as a long one.
        return sum(tokens for tokens, _ in self._steps) / sum(seconds for _, seconds in self._steps)


def step_line(step: int, pace: RunPace, scalars: Mapping[str, float]) -> str:
    """Returns the line for a step in plain output, at most `WIDTH` columns.

    Args:
      step: Step that has ended.
      pace: Pace of the run.
      scalars: Numbers of the step, but the mean `tokens_per_second` of the last steps.
    """
    # Padded to the width of the last step, so that columns stay aligned over the run.
    parts = {"step": f"step {step:>{len(str(pace.steps))}}/{pace.steps}"}
    for metric, (part, _, form) in NUMBERS.items():
        if part and (value := scalars.get(metric)) is not None:
            parts[metric] = part.format(f"{value:{form}}")
    if not scalars.get("tokens_per_second"):
        parts.pop("tokens_per_second", None)
    trained, per_device = "train/tokens_per_second", "train/tokens_per_second_per_device"
    device_text = parts.pop(per_device, "")
    # On one device both speeds are the same, and one of them is enough.
    if trained in parts and scalars.get(per_device, math.inf) < scalars[trained]:
        parts[trained] += f" {device_text}"
    if moves := scalars.get("routing/moves"):
        right = scalars.get("routing/one_shot_accuracy")
        parts["routing/moves"] = f"{moves:.0f} moves" + ("" if right is None else f", {right:.0%} routed right")
    times = {metric: f"{name} {seconds_text(scalars[metric])}" for metric, name in TIMES.items() if metric in scalars}
    is_known = pace.remaining_seconds and pace.done < pace.steps
    remaining_text = f"{seconds_text(pace.remaining_seconds or 0.0)} left" if is_known else ""
    for metric in ("", *LESS_IMPORTANT):  # drops nothing first, then the least important parts one by one
        parts.pop(metric, None)
        times.pop(metric, None)
        line = "  ".join(filter(None, (*parts.values(), ", ".join(times.values()), remaining_text)))
        if len(line) <= WIDTH:
            break
    return line


class PlainConsole(sinks.Sink):
    """Prints one line per step, notes as they come, and occasional status lines while no step ends.

    Args:
      steps: Number of training steps of the whole run.
      clock: Returns the current seconds on the event loop's clock.
      warn: Called once with a warning if the stream is lost.
    """

    def __init__(self, name: str, steps: int, stream: TextIO, clock: Callable[[], float], warn: files.Warn) -> None:
        self._stream = stream
        self._clock = clock
        self._warn = warn
        self._pace = RunPace(steps, clock())
        self._speed = TokenRate()
        # The first status is never held back.
        self._last_line = float("-inf")
        self._lost = False
        self._pending_updates: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.note(f"libra-jax · {name} · {steps} training step{'s' * (steps != 1)}")

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        self._pace.step_ended(step, self._clock())
        self._speed.step_ended(scalars)
        # A line shows the speed of the last steps instead of the step's own (see `TokenRate`).
        line_scalars = {name: value for name, value in scalars.items() if name != "tokens_per_second"}
        if (speed := self._speed.tokens_per_second) is not None and "tokens_per_second" in scalars:
            line_scalars["tokens_per_second"] = speed
        self.note(step_line(step, self._pace, line_scalars))

    def status(self, worker: str, text: str) -> None:
        if self._clock() - self._last_line >= STATUS_SECONDS:
            self._pending_updates.pop(worker, None)
            self.note(f"{worker}: {text}")
        elif not self._pace.done:
            # Starts and the first compilation take minutes without a step's line, so the reader is told what is going
            # on.
            self._pending_updates[worker] = text
            if self._timer is None:
                self._print_updates()

    def _print_updates(self) -> None:
        """Prints what workers have done since the last line. If that line is too young, calls itself again later."""
        self._timer = None
        if not self._pending_updates or self._pace.done:
            return
        if self._clock() - self._last_line < STATUS_SECONDS:
            # Without an event loop, no timer can start; the next status tries again.
            with contextlib.suppress(RuntimeError):
                delay = max(0.0, self._last_line + STATUS_SECONDS - self._clock())
                self._timer = asyncio.get_running_loop().call_later(delay, self._print_updates)
            return
        updates, self._pending_updates = self._pending_updates, {}
        text = "; ".join(f"{worker}: {doing}" for worker, doing in updates.items())
        self.note(textwrap.shorten(text, WIDTH, placeholder=" ..."))

    def close(self) -> None:
        """Stops the timer. The stream stays open, as it belongs to the process."""
        if self._timer is not None:
            self._timer.cancel()

    def note(self, text: str) -> None:
        """Prints a line."""
        if self._lost:
            return
        self._last_line = self._clock()
        try:
            self._stream.write(escapes.visible(text) + "\n")
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError means that the stream was closed
            self._lost = True
            quiet(self._stream)
            self._warn(LOST, f"No one reads the console any more ({error}); the run goes on.")


def quiet(stream: TextIO) -> None:
    """Points a broken standard stream to /dev/null, so that Python's own flush at exit does not fail on it."""
    # Python flushes only its own standard streams at exit.
    if stream is not sys.__stdout__:
        return
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
