"""Environments served by OpenEnv (github.com/meta-pytorch/OpenEnv). Each rollout has its own WebSocket session.

The server already runs, and only its address is needed. The observation after an action is shown as a tool's return, so
it is a causal state too. An action that the server's schema refuses is a failure and costs a step. It is an
infrastructure failure if the server dies or hangs, or if its environment raises.

    config.task.source = "libra_jax.environments.episodes:task_source"
    config.task.environment = "libra_jax.environments.openenv:environment"
    config.task.environment_arguments = {"url": "http://localhost:8000", "field": "message", "max_steps": 4}

The protocol is that of openenv-core 0.3. The client sends {"type": "reset", "data": {"seed": 1}}, {"type": "step",
"data": ACTION} and {"type": "close"} to URL/ws. The server answers {"type": "observation", "data": {"observation":
{...}, "reward": 0, "done": false}} or {"type": "error", "data": {"message": "...", "code": "..."}}.

The client of that package is not used. Importing it needs fastmcp and the whole server, and installing it adds gradio.
It also turns errors into text and drops the details of a refused action.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import episodes, question
from libra_jax.utils import deadlines

TOOL = "openenv"
"""Name of the tool in returns."""

CONNECT_SECONDS = 10.0

CAPACITY_SECONDS = 60.0
"""Seconds that a rollout waits for a server whose sessions are all in use."""

CLOSE_SECONDS = 2.0

_LONGEST = 64 * 2**20
_OF_POLICY = ("VALIDATION_ERROR", "INVALID_JSON")
_FIELD = "task.environment_arguments"


@dataclass(frozen=True)
class OpenEnvSettings:
    """Address of the server, and the format of actions and observations. `environment` documents the fields."""

    address: str
    field: str
    constants: Mapping[str, Any]
    answer: str
    observe: str
    reward: str
    max_steps: int
    sessions: int
    arguments: Mapping[str, Any]


class _Refused(Exception):
    """The server answered with an error. `code` is the kind of error."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code", ""))
        details = [str(item.get("msg", item)) for item in data.get("errors", []) if isinstance(item, Mapping)]
        super().__init__("; ".join([str(data.get("message", "")), *details]))


