"""Limits where no control group keeps them, what one call leaves to the next, and whose fault a lost sandbox is."""

import asyncio
import ctypes
import dataclasses
import errno
import fcntl
import io
import mmap
import os
import shutil
import signal
import tarfile

import pytest
import sandboxes

from libra_jax.tools.sandbox import backends, limits, pool, seccomp, usage

PATIENT = dataclasses.replace(sandboxes.SMALL, seconds=20.0, cpu_seconds=20.0)
LIMITS_OF_THE_FIRST = "resource.prlimit(1, resource.RLIMIT_NOFILE, (64, 64))"
FORK = "import ctypes, mmap, os, socket, time\nos.fork()\nheld = []\n"
MEMORY = {
    "pieces let go": (
        "for _ in range(150):\n  held.append(mmap.mmap(-1, 2**20))\n  held[-1].madvise(mmap.MADV_DONTNEED)\n"
    ),
    "pieces of which little stays mapped": (
        "libc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\nfor _ in range(150):\n"
        "  at = libc.mmap(None, ctypes.c_size_t(2**20), 3, 0x21, -1, ctypes.c_long(0))\n"
        "  libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t(2**20 - 4096))\n"
    ),
    "a device let go": (
        "held.append(mmap.mmap(os.open('/dev/zero', os.O_RDWR), 140 * 2**20))\nheld[-1].madvise(mmap.MADV_DONTNEED)\n"
    ),
    "sockets": "os.fork()\nfor _ in range(100): held += socket.socketpair()\n",
    "sockets in transit": (
        "left, right = socket.socketpair()\nfor _ in range(50):\n  one, other = socket.socketpair()\n"
        "  socket.send_fds(left, [b'x'], [one.fileno(), other.fileno()])\n  one.close(), other.close()\n"
        "os.fork()\nfor _ in range(90): held += socket.socketpair()\n"
    ),
    "more mappings than can be counted": (
        "kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\nfor at in range(50_000):\n"
        "  held.append(mmap.mmap(-1, 4096, kind, mmap.PROT_READ << at % 2))\n"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _bubblewrap():
    sandboxes.skip_without_bubblewrap()


@pytest.fixture
def unfiltered(monkeypatch):
    """As on a machine for which there is no filter of system calls."""
    monkeypatch.setattr(seccomp, "program", lambda: b"")


def run(*codes, limits=PATIENT, **arguments):
    """Outcomes of stateless calls, which one sandbox serves if it may."""

    async def body():
        async with pool.Sandbox(limits, warm=1, most=1, **arguments) as sandbox:
            return [await sandbox.run(code) for code in codes]

    return asyncio.run(body())


@pytest.mark.parametrize("code", MEMORY.values(), ids=MEMORY.keys())
def test_memory_that_no_process_shows_is_counted(code, monkeypatch):
    monkeypatch.setattr(backends, "_mounts", lambda make: False)  # else no memory can be had from the device
    (outcome,) = run(f"{FORK}{code}time.sleep(60)")
    assert outcome.status == "failure"
    assert "stopped: more than 256 MiB of memory" in outcome.text or "more mappings of memory" in outcome.text


def test_no_memory_is_shared_through_a_device():
    if os.geteuid() != 0 or not backends._mounts(backends._MAKE_ZERO):
        pytest.skip("takes root, and its right to make devices")
    code = (
        "import mmap, os\nwith open('/dev/zero', 'rb') as zero:\n  assert zero.read(3) == bytes(3)\n"
        "  assert mmap.mmap(zero.fileno(), 2**21, access=mmap.ACCESS_COPY)[:3] == bytes(3)\n"
        "open('/dev/null', 'w').write('x')\nos.open('/dev/zero', os.O_RDWR)"
    )
    outcome = run(code)[0]
    assert "PermissionError: [Errno 13] Permission denied: '/dev/zero'" in outcome.text


SHARED_BY_ALL = {
    "terminals": ("import os\nheld = []\nwhile True: held.append(os.openpty())", "No space left on device"),
    "timers": (
        "import ctypes\nlibc, timer, count = ctypes.CDLL(None), ctypes.c_void_p(), 0\n"
        "while count < 2000 and libc.syscall(222, 1, None, ctypes.byref(timer)) == 0: count += 1\n"
        "print('timers', count)",
        "timers 256\n",
    ),
    "large-pipes": (
        "import fcntl, os\nfcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 2**20)",
        "Operation not permitted",
    ),
    "many-pipes": (
        "import os, time\nfor _ in range(12):\n  if os.fork() == 0: break\n"
        "held = []\nfor _ in range(120):\n  held.append(os.pipe())\n"
        "  os.set_blocking(held[-1][1], False)\n  os.write(held[-1][1], bytes(2**16))\ntime.sleep(60)",
        "stopped: more than 128 MiB of memory",
    ),
    "a-cache-that-is-asked": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nassert libc.syscall(451, 0, 0, 0, 0) == -1\n"
        "print('errno', ctypes.get_errno())",
        "errno 38\n",
    ),
}


@pytest.mark.parametrize("kind", SHARED_BY_ALL)
def test_what_the_whole_machine_shares_is_limited(kind):
    code, said = SHARED_BY_ALL[kind]
    if kind == "terminals" and os.geteuid() != 0:
        said = "stopped: more than 16 terminals"
    small = dataclasses.replace(sandboxes.SMALL, memory_mib=128 if kind == "many-pipes" else 256)

    (outcome,) = run(code, limits=small)
    assert said in outcome.text


def resident(path) -> int:
    """How many pages of a file the machine's cache holds."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (-(-len(mapped) // mmap.PAGESIZE)))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), pages) == 0
        return sum(page & 1 for page in pages)


def test_files_of_the_host_are_neither_locked_nor_dropped_from_its_cache(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "shared.py").write_bytes(b"#" * 2**20)
    with open(tmp_path / "shared.py", "rb") as file:
        os.fsync(file.fileno())  # a page that is not on the disk yet is dropped by no one
    code = (
        "import fcntl, os\nfile = os.open('/packages/0/shared.py', os.O_RDONLY)\nos.read(file, 2**20)\n"
        "os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)\nfcntl.flock(file, fcntl.LOCK_EX)\nprint('done')"
    )

    def lock():
        with open(tmp_path / "shared.py", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    async def work(sandbox, session):
        assert (await session.python(code)).text == "done\n"
        assert resident(tmp_path / "shared.py") == 2**20 // mmap.PAGESIZE
        if os.geteuid() == 0 and backends._overlays():
            lock()
            shown = (await session.run("print(open('/proc/self/mountinfo').read())")).text
            assert str(tmp_path) not in shown

    sandboxes.with_session(work, packages=(str(tmp_path),))


def test_no_socket_buffers_more_than_the_kernels_default():
    code = (
        "import socket\nfor one in socket.socketpair():\n  for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):\n"
        "    before = one.getsockopt(socket.SOL_SOCKET, kind)\n"
        "    one.setsockopt(socket.SOL_SOCKET, kind, before * 2)\n"
        "    assert one.getsockopt(socket.SOL_SOCKET, kind) == before\n"
        "    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)\n"
    )
    assert run(code)[0].status == "success"


PROGRAMS = {
    "threads": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "asyncio": (
        "import asyncio\nasync def work():\n"
        "  child = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)\n"
        "  assert await child.communicate(b'x') == (b'x', None)\n"
        "  served = await asyncio.start_server(lambda r, w: w.close(), '127.0.0.1', 0)\n"
        "  reader, writer = await asyncio.open_connection(*served.sockets[0].getsockname())\n"
        "  assert await reader.read() == b''\nasyncio.run(work())"
    ),
    "processes": (
        "import concurrent.futures as futures, multiprocessing\nwith futures.ProcessPoolExecutor(2) as pool:\n"
        "  assert list(pool.map(abs, [-1, 2])) == [1, 2]\nassert multiprocessing.Array('d', 10)[0] == 0"
    ),
    "a database": "import sqlite3\nheld = sqlite3.connect('x')\nheld.execute('pragma journal_mode=wal')",
    "its own limits": "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))\nos.nice(1)",
    "a terminal": "import pty\nassert pty.spawn(['true']) == 0",
}
COMMANDS = {
    "git": "git init -q r; cd r; touch f; git add f; git -c user.name=a -c user.email=a@b commit -qm x; git gc -q",
    "gcc": "echo 'int main(){return 0;}' >a.c; gcc a.c -o a; ./a",
    "bash": "seq 9 | sort -r | xargs -n1 echo >f; tar cz f | tar tz; cat <(echo a); timeout 9 nice -n 3 true",
}


def test_what_python_programs_do_is_allowed():
    for outcome in run(*PROGRAMS.values(), limits=limits.Limits(seconds=20.0)):
        assert outcome.status == "success", outcome.text


@pytest.mark.parametrize("program", COMMANDS)
def test_common_programs_run(program):
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")

    async def work(_, session):
        return await session.shell(f"(set -e; {COMMANDS[program]})")

    outcome = sandboxes.with_session(work, limits=limits.Limits(seconds=20.0))
    assert outcome.status == "success", outcome.text


def test_a_few_sockets_and_shared_pieces_are_no_excess():
    code = "import mmap, socket, time\nheld = [(mmap.mmap(-1, 4096), socket.socketpair()) for _ in range(40)]"
    assert run(code + "\ntime.sleep(0.1)")[0].status == "success"


@pytest.mark.parametrize(
    "ignore", ["signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "pass"], ids=["not waited for", "waited for"]
)
def test_processor_time_of_short_lived_processes_is_counted(ignore):
    code = (
        f"import os, signal, time\n{ignore}\nend = time.monotonic() + 15\nwhile time.monotonic() < end:\n"
        "  child = os.fork()\n  if child == 0:\n    until = time.process_time() + 0.008\n"
        "    while time.process_time() < until: pass\n    os._exit(0)\n"
        "  try: os.waitpid(child, 0)\n  except ChildProcessError: pass\n"
    )
    (outcome,) = run(code, limits=dataclasses.replace(PATIENT, cpu_seconds=1.0))
    assert "stopped: more than 1 s of processor time" in outcome.text


def test_processor_time_of_processes_no_one_waits_for_is_counted():
    code = (
        "import os, time\nfor _ in range(5):\n  if os.fork() == 0:\n    until = time.process_time() + 0.3\n"
        "    while time.process_time() < until: pass\n    os._exit(0)\n  time.sleep(0.35)\ntime.sleep(10)"
    )
    (outcome,) = run(code, limits=dataclasses.replace(PATIENT, cpu_seconds=1.0))
    assert "stopped: more than 1 s of processor time" in outcome.text


def test_processes_that_wait_for_a_core_use_no_processor_time():
    counted = usage.Processor()
    counted.begin({})
    many = {pid: usage.Process("R", 1, 0.0, 0.0, 1) for pid in range(10**7, 10**7 + 1000)}
    counted.seconds(many, interval=0.02)
    assert counted.seconds({}, interval=0.02) == pytest.approx(0.02 * len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("change", "look"),
    [
        (LIMITS_OF_THE_FIRST, "resource.getrlimit(resource.RLIMIT_NOFILE)"),
        ("os.setpriority(os.PRIO_PROCESS, 1, 5)", "os.nice(0)"),
        ("os.sched_setaffinity(1, list(os.sched_getaffinity(0))[:1])", "sorted(os.sched_getaffinity(0))"),
        ("os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))", "os.sched_getscheduler(0)"),
    ],
    ids=["limits", "nice", "cores", "scheduling"],
)
def test_a_stateless_call_leaves_no_limits_where_no_filter_is(unfiltered, change, look):
    before, changed, after = run(*(f"import os, resource\n{line}" for line in (look, change, look)))
    assert changed.status == "success"
    assert before.text == after.text
    assert changed.by_code


def test_files_in_transit_in_one_sandbox_leave_room_in_another():
    if os.geteuid() != 0:
        pytest.skip("takes root, else all sandboxes are one user's")
    send = (
        "import socket\nheld = [socket.socketpair() for _ in range(4)]\n"
        "for left, right in held[:{}]:\n  for _ in range(100): socket.send_fds(left, [b'x'], [0])\n"
    )

    async def work():
        async with pool.Sandbox(PATIENT, warm=2) as sandbox, sandbox.session() as one, sandbox.session() as other:
            return await one.python(send.format(4)), await other.python(send.format(1))

    full, free = asyncio.run(work())
    assert "Too many references" in full.text
    assert free.status == "success", free.text


def test_a_call_that_no_list_names_is_unknown():
    """As `open_tree_attr`, which came after most lists were made."""
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.syscall({}, 0, 0, 0)\nprint(ctypes.get_errno())"
    )
    (newer, refused) = run(code.format(467), code.format(seccomp.REFUSED["mount"]))
    assert (newer.text, refused.text) == (f"{errno.ENOSYS}\n", f"{errno.EPERM}\n")


def test_processes_that_leave_no_room_for_a_call_are_the_codes_doing():
    async def work(_, session):
        await session.python("import os\nfor _ in range(60):\n  if not os.fork(): os._exit(0)")
        return await session.shell("true"), await session.python("6 * 7")

    met, following = sandboxes.with_session(work, limits=PATIENT)
    assert (met.status, met.lost, met.broken, met.by_code) == ("failure", "all", False, True)
    assert "left no room for the call" in met.text
    assert following.text == "42\n"


def test_a_first_process_that_gives_up_is_the_codes_doing(monkeypatch):
    broken = backends.SOURCE.replace("processes, limits =", "1 / 0; processes, limits =")
    monkeypatch.setattr(backends, "SOURCE", broken)
    (outcome,) = run("import time\ntime.sleep(9)")
    assert (outcome.broken, outcome.by_code) == (False, True)
    assert "its first process could not go on with what is in it" in outcome.text


def test_files_that_exceed_a_limit_are_the_codes_doing():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo("large")
        member.size = (2 * PATIENT.file_mib + 1) * 2**20  # a sandbox that examines has twice the limits
        archive.addfile(member, io.BytesIO(bytes(member.size)))

    async def work():
        async with pool.Sandbox(PATIENT, warm=1) as sandbox:
            await sandbox.examine(content.getvalue(), "print(1)")

    with pytest.raises(pool.NotUnpacked, match=r"files could not be unpacked.*File too large"):
        asyncio.run(work())


def test_a_sandbox_killed_from_outside_is_not_the_codes_doing():
    async def work(sandbox, session):
        await session.python("1")
        found = sandboxes.descendants(session._worker.process.pid)
        session._worker.process.kill()
        assert not await sandboxes.gone(found)
        outer = await session.python("1")
        await session.python("1")
        signal.pidfd_send_signal(session._worker._first, signal.SIGKILL)
        return outer, await session.python("1")

    for outcome in sandboxes.with_session(work, limits=PATIENT):
        assert (outcome.broken, outcome.by_code) == (True, False)


def test_what_is_limited_only_roughly_is_told_at_the_start(caplog, unfiltered, monkeypatch):
    monkeypatch.setattr(backends, "_maps_users", lambda _: False)
    monkeypatch.setattr(backends, "_mounts", lambda make: False)
    monkeypatch.setattr(limits, "delegated", lambda: None)
    pool._warn_once.cache_clear()
    run("1")
    run("1")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    parts = ("limited only roughly", "delegate a control group", "No filter of system calls", "one user's", "/dev/zero")
    for part in parts:
        assert part in said


def test_no_control_group_of_a_container_is_missed(monkeypatch):
    monkeypatch.setattr(backends.shutil, "which", lambda name: f"/usr/bin/{name}")
    made = backends.make("container", limits.Limits(), (), "python:3.11", allow_unsafe=False)
    assert made.caveats(group=False) == []
