"""Runs of hidden tests that are no fault of the policy's, and what the unchanged repository has to say."""

import asyncio
import dataclasses
import threading

import pytest
import repairs
import sandboxes

from libra_jax import protocols
from libra_jax.rewards.repair import snapshots, suites
from libra_jax.tools.sandbox import limits, pool

FIXED = {"calc.py": repairs.FIXED}


@pytest.fixture(scope="module")
def judged():
    with repairs.judging() as judged:
        yield judged


def in_sandbox(work):
    """Runs `work(judge)`; `judge(texts, suite, known)` runs hidden tests on the repository with some files changed."""
    sandboxes.skip_without_bubblewrap()

    async def body():
        async with pool.Sandbox(repairs.LIMITS, warm=1) as sandbox:
            snapshot = snapshots.RepositorySnapshot.of_texts(repairs.REPOSITORY)

            async def judge(texts, suite, known):
                files = repairs.files_of({**repairs.REPOSITORY, **texts})
                return await suites.run(sandbox, snapshot, files, suite, known)

            return await work(judge)

    return asyncio.run(body())


def killing(monkeypatch, kind, deaths):
    """Has the next `deaths[0]` sandboxes that are asked for `kind` die from outside."""
    real = pool.worker.SandboxWorker.call

    async def call(self, asked, *arguments, **keywords):
        if asked == kind and deaths[0] > 0:
            deaths[0] -= 1
            self.process.kill()
            await self.process.wait()
        return await real(self, asked, *arguments, **keywords)

    monkeypatch.setattr(pool.worker.SandboxWorker, "call", call)


def test_findings_without_a_result_are_not_kept():
    known = {}
    ends = suites.Suite(repairs.files_of({"test_calc.py": "import calc, os\nif calc.add(2, 1) == 1: os._exit(1)\n"}))

    async def work(judge):
        await judge(FIXED, ends, known)
        left = dict(known)
        await judge(FIXED, repairs.suite(names=()), known)
        return left, known

    left, kept = in_sandbox(work)
    assert (len(left), len(kept)) == (0, 1)


def test_a_death_is_judged_by_a_fresh_run_of_the_unchanged_repository(monkeypatch):
    """Not by one that came well through, before the machine ran out of memory."""
    deaths = [0]
    killing(monkeypatch, "run", deaths)

    async def work(judge):
        known = {}
        suite = repairs.suite(names=())
        assert (await judge(FIXED, suite, known)).solved
        assert known
        deaths[0] = 4
        with pytest.raises(protocols.WorkerLost, match="and under those of the unchanged repository"):
            await judge(FIXED, suite, known)
        deaths[0] = 2
        return await judge(FIXED, suite, known)

    assert in_sandbox(work).broke


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_kill_from_outside_while_files_are_unpacked_is_the_machines(deaths, monkeypatch):
    killing(monkeypatch, "load", [deaths])

    async def work(judge):
        return await judge(FIXED, repairs.suite(), {})

    if deaths == 1:
        assert in_sandbox(work) == suites.SuiteVerdict(3, 3)
    else:
        with pytest.raises(protocols.WorkerLost, match="while files were unpacked") as caught:
            in_sandbox(work)
        assert not isinstance(caught.value, pool.NotUnpacked)


@pytest.mark.parametrize(
    "outcome",
    [
        limits.SandboxOutcome("timeout", "[no end after 60 s]", 60.0, "all", broken=True),
        limits.SandboxOutcome("failure", "[the sandbox ended: more than 512 MiB of memory]", 1.0, "all", by_code=True),
    ],
    ids=["overdue", "memory"],
)
def test_files_that_cannot_be_unpacked_are_the_policys(monkeypatch, outcome):
    real, loads = pool.worker.SandboxWorker.call, []

    async def call(self, kind, *arguments, **keywords):
        if kind == "load":
            loads.append(kind)
            if len(loads) <= suites.ATTEMPTS:
                return outcome
        return await real(self, kind, *arguments, **keywords)

    monkeypatch.setattr(pool.worker.SandboxWorker, "call", call)

    async def work(judge):
        return await judge(FIXED, repairs.suite(), {})

    assert in_sandbox(work).broke


def long_names(mebibytes):
    """Tests whose report takes about so many MiB."""
    count = mebibytes * 2**20 // 60_000 + 1
    return {
        "test_calc.py": "import calc, unittest\nclass TestLong(unittest.TestCase): pass\n"
        f"for n in range({count}): setattr(TestLong, f'test_{{n}}_' + 'x' * 60_000,"
        " lambda self: self.assertEqual(calc.add(1, 1), 2))\n"
    }


def test_a_report_of_some_mebibytes_comes_whole(judged):
    verdict = judged(FIXED, tests=long_names(3), names=())
    assert (verdict.solved, verdict.problem) == (True, "")


def test_a_report_that_is_too_long_is_no_deceit(judged):
    verdict = judged(FIXED, tests=long_names(9), names=())
    assert verdict == suites.SuiteVerdict(0, 0, "the tests' report takes more than 8 MiB")


def test_a_group_that_ends_together_runs_the_repository_once(monkeypatch):
    real, runs, digest, threads = pool.Sandbox.examine, [], suites.digest, []

    async def examine(self, *arguments):
        runs.append(arguments)
        return await real(self, *arguments)

    def digested(*arguments):
        threads.append(threading.current_thread())
        return digest(*arguments)

    monkeypatch.setattr(pool.Sandbox, "examine", examine)
    monkeypatch.setattr(suites, "digest", digested)

    async def work(judge):
        known = {}
        return await asyncio.gather(*(judge(FIXED, repairs.suite(names=()), known) for _ in range(3)))

    assert in_sandbox(work) == [suites.SuiteVerdict(3, 3)] * 3
    assert len(runs) == 3 + 1
    assert threading.main_thread() not in threads


def test_verdicts_of_another_unchanged_repository_are_not_taken():
    texts = (repairs.REPOSITORY, {**repairs.REPOSITORY, **FIXED})
    first, second = (snapshots.RepositorySnapshot.of_texts(files) for files in texts)
    workspace, suite = {**first.files, **repairs.files_of(FIXED)}, repairs.suite(names=())
    assert suites.digest(first, workspace, suite) != suites.digest(second, workspace, suite)


class Slow:
    """A sandbox in which each run is killed, and takes most of its time to start."""

    limits = dataclasses.replace(repairs.LIMITS, seconds=0.1)

    def __init__(self):
        self.runs = []

    async def examine(self, files, code, seconds):
        self.runs.append(seconds)
        await asyncio.sleep(0.07)
        return limits.SandboxOutcome("failure", "[ended by signal 9]", 0.001)


def test_the_start_of_a_sandbox_counts_for_the_time_of_the_next():
    sandbox = Slow()
    snapshot = snapshots.RepositorySnapshot.of_texts(repairs.REPOSITORY)
    verdict = asyncio.run(suites.run(sandbox, snapshot, repairs.files_of(FIXED), repairs.suite()))
    assert (verdict.solved, sandbox.runs) == (False, [0.1])
