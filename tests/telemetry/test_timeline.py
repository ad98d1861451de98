"""timeline.json: loads whatever happens, and spans of one lane never overlap."""

import itertools
import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax.telemetry.report import timeline


class Clock:
    """Seconds set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def no_warning(key: str, sentence: str) -> None:
    pytest.fail(f"unexpected warning {key}: {sentence}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("timelines")


spans = st.lists(
    st.tuples(st.sampled_from(["engine-0", "tools", "trainer"]), st.floats(90, 130), st.floats(0, 9)), max_size=25
)


def write(folder, items, clock, close=True):
    sink = timeline.TimelineFile(folder, clock, no_warning)
    for track, start, length in items:
        sink.span(track, "work", start, start + length, {"request": "a"})
    sink.close() if close else sink.flush()


def check_lanes(events):
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for taken in lanes.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(taken)):
            assert end <= start


@given(first=spans, second=spans, cut=st.integers(0, 10**6), killed=st.booleans(), in_order=st.booleans())
@settings(max_examples=50)
def test_a_resumed_timeline_is_json_whose_lanes_never_overlap(folder, first, second, cut, killed, in_order):
    path = folder / timeline.TIMELINE_FILE
    path.unlink(missing_ok=True)
    if in_order:
        first, second = (sorted(items, key=lambda item: item[1] + item[2]) for items in (first, second))
    clock = Clock()
    clock.now = 100.0
    write(folder, first, clock, close=not killed)
    if killed:
        data = path.read_bytes()
        path.write_bytes(data[: cut % (len(data) + 1)])
    before = list(timeline.read(path))
    clock.now = 95.0  # another boot of the machine: the clock went back
    write(folder, second, clock)
    events = json.loads(path.read_text())
    check_lanes(events)
    after = list(timeline.read(path))
    assert after[: len(before)] == before
    assert len(after) == len(before) + len(second)
    if before and second:
        assert min(span.start for span in after[len(before) :]) >= max(span.end for span in before) - 1e-9


def test_a_killed_timeline_needs_only_its_bracket(tmp_path):
    write(tmp_path, [("engine-0", 0.0, 1.0), ("engine-0", 0.5, 1.0)], Clock(), close=False)
    text = (tmp_path / "timeline.json").read_text()
    assert text.startswith("[\n")
    assert text.endswith(",\n")
    names = [event["name"] for event in json.loads(text.rstrip(",\n") + "]")]
    assert names.count("work") == 2


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=40))
@settings(max_examples=60)
def test_lanes_are_as_many_as_were_ever_open_at_once(pairs):
    items = sorted(((start, start + length) for start, length in pairs), key=lambda item: item[1])
    lanes = timeline.Lanes()
    used = {lanes.place(start, end) for start, end in items}
    most = max(sum(start <= moment < end for start, end in items) for moment in range(81))
    assert len(used) == most


def test_a_track_keeps_its_row_over_a_restart_and_rows_are_ordered(tmp_path):
    write(tmp_path, [("tools", 0.0, 1.0), ("engine-0", 0.0, 1.0)], Clock())
    write(tmp_path, [("trainer", 0.0, 1.0), ("tools", 0.0, 1.0)], Clock())
    events = json.loads((tmp_path / "timeline.json").read_text())
    rows = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert len(rows) == len(set(rows.values())) == 3
    assert sorted(rows, key=lambda track: order[rows[track]]) == ["trainer", "engine-0", "tools"]
    assert [span.track for span in timeline.read(tmp_path / "timeline.json")].count("tools") == 2


def test_times_that_are_no_numbers_are_dropped_and_backward_ones_have_no_length(tmp_path):
    sink = timeline.TimelineFile(tmp_path, Clock(), no_warning)
    sink.span("trainer", "train", float("nan"), 1.0)
    sink.span("trainer", "train", 2.0, 1.0)
    sink.close()
    (span,) = timeline.read(tmp_path / "timeline.json")
    assert (span.start, span.end) == (2.0, 2.0)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "{}\n",
        "[\n{}\n",
        '[\n{"ph": "M", "args": 3},\n',
        '{"ph": "i", "ts": 1, "pid": 1, "tid": 0}\n',
        "\x00\x01 no timeline",
    ],
)
def test_a_file_that_is_no_timeline_is_started_anew(tmp_path, content):
    (tmp_path / "timeline.json").write_text(content)
    told = []
    sink = timeline.TimelineFile(tmp_path, Clock(), lambda key, sentence: told.append(sentence))
    sink.span("trainer", "work", 0.0, 1.0)
    sink.close()
    assert all("was damaged" in sentence for sentence in told)
    assert len(json.loads((tmp_path / "timeline.json").read_text())) == 5
