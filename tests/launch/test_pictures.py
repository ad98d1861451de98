"""The pictures of comparisons, plans and sweeps as a phone shows them: what they say, and that nothing is covered."""

import itertools

import pytest
from matplotlib import figure
from matplotlib.backends import backend_agg

from configs import simulate
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import planned
from libra_jax.planning.forecast import meshes
from libra_jax.planning.search import search
from libra_jax.simulator import report, scripts

PHONE = 360
"""CSS pixels of a phone's width."""

MESH = meshes.Mesh(1, 4, 1, 20.0, 1e9)
BEST = search.DeviceSplit(MESH, (protocols.PlannedBucket(1, 4, 100),), 30.0, 30.0)


@pytest.fixture
def shown(monkeypatch):
    """The figures that were saved, drawn while their style holds."""
    saved = []

    def save(self, *_, **__):
        backend_agg.FigureCanvasAgg(self).draw()
        saved.append(self)

    monkeypatch.setattr(figure.Figure, "savefig", save)
    return saved


def check_legible(drawn):
    renderer = drawn.canvas.get_renderer()
    scale = PHONE / (72 * drawn.get_figwidth())
    texts = [text for text in drawn.findobj(lambda artist: hasattr(artist, "get_fontsize")) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) * scale >= 11, "letters of less than 11 pixels on a phone"
    boxes = [axes.get_window_extent(renderer) for axes in drawn.axes]
    assert all(axes.get_legend() is None for axes in drawn.axes), "a legend lies on the axes"
    boxes += [legend.get_window_extent(renderer) for legend in drawn.legends]
    boxes += [drawn._suptitle.get_window_extent(renderer)]
    for first, second in itertools.combinations(boxes, 2):
        assert not first.shrunk(0.98, 0.98).overlaps(second.shrunk(0.98, 0.98))
    around = drawn.get_tightbbox(renderer)
    assert around.x0 >= -0.02, "something leaves the picture on the left"
    assert around.x1 <= drawn.get_figwidth() + 0.02, "something leaves the picture on the right"


def entry(policy: str, seed: int, seconds: float) -> dict:
    return {"policy": policy, "seed": seed, "step_seconds": {"mean": seconds}}


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize(
    "policies", [["cmlfq"], ["cmlfq", "cmlfq_paper", "length_predictor", "least_loaded", "oracle"]]
)
def test_a_comparison_of_policies_covers_nothing(shown, tmp_path, policies, seeds):
    entries = [entry(policy, seed, 100.0 + 9 * seed) for policy in policies for seed in range(seeds)]
    title = ["simulate-swe", "Qwen3-14B on 48 a800: 20 train, instances 6 of degree 1, 3 of degree 2, 1 of degree 8"]
    report.write_picture(entries, 80.0, tmp_path / "a.svg", title)
    check_legible(shown[0])


@pytest.mark.parametrize("others", [0, 3])
def test_a_plan_is_drawn_where_it_is_the_only_split(shown, tmp_path, others):
    config = config_lib.to_dict(simulate.get_config("search"))
    config["steps"] = 1
    asked = planned.PlanRequest(
        hardware="h100", model="Qwen3-8B", accelerators=16, lengths=scripts.RequestedLengths(2000.0)
    )
    wider = [meshes.Mesh(2 + each, 4, 1, 9.0 - each, 1e9) for each in range(others)]
    splits = [BEST, *(search.DeviceSplit(mesh, BEST.rollout, 40.0, 40.0) for mesh in wider)]
    planned.draw(tmp_path / "a.svg", BEST, splits, planned.case(config, asked))
    check_legible(shown[0])
    title = " ".join(shown[0]._suptitle.get_text().split())
    assert "Plan: 4 train, 30 s a step" in title
    assert "Qwen3-8B (8.19 billion parameters) on 16 h100" in title
    assert "2,000 generated tokens in the mean" in title
    if not others:
        labels = [" ".join(tick.get_text().split()) for tick in shown[0].axes[0].get_yticklabels()]
        assert labels == ["training and weight sync", "rollout"]


def test_bars_below_zero_are_seen(shown, tmp_path):
    with report.picture_axes(tmp_path / "a.svg", 2.0, ["Rewards"]) as axes:
        report.bars(axes, ["x a=1", "x a=2"], [-0.5, 0.25], [0.1, 0.0], "{:.2f}")
    low, high = axes.get_xlim()
    assert low <= -0.6
    assert high > 0.25
    check_legible(shown[0])


def test_names_lose_the_words_that_all_begin_with():
    assert report.short(["c.py a=1, b=2", "c.py a=1, b=3"]) == ["b=2", "b=3"]
    assert report.short(["cmlfq"]) == ["cmlfq"]
    assert report.short(["static", "elastic"]) == ["static", "elastic"]
