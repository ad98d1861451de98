"""Who computes which micro-batches of a step: one pure function that the core and every replica call alike."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import protocols


def split(work: Sequence[int], shares: Sequence[protocols.Share]) -> tuple[range, ...]:
    """Ranges of whole micro-batches: the core's first, then each member's, in the order of `shares`.

    Work is laid out on a line from 0 to 1. The core's part ends where 1 less all fractions falls, the first member's
    its fraction later, and so on; each end is moved to the nearest border between micro-batches, to the earlier one of
    two as near. The core has at least the first micro-batch; a member may have none.

    Args:
      work: of each micro-batch, in any unit above zero (rows x columns).
      shares: below 1 in all.

    Raises:
      ConfigError: there is nothing to split, the fractions are out of range or leave the core nothing, or a member
        has two.
    """
    fractions = [share.fraction for share in shares]
    if not work or min(work) <= 0:
        raise protocols.ConfigError("a step is split by the work of its micro-batches, each above zero")
    if not all(0 < fraction < 1 for fraction in fractions) or sum(fractions) >= 1:
        raise protocols.ConfigError(
            f"shares of {', '.join(f'{fraction:g}' for fraction in fractions)} of a step: each must lie in (0, 1), and "
            "together they must leave a part to the core"
        )
    if len({share.member for share in shares}) < len(shares):
        raise protocols.ConfigError(f"a member has two shares of a step: {', '.join(share.member for share in shares)}")
    borders = [0]
    for item in work:
        borders.append(borders[-1] + item)
    ends: list[int] = []
    for behind in range(len(fractions)):
        wanted = (1.0 - sum(fractions[behind:])) * borders[-1]
        nearest = min(range(1, len(borders)), key=lambda index: abs(borders[index] - wanted))
        ends.append(max(nearest, *ends) if ends else nearest)
    firsts = [0, *ends]
    return tuple(range(first, last) for first, last in zip(firsts, [*ends, len(work)], strict=True))
