"""The recorder as a run uses it: every sink at once, in a pipe, on a terminal, on a full disk, closed twice."""

import asyncio
import errno
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import sample_records

from libra_jax import config as config_lib
from libra_jax.protocols import ConfigError
from libra_jax.telemetry import console, files, memory, metrics, recorder, screen, sinks, trace
from libra_jax.telemetry.report import timeline

STEP = {
    "reward/mean": 0.625,
    "tokens_per_second": 11812.0,
    "staleness/max": 1.0,
    "loss": 0.0123,
    "mismatch/kl": 1e-5,
    "rollout/wait_seconds": 3.1,
    "train/seconds": 1.8,
    "sync/seconds": 0.2,
}


class Clock:
    """Seconds set by hand."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def run_config(**telemetry) -> config_lib.RunConfig:
    return config_lib.RunConfig(name="demo", steps=12, telemetry=config_lib.TelemetryConfig(**telemetry))


def record_run(one, clock, steps=range(1, 4)) -> None:
    for step in steps:
        one.span("engine-0", "generate", clock.now, clock.now + 2, {"tokens": 7})
        one.trajectory({"trajectory_id": f"p/{step}", "prompt_id": "p", "prompt_tokens": 1, "turns": [], "step": step})
        clock.now += 5
        one.metrics(step, STEP)


def test_every_file_is_written_and_a_second_close_does_nothing(tmp_path):
    clock = Clock()
    one = recorder.create(run_config(console=False), tmp_path / "new" / "run", clock)
    record_run(one, clock)
    one.close()
    workdir = tmp_path / "new" / "run"
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    one.close()
    record_run(one, clock)
    one.flush()
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before
    assert metrics.read(workdir / "metrics.jsonl") == dict.fromkeys((1, 2, 3), STEP)
    assert [line["step"] for line in trace.read(workdir / "trace.jsonl")] == [1, 2, 3]
    assert [span.end - span.start for span in timeline.read(workdir / "timeline.json")] == [2.0, 2.0, 2.0]


def test_each_step_is_in_the_files_before_the_next_begins(tmp_path):
    clock = Clock()
    one = recorder.create(run_config(console=False), tmp_path, clock)
    record_run(one, clock, range(1, 3))
    assert list(metrics.read(tmp_path / "metrics.jsonl")) == [1, 2]
    assert len(trace.read(tmp_path / "trace.jsonl")) == 2
    assert len(list(timeline.read(tmp_path / "timeline.json"))) == 2
    one.close()


def test_records_cut_back_under_an_open_recorder_are_written_once(tmp_path):
    clock = Clock()
    one = recorder.create(run_config(console=False), tmp_path, clock)
    record_run(one, clock, range(1, 6))
    recorder.cut_back(tmp_path, 2)
    record_run(one, clock, range(3, 5))
    one.close()
    assert list(metrics.read(tmp_path / "metrics.jsonl")) == [1, 2, 3, 4]
    assert [line["step"] for line in trace.read(tmp_path / "trace.jsonl")] == [1, 2, 3, 4]


def test_a_pipe_is_told_what_a_long_start_is_spent_on(monkeypatch):
    monkeypatch.setattr(console, "STATUS_SECONDS", 0.05)
    stream = io.StringIO()

    async def main():
        one = console.PlainConsole("demo", 2, stream, asyncio.get_running_loop().time, lambda *_: None)
        one.status("trainer", "starting its process")
        one.status("rollout-0", "loading the inference engine and the model")
        one.status("trainer", "compiling")
        await asyncio.sleep(0.2)
        one.metrics(1, {})
        one.status("trainer", "idle")
        await asyncio.sleep(0.2)
        one.close()

    asyncio.run(main())
    lines = stream.getvalue().splitlines()
    assert lines[1:] == [
        "trainer: compiling; rollout-0: loading the inference engine and the model",
        "step 1/2",
    ], "once a step has ended, its lines tell"


def test_a_pipe_gets_one_plain_line_a_step_and_a_status_now_and_then(tmp_path, capsys):
    clock = Clock()
    one = recorder.create(run_config(tensorboard=False), tmp_path, clock)
    for warm in range(100):
        clock.now += 0.1
        one.status("trainer", f"warm start {warm}/100")
    one.note("The run begins.")
    record_run(one, clock)
    one.note("It is done.")
    one.close()
    lines = capsys.readouterr().out.splitlines()
    statuses = [line for line in lines if line.startswith("trainer: warm start")]
    assert 2 <= len(statuses) <= 3
    steps = [line for line in lines if line.startswith("step")]
    assert steps[0] == (
        "step  1/12  reward 0.625  mean 11,812 tokens/s  staleness 1  loss 0.0123  wait 3.1 s, train 1.8 s, sync 0.2 s"
    )
    assert steps[2].startswith("step  3/12")
    assert steps[2].endswith("45 s left")
    assert lines[0] == "libra-jax · demo · 12 training steps"
    assert "The run begins." in lines
    assert lines[-1] == "It is done."
    assert not any("\x1b" in line for line in lines)


def test_a_long_status_line_is_cut_between_words():
    async def main() -> None:
        one = console.PlainConsole("demo", 2, stream, lambda: asyncio.get_running_loop().time(), lambda *_: None)
        one.status("rollout-0", "starting its process")
        for index in range(1, 8):
            one.status(f"rollout-{index}", "loading the inference engine and the model")
        await asyncio.sleep(0.1)
        one.close()

    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "STATUS_SECONDS", 0.05)
        asyncio.run(main())
    line = stream.getvalue().splitlines()[-1]
    assert len(line) <= console.WIDTH
    assert line.endswith("rollout-2: loading the ...")


@pytest.mark.parametrize("make", [console.PlainConsole, screen.LiveConsole])
def test_escapes_in_notes_and_statuses_reach_no_console(make):
    stream = io.StringIO()
    one = make("demo", 4, stream, Clock(), lambda key, sentence: None)
    one.note("It said \x1b[2J\x9b31m\x07\nstep 4/4  reward 1.000")
    one.status("engine\x1b[2J", "answering \u202e")
    one.close()
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", stream.getvalue())  # the console's own
    assert "\x1b[2J" not in stream.getvalue()
    assert not set(shown) & set("\x1b\x9b\x07\u202e")
    assert r"It said \x1b[2J\x9b31m\x07\nstep" in shown


def test_a_console_can_be_left_out(tmp_path, capsys):
    clock = Clock()
    one = recorder.create(run_config(console=False), tmp_path, clock)
    one.note("unseen")
    record_run(one, clock)
    one.close()
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_warned_about_once_a_file_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    clock = Clock()
    one = recorder.create(run_config(), tmp_path, clock)
    monkeypatch.setattr(files.os, "write", full)
    record_run(one, clock, range(1, 8))
    monkeypatch.undo()
    record_run(one, clock, range(8, 10))
    one.close()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(warnings) == len(set(warnings)) == 4  # metrics, trace, timeline, TensorBoard
    assert all("No space left on device" in line for line in warnings)
    assert list(metrics.read(tmp_path / "metrics.jsonl")) == list(range(1, 10))
    json.loads((tmp_path / "timeline.json").read_text())


def test_a_step_line_leaves_out_what_makes_it_too_long():
    pace = console.RunPace(100_000, 0.0)
    for step, now in ((99_998, 0.0), (99_999, 7200.0)):
        pace.step_ended(step, now)
    moves = {"routing/moves": 12345.0, "routing/one_shot_accuracy": 0.906, "evaluation/accuracy": 0.5}
    full = console.step_line(99_999, pace, STEP | moves | {"rollout/wait_seconds": 4000.0, "loss": -1.234e-7})
    assert len(full) <= console.WIDTH
    for part in ("step  99999/100000", "reward 0.625", "held-out 0.500", "11,812 tokens/s", "2 h 0 min left"):
        assert part in full
    assert "mismatch" not in full


@pytest.mark.parametrize("make", [console.PlainConsole, screen.LiveConsole])
def test_a_step_that_trains_on_what_was_there_already_shows_no_zero_speed(make):
    stream = io.StringIO()
    one = make("demo", 4, stream, Clock(), lambda key, sentence: None)
    for step, tokens in enumerate((900, 0), start=1):
        one.metrics(step, {"tokens_per_second": tokens / 1.5, "tokens/generated": tokens, "step/seconds": 1.5})
    one.close()
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", stream.getvalue())
    assert re.search(r"300 tokens/s|tokens/s 300", shown)
    assert not re.search(r"\b0 tokens/s|tokens/s 0\b", shown)


def test_the_speed_is_that_of_the_last_steps():
    speed = console.TokenRate()
    for step in range(1, 31):
        speed.step_ended({"tokens/generated": 10.0 * (step > 15), "step/seconds": 2.0})
    assert speed.tokens_per_second == pytest.approx(5.0)
    speed.step_ended({"tokens_per_second": 7.0})  # a step of which no more is known
    assert speed.tokens_per_second == 7.0
    assert console.TokenRate().tokens_per_second is None


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        (
            {"train/tokens_per_second": 12e3, "train/tokens_per_second_per_device": 1500.0},
            "trained 12,000/s (1,500 a device)",
        ),
        ({"train/tokens_per_second": 9.0, "train/tokens_per_second_per_device": 9.0}, "trained 9/s"),
        ({"train/tokens_per_second": 9.0, "train/mfu": 0.428}, "trained 9/s  MFU 43%"),
        ({"tokens_per_second": 0.0, "loss": 0.0123}, "loss 0.0123"),
        ({"routing/moves": 0.0, "reward/mean": -0.0001}, "reward 0.000"),
        ({"routing/moves": 23.0}, "23 moves"),
        ({"routing/moves": 23.0, "routing/one_shot_accuracy": 0.906}, "23 moves, 91% routed right"),
    ],
)
def test_a_step_line_tells_the_numbers_that_there_are(numbers, line):
    assert console.step_line(3, console.RunPace(12, 0.0), numbers) == f"step  3/12  {line}"


@pytest.mark.parametrize("make", [console.PlainConsole, screen.LiveConsole])
def test_a_lost_viewer_is_warned_about_once_and_leaves_the_standard_streams_alone(make):
    class Gone:
        """A terminal that hung up."""

        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            raise OSError("no descriptor")

    streams = sys.stdout, sys.stderr
    warnings: list[str] = []
    watched = make("demo", 12, Gone(), Clock(), lambda key, sentence: warnings.append(key))
    for step in range(1, 4):
        watched.metrics(step, STEP)
        watched.note("a note")
    watched.close()
    watched.close()
    assert warnings == [console.LOST]
    assert (sys.stdout, sys.stderr) == streams


LIVE_RUN = """
import sys
from pathlib import Path
from libra_jax import config as config_lib
from libra_jax.telemetry import recorder
now = [0.0]
one = recorder.create(config_lib.RunConfig(name="[demo]", steps=4), Path(sys.argv[1]), lambda: now[0])
for step in range(1, 4):
    now[0] += 3.0
    one.status("engine-0", f"serving version {step}")
    one.metrics(step, {"reward/mean": step / 4, "tokens_per_second": 1234.5, "staleness/max": 0.0})
