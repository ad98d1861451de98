"""Tools of MCP servers: one from a public package, and one that does what servers should not."""

import asyncio
import contextlib
import gzip
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import endless
import psutil
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools import mcp_connection, mcp_server, toolbox, toolkit
from libra_jax.utils import deadlines, parent_death

pytest.importorskip("mcp")

FAULTY = [sys.executable, str(Path(__file__).parents[1] / "common" / "mcp_faulty.py")]
STARTS_FAULTY = {"command": FAULTY[0], "args": FAULTY[1:]}


def made(entry, **arguments):
    """A server of an entry of the config."""
    return mcp_server.McpServer("odd", mcp_connection.Entry(entry, "tools.mcp.mcpServers.odd"), arguments)


@contextlib.asynccontextmanager
async def opened(entry=STARTS_FAULTY, **arguments):
    """A server and its toolbox; by default the faulty one over pipes."""
    server = made(entry, **arguments)
    try:
        await server.open()
        yield server, toolbox.Toolbox(server.tools(), 2000)
    finally:
        await server.close()


async def identity(box):
    """The server's process."""
    return int((await box.call("who", {})).content.split()[0])


async def restarted(server, seconds=20.0):
    """Waits until it has been started again."""
    due = time.monotonic() + seconds
    while not server.restarts and time.monotonic() < due:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.05)


def gone(pid, seconds=5.0):
    """Whether the process ends in time."""
    due = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > due:
            return False
        time.sleep(0.02)
    return True


def test_a_server_nobody_here_wrote_is_a_tool_by_config_alone():
    if not shutil.which("mcp-server-time", path=os.path.dirname(sys.executable)):
        pytest.skip("needs mcp-server-time")
    tools = config_lib.ToolsConfig(
        use=("time",),
        mcp={"mcpServers": {"time": {"command": "mcp-server-time", "args": ["--local-timezone=UTC"]}}},
        most_characters=4096,
    )

    async def body():
        async with toolkit.Toolkit(tools, config_lib.SandboxConfig()) as kit:
            box = await kit.toolbox()
            question = {"source_timezone": "UTC", "time": "16:30", "target_timezone": "Asia/Tokyo"}
            return (
                box.schemas(),
                await box.call("convert_time", question),
                await box.call("convert_time", {**question, "target_timezone": "Asia/Tokio"}),
                await box.call("convert_time", {"time": "16:30"}),
            )

    schemas, answer, mistaken, incomplete = asyncio.run(body())
    assert [schema["function"]["name"] for schema in schemas] == ["get_current_time", "convert_time"]
    assert schemas[1]["function"]["description"] == "Convert time between timezones"
    assert schemas[1]["function"]["parameters"]["required"] == ["source_timezone", "time", "target_timezone"]
    assert (answer.tool, answer.status) == ("convert_time", "success")
    assert json.loads(answer.content)["target"]["datetime"].endswith("T01:30:00+09:00")
    assert mistaken.status == "failure"
    assert "Asia/Tokio" in mistaken.content
    assert incomplete.content == "error: arguments: 'source_timezone' is a required property"


def test_what_tools_answer_is_data():
    async def body():
        async with opened({**STARTS_FAULTY, "env": {"COLOUR": "red"}}) as (_, box):
            os.environ["SECRET"] = "hunter2"
            try:
                calls = [("echo", {"text": "é\n2"}), ("fail", {"text": "on purpose"}), ("paint", {}), ("who", {})]
                return [await box.call(*call) for call in calls]
            finally:
                del os.environ["SECRET"]

    said, failed, painted, who = asyncio.run(body())
    assert (said.status, said.content) == ("success", "é\n2")
    assert failed.status == "failure"
    assert "on purpose" in failed.content
    assert painted.content == "look:\n[image of type image/png, which is not shown]"
    assert who.content.split()[1:] == ["red", "None"]
    assert all(answer.seconds > 0 for answer in (said, failed, painted, who))


