"""Repairs judged: what passes hidden tests, what is reported of it, and tasks from files."""

import asyncio
import dataclasses

import pytest
import repairs
import sandboxes

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import repo_repair
from libra_jax.rewards.repair import outcomes, snapshots, suites
from libra_jax.tools import toolkit
from libra_jax.tools.sandbox import pool


@pytest.fixture(scope="module")
def judged():
    with repairs.judging() as judged:
        yield judged


# Verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", repairs.COMMAND], ids=["unittest", "command"])
def test_a_repair_passes_and_what_is_broken_fails(judged, command):
    assert judged({"calc.py": repairs.FIXED}, command) == suites.SuiteVerdict(3, 3)
    assert judged({}, command) == suites.SuiteVerdict(1, 3)
    assert judged({"calc.py": None}, command).passed == 0
    assert judged({"calc.py": "def add(:"}, command).passed == 0


@pytest.mark.parametrize("command", ["", repairs.COMMAND], ids=["unittest", "command"])
def test_a_process_that_the_tests_leave_costs_no_repair_its_reward(judged, command):
    noise = "print('x' * 2**23, flush=True)\n"  # more than the runner keeps
    assert judged({"calc.py": repairs.FIXED + repairs.LEAVES + noise}, command) == suites.SuiteVerdict(3, 3)


def test_all_that_there_are_must_pass_where_no_test_is_named(judged):
    assert judged({"calc.py": repairs.FIXED}, names=()) == suites.SuiteVerdict(3, 3)
    assert judged({}, names=()) == suites.SuiteVerdict(1, 3)
    assert not judged({"calc.py": "1 / 0"}, names=()).solved


def test_a_named_test_that_is_not_there_does_not_pass(judged):
    verdict = judged({"calc.py": repairs.FIXED}, names=(*repairs.NAMES, "tests/test_calc.py::TestCalc::test_lost"))
    assert verdict == suites.SuiteVerdict(3, 4)


@pytest.mark.parametrize("command", ["", "python3 -m unittest -v tests.test_many"], ids=["unittest", "command"])
def test_many_tests_are_counted_though_little_output_is_kept(command):
    sandboxes.skip_without_bubblewrap()
    tests = "import calc, unittest\nclass TestMany(unittest.TestCase):\n" + "".join(
        f"    def test_{number}(self): assert calc.add({number}, 1) == {number + 1}\n" for number in range(300)
    )
    names = tuple(f"tests.test_many.TestMany.test_{number}" for number in range(300)) if command else ()

    async def body():
        async with pool.Sandbox(dataclasses.replace(repairs.LIMITS, output_bytes=256), warm=1) as sandbox:
            snapshot = snapshots.RepositorySnapshot.of_texts(repairs.REPOSITORY)
            suite = repairs.suite(command, tests={"tests/test_many.py": tests}, names=names)
            return await suites.run(sandbox, snapshot, repairs.files_of({"calc.py": repairs.FIXED}), suite)

    assert asyncio.run(body()) == suites.SuiteVerdict(300, 300)


