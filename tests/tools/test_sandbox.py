"""Sandboxes at their work: state that is kept and lost, deadlines, output, the pool."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal

import pytest
import sandboxes
from sandboxes import with_session

from libra_jax import protocols
from libra_jax.tools.sandbox import pool
from libra_jax.utils import resolving


@pytest.fixture
def bubblewrap():
    sandboxes.skip_without_bubblewrap()


async def killed(session):
    """Kills the process that holds the session's sandbox, and waits until all of it is gone."""
    found = sandboxes.descendants(session._worker.process.pid)
    os.kill(found[0].pid, signal.SIGKILL)
    assert not await sandboxes.gone(found)


def kill_at_once(pid):
    """Kills a child and waits for its end, while the event loop stands still."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # asyncio's thread was quicker to reap it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


# What is kept, and what is lost -----------------------------------------------------------------------------------


def test_the_interpreter_keeps_variables_imports_and_definitions(bubblewrap):
    async def work(_, session):
        assert (await session.python("import math\ndef area(r): return math.pi * r * r\nx = 2")).text == pool.NO_OUTPUT
        return await session.python("print('area', round(area(x), 2))\nx + 1")

    outcome = with_session(work)
    assert (outcome.status, outcome.text, outcome.lost) == ("success", "area 12.57\n3\n", "")


def test_code_has_what_an_interpreter_offers_and_nothing_that_this_machine_has_installed(bubblewrap):
    async def work(_, session):
        offered = await session.python("[callable(exit), callable(quit), callable(help)]")
        installed = await session.python("import pip")
        return offered, installed, await session.python("exit(0)"), await session.python("exit(3)")

    offered, installed, good, bad = sandboxes.with_session(work)
    assert offered.text == "[True, True, True]\n"
    assert "No module named 'pip'" in installed.text
    assert (good.status, bad.status) == ("success", "failure")


def test_an_error_is_a_failure_that_shows_the_policys_own_lines_and_keeps_state(bubblewrap):
    async def work(_, session):
        await session.python("x = 5\ndef f():\n    return x / 0")
        outcome = await session.python("f()")
        assert (await session.python("x")).text == "5\n"
        return outcome

    outcome = with_session(work)
    assert (outcome.status, outcome.lost) == ("failure", "")
    assert "ZeroDivisionError" in outcome.text
    assert "return x / 0" in outcome.text
    assert outcome.text.count("File ") == 2


def test_the_shell_keeps_its_folder_variables_and_functions(bubblewrap):
    async def work(_, session):
        await session.shell("mkdir -p a/b; cd a/b; word=hello; greet() { echo $word $1; }; declare -i n=6")
        assert (await session.shell("break; continue; return; true")).status == "success"
        return await session.shell("pwd; greet you; n=n*7; echo $n; cat <<END\nlast 'line'\nEND")

    assert with_session(work).text == "/workspace/a/b\nhello you\n42\nlast 'line'\n"


def test_a_commands_exit_status_is_told(bubblewrap):
    async def work(_, session):
        return [await session.shell(command) for command in ("(exit 3)", "true", "echo 'open")]

    failed, good, broken = with_session(work)
    assert (failed.status, failed.text) == ("failure", "[exit status 3]")
    assert good.status == "success"
    assert (broken.status, broken.lost) == ("failure", "")


def test_python_and_shell_share_files_and_packages_of_the_workspace(bubblewrap):
    async def work(_, session):
        await session.shell("echo 'value = 11' >module.py")
        return await session.python("import module\nmodule.value")

    assert with_session(work).text == "11\n"


@pytest.mark.parametrize(("kind", "code"), [("python", "x = 1\nwhile True: pass"), ("shell", "x=1; sleep 60")])
def test_a_call_past_its_deadline_is_a_timeout_that_says_what_was_lost(bubblewrap, kind, code):
    async def work(_, session):
        await session.shell("touch kept")
        outcome = await getattr(session, kind)(f"{code}", 0.3)
        files = await session.shell("ls; echo ${x-unset}")
        return outcome, files

    outcome, files = with_session(work)
    assert (outcome.status, outcome.lost) == ("timeout", "state")
    assert "no end after 0.3 s" in outcome.text
    assert pool.STATE_LOST in outcome.text
    assert outcome.seconds < 2.0  # not the minute that it would have taken
    assert files.text == "kept\nunset\n"


def test_what_was_written_before_the_deadline_is_kept(bubblewrap):
    async def work(_, session):
        return await session.python("import time\nprint('so far', flush=True)\ntime.sleep(60)", 0.3)

    assert with_session(work).text.startswith("so far\n[no end after 0.3 s]\n")


def test_a_sandbox_that_is_killed_from_outside_is_a_failure_and_its_session_starts_again(bubblewrap):
    async def work(_, session):
        await session.python("x = 1")
        await killed(session)
        return await session.python("x"), await session.python("2 + 2")

    outcome, following = with_session(work)
    assert (outcome.status, outcome.lost) == ("failure", "all")
    assert pool.ALL_LOST in outcome.text
    assert following.text == "4\n"


def test_a_sandbox_that_is_killed_while_it_is_kept_ready_is_told_and_another_takes_its_place(bubblewrap, caplog):
    async def work():
        async with pool.Sandbox(warm=1) as sandbox:
            found = sandboxes.descendants(sandbox._idle[0].process.pid)
            os.kill(found[0].pid, signal.SIGKILL)
            assert not await sandboxes.gone(found)
            for _ in range(round(sandboxes.GONE_SECONDS / sandboxes.POLL_SECONDS)):
                if caplog.records:
                    break
                await asyncio.sleep(sandboxes.POLL_SECONDS)
            (told,) = [record.getMessage() for record in caplog.records]  # though no call has needed it
            return told, (await sandbox.run("6 * 7")).text

    told, text = asyncio.run(work())
    assert text == "42\n"
    assert len(caplog.records) == 1
    assert re.fullmatch(r"The sandbox of process \d+ ended of itself; another takes its place\.", told)


def test_a_sandbox_that_is_killed_after_its_sessions_last_call_is_told(bubblewrap, caplog):
    async def work(_, session):
        await session.python("x = 1")
        process = session._worker.process
        await killed(session)
        await process.wait()
        await session.close()

    with_session(work)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith(" ended of itself; another takes its place.")


def test_a_sandbox_that_is_killed_the_moment_before_its_session_ends_is_told(bubblewrap, caplog):
    async def work(_, session):
        await session.python("x = 1")
        process = session._worker.process
        kill_at_once(process.pid)
        assert process.returncode is None
        await session.close()

    with_session(work)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith(" ended of itself; another takes its place.")


def test_a_sandbox_that_is_killed_the_moment_before_it_is_wanted_serves_no_call_and_is_told(bubblewrap, caplog):
    async def work():
        async with pool.Sandbox(warm=1) as sandbox:
            kill_at_once(sandbox._idle[0].process.pid)
            return (await sandbox.run("6 * 7")).text

    assert asyncio.run(work()) == "42\n"
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith(" ended of itself; another takes its place.")


def test_a_sandbox_that_is_killed_the_moment_before_it_is_given_back_is_not_kept_and_is_told(bubblewrap, caplog):
    async def work():
        async with pool.Sandbox(warm=1) as sandbox:
            lent = await sandbox.take()
            kill_at_once(lent.process.pid)
            sandbox.give_back(lent)
            return lent in sandbox._idle, [record.getMessage() for record in caplog.records]

    kept, told = asyncio.run(work())
    assert not kept
    assert [sentence.partition(" ended")[2] for sentence in told] == [" of itself; another takes its place."]


def test_sandboxes_that_end_again_and_again_are_told_of_so_often_and_no_more(bubblewrap, caplog, monkeypatch):
    monkeypatch.setattr(resolving, "MOST_TOLD", 2)

    async def work(_, session):
        for _ in range(3):
            await session.python("x = 1")
            await killed(session)
            assert (await session.python("x")).lost == "all"

    with_session(work)
    first, second = [record.getMessage() for record in caplog.records]
    assert first.endswith(" ended of itself; another takes its place.")
    assert second.endswith("; further ones are not shown.")


def test_a_sandbox_that_stands_still_is_killed_from_outside(bubblewrap, monkeypatch):
    monkeypatch.setattr("libra_jax.tools.sandbox.worker.GRACE_SECONDS", 0.2)

    async def work(sandbox, session):
        await session.python("x = 1")
        first = sandboxes.descendants(session._worker.process.pid)[1]
        first.send_signal(signal.SIGSTOP)
        outcome = await session.python("x", 0.3)
        assert not await sandboxes.gone([first])
        return outcome

    outcome = with_session(work)
    assert (outcome.status, outcome.lost) == ("timeout", "all")


def test_a_cancelled_call_ends_its_sandbox_and_the_next_one_says_so(bubblewrap):
    async def work(_, session):
        await session.python("x = 1")
        found = sandboxes.descendants(session._worker.process.pid)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.python("import time\ntime.sleep(60)"), 0.2)
        assert not await sandboxes.gone(found)
        return await session.python("'x' in globals()")

    outcome = with_session(work)
    assert outcome.text == f"False\n{pool.ALL_LOST}"
    assert outcome.lost == "all"


def test_a_session_starts_with_the_workspaces_files_again_and_again(bubblewrap, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "run.sh").write_text("echo 42")
    (tmp_path / "folder" / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/shadow")
    os.mkfifo(tmp_path / "pipe")

    async def work(_, session):
        assert (await session.shell("folder/run.sh; readlink link; ls")).text == "42\n/etc/shadow\nfolder\nlink\n"
        await session.shell("rm -r folder; kill -9 $$")
        await killed(session)
        await session.shell("true")
        return await session.shell("sh folder/run.sh")

    assert with_session(work, workspace=str(tmp_path)).text == "42\n"


# Output -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4095, 4096, 4097, 70_000, 1_000_000])
def test_long_output_is_cut_in_the_middle_and_marked(bubblewrap, count):
    async def work(_, session):
        return await session.python(
            f"import sys\n_ = sys.stdout.write(('x' * 99 + '|') * {count // 100} + '.' * {count % 100})"
        )

    whole = ("x" * 99 + "|") * (count // 100) + "." * (count % 100)
    kept = sandboxes.SMALL.output_bytes
    expected = (
        whole
        if count <= kept
        else (f"{whole[: kept // 2]}\n[... {count - kept} bytes left out ...]\n{whole[-(kept // 2) :]}")
    )
    assert with_session(work).text == expected


def test_output_that_is_no_text_is_shown_as_far_as_it_is(bubblewrap):
    async def work(_, session):
        return await session.shell(r"printf 'a\xff\x00b'")

    assert with_session(work).text == "a�\0b"


def test_standard_error_and_output_keep_their_order(bubblewrap):
    async def work(_, session):
        return await session.shell("echo 1; echo 2 >&2; echo 3")

    assert with_session(work).text == "1\n2\n3\n"


def test_code_that_is_too_long_is_a_failure(bubblewrap):
    async def work(sandbox, session):
        code = "#" * (sandboxes.SMALL.input_bytes + 1)
        return [await sandbox.run(code), await session.python(code), await session.python("#" * 60_000 + "\n1")]

    run, python, longest = with_session(work)
    assert run.status == python.status == "failure"
    assert "longer than 65536 bytes" in run.text
    assert longest.text == "1\n"


# The pool ---------------------------------------------------------------------------------------------------------


def test_many_calls_share_few_sandboxes_and_all_are_answered(bubblewrap):
    async def work(sandbox, _):
        outcomes = await asyncio.gather(*(sandbox.run(f"{n} * {n}") for n in range(40)))
        assert len(sandbox._live) <= 3 + 2
        return [outcome.text for outcome in outcomes]

    assert with_session(work, warm=2, most=3) == [f"{n * n}\n" for n in range(40)]


def test_a_call_waits_for_no_start_where_one_is_warm(bubblewrap):
    async def work(sandbox, _):
        return max([(await sandbox.run("1")).seconds for _ in range(5)])

    assert with_session(work, warm=2) < 1.0


def test_who_waits_too_long_for_a_sandbox_is_told_what_to_raise(bubblewrap):
    async def work(sandbox, session):
        await session.python("1")
        sandbox.limits = dataclasses.replace(sandbox.limits, start_seconds=0.2)
        with pytest.raises(protocols.DeadlineMissed, match=r"sandbox\.start_seconds.*raise sandbox\.most"):
            await sandbox.run("1")

    with_session(work, most=1)


def test_a_session_that_takes_its_sandbox_beforehand_waits_for_it_as_long_as_it_takes(bubblewrap):
    async def work(sandbox, session):
        await session.python("1")
        sandbox.limits = dataclasses.replace(sandbox.limits, start_seconds=0.2)
        async with sandbox.session() as other:
            waiting = asyncio.create_task(other.ready())
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await session.close()
            await waiting
            return await other.python("6 * 7")

    assert with_session(work, most=1).text == "42\n"


def test_a_session_closed_while_it_waits_takes_no_place(bubblewrap):
    async def work(sandbox, session):
        await session.ready()
        other = sandbox.session()
        waiting = asyncio.create_task(other.ready())
        await asyncio.sleep(0)
        await other.close()
        await session.close()
        with pytest.raises(protocols.WorkerLost, match="the session was closed"):
            await waiting
        return await sandbox.run("6 * 7")

    assert with_session(work, most=1).text == "42\n"


def test_of_the_sessions_that_wait_one_at_most_is_before_a_call_that_cannot_wait_long(bubblewrap):
    async def work(sandbox, session):
        await session.ready()
        async with contextlib.AsyncExitStack() as stack:
            others = [await stack.enter_async_context(sandbox.session()) for _ in range(3)]
            waiting = [asyncio.create_task(other.ready()) for other in others]
            await asyncio.sleep(0)
            call = asyncio.create_task(sandbox.run("6 * 7"))
            await asyncio.sleep(0.1)
            await session.close()
            await waiting[0]
            await others[0].close()
            assert (await call).text == "42\n"
            for other, ready in zip(others[1:], waiting[1:], strict=True):
                await ready
                await other.close()

    with_session(work, most=1)


def test_who_gives_up_just_as_a_place_comes_free_leaves_it_to_others(bubblewrap):
    async def work(sandbox, session):
        for turns in range(6):
            await session.ready()
            waiting = asyncio.create_task(sandbox.take())
            await asyncio.sleep(0)
            await session.close()
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                sandbox.give_back(waiting.result(), used=True)
            assert not sandbox._places.locked()
            session._closed = False

    with_session(work, most=1)


def test_close_ends_open_sessions_and_warm_sandboxes(bubblewrap):
    async def body():
        async with pool.Sandbox(sandboxes.SMALL, warm=3) as sandbox:
            session = sandbox.session()
            await session.shell("true")
            found = sandboxes.processes_of(sandbox)
            assert len(found) >= 3 * 2
        assert not sandboxes.alive(found)
        with pytest.raises(protocols.WorkerLost, match="closed"):
            await sandbox.run("1")
        await session.close()

    asyncio.run(body())


def test_a_call_left_running_does_not_keep_the_pool_from_closing(bubblewrap):
    async def body():
        async with pool.Sandbox(sandboxes.SMALL) as sandbox:
            running = asyncio.create_task(sandbox.run("import time\ntime.sleep(60)"))
            await asyncio.sleep(0.2)
        assert (await running).status == "failure"

    asyncio.run(body())
