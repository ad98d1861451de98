"""What a run tells of itself while it lives, and how others see whether it does."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from libra_jax import protocols
from libra_jax.telemetry import console, files, memory, screen, status
from libra_jax.utils import checksums, deadlines, turns

HOUR = 3600.0


class Clock:
    """Seconds set by hand."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def run_status(clock: Clock | None = None, **further: Any) -> status.RunStatus:
    return status.RunStatus("demo", 12, 3, clock or Clock(), **further)


def waiting(subject: str, seconds: float, deadline: float, *, queued: bool = False) -> deadlines.Wait:
    """A wait that has taken `seconds` at the clock's first time."""
    return deadlines.Wait(subject, deadline, Clock.now - seconds, turns.Turn(queued))


def written(workdir: Path, **changes: Any) -> dict[str, Any]:
    """A status.json as a run wrote it."""
    record = {**run_status().view(), **changes}
    (workdir / status.STATUS_FILE).write_text(json.dumps(record))
    return record


def test_the_view_says_what_every_worker_does_and_for_how_long():
    clock = Clock()
    run = run_status(clock)
    run.status("trainer", "training step 4")
    clock.now += 7.0
    run.status("rollout-0", protocols.LOST)
    run.status("rollout-0", "starting")
    run.metrics(3, {"policy_version": 3, "reward/mean": 0.5, "loss": float("nan"), "groups/replaced_redundant": 2})
    run.metrics(4, {"policy_version": 4, "reward/mean": 0.6, "loss": float("nan"), "groups/replaced_redundant": 1})
    run.note("One sentence.")
    view = json.loads(json.dumps(run.view(), allow_nan=False))
    assert view["workers"] == {
        "trainer": {"doing": "training step 4", "seconds": 7.0},
        "rollout-0": {"doing": "starting", "seconds": 0.0},
    }
    assert (view["step"], view["policy_version"], view["fencing_token"], view["pid"]) == (4, 4, 3, os.getpid())
    assert (view["failures"], view["replaced"], view["notes"]) == (
        {"rollout-0": 1},
        {"redundant": 3},
        ["One sentence."],
    )
    assert view["scalars"]["loss"] is None
    assert (view["ended"], view["problems"]) == (None, [])
    text = screen.text(view)
    for part in ("step 4/12", "training step 4", "7.0 s", "workers lost: rollout-0 1", "groups replaced: redundant 3"):
        assert part in text


def test_no_number_is_cut_on_a_terminal_of_80_columns():
    run = run_status(Clock())
    run.metrics(4, dict.fromkeys(console.NUMBERS, 12345.678) | {"tokens/generated": 50.0})
    stream = io.StringIO()
    Console(file=stream, width=80, color_system=None).print(screen.picture(run.view()))
    assert "…" not in stream.getvalue()
    for _, name, _ in console.NUMBERS.values():
        assert f"{name} " in stream.getvalue()


def test_a_silent_event_loop_and_a_wait_past_its_deadline_are_problems_and_a_queue_is_none():
    clock = Clock()
    waits = [
        waiting("The trainer, asked to take a step,", 31.0, 30.0),
        waiting("The start of engine-1", 400.0, 300.0, queued=True),
        waiting("Engine engine-0", 1.0, 30.0),
    ]
    run = run_status(clock, waits=lambda: waits)
    assert run.view()["problems"] == ["The trainer, asked to take a step, has taken 31 s of the 30 s it may take."]
    clock.now += status.SILENT_SECONDS + 1
    assert run.view()["problems"][0] == "The event loop has not answered for 11 s."
    run.answered()
    assert len(run.view()["problems"]) == 1
    run.end("stopped", "Stopped at step 3.")
    assert run.view()["problems"] == []


def beat_while(workdir: Path, body: Any, run: status.RunStatus, **further: Any) -> None:
    async def main() -> None:
        beat = status.Heartbeat(workdir, run, **further)
        try:
            await body()
        finally:
            beat.close()

    asyncio.run(main())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BEAT_SECONDS", 0.02)


