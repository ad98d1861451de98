"""report.html: whole, self-contained, and there for interrupted runs too."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.protocols import DataError
from libra_jax.scheduling.prediction import prediction_quality
from libra_jax.telemetry import console, metrics, recorder
from libra_jax.telemetry.report import (
    charts,
    pictures,
    recorded_run,
    report,
    run_report,
    tool_report,
)

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that elements nest, and collects text, references and headings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.references: list[str] = []
        self.elements: list[str] = []
        self.styles: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value)
            if name == "style":
                self.styles.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(path) -> tuple[Page, str]:
    found = Page()
    found.feed(path.read_text())
    found.close()
    assert found.open == []
    return found, " ".join(" ".join(found.text).split())


def decision(step, moved):
    rollout = [{"tensor_parallel": 1, "count": 3, "max_remaining_tokens": 4000}]
    return {
        "step": step,
        "why": "every 4 steps",
        "plan": {"data": 1, "fsdp": 2, "tensor": 1, "rollout": rollout},
        "present_seconds": 3.0,
        "best_seconds": 2.4,
        "move_seconds": 1.5,
        "moved": moved,
        "reason": "saves 10 s" if moved else "the present plan is the best",
        "gain": 0.2,
    }


@pytest.fixture
def workdir(tmp_path):
    """Twelve steps of an invented run."""
    now = [0.0]
    config = config_lib.RunConfig(name="a <b> run", steps=20, telemetry=config_lib.TelemetryConfig(console=False))
    one = recorder.create(config, tmp_path, lambda: now[0])
    one.metrics(0, {"evaluation/accuracy": 0.4})
    for step in range(1, 13):
        begin = now[0]
        for request in range(6):
            one.span("engine-0", "generate", begin, begin + 0.5 + 0.1 * request)
            one.span("tools", "calculator", begin + 0.5, begin + 0.6)
            turn = {"generated_tokens": 10 * (request + 1), "tool": "calculator", "status": "success"}
            moved = [{"source": "a", "target": "b", "reason": "tool_return"}] if step % 2 and not request else []
            one.trajectory({"trajectory_id": f"{step}/{request}", "turns": [turn | {"moves": moved}], "step": step})
        one.span("trainer", "train step", begin + 1, begin + 2)
        one.span("weights", "sync engine-0", begin + 2, begin + 2.1)
        now[0] += 2.5
        numbers = {
            "reward/mean": 0.5 + step / 40,
            "loss": math.nan if step == 3 else 0.1,
            "tokens_per_second": 9000.0 + step,
            "staleness/max": float(step % 2),
            "mismatch/kl": 1e-6 * step,
            "routing/moves": 2.0 * (step % 2),
            "routing/moved_tokens": 160.0 * (step % 2),
            "routing/judged": 6.0,
            "routing/one_shot_accuracy": 0.5,
            **({"routing/move_seconds": 0.025 + 0.001 * step, "routing/stay_seconds": 0.02} if step % 2 else {}),
            "step/seconds": 2.5,
            "rollout/seconds": 2.0,
            "rollout/wait_seconds": 1.0,
            "train/seconds": 1.0,
            "sync/seconds": 0.1,
            "groups/replaced": 1,
            "groups/replaced_zero_variance": 1,
            **({"plan/step_seconds": 2.4, "plan/train_seconds": 1.2, "plan/rollout_seconds": 2.4} if step > 2 else {}),
        }
        if step in (4, 8):
            one.decision(decision(step, moved=step == 4))
        one.metrics(step, numbers | ({"evaluation/accuracy": 0.8} if step == 12 else {}))
    one.close()
    (tmp_path / "config.json").write_text(json.dumps(config_lib.to_dict(config)))
    return tmp_path


def test_a_report_tells_the_run_and_needs_nothing_else(workdir):
    path = report.write_report(workdir)
    found, text = parsed(path)
    for sentence in (
        "a <b> run",
        "The run trained 12 of 20 steps in 30 s.",
        "The training reward rose from 0.57 to 0.75 (means of the first and the last 5 steps).",
        "The score on held-out tasks rose from 0.40 to 0.80 .",
        "It generated 2,520 tokens in 72 trajectories , with 72 tool calls, all successful.",
        "It generated 9,006 tokens a second over all its steps.",
        "No group was older than 1 version when it was trained on.",
        "Predicted and measured step times",
        "moved: saves 10 s",
        "stayed: the present plan is the best",
        "train on 1 x 2 x 1; 3 of degree 1 to 4,000 tokens",
        "Requests moved to another instance 12 times , with 80 tokens of context; first tokens came after 32 ms, those "
        "of requests that stayed after 20 ms. The first decision after a tool return named the right bucket "
        "for 50%. Moves of trained trajectories by reason: tool return 6.",
    ):
        assert re.sub(r"\s", "", sentence) in re.sub(r"\s", "", text)
    assert "zero_variance all rewards of the group were equal 12" in text
    assert found.elements.count("svg") == 17  # the four broad ones twice
    assert "script" not in found.elements
    assert "link" not in found.elements
    assert all(reference.startswith("#") for reference in found.references)
    source = path.read_text()
    assert set(re.findall(r"url\(([^)]*)\)", source)) == {
        match for match in re.findall(r"url\(([^)]*)\)", source) if match.startswith("#")
    }
    assert not re.search(r"https?://(?!www\.w3\.org/)", source)
    assert not re.search(r"#0[0-9]0[0-9]0[0-9]", source)  # every stand-in colour has become a variable


def test_an_interrupted_run_has_a_report_too(workdir):
    for name in ("metrics.jsonl", "trace.jsonl", "timeline.json"):
        data = (workdir / name).read_bytes()
        (workdir / name).write_bytes(data[: len(data) * 2 // 3])
    (workdir / "config.json").unlink()
    # Its pictures are those of `test_any_one_file_is_enough`.
    assert re.search(r"trained \*\*[678] steps", " ".join(report.sentences(recorded_run.load(workdir))))


@pytest.mark.parametrize("kept", ["metrics.jsonl", "trace.jsonl", "timeline.json"])
def test_any_one_file_is_enough(workdir, kept):
    for name in {"metrics.jsonl", "trace.jsonl", "timeline.json", "config.json"} - {kept}:
        (workdir / name).unlink()
    found, _ = parsed(report.write_report(workdir))
    assert found.elements.count("svg") >= 1


@pytest.mark.parametrize("content", [None, "", "not json\n"])
def test_a_workdir_without_a_run_is_refused_with_a_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
        with pytest.raises(DataError, match=r"metrics\.jsonl: is no folder; give the --workdir of a run$"):
            report.write_report(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match="no run has recorded anything here"):
        report.write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_run_of_one_step_and_one_trajectory_has_a_report(tmp_path):
    one = recorder.create(
        config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(console=False)), tmp_path, lambda: 0.0
    )
    one.span("trainer", "train step", 0.0, 0.0)
    one.trajectory({"trajectory_id": "p/0", "turns": []})
    one.metrics(1, {"reward/mean": 0.0, "tokens_per_second": 0.0, "staleness/max": 0.0, "mismatch/kl": 0.0, "loss": 0})
    one.close()
    _, text = parsed(report.write_report(tmp_path))
    assert "trained 1 step " in text


def test_long_curves_are_thinned_without_moving_their_mean():
    curve = {step: float(step % 7) for step in range(1, 4001)}
    steps, values = pictures.thinned(curve)
    assert len(steps) == len(values) == pictures.MOST_POINTS
    assert sum(values) / len(values) == pytest.approx(sum(curve.values()) / len(curve))
    assert pictures.thinned({3: 1.5}) == ([3.0], [1.5])


def test_the_mean_of_five_steps_uses_fewer_at_the_start():
    assert pictures.moving_mean({2: 1.0, 4: 3.0, 5: 5.0}, width=2) == {2: 1.0, 4: 2.0, 5: 4.0}


def test_the_busy_share_counts_overlapping_spans_once():
    spans = [protocols.Span("engine-0", 0, "generate", *ends, {}) for ends in ((0, 4), (1, 2), (6, 12), (-5, 1))]
    assert run_report.busy_share(spans, 0.0, 10.0) == pytest.approx(0.8)


def test_a_reward_of_several_functions_shows_each_with_its_time():
    first = {"reward/mean": 0.4, "reward/std": 0.1, "reward/brevity": -0.25, "reward/environment": 0.65}
    first |= {"reward/brevity/words": 31.0, "reward_seconds/brevity": 0.5}
    second = {**first, "reward/brevity": 0.125, "reward_seconds/brevity": 1.5}
    picture, table = run_report.reward_functions(recorded_run.RecordedRun({1: first, 2: second}))
    assert picture.figure(pictures.BROAD).axes[0].get_legend_handles_labels()[1] == ["brevity", "environment"]
    # First, last, mean seconds of a call.
    assert table.rows == [("brevity", "-0.250", "0.125", "1"), ("environment", "0.650", "0.650", "")]
    alone = {"reward/mean": 0.4, "reward/std": 0.1, "reward/environment": 0.4}
    assert not [*run_report.reward_functions(recorded_run.RecordedRun({1: alone}))]


def run_of(steps, **further):
    """A run of steps that all have these numbers."""
    rows = {
        step: {name: value(step) if callable(value) else value for name, value in further.items()}
        for step in range(1, steps + 1)
    }
    return recorded_run.RecordedRun({step: {"reward/mean": step / 10, **row} for step, row in rows.items()})


HEALTH = {
    "entropy": 2.0,
    "grad_norm": 1.0,
    "kl/reference": 0.1,
    "kl/behaviour": 1e-5,
    "clip/high_fraction": 0.02,
    "clip/low_fraction": 0.01,
    "reward/std": 0.4,
    "groups/without_gradient": 0.25,
    "tokens/mean": 300.0,
}


def test_the_health_of_the_learning_is_plotted_as_far_as_it_is_known():
    curves = charts.CHARTS.items()
    titles = {title for title, chart in curves if any(line.values in HEALTH for line in chart.lines)}
    assert len(titles) == 7
    known, few = run_of(3, **HEALTH), run_of(3, grad_norm=1.0)
    assert {title for title in titles if charts.CHARTS[title](known)} == titles
    assert ">25%</text>" in charts.CHARTS["Groups without a gradient"](known)[0].html(wide=False)
    assert {title for title in titles if charts.CHARTS[title](few)} == {"Gradient norm"}


def test_every_chart_is_on_the_page_and_its_metrics_are_registered():
    names = {line.values for chart in charts.CHARTS.values() for line in chart.lines}
    metrics.check(names)
    text = report.render("run", run_of(2, **dict.fromkeys(names, 0.5)))
    assert set(charts.CHARTS) <= set(re.findall("<h2>(.*?)</h2>", text))


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([0.1], "was **0.10**."),
        ([0.1, 0.2], "rose from 0.10 to **0.20**."),
        ([0.1, 0.2, 0.3], "rose from 0.10 to **0.30**."),
        # The windows share no step.
        ([step / 10 for step in range(1, 10)], "from 0.25 to **0.75** (means of the first and the last 4 steps)."),
        (
            [0.51, 0.47, 0.48, 0.45, 0.49],
            "(means of the first and the last 2 steps; steps vary by 0.03, so the difference is within the noise).",
        ),
        ([0.1, 0.9, 0.2, 0.8, 0.4, 0.95], "steps vary by 0.37, so the difference is within the noise)."),
        ([0.1, 0.12, 0.11, 0.6, 0.62, 0.61], "0.11 to **0.61** (means of the first and the last 3 steps)."),
        ([0.5, 0.5, 0.5, 0.5], "stayed at 0.50 (means of the first and the last 2 steps)."),
    ],
)
def test_the_change_of_the_reward_is_told_with_its_noise(rewards, told):
    run = run_of(len(rewards), **{"reward/mean": lambda step: rewards[step - 1]})
    [_, sentence] = report.sentences(run)
    assert sentence.startswith("The training reward ")
    assert sentence.endswith(told)


def calls_of(steps):
    """A run with a call in each step."""
    run = recorded_run.RecordedRun()
    for step in steps:
        run.add_trajectory({"step": step, "turns": [{"tool": "look", "status": "success"}]})
    return run


def times_of(curve):
    names = ("rollout/wait_seconds", "train/seconds", "checkpoint/seconds", "step/seconds")
    return recorded_run.RecordedRun({step: dict.fromkeys(names, value) for step, value in curve.items()})


def curves_of(*lines, scale="zero"):
    return pictures.Curves(lines, scale=scale)(recorded_run.RecordedRun())


Line = pictures.Line
CURVES = {
    "smooth": lambda curve: curves_of(Line(curve, "a", smooth=True), Line({1: 0.5}, "b", marker="D"), scale="share"),
    "one": lambda curve: curves_of(Line(curve)),
    "several": lambda curve: curves_of(Line(curve, "a"), Line(curve, "b", dashed=True)),
    "times": lambda curve: run_report.step_times(times_of(curve)),
    "outcomes": lambda curve: tool_report.outcomes(calls_of(curve)),
    "turns": lambda curve: tool_report.turns(calls_of(curve)),
    "left": lambda curve: [tool_report.picture([prediction_quality.LabelledState("look", 1, "success", 3, 2.0, 3)])],
}


def drawn(name, steps):
    """The matplotlib figure of a picture, laid out."""
    [picture] = CURVES[name](dict.fromkeys(range(1, steps + 1), 0.5))
    figure = picture.figure(pictures.NARROW)
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("name", sorted({*CURVES} - {"turns", "left"}))
@pytest.mark.parametrize("steps", [1, 2, 3, 40])
def test_steps_have_whole_ticks_and_few_points_a_mark(name, steps):
    [axes] = drawn(name, steps).axes
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(tick == int(tick) for tick in ticks), ticks
    assert steps == 40 or (low < 1 and steps < high)
    if steps < 4:  # a line of one point cannot be seen
        assert axes.patches or all(line.get_marker() not in ("", "None") for line in axes.lines)


@pytest.mark.parametrize("name", sorted({*CURVES} - {"one"}))
def test_no_legend_lies_over_axes_and_bars(name):
    figure = drawn(name, 40)
    legend = figure.legends[0] if figure.legends else figure.axes[0].get_legend()
    assert legend.get_window_extent().y0 >= figure.axes[0].get_window_extent().y1 - 1


@pytest.mark.parametrize("turns", [[1], [1, 2]])
def test_turns_are_whole_numbers(turns):
    run = calls_of([1])
    for count in turns:
        run.add_trajectory({"step": 1, "turns": [{}] * count})
    [picture] = tool_report.turns(run)
    [axes] = picture.figure(pictures.NARROW).axes
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == turns


def test_a_few_failures_among_many_calls_are_counted():
    statuses = ["success"] * 2000 + ["failure"] * 7 + ["timeout"]
    run = recorded_run.RecordedRun()
    run.add_trajectory({"turns": [{"generated_tokens": 1, "tool": "look", "status": status} for status in statuses]})
    assert report.sentences(run) == [
        "It generated **2,008 tokens** in 1 trajectories, with 2,008 tool calls (7 failed and 1 timed out)."
    ]


def test_rollout_is_called_and_counted_as_the_console_does():
    numbers = {"rollout/seconds": 3.1, "rollout/wait_seconds": 0.4, "train/seconds": 2.0, "step/seconds": 2.5}
    assert run_report.step_parts(run_of(2, **numbers))["wait"] == {1: 0.4, 2: 0.4}
    assert "wait 0.4 s, train 2.0 s" in console.step_line(1, console.RunPace(2, 0.0), numbers)


def test_steps_that_generated_nothing_do_not_make_the_speed():
    numbers = {"tokens_per_second": lambda step: 900.0 * (step % 2), "step/seconds": lambda step: 1.0 + step % 2}
    assert "It generated **600 tokens a second** over all its steps." in report.sentences(run_of(4, **numbers))


def test_pictures_can_be_read_on_a_phone(workdir):
    source = report.write_report(workdir).read_text()
    style = source[source.index("<style>") : source.index("</style>")]
    assert ".card svg { display: block; width: 100%; max-width: 100%; height: auto; }" in style
    assert ".card .narrow { display: none; }" in style[: style.index("@media (max-width: 760px)")]
    phone = style[style.index("@media (max-width: 760px)") :]
    assert ".card .broad { display: none; } .card .narrow { display: block; }" in phone
    assert not re.search(r"svg[^}]*min-width", style), "what is wider than the screen has to be scrolled"
    inner = 390 - 2 * (12 + 14 + 1)
    pictures = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
    kinds = [
        picture.startswith('<svg class="broad"') - picture.startswith('<svg class="narrow"') for picture in pictures
    ]
    assert kinds.count(1) == kinds.count(-1) >= 2
    for kind, picture in zip(kinds, pictures, strict=True):
        drawn_at = float(re.search(r'viewBox="0 0 ([\d.]+) ', picture).group(1))
        shown_at = 1120 - 2 * (24 + 18 + 1) if kind == 1 else inner
        own = set(re.findall(r' id="([\w-]+)"', picture))
        assert set(re.findall(r'["(]#([\w-]+)', picture)) <= own, "a picture needs nothing of a hidden one"
        sizes = {float(size) for size in re.findall(r"font: ([\d.]+)px var\(--font\)", picture)}
        assert sizes
        assert min(sizes - {7.35}) * shown_at / drawn_at > 9.5  # but for powers of ten
    assert "font-family: 'DejaVu" not in source


def test_names_with_dollars_and_escapes_are_drawn_as_text():
    run = recorded_run.RecordedRun(tools={"$\\broken{$\x1b[2J": recorded_run.Calls()})
    run.tools["$\\broken{$\x1b[2J"].seconds.append(0.1)
    [picture] = tool_report.seconds(run)
    assert "\\x1b[2J" in picture.svg(pictures.NARROW)
    assert "\x1b" not in picture.svg(pictures.NARROW)


@pytest.mark.parametrize(("share", "told"), [(-0.001, "none"), (-0.2, "none"), (0.001, "0%"), (0.25, "25%")])
def test_no_share_is_told_as_less_than_nothing(share, told):
    assert tool_report.explained(share) == told
    assert "-0" not in pictures.thousands(-0.0)