def test_a_long_answer_is_cut_and_a_long_complaint_does_not_block_the_server():
    async def body():
        async with opened(seconds=20) as (_, box):
            return [await box.call("fill", {"characters": 3_000_000}) for _ in range(2)]

    for answer in asyncio.run(body()):
        assert answer.status == "success"
        assert len(answer.content) < 2100
        assert "characters left out" in answer.content


def test_calls_run_side_by_side():
    async def body():
        async with opened() as (_, box):
            began = time.monotonic()
            returns = await asyncio.gather(*(box.call("rest", {"seconds": 1.0}) for _ in range(10)))
            return [answer.content for answer in returns], time.monotonic() - began

    contents, seconds = asyncio.run(body())
    assert contents == ["rested"] * 10
    assert seconds < 10


def test_a_slow_tool_is_a_timeout_and_the_server_lives_on():
    async def body():
        async with opened(seconds=0.5) as (server, box):
            pid = await identity(box)
            slow, quick = await asyncio.gather(box.call("rest", {"seconds": 60}), box.call("echo", {"text": "a"}))
            await asyncio.sleep(0.3)  # for the probe
            return slow, quick, pid == await identity(box), server.restarts

    slow, quick, same, restarts = asyncio.run(body())
    assert (slow.status, slow.content) == ("timeout", "error: no answer within 0.5 s")
    assert quick.content == "a"
    assert (same, restarts) == (True, 0)


