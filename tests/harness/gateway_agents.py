"""An agent for runs whose gateway is killed: three requests, one of them after its history was rewritten."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import openai

from libra_jax import protocols

RETRIES = 12
"""Retries of a request, with up to eight seconds between two: a gateway takes a while to come back."""


async def agent(task: protocols.Task, endpoint: protocols.Endpoint, log: str = "", seconds: float = 0.0) -> Any:
    """Asks, answers as a tool, rewrites its history and asks again. Logs what it was told, one line a request."""
    client = openai.AsyncOpenAI(
        base_url=endpoint.url,
        api_key=endpoint.secret,
        max_retries=RETRIES,
        # Certificates, which plain HTTP does not need, take longer to load than all requests take together.
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )
    say = {"role": "user", "content": f"task {task.prompt_id}"}

    async def ask(*messages: dict[str, str]) -> dict[str, str]:
        answer = await client.chat.completions.create(model=endpoint.model, messages=list(messages), logprobs=True)
        content = answer.choices[0].message.content or ""
        if log:
            with open(log, "a") as file:  # noqa: ASYNC230  (a line is short)
                file.write(f"{endpoint.url} {task.prompt_id} {content!r}\n")
        return {"role": "assistant", "content": content}

    try:
        first = await ask(say)
        await asyncio.sleep(seconds)
        second = await ask(say, first, {"role": "tool", "tool_call_id": "x", "content": "12"})
        await ask(say, {"role": "user", "content": "so far: 12"})
        return {"reward": float(len(second["content"]) % 2)}
    finally:
        await client.close()


def program() -> None:
    """The same as a program of its own, which may be killed. Prints its verdict."""
    import json

    task = protocols.Task(json.loads(Path(os.environ["LIBRA_TASK_FILE"]).read_text())["prompt_id"], {})
    endpoint = protocols.Endpoint(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], "policy")
    print(json.dumps(asyncio.run(agent(task, endpoint))))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program()
