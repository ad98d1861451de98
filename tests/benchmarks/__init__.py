"""Benchmarks of single parts: `python -m tests.benchmarks`. Those that users run are in launch/benchmark.py."""

import sys
from pathlib import Path

# As Python does for a script of launch/: the benchmarks share that folder's helpers.
sys.path.append(str(Path(__file__).resolve().parents[2] / "launch"))
