"""Shows only the first few of many similar faults. Broken code or a broken environment may cause thousands."""

from __future__ import annotations

from collections.abc import Callable

MOST = 10
"""Largest number of sentences that one `FirstFew` passes on."""


class FirstFew:
    """Passes on the first `MOST` sentences. The last one says that further ones are not shown.

    Args:
      tell: Called with each sentence, including its full stop.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told = 0

    def tell(self, sentence: str) -> None:
        """Takes another sentence, without its full stop."""
        self._told += 1
        if self._told <= MOST:
            self._tell(f"{sentence}{'; further ones are not shown' if self._told == MOST else ''}.")