def test_a_server_that_answers_nothing_any_more_is_started_again(monkeypatch):
    monkeypatch.setattr(mcp_server, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(mcp_server, "PATIENCE_SECONDS", 30.0)

    async def body():
        async with opened(seconds=1) as (server, box):
            first = await identity(box)
            stuck = await box.call("block", {"seconds": 60})
            server._spec = mcp_connection.Spec(FAULTY[0], tuple(FAULTY[1:]), seconds=30)
            await restarted(server)
            return stuck, first, await identity(box)

    stuck, first, second = asyncio.run(body())
    assert stuck.status == "timeout"
    assert first != second
    assert gone(first)


def test_a_server_whose_hung_call_the_step_itself_cut_off_is_started_again(monkeypatch):
    monkeypatch.setattr(mcp_server, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(mcp_server, "PATIENCE_SECONDS", 30.0)

    async def body():
        async with opened(seconds=2) as (server, box):
            first = await identity(box)
            with pytest.raises(deadlines.Overdue):
                await deadlines.cancel_after(0.2, box.call("block", {"seconds": 60}))
            await restarted(server)
            server._spec = mcp_connection.Spec(FAULTY[0], tuple(FAULTY[1:]), seconds=30)
            return first, await identity(box)

    first, second = asyncio.run(body())
    assert first != second
    assert mcp_connection.Spec().seconds < config_lib.TaskConfig().tool_seconds


def test_what_a_server_may_take_to_start_is_not_bounded_by_what_tools_may():
    assert made(STARTS_FAULTY, start_seconds=900).open_seconds > 900


def test_secrets_come_from_variables_and_stay_out_of_the_config(monkeypatch):
    monkeypatch.setenv("MY_COLOUR", "green\n")

    async def body():
        async with opened({**STARTS_FAULTY, "env": {"COLOUR": "${MY_COLOUR}"}}) as (server, box):
            return repr(server._spec), (await box.call("who", {})).content

    spec, who = asyncio.run(body())
    assert who.split()[1] == "green"
    assert "green" not in spec


def test_death_loses_the_calls_of_the_moment_and_later_ones_find_a_new_server():
    async def body():
        async with opened(seconds=20) as (server, box):
            first = await identity(box)
            lost = await asyncio.gather(
                box.call("rest", {"seconds": 60}),
                box.call("rest", {"seconds": 60}),
                box.call("die", {}),
                return_exceptions=True,
            )
            return lost, first, await identity(box), server.restarts

    lost, first, second, restarts = asyncio.run(body())
    for error in lost:
        assert isinstance(error, protocols.WorkerLost)
        assert "MCP server odd was lost during a call" in str(error)
    assert first != second
    assert restarts == 1


def test_a_server_that_does_not_come_back_fails_calls_at_once_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(mcp_server, "RESTARTS", 2)
    monkeypatch.setattr(mcp_server, "BACKOFF_SECONDS", 0.01)
    script = tmp_path / "server.py"
    shutil.copy(FAULTY[1], script)

    async def body():
        async with opened({"command": sys.executable, "args": [str(script)]}, seconds=20) as (_, box):
            script.write_text("import sys\nsys.exit('the licence has run out')\n")
            with pytest.raises(protocols.WorkerLost):
                await box.call("die", {})
            due = time.monotonic() + 20
            while time.monotonic() < due:
                with pytest.raises(protocols.WorkerLost) as lost:
                    await box.call("echo", {"text": "a"})
                if "never answered" in str(lost.value):
                    return str(lost.value)
            return ""

    sentence = asyncio.run(body())
    assert sentence.startswith("MCP server odd was started 2 times in a row and never answered a call")
    assert "the licence has run out" in sentence


def test_closing_ends_the_server_and_whoever_waits():
    async def body():
        async with opened(seconds=20) as (server, box):
            pid = await identity(box)
            waiting = asyncio.create_task(box.call("rest", {"seconds": 60}))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await server.close()
            with pytest.raises(protocols.WorkerLost, match="closed"):
                await waiting
            with pytest.raises(protocols.WorkerLost, match="MCP server odd is closed"):
                await box.call("echo", {"text": "a"})
            return pid, time.monotonic() - began

    pid, seconds = asyncio.run(body())
    assert seconds < 10
    assert not psutil.pid_exists(pid)


def test_a_cancelled_call_leaves_the_server_usable():
    async def body():
        async with opened(seconds=20) as (server, box):
            for _ in range(3):
                task = asyncio.create_task(box.call("rest", {"seconds": 60}))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            return (await box.call("echo", {"text": "still here"})).content, server.restarts

    assert asyncio.run(body()) == ("still here", 0)


def test_a_server_dies_with_the_process_that_started_it(tmp_path):
    told = tmp_path / "pid"
    body = (
        "import pathlib, subprocess, sys, time\n"
        "from libra_jax.utils import parent_death\n"
        "child = subprocess.Popen(parent_death.command(['sleep', '600']))\n"
        f"pathlib.Path({str(told)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", body]) as parent:
        due = time.monotonic() + 20
        while not (told.exists() and told.read_text()) and time.monotonic() < due:
            time.sleep(0.02)
        pid = int(told.read_text())
        while psutil.Process(pid).name() != "sleep" and time.monotonic() < due:
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
    assert gone(pid)


def test_a_program_that_cannot_be_started_is_named():
    done = subprocess.run(parent_death.command(["/nowhere/server"]), capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr.strip()) == (1, "/nowhere/server: No such file or directory")


def test_a_server_s_pattern_does_not_hold_up_the_event_loop():
    async def body():
        async with opened() as (_, box):
            return await box.call("declare", {"text": "aaa"}), await box.call("declare", {"text": "a" * 40 + "!"})

    with endless.broken_off():
        good, bad = asyncio.run(body())
    assert (good.status, good.content) == ("success", "aaa")
    assert bad.status == "failure"
    assert "does not match '^(a+)+$'" in bad.content


# Over HTTP ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(port):
    """The faulty server on a port, once it listens."""
    with subprocess.Popen([*FAULTY, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            due = time.monotonic() + 30
            while time.monotonic() < due and process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                    break
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


class Bomb(http.server.BaseHTTPRequestHandler):
    """An MCP server whose one tool answers what gzip makes small."""

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, schema = message["method"], {"type": "object"}
        result = {
            "initialize": {
                "protocolVersion": message.get("params", {}).get("protocolVersion"),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "bomb", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "swell", "inputSchema": schema}]},
            "tools/call": {"content": [{"type": "text", "text": "a" * 2**23}]},
        }.get(method)
        body = {"jsonrpc": "2.0", "id": message.get("id")}
        body |= {"error": {"code": -32601, "message": "no such method"}} if result is None else {"result": result}
        packed = gzip.compress(json.dumps(body).encode())
        self.send_response(200 if "id" in message else 202)
        headers = {"content-type": "application/json", "content-encoding": "gzip", "content-length": str(len(packed))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(packed)

    def do_GET(self):
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, *_):
        pass


def test_a_compressed_answer_is_bounded_as_it_is_decompressed(monkeypatch):
    monkeypatch.setattr(mcp_connection, "LONGEST_ANSWER", 2**20, raising=False)

    async def body():
        async with opened({"url": f"http://127.0.0.1:{server.server_port}/"}) as (_, box):
            return await box.call("swell", {})

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bomb) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            answer = asyncio.run(body())
        finally:
            server.shutdown()
    assert answer.status == "failure"
    assert "longer than 1048576 bytes" in answer.content


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_server_over_http_answers_fails_dies_and_is_found_again(monkeypatch):
    monkeypatch.setattr(mcp_server, "PATIENCE_SECONDS", 10.0)
    monkeypatch.setattr(mcp_server, "RESTARTS", 1000)
    monkeypatch.setattr(mcp_server, "LONGEST_BACKOFF_SECONDS", 0.5)
    port = free_port()

    async def body():
        with contextlib.ExitStack() as stack:
            stack.enter_context(serving(port))
            server, box = await stack_async.enter_async_context(
                opened({"url": f"http://127.0.0.1:{port}/mcp"}, seconds=20)
            )
            returns = [await box.call("echo", {"text": "a"}), await box.call("fail", {"text": "on purpose"})]
            with pytest.raises(protocols.WorkerLost, match="was lost during a call"):
                await box.call("die", {})
        with serving(port):
            returns.append(await box.call("echo", {"text": "b"}))
            await stack_async.aclose()
        return returns, server.restarts

    stack_async = contextlib.AsyncExitStack()
    returns, restarts = asyncio.run(body())
    assert [answer.status for answer in returns] == ["success", "failure", "success"]
    assert "on purpose" in returns[1].content
    assert returns[2].content == "b"
    assert restarts >= 1


