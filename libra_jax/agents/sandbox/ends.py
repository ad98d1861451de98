"""What is said of sandboxes that end of themselves: to a person, as a policy reads of its own calls only."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

MOST = 10
"""Sentences of a run: where code breaks its sandboxes, there may be thousands."""


class Ends:
    """Says the first few of a run."""

    def __init__(self) -> None:
        self._told = 0

    def tell(self, sentence: str) -> None:
        """One more; `sentence` without its full stop."""
        self._told += 1
        if self._told <= MOST:
            _log.warning("%s%s.", sentence, "; further ones are not told of" if self._told == MOST else "")
