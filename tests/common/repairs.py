"""What the tests of repairs share: a small repository with a bug, its hidden tests, and runs of them."""

import asyncio
import contextlib
import pathlib
import shutil

import pytest
import sandboxes

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import repo_repair
from libra_jax.rewards.repair import snapshots, suites
from libra_jax.tools import toolkit
from libra_jax.tools.sandbox import limits, pool

LIMITS = limits.Limits(
    seconds=8.0, cpu_seconds=2.0, memory_mib=256, processes=24, file_mib=4, workspace_mib=8, files=2000
)
SANDBOX = config_lib.SandboxConfig(
    seconds=8.0, cpu_seconds=2.0, memory_mib=256, processes=24, file_mib=4, workspace_mib=8, files=2000, warm=2
)

BROKEN = "def add(a, b):\n    return a - b\n\n\ndef times(a, b):\n    return a * b\n"
FIXED = BROKEN.replace("a - b", "a + b")
REPOSITORY = {"calc.py": BROKEN, "README.md": "Adds and multiplies.\n"}
TESTS = {
    "tests/__init__.py": "",
    "tests/test_calc.py": (
        "import unittest\n\nfrom calc import add, times\n\n\nclass TestCalc(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(add(20, 3), 23)\n\n"
        "    def test_add_more(self):\n        assert add(1, 1) == 2\n\n"
        "    def test_times(self):\n        self.assertEqual(times(4, 5), 20)\n"
    ),
}
NAMES = tuple(f"tests/test_calc.py::TestCalc::{name}" for name in ("test_add", "test_add_more", "test_times"))
PAYLOAD = {"files": REPOSITORY, "tests": TESTS, "issue": "Sums are off.", "fail_to_pass": NAMES}
COMMAND = "python3 -m unittest -v tests.test_calc"

LEAVES = "__import__('subprocess').Popen(['sleep', '60'])\n"
"""Code that leaves a process, which holds what the tests' process prints to."""


def files_of(texts):
    return {path: snapshots.File(text.encode() if isinstance(text, str) else text) for path, text in texts.items()}


def suite(command="", tests=TESTS, names=NAMES, seconds=None):
    return suites.Suite(files_of(tests), names, command, seconds)


def pytest_alone(folder):
    """A directory with pytest and none of the plugins that are installed beside it here."""
    packages = folder / "packages"
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        shutil.copytree(pathlib.Path(pytest.__file__).parent.parent / name, packages / name)
    packages.chmod(0o755)
    return str(packages)


def cases(group):
    """Runs a test with each value of a mapping, under its key."""
    return pytest.mark.parametrize("made", group.values(), ids=group.keys())


def checking(*lines, begin="from calc import *"):
    """A hidden test that runs some lines."""
    body = "".join(f"        {line}\n" for line in lines)
    return {"tests/test_calc.py": f"import unittest\n{begin}\nclass T(unittest.TestCase):\n    def test(self):\n{body}"}


@contextlib.contextmanager
def judging(packages=()):
    """Lends a function that gives the verdict on the repository with some files changed; None removes one."""
    sandboxes.skip_without_bubblewrap()
    with asyncio.Runner() as runner:
        sandbox = pool.Sandbox(LIMITS, warm=2, packages=packages)
        runner.run(sandbox.start())

        def judged(changes, command="", repository=REPOSITORY, **arguments):
            texts = {path: text for path, text in {**repository, **changes}.items() if text is not None}
            snapshot = snapshots.RepositorySnapshot.of_texts(repository)
            return runner.run(suites.run(sandbox, snapshot, files_of(texts), suite(command, **arguments)))

        yield judged
        found = sandboxes.processes_of(sandbox)
        runner.run(sandbox.close())
        assert not runner.run(sandboxes.gone(found))


def with_tools(work, use=("shell", "edit", "python")):
    """Runs `work(tools)` with a run's tools."""
    sandboxes.skip_without_bubblewrap()

    async def body():
        async with toolkit.Toolkit(config_lib.ToolsConfig(use=use, describe=False), SANDBOX) as tools:
            return await work(tools)

    return asyncio.run(body())


def task_of(**changes):
    """The task of these tests with some fields changed."""
    return protocols.Task("t", {**PAYLOAD, **changes})


def attempted(*calls, task=None, **arguments):
    """The results of an attempt's outputs; the last one ends it."""

    async def work(tools):
        environment = repo_repair.environment(tools, **arguments)
        await environment.reset(task or task_of())
        try:
            results = [await environment.step(tools.format.write(*call)) for call in calls]
            return [*results, await environment.step("done")]
        finally:
            await environment.close()

    return with_tools(work)


REPAIR = ("edit", {"command": "replace", "path": "calc.py", "old": "a - b", "new": "a + b"})
