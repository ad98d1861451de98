"""Puts this folder's doubles on the path, for the tests and for the factories that name them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
