"""Environments written for the `verifiers` package, whose rollouts the policy answers."""

import asyncio
import signal

import loop_doubles
import pytest

from libra_jax import config, protocols
from libra_jax.agents import factories
from libra_jax.agents.tools import toolkit

pytest.importorskip("verifiers.clients.client")

from libra_jax.agents.environments import verifiers as adapter


def source(factory, **arguments):
    return adapter.task_source(name=f"verifiers_environments:{factory}", arguments=arguments)


def attempt(factory, outputs, **limits):
    """What the loop makes of these outputs."""
    task = source(factory).task(0)
    environment = adapter.environment(name=f"verifiers_environments:{factory}")
    wide = loop_doubles.loop.Limits(
        **{"max_turns": 6, "max_tokens": 200, "max_context": 4000, "tool_seconds": 10.0, "temperature": 1.0, **limits}
    )
    return loop_doubles.attempt(outputs, task=task, environment=environment, limits=wide)[0]


def test_an_environment_of_the_package_poses_its_rows_and_scores_by_its_rubric():
    pytest.importorskip("reasoning_gym")
    task = config.TaskConfig(
        source="libra_jax.agents.environments.verifiers:task_source",
        environment="libra_jax.agents.environments.verifiers:environment",
        arguments={
            "name": "verifiers:ReasoningGymEnv",
            "arguments": {"gym": "leg_counting", "num_train_examples": 4, "num_eval_examples": 2},
        },
    )
    tasks = factories.task_source(task, seed=3)
    kit = toolkit.Toolkit(config.ToolsConfig(), config.SandboxConfig())
    make = factories.environment_factory(
        config.TaskConfig(**{**vars(task), "environment_arguments": task.arguments}), kit
    )
    posed = [tasks.task(index) for index in range(8)]
    assert {item.prompt_id for item in posed} == {
        f"ReasoningGymEnv-{row}{epoch}" for row in range(4) for epoch in ("", "-epoch1")
    }
    assert tasks.evaluation_task(1).prompt_id == "ReasoningGymEnv-evaluation-1"
    questions = {item.payload["row"]["question"] for item in posed}
    assert tasks.evaluation_task(0).payload["row"]["question"] not in questions

    async def score(answers):
        rewards = []
        for answer in answers:
            environment = make()
            opening = await environment.reset(posed[0])
            assert [message.role for message in opening] == ["system", "user"]
            result = await environment.step(answer)
            rewards.append((result.done, result.reward, dict(result.metrics)["format_reward_func"]))
            await environment.close()
        return rewards

    import reasoning_gym

    entry = reasoning_gym.create_dataset("leg_counting", size=6, seed=0)[int(posed[0].payload["row"]["answer"])]
    right, wrong, bare = asyncio.run(score([f"<answer>{entry['answer']}</answer>", "<answer>-1</answer>", "?"]))
    assert right == (True, 1.0, 1.0)
    assert wrong[:2] == (True, 0.0)
    assert bare[2] < 1


def test_a_dialogue_goes_on_until_the_environment_stops_it():
    from verifiers_environments import CLEANED

    CLEANED.clear()
    trajectory = attempt("load_guess", ["3", "9", "8"])
    assert (trajectory.reward, trajectory.finish) == (1.0, "answered")
    assert loop_doubles.tool_text(trajectory).replace("<|assistant|>", "") == (
        "<|user|>higher<|im_end|><|user|>lower<|im_end|>"
    )
    assert trajectory.metrics["right"] == 1.0
    assert trajectory.metrics["num_turns"] == 3.0
    assert CLEANED == [2]
    loop_doubles.check_books(trajectory)


def test_an_attempt_that_ends_early_is_cleaned_up_after():
    from verifiers_environments import CLEANED

    CLEANED.clear()
    trajectory = attempt("load_guess", ["3", "4", "5"], max_turns=2)
    assert (trajectory.reward, trajectory.finish) == (0.0, "max_turns")
    assert CLEANED == [2]