def test_a_header_from_a_variable_is_sent(monkeypatch):
    monkeypatch.setenv("MY_KEY", "s3cret\n")
    heads = []

    async def answer(reader, writer):
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def body():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/mcp"
            async with opened({"url": url, "headers": {"Authorization": "Bearer ${MY_KEY}"}}, start_seconds=5):
                pass

    with pytest.raises(protocols.ConfigError) as caught:
        asyncio.run(body())
    assert "authorization: bearer s3cret" in heads[0].lower()
    assert "s3cret" not in str(caught.value)


# Nonsense -----------------------------------------------------------------------------------------------------------


HERE = {"url": "http://here/mcp"}


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (["python"], r"config\.tools\.mcp\.mcpServers\.odd: must be a mapping, as"),
        ({}, r"mcpServers\.odd: needs either a command or a url"),
        ({**STARTS_FAULTY, **HERE}, r"mcpServers\.odd: needs either a command or a url"),
        ({"comand": "python"}, r"mcpServers\.odd: there is no 'comand'; did you mean 'command'\?"),
        ({"command": 3}, r"mcpServers\.odd\.command: must be a text, as 'mcp-server-time', not 3"),
        ({"command": "python", "args": ["-m", 3]}, r"mcpServers\.odd\.args: must be a list of texts, not"),
        ({"command": "mcp-server-tim"}, r"mcpServers\.odd\.command: there is no program 'mcp-server-tim'; install"),
        ({**STARTS_FAULTY, "cwd": "/nowhere"}, r"mcpServers\.odd\.cwd: there is no folder /nowhere"),
        ({**STARTS_FAULTY, "env": {"A": 1}}, r"mcpServers\.odd\.env: must be a mapping of texts"),
        (
            {**STARTS_FAULTY, "headers": {"a": "b"}},
            r"mcpServers\.odd\.headers: are for a url, and this server has",
        ),
        (
            {**HERE, "headers": {"authorization": "Bearer s3"}},
            r"must not hold 'authorization' in the clear, .*\$",
        ),
        (
            {**HERE, "headers": {"Authorization": "${MY_LOST_KEY}"}},
            r"mcpServers\.odd: refers to the environment variable MY_LOST_KEY, which is not set where the server is st",
        ),
        (
            {**HERE, "headers": {"a": "${input:key}"}},
            r"odd: \$\{input:key\} cannot be filled in here; write \$\{NA",
        ),
        ({"url": "localhost:8000"}, r"odd\.url: 'localhost:8000' must be of the form http://HOST:PORT/PATH"),
        ({**HERE, "cwd": "/tmp"}, r"mcpServers\.odd: args, env and cwd are for a command, and this server has a url"),
        (
            {**HERE, "type": "sse"},
            r"mcpServers\.odd\.type: 'sse' does not fit; a server of a command is of",
        ),
        ({**STARTS_FAULTY, "type": "http"}, r"mcpServers\.odd\.type: 'http' does not fit"),
        # The forms of before
        (
            {"command": ["serve", "-v"]},
            r"odd\.command: must be a text, and its arguments are apart: {'command': 'serve', 'args': \['-v'\]}",
        ),
        ({**STARTS_FAULTY, "env_from": {"A": "B"}}, r"odd: there is no 'env_from'; write {'env': {'KEY': '\$\{MY_"),
        (
            {**HERE, "headers_from": {"A": "B"}},
            r"odd: there is no 'headers_from'; write {'headers': {'Authorization'",
        ),
        (
            {**STARTS_FAULTY, "only": ["a"]},
            r"odd: there is no 'only'; write tools\.arguments = {NAME: {'only': \.\.",
        ),
        ({**STARTS_FAULTY, "timeout": 3}, r"odd: there is no 'timeout'; write tools\.arguments = {NAME: {'seconds': "),
    ],
)
def test_an_entry_that_cannot_be_used_is_refused(entry, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        made(entry)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"seconds": 0}, r"config\.tools\.arguments\.odd\.seconds: must be positive and finite, not 0"),
        ({"seconds": True}, r"config\.tools\.arguments\.odd\.seconds: must be a number, not True"),
        ({"prefix": 1}, r"config\.tools\.arguments\.odd\.prefix: must be True or False, not 1"),
        ({"onli": ["a"]}, r"config\.tools\.arguments\.odd: there is no 'onli'; did you mean 'only'\?"),
    ],
)
def test_an_argument_of_a_server_that_cannot_be_used_is_refused(arguments, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        made(STARTS_FAULTY, **arguments)


@pytest.mark.parametrize("key", ["mcpServers", "servers"])
def test_a_file_that_other_programs_have_names_servers(tmp_path, monkeypatch, key):
    monkeypatch.delenv("MY_COLOUR", raising=False)
    entry = {"type": "stdio", **STARTS_FAULTY, "env": {"COLOUR": "${MY_COLOUR:-blue}"}, "disabled": False}
    other = {"type": "http", "url": "https://other/mcp", "headers": {"Authorization": "Bearer in-the-clear"}}
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({key: {"odd": entry, "other": other}, "inputs": []}))
    tools = config_lib.ToolsConfig(use=("odd",), mcp_file=str(file), arguments={"odd": {"only": ["who"]}})

    async def body():
        async with toolkit.Toolkit(tools, config_lib.SandboxConfig()) as kit:
            box = await kit.toolbox()
            return [schema["function"]["name"] for schema in box.schemas()], await box.call("who", {})

    names, answer = asyncio.run(body())
    assert names == ["who"]
    assert answer.content.split()[1] == "blue"
    toolkit.Toolkit(config_lib.ToolsConfig(use=("other",), mcp_file=str(file)), config_lib.SandboxConfig())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"config\.tools\.mcp_file: .*mcp\.json cannot be read \(No such file or directory\)"),
        ("{'a'", r"config\.tools\.mcp_file: .*mcp\.json is no JSON \(.*line 1"),
        ("[]", r"config\.tools\.mcp_file: .*mcp\.json: must be of the form {\"mcpServers\": {"),
        ('{"odd": {}}', r"config\.tools\.mcp_file: .*mcp\.json: must be of the form {\"mcpServers\": {"),
        ('{"mcpServers": {"odd": {}}}', r"tools\.mcp_file: .*mcp\.json: mcpServers\.odd: needs either a command or"),
        (
            '{"mcpServers": {"here": {}}}',
            r"tools\.mcp_file: .*mcp\.json has the server 'here', which tools\.mcp has",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, text, sentence):
    file = tmp_path / "mcp.json"
    if text is not None:
        file.write_text(text)
    tools = config_lib.ToolsConfig(use=("odd", "here"), mcp={"mcpServers": {"here": HERE}}, mcp_file=str(file))
    with pytest.raises(protocols.ConfigError, match=sentence):
        toolkit.Toolkit(tools, config_lib.SandboxConfig())


