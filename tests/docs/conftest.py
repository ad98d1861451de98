"""Lets the tests of this folder import `pages` by name."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent))
