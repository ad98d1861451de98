"""What comes from a policy's sandbox to the sandbox of the tests: workspaces that attack, dead sandboxes, archives."""

import asyncio
import gzip
import io
import tarfile
import tracemalloc

import pytest
import repairs
import sandboxes

from libra_jax import protocols
from libra_jax.environments import repo_repair
from libra_jax.rewards.repair import grading, snapshots, suites
from libra_jax.tools.sandbox import limits, pool

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


@repairs.cases(STEPS)
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


VOIDS = {
    "a-filled-workspace": "rm -rf tests; for i in $(seq 9); do head -c 1040000 /dev/zero >$i; done 2>/dev/null; true",
    "no-tests-and-as-many-files-as-there-may-be": "rm -rf tests; "
    "python3 -c 'for i in range(1990): open(str(i), \"w\").close()'",
    "limits-of-the-first-process": "python3 -c 'import resource as r\n"
    "for kind in (r.RLIMIT_NOFILE, r.RLIMIT_FSIZE, r.RLIMIT_AS):\n"
    "  try: r.prlimit(1, kind, (3, 3))\n  except OSError: pass'",
    "links-in-a-circle": "ln -s a b; ln -s b a; ln -s . self; mkdir d; ln -s .. d/up",
    "folders-beside-each-other": "for i in $(seq 40); do mkdir -p $i/$i/$i/$i/$i; done",
}


@repairs.cases(VOIDS)
def test_what_a_policy_leaves_cannot_void_its_score(made):
    files = {**repairs.REPOSITORY, **{f"tests/data/{number}.txt": "x" * 20_000 for number in range(40)}}
    hidden = {**repairs.TESTS, **{f"tests/more_{number}.py": f"# {'x' * 20_000}" for number in range(40)}}
    large = protocols.Task("t", {**repairs.PAYLOAD, "files": files, "tests": hidden})

    async def work(tools):
        environment = repo_repair.environment(tools, partial=True)
        await environment.reset(large)
        await environment.step(tools.format.write("shell", {"command": made}))
        result = await environment.step("done")
        await environment.close()
        return result

    result = repairs.with_tools(work)
    assert (result.done, result.reward < 0.5) == (True, True)


def test_more_files_than_an_attempt_may_add_are_refused_and_counted(task, monkeypatch, caplog):
    monkeypatch.setattr(grading, "MORE_FILES", 10)

    async def work(tools):
        environment = repo_repair.environment(tools, prompt="Do: {issue}")
        await environment.reset(task)
        await environment.step(tools.format.write("shell", {"command": "touch 1 2 3 4 5 6 7 8 9 10 11"}))
        result = await environment.step("done")
        await environment.close()
        return result

    result = repairs.with_tools(work)
    assert (result.reward, result.metrics["files_refused"]) == (0.0, 1.0)
    assert "left files that were refused: more than 12 files" in caplog.text


def test_a_policys_sandbox_that_ends_itself_is_its_own_doing_and_a_killed_one_is_not(task, monkeypatch):
    by_code = iter([True, False])

    async def save(self, most_bytes):
        ended = next(by_code)
        return limits.SandboxOutcome("failure", "[the sandbox ended]", 0.1, "all", broken=not ended, by_code=ended)

    monkeypatch.setattr(pool.SandboxSession, "save", save)

    async def work(tools):
        environment = repo_repair.environment(tools, prompt="Try: {issue}")
        await environment.reset(task)
        refused = await environment.step("done")
        await environment.reset(task)
        with pytest.raises(protocols.WorkerLost, match="died when its files were taken over"):
            await environment.step("done")
        await environment.close()
        return refused

    result = repairs.with_tools(work)
    assert (result.reward, result.metrics["files_refused"]) == (0.0, 1.0)


def test_deceit_is_counted_with_its_reason(task, caplog):
    async def work(tools):
        environment = repo_repair.environment(tools, prompt="Mind: {issue}")
        await environment.reset(task)
        text = "open('conftest.py', 'w').write('pass')\n" + repairs.FIXED
        await environment.step(tools.format.write("edit", {"command": "create", "path": "calc.py", "text": text}))
        result = await environment.step("done")
        await environment.close()
        return result

    result = repairs.with_tools(work)
    assert (result.reward, result.metrics["tests_deceived"]) == (0.0, 1.0)
    assert "A rollout of t is worth 0: conftest.py was touched while the tests ran" in caplog.text


