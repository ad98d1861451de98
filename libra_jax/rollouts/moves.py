"""Moves of a request between instances, as its streams carry them out."""

from __future__ import annotations

from dataclasses import dataclass, field

from libra_jax import protocols


@dataclass
class Route:
    """The instances that served a request.

    Attributes:
      streams: number of instances asked for its tokens so far, one after the other.
      decided: move that the scheduler has decided on since the last stream began; None if the request stays.
      move: move with which the last stream began; None if that was the first, or the request stayed.
      moves: each move so far, with the number of the turn that went on after it.
    """

    streams: int = 0
    decided: protocols.Move | None = None
    move: protocols.Move | None = None
    moves: list[tuple[int, protocols.Move]] = field(default_factory=list)

    def take_placement(self, move: protocols.Move | None) -> None:
        """Takes in that the scheduler has placed the request, with a move or without."""
        if move is not None:
            # Of several moves before a stream begins, only the way from the first source to the last target is gone.
            source = move.source if self.decided is None else self.decided.source
            self.decided = move._replace(source=source) if source != move.target else None

    def begin_stream(self, turn: int, context_tokens: int, counts: protocols.StreamCounts) -> None:
        """Takes in that a stream begins, for the turn of this number, with these tokens of context."""
        self.move = self.decided if self.streams else None
        self.decided = None
        self.streams += 1
        if self.move is not None:
            self.moves.append((turn, self.move))
            counts.moves += 1
            counts.moved_tokens += context_tokens

    def record_answer(self, seconds: float, counts: protocols.StreamCounts) -> None:
        """Takes in that the stream's first tokens came this many seconds after they were asked for."""
        if self.streams > 1:
            waits = counts.stayed if self.move is None else counts.moved
            waits.seconds += seconds
            waits.count += 1