one.note("A note to read.")
print("printed by somebody else")
if sys.argv[2] == "raise":
    raise RuntimeError("the run broke")
one.note("The run is done.")
one.close()
"""


def on_a_terminal(arguments: list[str]) -> tuple[int, str]:
    """Runs Python on a pseudo-terminal of 100 x 30 and returns its exit status and what it showed."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm"},
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            data = os.read(controller, 65536)
        except OSError:  # Linux says EIO once the terminal's other end is closed
            break
        if not data:
            break
        shown += data
    os.close(controller)
    return process.wait(), shown.decode(errors="replace")


@pytest.mark.parametrize("ending", ["close", "raise"])
@pytest.mark.multiprocess
def test_a_terminal_shows_the_picture_and_stays_usable_when_the_run_ends_or_breaks(tmp_path, ending):
    status, shown = on_a_terminal(["-c", LIVE_RUN, str(tmp_path), ending])
    for text in ("libra-jax · [demo]", "step 3/4", "0.750", "1,23", "serving version 3", "A note to read.", "▁"):
        assert text in shown
    assert "printed by somebody else" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor is shown
    assert status == (1 if ending == "raise" else 0)
    assert ("RuntimeError: the run broke" in shown) == (ending == "raise")
    assert ("The run is done." in shown) == (ending == "close")


