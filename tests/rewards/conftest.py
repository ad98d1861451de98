"""Puts this folder, and that of rollouts, on the path: tests of payloads share helpers of both."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "rollouts")]