def test_the_form_of_before_is_refused_with_the_present_one():
    with pytest.raises(protocols.ConfigError, match=r"config\.tools\.mcp: must be of the form {\"mcpServers\""):
        toolkit.Toolkit(config_lib.ToolsConfig(use=("odd",), mcp={"odd": STARTS_FAULTY}), config_lib.SandboxConfig())
    with pytest.raises(
        protocols.ConfigError, match=r"config\.tools\.servers: no such field; tools\.servers is now tools\.mcp"
    ):
        config_lib.parse(config_lib.RunConfig, {"tools": {"servers": {}}})


def test_a_package_whose_check_of_results_cannot_be_replaced_is_refused(monkeypatch):
    monkeypatch.delattr(mcp_connection.package().ClientSession, "validate_tool_result")
    with pytest.raises(protocols.ConfigError, match=r"has no ClientSession\.validate_tool_result, .* pip install"):
        made(STARTS_FAULTY)


def test_what_keeps_a_server_from_starting_is_said():
    async def body(entry, arguments):
        async with opened(entry, **arguments):
            pass

    def python(code):
        return {"command": sys.executable, "args": ["-c", code]}

    begins = r"config\.tools\.mcp\.mcpServers\.odd: "
    for entry, sentence, arguments in (
        (python("import sys; sys.exit('no key: set API_KEY')"), begins + ".*no key: set API_KEY", {}),
        (python("raise SystemExit(3)"), begins + "its command, .*python.*, ended or speaks no", {}),
        ({"command": "sleep", "args": ["60"]}, begins + r"it did not start within 0\.5 s", {"start_seconds": 0.5}),
        ({"url": f"http://127.0.0.1:{free_port()}/mcp"}, begins + "there is no server at http", {}),
        (STARTS_FAULTY, "the server has no tool 'ecco'; it has echo, fail", {"only": ["ecco"]}),
    ):
        with pytest.raises(protocols.ConfigError, match=sentence):
            asyncio.run(body(entry, arguments))


def test_a_prefix_tells_servers_with_the_same_tools_apart():
    async def body():
        async with opened(prefix=True, only=["echo"]) as (_, box):
            answer = await box.call("odd_echo", {"text": "a"})
            return [schema["function"]["name"] for schema in box.schemas()], answer

    names, answer = asyncio.run(body())
    assert names == ["odd_echo"]
    assert (answer.tool, answer.content) == ("odd_echo", "a")
