"""Pools and transitions: their files over kills and restarts, the picture's data, and what the report tells of them."""

import json
import math
import re
import xml.etree.ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.simulator import results
from libra_jax.telemetry import files, recorder
from libra_jax.telemetry.report import pictures, pool_report, recorded_run, report, timeline

CORE, BORROWED, MOVING, LENT, ROLLOUT = protocols.POOLS
START = {CORE: 4, BORROWED: 0, LENT: 2, ROLLOUT: 2}
HELPED = {CORE: 4, BORROWED: 2, LENT: 0, ROLLOUT: 2}


class Clock:
    """Seconds set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def run_recorder(workdir, clock):
    quiet = config_lib.TelemetryConfig(console=False, tensorboard=False)
    return recorder.create(config_lib.RunConfig(name="demo", telemetry=quiet), workdir, clock)


def transition(**changes):
    """A line as the coordinator writes it."""
    return {
        "worker": "engine-2",
        "from": "rollout",
        "to": "training",
        "reason": "training takes twice as long",
        "start": 101.0,
        "end": 103.0,
        "step": 3,
        "outcome": "done",
        "why": "",
        "phases": {"drain": 0.5, "fetch": 1.0},
        "bytes": 2_000_000,
        "stall": {"training": 0.25, "rollout": 0.5},
        **changes,
    }


def parsed(**changes):
    return recorded_run.Transition.from_record(transition(**changes))


def cells(contents, changes):
    """The table on transitions that a section has first, and its notes."""
    table, *notes = contents(recorded_run.RecordedRun(transitions=changes))
    return table.rows, notes


def lines(workdir):
    return [json.loads(line) for line in (workdir / "transitions.jsonl").read_text().splitlines()]


def pools(workdir):
    found = timeline.read_all(workdir / "timeline.json")
    return [change for change in found if isinstance(change, timeline.PoolSizes)]


def test_a_transition_is_one_line_on_the_axis_of_the_timeline_with_every_key_it_had(tmp_path):
    one = run_recorder(tmp_path, Clock())
    one.transition(transition(colour="blue", phases={"drain": math.nan}))
    one.close()
    one.transition(transition())
    (line,) = lines(tmp_path)
    line = files.plain(line)
    assert line == transition(colour="blue", phases={"drain": None}, start=1.0, end=3.0)


def test_a_resumed_run_goes_on_after_the_transitions_and_pools_it_had(tmp_path):
    clock = Clock()
    one = run_recorder(tmp_path, clock)
    one.pools(100.0, START)
    one.transition(transition())
    one.pools(103.0, HELPED)
    one.flush()  # killed: it is never closed
    with (tmp_path / "transitions.jsonl").open("a") as file:
        file.write('{"worker": "engine-2", "st')
    clock.now = 20.0  # another boot of the machine
    one = run_recorder(tmp_path, clock)
    one.pools(20.0, START)
    one.transition(transition(start=21.5, end=24.0))
    one.transition(transition(start=15.0, end=22.0))  # said to have begun before the session
    one.close()
    assert [(line["start"], line["end"]) for line in lines(tmp_path)] == [(1.0, 3.0), (4.5, 7.0), (3.0, 5.0)]
    assert pools(tmp_path) == [
        timeline.PoolSizes(0.0, START),
        timeline.PoolSizes(3.0, HELPED),
        timeline.PoolSizes(3.0, START),
    ]


def test_pools_are_one_counter_whose_series_are_in_the_order_of_the_stack(tmp_path):
    one = run_recorder(tmp_path, Clock())
    one.span("trainer", "train step", 100.0, 101.0)
    one.pools(102.0, START)
    one.pools(104.0, HELPED)
    one.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    counters = [event for event in events if event["ph"] == "C"]
    assert [(event["name"], event["ts"], list(event["args"].items())) for event in counters] == [
        ("pools", 2_000_000, list(START.items())),
        ("pools", 4_000_000, list(HELPED.items())),
    ]
    rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in counters} == {rows["pools"]}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert order[rows["pools"]] < order[rows["trainer"]]
    assert events[-1]["ts"] == 4_000_000  # the session does not end before the last change
    assert [span.name for span in timeline.read(tmp_path / "timeline.json")] == ["train step"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pools")


told = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 8)), max_size=8).map(sorted)


@given(first=told, second=told, cut=st.integers(0, 10**6))
@settings(max_examples=50)
def test_pools_killed_at_any_byte_and_told_again_go_on_later(folder, first, second, cut):
    (folder / "timeline.json").unlink(missing_ok=True)
    clock = Clock()
    sink = timeline.TimelineFile(folder, clock, pytest.fail)
    for seconds, devices in first:
        sink.pools(100.0 + seconds, {CORE: devices})
    sink.flush()
    data = (folder / "timeline.json").read_bytes()
    (folder / "timeline.json").write_bytes(data[: cut % (len(data) + 1)])
    before = pools(folder)
    assert before == [timeline.PoolSizes(seconds, {CORE: devices}) for seconds, devices in first[: len(before)]]
    sink = timeline.TimelineFile(folder, clock, pytest.fail)
    for seconds, devices in second:
        sink.pools(100.0 + seconds, {CORE: devices})
    sink.close()
    assert len(json.loads((folder / "timeline.json").read_text())) >= len(second)
    after = pools(folder)
    begin = before[-1].start if before else 0.0
    assert after == before + [timeline.PoolSizes(begin + seconds, {CORE: devices}) for seconds, devices in second]


def test_times_and_sizes_that_are_no_numbers_are_dropped(tmp_path):
    one = run_recorder(tmp_path, Clock())
    one.pools(math.nan, START)
    one.pools(math.inf, START)
    one.pools(101.0, {CORE: 4, LENT: math.nan})
    one.transition(transition(end=math.nan))
    one.close()
    assert pools(tmp_path) == [timeline.PoolSizes(1.0, {CORE: 4})]
    (line,) = lines(tmp_path)
    assert (line["start"], line["end"]) == (1.0, None)
    assert pool_report.marks([recorded_run.Transition.from_record(line)]) == {}
    assert pool_report.stacked([timeline.PoolSizes(math.nan, START)], 9.0) == ([], {})


def test_a_cut_back_to_a_checkpoint_takes_later_transitions_away(tmp_path):
    one = run_recorder(tmp_path, Clock())
    for step in (1, 2, 3):
        one.transition(transition(step=step))
    one.flush()
    recorder.cut_back(tmp_path, 2)
    one.transition(transition(step=3, worker="again"))
    one.close()
    assert [(line["step"], line["worker"]) for line in lines(tmp_path)] == [
        (1, "engine-2"),
        (2, "engine-2"),
        (3, "again"),
    ]


changes = st.lists(
    st.builds(
        timeline.PoolSizes,
        st.floats(0, 100),
        st.dictionaries(st.sampled_from([*protocols.POOLS, "spare"]), st.integers(0, 8)),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda change: change.start,
)


@given(sizes=changes, moment=st.floats(0, 120), end=st.floats(0, 120))
def test_the_picture_shows_what_was_last_told_at_every_moment(sizes, moment, end):
    times, columns = pool_report.stacked(sizes, end)
    assert times == sorted(times)
    assert times[-1] == max(end, *(change.start for change in sizes))
    told_by_then = [change for change in sizes if change.start <= moment]
    last = max(told_by_then, key=lambda change: change.start).devices if told_by_then else {}
    index = sum(time <= moment for time in times) - 1
    shown = {name: column[index] for name, column in columns.items() if index >= 0 and column[index]}
    assert shown == {name: devices for name, devices in last.items() if devices}
    assert [name for name in columns if name != "spare"] == [name for name in protocols.POOLS if name in columns]


def test_very_many_changes_are_thinned_and_the_last_one_stays():
    sizes = [timeline.PoolSizes(float(second), {CORE: second % 7 + 1}) for second in range(5000)]
    times, columns = pool_report.stacked(sizes, 6000.0)
    assert pictures.MOST_POINTS / 2 < len(times) <= pictures.MOST_POINTS + 2
    assert (times[-2:], columns[CORE][-1]) == ([4999.0, 6000.0], 4999 % 7 + 1)
    at_once = [timeline.PoolSizes(1.0, {CORE: number}) for number in range(5000)]
    assert pool_report.stacked(at_once, 2.0) == ([1.0, 2.0], {CORE: [4999, 4999]})


def test_marks_tell_each_way_and_what_came_to_nothing():
    seen = [
        parsed(),
        parsed(**{"from": "training", "to": "rollout"}, start=110.0, end=112.0),
        parsed(**{"from": "data 2 x fsdp 1 x tensor 1", "to": "data 4 x fsdp 1 x tensor 1"}, worker="trainer"),
        parsed(outcome="failed", start=None, end=120.0),
        parsed(outcome="cancelled", end=None),
    ]
    assert pool_report.marks(seen) == {
        "to training": [(101.0, 103.0)],
        "to rollout": [(110.0, 112.0)],
        "another mesh": [(101.0, 103.0)],
        "failed": [(120.0, 120.0)],
    }


def test_the_report_shows_pools_and_what_transitions_cost(tmp_path):
    one = run_recorder(tmp_path, Clock())
    one.pools(100.0, START)
    for number, seconds in enumerate((1.0, 2.0, 6.0)):
        phases = {"drain": seconds / 10, "fetch": 0.5}
        one.transition(transition(step=number, start=101.0, end=101.0 + seconds, phases=phases))
    one.transition(transition(step=7, outcome="failed", why="engine-2 <died>", phases={"drain": 9.0}, bytes=0))
    one.transition(transition(**{"from": "training", "to": "rollout"}, step=8, reason="<b>&requests</b> queue"))
    one.pools(110.0, HELPED)
    one.close()
    source = report.write_report(tmp_path).read_text()
    for name in (CORE, BORROWED, LENT, ROLLOUT, "to training", "to rollout", "failed"):
        assert f">{name}</text>" in source
    for title in ("<h2>Pools", "<h2>Transitions<", "<h2>Transitions that came to nothing", "<summary>Every transition"):
        assert title in source
    assert "<b>&requests" not in source
    assert "<died>" not in source
    changes = recorded_run.load(tmp_path).transitions
    assert pool_report.sentence(changes) == (
        "**4 transitions** came about (3 rollout to training, 1 training to rollout) and 1 came to nothing; together "
        "they stalled training for 1.25 s and rollout for 2.50 s."
    )
    assert [" ".join(row) for row in cells(pool_report.costs, changes)[0]] == [
        "rollout to training 3 1 0 2.00 s drain 0.20 s, fetch 0.50 s 2 MB 1.00 s 2.00 s "
        "training takes twice as long (4)",
        "training to rollout 1 0 0 2.00 s drain 0.50 s, fetch 1.00 s 2 MB 0.25 s 0.50 s <b>&requests</b> queue (1)",
    ]
    [lost], _ = cells(pool_report.failures, changes)
    assert lost[:5] == ("7", "engine-2", "rollout", "training", "failed: engine-2 <died>")


@pytest.mark.parametrize(
    ("sizes", "seconds", "drawn"),
    [
        ([], 0.0, None),
        ([START, START], 9.0, None),  # flat stripes
        ([START], 0.0, None),  # at the last moment alone
        ([START, START | {LENT: 1}], 9.0, [CORE, LENT, ROLLOUT]),  # without a pool that never had a device
    ],
)
def test_pools_are_drawn_if_they_ever_changed(sizes, seconds, drawn):
    pools = [timeline.PoolSizes(2.0 * index, devices) for index, devices in enumerate(sizes)]
    pictures_drawn = [*pool_report.pools(recorded_run.RecordedRun(pools=pools, seconds=seconds))]
    assert len(pictures_drawn) == (drawn is not None)
    for picture in pictures_drawn:
        assert picture.figure(pictures.NARROW).axes[0].get_legend_handles_labels()[1] == drawn


def test_a_run_without_transitions_has_no_file_and_no_table(tmp_path):
    one = run_recorder(tmp_path / "run", Clock())
    one.metrics(1, {"loss": 1.0})
    one.close()
    assert "ransition" not in report.write_report(tmp_path / "run").read_text()
    assert not (tmp_path / "run" / "transitions.jsonl").exists()


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(), st.text(max_size=4)),
    lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=2) | st.lists(inner, max_size=2),
    max_leaves=3,
)


@given(st.lists(st.dictionaries(st.sampled_from(list(transition())), values), min_size=1, max_size=4))
@settings(max_examples=60)
def test_any_object_is_read_as_a_transition_and_listed(records):
    kept = [json.loads(files.json_line(record)) for record in records]
    changes = [recorded_run.Transition.from_record(record) for record in kept]
    assert len(cells(pool_report.transitions, changes)[0]) == len(records)
    assert pool_report.sentence(changes)


def test_of_very_many_transitions_the_last_are_listed_and_the_others_counted():
    changes = [parsed(step=step) for step in range(pool_report.MOST_ROWS + 20)]
    rows, [note] = cells(pool_report.transitions, changes)
    assert len(rows) == pool_report.MOST_ROWS
    assert rows[0][0] == "20"
    assert note == f"The last {pool_report.MOST_ROWS} of {len(changes)}."
    assert str(len(changes)) in cells(pool_report.costs, changes)[0][0]


def test_reasons_beyond_the_commonest_are_counted():
    reasons = ["d", "a", "b", "a", "c", "e", "b", "a"]
    [row], _ = cells(pool_report.costs, [parsed(reason=reason) for reason in reasons])
    assert row[-1] == "a (3); b (2); d (1); 2 more"


def test_a_simulated_run_is_drawn_from_what_its_recorder_keeps():
    one = results.StepRecorder()
    one.pools(0.0, START)
    one.transition(transition(start=20_000.0, end=21_000.0))
    one.pools(21_000.0, HELPED)
    seen = [recorded_run.Transition.from_record(record) for record in one.transitions]
    [picture] = pool_report.draw(one.pool_sizes, seen, end=40_000.0)
    text = picture.standalone()
    words = {element.text for element in xml.etree.ElementTree.fromstring(text).iter() if element.tag.endswith("text")}
    assert {CORE, BORROWED, LENT, ROLLOUT, "to training", "hours"} <= words
    assert "var(" not in text


def test_the_colours_of_the_pools_do_not_depend_on_which_there_are():
    def fills(*names):
        """Colour and opacity of each area, by the pool that its size tells."""
        sizes = {name: 2**index for index, name in enumerate(protocols.POOLS) if name in names}
        [picture] = pool_report.draw([timeline.PoolSizes(0.0, sizes)], end=1.0)
        looks = re.findall(r"fill: (var\(--[a-z]+\)); fill-opacity: ([\d.]+)", picture.svg(pictures.BROAD))
        return dict(zip(sizes, looks, strict=False))

    whole = fills(*protocols.POOLS)
    assert len(set(whole.values())) == len(protocols.POOLS)
    for some in (protocols.POOLS[::2], protocols.POOLS[1::2]):
        assert fills(*some) == {name: whole[name] for name in some}