LIBRARY = """
from __future__ import annotations
import enum
from dataclasses import dataclass
from fractions import Fraction

LIMIT = 7

class Broken(ValueError):
    pass

class Worse(Broken):
    pass

class Colour(enum.Enum):
    RED = 1

@dataclass
class Point:
    x: int
    y: int = 0
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, by): return Point(self.x * by, self.y * by)
    def __lt__(self, other): return self.x < other.x
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def __enter__(self): return self
    def __exit__(self, *_): self.x = -1

def fill(held):
    held.append(LIMIT)

def count(upto):
    yield from range(upto)

def fail(kind):
    raise {"value": ValueError, "own": Broken, "worse": Worse, "key": KeyError}[kind]("why " + kind)

def half(number):
    return Fraction(number, 2)
"""
ITS_TESTS = """
import unittest
from fractions import Fraction
import library
from library import *
from library import Point, Broken, Worse
from tests.helper import three

class TestLibrary(unittest.TestCase):
    def setUp(self):
        self.point = Point(1, y=2)

    def test_values(self):
        self.assertEqual(library.LIMIT, 7)
        self.assertEqual(list(library.count(three())), [0, 1, 2])
        self.assertEqual(half(3), Fraction(3, 2))
        self.assertEqual(LIMIT, 7)

    def test_objects(self):
        self.assertEqual(self.point + Point(2), Point(3, 2))
        self.assertNotEqual(self.point, Point(3))
        self.assertEqual((self.point * 3).y, 6)
        self.assertEqual(list(self.point * 3), [3, 6])
        self.assertEqual(str(self.point * 3 * 2), "Point(x=6, y=12)")
        self.assertEqual(self.point * 3, Point(3, 6))
        self.assertIsInstance(self.point, Point)
        self.assertNotIsInstance(3, Point)
        self.assertTrue(self.point < Point(9))
        self.assertEqual((len(self.point), list(self.point), repr(self.point)), (2, [1, 2], "Point(x=1, y=2)"))
        self.point.x = 5
        self.assertEqual(self.point.x, 5)
        self.assertIs(library.Colour.RED, library.Colour.RED)
        with self.point as held:
            self.assertEqual(held.x, 5)
        self.assertEqual(self.point.x, -1)
        with self.assertRaises(AttributeError):
            self.point.z

    def test_arguments_that_a_function_changes(self):
        held = [1]
        library.fill(held)
        self.assertEqual(held, [1, 7])

    def test_exceptions(self):
        with self.assertRaisesRegex(ValueError, "why value"):
            library.fail("value")
        with self.assertRaises(Broken):
            library.fail("worse")
        with self.assertRaises(Worse) as caught:
            library.fail("worse")
        self.assertEqual(caught.exception.args, ("why worse",))
        with self.assertRaises(KeyError):
            library.fail("key")

    def test_patches(self):
        library.LIMIT = 8
        held = []
        library.fill(held)
        library.LIMIT = 7
        self.assertEqual(held, [8])

    @unittest.expectedFailure
    def test_expected_to_fail(self):
        self.assertEqual(library.LIMIT, 8)

    @unittest.skip("never")
    def test_skipped(self):
        pass


def test_function():
    assert library.count(1) is not None
"""


def test_hidden_tests_use_the_repository_as_any_tests_do(judged):
    tests = {"tests/test_library.py": ITS_TESTS, "tests/helper.py": "def three():\n    return 3\n"}
    case = "tests.test_library.TestLibrary"
    names = [f"{case}.test_{name}" for name in (
        "values", "objects", "arguments_that_a_function_changes", "exceptions", "patches", "expected_to_fail"
    )]  # fmt: skip
    repository = {"src/library.py": LIBRARY}
    arguments = {"repository": repository, "tests": tests}
    verdict = judged({}, names=(*names, "tests.test_library.test_function"), **arguments)
    assert verdict == suites.SuiteVerdict(7, 7)
    assert judged({}, names=(f"{case}.test_skipped",), **arguments) == suites.SuiteVerdict(0, 1)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("test_a (m.T.test_a) ... ok", {"m.T.test_a": "passed"}),
        ("test_a (m.T) ... ok", {"m.T.test_a": "passed"}),
        ("test_a (m.T.test_a)\nWhat it does. ... ok", {"m.T.test_a": "passed"}),
        ("test_a (m.T.test_a) ... noise\nmore\nok", {"m.T.test_a": "passed"}),
        ("test_a (m.T.test_a) ... ok\nok\nFAIL", {"m.T.test_a": "failed"}),
        ("test_a (m.T.test_a) ... skipped 'why'", {"m.T.test_a": "skipped"}),
        ("test_a (m.T.test_a) ... expected failure", {"m.T.test_a": "xfailed"}),
        ("test_a (m.T.test_a) ... unexpected success", {"m.T.test_a": "failed"}),
        ("test_a (m.T.test_a) ... ok\nERROR: test_a (m.T.test_a)", {"m.T.test_a": "failed"}),
        ("PASSED tests/m.py::T::test_a", {"tests.m.T.test_a": "passed"}),
        ("tests/m.py::test_a PASSED   [ 50%]\nPASSED tests/m.py::test_a", {"tests.m.test_a": "passed"}),
        ("tests/m.py::test_a PASSED   [ 50%]\nFAILED tests/m.py::test_a - assert 1", {"tests.m.test_a": "failed"}),
        ("ok\nRan 3 tests\nOK", {}),
    ],
)
def test_what_runners_write_is_read_test_by_test(text, outcome):
    assert outcomes.printed(text) == outcome


# The environment --------------------------------------------------------------------------------------------------


