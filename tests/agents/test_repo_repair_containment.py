"""Attempts to pass hidden tests without a repair: by the tested code, and by what was planted around it."""

import ast
import asyncio
import gzip
import io
import sys
import tarfile
import tracemalloc

import psutil
import pytest
import repairs
import sandboxes

from libra_jax import protocols
from libra_jax.agents.environments import repo_repair
from libra_jax.agents.repair import snapshots, suites

SPY = "import glob, os, re, sys\n"
ANYTHING = (
    "class Any(int):\n"
    "    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
    "    def __hash__(self): return 0\n    def __sub__(self, other): return 0\n"
    "    def __rsub__(self, other): return 0\n"
)

CODE = {
    "exit-at-once": "import os\nos._exit(0)\n",
    "leave-at-once": "import sys\nsys.exit(0)\n",
    "exit-in-the-call": repairs.BROKEN.replace("return a - b", "__import__('os')._exit(0)"),
    "leave-in-the-call": repairs.BROKEN.replace("return a - b", "raise SystemExit(0)"),
    "interrupt": repairs.BROKEN.replace("return a - b", "raise KeyboardInterrupt"),
    "skip-the-test": "import unittest\n" + repairs.BROKEN.replace("return a - b", "raise unittest.SkipTest('later')"),
    "skip-the-module": "import unittest\nraise unittest.SkipTest('later')\n",
    "print-what-a-runner-prints": "import os\n" + "for name in ('test_add', 'test_add_more', 'test_times'):\n"
    "    print(f'{name} (tests.test_calc.TestCalc.{name}) ... ok')\n"
    "print('\\nRan 3 tests\\n\\nOK', flush=True)\nos._exit(0)\n",
    "print-an-outcome-in-the-call": repairs.BROKEN.replace(
        "    return a - b", "    print('ok\\nanother_test (of.another.Case)', flush=True)\n    return a - b"
    ),
    "patch-the-assertions": "import unittest\nfor name in dir(unittest.TestCase):\n"
    "    if name.startswith('assert'): setattr(unittest.TestCase, name, lambda *_, **__: None)\n" + repairs.BROKEN,
    "patch-the-result": "import unittest\n"
    "unittest.TestResult.addFailure = unittest.TestResult.addError = lambda s, t, e: s.addSuccess(t)\n"
    "unittest.TextTestResult.addFailure = unittest.TextTestResult.addError = lambda s, t, e: s.addSuccess(t)\n"
    + repairs.BROKEN,
    "patch-the-case": "import unittest\n"
    "def run(self, result=None):\n    result.startTest(self); result.addSuccess(self); result.stopTest(self)\n"
    "unittest.TestCase.run = unittest.TestCase.__call__ = run\n" + repairs.BROKEN,
    "flip-the-outcome-at-exit": "import atexit, os\natexit.register(os._exit, 0)\n" + repairs.BROKEN,
    "write-to-every-descriptor": "import json, os\n"
    "for fd in range(1, 60):\n"
    '    try: os.write(fd, b\'{"passed": 3, "total": 3, "controls": "", "secret": ""}\')\n'
    "    except OSError: pass\n" + repairs.BROKEN,
    "kill-the-parent": "import os\nos.kill(os.getppid(), 9)\n",
    "kill-everyone": "import os\nos.kill(-1, 9)\n",
    "answer-without-end": "while True: print('x' * 10_000)\n",
    "use-all-memory": "held = []\nwhile True: held.append(bytearray(10_000_000))\n",
}
"""Modules that hold up both ways of running tests."""

