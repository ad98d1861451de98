"""Puts this folder's doubles, and those of the coordinator and of agents, on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
for folder in ("coordinator", "agents"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
