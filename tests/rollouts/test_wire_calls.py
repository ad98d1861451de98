"""What a call did and how it failed, read off the texts of a harness."""

from __future__ import annotations

import json

import pytest

from libra_jax import protocols
from libra_jax.rollouts import tool_results


@pytest.mark.parametrize(
    ("command", "did"),
    [
        ("python -m pytest -x tests/", "test"),
        ("cd /testbed && python tests/runtests.py", "test"),
        ("go test ./...", "test"),
        ("sed -i s/a/b/ setup.py", "edit"),
        ("cat > app.py <<'EOF'\nx = 1\nEOF", "edit"),
        ("echo done > notes.txt", "edit"),
        ("pip install -e .", "install"),
        ("apt-get -y install gcc", "install"),
        ("cd /app && ls -la", "read"),
        ("grep -rn name src 2>&1 | head", "read"),
        ("cat tests/test_app.py", "read"),
        ("grep -rn name tests/", "read"),
        ("sed -i s/a/b/ tests/test_app.py", "edit"),
        ("./tests/run.sh", "test"),
        ("python main.py", ""),
    ],
)
def test_a_command_tells_what_it_does(command, did):
    assert tool_results.call(protocols.ToolCall("1", "bash", json.dumps({"command": command}))) == did


@pytest.mark.parametrize("arguments", ["", "[1]", "{", '{"command": 3}', '{"path": "pytest"}'])
def test_a_call_without_a_command_tells_nothing(arguments):
    assert tool_results.call(protocols.ToolCall("1", "bash", arguments)) == ""
    assert tool_results.call(None) == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Traceback (most recent call last):\n  x\nModuleNotFoundError: No module named 'a'", "ModuleNotFoundError"),
        ("KeyError: 1\nDuring handling of it\nValueError: 2", "ValueError"),
        ("<returncode>2</returncode>", "exit 2"),
        ("exit code: 0", ""),
        ("nothing to say", ""),
        ("", ""),
    ],
)
def test_a_failure_names_its_error(text, error):
    assert tool_results.error(text) == error