async def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_the_heart_beats_while_the_event_loop_is_stuck_and_says_so(tmp_path, quick):
    run = status.RunStatus("demo", 12, 1, time.monotonic)
    seen: list[float] = []

    async def body() -> None:
        time.sleep(0.5)  # noqa: ASYNC251  # the loop is stuck
        seen.append(status.read(tmp_path)["loop_silent_seconds"])
        await asyncio.sleep(0.1)
        await until(lambda: status.read(tmp_path)["loop_silent_seconds"] < 0.2)

    beat_while(tmp_path, body, run)
    assert seen[0] > 0.3
    assert "libra-heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_the_line_that_holds_up_the_event_loop_is_named_once(tmp_path, quick, monkeypatch, capsys):
    monkeypatch.setattr(status, "STUCK_SECONDS", 0.3)
    run = status.RunStatus("demo", 12, 1, time.monotonic)

    async def body() -> None:
        deadline = time.monotonic() + 30.0
        told = ""
        while "has kept the event loop" not in told and time.monotonic() < deadline:
            time.sleep(0.05)  # noqa: ASYNC251  # the loop is stuck
            told += capsys.readouterr().err
        time.sleep(0.2)  # noqa: ASYNC251
        assert re.search(r"warning: \S*test_status\.py, line \d+, has kept the event loop for \d+ s", told)
        assert "has kept" not in capsys.readouterr().err

    beat_while(tmp_path, body, run)


def test_a_run_that_was_taken_over_beats_no_more(tmp_path, quick):
    allowed = [True]
    run = run_status()

    async def body() -> None:
        await until(lambda: status.read(tmp_path)["beat"] > 2)
        allowed[0] = False
        await asyncio.sleep(0.1)
        (tmp_path / status.STATUS_FILE).write_text("its successor's")
        await asyncio.sleep(0.1)

    beat_while(tmp_path, body, run, guard=lambda: allowed[0])
    assert (tmp_path / status.STATUS_FILE).read_text() == "its successor's"


def test_on_a_full_disk_the_file_is_touched_so_that_the_run_is_seen_to_live_and_one_warning_says_so(
    tmp_path, quick, monkeypatch
):
    run, recorder = run_status(), memory.MemoryRecorder()
    run.recorder = recorder

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def body() -> None:
        monkeypatch.setattr(Path, "write_bytes", full)
        await until(lambda: recorder.notes)
        alive = await asyncio.to_thread(status.changes_within, tmp_path, 10.0)
        assert alive
        monkeypatch.undo()

    monkeypatch.setattr(status, "BEAT_SECONDS", 0.02)
    beat_while(tmp_path, body, run)
    problem = "status.json cannot be written (No space left on device)"
    assert recorder.notes == [f"warning: {problem}; the run goes on without it."]


@pytest.mark.parametrize("skew", [-HOUR, 0.0, HOUR])
def test_clocks_an_hour_apart_make_neither_a_live_run_look_dead_nor_a_dead_one_alive(tmp_path, skew):
    """The writer's clock is wrong, on the file as in it; only whether the file changes counts."""
    elsewhere = {"place": "another-kernel/pid:[1]", "process_began": 1}
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            partial = tmp_path / "partial"
            partial.write_text(json.dumps({**run_status().view(), **elsewhere, "wall": time.time() + skew}))
            os.utime(partial, (time.time() + skew, time.time() + skew))
            partial.replace(tmp_path / status.STATUS_FILE)

    record = written(tmp_path, **elsewhere, wall=time.time() + skew)
    os.utime(tmp_path / status.STATUS_FILE, (time.time() + skew, time.time() + skew))
    assert not status.is_alive(tmp_path, record, seconds=0.6)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert status.is_alive(tmp_path, record, seconds=20.0)
    finally:
        ended.set()
        thread.join()
    assert not status.is_alive(tmp_path, record, seconds=0.6)


def test_on_the_runs_own_host_its_process_tells_at_once(tmp_path):
    record = written(tmp_path)
    began = time.monotonic()
    assert status.is_alive(tmp_path, record)
    assert not status.is_alive(tmp_path, {**record, "process_began": 1}), "another process has its number"
    assert not status.is_alive(tmp_path, {**record, "pid": 2**22 + 1})
    assert not status.is_alive(tmp_path, {**record, "ended": {"how": "done", "sentence": ""}})
    assert time.monotonic() - began < status.WATCH_SECONDS, "none was watched"


