"""Reads the Markdown pages of the repository: their prose, code blocks, links and literals."""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
GENERATED = ROOT / "docs" / "reference" / "generated"
_FENCE = re.compile(r"^(`{3,})(\S*).*?\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)


def pages() -> list[pathlib.Path]:
    """Returns README.md, CHANGELOG.md and the pages of docs/ that are written by hand."""
    written = (path for path in (ROOT / "docs").rglob("*.md") if GENERATED not in path.parents)
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(written)]


def blocks(page: pathlib.Path, language: str) -> list[str]:
    """Returns the code blocks of a page in one language."""
    return [match[3] for match in _FENCE.finditer(page.read_text()) if match[2] == language]


def code_lines(page: pathlib.Path) -> list[str]:
    """Returns the lines of all code blocks of a page."""
    return [line for match in _FENCE.finditer(page.read_text()) for line in match[3].splitlines()]


def example(page: str, name: str) -> str:
    """Returns the Python block of a page whose first line is a comment with the file's name."""
    found = [block for block in blocks(ROOT / page, "python") if block.startswith(f"# {name}")]
    assert len(found) == 1, f"{page} must have one Python block that begins with '# {name}'"
    return found[0]


def prose(page: pathlib.Path) -> str:
    """Returns a page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def sentences(page: pathlib.Path) -> list[str]:
    """Returns the sentences of a page's paragraphs and list entries. A colon or semicolon ends one, too."""
    lines = [line for line in prose(page).splitlines() if not line.lstrip().startswith(("|", "#", "!"))]
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        text = re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split()))
        found += re.split(r"(?<=[.:;?!])\s+", text)
    return found


def literals(page: pathlib.Path) -> list[str]:
    """Returns what stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: pathlib.Path) -> list[str]:
    """Returns the targets of a page's links and pictures that are not other sites."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if "://" not in target]


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: pathlib.Path) -> list[str]:
    """Returns the commands of a page's bash blocks, each on one line and without its comment."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s)#.*$", "", line).strip()
            if command:
                found.append(command)
    return found


def known() -> dict[str, Any]:
    """Returns the flags of each script, and fields with their meanings, of a run's config and of a simulated run's.

    Another process looks, because flags are read by starting each script's module.
    """
    looked = _look()
    assert looked.returncode == 0, looked.stderr
    return json.loads(looked.stdout)


@functools.cache
def _look() -> subprocess.CompletedProcess[str]:
    """Returns what the other process said. A failure is kept, too: no second test waits for it."""
    code = """
import json, sys
import generated
from libra_jax.config import listing
from libra_jax.simulator import settings
flags = {name: [flag.name for flag in generated.script_flags(name)[1]] for name in generated.scripts()}
kinds = {"run": generated.config_lib.RunConfig, "simulated": settings.SimulatedRun}
fields = {name: {s.name: s.meaning for s in listing.settings(kind)} for name, kind in kinds.items()}
json.dump({"flags": flags, "fields": fields}, sys.stdout)
"""
    path = os.pathsep.join(map(str, (ROOT / "docs" / "_ext", ROOT / "launch", ROOT)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
