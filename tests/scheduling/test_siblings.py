"""What siblings tell of what is left after a return: as much as it depends on the prompt, which is learnt."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling.prediction import evidence, paths, prefix_tree

SETTLED = {"success": 20, "failure": 60}
"""Tokens that are left after such a return, whatever the prompt."""

OTHER = {"success": "failure", "failure": "success"}
SIBLINGS = 4


def observed(known: evidence.Evidence, prompt: str, status: str, before: int) -> paths.RequestTrack:
    """A request that called a tool after so many tokens."""
    track = known.start(prompt, 0)
    known.observe(track, protocols.CausalState("bash", 100, status), before)
    return track


def learn(known: evidence.Evidence, left: Callable[[str, bool], int], prompts: int = 40) -> None:
    """Groups of siblings, one after another, half of which have ended when the others call their tool.

    Args:
      known: learns.
      left: tokens after a return, by its status and whether the prompt is every second one, a hard one.
      prompts: groups.
    """
    for index in range(prompts):
        hard = bool(index % 2)
        before = 100 + 900 * hard
        for _ in range(2):
            running = [(status, observed(known, str(index), status, before)) for status in list(SETTLED) * SIBLINGS]
            for status, track in running:
                known.predict(track, before)
                known.finish(track, before + left(status, hard))


def predicted(known: evidence.Evidence, status: str, left: int) -> float:
    """Mean of what is predicted after 100 tokens and a return, to one whose siblings had so many left then."""
    for _ in range(2 * SIBLINGS):
        known.finish(observed(known, f"asked {left}", OTHER[status], 100), 100 + left)
    sketch = known.predict(observed(known, f"asked {left}", status, 100), 100)
    return sum(tokens * mass for tokens, mass in zip(sketch, prefix_tree.MASSES, strict=True))


@pytest.mark.parametrize("status", SETTLED)
@pytest.mark.parametrize("left", [20, 2_000])
def test_where_a_return_settles_what_is_left_siblings_do_not_blur_it(status, left):
    known = evidence.Evidence(config_lib.SchedulerConfig())
    assert known.siblings_power == 1.0  # until it is found out
    learn(known, lambda status, _: SETTLED[status])
    assert known.siblings_power < 0.1
    assert predicted(known, status, left) == pytest.approx(SETTLED[status], abs=1.0)


def test_where_what_is_left_is_the_prompts_too_siblings_are_heard():
    known = evidence.Evidence(config_lib.SchedulerConfig())
    for index in range(80):  # all call their tool after as many tokens, so that nothing but siblings tells
        left = 4_000 if index % 2 else 400
        for _ in range(2):
            running = [observed(known, str(index), "success", 100) for _ in range(SIBLINGS)]
            for track in running:
                known.predict(track, 100)
                known.finish(track, 100 + left)
    assert known.siblings_power > 0.5
    assert predicted(known, "success", 4_000) > 1.5 * predicted(known, "success", 400)


def test_what_siblings_are_worth_outlives_a_restart_and_adds_up():
    known, again, joined = (evidence.Evidence(config_lib.SchedulerConfig()) for _ in range(3))
    learn(known, lambda status, _: SETTLED[status])
    again.restore(json.loads(json.dumps(known.snapshot())))
    joined.merge(known.snapshot())
    assert known.siblings_power < 0.1
    assert again.siblings_power == joined.siblings_power == known.siblings_power


def test_statistics_kept_before_siblings_were_judged_are_taken_as_they_are():
    known, older = (evidence.Evidence(config_lib.SchedulerConfig()) for _ in range(2))
    learn(known, lambda status, _: SETTLED[status])
    kept = known.snapshot()
    del kept["siblings"]
    older.restore(kept)
    assert older.siblings_power == 1.0
