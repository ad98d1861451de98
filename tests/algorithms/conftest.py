"""Random batches for the algorithm tests: a list of trajectories, and the same packed into rows.

Letters: B rows, T tokens.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the reference that the tests compare with

FIELDS = ("log_probs", "behaviour", "proximal", "reference", "advantages", "entropy", "mask", "same_version")


@dataclasses.dataclass
class Batch:
    """Trajectories (dicts of per-token float64 arrays) and the row that each is packed into.

    Packed or not, the arrays have one shape, so that the tests share the few programs that JAX compiles for it.
    """

    trajectories: list[dict[str, np.ndarray]]
    rows: list[int]
    shape: tuple[int, int] = (7, 16)
    max_segments: int = 7

    def packed(self, untrained: float = 0.0) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Every field as [B, T], and the segment ids; `untrained` stands wherever the mask is not set."""
        fields = {name: np.full(self.shape, untrained) for name in FIELDS}
        fields["mask"][:] = 0.0
        segments = np.zeros(self.shape, np.int32)
        used = [0] * self.shape[0]
        count = [0] * self.shape[0]
        for trajectory, row in zip(self.trajectories, self.rows, strict=True):
            where = slice(used[row], used[row] + len(trajectory["mask"]))
            count[row] += 1
            segments[row, where] = count[row]
            for name in FIELDS:
                trained = trajectory["mask"] > 0
                fields[name][row, where] = (
                    trajectory[name] if name == "mask" else np.where(trained, trajectory[name], untrained)
                )
            used[row] = where.stop
        return fields, segments

    def unpacked(self) -> "Batch":
        """The same trajectories, one a row."""
        return Batch(self.trajectories, list(range(len(self.trajectories))))


def draw_batch(seed: int) -> Batch:
    """Seven trajectories of 1 to 6 tokens in the first 3 rows; some tokens, or whole trajectories, are untrained."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for _ in range(7):
        length = int(rng.integers(1, 7))
        log_probs = -rng.exponential(1.0, length)
        trained = rng.random(length) < rng.choice([0.0, 0.6, 1.0], p=[0.15, 0.45, 0.4])
        trajectories.append(
            {
                "log_probs": log_probs,
                "behaviour": log_probs + rng.normal(0, 0.6, length),
                "proximal": log_probs + rng.normal(0, 0.3, length),
                "reference": log_probs + rng.normal(0, 0.6, length),
                "advantages": np.full(length, rng.normal()),
                "entropy": rng.exponential(1.0, length),
                "mask": trained.astype(np.float64),
                "same_version": (rng.random(length) < 0.7).astype(np.float64),
            }
        )
    rows: list[int] = []
    room = [16, 16, 16]
    for trajectory in trajectories:
        fitting = [row for row in range(3) if room[row] >= len(trajectory["mask"])]
        rows.append(int(rng.choice(fitting)))
        room[rows[-1]] -= len(trajectory["mask"])
    return Batch(trajectories, rows)


@pytest.fixture(scope="session")
def batch_of():
    """A function from a seed to a Batch."""
    return draw_batch


def gradient_by_differences(function, point: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a scalar function, entry by entry."""
    gradient = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        above, below = point.copy(), point.copy()
        above[index] += step
        below[index] -= step
        gradient[index] = (function(above) - function(below)) / (2 * step)
    return gradient


@pytest.fixture(scope="session")
def differences():
    """Central differences of a scalar function of an array."""
    return gradient_by_differences
