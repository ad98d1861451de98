"""What holds a sandbox and what it may send: arguments that cannot be, backends, control groups, hostile replies."""

import asyncio
import json
import os
import sys

import pytest
import sandboxes
from sandboxes import with_session

from libra_jax import protocols
from libra_jax.tools.sandbox import backends, limits, pool, supervisor, worker
from libra_jax.utils import scratch

REQUIRED = "LIBRA_JAX_REQUIRE_SANDBOX"


@pytest.fixture
def bubblewrap():
    sandboxes.skip_without_bubblewrap()


def test_bubblewrap_runs_where_it_is_required():
    if os.environ.get(REQUIRED) != "1":
        pytest.skip(f"{REQUIRED} is not set")
    assert not sandboxes.unavailable()


# Nonsense ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", 0),
        ("seconds", float("nan")),
        ("cpu_seconds", -1.0),
        ("memory_mib", 10),
        ("memory_mib", 512.5),
        ("processes", 1),
        ("processes", True),
        ("file_mib", 0),
        ("workspace_mib", "128"),
        ("files", 3),
        ("output_bytes", 0),
        ("input_bytes", -5),
        ("start_seconds", float("inf")),
    ],
)
def test_a_limit_that_no_call_could_live_with_is_refused_by_name(field, value):
    with pytest.raises(protocols.ConfigError, match=rf"^(config\.sandbox|SandboxLimits)\.{field}: "):
        limits.Limits(**{field: value})


