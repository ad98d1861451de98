"""What a script renders, beside what it rendered when somebody last looked at it."""

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """`text` is what the file of that name in golden/ has."""
    file = FOLDER / name
    if os.environ.get("LIBRA_UPDATE_GOLDEN") == "1":
        file.write_text(text)
    changes = changed(file.read_text(), text)
    assert not changes, (
        f"{name} is rendered differently: {changes}. If that is meant, run this test once with LIBRA_UPDATE_GOLDEN=1 "
        "in the environment, read the diff, and commit it with the reason."
    )


def changed(before: str, after: str) -> list[str]:
    """Lines that went (-) and came (+)."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line.startswith(("- ", "+ "))]
