"""Rewards: composed with weights, run apart from the loop, and never a number where something failed."""

from __future__ import annotations

import asyncio

import pytest
import reward_functions
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.cluster import inprocess
from libra_jax.rewards import actors, composition, scoring, trial

TASK = protocols.Task("t", {"prompt": "12*34", "answer": "408"})


def of(factory, weight=1.0, **arguments):
    return {"factory": f"reward_functions:{factory}", "weight": weight, "arguments": arguments}


@pytest.fixture(autouse=True)
def nothing_left():
    """Lets go of what hangs, and sees that every thread of the rewards ends."""
    reward_functions.RELEASE.clear()
    reward_functions.CALLS.clear()
    yield
    reward_functions.let_go()


def with_scorer(body, functions, *, notes=None, cluster=None, **reward):
    """Runs an async function of the scorer of these functions."""
    made = config_lib.RewardConfig(functions=functions, **reward)

    async def main():
        actors = cluster or inprocess.InProcessCluster(shutdown_seconds=10)
        try:
            async with composition.open_scorer(
                made, actors, note=(notes if notes is not None else []).append, start_seconds=30
            ) as scorer:
                return await body(scorer)
        finally:
            await actors.shutdown()

    return asyncio.run(main())


def score(functions, text="hello", task=TASK, own=0.0, **reward):
    """One score; the environment's own reward does not count unless a weight says so."""
    reward = {"environment_weight": 0.0, **reward}
    transcript = scoring.Transcript(text, environment_reward=own)
    return with_scorer(lambda scorer: scorer(task, transcript), functions, **reward)


# What an attempt is worth -------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.floats(0.01, 10)), min_size=1, max_size=4),
    st.floats(-10, 10),
    st.floats(-10, 10),
)
@settings(max_examples=20)
def test_a_reward_is_the_weighted_sum_of_functions_and_of_the_environments_own(parts, own, own_weight):
    functions = {f"f{n}": of("constant", weight, value=value) for n, (value, weight) in enumerate(parts)}
    found = score(functions, own=own, environment_weight=own_weight)
    assert found.reward == pytest.approx(sum(v * w for v, w in parts) + own * own_weight)
    assert [found.metrics[f"reward/f{n}"] for n in range(len(parts))] == [value for value, _ in parts]
    assert found.metrics["reward/environment"] == own


def test_without_functions_the_environments_own_reward_is_all_there_is():
    async def body(scorer):
        return scorer

    assert with_scorer(body, {}) is None


def test_a_function_reports_metrics_under_its_name_and_how_long_it_took():
    found = score({"vowel": of("share_of", letter="e"), "late": of("later", seconds=0.05)}, "there")
    assert found.reward == pytest.approx(2 / 5 + 5)
    assert found.metrics["reward/vowel/count"] == 2
    assert 0.05 <= found.metrics["reward_seconds/late"] < 5
    assert set(found.metrics) == {
        "reward/environment",
        "reward/vowel",
        "reward/vowel/count",
        "reward_seconds/vowel",
        "reward/late",
        "reward_seconds/late",
    }


def test_a_function_may_be_async_or_an_object_and_may_take_the_whole_transcript():
    functions = {"late": of("later"), "object": of("Object"), "dialogue": of("dialogue")}
    messages = (protocols.Message("user", "12*34"), protocols.Message("assistant", "408"))
    transcript = scoring.Transcript("12*34 408", answer="408", messages=messages)
    closed = reward_functions.Object.closed
    found = with_scorer(lambda scorer: scorer(TASK, transcript), functions, environment_weight=0.0)
    values = {name: value for name, value in found.metrics.items() if name.startswith("reward/")}
    assert values == {"reward/late": 9, "reward/object": 3, "reward/dialogue": 2.5}
    assert reward_functions.Object.closed == closed + 1


def test_an_environment_that_gave_no_number_is_a_crash_only_where_its_reward_counts():
    assert score({"one": of("constant")}, own=None).reward == 1.0
    with pytest.raises(protocols.EnvironmentCrashed, match=r"task t: .*no finite reward.*counts 2 times"):
        score({"one": of("constant")}, own=None, environment_weight=2.0)


