"""report.html: whole, self-contained, and there for interrupted runs too."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from libra_jax import config as config_lib
from libra_jax.protocols import DataError
from libra_jax.telemetry import figures, recorder, report, timeline

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
    page = Page()
    page.feed(path.read_text())
    page.close()
    assert page.open == []
    return page, " ".join(" ".join(page.text).split())


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
            one.trajectory({"trajectory_id": f"{step}/{request}", "turns": [turn], "step": step})
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
    page, text = parsed(path)
    for sentence in (
        "a <b> run",
        "The run trained 12 of 20 steps in 30 s.",
        "The training reward rose from 0.57 to 0.75 (means of 5 steps).",
        "The score on held-out tasks rose from 0.40 to 0.80 .",
        "It generated 2,520 tokens in 72 trajectories , with 72 tool calls (100% successful).",
        "The median step generated 9,007 tokens a second .",
        "No group was older than 1 version when it was trained on.",
        "Predicted and measured step times",
        "moved: saves 10 s",
        "stayed: the present plan is the best",
        "train on 1 x 2 x 1; 3 of degree 1 to 4,000 tokens",
        "Requests moved to another instance 12 times , with 80 tokens of context; first tokens came after 32 ms, those "
        "of requests that stayed after 20 ms. The first decision after a tool return named the right bucket "
        "for 50%.",
    ):
        assert re.sub(r"\s", "", sentence) in re.sub(r"\s", "", text)
    assert "zero_variance all rewards of the group were equal 12" in text
    assert page.elements.count("svg") == 13
    assert "script" not in page.elements
    assert "link" not in page.elements
    assert all(reference.startswith("#") for reference in page.references)
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
    _, text = parsed(report.write_report(workdir))
    assert re.search(r"trained [678] steps", text)


@pytest.mark.parametrize("kept", ["metrics.jsonl", "trace.jsonl", "timeline.json"])
def test_any_one_file_is_enough(workdir, kept):
    for name in {"metrics.jsonl", "trace.jsonl", "timeline.json", "config.json"} - {kept}:
        (workdir / name).unlink()
    page, _ = parsed(report.write_report(workdir))
    assert page.elements.count("svg") >= 1


@pytest.mark.parametrize("content", [None, "", "not json\n"])
def test_a_workdir_without_a_run_is_refused_with_a_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match="no run has recorded anything here"):
        report.write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_workdir_that_is_a_file_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "notes").write_text("not a folder")
    with pytest.raises(DataError, match=r"notes: is no folder; give the --workdir of a run$"):
        report.write_report(tmp_path / "notes")


def test_a_run_of_one_step_and_one_trajectory_has_a_report(tmp_path):
    one = recorder.create(
        config_lib.RunConfig(telemetry=config_lib.TelemetryConfig(console=False)), tmp_path, lambda: 0.0
    )
    one.span("trainer", "train step", 0.0, 0.0)
    one.trajectory({"trajectory_id": "p/0", "turns": []})
    one.metrics(1, {"reward/mean": 0.0, "tokens_per_second": 0.0, "staleness/max": 0.0, "mismatch/kl": 0.0, "loss": 0})
    one.close()
    _, text = parsed(report.write_report(tmp_path))
    assert "trained 1 steps" in text


def test_long_curves_are_thinned_without_moving_their_mean():
    curve = {step: float(step % 7) for step in range(1, 4001)}
    steps, values = figures.thinned(curve)
    assert len(steps) == len(values) == figures.MOST_POINTS
    assert sum(values) / len(values) == pytest.approx(sum(curve.values()) / len(curve))
    assert figures.thinned({3: 1.5}) == ([3.0], [1.5])


def test_the_mean_of_five_steps_uses_fewer_at_the_start():
    assert figures.moving_mean({2: 1.0, 4: 3.0, 5: 5.0}, width=2) == {2: 1.0, 4: 2.0, 5: 4.0}


def test_the_busy_share_counts_overlapping_spans_once():
    spans = [timeline.Span("engine-0", 0, "generate", *ends, {}) for ends in ((0, 4), (1, 2), (6, 12), (-5, 1))]
    assert figures.busy_share(spans, 0.0, 10.0) == pytest.approx(0.8)


def test_a_reward_of_several_functions_shows_each_with_its_time_and_its_cache(tmp_path):
    first = {"reward/mean": 0.4, "reward/std": 0.1, "reward/brevity": -0.25, "reward/environment": 0.65}
    first |= {"reward/brevity/words": 31.0, "reward_seconds/brevity": 0.5, "reward_cached/brevity": 0.0}
    second = {**first, "reward/brevity": 0.125, "reward_seconds/brevity": 1.5, "reward_cached/brevity": 0.5}
    lines = [json.dumps({"step": step, **scalars}) for step, scalars in enumerate((first, second), start=1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page, text = parsed(report.write_report(tmp_path))
    assert "What the reward is made of" in text
    assert "brevity -0.250 0.125 1 25%" in text  # first, last, mean seconds of a call, share known already
    assert "environment 0.650 0.650" in text
    assert page.elements.count("svg") == 2  # the whole reward's picture, and this one


def test_a_reward_that_is_the_environments_own_is_not_taken_apart(tmp_path):
    scalars = {"step": 1, "reward/mean": 0.4, "reward/std": 0.1, "reward/environment": 0.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(scalars) + "\n")
    assert "What the reward is made of" not in parsed(report.write_report(tmp_path))[1]