def test_the_least_limits_still_run_something(bubblewrap):
    async def work(_, session):
        return [await session.python("6 * 7"), await session.shell("echo 42")]

    least = limits.Limits(memory_mib=64, processes=2, files=100, input_bytes=1024, output_bytes=256)
    assert [outcome.text for outcome in with_session(work, limits=least)] == ["42\n", "42\n"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"backend": "bubblewarp"}, r"sandbox\.backend.*did you mean 'bubblewrap'"),
        ({"backend": "none"}, r"sandbox\.backend: none .*allow_unsafe=True"),
        ({"warm": 0}, r"sandbox\.warm"),
        ({"warm": 3, "most": 2}, r"sandbox\.warm.*sandbox\.most = 2"),
        ({"packages": ("/no/such",)}, r"sandbox\.packages: /no/such is no directory"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_the_fields_name(arguments, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        pool.Sandbox(**arguments)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_calls_seconds_must_be_positive_and_finite(seconds):
    with pytest.raises(protocols.ConfigError, match=r"^config\.sandbox\.seconds: must be positive"):
        limits.Limits().of_call(seconds)


@pytest.mark.parametrize("path", ["missing", "file"])
def test_a_workspace_that_is_no_directory_is_refused(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(protocols.ConfigError, match=r"^the workspace .* is no directory"):
        worker.pack(tmp_path / path, 1)


def test_a_workspace_larger_than_its_limit_is_refused(tmp_path):
    (tmp_path / "big").write_bytes(bytes(2**20))
    with pytest.raises(protocols.ConfigError, match=r"^config\.sandbox\.workspace_mib: 1 do not hold"):
        worker.pack(tmp_path, 1)


def test_missing_bubblewrap_is_a_sentence_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(protocols.ConfigError, match=r"^config\.sandbox\.backend: .*apt-get install bubblewrap"):
        pool.Sandbox()


def test_bubblewrap_that_cannot_start_is_a_sentence_with_its_reason(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\n[ $1 = --help ] && exit 0\necho 'bwrap: no namespaces here' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(fake) if name == "bwrap" else f"/usr/bin/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)  # who gives no user up, and may enter the folder of this test

    async def body():
        async with pool.Sandbox():
            pass

    with pytest.raises(protocols.ConfigError, match=r"bwrap: no namespaces here; .*user namespaces"):
        asyncio.run(body())


# Backends ---------------------------------------------------------------------------------------------------------


def test_none_runs_python_and_shell_without_containment(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def work(sandbox, session):
        found = sandboxes.processes_of(sandbox)
        outcomes = [await sandbox.run("6 * 7"), await session.python("x = 1"), await session.shell("sleep 60 & echo 2")]
        late = await session.python("import time\ntime.sleep(60)", 0.2)
        found += sandboxes.processes_of(sandbox)
        return [outcome.text for outcome in outcomes], late.status, found

    texts, late, found = with_session(work, backend="none", allow_unsafe=True)
    assert (texts, late) == (["42\n", pool.NO_OUTPUT, "2\n"], "timeout")
    assert not sandboxes.alive(found)
    (of_process,) = tmp_path.iterdir()
    assert [path.name for path in of_process.iterdir()] == [scratch.LOCK]


def test_a_container_is_cut_off_and_limited_and_removed_by_name(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/podman" if name == "podman" else None)
    backend = backends.make("container", sandboxes.SMALL, (), "python:3.11", allow_unsafe=False)
    launch = backend.launch(group=False)
    words = set(launch.command)
    assert words >= {"--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"}
    assert words >= {"--memory=256m", "--memory-swap=256m", "--pids-limit=19", "--user=65534:65534", "--rm"}
    assert launch.remove[:3] == ("/usr/bin/podman", "rm", "--force")
    assert f"--name={launch.remove[3]}" in words


def test_a_container_needs_a_runtime_and_an_image(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(protocols.ConfigError, match=r"sandbox\.backend: container needs podman or docker"):
        pool.Sandbox(backend="container")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(protocols.ConfigError, match=r"sandbox\.image: must name an image"):
        pool.Sandbox(backend="container")


def test_packages_can_be_imported_and_not_be_changed(bubblewrap, tmp_path):
    (tmp_path / "libra_test_package.py").write_text("answer = 42\n")
    tmp_path.chmod(0o755)

    async def work(_, session):
        refused = await session.python("import libra_test_package as p\nprint(p.answer)\nopen(p.__file__, 'w')")
        return refused, await session.shell(f"{backends.INTERPRETER} -c 'import libra_test_package'")

    refused, shell = with_session(work, packages=(str(tmp_path),))
    assert refused.text.startswith("42\n")
    assert "Read-only file system" in refused.text
    assert shell.status == "success"


def test_packages_that_a_sandbox_could_not_read_are_refused(bubblewrap, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("takes root")
    with pytest.raises(protocols.ConfigError, match=r"sandbox\.packages: .* is for root alone"):
        pool.Sandbox(packages=(str(tmp_path),))


def test_delegated_control_groups_are_found_and_filled(tmp_path):
    own, parent = tmp_path / "own", tmp_path / "tree" / "user" / "libra"
    (parent / "leaf").mkdir(parents=True)
    own.write_text("4:memory:/elsewhere\n0::/user/libra/leaf\n")
    for group, controllers in ((parent, "cpu memory pids"), (parent / "leaf", "")):
        (group / "cgroup.subtree_control").write_text(controllers)
    assert limits.delegated(tmp_path / "tree", own) == parent
    (parent / "cgroup.subtree_control").write_text("memory")
    assert limits.delegated(tmp_path / "tree", own) is None
    made = limits.ControlGroup(parent, sandboxes.SMALL, 123)
    assert (made.path / "pids.max").read_text() == "19"
    assert (made.path / "memory.max").read_text() == str(256 * 2**20)
    assert (made.path / "cgroup.procs").read_text() == "123"
    assert not made.ran_out()
    for count in (0, 2):
        (made.path / "memory.events").write_text(f"max 7\noom_kill {count}\n")
        assert made.ran_out() == (count > 0)


# The wire ---------------------------------------------------------------------------------------------------------

GOOD = {"status": "success", "note": "", "lost": "", "split": 2, "left_out": 0}


def received(data, most_bytes=100):
    async def body():
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        return await worker.receive(stream, most_bytes)

    return asyncio.run(body())


def frame(head, body=b"abc"):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return supervisor.HEADER.pack(len(text), len(body)) + text + body


def test_a_reply_is_read_back():
    assert received(frame(GOOD)).text() == "abc"
    assert received(frame({**GOOD, "left_out": 7})).text() == "ab\n[... 7 bytes left out ...]\nc"


@pytest.mark.parametrize(
    "data",
    [
        frame(b"no json"),
        frame(b"[" * 4000),
        frame([]),
        frame({}),
        frame({**GOOD, "status": "won"}),
        frame({**GOOD, "status": ["success"]}),
        frame({**GOOD, "note": 3}),
        frame({**GOOD, "lost": "everything"}),
        frame({**GOOD, "split": 4}),
        frame({**GOOD, "split": True}),
        frame({**GOOD, "left_out": -1}),
        frame({**GOOD, "left_out": 1e300}),
        frame(GOOD, b"x" * 101),
        frame(b" " * 5000),
        b"\xff" * 64,
    ],
)
def test_what_is_no_reply_is_malformed(data):
    with pytest.raises(worker.Malformed):
        received(data)


def test_a_reply_that_breaks_off_is_the_end_of_the_sandbox():
    with pytest.raises(EOFError):
        received(frame(GOOD)[:-1])


def test_the_supervisor_is_of_the_standard_library_alone():
    for name in ("usage.py", "children.py", "supervisor.py"):
        with open(os.path.join(os.path.dirname(supervisor.__file__), name)) as file:
            imported = [line.split()[1].split(".")[0] for line in file if line.startswith(("import ", "from "))]
        assert set(imported) - {"libra_jax", "__future__"} <= set(sys.stdlib_module_names)