# What functions do wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(reward_functions.NONSENSE))
def test_an_answer_that_is_no_finite_number_is_a_failure_that_names_function_and_task(kind):
    problem = "gave a metric 'f1'" if kind == "metric" else "gave .*, which is not a finite number"
    with pytest.raises(
        protocols.RewardFailed,
        match=rf"^config\.reward\.functions\.bad \(reward_functions:giving\), task t: it {problem}",
    ):
        score({"good": of("constant"), "bad": of("giving", kind=kind)})


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("failing", r"raised ZeroDivisionError: oops \(\S*reward_functions\.py, line \d+\)"),
        ("leaving", r"raised SystemExit: 3 \(\S*reward_functions\.py, line \d+\)"),
        ("leaving_later", r"raised SystemExit: 3 \(\S*reward_functions\.py, line \d+\)"),
        ("cancelled", r"raised CancelledError \(\S*reward_functions\.py, line \d+\)"),
    ],
)
def test_a_function_that_raises_is_a_failure_that_says_what(factory, problem):
    with pytest.raises(protocols.RewardFailed, match=f"task t: it {problem}$"):
        score({"bad": of(factory)})


def test_a_failed_function_is_called_again_as_often_as_the_config_says():
    assert score({"bad": of("failing", times=2)}, retries=2).reward == 1.0
    with pytest.raises(protocols.RewardFailed):
        score({"bad": of("failing", times=2)}, retries=1)


@pytest.mark.parametrize("factory", ["hanging", "waiting"])
def test_a_function_that_hangs_is_overdue_and_keeps_neither_the_loop_nor_other_attempts_waiting(factory):
    async def body(scorer):
        overdue = asyncio.ensure_future(scorer(TASK, scoring.Transcript("x")))
        ticks = 0
        while not overdue.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(protocols.RewardFailed, match=r"task t: it took more than 0\.3 s \(config\.reward\.seconds"):
            await overdue
        return ticks

    functions = {"slow": of(factory), "good": of("constant")}
    assert with_scorer(body, functions, environment_weight=0.0, seconds=0.3, retries=0) > 10


def test_waiting_for_a_turn_counts_for_no_deadline():
    async def body(scorer):
        attempts = [scorer(TASK, scoring.Transcript("x" * n)) for n in range(8)]
        return [found.reward for found in await asyncio.gather(*attempts)]

    functions = {"late": of("later", seconds=0.1)}
    rewards = with_scorer(body, functions, environment_weight=0.0, seconds=0.4, retries=0, concurrency=1)
    assert rewards == list(range(8))


def test_an_async_function_that_blocks_costs_no_other_attempt_its_reward(monkeypatch):
    monkeypatch.setattr(actors, "PING_SECONDS", 0.1)
    monkeypatch.setattr(actors, "CLOSE_SECONDS", 0.2)
    notes = []

    async def body(scorer):
        tasks = [protocols.Task(f"t{n}", {"n": n}) for n in range(6)]
        attempts = [scorer(task, scoring.Transcript("x")) for task in tasks]
        return await asyncio.gather(*attempts, return_exceptions=True)

    functions = {"blocking": of("blocking", prompts=["t2"])}
    found = with_scorer(body, functions, notes=notes, environment_weight=0.0, seconds=0.3, retries=0)
    failed = [str(item) for item in found if isinstance(item, BaseException)]
    assert len(failed) == 1
    assert "task t2: it took more than 0.3 s" in failed[0]
    assert [item.reward for item in found if isinstance(item, scoring.Score)] == [0.5] * 5
    assert (
        "The reward actor reward-0 has an async function that blocks its event loop; it is restarted (1 of" in notes[0]
    )


def test_an_exit_of_a_task_that_a_function_started_costs_no_call_its_reward(caplog):
    async def body(scorer):
        async def reward(text):
            return (await scorer(TASK, scoring.Transcript(text))).reward

        return [*await asyncio.gather(reward("wait"), reward("exit")), await reward("later")]

    functions = {"exits": of("exits_in_the_background")}
    assert with_scorer(body, functions, environment_weight=0.0, seconds=5.0, retries=0) == [0.75] * 3
    assert "A task that a reward function started raised SystemExit: 3" in caplog.text


def test_an_actor_whose_event_loop_is_closed_asks_to_be_replaced():
    async def trouble():
        worker = actors.RewardWorker({"good": of("constant")})
        await worker.start()
        await worker.shutdown()
        return await worker.trouble()

    assert asyncio.run(trouble()) == "has lost its event loop"


def test_an_actor_with_too_many_calls_that_hang_is_made_anew(monkeypatch):
    monkeypatch.setattr(actors, "MOST_HUNG", 3)
    notes = []

    async def body(scorer):
        for n in range(4):
            with pytest.raises(protocols.RewardFailed):
                await scorer(protocols.Task(f"t{n}", {"n": n}), scoring.Transcript("x"))
        return await scorer(protocols.Task("good", {}), scoring.Transcript("x"))

    functions = {"hanging": of("hanging", prompts=[f"t{n}" for n in range(4)])}
    found = with_scorer(body, functions, notes=notes, environment_weight=0.0, seconds=0.05, retries=0)
    assert found.reward == 0.25
    assert [note for note in notes if "reward-0 has 3 calls that hang" in note]