def test_missing_wandb_ends_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"telemetry\.wandb_project: .*pip install wandb"):
        recorder.create(run_config(console=False, wandb_project="mine"), tmp_path, Clock())


def test_wandb_gets_the_scalars_goes_on_with_its_run_and_may_fail(tmp_path, monkeypatch, caplog):
    logged: list[tuple[dict, int]] = []
    asked: list[dict] = []

    def log(scalars, step):
        if step == 3:
            raise ConnectionError("the network is gone")
        logged.append((scalars, step))

    def init(**arguments):
        asked.append(arguments)
        return types.SimpleNamespace(id="abc", log=log, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for _ in range(2):
        clock = Clock()
        one = recorder.create(run_config(console=False, wandb_project="mine"), tmp_path, clock)
        with caplog.at_level(logging.WARNING):
            record_run(one, clock, range(1, 5))
        one.close()
    assert [step for _, step in logged] == [1, 2, 4, 1, 2, 4]
    assert logged[0][0] == STEP
    assert [arguments["id"] for arguments in asked] == [None, "abc"]
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 2  # once a session
    assert asked[0]["config"]["steps"] == 12


def tensorboard_events(folder):
    """The events of a TensorBoard folder, file by file, their checksums verified with tensorboardX's own functions."""
    events_lib, records = sinks._import_tensorboardx()
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            assert int.from_bytes(data[at + 8 : at + 12], "little") == records.masked_crc32c(data[at : at + 8])
            body = data[at + 12 : at + 12 + length]
            assert int.from_bytes(data[at + 12 + length : at + 16 + length], "little") == records.masked_crc32c(body)
            yield events_lib.Event.FromString(body)
            at += 16 + length


def test_tensorboard_gets_the_same_scalars_and_forgets_redone_steps(tmp_path):
    clock = Clock()
    for steps in (range(1, 6), range(3, 5)):
        one = recorder.create(run_config(console=False), tmp_path, clock)
        recorder.cut_back(tmp_path, steps.start - 1)
        record_run(one, clock, steps)
        one.close()
    events = list(tensorboard_events(tmp_path / "tensorboard" / tmp_path.name))
    assert [event.file_version for event in events if event.file_version] == ["brain.Event:2"] * 2
    scalars: dict[int, dict[str, float]] = {}
    for event in events:
        if event.HasField("session_log"):  # what TensorBoard does with a session's start
            scalars = {step: values for step, values in scalars.items() if step < event.step}
        if event.HasField("summary"):
            assert event.step not in scalars
            scalars[event.step] = {value.tag: value.simple_value for value in event.summary.value}
    assert list(scalars) == [1, 2, 3, 4]
    assert scalars[4] == pytest.approx(STEP)


def test_tensorboard_gets_the_best_and_the_worst_rollout_as_text(tmp_path):
    one = recorder.create(run_config(console=False), tmp_path, Clock())
    for rank in range(1, 5):
        one.sample(sample_records.record(1, rank))
    one.sample(sample_records.record(1, evaluation=True))
    one.metrics(1, {"reward/mean": 0.5})
    one.close()
    found = {
        value.tag: value
        for event in tensorboard_events(tmp_path / "tensorboard" / tmp_path.name)
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    }
    assert sorted(found) == [
        "evaluation_samples/best/text_summary",
        "samples/best/text_summary",
        "samples/worst/text_summary",
    ]
    text = found["samples/worst/text_summary"].tensor.string_val[0].decode()
    assert all(line.startswith("    ") for line in text.splitlines())
    assert r"I call \x1b[2J" in text


def test_tensorboard_calls_the_run_as_its_workdir_is_called(tmp_path):
    for name in ("first", "second"):
        one = recorder.create(run_config(console=False), tmp_path / name, Clock())
        record_run(one, Clock(), range(1, 2))
        one.close()
        assert [folder.name for folder in (tmp_path / name / "tensorboard").iterdir()] == [name]
    (tmp_path / "second").rename(tmp_path / "moved")
    one = recorder.create(run_config(console=False), tmp_path / "moved", Clock())
    record_run(one, Clock(), range(2, 3))
    one.close()
    folder = tmp_path / "moved" / "tensorboard" / "second"  # the curve goes on where it began
    assert len(list(folder.iterdir())) == 2
    assert list(folder.parent.iterdir()) == [folder]


def test_a_run_begun_when_events_had_no_folder_goes_on_there(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.0000000000.libra").write_bytes(b"")
    one = recorder.create(run_config(console=False), tmp_path, Clock())
    record_run(one, Clock(), range(1, 2))
    one.close()
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert names == [f"events.out.tfevents.{number:010d}.libra" for number in (0, 1)]


def test_a_workdir_that_cannot_be_made_ends_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        recorder.create(run_config(), tmp_path / "file" / "run", Clock())


@pytest.mark.multiprocess
def test_telemetry_loads_no_accelerator_library(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom libra_jax import config as config_lib\n"
        "from libra_jax.telemetry import recorder; from libra_jax.telemetry.report import report\n"
        "one = recorder.create(config_lib.RunConfig(), Path(sys.argv[1]), time.monotonic)\n"
        "one.metrics(1, {'reward/mean': 0.5})\none.close()\nreport.write_report(Path(sys.argv[1]))\n"
        "print(sorted({'jax', 'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_recorder_in_memory_keeps_what_it_is_told():
    one = memory.MemoryRecorder()
    record_run(one, Clock(), range(1, 3))
    one.transition({"worker": "engine-1", "end": 3.0})
    one.pools(3.0, {"core training": 4})
    one.status("engine-0", "idle")
    one.note("A note.")
    assert one.transitions == [{"worker": "engine-1", "end": 3.0}]
    assert one.pool_sizes == [timeline.PoolSizes(3.0, {"core training": 4})]
    assert [step for step, _ in one.steps] == [1, 2]
    assert one.spans[0] == ("engine-0", "generate", 50.0, 52.0, {"tokens": 7})
    assert len(one.trajectories) == 2
    assert one.statuses == [("engine-0", "idle")]
    assert one.notes == ["A note."]


def test_the_remaining_time_follows_the_recent_pace():
    pace = console.RunPace(100, 0.0)
    assert pace.remaining_seconds is None
    for step in range(1, 31):
        pace.step_ended(step, step * (10.0 if step < 20 else 2.0))
    assert pace.remaining_seconds == pytest.approx(140.0)


def test_config_defaults_write_tensorboard_and_no_wandb(tmp_path):
    one = recorder.create(replace(run_config(), telemetry=config_lib.TelemetryConfig(console=False)), tmp_path, Clock())
    one.metrics(1, {"loss": 1.0})
    one.close()
    assert list((tmp_path / "tensorboard").iterdir())
    assert not (tmp_path / "wandb_run_id").exists()