ISOLATED = {
    "equal-to-everything": ANYTHING + "def add(a, b): return Any()\ntimes = add\n",
    "an-object-equal-to-everything": ANYTHING.replace("(int)", "") + "def add(a, b): return Any()\ntimes = add\n",
    "read-the-tests-for-the-answers": SPY
    + "def add(a, b):\n    for folder in ('.', '/workspace', '/tmp', '/proc/self/fd', f'/proc/{os.getppid()}/cwd'):\n"
    "        for path in glob.glob(folder + '/**/*test*', recursive=True):\n"
    "            if not os.path.isfile(path): continue\n"
    "            text = open(path, errors='ignore').read()\n"
    "            found = re.search(fr'add.{a}, {b}.(?:, | == )(\\d+)', text)\n"
    "            if found: return int(found[1])\n    return a - b\n\n\ndef times(a, b): return a * b\n",
    "read-the-tests-out-of-memory": SPY + "def add(a, b):\n    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
    "        for name in ('mem', 'cmdline', 'environ', 'fd/0', 'fd/1', 'fd/3', 'fd/4'):\n"
    "            try: text = open(f'/proc/{pid}/{name}', 'rb').read(10**6)\n            except OSError: continue\n"
    "            found = re.search(fr'add.{a}, {b}.(?:, | == )(\\d+)'.encode(), text)\n"
    "            if found: return int(found[1])\n    return a - b\n\n\ndef times(a, b): return a * b\n",
    "search-the-frames-for-the-answers": SPY + "def add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in (*frame.f_locals.values(), *frame.f_globals.values()):\n"
    "            if type(value) not in (str, dict): continue\n"
    "            found = re.search(fr'add.{a}, {b}.(?:, | == )(\\d+)', repr(value))\n"
    "            if found: return int(found[1])\n        frame = frame.f_back\n    return a - b\n\n\n"
    "def times(a, b): return a * b\n",
    "answer-in-the-server-s-place": "import json\nreal = json.dumps\njson.dumps = lambda value: real({'value': True})\n"
    + repairs.BROKEN,
    "answer-garbage": "import os\nfor fd in range(3, 30):\n  try: os.write(fd, b'\\0\\0\\0\\4nope')\n"
    "  except OSError: pass\n" + repairs.BROKEN,
    "answer-too-much": "import os\nfor fd in range(3, 30):\n  try: os.write(fd, b'\\xff' * 8)\n"
    "  except OSError: pass\n" + repairs.BROKEN,
    "answer-too-deep": "import json\n"
    "json.dumps = lambda value: '{\"value\": ' + '[' * 100_000 + ']' * 100_000 + '}'\n" + repairs.BROKEN,
    "claim-to-be-a-class-of-python-s-own": "class Held(BaseException): pass\nHeld.__module__ = 'builtins'\n"
    "Held.__name__ = 'GeneratorExit'\ndef add(a, b): raise Held\ntimes = add\n",
}
"""What needs secrets, or the assertions themselves, to lie in the process that imports the tested code."""

PLANTED = {
    "a-test-of-its-own-in-the-place-of-the-hidden-one": {"tests/test_calc.py": "def test_add(): pass\n"},
    "a-package-that-loads-no-tests": {
        "tests/__init__.py": "import unittest\ndef load_tests(*_): return unittest.TestSuite()\n"
    },
    "a-module-in-the-place-of-unittest": {
        "unittest.py": "class TestCase:\n    def assertEqual(self, *_): pass\ndef main(): print('OK')\n"
    },
    "a-package-in-the-place-of-unittest": {"unittest/__init__.py": "class TestCase: pass\n", "unittest/x.py": ""},
    "modules-that-the-runner-imports": dict.fromkeys(
        ("json.py", "socket.py", "ctypes.py", "re.py"), "import os\nprint('OK')\nos._exit(0)\n"
    ),
    "code-that-runs-with-every-python": {
        "sitecustomize.py": "import os\nos._exit(0)\n",
        "usercustomize/__init__.py": "import os\nos._exit(0)\n",
        "src/sitecustomize/__init__.py": "import os\nos._exit(0)\n",
    },
    "a-plugin-of-the-runner": {
        "x-1.dist-info/entry_points.txt": "[pytest11]\nx = plugin\n",
        "plugin.py": "import os\nos._exit(0)\n",
    },
    "settings-of-runners": {
        "pytest.ini": "[pytest]\naddopts = --co\n",
        "setup.cfg": "[tool:pytest]\naddopts = --co\n",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--co'\n",
        "conftest.py": "import os\ndef pytest_collection_modifyitems(items): items.clear()\n",
        "tests/conftest.py": "import os\nos._exit(0)\n",
    },
    "a-file-where-the-tests-folder-must-be": {"tests": "no folder\n"},
    "a-folder-where-a-test-must-be": {"tests/test_calc.py/x.py": "pass\n"},
    "compiled-code": {"__pycache__/calc.cpython-311.pyc": "nonsense", "tests/test_calc.pyc": "nonsense", "x.pth": "1"},
}


@pytest.fixture(scope="module")
def judged():
    with repairs.judging() as judged:
        yield judged


def cases(group):
    return pytest.mark.parametrize("made", group.values(), ids=group.keys())


@pytest.mark.parametrize("command", ["", repairs.COMMAND], ids=["isolated", "command"])
@cases(CODE)
def test_code_under_test_cannot_forge_the_verdict(judged, made, command):
    verdict = judged({"calc.py": made}, command, seconds=4.0)
    assert not verdict.solved
    assert verdict.passed < 3


