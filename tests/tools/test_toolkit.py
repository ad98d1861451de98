"""The tools of a run: from the config to each attempt's own, and mistakes in the config told before anything starts."""

import asyncio
import sys
import types
from typing import ClassVar

import pytest
import sandboxes

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rollouts import factories
from libra_jax.tools import toolkit


class Echo:
    """Says its text again."""

    name = "echo"
    description = "Says it again."
    parameters: ClassVar = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def __init__(self, prefix=""):
        self.prefix = prefix

    async def call(self, arguments):
        return protocols.ToolReturn(self.name, "success", self.prefix + arguments["text"])


class Server:
    """Offers two echoes while it is open; writes down what befell it."""

    def __init__(self, hang=False):
        self.events, self.hang = [], hang
        Server.last = self

    async def open(self):
        if self.hang:
            await asyncio.Event().wait()
        self.events.append("open")

    def tools(self):
        assert self.events == ["open"]
        return [Echo("a"), Other("b")]

    async def close(self):
        self.events.append("close")


class Other(Echo):
    name = "other"


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    module = types.ModuleType("my_tools")
    module.Echo, module.Server = Echo, Server
    module.text_only = lambda tools, system="": None
    module.without_tools = lambda: None
    monkeypatch.setitem(sys.modules, "my_tools", module)


def settings(**tools):
    return config_lib.ToolsConfig(**tools), config_lib.SandboxConfig(warm=1, memory_mib=256)


def within(work, **tools):
    """Runs `work(toolkit)` in an open toolkit."""

    async def body():
        async with toolkit.Toolkit(*settings(**tools)) as opened:
            return await work(opened)

    return asyncio.run(body())


def test_a_users_tool_is_named_by_its_factory_and_given_its_arguments():
    async def work(opened):
        box = await opened.toolbox()
        return await box.call("echo", {"text": "hello"})

    answer = within(work, use=("my_tools:Echo",), arguments={"my_tools:Echo": {"prefix": ">"}})
    assert (answer.status, answer.content) == ("success", ">hello")


def test_what_attempts_share_is_opened_once_and_closed_once():
    async def work(opened):
        boxes = [await opened.toolbox() for _ in range(3)]
        for box in boxes:
            await box.close()
        return [schema["function"]["name"] for schema in boxes[0].schemas()]

    assert within(work, use=("my_tools:Server",)) == ["echo", "other"]
    assert Server.last.events == ["open", "close"]


def test_what_does_not_open_in_time_ends_with_a_sentence_that_names_it(monkeypatch):
    monkeypatch.setattr(toolkit, "OPEN_SECONDS", 0.05)
    with pytest.raises(protocols.ConfigError, match=r"config\.tools\.use: my_tools:Server did not open within 0\.05 s"):
        within(None, use=("my_tools:Server",), arguments={"my_tools:Server": {"hang": True}})
    assert Server.last.events == ["close"]


def test_attempts_have_sandboxes_of_their_own_and_one_attempts_tools_share_it():
    sandboxes.skip_without_bubblewrap()

    async def work(opened):
        first, second = await opened.toolbox(), await opened.toolbox()
        await first.call("python", {"code": "open('note', 'w').write('mine')"})
        answers = [await box.call("shell", {"command": "cat note"}) for box in (first, second)]
        await first.close()
        await second.close()
        return answers

    own, others = within(work, use=("python", "shell"))
    assert (own.status, own.content) == ("success", "mine")
    assert others.status == "failure"


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ({"use": ("pyton",)}, r"tools\.use: there is no tool 'pyton'; there are python, shell, edit"),
        ({"use": ("my_tools:Ecko",)}, r"tools\.use: my_tools has no 'Ecko'; did you mean 'Echo'"),
        ({"use": ("python", "python")}, r"tools\.use: names 'python' twice"),
        ({"arguments": {"python": {}}}, r"tools\.arguments: has 'python', which tools\.use does not name"),
        (
            {"mcp": {"mcpServers": {"clock": {"command": "x"}}}},
            r"tools\.mcp: has 'clock', which tools\.use does not",
        ),
        ({"use": ("python",), "arguments": {"python": {"speed": 1}}}, r"tools\.arguments\.python: .*'speed'"),
        (
            {"use": ("my_tools:Echo",), "arguments": {"my_tools:Echo": {"suffix": ""}}},
            r"tools\.arguments\.my_tools:Echo",
        ),
        ({"format": "xml"}, r"tools\.format: 'xml' is not one of hermes, tags"),
        ({"parallel": 0}, r"tools\.parallel: must be positive, not 0"),
    ],
)
def test_a_mistake_in_the_config_is_a_sentence_that_names_the_field(tools, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        toolkit.Toolkit(*settings(**tools))


def test_two_tools_of_one_name_are_found_before_a_run():
    with pytest.raises(protocols.ConfigError, match="two tools have the name 'echo'"):
        within(None, use=("my_tools:Echo", "my_tools:Server"))


def test_tools_that_no_environment_offers_are_refused():
    made = toolkit.Toolkit(*settings(use=("my_tools:Echo",)))
    factories.environment_factory(config_lib.TaskConfig(environment="my_tools:text_only"), made)
    with pytest.raises(protocols.ConfigError, match=r"tools\.use: names my_tools:Echo, but my_tools:without_tools"):
        factories.environment_factory(config_lib.TaskConfig(environment="my_tools:without_tools"), made)
    task = config_lib.TaskConfig(environment="my_tools:text_only", environment_arguments={"tools": 1})
    with pytest.raises(protocols.ConfigError, match=r"environment_arguments: must not hold 'tools'"):
        factories.environment_factory(task, made)


class PlainCall(Echo):
    def call(self, arguments):
        return arguments["text"]


class PlainInSandbox(PlainCall):
    def __init__(self, session):
        self.session = session


@pytest.mark.parametrize("kind", [PlainCall, PlainInSandbox])
def test_a_plain_call_is_refused_when_the_toolkit_is_made_as_a_dry_run_does(kind):
    sys.modules["my_tools"].Plain = kind
    with pytest.raises(
        protocols.ConfigError, match=r"call of the tool '.*'.* is no async method; write async def call"
    ):
        toolkit.Toolkit(*settings(use=("my_tools:Plain",)))
