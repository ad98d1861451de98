"""The examples of README and docs/ run as a reader would run them."""

import asyncio
import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import pages
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.algorithms import contract
from libra_jax.rewards import scoring
from libra_jax.tools import toolkit

WAREHOUSES = ("README.md", "docs/guides/environments.md")


def load(page: str, name: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts an example where a reader would: into a file of the folder that runs are launched from."""
    (folder / name).write_text(pages.example(page, name))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def test_the_dice_environment_rolls_and_scores(tmp_path, monkeypatch):
    load("docs/guides/environments.md", "dice.py", tmp_path, monkeypatch)
    import dice

    async def attempt() -> tuple[protocols.StepResult, protocols.StepResult]:
        environment = dice.make()
        first = await environment.reset(protocols.Task("t", {"prompt": "roll", "answer": "3"}))
        assert [message.content for message in first] == ["roll"]
        called, ended = await environment.step("<tool_call>"), await environment.step(" 3 ")
        await environment.close()
        return called, ended

    called, ended = asyncio.run(attempt())
    assert called.tool_returns[0].content in "123456"
    assert (ended.done, ended.reward) == (True, 1.0)


@pytest.mark.parametrize("page", WAREHOUSES)
def test_the_environment_with_two_tools_calls_them_and_scores(page, tmp_path, monkeypatch):
    load(page, "warehouse.py", tmp_path, monkeypatch)
    import warehouse

    def call(name: str, item: str) -> str:
        asked = json.dumps({"name": name, "arguments": {"item": item}})
        return f"<tool_call>{asked}</tool_call>"

    async def attempt() -> list[protocols.StepResult]:
        tools = config_lib.ToolsConfig(use=("warehouse:stock", "warehouse:price"))
        async with toolkit.Toolkit(tools, config_lib.SandboxConfig()) as opened:
            environment = warehouse.environment(opened)
            task = protocols.Task("t", {"prompt": "How many gears?", "answer": "5"})
            told = await environment.reset(task)
            assert "stock" in told[0].content
            assert told[-1].content == "How many gears?"
            outputs = (call("stock", "gear") + call("price", "gear"), call("stock", "nut"), "5")
            steps = [await environment.step(output) for output in outputs]
            await environment.close()
        return steps

    both, failed, ended = asyncio.run(attempt())
    assert [(back.tool, back.content) for back in both.tool_returns] == [("stock", "5"), ("price", "20")]
    assert failed.tool_returns[0].status == "failure"
    assert (ended.done, ended.reward) == (True, 1.0)


def test_the_steps_by_hand_show_a_return_and_a_reward(tmp_path, monkeypatch, capsys):
    for name in ("warehouse.py", "try_warehouse.py"):
        load("docs/guides/environments.md", name, tmp_path, monkeypatch)
    importlib.import_module("try_warehouse")
    asked, returned, reward = capsys.readouterr().out.splitlines()
    assert "How many gears?" in asked
    assert "status='success', content='5'" in returned
    assert reward == "1.0"


def test_the_graded_reward_pays_for_the_answer_alone(tmp_path, monkeypatch):
    load("docs/guides/rewards.md", "graded.py", tmp_path, monkeypatch)
    import graded

    pairs = [("9:30", "10:30"), ("1999-01-06", "2024-05-06"), ("London 5", "Paris 5"), ("1, 2, 3", "9, 8, 3")]
    for text, gold in pairs:
        task = protocols.Task("t", {"prompt": "?", "answer": gold})
        assert (graded.right(task, text), graded.right(task, gold)) == (0.0, 1.0)
    for gold in ("1000", 1000):
        task = protocols.Task("t", {"prompt": "?", "answer": gold})
        outputs = ("<think>7</think>It costs $1,000.", "\\boxed{1e3} of 5", "1001", "- 1000")
        assert [graded.right(task, text) for text in outputs] == [1.0, 1.0, 0.0, 0.0]
    assert graded.short_thought(task, "<think>7</think>1000") == 1.0


def test_the_two_pages_show_the_same_environment():
    first, second = (pages.example(page, "warehouse.py") for page in WAREHOUSES)
    assert first == second


def test_the_reward_functions_score(tmp_path, monkeypatch):
    load("docs/guides/rewards.md", "shaping.py", tmp_path, monkeypatch)
    import shaping

    task = protocols.Task("t", {})
    assert [shaping.brevity(characters=2)(task, text) for text in ("four", "on", "")] == [0.0, 1.0, 0.0]
    used = scoring.Transcript("text", tools=(protocols.CausalState("python", 0, "success"),))
    assert shaping.tool_use()(task, used) == (1.0, {"calls": 1})
    assert shaping.tool_use()(task, scoring.Transcript("text")) == (0.0, {"calls": 0})


@pytest.mark.slow
def test_the_sandbox_example_contains_its_code(tmp_path):
    script = tmp_path / "try_sandbox.py"
    script.write_text(pages.example("docs/guides/sandbox.md", "try_sandbox.py"))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(pages.ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode and not (shutil.which("bwrap") or os.environ.get("LIBRA_JAX_REQUIRE_SANDBOX")):
        pytest.skip("no bubblewrap here")
    assert done.returncode == 0, done.stderr
    first, shell, bomb, after = done.stdout.split("ToolReturn(")[1:]
    assert "42" in first
    assert "/etc/shadow: No such file" in shell
    assert "status='success'" not in bomb
    assert "42" in after


def test_the_config_file_is_accepted(tmp_path, monkeypatch):
    load("docs/guides/configs.md", "mine.py", tmp_path, monkeypatch)
    import mine

    assert config_lib.checked(mine.get_config("elsewhere")).model.path == "elsewhere"


def run_in(folder: pathlib.Path, *arguments: str) -> str:
    """Runs Python in a folder to its end, which has to be good, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(pages.ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_agent_from_start_to_end_passes_its_dry_run(tmp_path):
    page = "docs/getting_started/own_agent.md"
    written = [
        (page, "agent.py"),
        ("docs/guides/environments.md", "warehouse.py"),
        ("docs/guides/rewards.md", "shaping.py"),
    ]
    for source, name in written:
        (tmp_path / name).write_text(pages.example(source, name))
    questions = pages.blocks(pages.ROOT / page, "bash")[0]
    subprocess.run(["bash", "-c", questions], cwd=tmp_path, check=True, timeout=60)
    printed = run_in(tmp_path, str(pages.ROOT / "launch/train.py"), "--config=agent.py", "--dry_run")
    assert "questions.jsonl, 3 to train on" in printed
    assert "brevity" in printed


@pytest.mark.slow
def test_the_tiny_model_of_the_page_passes_a_dry_run(tmp_path):
    (tmp_path / "tiny_qwen3.py").write_text(pages.example("docs/getting_started/model_and_data.md", "tiny_qwen3.py"))
    (tmp_path / "questions.jsonl").write_text('{"prompt": "12+30", "answer": "42"}\n')
    train = str(pages.ROOT / "launch/train.py")
    config = f"--config={pages.ROOT / 'configs/questions.py'}:models/tiny"
    flags = ("--config.task.path=questions.jsonl", "--config.task.arguments={'holdout': 0}", "--dry_run")
    run_in(tmp_path, "tiny_qwen3.py")
    printed = run_in(tmp_path, train, config, *flags)
    assert "policy      qwen3, 0.11 M parameters" in printed
    assert "the first: 12+30" in printed


def test_the_tool_of_the_python_page_is_offered_in_a_run(tmp_path, monkeypatch, capsys):
    load("docs/getting_started/python_api.md", "shelf.py", tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    import shelf

    import libra_jax

    train, asked = libra_jax.train, {}

    def quick(run, **objects):
        run.rollout.engine, run.steps = "fake", 1
        run.coordinator.groups_per_step, run.coordinator.group_size = 1, 2
        run.telemetry.report = run.telemetry.tensorboard = False
        asked.update(trained=train(run, workdir=tmp_path / "runs/mine", **objects))
        return asked["trained"]

    monkeypatch.setattr(libra_jax, "train", quick)
    shelf.main()
    assert list(asked["trained"].rewards) == [1]
    assert "The number of pieces of an item." in (tmp_path / "runs/mine/samples.jsonl").read_text()
    capsys.readouterr()
    load("docs/getting_started/python_api.md", "curve.py", tmp_path, monkeypatch)
    importlib.import_module("curve")
    assert capsys.readouterr().out.split()[0] == "1"


def test_the_python_example_trains_with_a_config_that_is_accepted(tmp_path, monkeypatch):
    load("docs/getting_started/python_api.md", "sums.py", tmp_path, monkeypatch)
    import sums

    import libra_jax

    asked = {}
    monkeypatch.setattr(
        libra_jax, "train", lambda run, **objects: asked.update(run=run, **objects) or types.SimpleNamespace(rewards={})
    )
    sums.main()
    assert config_lib.checked(asked["run"]).name == "sums"
    assert asked["reward"](protocols.Task("t", asked["tasks"][12]), "3") == 1.0
    assert asked["reward"](protocols.Task("t", {"prompt": "?", "answer": 0.5}), "0.50") == 1.0
    tasks = [protocols.Task("t", task) for task in asked["tasks"]]
    for text in ("", "12", " ".join(map(str, range(19)))):
        right = sum(task.payload["answer"] == text for task in tasks)
        assert sum(asked["reward"](task, text) for task in tasks) == right, "an output is paid for what it does not say"


def test_the_page_on_rewards_names_every_field_of_a_transcript():
    page = (pages.ROOT / "docs/guides/rewards.md").read_text()
    assert [field.name for field in dataclasses.fields(scoring.Transcript) if f"| `{field.name}` |" not in page] == []


def test_the_functions_of_the_loss_page_keep_the_contract(tmp_path, monkeypatch):
    load("docs/guides/own_loss.md", "my_loss.py", tmp_path, monkeypatch)
    algorithm = config_lib.AlgorithmConfig(
        loss="my_loss:asymmetric", loss_arguments={"failures": 0.25}, advantage="my_loss:centred"
    )
    contract.check(algorithm)
    with pytest.raises(protocols.ConfigError, match=r"loss_arguments: .*'fail'.* did you mean 'failures'"):
        contract.check(config_lib.AlgorithmConfig(loss="my_loss:asymmetric", loss_arguments={"fail": 1.0}))


def test_the_demonstration_begins_as_the_environment_poses_it(tmp_path, monkeypatch):
    (tmp_path / "copying.py").write_text(pages.example("docs/guides/demonstrations.md", "copying.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    copying = importlib.import_module("copying")
    task = copying.task_source(0).task(5)

    async def posed():
        async with toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig()) as tools:
            environment = copying.environment(tools)
            opening = list(await environment.reset(task))
            told = environment.demonstration(task)
            return opening, told, await environment.step(told[-1].content)

    opening, told, result = asyncio.run(posed())
    assert list(told[:-1]) == opening
    assert (result.done, result.reward) == (True, 1.0)
