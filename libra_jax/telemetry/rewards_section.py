"""The report's section on what a reward is made of: each function's value over the steps, its time, its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libra_jax.telemetry import figures, page

WIDTH = 5
"""Steps that values are means of."""

NOTE = (
    f"Each function's own value before its weight, mean of {WIDTH} steps (of half of them, where there are fewer than "
    f"{2 * WIDTH}). Seconds are those of calls that were made; values that were known already cost none."
)

HEADS = ("function", "first", "last", "seconds a call", "known already")

SUMS = ("reward/mean", "reward/std")
"""Of the whole reward, which has a picture of its own."""

ENVIRONMENT = "reward/environment"


def sections(steps: Mapping[int, Mapping[str, float]]) -> list[page.Section]:
    """The picture and the table under it; none where the environment's own reward is all there is.

    Args:
      steps: each training step's scalars (`agents.rewards.composition` says which tell of rewards).
    """
    curves = {name: _curve(steps, name) for name in _names(steps)}
    if set(curves) <= {ENVIRONMENT}:
        return []
    told = {name.removeprefix("reward/"): curve for name, curve in curves.items()}
    smooth = {name: figures.moving_mean(curve, WIDTH) for name, curve in told.items()}
    table = page.table(HEADS, [_row(steps, name, curve) for name, curve in told.items()])
    return [
        page.Section(
            "What the reward is made of",
            figures.for_screens(lambda width: figures.curves(smooth, width=width)) + table,
            NOTE,
            wide=True,
        )
    ]


def _names(steps: Mapping[int, Mapping[str, float]]) -> Sequence[str]:
    """Functions in alphabetical order, the environment's own last; not what functions report besides."""
    found = {name for scalars in steps.values() for name in scalars if name.startswith("reward/")}
    functions = {name for name in found.difference(SUMS) if name.count("/") == 1}
    return sorted(functions, key=lambda name: (name == ENVIRONMENT, name))


def _curve(steps: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    return {step: scalars[name] for step, scalars in steps.items() if name in scalars}


def _row(steps: Mapping[int, Mapping[str, float]], name: str, curve: Mapping[int, float]) -> tuple[str, ...]:
    values = list(curve.values())
    size = max(1, min(WIDTH, len(values) // 2))  # as in the report's first sentence: windows that share no step
    seconds = list(_curve(steps, f"reward_seconds/{name}").values())
    known = list(_curve(steps, f"reward_cached/{name}").values())
    return (
        name,
        f"{sum(values[:size]) / size:z.3f}",
        f"{sum(values[-size:]) / size:z.3f}" if len(values) > 1 else "",
        f"{sum(seconds) / len(seconds):.3g}" if seconds else "",
        f"{sum(known) / len(known):.0%}" if known else "",
    )
