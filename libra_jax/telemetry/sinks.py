"""What every file and viewer of a run has in common."""

from __future__ import annotations

from collections.abc import Mapping

from libra_jax.telemetry import samples


class Sink:
    """Takes what happens in a run. A sink ignores what it does not override, and raises for no lost disk or viewer."""

    def metrics(self, step: int, scalars: Mapping[str, float]) -> None:
        """Takes a training step's numbers."""

    def sample(self, sample: samples.Sample) -> None:
        """Takes a rollout as text, before the numbers of its step."""

    def status(self, worker: str, text: str) -> None:
        """Takes what a worker is doing now."""

    def note(self, text: str) -> None:
        """Takes a sentence for the person who watches."""

    def flush(self) -> None:
        """Hands everything taken so far to the operating system."""

    def close(self) -> None:
        """Ends the sink."""