@cases(ISOLATED)
def test_code_under_test_finds_no_answers_where_the_tests_run_apart(judged, made):
    verdict = judged({"calc.py": made})
    assert not verdict.solved
    assert verdict.passed < 3


@pytest.mark.parametrize("name", ["equal-to-everything", "read-the-tests-for-the-answers"])
def test_a_command_can_be_fooled_by_what_cannot_fool_tests_that_run_apart(judged, name):
    """What the documentation owns up to; and these attempts are none that would fail anyway."""
    assert judged({"calc.py": ISOLATED[name]}, repairs.COMMAND).solved


@pytest.mark.parametrize("command", ["", repairs.COMMAND], ids=["isolated", "command"])
@cases(PLANTED)
def test_what_is_planted_around_the_code_changes_nothing(judged, made, command):
    assert not judged(made, command).solved


@pytest.mark.parametrize("command", ["", repairs.COMMAND], ids=["isolated", "command"])
def test_a_repair_passes_whatever_was_planted_around_it(judged, command):
    everything = {path: text for group in PLANTED.values() for path, text in group.items() if path != "tests"}
    del everything["tests/test_calc.py"]
    verdict = judged({**everything, "calc.py": repairs.FIXED}, command)
    assert verdict == suites.Verdict(3, 3)


def test_a_module_in_the_place_of_a_package_is_none_of_the_repositorys(tmp_path):
    sandboxes.skip_without_bubblewrap()
    (tmp_path / "checking.py").write_text("def equal(a, b):\n    assert a == b\n")
    tmp_path.chmod(0o755)
    tests = {"test_calc.py": "import calc, checking\ndef test_add():\n    checking.equal(calc.add(2, 2), 4)\n"}

    async def body(code):
        async with suites.pool.Sandbox(repairs.LIMITS, warm=1, packages=(str(tmp_path),)) as sandbox:
            snapshot = snapshots.Snapshot.of_texts(repairs.REPOSITORY)
            left = repairs.files_of({"calc.py": code, "checking.py": "def equal(*_): pass\n"})
            return await suites.run(sandbox, snapshot, left, repairs.suite(tests=tests, names=("test_calc.test_add",)))

    assert not asyncio.run(body(repairs.BROKEN)).solved
    assert asyncio.run(body(repairs.FIXED)).solved


def test_data_that_the_tested_code_could_read_are_refused_where_the_tests_run_apart(judged):
    tests = {**repairs.TESTS, "tests/sums.json": "[23, 2, 20]", "tests/data/empty": ""}
    sentence = r"task\.arguments\.command_column: must name a command: .* bring 'tests/sums\.json'"
    with pytest.raises(protocols.ConfigError, match=sentence):
        judged({"calc.py": repairs.FIXED}, tests=tests)
    assert judged({"calc.py": repairs.FIXED}, repairs.COMMAND, tests=tests) == suites.Verdict(3, 3)
    known = {**repairs.REPOSITORY, "tests/sums.json": "[23, 2, 20]"}  # as the policy sees them, too
    assert judged({"calc.py": repairs.FIXED}, repository=known, tests=tests) == suites.Verdict(3, 3)


CLAIMS = """
class Any:
    def __lt__(self, other): return self
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return self
    __rsub__ = __neg__ = __add__ = __radd__ = __and__ = __sub__
    def __mul__(self, other): return [0]
    def __abs__(self): return 0
    __int__ = __len__ = __abs__
    def __float__(self): return 0.0
    def __bool__(self): return True
    def __iter__(self): return iter((1, 2))

def add(a, b): return Any()
"""
"""An object that claims whatever is asked of it, by operators that return itself."""

CHECKS = (
    "self.assertGreater(add(2, 3), 4)",
    "self.assertLess(add(2, 3), 6)",
    "assert add(2, 3) >= 5",
    "assert 6 > add(2, 3)",
    "assert 4 < add(2, 3) < 6",
    "self.assertAlmostEqual(add(2, 3), 5.0)",
    "self.assertAlmostEqual(5.0, add(2, 3))",
    "self.assertAlmostEqual(add(2, 3), 5.0, delta=0.1)",
    "assert abs(add(2, 3) - 5) < 0.1",
    "assert abs(-(add(2, 3) - 5)) < 0.1",
    "self.assertEqual(abs(0 + (add(2, 3) - 5)), 0)",
    "self.assertEqual(abs((add(2, 3) - 5) - add(0, 0)), 0)",
    "self.assertEqual(abs(add(0, 0) - (add(2, 3) - 5)), 0)",
    "self.assertEqual(int(add(2, 3) - 5), 0)",
    "self.assertEqual(float(add(2, 3) - 5), 0)",
    "self.assertEqual(len(add(2, 3) - {5}), 0)",
    "assert add(2, 3) & 5",
    "self.assertEqual((add(2, 3) - 5) * add(0, 0), [0])",
    "assert (add(2, 3) - 5) < add(0, 0)",
    "assert sorted([6, add(2, 3), 4])",
    "self.assertIn(5, add(2, 3))",
)