def test_an_attempt_that_repairs_is_rewarded_and_one_that_does_nothing_is_not():
    looked, changed, ended = repairs.attempted(("shell", {"command": "ls"}), repairs.REPAIR)
    assert looked.tool_returns[0].content == "README.md\ncalc.py\n"
    assert changed.tool_returns[0].status == "success"
    nothing = dict.fromkeys(("tests_overdue", "tests_deceived", "sandbox_broken", "files_refused"), 0.0)
    metrics = {"tests_passed": 3.0, "tests_total": 3.0, "patch_lines": 2.0, **nothing}
    assert (ended.done, ended.reward, ended.metrics) == (True, 1.0, metrics)
    (ended,) = repairs.attempted()
    assert (ended.done, ended.reward, ended.metrics["patch_lines"]) == (True, 0.0, 0.0)
    (ended,) = repairs.attempted(partial=True)
    assert ended.reward == pytest.approx(1 / 3)


def test_a_tool_that_hangs_is_data_and_the_attempt_goes_on():
    task = repairs.task_of()

    async def work(tools):
        environment = repo_repair.environment(tools)
        await environment.reset(task)
        box = environment._toolbox
        late = await box.session.shell("sleep 60", 0.3)
        await environment.step(tools.format.write(*repairs.REPAIR))
        ended = await environment.step("done")
        await environment.close()
        return late, ended

    late, ended = repairs.with_tools(work)
    assert (late.status, ended.reward) == ("timeout", 1.0)


def test_code_that_hangs_in_the_tests_is_worth_nothing_by_its_own_fault():
    spin = ("edit", {"command": "create", "path": "calc.py", "text": "while True: pass\n"})
    *_, ended = repairs.attempted(spin, test_seconds=1.0)
    assert (ended.reward, ended.metrics["tests_overdue"]) == (0.0, 1.0)


def test_equal_repairs_are_judged_once(monkeypatch):
    real, runs = suites.run, []

    async def run(*arguments):
        runs.append(arguments)
        return await real(*arguments)

    monkeypatch.setattr(suites, "run", run)

    async def work(tools):
        for _ in range(3):
            environment = repo_repair.environment(tools, prompt="{issue}")
            await environment.reset(repairs.task_of())
            await environment.step(tools.format.write(*repairs.REPAIR))
            assert (await environment.step("done")).reward == 1.0
            await environment.close()

    repairs.with_tools(work)
    assert len(runs) == 1


def test_a_run_that_came_to_nothing_is_judged_anew_the_next_time(monkeypatch):
    """As the same files may pass where no one kills the process."""
    befallen = iter([suites.SuiteVerdict(0, 3, "ended by signal 9"), suites.SuiteVerdict(0, 3, overdue=True)])
    real = suites.run

    async def run(*arguments):
        return next(befallen, None) or await real(*arguments)

    monkeypatch.setattr(suites, "run", run)

    async def work(tools):
        rewards = []
        for _ in range(3):
            environment = repo_repair.environment(tools, prompt="Mend: {issue}")
            await environment.reset(repairs.task_of())
            await environment.step(tools.format.write(*repairs.REPAIR))
            rewards.append((await environment.step("done")).reward)
            await environment.close()
        return rewards

    assert repairs.with_tools(work) == [0.0, 0.0, 1.0]


def test_as_many_attempts_as_there_are_sandboxes_do_not_block_each_other():
    """Each has to give its own back before it can get one for the tests."""
    sandboxes.skip_without_bubblewrap()
    few = config_lib.SandboxConfig(warm=1, most=2, start_seconds=20.0)

    async def attempt(tools, number):
        environment = repo_repair.environment(tools)
        await environment.reset(repairs.task_of(issue=f"number {number}"))
        await environment.step(tools.format.write(*repairs.REPAIR))
        await environment.step(tools.format.write("shell", {"command": f"echo {number} >number"}))
        ended = await environment.step("done")
        await environment.close()
        return ended.reward

    async def body():
        async with toolkit.Toolkit(config_lib.ToolsConfig(use=("edit", "shell"), describe=False), few) as tools:
            return await asyncio.gather(*(attempt(tools, number) for number in range(2)))

    assert asyncio.run(body()) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompt": "Repair it."}, r"environment_arguments\.prompt: must hold \{issue\}"),
        ({"test_seconds": -1.0}, r"environment_arguments\.test_seconds: must be positive and finite"),
        ({"test_seconds": 8.0}, r"environment_arguments\.test_seconds: must be at most half of task\.tool_seconds"),
        ({"use": ()}, r"tools\.use: names no tool"),
        ({"most_mib": 0}, r"environment_arguments\.most_mib: must be positive"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(arguments, sentence):
    sandboxes.skip_without_bubblewrap()
    tools = toolkit.Toolkit(config_lib.ToolsConfig(use=arguments.pop("use", ("edit",))), repairs.SANDBOX, 9.5)
    with pytest.raises(protocols.ConfigError, match=sentence):
        repo_repair.environment(tools, **arguments)
