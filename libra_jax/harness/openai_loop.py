"""An agent that is a loop around an `openai` client: it poses the task of any environment, and runs its tools itself.

    config.task.environment = "libra_jax.harness:environment"
    config.task.environment_arguments = {
        "callable": "libra_jax.harness.openai_loop:agent",
        "fields": ("*",),  # the environment scores in the agent, and the model runs no commands there
        "arguments": {"environment": "libra_jax.examples.calculator:environment"},
        "status": "libra_jax.harness.openai_loop:status",
    }

The environment is one of this package's (`protocols.Environment`), stepped on this side of the endpoint. So the same
task can be trained both ways, with the same prompts, returns and rewards.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from libra_jax import protocols
from libra_jax.examples import calculator
from libra_jax.rollouts import tool_results
from libra_jax.tools import arithmetic
from libra_jax.utils import deadlines, resolving

if TYPE_CHECKING:
    import openai

_FIELD = "task.environment_arguments.arguments"


async def agent(
    task: protocols.Task,
    endpoint: protocols.Endpoint,
    environment: str = "libra_jax.examples.calculator:environment",
    environment_arguments: Mapping[str, Any] | None = None,
) -> protocols.Outcome:
    """Plays one rollout of an environment, and returns its reward and metrics.

    Args:
      task: task of the rollout.
      endpoint: address of its session.
      environment: factory of the environment.
      environment_arguments: arguments of the factory.
    """
    factory = resolving.resolve(environment, f"{_FIELD}.environment")
    arguments = dict(environment_arguments or {})
    world: protocols.Environment = resolving.call(factory, environment, arguments, f"{_FIELD}.environment_arguments")
    metrics: dict[str, float] = {}
    async with client(endpoint) as model:
        try:
            messages = [_written(message) for message in await deadlines.call(world.reset, task)]
            while True:
                answer = await model.chat.completions.create(model=endpoint.model, messages=messages)
                output = answer.choices[0].message.content or ""
                if answer.choices[0].finish_reason == "length":
                    # No environment reads an output that was cut off: the native loop ends here, too.
                    return protocols.Outcome(0.0, metrics)
                result: protocols.StepResult = await deadlines.call(world.step, output)
                metrics.update(result.metrics)
                if result.done:
                    # None is no reward, and `jobs.outcome` refuses it.
                    return protocols.Outcome(result.reward, metrics)  # type: ignore[arg-type]
                messages.append({"role": "assistant", "content": output})
                messages += [_returned(answered) for answered in result.tool_returns]
                messages += [_written(message) for message in result.messages]
        finally:
            await deadlines.call(world.close)


def client(endpoint: protocols.Endpoint) -> openai.AsyncOpenAI:
    """Returns a client of a session. Close it, or use it as `async with`."""
    try:
        import openai
    except ModuleNotFoundError as error:
        raise protocols.ConfigError(
            "config.task.environment: the loop of an openai client needs that package; pip install 'openai>=3.52'"
        ) from error
    # A client that makes its own context takes 40 ms for it, and a step may have a thousand rollouts.
    http = openai.DefaultAsyncHttpxClient(verify=_context())
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.secret, http_client=http)


@functools.cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _written(message: protocols.Message) -> Any:
    return {"role": message.role, "content": message.content}


def _returned(answered: protocols.ToolReturn) -> Any:
    # The call is a part of the output's text, so it has no id. The API wants one, and any will do.
    return {"role": "tool", "tool_call_id": answered.tool, "content": answered.content}


def status(call: protocols.ToolCall | None, message: protocols.Message) -> tuple[str, protocols.ToolStatus] | None:
    """Returns the tool's name and the outcome of its call. See `protocols.ReadsStatus`.

    The name of a tool whose calls are a part of the text is not on the wire. `agent` sends it as the call's id.
    """
    outcome = tool_results.status(call, message)
    return None if outcome is None else (message.tool_call_id or arithmetic.TOOL, outcome[1])


def demonstration(task: protocols.Task) -> Sequence[protocols.Message]:
    """Returns the solved dialogue of a calculator's task, for the warm start."""
    return calculator.environment().demonstration(task)
