"""Operations on integers in words, with a sandboxed interpreter: what is demonstrated is what happens."""

import asyncio

import pytest
import sandboxes

from configs import python_cpu
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.environments import math
from libra_jax.examples import integers
from libra_jax.rollouts import factories
from libra_jax.tools import toolkit

ASKED = {"plus": "+", "minus": "-", "xor": "^", "or": "|", "and": "&", "mod": "%"}


def value(prompt):
    """What a problem comes to, by Python itself; None for a division by zero."""
    first, *rest = prompt.split()
    found = int(first)
    for word, number in zip(rest[::2], rest[1::2], strict=True):
        if word == "mod" and int(number) == 0:
            return None
        found = eval(f"found {ASKED[word]} int(number)")
    return found


def test_answers_are_right_of_three_digits_and_one_in_sixteen_has_none():
    source = integers.task_source(seed=2)
    tasks = [source.task(index) for index in range(320)]
    for index, task in enumerate(tasks):
        found = value(task.payload["prompt"])
        assert task.payload["answer"] == ("error" if found is None else str(found))
        assert (found is None) == (index % 16 == 15)
        assert found is None or 100 <= found <= 999
        assert len(task.payload["prompt"]) == integers.WIDTH
    assert {len(task.payload["worked"]) for task in tasks} == {1, 2}


def test_seeds_repeat_and_nothing_held_out_is_trained_on():
    def asked(make, count):
        return [make(index).payload["prompt"] for index in range(count)]

    assert asked(integers.task_source(seed=1).task, 50) == asked(integers.task_source(seed=1).task, 50)
    assert asked(integers.task_source(seed=1).task, 50) != asked(integers.task_source(seed=2).task, 50)
    held_out = asked(integers.task_source(seed=1).evaluation_task, 500)
    assert held_out == asked(integers.task_source(seed=2).evaluation_task, 500)
    assert not set(held_out) & set(asked(integers.task_source(seed=1).task, 2000))


def essence(message):
    """A message, of a failure only its last line: the marks in it differ between versions of Python."""
    lines = message.content.splitlines()
    return message.role, lines[-1] if lines[0].startswith("Traceback") else message.content


def test_what_is_demonstrated_is_what_the_sandbox_returns():
    pytest.importorskip("math_verify")
    sandboxes.skip_without_bubblewrap()
    chosen = config_lib.ToolsConfig(use=("python",), format="tags", describe=False)
    source = integers.task_source(steps=(1, 2, 3))

    async def attempt(tools, task):
        environment = math.environment(tools)
        shown = list(environment.demonstration(task))
        said = list(await environment.reset(task))
        for message in shown[len(said) :]:
            if message.role == "assistant":
                result = await environment.step(message.content)
                said += [message, *(protocols.Message("tool", answer.content) for answer in result.tool_returns)]
        await environment.close()
        return shown, said, result.reward

    async def body():
        async with toolkit.Toolkit(chosen, config_lib.SandboxConfig(warm=1)) as tools:
            return [await attempt(tools, source.task(index)) for index in (0, 1, 2, 15)]

    for shown, said, reward in asyncio.run(body()):
        assert list(map(essence, said)) == list(map(essence, shown))
        assert reward == 1.0


def test_dialogues_fit_the_shipped_config():
    pytest.importorskip("math_verify")
    run = config_lib.checked(python_cpu.get_config())
    environment = factories.environment_factory(run.task, toolkit.Toolkit(run.tools, run.sandbox))()
    source = factories.task_source(run.task, run.seed)
    tokenizer = tokenizers.CharacterTokenizer()
    trajectories = [
        tokenizers.demonstration_trajectory(source.task(index), environment, tokenizer) for index in range(64)
    ]
    assert max(len(trajectory.token_ids) for trajectory in trajectories) < run.rollout.max_context
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    assert max(turn.generated_tokens for turn in turns) < run.rollout.max_tokens
    assert max(len(trajectory.turns) for trajectory in trajectories) < run.task.max_turns
    assert run.sandbox.seconds < run.task.tool_seconds


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"path": "x.jsonl"}, r"task\.path: is for files, and these problems are generated"),
        ({"steps": ()}, r"task\.arguments\.steps: \(\) must hold whole numbers from 1 to 4"),
        ({"steps": (5,)}, r"task\.arguments\.steps: \(5,\) must hold"),
        ({"width": -1}, r"task\.arguments\.width: must not be negative, not -1"),
    ],
)
def test_arguments_that_pose_nothing_are_refused(arguments, problem):
    with pytest.raises(protocols.ConfigError, match=problem):
        integers.task_source(**arguments)
