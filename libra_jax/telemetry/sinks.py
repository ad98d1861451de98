"""The common interface of a run's files and viewers."""

from __future__ import annotations

from collections.abc import Mapping

from libra_jax.telemetry import samples


class Sink:
    """Receives the events of a run.

    A sink ignores events that it does not override. A lost disk or viewer raises nothing.
    """

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes a training step's numbers."""

    def sample(self, sample: samples.Sample) -> None:
        """Takes a rollout as text, before the numbers of its step."""

    def status(self, worker: str, text: str) -> None:
        """Takes what a worker is doing now."""

    def note(self, text: str) -> None:
        """Takes a sentence for the person who watches the run."""

    def flush(self) -> None:
        """Passes everything taken so far to the operating system."""

    def close(self) -> None:
        """Ends the sink."""
