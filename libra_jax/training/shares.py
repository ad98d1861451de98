"""The split of a step's micro-batches: one pure function that the core and every hybrid worker call."""

from __future__ import annotations

from collections.abc import Sequence

from libra_jax import protocols


def split(work: Sequence[int], shares: Sequence[protocols.Share]) -> tuple[range, ...]:
    """Returns ranges of whole micro-batches: the core's first, then each hybrid worker's, in the order of `shares`.

    The micro-batches' work lies on a line from 0 to 1. The core's part ends at 1 minus the sum of all fractions. Each
    hybrid worker's part follows, as long as its fraction. Each end moves to the nearest border between micro-batches,
    or to the earlier border if two are equally near. The core has at least the first micro-batch; a hybrid worker may
    have none.

    Args:
      work: work of each micro-batch, in any unit, above zero (rows x columns).
      shares: shares whose fractions sum to less than 1.

    Raises:
      ConfigError: there is nothing to split, the fractions are out of range or leave the core nothing, or one hybrid
        worker has two shares.
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
        # From index 1, so that the core keeps a micro-batch; `min` returns the earlier of two equally near borders.
        nearest = min(range(1, len(borders)), key=lambda index: abs(borders[index] - wanted))
        ends.append(max(nearest, *ends) if ends else nearest)
    firsts = [0, *ends]
    return tuple(range(first, last) for first, last in zip(firsts, [*ends, len(work)], strict=True))
