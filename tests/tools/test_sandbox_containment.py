"""Attempts to get out of a sandbox, to use more than it may, to outlive a call or to break it: none gets anywhere.

After each one the next call works, and once its session is closed no process and no file of it is left.
"""

import asyncio
import contextlib
import dataclasses
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import escapes
import pytest
import sandboxes

from libra_jax.tools.sandbox import backends, pool

PLACES = ("/", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/etc", "/usr/bin", os.path.expanduser("~"), os.getcwd())
PATIENT = 20.0  # seconds of a call that is not about its deadline: the machine may be busy
FIRST_THREAD_ENDED = """
import ctypes, os, threading, time
def begin(work):  # in a process that /proc shows as ended, as its first thread is
  if os.fork() == 0:
    os.setsid()
    threading.Thread(target=work).start()
    ctypes.CDLL(None).syscall(60, 0)
"""
RESTING = 4  # processes of a sandbox between two calls: bubblewrap's, the first one, an interpreter and a shell


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap():
    sandboxes.skip_without_bubblewrap()


class Host:
    """What there is to reach on the outside, and whether it was."""

    def __init__(self, folder: Path):
        self.folder, self.token, self.mark = folder, secrets.token_hex(16), f"libra-{secrets.token_hex(8)}"
        self.victim = subprocess.Popen(["sleep", "600"])
        self.secret = folder / "secret.txt"
        self.secret.write_text(self.token)
        self.open = os.open(self.secret, os.O_RDONLY)
        os.set_inheritable(self.open, True)
        os.environ["LIBRA_TEST_SECRET"] = self.token
        self.reached = []
        self.listeners = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        self.abstract = f"libra-{secrets.token_hex(8)}"
        self.socket = str(folder / "s")
        for listener, address in zip(
            self.listeners, [("127.0.0.1", 0), self.socket, f"\0{self.abstract}"], strict=True
        ):
            listener.bind(address)
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener):
        with contextlib.suppress(OSError):
            self.reached.append(listener.accept())

    def fill(self, text):
        return text.format(
            secret=str(self.secret),
            folder=str(self.folder),
            port=self.listeners[0].getsockname()[1],
            socket=self.socket,
            abstract=self.abstract,
            pid=self.victim.pid,
            home=os.path.expanduser("~"),
            repository=str(Path(__file__).parents[2]),
            prefix=os.path.realpath(sys.base_prefix),
            mark=self.mark,
            token=self.token,
            backwards=self.token[::-1],
        )

    def check(self):
        """Nothing on the outside was reached, changed or left."""
        assert not self.reached
        assert self.victim.poll() is None
        assert sorted(path.name for path in self.folder.iterdir()) == ["s", "secret.txt"]
        assert self.secret.read_text() == self.token
        assert not [place for place in PLACES if os.path.lexists(os.path.join(place, self.mark))]

    def close(self):
        self.victim.kill()
        self.victim.wait()
        os.close(self.open)
        del os.environ["LIBRA_TEST_SECRET"]
        for listener in self.listeners:
            listener.close()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    made = Host(tmp_path_factory.mktemp("host"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def sandbox(host, loop):
    """Made after the host's secrets, so that it would inherit them if anything did."""
    made = pool.Sandbox(sandboxes.SMALL)
    loop.run(made.start())
    yield made
    found = sandboxes.processes_of(made)
    loop.run(made.close())
    assert not loop.run(sandboxes.gone(found))


async def attempt(sandbox, host, steps, seconds):
    """Runs the steps in a session of their own; checks what comes after. The last step's outcome, all text."""
    said = ""
    async with sandbox.session() as session:
        for kind, request in steps if isinstance(steps[0], tuple) else (steps,):
            if kind == "edit":
                outcome = await session.edit({key: host.fill(value) for key, value in request.items()}, seconds)
            else:
                disguised = host.fill(request).replace("ESCAPED", "ESC' 'APED" if kind == "python" else "ESC''APED")
                outcome = await getattr(session, kind)(disguised, seconds)
            said += outcome.text
        following = await session.python("print(6 * 7)", PATIENT)
        assert (following.status, following.text.endswith("42\n")) == ("success", True), following
        assert (await session.shell("echo $((6 * 7))", PATIENT)).text == "42\n"
        found = sandboxes.processes_of(sandbox)
        resting = max(len(sandboxes.alive([one, *one.children(recursive=True)])) for one in found)
        assert resting <= RESTING
        own = session._worker
    for _ in range(int(sandboxes.GONE_SECONDS / sandboxes.POLL_SECONDS)):
        if own not in sandbox._live:
            break
        await asyncio.sleep(sandboxes.POLL_SECONDS)
    assert own not in sandbox._live
    left = sandboxes.processes_of(sandbox)
    assert not await sandboxes.gone([one for one in found if one not in left])
    return outcome, said


def contained(sandbox, host, loop, steps, seconds=None):
    outcome, said = loop.run(attempt(sandbox, host, steps, seconds))
    assert "ESCAPED" not in said
    assert host.token not in said
    assert len(outcome.text) < 2 * sandboxes.SMALL.output_bytes
    host.check()
    return outcome


def named(group):
    return pytest.mark.parametrize("steps", group.values(), ids=group.keys())


@named(escapes.NETWORK)
def test_the_network_is_out_of_reach(sandbox, host, loop, steps):
    assert contained(sandbox, host, loop, steps, PATIENT).status == "failure"


@named(escapes.READING)
def test_the_host_cannot_be_read(sandbox, host, loop, steps):
    assert contained(sandbox, host, loop, steps, PATIENT).status == "failure"


@named(escapes.WRITING)
def test_nothing_outside_the_workspace_can_be_written(sandbox, host, loop, steps):
    assert contained(sandbox, host, loop, steps, PATIENT).status == "failure"


@named(escapes.RIGHTS)
def test_no_rights_can_be_had(sandbox, host, loop, steps):
    outcome = contained(sandbox, host, loop, steps, PATIENT)
    assert outcome.status == "failure" or steps == escapes.RIGHTS["kill-everything"]


# Only their deadline ends these, so a short one saves waiting.
WAITING = ("sleep", "deaf-to-signals", "endless-output-of-a-child", "stop-the-interpreter")
AWAITED = [group[name] for group in (escapes.SPENDING, escapes.BREAKING) for name in WAITING if name in group]


@named(escapes.SPENDING)
def test_what_may_be_used_has_a_limit(sandbox, host, loop, steps):
    outcome = contained(sandbox, host, loop, steps, 0.5 if steps in AWAITED else None)
    assert outcome.status in ("failure", "timeout")
    assert outcome.seconds < sandboxes.SMALL.seconds + 2.0


@named(escapes.LINGERING)
def test_nothing_outlives_its_call(sandbox, host, loop, steps):
    assert contained(sandbox, host, loop, steps).seconds < sandboxes.SMALL.seconds


@named(escapes.BREAKING)
def test_an_interpreter_that_breaks_is_a_failure_and_another_follows(sandbox, host, loop, steps):
    outcome = contained(sandbox, host, loop, steps, 0.5 if steps in AWAITED else None)
    assert outcome.status in ("failure", "timeout")


def test_sessions_see_nothing_of_each_other(sandbox, host, loop):
    async def work():
        async with sandbox.session() as one, sandbox.session() as other:
            for place in (backends.WORKSPACE, "/tmp", "/dev/shm"):
                assert (await one.shell(f"echo {host.token} >{place}/mine")).status == "success"
            await one.python(
                "import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0libra')\ns.listen()\n"
                "t = socket.socket()\nt.bind(('127.0.0.1', 4444))\nt.listen()"
            )
            seen = await other.shell(
                f"cat {backends.WORKSPACE}/* /tmp/* /dev/shm/* /proc/*/environ /proc/*/root{backends.WORKSPACE}/*"
            )
            assert host.token not in seen.text
            for address in ("socket.AF_UNIX, '\\0libra'", "socket.AF_INET, ('127.0.0.1', 4444)"):
                tried = await other.python(f"import socket\nfamily, to = {address}\nsocket.socket(family).connect(to)")
                assert "Connection refused" in tried.text

    loop.run(work())


@pytest.mark.parametrize(
    "code",
    [
        "for place in ('/workspace', '/tmp', '/dev/shm'): open(place + '/left', 'w').write('TOKEN')",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(1)\n  open('/tmp/late', 'w').write('TOKEN')",
        "import os, time\nfor _ in range(6):\n  if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)",
        f"{FIRST_THREAD_ENDED}\nbegin(lambda: (time.sleep(1), open('/tmp/late', 'w').write('TOKEN')))",
        "import os\nopen('f', 'w').write('TOKEN')\nos.mkdir('shut')\nopen('shut/f', 'w')\nos.chmod('shut', 0)",
        "import os\nfor _ in range(450):\n  os.mkdir('d')\n  os.chdir('d')\nopen('f', 'w').write('TOKEN')",
        "import os\nfor place in ('/workspace', '/tmp', '/dev/shm'): os.chmod(place, 0o555)",
        "import os\nos.setxattr('/workspace', 'user.left', b'TOKEN')",
        "import sys, builtins\nbuiltins.left = sys.left = 'TOKEN'",
        "print('TOKEN' * 10)",
        "import os\nfor place in ('/workspace', '/tmp', '/dev/shm'): os.utime(place, (12345678, 12345678))",
        "import socket as s\na = s.create_server(('127.0.0.1', 0))\nb = s.create_connection(a.getsockname())\n"
        "a.accept()[0].close()\nb.close()",
        "import socket as s\na = s.socket(s.AF_INET, s.SOCK_DGRAM)\na.sendto(bytes(1234), ('127.0.0.1', 9))",
    ],
    ids=[
        "files",
        "a-process",
        "processes",
        "a-thread",
        "a-shut-folder",
        "a-deep-folder",
        "modes",
        "attributes",
        "variables",
        "memory",
        "times",
        "a-port-that-lingers",
        "counted-traffic",
    ],
)
def test_a_stateless_call_finds_nothing_of_the_one_before(loop, code):
    """Both calls run in the one sandbox that there is, or in a fresh one if it could not be cleaned."""
    search = (
        "import builtins, os, re, sys\nfound = [getattr(one, 'left', None) for one in (builtins, sys)]\n"
        "for place in ('/workspace', '/tmp', '/dev/shm'):\n"
        "  found += [each for each in (os.stat(place).st_mtime, os.stat(place).st_atime) if each == 12345678]\n"
        "  found += os.listdir(place) + os.listxattr(place)\n  open(place + '/f', 'w').close()\n"
        "found += open('/proc/net/tcp').read().splitlines()[1:]\n"
        "found += [line for line in open('/proc/net/dev') if 'lo:' in line and int(line.split()[1])]\n"
        "found += [pid for pid in os.listdir('/proc') if pid.isdigit() and int(pid) not in (1, os.getpid())]\n"
        "heap = [line.split()[0] for line in open('/proc/self/maps') if 'rw-p' in line and line.split()[4] == '0']\n"
        "for start, end in (map(lambda x: int(x, 16), one.split('-')) for one in heap):\n"
        "  with open('/proc/self/mem', 'rb', 0) as file:\n"
        "    try: file.seek(start); held = file.read(end - start)\n    except (OSError, OverflowError): continue\n"
        "    found += re.findall(bytes([84, 79]) + b'KEN[0-9]{8}', held)\n"
        "print([one for one in found if one])"
    )

    async def work():
        async with pool.Sandbox(sandboxes.SMALL, warm=1, most=1) as sandbox:
            await sandbox.run(code.replace("TOKEN", "TOKEN12345678"))
            seen = await sandbox.run(search, PATIENT)
            assert (seen.status, seen.text) == ("success", "[]\n")

    loop.run(work())


@pytest.mark.parametrize(
    ("work", "note"),
    [
        ("begin(lambda: any(iter(int, 1)))", "more than 1 s of processor time"),
        ("for _ in range(2): begin(lambda: (b'x' * 2**27, time.sleep(60)))", "more than 256 MiB of memory"),
    ],
    ids=["processor", "memory"],
)
def test_a_process_whose_first_thread_ended_is_held_to_the_limits(loop, work, note):
    async def body():
        async with pool.Sandbox(dataclasses.replace(sandboxes.SMALL, seconds=PATIENT), warm=1) as sandbox:
            return await sandbox.run(f"{FIRST_THREAD_ENDED}\n{work}\ntime.sleep(60)")

    outcome = loop.run(body())
    assert outcome.status == "failure"
    assert note in outcome.text


def test_each_sandbox_of_root_is_another_user_on_the_host(sandbox, loop):
    if os.geteuid() != 0:
        pytest.skip("takes root")

    async def work():
        async with sandbox.session() as session:
            await session.python("1")
            await session.shell("true")
            return [{user for one in found for user in one.uids()} for found in sandboxes.groups_of(sandbox)]

    users = loop.run(work())
    assert all(len(of_one) == 1 and 0 not in of_one for of_one in users)
    assert len(set.union(*users)) == len(users) > 1


def test_processes_are_counted_by_the_kernel_too(sandbox, loop):
    """Those that ended and were not waited for escape the first process's eye."""
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("takes a kernel of 5.14 or later")

    async def work():
        async with sandbox.session() as session:
            return await session.python("import os, time\nfor _ in range(60):\n  if not os.fork(): os._exit(0)")

    assert "Resource temporarily unavailable" in loop.run(work()).text


def test_an_older_bubblewrap_is_watched_instead(monkeypatch, loop):
    """Without --size and --disable-userns."""
    monkeypatch.setattr(backends, "_help", lambda _: "")

    async def work():
        async with pool.Sandbox(sandboxes.SMALL, warm=1) as sandbox, sandbox.session() as session:
            filled = await session.python(
                "import time\nfor i in range(12): open(str(i), 'wb').write(bytes(2**20))\ntime.sleep(1)"
            )
            return filled, await session.shell("unshare --user id"), await session.python("6 * 7")

    filled, unshared, following = loop.run(work())
    assert "[stopped: more than 8 MiB in /workspace]" in filled.text
    assert (unshared.status, following.text) == ("failure", "42\n")


def test_nothing_outlives_a_parent_that_is_killed(tmp_path, loop):
    script = (
        "import asyncio, os\nfrom libra_jax.tools.sandbox import pool\n"
        "async def main():\n"
        "    async with pool.Sandbox() as sandbox, sandbox.session() as session:\n"
        "        await session.python('x = 1')\n"
        "        print(*(live.process.pid for live in sandbox._live), flush=True)\n"
        "        await session.shell('setsid sleep 600 & sleep 600', 600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        ids = parent.stdout.readline().split()
        assert ids
        found = loop.run(_descendants(parent.pid, at_least=2 * len(ids) + 4))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert not loop.run(sandboxes.gone(found))


def test_nothing_outlives_a_parent_that_is_killed_while_it_starts_sandboxes(loop):
    """Whenever that is: bubblewrap's own children wait for it without a deadline."""
    mark = 1000 + secrets.randbelow(10**6) / 10**6
    script = (
        "import asyncio\nfrom libra_jax.tools.sandbox import limits, pool\n"
        "async def main():\n"
        "    print(flush=True)\n"
        "    while True:\n"
        f"        async with pool.Sandbox(limits.Limits(seconds={mark}), warm=3): pass\n"
        "asyncio.run(main())\n"
    )
    for attempt in range(10):
        parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        try:
            parent.stdout.readline()
            time.sleep(0.005 + 0.013 * attempt)
        finally:
            parent.kill()
            parent.wait()
            parent.stdout.close()
    assert not loop.run(sandboxes.gone(sandboxes.marked(str(mark))))


async def _descendants(pid, at_least):
    found = []
    for _ in range(int(sandboxes.GONE_SECONDS / sandboxes.POLL_SECONDS)):
        found = sandboxes.descendants(pid)
        if len(found) >= at_least:
            break
        await asyncio.sleep(sandboxes.POLL_SECONDS)
    assert len(found) >= at_least
    return found
