"""Records the cost of each transition of a hybrid worker, as a line of `transitions.jsonl`."""

from __future__ import annotations

from typing import Any

from libra_jax import protocols
from libra_jax.elastic import pool
from libra_jax.elastic.states import State


class TransitionLog:
    """Collects the data of each worker's transition, and writes them.

    A line is written at the first training step or token after the transition. It is written earlier if the worker
    fails or starts another transition, or if the run ends.
    """

    def __init__(self, recorder: protocols.Recorder) -> None:
        self._recorder = recorder
        self._pending: dict[str, dict[str, Any]] = {}
        self._bytes: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """Starts the record of a worker's transition."""
        self._write(name)
        self._bytes[name] = 0

    def moved(self, name: str, nbytes: int) -> None:
        """Adds bytes of parameters that the worker received on its way."""
        self._bytes[name] += nbytes

    def rested(self, worker: pool.Worker, step: int, outcome: str, why: str) -> float:
        """Records that the worker is at rest. Returns the seconds of its transition.

        Args:
          worker: the worker, at rest.
          step: number of training steps taken.
          outcome: "done" or "failed".
          why: reason of the failure.
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
            # A worker that failed at rest made no transition.
            "bytes": self._bytes.get(worker.name, 0) if worker.phases else 0,
            "stall": {"training": 0.0, "rollout": worker.idle_seconds},
        }
        self._recorder.span(worker.name, f"{record['from']} to {record['to']}", start, end, record["phases"])
        if outcome == "failed":
            self._write(worker.name)
        return end - start

    def waiting(self, state: State) -> list[str]:
        """Returns the workers in this state that wait for their first step or token."""
        return [name for name, record in self._pending.items() if record["to"] == state]

    def useful(self, name: str, what: str, now: float, stall: float = 0.0) -> None:
        """Records the worker's first step or token after its transition.

        Args:
          name: name of the worker.
          what: "first_step" or "first_token".
          now: event-loop time in seconds.
          stall: seconds in which training stood still for it.
        """
        record = self._pending.get(name)
        if record is not None:
            record["phases"] = {**record["phases"], what: now - record["end"]}
            record["stall"]["training"] = stall
            self._write(name)

    def close(self) -> None:
        """Writes all pending lines at the end of the run."""
        for name in list(self._pending):
            self._write(name)

    def _write(self, name: str) -> None:
        record = self._pending.pop(name, None)
        if record is not None:
            self._recorder.transition(record)
