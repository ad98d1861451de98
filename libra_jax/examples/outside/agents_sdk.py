"""The calculator's agent, written with the OpenAI Agents SDK: a function tool, and the SDK's own loop.

Runs under an interpreter that has `openai-agents`: the run's own, or that of a virtual environment which
`bash launch/harness.sh openai_agents` makes. Of this package it imports plain modules only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libra_jax.rewards import answers
from libra_jax.tools import arithmetic

_CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'


async def solve(task: Any, endpoint: Any, max_turns: int = 4, width: int = 20) -> dict[str, Any]:
    """Plays one rollout, and returns the answer for `score`.

    A model that calls no valid tool, or never answers, is judged. Any other error is one of the SDK or of the session,
    and is raised.

    Args:
      task: a task of `libra_jax.examples.calculator`.
      endpoint: address of the session.
      max_turns: most outputs of the agent.
      width: characters to which the question is padded, as in the native environment.
    """
    import agents
    import openai

    @agents.function_tool
    def calculator(expression: str) -> str:
        """Gives the value of an expression."""
        return arithmetic.carry_out(expression, task.payload["max_characters"]).content

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.secret) as client:
        model = agents.OpenAIChatCompletionsModel(endpoint.model, client)
        agent = agents.Agent(name="calculator", tools=[calculator], model=model)
        question = task.payload["expression"].ljust(width)
        try:
            result = await agents.Runner.run(agent, question, max_turns=max_turns)
        except (agents.MaxTurnsExceeded, agents.ModelBehaviorError) as error:
            return {
                "answer": None,
                "metrics": {"misbehaved": 1, "out_of_turns": isinstance(error, agents.MaxTurnsExceeded)},
            }
    return {"answer": str(result.final_output).strip(), "metrics": {"misbehaved": 0, "out_of_turns": 0}}


def score(run: Any) -> float:
    """Returns 1 for the right answer, else 0. Runs in the run's process, which alone has the answer."""
    return float(answers.equal(run.verdict["answer"] or "", run.task.payload))


def demonstration(task: Any) -> Sequence[Any]:
    """Returns the solved dialogue of a task, for the warm start: with a call as vLLM's parser "hermes" reads it."""
    from libra_jax import protocols

    expression = task.payload["expression"]
    returned = arithmetic.carry_out(expression, task.payload["max_characters"]).content
    return [
        protocols.Message("user", expression.ljust(20)),
        protocols.Message("assistant", _CALL.format(expression)),
        protocols.Message("tool", returned),
        protocols.Message("assistant", task.payload["answer"]),
    ]
