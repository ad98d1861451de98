"""Fault drills: `python -m tests.drills`."""

import sys
from pathlib import Path

# As Python does for a script of launch/: the drills share that folder's `cli`.
sys.path.append(str(Path(__file__).resolve().parents[2] / "launch"))
