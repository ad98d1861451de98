"""The tools of a run. They are made from the config once and opened once. Each rollout gets its own toolbox of them.

async with toolkit.Toolkit(config.tools, config.sandbox) as tools:
    box = await tools.toolbox()
    print(await box.call("python", {"code": "6 * 7"}))
    await box.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast, runtime_checkable

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import formats
from libra_jax.tools import mcp_connection, mcp_server, toolbox
from libra_jax.tools.sandbox import pool
from libra_jax.utils import deadlines, resolving, user_code

SHORT_NAMES = {
    "python": "libra_jax.tools.workspace:Python",
    "shell": "libra_jax.tools.workspace:Shell",
    "edit": "libra_jax.tools.workspace:Edit",
    "search": "libra_jax.tools.search:Search",
    "calculator": "libra_jax.tools.arithmetic:Calculator",
}
"""Factories of the tools that come with the package, by short name."""

OPEN_SECONDS = 300.0
"""Seconds that a tool may take to open, for example to start a server.

A tool sets `open_seconds` if it needs longer.
"""

CLOSE_SECONDS = 30.0


class Resource(Protocol):
    """Something that a run opens once and closes at its end."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


R = TypeVar("R", bound=Resource)


@runtime_checkable
class Shared(Resource, Protocol):
    """A resource that all rollouts of a run share, such as an index or a server. It is open for the whole run.

    A factory without a parameter `session` makes a `Shared` or a plain `toolbox.Tool`, once per run.
    """

    def tools(self) -> Sequence[toolbox.Tool]:
        """Returns the tools that the resource offers. Call it after `open`."""
        ...


@runtime_checkable
class ReadsFiles(Protocol):
    """A tool or a `Shared` that reads files when it opens."""

    def missing(self) -> list[str]:
        """Returns a sentence for each file that is not on this machine."""
        ...


