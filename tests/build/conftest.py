"""Puts launch/ and the helpers of its tests on the path: what a script does with a run is tested here as well."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT / "tests" / "launch"), str(ROOT / "launch")])
