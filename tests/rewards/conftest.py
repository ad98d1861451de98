"""Puts this folder on the path: tests of payloads share helpers of those of rewards."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
