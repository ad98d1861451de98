"""Prefixes that a simulated instance holds for requests that may return, and contexts that it fetches.

`batch.InstanceBatch` says how much room they have. If room is needed, held prefixes are dropped, least recently used
first. Contexts are fetched from host memory (`offload.py`).
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator

from libra_jax.simulator import requests


class CachedPrefixes:
    """Prefixes that an instance holds, the least recently used first.

    Attributes:
      tokens: tokens of all prefixes.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._prefixes: collections.OrderedDict[tuple[str, int], int] = collections.OrderedDict()

    def hold(self, key: tuple[str, int], tokens: int) -> None:
        """Holds a prefix, instead of an earlier one of the same key."""
        # Popped first, so that it counts as the most recently used.
        self.tokens += tokens - self._prefixes.pop(key, 0)
        self._prefixes[key] = tokens

    def release(self, key: tuple[str, int]) -> None:
        """Gives up a prefix, if one is held."""
        self.tokens -= self._prefixes.pop(key, 0)

    def prefix(self, request: requests.BatchRequest) -> int:
        """Returns the tokens at the beginning of a request's context whose keys and values the instance holds."""
        cached_tokens = min(self._prefixes.get(request.key, 0), request.length)
        segment, shared = request.segment, request.length
        # What the segments before it left here serves as far as it is shared. Their own entries stay.
        while segment.parent is not None:
            shared, segment = min(shared, segment.shared), segment.parent
            if segment.key in self._prefixes:
                self._prefixes.move_to_end(segment.key)
                cached_tokens = max(cached_tokens, min(self._prefixes[segment.key], shared))
        return cached_tokens

    def evict(self, room: int) -> None:
        """Drops prefixes, least recently used first, until they fit into `room` tokens."""
        while self.tokens > room:
            self.tokens -= self._prefixes.popitem(last=False)[1]

    def clear(self) -> None:
        """Drops all prefixes."""
        self._prefixes.clear()
        self.tokens = 0


class Fetches:
    """Requests whose contexts an instance fetches, one after another over its link.

    Attributes:
      end: time at which the last fetch ends; 0 if none runs.
    """

    def __init__(self) -> None:
        self.end = 0.0
        self._timers: dict[requests.BatchRequest, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[requests.BatchRequest]:
        return iter(self._timers)

    def latest(self) -> requests.BatchRequest | None:
        """Returns the request whose fetch began last; None if none runs."""
        return next(reversed(self._timers), None)

    def begin(self, request: requests.BatchRequest, timer: asyncio.TimerHandle) -> None:
        """Adds a fetch, which ends with its timer."""
        self._timers[request] = timer
        self.end = timer.when()

    def stop(self, request: requests.BatchRequest) -> None:
        """Ends a fetch, or cuts it off; frees the link after the last of the others."""
        self._timers.pop(request).cancel()
        self.end = max((timer.when() for timer in self._timers.values()), default=0.0)

    def clear(self) -> None:
        """Cuts all fetches off."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.end = 0.0
