"""`libra_jax.train`, `evaluate`, `simulate` and `plan` from a Python program, with its objects instead of names."""

import asyncio
import json
import math
import subprocess
import sys
import tempfile
import threading
import traceback

import pytest

import libra_jax
from configs import simulate
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import api, dry_run, evaluating, objects, planned, serving, wiring
from libra_jax.simulator import report, scripts

QUESTIONS = [{"prompt": f"say {number}", "answer": str(number)} for number in range(20)]


def small(steps: int = 2) -> config_lib.RunConfig:
    """Returns a run with the fake engine, which takes seconds."""
    run = config_lib.RunConfig(name="mine", steps=steps)
    run.rollout.engine, run.rollout.max_context, run.rollout.max_tokens = "fake", 128, 16
    run.trainer.platform, run.trainer.row_tokens = "cpu", 128
    run.coordinator.groups_per_step, run.coordinator.group_size = 2, 4
    run.evaluation.every, run.telemetry.tensorboard, run.telemetry.report = 0, False, False
    return run


def test_a_run_trains_on_objects_of_the_program_and_goes_on(tmp_path):
    class Once:
        """Ends each attempt after one output."""

        async def reset(self, task):
            return [protocols.Message("user", task.payload["prompt"])]

        async def step(self, output):
            return protocols.StepResult(done=True, reward=0.0)

        async def close(self):
            pass

    scored = []

    def reward(task, text):
        scored.append(task.payload["answer"])
        return 0.25

    given = {"environment": Once, "reward": reward, "tasks": QUESTIONS, "workdir": tmp_path / "run"}
    trained = libra_jax.train(small(2), **given)
    assert trained.rewards == {1: 0.25, 2: 0.25}
    assert len(scored) == 2 * 2 * 4, "two steps of two groups of four"
    assert set(scored) <= {task["answer"] for task in QUESTIONS}
    assert (trained.model / "config.json").exists()
    assert libra_jax.train(small(3), **given).rewards == {3: 0.25}, "it goes on from its checkpoint"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that a thread with an event loop of its own has trained, as a notebook's."""

    async def notebook():
        assert threading.current_thread() is threading.main_thread()
        return libra_jax.train(small(1), tasks=QUESTIONS, workdir=tmp_path_factory.mktemp("trained") / "run")

    result = asyncio.run(notebook())
    assert list(result.rewards) == [1]
    return result


def test_the_awaited_form_trains_on_the_callers_loop(tmp_path):
    trained = asyncio.run(libra_jax.train_async(small(1), tasks=QUESTIONS, workdir=tmp_path / "run"))
    assert list(trained.rewards) == [1]
    run = libra_jax.load(trained.workdir)
    assert run.config == libra_jax.load(str(trained.workdir)).config
    assert run.config.name == "mine"
    row = run.metrics.to_pylist()[-1]
    assert (row["step"], row["reward/mean"]) == (1, trained.rewards[1])
    assert any("say " in sample.text() for sample in run.samples)


def test_a_table_of_metrics_has_what_only_some_steps_have(tmp_path):
    with pytest.raises(protocols.DataError, match=r"workdir: .* holds no config\.json"):
        libra_jax.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_lib.to_dict(small())))
    lines = '{"step": 1, "a": 1}', '{"step": 2, "a": 2.5, "b": null, "nonfinite": {"b": "inf"}}', '{"step": 3, "a'
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    columns = libra_jax.load(tmp_path).metrics.to_pydict()
    assert columns == {"step": [1, 2], "a": [1.0, 2.5], "b": [None, math.inf]}


