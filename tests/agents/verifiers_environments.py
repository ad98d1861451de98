"""Environments as users of the `verifiers` package write them, for tests; each `load_...` is a factory."""

import datasets
import verifiers as vf

CLEANED = []


def rows(*questions):
    return datasets.Dataset.from_list([{"question": question, "answer": "8"} for question in questions])


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
      a: one.
      b: the other.
    """
    return a + b


def divide(a: int, b: int) -> float:
    """Divides two numbers."""
    return a / b


async def right(completion, answer) -> float:
    return float(str(completion[-1]["content"]).strip() == answer)


async def broken(completion) -> float:
    raise KeyError("label")


def by_group(completions) -> list[float]:
    return [1.0 for _ in completions]


def load_tools():
    return vf.ToolEnv(tools=[add, divide], dataset=rows("3+5?"), rubric=vf.Rubric(funcs=[right]), system_prompt="Add.")


def load_hasty():
    return vf.ToolEnv(tools=[add], dataset=rows("3+5?"), rubric=vf.Rubric(funcs=[right]), max_turns=1)


class Guess(vf.MultiTurnEnv):
    """Says which way to go, until it is found."""

    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1]["content"]
        if guess == "break":
            raise OSError("the disk is gone")
        state["tries"] += 1
        return [{"role": "user", "content": "higher" if int(guess) < 8 else "lower"}]

    @vf.stop
    async def found(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == "8"

    @vf.cleanup
    async def clean(self, state):
        CLEANED.append(state["tries"])


def load_guess():
    return Guess(dataset=rows("guess", "guess again"), eval_dataset=rows("guess at last"), rubric=vf.Rubric([right]))


def load_broken():
    return vf.SingleTurnEnv(dataset=rows("?"), rubric=vf.Rubric(funcs=[right, broken]))


def load_group():
    return vf.SingleTurnEnv(dataset=rows("?"), rubric=vf.Rubric(funcs=[by_group]))


class Forgetful(Guess):
    """Shows the policy its last message alone."""

    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]


def load_forgetful():
    return Forgetful(dataset=rows("guess"), rubric=vf.Rubric(funcs=[right]))


class Direct(Guess):
    """Calls the model's API past its client."""

    async def env_response(self, messages, state, **kwargs):
        return await state["client"].client.chat.completions.create()


def load_direct():
    return Direct(dataset=rows("guess"), rubric=vf.Rubric(funcs=[right]))


def load_nothing():
    return {"dataset": 1}
