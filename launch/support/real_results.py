"""Reports a sweep's real runs: a row for each run, means and spreads over seeds, a JSON file and a picture."""

from __future__ import annotations

import collections
import contextlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from rich import console, table, text

from libra_jax import protocols
from libra_jax.simulator import report
from libra_jax.telemetry import escapes, metrics, status

if TYPE_CHECKING:
    from support import sweeps

LAST = 10
"""Number of last training steps whose mean reward judges a run."""

MOST_CURVES = 6
"""Most settings whose rewards are drawn step by step; more could not be told apart."""

SPREAD = "+- is the sample standard deviation over the seeds that are done; it is empty with one seed."

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")


class OutcomeRecord(TypedDict):
    """A run's entry in `sweep.json`."""

    seed: int
    state: str
    sentence: str
    workdir: str
    steps: int
    reward: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Outcome:
    """Result of one run.

    Attributes:
      run: the run.
      state: done, failed, stopped, submitted or left.
      sentence: reason of a failure, or the launcher's answer.
      rewards: mean reward of each recorded training step.
      accuracy: accuracy of its last evaluation; None without one.
    """

    run: sweeps.Run
    state: str
    sentence: str
    rewards: dict[int, float]
    accuracy: float | None

    @property
    def reward(self) -> float | None:
        """Mean reward of the last `LAST` steps."""
        return statistics.fmean(list(self.rewards.values())[-LAST:]) if self.rewards else None

    def as_json(self) -> OutcomeRecord:
        """Returns the outcome as `sweep.json` has it."""
        return {
            "seed": self.run.config.seed,
            "state": self.state,
            "sentence": self.sentence,
            "workdir": str(self.run.workdir),
            "steps": max(self.rewards, default=0),
            "reward": self.reward,
            "accuracy": self.accuracy,
        }


def outcome(run: sweeps.Run, answers: Mapping[str, str], failed: Mapping[str, str]) -> Outcome:
    """Returns the known result of a run.

    Args:
      run: the run.
      answers: launchers' answers, by the name of the workdir.
      failed: errors of starts by this command, by the name of the workdir.
    """
    name = run.workdir.name
    recorded = metrics.read(run.workdir / metrics.METRICS_FILE)
    rewards = {
        step: scalars["reward/mean"] for step, scalars in recorded.items() if step > 0 and "reward/mean" in scalars
    }
    accuracies = [scalars["evaluation/accuracy"] for scalars in recorded.values() if "evaluation/accuracy" in scalars]
    state, sentence = ("submitted" if name in answers else "left"), answers.get(name, "")
    if run.done:
        state = "done"
    elif name in failed:
        state, sentence = "failed", failed[name]
    else:
        with contextlib.suppress(protocols.DataError):  # the file may be incomplete while its launcher writes it
            record = status.read(run.workdir)
            if record is not None and (ended := record["ended"]) is not None and ended["how"] != "done":
                state, sentence = ended["how"], ended["sentence"]
    return Outcome(run, state, sentence, rewards, accuracies[-1] if accuracies else None)


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints a row for each run, and one for each setting with mean and spread over seeds."""
    runs = table.Table("config", "seed", "state", "steps", f"reward, last {LAST}", "what was said")
    for one in outcomes:
        steps = f"{max(one.rewards, default=0)} of {one.run.config.steps}"
        reward = "" if one.reward is None else f"{one.reward:.3f}"
        seed = str(one.run.config.seed)
        runs.add_row(_plain(one.run.name), seed, _plain(one.state), steps, reward, _plain(one.sentence))
    means = table.Table("config", "seeds done", f"reward, last {LAST}", "+-", "accuracy", "+-")
    for name, mine in by_setting(outcomes).items():
        done = [one for one in mine if one.state == "done"]
        cells = [*_cells([one.reward for one in done]), *_cells([one.accuracy for one in done])]
        means.add_row(_plain(name), f"{len(done)} of {len(mine)}", *cells)
    shown = console.Console(width=None if sys.stdout.isatty() else 160)
    shown.print(runs)
    shown.print(means)
    shown.print(SPREAD)


def _plain(shown: str) -> text.Text:
    """Returns text of a run or a launcher as a cell: without styles, and without escapes for the terminal."""
    return text.Text(escapes.visible(shown))


def by_setting(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Returns the outcomes of each setting, in the order of the sweep."""
    grouped: dict[str, list[Outcome]] = collections.defaultdict(list)
    for one in outcomes:
        grouped[one.run.name].append(one)
    return dict(grouped)


def write(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """Writes `sweep.json`, and `sweep.svg` if a run is done; returns the files.

    Raises:
      DataError: the folder cannot be written.
    """
    summary = {}
    for name, mine in by_setting(outcomes).items():
        rewards = [one.reward for one in mine if one.state == "done" and one.reward is not None]
        summary[name] = {
            "settings": list(mine[0].run.settings),
            "reward": {"mean": statistics.fmean(rewards) if rewards else None, "spread": _spread(rewards)},
            "runs": [one.as_json() for one in mine],
        }
    written = [folder / "sweep.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written[0].write_text(json.dumps(summary, indent=2) + "\n")
        if any(one.state == "done" and one.rewards for one in outcomes):
            written.append(folder / "sweep.svg")
            _draw(written[1], outcomes)
    except OSError as error:
        raise protocols.DataError(f"--output: {folder} cannot be written ({error.strerror or error})") from error
    return written


def _draw(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Draws the rewards of each setting: over the steps if there are few settings, and at the end."""
    settings = {
        name: done
        for name, mine in by_setting(outcomes).items()
        if (done := [one for one in mine if one.state == "done" and one.rewards])
    }
    few = len(settings) <= MOST_CURVES
    seeds = max(map(len, settings.values()))
    of_seeds = f", mean of {seeds} seeds ± standard deviation" if seeds > 1 else ""
    rows = [*([2.4] if few else []), report.bars_height(list(settings))]
    with report.picture_axes(path, sum(rows), [f"Rewards{of_seeds}"], rows) as axes:
        names = [name.replace("\n", " ") for name in report.short(list(settings))]
        for colour, name, done in zip(COLOURS, names, settings.values(), strict=False) if few else ():
            # Only the steps that every seed has recorded.
            steps = sorted(set.intersection(*(set(one.rewards) for one in done)))
            means = [statistics.fmean(one.rewards[step] for one in done) for step in steps]
            spreads = [_spread([one.rewards[step] for one in done]) for step in steps]
            axes[0].plot(steps, means, "o-" if len(steps) < 3 else "-", color=colour, markersize=4, label=name)
            if len(done) > 1:
                low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
                high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
                axes[0].fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        if few:
            axes[0].xaxis.get_major_locator().set_params(integer=True)
            axes[0].set_xlabel("training step")
            axes[0].set_ylabel("mean reward")
        last = axes[1] if few else axes
        finals = [[one.reward or 0.0 for one in done] for done in settings.values()]
        report.bars(last, list(settings), list(map(statistics.fmean, finals)), list(map(_spread, finals)), "{:.3f}")
        last.set_xlabel(f"mean reward of the last {LAST} steps")


def _cells(values: Sequence[float | None]) -> tuple[str, str]:
    """Returns mean and spread as the table shows them."""
    known = [value for value in values if value is not None]
    mean = f"{statistics.fmean(known):.3f}" if known else ""
    return mean, f"{_spread(known):.3f}" if len(known) > 1 else ""


def _spread(values: Sequence[float]) -> float:
    """Returns the sample standard deviation; 0 for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
