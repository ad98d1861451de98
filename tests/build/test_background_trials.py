"""Simulations beside a run: a child process that nobody waits for, and that ends with the run."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from configs import simulate
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import background_trials, planned, trial, wiring
from libra_jax.cluster import resolved_run
from libra_jax.models import config as model_config
from libra_jax.planning.forecast import forecast
from libra_jax.planning.search import ranking
from libra_jax.simulator import comparison, scripts

TURNS = [scripts.Script(100, (protocols.Turn(100 + 20 * index),)) for index in range(8)]


@pytest.fixture(scope="module")
def case() -> planned.Case:
    config = simulate.get_config("math")
    config.coordinator.groups_per_step, config.coordinator.group_size = 2, 2
    made = planned.case(config_lib.to_dict(config), planned.PlanRequest(accelerators=16))
    return dataclasses.replace(made, work=planned.Work.of(made.run, "test", TURNS))


def begin(case: planned.Case, seconds: float = 120.0, **changes: str) -> background_trials.BackgroundTrials:
    made = background_trials.BackgroundTrials(trial.Subject.from_config(case.run, case.setting), seconds, **changes)
    made.start(case.predictions, case.predictions.ranked(forecast.Levels(), 2))
    return made


def ended(made: background_trials.BackgroundTrials, seconds: float = 120.0) -> ranking.Outcome:
    until = time.monotonic() + seconds
    while (found := made.outcome()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the module of another child."""

    def write(text: str) -> str:
        (tmp_path / "other_child.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return "other_child"

    return write


def test_a_child_simulates_what_this_process_would(case):
    made = begin(case)
    assert made.outcome() is None, "nobody waits"
    plans = case.predictions.ranked(forecast.Levels(), 2)
    subject = dataclasses.replace(trial.Subject.from_config(case.run, case.setting), rollouts=TURNS)
    assert ended(made).seconds == pytest.approx([trial.step_seconds(subject, plan) for plan in plans])


def test_a_late_child_is_ended(case, module):
    made = begin(case, 0.5, module=module("import time; time.sleep(600)"))
    pid = made._child.pid
    assert ended(made).failure == "the simulations took longer than planner.simulate_seconds = 0.5"
    assert not alive(pid)


def test_a_child_limits_its_own_time(case, module):
    text = "from libra_jax.build import background_trials as child, trial\nimport time\n"
    text += "trial.step_seconds = lambda *_: time.sleep(600)\nchild.main()"
    made = begin(case, 10.0, module=module(text))
    child = made._child
    assert child.wait(60.0) == -signal.SIGALRM
    assert ended(made).failure.startswith("the simulations took longer")


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("raise SystemExit('no instance holds a context')", "the simulations failed: no instance holds a context"),
        ("1 / 0", "the simulations failed: ZeroDivisionError: division by zero"),
        ("print('hello')", "the simulations wrote no times but 'hello'"),
        ("import os; os._exit(3)", "the simulations failed: exit status 3"),
    ],
)
def test_a_child_that_fails_says_why(case, module, text, failure):
    assert ended(begin(case, module=module(text))).failure == failure


def test_the_end_of_a_run_ends_the_child(case, module):
    made = begin(case, module=module("import time; time.sleep(600)"))
    pid = made._child.pid
    assert alive(pid)
    made.close()
    assert not alive(pid)


def run(**changes: object) -> config_lib.RunConfig:
    planner = {"period": 2, "hardware": "a800", "simulate_top": 2}
    values = {"planner": planner, "rollout": {"tensor_parallel": (1, 1, 2)}, **changes}
    return config_lib.parse(config_lib.RunConfig, values)


def test_a_real_run_has_a_planner_that_simulates():
    made = wiring.global_planner(resolved_run.ResolvedRun(run(), model_config.load_preset("Qwen3-1.7B")))
    assert isinstance(made._ranking._trials, background_trials.BackgroundTrials)
    made.close()


def test_a_run_whose_plans_cannot_be_simulated_is_refused():
    rows = {"trainer": {"context": 2, "platform": "cuda"}}
    with pytest.raises(protocols.ConfigError, match=r"config\.planner\.simulate_top: .* trainer\.context is 2; set it"):
        wiring.global_planner(resolved_run.ResolvedRun(run(**rows), model_config.load_preset("Qwen3-1.7B")))


def test_a_simulated_run_refuses_to_simulate_beside_itself():
    config = simulate.get_config("math")
    config.planner.period, config.planner.simulate_top = 2, 2
    made = comparison.prepare(config_lib.checked(config), ["cmlfq"])
    with pytest.raises(protocols.ConfigError, match=r"config\.planner\.simulate_top: a simulated run"):
        comparison.simulate(made)