def test_an_object_of_the_repositorys_is_not_close_to_plain_data_nor_before_or_after_it(judged):
    lines = [f"    def test_{number:02}(self):\n        {check}\n" for number, check in enumerate(CHECKS)]
    text = f"import unittest\nfrom calc import add\nclass T(unittest.TestCase):\n{''.join(lines)}"
    arguments = {"tests": {"tests/test_calc.py": text}, "names": ()}
    assert judged({"calc.py": CLAIMS}, **arguments) == suites.Verdict(0, len(CHECKS))


def test_code_that_hangs_is_overdue_by_its_own_fault(judged):
    verdict = judged({"calc.py": repairs.BROKEN + "while True: pass\n"}, seconds=1.0)
    assert (verdict.solved, verdict.overdue) == (False, True)


# From the policy's sandbox to the one of the tests -----------------------------------------------------------------

STEPS = {
    "a-link-to-the-tests-that-are-not-there": "ln -s /workspace/tests/test_calc.py hint; cat hint",
    "a-link-in-the-place-of-the-tests": "mkdir /tmp/t; echo 'pass' >/tmp/t/test_calc.py; ln -s /tmp/t tests",
    "a-link-in-the-place-of-the-code": "rm calc.py; ln -s /etc/passwd calc.py",
    "a-pipe-in-the-place-of-the-code": "rm calc.py; mkfifo calc.py",
    "a-daemon-that-writes-tests": "(while :; do mkdir -p tests; echo 'pass' >tests/test_calc.py; done) & disown",
    "a-home-with-settings": "mkdir -p ~/.local/lib/python3.11/site-packages; "
    "echo 'import os; os._exit(0)' >~/.local/lib/python3.11/site-packages/usercustomize.py; echo 'exit 0' >~/.bashrc",
    "more-than-may-be-taken-over": "for i in 1 2 3; do head -c 2000000 /dev/zero >$i; done; "
    "head -c 3000000 /dev/zero >z",
    "a-large-hole": "truncate -s 4000000 a b c d e f g h i j",
    "folders-without-end": 'python3 -c \'import os\nfor _ in range(1200):\n  os.mkdir("d")\n  os.chdir("d")\'',
    "a-name-that-is-no-text": "touch $'\\xff\\xfe' $'new\\nline' -- -rf",
    "a-folder-that-is-shut": "mkdir shut; touch shut/a; chmod 0 shut calc.py",
}


@pytest.fixture(scope="module")
def task():
    return protocols.Task("t", repairs.PAYLOAD)


@cases(STEPS)
def test_nothing_in_the_workspace_passes_for_a_repair(task, made):
    async def work(tools):
        environment = repo_repair.environment(tools, most_mib=6)
        await environment.reset(task)
        await environment.step(tools.format.write("shell", {"command": made}))
        result = await environment.step("done")
        await environment.close()
        return result

    result = repairs.with_tools(work)
    assert (result.done, result.reward) == (True, 0.0)


def test_the_tests_are_in_no_sandbox_of_the_policy(task):
    async def work(tools):
        environment = repo_repair.environment(tools)
        await environment.reset(task)
        search = "grep -rl 'assertEqual[(]add' . /tmp /dev/shm /proc/*/environ /proc/*/cmdline 2>/dev/null; ls -a"
        seen = await environment.step(tools.format.write("shell", {"command": search}))
        await environment.close()
        return seen.tool_returns[0].content.split()

    assert repairs.with_tools(work) == [".", "..", "README.md", "calc.py"]


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_sandbox_that_dies_under_the_tests_is_tried_once_more_and_then_raised(deaths):
    sandboxes.skip_without_bubblewrap()
    slow = repairs.FIXED + "import time\ntime.sleep(0.7)\n"

    async def body():
        async with suites.pool.Sandbox(repairs.LIMITS, warm=1) as sandbox:
            killer = asyncio.create_task(kill_while_serving(sandbox, deaths))
            snapshot = snapshots.Snapshot.of_texts(repairs.REPOSITORY)
            try:
                return await suites.run(sandbox, snapshot, repairs.files_of({"calc.py": slow}), repairs.suite())
            finally:
                await killer

    if deaths == 1:
        assert asyncio.run(body()).solved
    else:
        with pytest.raises(protocols.WorkerLost, match="2 sandboxes died under the hidden tests"):
            asyncio.run(body())