def test_an_evaluation_scores_every_given_task_of_a_model_or_a_checkpoint(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def reward(task, text):
        return float(task.payload["answer"] == "3")

    for model in (None, trained.model, trained.workdir):
        scored = libra_jax.evaluate(small(), model=model, reward=reward, tasks=QUESTIONS[:5])
        assert scored.reward == pytest.approx(0.2)
        assert [rollout.reward for rollout in scored.rollouts] == [0.0, 0.0, 0.0, 1.0, 0.0]
        assert "say 3" in scored.rollouts[3].dialogue
        assert "say 3" not in scored.rollouts[3].text
        assert scored.rollouts[3].text in scored.rollouts[3].dialogue
        assert scored.unscored == 0
        assert scored.metrics["reward/reward"] == pytest.approx(0.2)
    assert not list(tmp_path.glob("libra-evaluate-*")), "its logs go with it"
    assert (trained.workdir / "metrics.jsonl").read_text().count("\n") == 1, "the run's own files stay as they were"


def test_the_awaited_evaluation_takes_the_held_out_tasks_of_a_source():
    class Source:
        def task(self, index):
            assert index == 0, "nothing is trained; the checks before the start read one task"
            return protocols.Task("0", {"prompt": "a", "answer": ""})

        def evaluation_task(self, index):
            return protocols.Task(f"held-out-{index}", {"prompt": f"say {index}", "answer": str(index)})

    run = small()
    run.evaluation.tasks = 3
    scored = asyncio.run(libra_jax.evaluate_async(run, tasks=Source()))
    assert [rollout.task for rollout in scored.rollouts] == ["held-out-0", "held-out-1", "held-out-2"]


def test_an_evaluation_refuses_a_run_without_a_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(protocols.DataError, match=r"holds no checkpoint yet"):
        libra_jax.evaluate(small(), model=tmp_path, tasks=QUESTIONS)


@pytest.mark.parametrize("call", ["train", "evaluate"])
def test_an_interrupted_call_says_how_it_goes_on(call, monkeypatch, capsys):
    async def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, f"{call}_async", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(libra_jax, call)(small(), tasks=QUESTIONS)
    ending = {"train": "go on from the last checkpoint", "evaluate": "call evaluate again to begin it again"}[call]
    assert ending in capsys.readouterr().err


@pytest.mark.parametrize("call", ["train", "evaluate", "in a notebook", "evaluate.py", "serve.py"])
def test_an_exit_of_a_task_that_user_code_started_is_an_error(call, monkeypatch):
    async def exits():
        raise SystemExit(0)

    async def work(*_, **__):
        task = asyncio.ensure_future(exits())
        await asyncio.sleep(20)
        await task

    async def cell():
        libra_jax.train(small(), tasks=QUESTIONS)

    for name in ("train_async", "evaluate_async", "score", "serve"):
        monkeypatch.setattr(api, name, work)
    monkeypatch.setattr(evaluating, "located", lambda config, _: config)
    request = evaluating.EvaluationRequest(model="mine")
    calls = {
        "train": lambda: libra_jax.train(small(), tasks=QUESTIONS),
        "evaluate": lambda: libra_jax.evaluate(small(), tasks=QUESTIONS),
        "in a notebook": lambda: asyncio.run(cell()),
        "evaluate.py": lambda: evaluating.evaluate(request, small()),
        "serve.py": lambda: serving.serve(request, small(), host=None, port=0, key_env="", ready=lambda _: None),
    }
    with pytest.raises(protocols.LibraError, match="a task that your code started raised SystemExit: 0"):
        calls[call]()


def test_an_edited_object_begins_another_run_and_an_importable_one_keeps_its_name():
    first = objects.with_objects(small(), reward=lambda task, text: 1.0)
    second = objects.with_objects(small(), reward=lambda task, text: 2.0)
    assert config_lib.digest(first) != config_lib.digest(second)
    named = objects.with_objects(small(), environment=json.JSONDecoder)  # any class that a module holds
    assert named.task.environment == "json.decoder:JSONDecoder"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": []}, r"tasks: is empty"),
        ({"tasks": [{"question": 1}]}, r"tasks\[0\]: column 'prompt' must be a text"),
        ({"tasks": [{"prompt": "a"}, {"prompt": 3}]}, r"tasks\[1\]: column 'prompt' must be a text"),
        ({"tasks": 3}, r"config\.task\.source: 3 has no method task"),
        ({"environment": 3}, r"config\.task\.environment: 3 is not callable"),
        ({"reward": "mine"}, r"config\.reward\.functions: 'mine' is not callable"),
    ],
)
def test_an_object_that_cannot_stand_for_a_name_is_refused(given, message):
    with pytest.raises(protocols.LibraError, match=message):
        objects.with_objects(small(), **given)


class Stock:
    """A tool, which a config takes by its name only."""


def raising(task, text):
    raise KeyError("gold")


def not_a_number(task, text):
    return float("nan")


@pytest.mark.parametrize("call", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": raising}, r"raising raised KeyError: 'gold' \(.*test_api\.py, line \d+\) for the first task"),
        ({"reward": not_a_number}, r"not_a_number gave nan, which is not a finite number for the first task"),
        ({"reward": lambda task: 1.0}, r"lambda must take \(task, text\) or \(task, transcript\), and takes \(task\)"),
        ({"environment": Stock}, r"config\.task\.environment: .*Stock.* has no method reset"),
        ({"model": "/nowhere/model"}, r"/nowhere/model: no such model directory"),
    ],
)
def test_a_mistake_is_one_sentence_before_any_engine_starts(call, given, message, monkeypatch, tmp_path):
    async def started(*_, **__):
        raise AssertionError("engines start")

    for function in ("train", "evaluate"):
        monkeypatch.setattr(wiring, function, started)
    run, objects = small(), dict(given)
    if call == "train":
        objects["workdir"] = tmp_path / "run"
        run.model.path = objects.pop("model", "")
    with pytest.raises(protocols.LibraError, match=message) as raised:
        getattr(libra_jax, call)(run, tasks=QUESTIONS, **objects)
    assert "resolving" not in str(raised.value)
    assert "given:" not in str(raised.value)
    shown = traceback.format_exception(raised.value)
    assert len("".join(shown).splitlines()) <= 10, "the caller's line and the call's"
    assert not (tmp_path / "run").exists()


