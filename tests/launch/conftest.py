"""Puts launch/ on the path, as Python does when one of its scripts is run, and this folder's helpers."""

import sys
from pathlib import Path

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "launch")])