# Actors that are lost -----------------------------------------------------------------------------------------------


class Mortal:
    """An actor that dies of the text "poison", and with it every call that it runs."""

    def __init__(self, actor, deaths):
        self._actor, self._dead, self._deaths = actor, asyncio.Event(), deaths

    async def start(self):
        return await self._actor.start()

    async def trouble(self):
        return await self._actor.trouble()

    async def score(self, name, task, text):
        if text == "poison":
            await asyncio.sleep(0.02)
            self._deaths.append(name)
            self._dead.set()
        work, death = (
            asyncio.ensure_future(self._actor.score(name, task, text)),
            asyncio.ensure_future(self._dead.wait()),
        )
        await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        death.cancel()
        if self._dead.is_set():
            raise protocols.WorkerLost("actor 'reward' is lost: its process 7 died")
        return await work


class MortalCluster:
    def __init__(self):
        self.actors, self.names, self.deaths = {}, [], []

    async def spawn(self, spec):
        self.names.append(spec.name)
        self.actors[spec.name] = actors.RewardWorker(**spec.arguments)
        return protocols.DirectHandle(spec.name, Mortal(self.actors[spec.name], self.deaths))

    async def stop(self, name):
        if name in self.actors:
            await self.actors.pop(name).shutdown()

    async def shutdown(self):
        for name in list(self.actors):
            await self.stop(name)


def test_of_all_attempts_whose_actor_died_only_the_one_that_kills_actors_fails():
    cluster, notes = MortalCluster(), []

    async def body(scorer):
        texts = ["a", "bb", "poison", "dddd", "eeeee"]
        return await asyncio.gather(*(scorer(TASK, scoring.Transcript(text)) for text in texts), return_exceptions=True)

    functions = {"late": of("later", seconds=0.05)}
    found = with_scorer(body, functions, cluster=cluster, notes=notes, environment_weight=0.0, retries=1)
    assert [getattr(item, "reward", None) for item in found] == [1, 2, None, 4, 5]
    assert isinstance(found[2], protocols.RewardFailed)
    assert "task t: it brought down the actor that ran it" in str(found[2])
    assert len(cluster.deaths) == 3  # beside the others, then alone, then alone again
    assert len(notes) == 3
    assert "reward-0 is gone (actor 'reward' is lost: its process 7 died); it is restarted (1 of 10 times)" in notes[0]
    assert cluster.names == ["reward-0", "reward-alone", "reward-alone.2"]  # made when they are needed


def test_actors_that_keep_dying_end_the_run_with_a_sentence():
    functions = {"late": of("later", seconds=0.05)}
    with pytest.raises(
        protocols.WorkerLost, match=r"reward-alone is gone .*restarted 1 times, and config\.reward\.rest"
    ):
        score(functions, "poison", cluster=MortalCluster(), restarts=1)


def test_several_actors_share_the_work():
    cluster = MortalCluster()

    async def body(scorer):
        return await asyncio.gather(*(scorer(TASK, scoring.Transcript("x" * n)) for n in range(12)))

    with_scorer(body, {"late": of("later", seconds=0.05)}, cluster=cluster, actors=3, environment_weight=0.0)
    assert cluster.names == ["reward-0", "reward-1", "reward-2"]


