"""Temporary folders: gone with their processes, however those end."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from libra_jax import scratch

HOLDER = """
import time
from libra_jax import scratch
kept = scratch.Scratch()
print(kept.path, flush=True)
time.sleep(60)
"""


SEGMENT_HOLDER = """
import pathlib, sys, time
from libra_jax import scratch
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


@pytest.mark.multiprocess
def test_what_a_killed_process_left_goes_with_the_next_and_what_lives_stays(tmp_path):
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
    code = "import time; from libra_jax.agents.sandbox import pool; made = pool.Sandbox(); print(made.door, flush=True)"
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
