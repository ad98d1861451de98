"""Virtual environments of agents that tests run, where they have been made (`bash launch/harness.sh`)."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(name):
    """The interpreter of a virtual environment. Skips the test if there is none."""
    folder = Path(os.environ.get("LIBRA_JAX_HARNESSES", ROOT / ".venv"))
    found = folder / f"harness-{name}" / "bin" / "python"
    if not found.exists():
        pytest.skip(f"there is no {found}: bash launch/harness.sh {name} makes it")
    return str(found)