# The config ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"functions": {"a b": of("constant")}}, r"reward\.functions: 'a b' cannot be a function's name"),
        (
            {"functions": {"mean": of("constant")}},
            r"reward\.functions: 'mean' cannot .*mean, std, environment, overlong are taken",
        ),
        ({"functions": {"a": "mine:a"}}, r"reward\.functions\.a: must be a mapping"),
        ({"functions": {"a": {}}}, r'reward\.functions\.a\.factory: must have the form "package.module:function"'),
        (
            {"functions": {"a": {"function": "m:a"}}},
            r"functions\.a\.function: no such field; its fields are arguments, f",
        ),
        ({"functions": {"a": of("constant", weight="1")}}, r"functions\.a\.weight: must be of type float"),
        ({"functions": {"a": of("constant", weight=float("nan"))}}, r"functions\.a\.weight: must be a finite number"),
        ({"functions": {"a": of("constant", 0.0)}, "environment_weight": 0.0}, r"functions: every weight is 0"),
        ({"environment_weight": 0.5}, r"environment_weight: 0\.5 weighs .* reward\.functions names none"),
        ({"actors": 0}, r"reward\.actors: must be positive"),
        ({"concurrency": 0}, r"reward\.concurrency: must be positive"),
        ({"retries": -1}, r"reward\.retries: must not be negative"),
        ({"seconds": float("inf")}, r"reward\.seconds: must be a finite number, not inf"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_by_the_name_of_its_field(values, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        config_lib.parse(config_lib.RunConfig, {"reward": values})


def test_the_field_of_former_versions_is_answered_with_where_it_is_now():
    with pytest.raises(
        protocols.ConfigError, match=r"task\.reward: no such field; task\.reward is now reward\.functions, e\.g"
    ):
        config_lib.parse(config_lib.RunConfig, {"task": {"reward": "mine:reward"}})


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (of("constent"), r"functions\.mine\.factory: .* has no 'constent'; did you mean 'constant'"),
        (of("constant", valeu=1), r"functions\.mine\.arguments: .*'valeu'.*; did you mean 'value'"),
        (of("straight"), r"functions\.mine\.factory: .*straight scores rollouts itself, .* name a factory"),
    ],
)
def test_what_a_config_names_wrongly_is_found_out_without_calling_it(function, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        actors.check("mine", config_lib.RewardConfig(functions={"mine": function}).parsed()["mine"])


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("nothing", r"functions\.mine\.factory: .*nothing must return a function of \(task, text\), not None"),
        (
            "of_one_argument",
            r"functions\.mine\.factory: .*must return a function of \(task, text\), and what it returns ",
        ),
        ("refusing", r"functions\.mine\.arguments: .*refusing raised RuntimeError: no licence"),
    ],
)
def test_a_factory_that_makes_no_reward_function_is_found_out_before_the_run_begins(factory, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        score({"mine": of(factory)})
    with pytest.raises(protocols.ConfigError, match=sentence):
        trial.functions(config_lib.RewardConfig(functions={"good": of("constant"), "mine": of(factory)}))


def test_the_users_own_functions_score_an_example_in_another_process():
    reward_functions.CALLS.clear()
    functions = {
        "bad": of("giving", kind="nan"),
        "counted": of("counting"),
        "dialogue": of("dialogue"),
        "late": of("later"),
        "made_up": of("reported", metric="moves"),
        "raises": of("failing"),
    }
    example = trial.TrialRollout(TASK, scoring.Transcript("hello", "408"))
    scored = trial.functions(config_lib.RewardConfig(functions=functions), example)
    assert [one.name for one in scored if one.failed] == ["bad", "raises"]
    found = {one.name: one.outcome for one in scored}
    assert [found[name].value for name in ("counted", "dialogue", "late")] == [5.0, 0.5, 5.0]
    assert found["bad"].problem == "gave nan, which is not a finite number"
    assert found["made_up"].problem.startswith("raised KeyError: 'moves'"), "a real transcript may have this metric"
    assert not reward_functions.CALLS
    judge = {"base_url": "http://127.0.0.1:1/v1", "model": "none"}
    shipped = {"mine": {"factory": "libra_jax.rewards.judge:judge", "arguments": judge}}
    assert trial.functions(config_lib.RewardConfig(functions=shipped), example) == []
    ends = {"counted": of("counting"), "exits": of("exiting"), "late": of("later")}
    counted, left = trial.functions(config_lib.RewardConfig(functions=ends), example)
    assert not counted.failed
    assert (left.name, left.failed) == ("exits", True)
    assert left.outcome.problem == "ended its process (exit status 4)"


@pytest.mark.parametrize(("allowed", "tried", "fails"), [(0.5, 20.0, True), (60.0, 3.0, False)])
def test_a_function_that_hangs_on_the_example_is_told_of_by_its_name(allowed, tried, fails, monkeypatch):
    monkeypatch.setattr(trial, "TRY_SECONDS", tried)
    monkeypatch.setattr(actors, "CLOSE_SECONDS", 0.5)
    reward = config_lib.RewardConfig(functions={"hangs": of("hanging")}, seconds=allowed)
    example = trial.TrialRollout(TASK, scoring.Transcript("hello", "408"))
    (hung,) = trial.functions(reward, example)
    assert (hung.name, hung.failed, hung.slow) == ("hangs", fails, not fails)
    assert hung.outcome.problem.startswith(f"took more than {min(allowed, tried):g} s")


def test_factories_are_tried_apart_and_a_slow_one_is_not_waited_for(monkeypatch):
    reward_functions.CALLS.clear()
    trial.functions(config_lib.RewardConfig(functions={"mine": of("recorded")}))
    assert not reward_functions.CALLS, "this process may not keep what a factory takes"
    with pytest.raises(
        protocols.ConfigError, match=r"reward\.functions: a factory ended its process \(exit status 3\)"
    ):
        trial.functions(config_lib.RewardConfig(functions={"mine": of("ending")}))
    monkeypatch.setattr(trial, "TRY_SECONDS", 0.1)
    monkeypatch.setattr(actors, "CLOSE_SECONDS", 0.1)
    trial.functions(config_lib.RewardConfig(functions={"mine": of("loading")}))