class Toolkit:
    """The tools that a config names. Belongs to one event loop. `async with` opens and closes what the tools share.

    Args:
      tools: Names of the tools, their arguments, and the format of calls.
      sandbox: Settings of the sandboxes where code runs.
      call_seconds: Seconds that an environment may give the calls of one step (`config.TaskConfig.call_seconds`).
        Infinite means as long as the environment's caller waits.

    Attributes:
      names: Names of the tools, as the config has them.
      format: Format in which the policy writes calls.
      describe: Whether the system message describes the tools.
      parallel: Number of calls of one output that are run.
      call_seconds: The argument.
      schemas: Schemas of the tools, as chat templates take them. Empty until the toolkit is open.
    """

    def __init__(
        self, tools: config_lib.ToolsConfig, sandbox: config_lib.SandboxConfig, call_seconds: float = math.inf
    ) -> None:
        self._config, self._sandbox_config = tools, sandbox
        self.call_seconds = call_seconds
        self.names = tools.use
        self.format = formats.named(tools.format)
        self.describe, self.parallel = tools.describe, tools.parallel
        self._servers = mcp_connection.entries(tools)
        # A file may list servers for other programs too, so unused entries of a file are no error.
        config_servers = [name for name, entry in self._servers.items() if entry.in_config]
        for field, named in (("tools.arguments", list(tools.arguments)), ("tools.mcp", config_servers)):
            for name in named:
                config_lib.check(name in tools.use, field, f"has {name!r}, which tools.use does not name")
        self.schemas: list[dict[str, Any]] = []
        self._of_session: list[Callable[[pool.SandboxSession], toolbox.Tool]] = []
        self._shared: list[tuple[str, Shared | toolbox.Tool]] = []
        for name in tools.use:
            self._add(name)
        self._sandbox: pool.Sandbox | None = None
        self._resources: dict[object, Resource] = {}
        self._starting = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()

    def _add(self, name: str) -> None:
        arguments, field = dict(self._config.arguments.get(name, {})), f"tools.arguments.{name}"
        if name in self._servers:
            self._shared.append((name, mcp_server.McpServer(name, self._servers[name], arguments)))
            return
        config_lib.check(
            ":" in name or name in SHORT_NAMES,
            "tools.use",
            f"there is no tool {name!r}; there are {', '.join((*SHORT_NAMES, *self._servers))}, and your own as "
            '"package.module:factory"',
        )
        full = SHORT_NAMES.get(name, name)
        factory = resolving.resolve(full, "tools.use")
        # A factory asks for the sandbox of the rollout by having this parameter.
        if "session" not in inspect.signature(factory).parameters:
            product = resolving.call(factory, full, arguments, field)
            if not isinstance(product, Shared):
                toolbox.check_kind(product)
            self._shared.append((name, product))
            return
        if inspect.isclass(factory):  # its tools are made with the first sandbox, and a dry run starts none
            toolbox.check_call(getattr(factory, "call", None), repr(name))
        resolving.check_arguments(factory, full, {"session": None, **arguments}, field)
        self._of_session.append(lambda session: resolving.call(factory, full, {"session": session, **arguments}, field))

    async def __aenter__(self) -> Self:
        try:
            if self._of_session:
                await self.sandbox()
            for name, shared in self._shared:
                if isinstance(shared, Shared):
                    # Registered before opening, so that a half-opened resource is closed too.
                    self._stack.push_async_callback(_close, shared)
                    seconds = getattr(shared, "open_seconds", OPEN_SECONDS)
                    with resolving.named(name, "tools.use", "open"):
                        try:
                            await deadlines.cancel_after(seconds, deadlines.call(shared.open))
                        except deadlines.Overdue:
                            raise protocols.ConfigError(
                                f"config.tools.use: {name} did not open within {seconds:g} s; see that it can start on "
                                "this machine"
                            ) from None
            box = await self.toolbox()  # finds a duplicate tool name or a broken schema before the run begins
            self.schemas = box.schemas()
            await box.close()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def missing(self) -> list[str]:
        """Returns a sentence for each file that the tools read and that is not on this machine."""
        return [
            sentence for _, shared in self._shared if isinstance(shared, ReadsFiles) for sentence in shared.missing()
        ]

    async def sandbox(self) -> pool.Sandbox:
        """Returns the run's sandbox pool. The first call starts it."""
        async with self._starting:
            # Under the lock, or two rollouts that begin at once would start two pools.
            if self._sandbox is None:
                settings = self._sandbox_config
                sandbox = pool.Sandbox(
                    settings.limits(),
                    settings.backend,
                    allow_unsafe=settings.allow_unsafe,
                    warm=settings.warm,
                    most=settings.most,
                    packages=settings.packages,
                    image=settings.image,
                )
                self._sandbox = await self._stack.enter_async_context(sandbox)
        return self._sandbox

    async def open_once(self, key: object, make: Callable[[], R]) -> R:
        """Returns a resource that the run's environments share besides tools, such as processes that check answers.

        Args:
          key: Key of the resource. Each key has one resource.
          make: Makes the resource at the first call with this key. It is opened then, and closed with the tools.
        """
        async with self._starting:
            if key not in self._resources:
                resource = make()
                # Registered before opening, so that a half-opened resource is closed too.
                self._stack.push_async_callback(_close, resource)
                await deadlines.cancel_after(OPEN_SECONDS, deadlines.call(resource.open))
                self._resources[key] = resource
        return cast(R, self._resources[key])

    def system_message(self, system: str) -> str:
        """Returns a system message with the description of the tools after it, if the config wants tools described."""
        instructions = self.format.instructions(self.schemas) if self.schemas and self.describe else ""
        return "\n\n".join(part for part in (system, instructions) if part)

    async def toolbox(self, *, session: bool = False) -> toolbox.Toolbox:
        """Returns the tools for one rollout. The caller closes the toolbox.

        Args:
          session: Whether the rollout needs a sandbox even if no tool does.
        """
        # A session takes its sandbox at the first call, so a rollout that calls no such tool holds none.
        sandbox_session = (await self.sandbox()).session() if session or self._of_session else None
        tools = [make(sandbox_session) for make in self._of_session if sandbox_session is not None]
        in_session = [tool.name for tool in tools]
        with user_code.contain_exits():
            for _, shared in self._shared:
                tools += shared.tools() if isinstance(shared, Shared) else [shared]
        return toolbox.Toolbox(tools, self._config.most_characters, sandbox_session, in_session)


async def _close(shared: Resource) -> None:
    """Closes a resource and ignores errors.

    The run is over, so a resource that does not close ends with the process.
    """
    with contextlib.suppress(Exception):
        await deadlines.cancel_after(CLOSE_SECONDS, deadlines.call(shared.close))
