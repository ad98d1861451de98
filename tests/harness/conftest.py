"""Puts this folder's doubles, and those of the coordinator, on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "coordinator"))
