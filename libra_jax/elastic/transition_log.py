"""What transitions of hybrid workers cost: a line of `transitions.jsonl` for each, once it has been of use."""

from __future__ import annotations

from typing import Any

from libra_jax import protocols
from libra_jax.elastic import pool
from libra_jax.elastic.states import State


class TransitionLog:
    """Collects what is known of each worker's transition, and writes it.

    A line waits for the first step or token that came of the transition; the worker's next one, a failure or the end of
    the run does not wait for that.
    """

    def __init__(self, recorder: protocols.Recorder) -> None:
        self._recorder = recorder
        self._pending: dict[str, dict[str, Any]] = {}
        self._bytes: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """The worker sets out."""
        self._write(name)
        self._bytes[name] = 0

    def moved(self, name: str, nbytes: int) -> None:
        """The worker got so many bytes on its way."""
        self._bytes[name] += nbytes

    def rested(self, worker: pool.Worker, step: int, outcome: str, why: str) -> float:
        """The worker is at rest; returns the seconds that its way took.

        Args:
          worker: at rest.
          step: training steps taken.
          outcome: "done" or "failed".
          why: it failed.
        """
        self._write(worker.name)
        record = worker.record()
        turned = worker.state is State.ROLLOUT and worker.origin is State.ROLLOUT
        start, end = record["start"], record["end"]
        self._pending[worker.name] = {
            **record,
            "step": step,
            "outcome": "cancelled" if turned else outcome,
            "why": why,
            "bytes": self._bytes.get(worker.name, 0) if worker.phases else 0,  # at rest, it was on no way
            "stall": {"training": 0.0, "rollout": worker.idle_seconds},
        }
        self._recorder.span(worker.name, f"{record['from']} to {record['to']}", start, end, record["phases"])
        if outcome == "failed":
            self._write(worker.name)
        return end - start

    def waiting(self, state: State) -> list[str]:
        """Workers that have come to this state and have not been of use there."""
        return [name for name, record in self._pending.items() if record["to"] == state]

    def useful(self, name: str, what: str, now: float, stall: float = 0.0) -> None:
        """The worker's first step or token since it came to rest.

        Args:
          name: the worker's.
          what: "first_step" or "first_token".
          now: event-loop seconds.
          stall: seconds that training stood still for it.
        """
        record = self._pending.get(name)
        if record is not None:
            record["phases"] = {**record["phases"], what: now - record["end"]}
            record["stall"]["training"] = stall
            self._write(name)

    def close(self) -> None:
        """The run ends."""
        for name in list(self._pending):
            self._write(name)

    def _write(self, name: str) -> None:
        record = self._pending.pop(name, None)
        if record is not None:
            self._recorder.transition(record)