@dataclass
class _OpenEnvSession:
    """A connection to the server. It uses one of the server's sessions until it is closed."""

    settings: OpenEnvSettings
    resources: contextlib.AsyncExitStack = dataclasses.field(default_factory=contextlib.AsyncExitStack)
    socket: Any = None

    async def reset(self, seed: int) -> Mapping[str, Any]:
        """Starts an episode. Waits if the server has no free session."""
        from websockets import exceptions
        from websockets.asyncio import client

        loop, settings = asyncio.get_running_loop(), self.settings
        # Counts the free sessions of the server.
        await self.resources.enter_async_context(deadlines.semaphore(settings.address, settings.sessions))
        due = loop.time() + CAPACITY_SECONDS
        while True:
            try:
                self.socket = await client.connect(
                    settings.address, open_timeout=CONNECT_SECONDS, close_timeout=CLOSE_SECONDS, max_size=_LONGEST
                )
                return await self.ask({"type": "reset", "data": {**settings.arguments, "seed": seed}})
            except (OSError, exceptions.WebSocketException) as error:
                raise self.crash(f"cannot be reached ({error or 'no answer'})") from error
            except _Refused as error:
                # The server may not have released a session that was closed a moment ago.
                if error.code != "CAPACITY_REACHED" or loop.time() > due:
                    raise self.crash(str(error)) from error
                await self._disconnect()
                await asyncio.sleep(0.2)

    async def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a message and returns the server's answer.

        Raises:
          EnvironmentCrashed: The connection was lost, or the reply is not valid.
          _Refused: The answer is an error.
        """
        from websockets import exceptions

        try:
            # An answer that the server sent before it closed can still be read.
            with contextlib.suppress(exceptions.ConnectionClosed):
                await self.socket.send(json.dumps(message))
            answer = json.loads(await self.socket.recv())
        except (OSError, exceptions.WebSocketException) as error:
            raise self.crash(f"was lost ({error})") from error
        except ValueError as error:
            raise self.crash(f"answered what is no JSON ({error})") from error
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, dict) or answer.get("type") not in ("observation", "error"):
            raise self.crash(f"answered {str(answer)[:80]!r}, which is no observation")
        if answer["type"] == "error":
            raise _Refused(data)
        return data

    def crash(self, what: str) -> protocols.EnvironmentCrashed:
        """Returns the error that says what the server did."""
        return protocols.EnvironmentCrashed(f"OpenEnv server {self.settings.address}: {what}")

    async def _disconnect(self) -> None:
        socket, self.socket = self.socket, None
        if socket is not None:
            # Each on its own: a connection that cannot send any more still has to be closed.
            with contextlib.suppress(Exception):
                await socket.send(json.dumps({"type": "close"}))
            with contextlib.suppress(Exception):
                await socket.close()

    async def close(self) -> None:
        """Ends the session, and lets another rollout use its place."""
        try:
            await self._disconnect()
        finally:
            await self.resources.aclose()


class OpenEnvEnvironment:
    """The environment of one rollout: an episode in its own session."""

    def __init__(self, settings: OpenEnvSettings, system: str) -> None:
        self._settings, self._system = settings, system
        self._session: _OpenEnvSession | None = None
        self._tally = episodes.EpisodeTally(settings.reward, settings.max_steps)

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Returns the system message, if any, and the first observation."""
        # A replay that differed resets the same environment again.
        await self.close()
        self._tally = episodes.EpisodeTally(self._settings.reward, self._settings.max_steps)
        self._session = _OpenEnvSession(self._settings)
        data = await self._session.reset(task.payload["seed"])
        return question.opening(self._observation_text(data), self._system)

    async def step(self, output: str) -> protocols.StepResult:
        """Takes the action in the output."""
        if self._session is None:
            raise RuntimeError("step before reset")
        loop = asyncio.get_running_loop()
        start = loop.time()
        text, problem = episodes.move(output, self._settings.answer), ""
        action: Any = {self._settings.field: text}
        if self._settings.answer == "json":
            try:
                action = json.loads(text)
                problem = "" if isinstance(action, dict) else "error: the action must be a JSON object"
            except (ValueError, RecursionError) as error:
                problem = f"error: the action is no JSON ({error})"
        data: Mapping[str, Any] = {}
        if not problem:
            try:
                data = await self._session.ask({"type": "step", "data": {**self._settings.constants, **action}})
            except _Refused as error:
                # Every other error is a failure of the server, not a mistake of the policy.
                if error.code not in _OF_POLICY:
                    raise self._session.crash(f"{error.code}: {error}") from error
                problem = f"error: {error}"
        seconds = loop.time() - start
        if problem:
            return self._tally.result(protocols.ToolReturn(TOOL, "failure", problem, seconds), None)
        # Servers send null as the reward of a step that has none.
        answer = protocols.ToolReturn(TOOL, "success", self._observation_text(data), seconds)
        return self._tally.result(answer, float(data.get("reward") or 0.0), over=bool(data.get("done")))

    def _observation_text(self, data: Mapping[str, Any]) -> str:
        observation, field_name = data.get("observation"), self._settings.observe
        if field_name:
            fields = observation if isinstance(observation, Mapping) else {}
            config_lib.check(
                field_name in fields,
                f"{_FIELD}.observe",
                f"the server's observations have no {field_name!r}; they have {', '.join(fields) or 'no fields'}",
            )
            observation = fields[field_name]
        return observation if isinstance(observation, str) else json.dumps(observation)

    async def close(self) -> None:
        """Ends the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def environment(
    url: str,
    field: str = "message",
    constants: Mapping[str, Any] | None = None,
    answer: str = "final",
    observe: str = "",
    reward: str = "return",
    max_steps: int = 0,
    sessions: int = 8,
    arguments: Mapping[str, Any] | None = None,
    system: str = "",
) -> OpenEnvEnvironment:
    """Returns the environment for one rollout.

    Args:
      url: Address of the server, for example "http://localhost:8000".
      field: Field of the action that holds the policy's text.
      constants: Further fields of each action.
      answer: Part of an output that is the action: "final" (its final answer), "whole" (everything but thoughts) or
        "json" (the final answer, as a JSON object with all fields of an action).
      observe: Field of observations that is shown. Empty: all fields, as JSON.
      reward: Reward of the rollout: "return" (the sum of the rewards) or "last" (the last reward alone).
      max_steps: Number of actions after which the episode is cut off with its reward so far. 0: only the server ends
        the episode. Set at most `task.max_turns`, because a rollout that runs out of turns has reward 0.
      sessions: Number of rollouts that use the server at once. The server must allow as many (`max_concurrent_envs`).
        Further rollouts wait in their reset, and crash after `task.reset_seconds`. Set that longer than an episode, or
        raise `sessions`.
      arguments: Further arguments of the server's `reset`, besides the seed.
      system: System message. Empty means none.
    """
    try:
        import websockets.asyncio.client  # noqa: F401 - here: it is optional, and is missed before a run
    except ModuleNotFoundError as error:
        raise protocols.ConfigError(
            "config.task.environment: OpenEnv needs the package websockets; pip install 'websockets>=15'"
        ) from error
    parts = urllib.parse.urlsplit(url)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    config_lib.check(
        parts.scheme in schemes and bool(parts.netloc), f"{_FIELD}.url", f"{url!r} must be of the form http://HOST:PORT"
    )
    config_lib.check_choice(answer, ("final", "whole", "json"), f"{_FIELD}.answer")
    episodes.check_reward(reward, max_steps)
    config_lib.check(sessions > 0, f"{_FIELD}.sessions", f"must be positive, not {sessions}")
    address = f"{schemes[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}/ws"
    settings = OpenEnvSettings(
        address, field, dict(constants or {}), answer, observe, reward, max_steps, sessions, dict(arguments or {})
    )
    return OpenEnvEnvironment(settings, system)