async def kill_while_serving(sandbox, deaths):
    """Ends as many sandboxes, each when it runs tests, which takes a second process of Python."""
    for _ in range(deaths):
        serving = []
        for _ in range(500):
            serving = [live for live in sandbox._live if live.alive and live.served and is_testing(live)]
            if serving:
                break
            await asyncio.sleep(0.02)
        serving[0].process.kill()
        await sandboxes.gone(sandboxes.descendants(serving[0].process.pid))


def is_testing(live):
    found = sandboxes.descendants(live.process.pid)
    return any("Serves on a socket" in word for one in found for word in words_of(one))


def words_of(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it ended since it was listed
        return []


# Archives ---------------------------------------------------------------------------------------------------------


def archive(*members):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as opened:
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, len(data)
            member.linkname = "calc.py" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            opened.addfile(member, io.BytesIO(data))
    return content.getvalue()


def test_of_an_archive_only_regular_files_inside_are_taken_over():
    found = snapshots.taken_over(
        archive(
            ("calc.py", tarfile.REGTYPE, b"1"),
            ("../outside", tarfile.REGTYPE, b"2"),
            ("/absolute", tarfile.REGTYPE, b"3"),
            ("a/../../b", tarfile.REGTYPE, b"4"),
            ("./a/./c", tarfile.REGTYPE, b"5"),
            ("link", tarfile.SYMTYPE, b""),
            ("hard", tarfile.LNKTYPE, b""),
            ("pipe", tarfile.FIFOTYPE, b""),
            ("device", tarfile.BLKTYPE, b""),
            ("x" * 2000, tarfile.REGTYPE, b"6"),
        ),
        10_000,
    )
    assert {path: file.content for path, file in found.items()} == {"calc.py": b"1", "a/c": b"5"}


@pytest.mark.parametrize(
    "content",
    [b"no archive at all", b"\1" * 2000, archive(("big", tarfile.REGTYPE, bytes(20_000)))],
    ids=["text", "noise", "too-large"],
)
def test_an_archive_that_is_none_or_too_large_is_hostile(content):
    with pytest.raises(snapshots.Hostile):
        snapshots.taken_over(content, 10_000)


def tar_with(kind, size):
    """A compressed tar of one file, before which a member of `size` bytes describes it."""
    described = tarfile.TarInfo("././@LongLink")
    described.type, described.size = kind, size
    text = b"a" * size if kind == tarfile.GNUTYPE_LONGNAME else b"%d comment=" % size
    text = text.ljust(size - 1, b"a") + b"\n"
    rest = archive(("calc.py", tarfile.REGTYPE, b"1"))
    return gzip.compress(described.tobuf(tarfile.GNU_FORMAT) + text.ljust(-(-size // 512) * 512, b"\0") + rest)


@pytest.mark.parametrize(
    "kind",
    [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE],
    ids=["name", "link", "description", "description-of-all"],
)
def test_a_tar_that_describes_a_file_at_length_is_refused_unread(tmp_path, kind):
    (tmp_path / "large.tar.gz").write_bytes(tar_with(kind, 2**23))
    (tmp_path / "small.tar.gz").write_bytes(tar_with(kind, 900))
    assert len(snapshots.Snapshot.read(tmp_path / "small.tar.gz", 10_000).files) == 1
    tracemalloc.start()
    try:
        with pytest.raises(protocols.DataError, match="names and descriptions of its members take too many bytes"):
            snapshots.Snapshot.read(tmp_path / "large.tar.gz", 10_000)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_many_descriptions_of_files_are_refused_together(tmp_path):
    one = gzip.decompress(tar_with(tarfile.XGLTYPE, 60_000))[: -10240 + 1024]
    (tmp_path / "many.tar.gz").write_bytes(gzip.compress(one * 300))
    with pytest.raises(protocols.DataError, match="names and descriptions"):
        snapshots.Snapshot.read(tmp_path / "many.tar.gz", 2**20)


def test_a_tar_of_files_with_holes_is_refused(tmp_path):
    (tmp_path / "holes.tar").write_bytes(archive(("calc.py", tarfile.GNUTYPE_SPARSE, b"")))
    with pytest.raises(protocols.DataError, match="files with holes"):
        snapshots.Snapshot.read(tmp_path / "holes.tar", 10_000)


def test_the_sandboxs_programs_are_of_the_standard_library_alone():
    for text in suites.programs().values():
        names = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert names - {"libra_jax", "__future__"} <= set(sys.stdlib_module_names)