def test_the_tests_are_in_no_sandbox_of_the_policy(task):
    async def work(tools):
        environment = repo_repair.environment(tools)
        await environment.reset(task)
        search = "grep -rl 'assertEqual[(]add' . /tmp /dev/shm /proc/*/environ /proc/*/cmdline 2>/dev/null; ls -a"
        seen = await environment.step(tools.format.write("shell", {"command": search}))
        await environment.close()
        return seen.tool_returns[0].content.split()

    assert repairs.with_tools(work) == [".", "..", "README.md", "calc.py"]


@pytest.mark.parametrize(
    ("deaths", "verdict"),
    [
        (1, suites.SuiteVerdict(3, 3)),
        (2, suites.SuiteVerdict(0, 3, "ended the sandbox: [the sandbox ended]", broke=True)),
        (4, None),
    ],
)
def test_sandboxes_that_die_under_the_tests(deaths, verdict, monkeypatch):
    """One death is tried again. Two are the policy's if the unchanged repository survives, else the machine's."""
    sandboxes.skip_without_bubblewrap()
    real, begun = pool.worker.SandboxWorker.call, []

    async def call(self, kind, *arguments, **keywords):
        if kind == "run":
            begun.append(self)
            if len(begun) <= deaths:
                asyncio.get_running_loop().call_later(0.02, self.process.kill)
        return await real(self, kind, *arguments, **keywords)

    monkeypatch.setattr(pool.worker.SandboxWorker, "call", call)

    async def body():
        async with pool.Sandbox(repairs.LIMITS, warm=1) as sandbox:
            snapshot = snapshots.RepositorySnapshot.of_texts(repairs.REPOSITORY)
            return await suites.run(sandbox, snapshot, repairs.files_of({"calc.py": repairs.FIXED}), repairs.suite())

    if verdict is None:
        with pytest.raises(protocols.WorkerLost, match="and under those of the unchanged repository"):
            asyncio.run(body())
    else:
        assert asyncio.run(body()) == verdict


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


def taken_over(content):
    return snapshots.taken_over(limits.SandboxOutcome("success", "", 0.0, archive=content), 10_000)


def test_of_an_archive_only_regular_files_inside_are_taken_over():
    found = taken_over(
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
        )
    )[0]
    assert {path: file.content for path, file in found.items()} == {"calc.py": b"1", "a/c": b"5"}


@pytest.mark.parametrize(
    "content",
    [b"no archive at all", b"\1" * 2000, archive(("big", tarfile.REGTYPE, bytes(20_000)))],
    ids=["text", "noise", "too-large"],
)
def test_an_archive_that_is_none_or_too_large_is_refused(content):
    files, refused = taken_over(content)
    assert (files, bool(refused)) == ({}, True)


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
    assert len(snapshots.RepositorySnapshot.read(tmp_path / "small.tar.gz", 10_000).files) == 1
    tracemalloc.start()
    try:
        with pytest.raises(protocols.DataError, match="names and descriptions of its members take too many bytes"):
            snapshots.RepositorySnapshot.read(tmp_path / "large.tar.gz", 10_000)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_many_descriptions_of_files_are_refused_together(tmp_path):
    one = gzip.decompress(tar_with(tarfile.XGLTYPE, 60_000))[: -10240 + 1024]
    (tmp_path / "many.tar.gz").write_bytes(gzip.compress(one * 300))
    with pytest.raises(protocols.DataError, match="names and descriptions"):
        snapshots.RepositorySnapshot.read(tmp_path / "many.tar.gz", 2**20)


def test_a_tar_of_files_with_holes_is_refused(tmp_path):
    (tmp_path / "holes.tar").write_bytes(archive(("calc.py", tarfile.GNUTYPE_SPARSE, b"")))
    with pytest.raises(protocols.DataError, match="files with holes"):
        snapshots.RepositorySnapshot.read(tmp_path / "holes.tar", 10_000)
