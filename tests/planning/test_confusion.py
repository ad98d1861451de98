"""What plans assume of routing: predicted against true length bands."""

from __future__ import annotations

import numpy as np
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.planning.forecast import confusion
from libra_jax.scheduling import registry

BOUNDS, DEGREES = (1_000, 10_000), (1, 4)


def test_only_a_clairvoyant_sends_every_request_to_its_band():
    known = confusion.calibrated("oracle", 3, tools=False)
    assert known.predict_bands(np.array([0, 1, 2, 1])).tolist() == [0, 1, 2, 1]
    for policy in ("sticky", "least_loaded", "length_predictor"):
        nothing = confusion.calibrated(policy, 3, tools=True)
        assert nothing.predict_bands(np.array([0, 1, 2, 1])).tolist() == [-1] * 4


def test_tool_returns_tell_some_of_the_longest_and_nothing_else_does():
    bands = np.arange(1_000) % 2
    told = confusion.calibrated("cmlfq", 2, tools=True).predict_bands(bands)
    assert (told[bands == 0] == -1).all()
    assert np.mean(told[bands == 1] == 1) == pytest.approx(confusion.RECOGNISED, abs=0.01)
    assert (confusion.calibrated("cmlfq", 2, tools=False).predict_bands(bands) == -1).all()


def test_any_stretch_of_requests_has_the_shares_of_the_matrix():
    made = confusion.Confusion(((0.7, 0.2), (0.1, 0.5)), "test")
    bands = np.arange(400) // 3 % 2
    for stretch in (slice(0, 100), slice(300, 400)):
        found, true = made.predict_bands(bands)[stretch], bands[stretch]
        for band in (0, 1):
            shares = [np.mean(found[true == band] == predicted) for predicted in (0, 1)]
            assert shares == pytest.approx([row[band] for row in made.matrix], abs=0.07)


@pytest.mark.parametrize("matrix", [((0.5,), (0.5,)), ((0.8, 0.0), (0.3, 1.0)), ((-0.1,),), ((float("nan"),),)])
def test_what_is_no_matrix_of_shares_is_refused(matrix):
    with pytest.raises(protocols.DataError, match="confusion matrix"):
        confusion.Confusion(matrix, "test")


def turn(tokens: int, *targets: str, reason: str = "tool_return") -> protocols.Turn:
    moves = tuple(protocols.Move("r", "engine-0", target, protocols.MoveReason(reason)) for target in targets)
    return protocols.Turn(tokens, "bash", "success", moves=moves)


def test_lines_name_each_band_and_what_becomes_of_it():
    lines = confusion.calibrated("cmlfq", 2, tools=True).lines(BOUNDS)
    assert lines[1] == "  band 1, 0 to 1,000 tokens: 100% to any free slot"
    assert "one degree" in confusion.calibrated("cmlfq", 1, tools=True).lines(BOUNDS[-1:])[0]
    assert lines[2] == "  band 2, beyond 1,000 tokens: 22% to band 2, 78% to any free slot"


@pytest.mark.parametrize(
    ("policy", "admission", "share"),
    [("cmlfq", "auto", 0.9), ("cmlfq", "slots", 0.0), ("sticky", "auto", 0.0), ("sticky", "cache", 0.9)],
)
def test_a_plan_knows_which_policies_admit_by_the_room_in_caches(policy, admission, share):
    assert confusion.cache_share(config_lib.SchedulerConfig(policy=policy, admission=admission)) == share


@pytest.mark.parametrize("policy", config_lib.POLICIES)
def test_plans_and_schedulers_agree_on_who_admits_by_cache(policy):
    settings = config_lib.SchedulerConfig(policy=policy)
    scheduler = registry.create(settings, remaining=lambda request: 1)
    assert (confusion.cache_share(settings) > 0) == scheduler.by_cache