def paid_for_the_question(task, transcript):
    return float(transcript.dialogue.count(task.payload["prompt"]))


def paid_for_the_answer(task, text):
    return float(text == task.payload["answer"])


def fails_without_words(task, text):
    return 1 / len(text)


@pytest.mark.parametrize(
    ("reward", "warning"),
    [
        (paid_for_the_question, "config.reward.functions.reward: gave 1 for the first task with an empty output"),
        (fails_without_words, "config.reward.functions.reward: raised ZeroDivisionError"),
        (paid_for_the_answer, ""),
    ],
)
def test_a_reward_that_an_empty_output_earns_is_warned_of(reward, warning, capsys):
    dry_run.try_rewards(objects.with_objects(small(), tasks=QUESTIONS, reward=reward))
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {warning}") if warning else not said


def test_the_variable_keeps_the_whole_traceback(monkeypatch):
    monkeypatch.setenv("LIBRA_JAX_TRACEBACK", "1")
    with pytest.raises(protocols.ConfigError) as raised:
        libra_jax.train(small(), tasks=QUESTIONS, reward=raising)
    assert "try_rewards" in "".join(traceback.format_exception(raised.value))


def test_what_is_no_config_is_refused():
    with pytest.raises(protocols.ConfigError, match=r"config: must be a libra_jax\.config\.RunConfig, not a dict"):
        libra_jax.train({}, tasks=QUESTIONS)
    with pytest.raises(protocols.ConfigError, match=r"not the class RunConfig"):
        libra_jax.train(config_lib.RunConfig, tasks=QUESTIONS)


def test_a_class_in_place_of_its_name_is_refused_with_the_name():
    with pytest.raises(protocols.ConfigError, match=r"ToolsConfig\.use: must hold strings, .* as '.*test_api:Stock'"):
        small().tools.use = (Stock,)


def test_tools_are_refused_with_the_environments_that_offer_them():
    run = small()
    run.tools.use = ("calculator",)
    with pytest.raises(
        protocols.ConfigError, match=r"question:environment offers no tools .* take .*math:environment, "
    ):
        libra_jax.train(run, tasks=QUESTIONS)


def test_a_weight_of_the_environment_is_refused_beside_a_reward_that_replaces_it():
    run = small()
    run.reward.environment_weight = 0.5
    with pytest.raises(protocols.ConfigError, match=r"reward\.environment_weight: 0\.5 has no effect beside"):
        objects.with_objects(run, reward=lambda task, text: 1.0)


def test_objects_of_the_program_are_refused_where_workers_are_other_processes():
    run = small()
    run.cluster.backend = "ray"
    with pytest.raises(protocols.ConfigError, match=r"config\.cluster\.backend: ray runs workers in other processes"):
        objects.with_objects(run, reward=lambda task, text: 1.0)


def test_a_plan_and_a_simulation_answer_as_the_scripts_do():
    split = libra_jax.plan(hardware="h100", model="Qwen3-8B", accelerators=16, workload="search", generated_tokens=4000)
    assert (split.train.devices, split.plan.rollout_devices) == (4, 12)
    wanted = scripts.RequestedLengths(4000)
    asked = planned.PlanRequest(hardware="h100", model="Qwen3-8B", accelerators=16, workload="search", lengths=wanted)
    assert split == planned.case(config_lib.to_dict(simulate.get_config()), asked).searched().best(16)
    run = simulate.get_config("search")
    run.steps, run.coordinator.groups_per_step = 1, 2

    async def notebook():
        return libra_jax.simulate(run, policies=("cmlfq",)), await libra_jax.simulate_async(run, policies=("sticky",))

    compared = libra_jax.simulate(run, policies=("cmlfq", "sticky"))
    assert [entry["policy"] for entry in compared.entries] == ["cmlfq", "sticky"]
    assert all(
        report.mean_step_seconds([entry])[entry["policy"]] >= compared.bound_seconds > 0 for entry in compared.entries
    )
    # A notebook's thread runs an event loop already, and a simulation needs one of its own.
    alone = [report.mean_step_seconds(each.entries) for each in asyncio.run(notebook())]
    assert alone == [report.mean_step_seconds([entry]) for entry in compared.entries]


def test_the_package_loads_no_accelerator_library():
    code = "import sys, libra_jax; print(sorted({'jax', 'torch', 'vllm', 'ray', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