def test_a_status_that_lost_its_checksum_is_damaged(tmp_path):
    """Only versions that wrote no counts wrote no checksum."""
    record = {**written(tmp_path), "records": {"run": "aaaa", "counts": {}}, "beat": 1}
    text = files.json_line({name: value for name, value in record.items() if name != "checksum"})
    file = tmp_path / status.STATUS_FILE
    file.write_bytes(text)
    assert status.read(tmp_path)["step"] == record["step"]
    assert checksums.known_records(tmp_path) is not None
    file.write_bytes(re.sub(rb', "checksum": "\w*"', b"", text))
    with pytest.raises(protocols.DataError, match="its checksum is missing"):
        status.read(tmp_path)
    assert checksums.known_records(tmp_path) is None


@pytest.mark.parametrize("content", ["", "[]", '{"loss": 1}', "\xff"])
def test_a_file_that_is_no_runs_is_named(tmp_path, content):
    (tmp_path / status.STATUS_FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(protocols.DataError, match=r"status\.json cannot be read"):
        status.read(tmp_path)
    assert status.read(tmp_path / "nothing") is None


@pytest.mark.parametrize(("deadline", "told"), [(math.inf, "any time"), (20.0, "20 s")])
def test_a_wait_without_a_limit_is_read_back_and_shown(tmp_path, deadline, told):
    waits = [waiting("engine-0's start", 3.0, deadline)]
    view = run_status(waits=lambda: waits).view()
    (tmp_path / status.STATUS_FILE).write_bytes(files.json_line(view))
    record = status.read(tmp_path)
    assert record is not None
    for shown in (view, record):
        assert f"waits: engine-0's start 3 of {told}" in screen.text(shown)


def test_an_ended_run_shows_no_worker_at_work_and_how_long_it_ran():
    clock = Clock()
    run = run_status(clock)
    run.status("rollout", "evaluating version 12")
    clock.now += 90.0
    run.end("done", "Trained 12 steps.")
    clock.now += HOUR
    text = screen.text(run.view(), "It has ended (done).")
    assert "evaluating" not in text
    assert "ago" not in text
    assert "ran for 1 min 30 s" in text


def test_a_resumed_runs_age_and_step_count_from_its_first_start(tmp_path):
    clock = Clock()
    first = run_status(clock)
    first.metrics(7, {"policy_version": 7, "tokens/generated": 50, "step/seconds": 2.0})
    clock.now += 2 * HOUR
    first.end("stopped", "Stopped at step 7.")
    record = first.view() | {"first_began": 1_000_000.0}
    clock.now += HOUR  # in which nothing ran
    second = run_status(clock, earlier=record, step=7)
    clock.now += 600.0
    view = second.view()
    assert (view["step"], view["policy_version"], view["first_began"]) == (7, 7, 1_000_000.0)
    assert (view["seconds"], view["run_seconds"]) == (600.0, 2 * HOUR + 600.0)
    text = screen.text(view)
    assert "began" in text
    assert "10 min ago" in text
    assert "2 h 10 min in all" in text
    third = run_status(clock, earlier=view, step=7).view()
    assert (third["first_began"], third["run_seconds"]) == (1_000_000.0, 2 * HOUR + 600.0)


def test_a_status_of_an_earlier_version_or_a_garbled_one_counts_from_now():
    for earlier in ({}, {"began": "x", "seconds": None}, {"first_began": [], "run_seconds": "long"}):
        view = run_status(earlier=earlier).view()
        assert view["first_began"] == view["began"]
        assert view["run_seconds"] == 0.0


def test_a_dead_run_is_not_said_to_have_begun_some_time_ago():
    view = run_status().view()
    assert "ago" in screen.text(view, "It lives.")
    assert "ago" not in screen.text(view, "DEAD: its process is gone")


def test_the_screen_shows_the_speed_of_the_last_steps():
    run = run_status()
    for step, tokens in enumerate((900, 0), start=1):
        run.metrics(step, {"tokens_per_second": tokens / 1.5, "tokens/generated": tokens, "step/seconds": 1.5})
    assert "tokens/s 300" in screen.text(run.view())
