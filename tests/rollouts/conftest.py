"""Puts this folder on the path: tests of resumed attempts share helpers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
