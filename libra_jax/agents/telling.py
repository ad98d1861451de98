"""Shows a person only the first few of faults that may come by the thousand, if code or an environment breaks."""

from __future__ import annotations

from collections.abc import Callable

MOST = 10
"""Sentences of one kind in a run."""


class FirstFew:
    """Passes the first `MOST` sentences on; the last of them says that further ones are not shown.

    Args:
      tell: gets each sentence, with its full stop.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told = 0

    def tell(self, sentence: str) -> None:
        """Takes one more sentence, without its full stop."""
        self._told += 1
        if self._told <= MOST:
            self._tell(f"{sentence}{'; further ones are not shown' if self._told == MOST else ''}.")
