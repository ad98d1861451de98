"""Puts launch/ on the path, as Python does when one of its scripts is run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "launch"))
