"""Clients of PyPI and npm, unmodified at their defaults, each through a whole rollout over HTTP.

The policy is scripted, and all else is a run's own: the gateway, the session, a chat template with tools, and vLLM's
parser of calls. What each test asks: the client's loop ends with what its tool returned, the rollout is one segment,
and the trained tokens are those that were sampled and read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import chat_templates
import harness_gateway
import harness_interpreters
import pytest

from libra_jax import config as config_lib
from libra_jax import harness, protocols
from libra_jax.chat import chat_format, tokenizers
from libra_jax.harness.gateway import server
from libra_jax.rollouts import harness_loop, loop

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.drill]

HERE = Path(__file__).parent / "clients"
LIMITS = loop.Limits(
    max_turns=12, max_tokens=2_000, max_context=600_000, tool_seconds=150.0, temperature=1.0, reset_seconds=150.0
)


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def returned(context: str) -> str:
    """The number in what was added after the last output."""
    last = context.rpartition("</tool_call>")[2]
    return re.findall(r"\b(?:42|97531)\b", last)[-1]


TITLE = "Generate a concise, sentence-case title"
"""Of a dialogue of its own, in which Claude Code asks for the name of its session."""

Script = Sequence[str | Callable[[str], str]]
ADDS: Script = ("Let me add.\n" + call("add", a=17, b=25), lambda context: f"The answer is {returned(context)}.")


def then(name: str, **arguments: object) -> Script:
    """Adds, and then calls a tool with the sum instead of None."""
    return (
        ADDS[0],
        lambda context: call(
            name, **{key: int(returned(context)) if value is None else value for key, value in arguments.items()}
        ),
    )


@dataclass
class Policy:
    """A sampler that writes the outputs of a script in turn, and their number of tokens."""

    tokenizer: protocols.Tokenizer
    script: Script
    sampled: int = 0
    outputs: int = 0
    asides: int = 0

    async def sample(self, segment, sampling, on_tokens=None):
        context = self.tokenizer.decode(list(segment.context()))
        if TITLE in context:
            write, self.asides = '{"title": "Read a number"}', self.asides + 1
        else:
            write = self.script[min(self.outputs, len(self.script) - 1)]
            self.outputs += 1
        text = write if isinstance(write, str) else write(context)
        tokens = [*self.tokenizer.encode(text), self.tokenizer.stop_token_ids[0]]
        for at in range(0, len(tokens), 7):
            piece = tuple(tokens[at : at + 7])
            segment.append_sampled(protocols.TokenDelta(piece, (-0.5,) * len(piece), (1,) * len(piece)))
            self.sampled += len(piece)
            if on_tokens is not None:
                on_tokens()
            await asyncio.sleep(0)
        return "stop"

    async def tool_called(self, segment):
        pass

    async def tool_returned(self, segment, causal_state):
        pass


@dataclass(frozen=True)
class Client:
    """A client, and what the policy writes for it.

    Attributes:
      venv: name of its virtual environment (`bash launch/harness.sh`), or of its folder of JavaScript packages.
      command: words of its command; `{python}` and `{node}` stand for the environment.
      script: what the policy writes.
      tool: the tool that the first output calls.
    """

    venv: str
    command: tuple[str, ...]
    script: Script = ADDS
    tool: str = "add"
    answer: str = "42"
    variables: tuple[tuple[str, str], ...] = ()


def python(venv: str, name: str, script: Script = ADDS, tool: str | None = "add") -> Client:
    return Client(venv, ("{python}", str(HERE / "python_clients.py"), name), script, tool)


def javascript(name: str, script: Script = ADDS) -> Client:
    return Client("javascript", ("node", str(HERE / "javascript_clients.mjs"), name), script)


READ = "Read the number in data.txt, and tell me."


def shell(name: str, **arguments: object) -> Script:
    """Reads the file by a command, and answers."""
    return ("I read it.\n" + call(name, **arguments), lambda context: f"It is {returned(context)}.")


def coding(name: str, command: tuple[str, ...], script: Script) -> Client:
    tool = re.search(r'"name": "(\w+)"', script[0])[1]
    return Client("javascript", command, script, tool, "97531")


SUBMITS = (
    call("bash", command="cat data.txt"),
    lambda context: call("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {returned(context)}"),
)
CODEX = (
    "--skip-git-repo-check",
    "-c", "model_provider=libra",
    "-c", 'model_providers.libra={name="libra",base_url="URL",env_key="OPENAI_API_KEY",wire_api="responses"}',
    "-m", "policy",
    "--dangerously-bypass-approvals-and-sandbox",
)  # fmt: skip

CLIENTS = {
    "openai_agents": python("clients", "openai_agents"),
    "openai_agents_typed": python(
        "clients", "openai_agents_typed", (ADDS[0], lambda context: f'{{"value": {returned(context)}}}')
    ),
    "pydantic_ai": python("clients", "pydantic_ai", then("final_result", value=None)),
    "langchain": python("clients", "langchain"),
    "langchain_anthropic": python("clients", "langchain_anthropic"),
    "smolagents": python("clients", "smolagents", then("final_answer", answer=None)),
    "instructor": python("clients", "instructor", (call("Answer", value=42),), None),
    "anthropic_runner": python("clients", "anthropic_runner"),
    "strands": python("clients_2", "strands"),
    "agno": python("clients_2", "agno"),
    "llama_index": python("clients_2", "llama_index"),
    "litellm": python("clients_2", "litellm"),
    "mini_swe_agent": dataclasses.replace(
        python("clients_2", "mini_swe_agent", SUBMITS, "bash"), answer="'submission': '97531"
    ),
    "codex": coding(
        "codex", ("{node}/node_modules/.bin/codex", "exec", *CODEX, READ), shell("exec_command", cmd="cat data.txt")
    ),
    "claude_code": coding(
        "claude_code",
        ("{node}/node_modules/.bin/claude", "-p", READ, "--allowedTools", "Bash"),
        shell("Bash", command="cat data.txt", description="Reads."),
    ),
    "qwen_code": coding(
        "qwen_code",
        ("{node}/node_modules/.bin/qwen", "--yolo", "-p", READ),
        shell("run_shell_command", command="cat data.txt", is_background=False),
    ),
    "aider": Client(
        "aider",
        (
            "{python}",
            "-m",
            "aider",
            "--model",
            "openai/policy",
            "--yes",
            "--no-git",
            "--message",
            "Write 7 to data.txt",
            "data.txt",
        ),
        ("data.txt\n```\n7\n```\n",),
        None,
        "Applied edit to data.txt",
    ),
    "openai_node": javascript("openai_node"),
    "ai_sdk": javascript("ai_sdk"),
    "ai_sdk_compatible": javascript("ai_sdk_compatible"),
    "ai_sdk_anthropic": javascript("ai_sdk_anthropic"),
    "openai_agents_js": javascript("openai_agents_js"),
    "anthropic_node": javascript("anthropic_node"),
    "langgraph_js": javascript("langgraph_js"),
}


def judge(finished) -> float:
    judge.seen = finished
    return 1.0


def play(client: Client, tmp_path) -> tuple[protocols.Trajectory, Policy]:
    """Runs one rollout of a client."""
    folder = Path(os.environ.get("LIBRA_JAX_HARNESSES", harness_interpreters.ROOT / ".venv")) / f"harness-{client.venv}"
    if client.venv == "javascript":
        if not folder.exists():
            pytest.skip(f"there is no {folder}: bash launch/harness.sh javascript makes it")
        words = {"{python}": "", "{node}": str(folder)}
    else:
        words = {"{python}": harness_interpreters.python(client.venv), "{node}": ""}
    command = [words.get(word, word) for word in client.command]
    command = [word.replace("{node}", str(folder)).replace('"URL"', '"{url}"') for word in command]
    tokenizer = tokenizers.load(chat_templates.save(tmp_path / "tokenizer", chat_templates.PLAIN), incremental=False)
    from libra_jax.engines import vllm_parsers

    form = chat_format.HuggingFaceFormat(tokenizer, vllm_parsers.parsing(tokenizer, "hermes", ""))
    policy = Policy(tokenizer, client.script)
    made = harness.environment(
        command=command,
        score=f"{__name__}:judge",
        seconds=140.0,
        files="files",
        variables={"LIBRA_JAX_NODE": str(folder), "TERM": "dumb", **dict(client.variables)},
    )
    task = protocols.Task("drill", {"files": {"data.txt": "97531\n"}})
    trajectory = protocols.Trajectory("drill/0", "drill")

    async def main() -> None:
        gateway = harness_gateway.Gateway()
        serving = server.GatewayServer(gateway, config_lib.GatewayConfig())
        gateway._url = await serving.start()
        host = harness_loop.SessionResources(gateway, lambda: form)
        try:
            await harness_loop.run_harness(
                loop.RolloutSetup(trajectory=trajectory, task=task, tokenizer=tokenizer, sampler=policy, limits=LIMITS),
                made,
                host,
            )
        finally:
            await serving.stop()
            print("asked for and not given:", dict(host.remarks))

    asyncio.run(main())
    return trajectory, policy


@pytest.mark.parametrize("name", CLIENTS)
def test_an_unmodified_client_ends_its_loop_in_one_segment(name, tmp_path):
    client = CLIENTS[name]
    trajectory, policy = play(client, tmp_path)
    assert client.answer in judge.seen.output
    assert len(trajectory.segments) == 1 + policy.asides
    assert sum(sum(segment.loss_mask) for segment in trajectory.segments) == policy.sampled
    if client.tool:
        (main,) = (segment for segment in trajectory.segments if segment.turns[0].tool)
        assert (main.turns[0].tool, main.turns[0].status) == (client.tool, "success")