def test_tools_are_described_called_and_their_outcomes_told_apart():
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    outputs = [
        call % ("add", '{"a": 3, "b": 5}') + call % ("divide", '{"a": 3, "b": 0}'),
        call % ("subtract", "{}"),
        "<tool_call>{</tool_call>",
        call % ("add", "[]"),
        call % ("add", '"{\\"a\\": 1, \\"b\\": 1}"'),
        "8",
    ]
    trajectory = attempt("load_tools", outputs, max_turns=8)
    assert trajectory.reward == 1.0
    prompt = loop_doubles.TOKENIZER.decode(trajectory.token_ids[: trajectory.prompt_tokens])
    assert prompt.startswith("<|system|>Add.\n\n# Tools")
    assert '"name": "add", "description": "Adds two numbers.' in prompt
    shown = [text.partition("<|im_end|>")[0] for text in loop_doubles.tool_text(trajectory).split("<|tool|>")[1:]]
    assert shown == [
        "8",
        "division by zero",
        "error: no tool 'subtract'; there are: add, divide",
        "error: the call is no JSON (Expecting property name enclosed in double quotes, character 1)",
        "error: the arguments must be a JSON object",
        "2",
    ]
    assert [(turn.tool, turn.status) for turn in trajectory.turns] == [
        ("add+divide", "failure"),
        ("unknown", "failure"),
        ("call", "failure"),
        ("add", "failure"),
        ("add", "success"),
        (None, None),
    ]
    assert trajectory.metrics["total_tool_calls"] == 6.0
    assert trajectory.metrics["divide_calls"] == 1.0


def test_a_call_of_the_last_turn_that_is_none_has_failed():
    call = '<tool_call>{"name": "%s", "arguments": {"a": 3, "b": 5}}</tool_call>'
    outputs = (call % "add", call % "subtract", "<tool_call>{</tool_call>")
    turns = [attempt("load_hasty", [output]).turns[-1] for output in outputs]
    assert [(turn.tool, turn.status) for turn in turns] == [
        ("add", "success"),
        ("unknown", "failure"),
        ("call", "failure"),
    ]


@pytest.mark.parametrize(
    ("factory", "outputs", "sentence"),
    [
        ("load_guess", ["break"], "verifiers: OSError: the disk is gone"),
        ("load_broken", ["8"], r"verifiers: the reward function broken raised KeyError: 'label'"),
    ],
)
def test_what_breaks_is_a_crash_and_never_a_reward_of_zero(factory, outputs, sentence):
    with pytest.raises(protocols.EnvironmentCrashed, match=sentence):
        attempt(factory, outputs)


@pytest.mark.parametrize(
    ("factory", "outputs", "sentence"),
    [
        ("load_forgetful", ["3", "8"], r"only dialogues that grow can be trained on token by token"),
        ("load_direct", ["3"], r"calls the model's API itself, past the client that it is handed"),
        ("load_group", [], r"task\.arguments\.name: the rubric of .*load_group scores attempts by groups"),
        (
            "load_nothing",
            [],
            r"task\.arguments\.name: .*load_nothing makes dict, which is no MultiTurnEnv of verifiers",
        ),
        ("load_noting", [], r"task\.arguments\.name: .* has no 'load_noting'; did you mean 'load_nothing'\?"),
    ],
)
def test_what_cannot_be_supported_is_refused(factory, outputs, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        attempt(factory, outputs)


def test_nonsense_is_named():
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.arguments\.name: verifiers cannot load 'nowhere'"):
        adapter.task_source(name="nowhere")
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.arguments\.name: is empty"):
        adapter.task_source()
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.path: .* brings its own dataset"):
        adapter.task_source(path="a.jsonl", name="x:y")
    with pytest.raises(
        protocols.ConfigError, match=r"config\.task\.arguments\.arguments: .*load_guess cannot be called"
    ):
        source("load_guess", colour="red")
    with pytest.raises(protocols.DataError, match=r"load_tools: the environment has no evaluation dataset"):
        source("load_tools").evaluation_task(0)
    kit = toolkit.Toolkit(config.ToolsConfig(use=("python",)), config.SandboxConfig())
    with pytest.raises(protocols.ConfigError, match=r"config\.tools\.use: names python, but environments of verifiers"):
        adapter.environment(kit, name="verifiers_environments:load_guess")


def test_an_environment_of_the_package_leaves_the_process_its_signals():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert len(source("load_guess")) == 2
    adapter._made.clear()
    assert len(source("load_guess")) == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
