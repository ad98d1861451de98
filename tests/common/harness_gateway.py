"""A gateway over HTTP for whole rollouts of harnesses, and the run of one."""

from __future__ import annotations

import contextlib
import secrets

import session_doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import chat_format, tokenizers
from libra_jax.harness.gateway import server
from libra_jax.rollouts import harness_loop, loop

LIMITS = loop.Limits(max_turns=4, max_tokens=40, max_context=160, tool_seconds=60.0, temperature=1.0)


class Gateway(protocols.Gateway, protocols.Conversations):
    """Serves sessions in the event loop of the test."""

    model = "policy"

    def __init__(self, url: str = "") -> None:
        self._sessions: dict[str, protocols.Conversation] = {}
        self._url = url

    def find(self, secret: str) -> protocols.Conversation | None:
        return self._sessions.get(secret)

    async def open(self, conversation: protocols.Conversation, secret: str = "", reachable=None) -> protocols.Endpoint:
        secret = secret or secrets.token_hex(8)
        self._sessions[secret] = conversation
        return protocols.Endpoint(self._url, secret, self.model)

    async def close(self, endpoint: protocols.Endpoint) -> None:
        del self._sessions[endpoint.secret]


@contextlib.asynccontextmanager
async def serving():
    """Yields what sessions need."""
    gateway = Gateway()
    serving = server.GatewayServer(gateway, config_lib.GatewayConfig())
    gateway._url = await serving.start()
    try:
        yield harness_loop.SessionResources(gateway, lambda: chat_format.CharacterFormat(session_doubles.CHARACTERS))
    finally:
        await serving.stop()


async def play(made, task, host, write, limits=LIMITS):
    """Runs one rollout of a harness whose model writes by a function of its context."""
    trajectory = protocols.Trajectory(f"{task.prompt_id}/0", task.prompt_id)
    return await harness_loop.run_harness(
        loop.RolloutSetup(
            trajectory=trajectory,
            task=task,
            tokenizer=tokenizers.CharacterTokenizer(),
            sampler=session_doubles.Writer(write),
            limits=limits,
        ),
        made,
        host,
    )
