"""Prints rollouts that a run saved as text: the prompt, each turn, tool calls and returns, the reward and its parts.

  python launch/show.py runs/mine                      # of the last step, the best first
  python launch/show.py runs/mine --step=3 --worst     # of step 3, the worst first
  python launch/show.py runs/mine --prompt=task-17     # of prompts whose id or text contains this, over the steps

`telemetry.samples` says how many rollouts of a step are saved. Control characters are shown as escapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from support import cli

from absl import flags
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from libra_jax import protocols
from libra_jax.telemetry import escapes, samples

_WORKDIR = flags.DEFINE_string("workdir", None, "The run's folder; the flag's name may be left out.", required=True)
_STEP = flags.DEFINE_integer("step", None, "The step; default the last one, or all with --prompt, --best or --worst.")
_BEST = flags.DEFINE_bool("best", False, "Highest rewards first, over all steps unless --step is given.")
_WORST = flags.DEFINE_bool("worst", False, "Lowest rewards first, over all steps unless --step is given.")
_PROMPT = flags.DEFINE_string("prompt", None, "Only prompts whose id or text contains this.")
_EVALUATION = flags.DEFINE_bool("evaluation", False, "Rollouts of evaluations, instead of training's.")
_LIMIT = flags.DEFINE_integer("limit", 8, "Rollouts that are printed at most.", lower_bound=1)

COLOURS = {"prompt": "dim", "model": "blue", "tool": "magenta"}
"""Style of a piece's border, by who wrote it."""


def main() -> None:
    if _BEST.value and _WORST.value:
        raise protocols.ConfigError("--best and --worst: give one of them")
    path = Path(_WORKDIR.value) / samples.SAMPLES_FILE
    shown = chosen(list(samples.read(path)), path)
    console = Console()
    for sample in shown[: _LIMIT.value]:
        console.print(picture(sample))
    if len(shown) > _LIMIT.value:
        console.print(f"{len(shown) - _LIMIT.value:,} more; --limit={len(shown)} shows them.", style="dim")


def chosen(found: Sequence[samples.Sample], path: Path) -> list[samples.Sample]:
    """Returns the samples that the flags ask for, in the order of printing.

    Raises:
      DataError: nothing was saved, or nothing fits.
    """
    kind = [sample for sample in found if sample.evaluation == _EVALUATION.value]
    if not kind:
        what = "evaluation rollouts" if _EVALUATION.value else "rollouts"
        raise protocols.DataError(
            f"{path}: no {what} were saved here; give the workdir of a run with config.telemetry.samples above 0"
        )
    steps = sorted({sample.step for sample in kind})
    step = _STEP.value
    if step is None and not (_BEST.value or _WORST.value or _PROMPT.value):
        step = steps[-1]
    fitting = [
        sample
        for sample in kind
        if step in (None, sample.step)
        and (not _PROMPT.value or _PROMPT.value in sample.prompt_id or _PROMPT.value in sample.pieces[0].text)
    ]
    if not fitting:
        raise protocols.DataError(
            f"{path}: no rollout fits; it holds {len(kind):,} of steps {steps[0]} to {steps[-1]} "
            "(--step, --prompt and --evaluation choose)"
        )
    if _BEST.value or _WORST.value:
        sign = -1.0 if _BEST.value else 1.0
        fitting.sort(key=lambda sample: math.inf if math.isnan(sample.reward) else sign * sample.reward)
    return fitting


def picture(sample: samples.Sample) -> RenderableType:
    """Returns a rollout as a titled list of panels."""
    panels = [
        Panel(
            Text(escapes.visible(piece.text, lines=True)),
            title=Text(piece.title),
            title_align="left",
            box=box.ROUNDED,
            border_style=COLOURS[piece.source],
        )
        for piece in sample.pieces
    ]
    return Group(Text(sample.headline, style="bold"), *panels, Text())


if __name__ == "__main__":
    cli.run(main, positional="workdir")
