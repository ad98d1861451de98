"""Temporary folders: gone with their processes, however those end."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid

import pytest

from libra_jax.utils import scratch

HOLDER = """
import time
from libra_jax.utils import scratch
kept = scratch.Scratch()
print(kept.path, flush=True)
time.sleep(60)
"""


SEGMENT_HOLDER = """
import pathlib, sys, time
from libra_jax.utils import scratch
kept = scratch.Scratch()
names = sys.argv[1:]
for name in names:
    pathlib.Path("/dev/shm", name).write_bytes(b"0" * 64)
kept.list_segments(names)
print(kept.path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_is_removed_with_what_is_in_it(tmp_path):
    made = scratch.Scratch()
    (made.path / "file").write_text("text")
    made.close()
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_leftover_of_folders_nested_a_thousand_deep_is_removed(tmp_path):
    left = tmp_path / f"{scratch.PREFIX}dead"
    left.mkdir(mode=0o700)
    (left / scratch.LOCK).touch()
    script = "import os, sys; os.chdir(sys.argv[1]); [(os.mkdir('a'), os.chdir('a')) for _ in range(1200)]"
    subprocess.run([sys.executable, "-c", script, left], check=True)
    assert scratch.Scratch().path.is_dir()
    assert not left.exists()


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", [0o700, 0o2770], ids=["plain", "of a group"])
def test_what_a_killed_process_left_goes_with_the_next_and_what_lives_stays(mode, tmp_path):
    tmp_path.chmod(mode)  # folders in one with the group's bit get that bit, too
    holders = [subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        paths = [holder.stdout.readline().strip() for holder in holders]
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait(10)
        assert sorted(map(str, tmp_path.iterdir())) == sorted(paths)
        made = scratch.Scratch()
        assert sorted(map(str, tmp_path.iterdir())) == sorted([paths[1], str(made.path)])
        made.close()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(10)
            holder.stdout.close()


@pytest.mark.multiprocess
def test_an_idle_sandbox_leaves_nothing_to_the_process_after_a_killed_one(tmp_path):
    code = "import time; from libra_jax.tools.sandbox import pool; made = pool.Sandbox(); print(made.door, flush=True)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        door = pathlib.Path(holder.stdout.readline().strip())
        assert door.is_dir()
    finally:
        holder.kill()
        holder.wait(10)
        holder.stdout.close()
    made = scratch.folder("door")
    assert list(tmp_path.iterdir()) == [made.parent]


def test_folders_of_a_process_lie_in_one_that_is_made_again_if_it_is_gone(tmp_path):
    one, other = scratch.folder("door"), scratch.folder("door")
    assert one.parent == other.parent
    shutil.rmtree(one.parent)
    assert scratch.folder("door").parent.parent == tmp_path


@pytest.mark.multiprocess
def test_shared_memory_of_a_killed_engine_goes_with_the_next_and_others_stays():
    mark = f"{os.getpid()}-libra-test"
    dead, alive, foreign = (f"vllm_dist_{kind}{mark}-tp:0-[0-1]-cpushm_0" for kind in ("dead", "alive", "foreign"))
    taken, other = f"psm_{mark}", f"plasma{mark}"
    folder = pathlib.Path("/dev/shm")
    (folder / foreign).write_bytes(b"0")
    holders = [
        subprocess.Popen([sys.executable, "-c", SEGMENT_HOLDER, *names], stdout=subprocess.PIPE, text=True)
        for names in ([dead, taken, other], [alive])
    ]
    try:
        for holder in holders:
            holder.stdout.readline()
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait(10)
        (folder / f"{taken}.new").write_bytes(b"0")  # another process made one of the same name meanwhile
        (folder / f"{taken}.new").rename(folder / taken)
        scratch.Scratch().close()
        left = {path.name for path in folder.iterdir() if mark in path.name}
        assert left == {alive, foreign, taken, other}
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(10)
            holder.stdout.close()
        for path in folder.iterdir():
            if mark in path.name:
                path.unlink()


MEETING_HOLDER = """
import pathlib, sys, time
from libra_jax.utils import scratch
kept = scratch.Scratch()
for name in sys.argv[1:]:
    (kept.path / name).touch()
    pathlib.Path("/dev/shm", f"{name}-tp:0-[0-1]-cpushm_0").write_bytes(b"0")
print(kept.path, flush=True)
time.sleep(60)
"""


@pytest.mark.multiprocess
def test_segments_of_an_engine_killed_in_its_start_go_with_the_next():
    mark = f"{os.getpid()}-libra-meeting"
    dead, alive, foreign = (f"vllm_dist_{kind}{mark}" for kind in ("dead", "alive", "foreign"))
    folder = pathlib.Path("/dev/shm")
    (folder / f"{foreign}-tp:0-[0-1]-cpushm_0").write_bytes(b"0")
    holders = [
        subprocess.Popen([sys.executable, "-c", MEETING_HOLDER, name], stdout=subprocess.PIPE, text=True)
        for name in (dead, alive)
    ]
    try:
        for holder in holders:
            holder.stdout.readline()
        holders[0].kill()
        holders[0].wait(10)
        scratch.Scratch().close()
        left = {path.name.partition("-tp:")[0] for path in folder.iterdir() if mark in path.name}
        assert left == {alive, foreign}
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(10)
            holder.stdout.close()
        for path in folder.iterdir():
            if mark in path.name:
                path.unlink()


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["open to others", "a link", "of another user"])
def test_a_folder_that_is_not_this_users_alone_is_left_alone(how, tmp_path):
    if how == "of another user" and os.getuid() != 0:
        pytest.skip("only root gives folders away")
    segment = pathlib.Path(f"/dev/shm/psm_{os.getpid()}-libra-theirs")
    segment.write_bytes(b"0")
    elsewhere = tmp_path / "elsewhere"
    theirs = elsewhere if how == "a link" else tmp_path / "libra-jax-theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "lock").touch()
    try:
        if how == "a link":
            (tmp_path / "libra-jax-theirs").symlink_to(elsewhere)
            (theirs / "segments").write_text(f"{segment.stat().st_ino} {segment.name}\n")
        else:
            os.mkfifo(theirs / "segments")  # a reader waits for a writer
        if how == "open to others":
            theirs.chmod(0o777)
        if how == "of another user":
            os.chown(theirs, 12345, 12345)
        # In a process of its own, because a hang could not be ended otherwise.
        code = "from libra_jax.utils import scratch; scratch.Scratch().close()"
        subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
        assert (theirs / "lock").exists()
        assert segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_sockets_find_room_whatever_the_temporary_directory(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made = scratch.Scratch(sockets=True)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(made.path / str(uuid.uuid4())))  # as vLLM names them
    finally:
        made.close()
    assert scratch.Scratch().path.parent == deep
