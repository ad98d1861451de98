"""The tests' own modules, for import by name."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent))
