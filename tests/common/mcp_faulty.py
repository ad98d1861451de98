"""An MCP server that does what servers should not: `python mcp_faulty.py [PORT]`; without a port over pipes.

Over pipes it speaks the protocol by itself, as importing the package takes a second; over HTTP it is the package's.
"""

import json
import os
import sys
import threading
import time

WRITING = threading.Lock()


def echo(text: str) -> str:
    """Says it again."""
    return text


def fail(text: str) -> str:
    """Raises."""
    raise ValueError(text)


def rest(seconds: float) -> str:
    """Answers late."""
    time.sleep(seconds)
    return "rested"


def block(seconds: float) -> str:
    """Answers late, and so does everything else."""
    time.sleep(seconds)
    return "blocked"


def die() -> str:
    """Ends the server."""
    print("no memory left", file=sys.stderr, flush=True)
    os._exit(3)


def fill(characters: int) -> str:
    """A long answer, and a long complaint."""
    print("x" * characters, file=sys.stderr, flush=True)
    return "a" * characters


def who() -> str:
    """Its process, and variables of its environment."""
    return f"{os.getpid()} {os.environ.get('COLOUR')} {os.environ.get('SECRET')}"


def paint() -> str:
    """Text and a picture."""
    return "look:"


def declare(text: str) -> str:
    """Structured content, declared to match a pattern that Python's `re` takes for ever over."""
    return text


DECLARED = {"type": "object", "properties": {"text": {"type": "string", "pattern": "^(a+)+$"}}}
TOOLS = {tool.__name__: tool for tool in (echo, fail, rest, block, die, fill, who, paint, declare)}
KINDS = {"text": "string", "seconds": "number", "characters": "integer"}


def listed(name):
    names = TOOLS[name].__code__.co_varnames[: TOOLS[name].__code__.co_argcount]
    schema = {"type": "object", "properties": {key: {"type": KINDS[key]} for key in names}, "required": list(names)}
    output = {"outputSchema": DECLARED} if name == "declare" else {}
    return {"name": name, "description": TOOLS[name].__doc__, "inputSchema": schema, **output}


def called(name, arguments):
    try:
        content = [{"type": "text", "text": TOOLS[name](**arguments)}]
    except ValueError as error:
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    if name == "paint":
        content.append({"type": "image", "data": "bm8=", "mimeType": "image/png"})
    if name == "declare":
        return {"content": content, "structuredContent": arguments}
    return {"content": content}


def answer(number, **outcome):
    with WRITING:
        print(json.dumps({"jsonrpc": "2.0", "id": number, **outcome}), flush=True)


def over_pipes():
    for line in sys.stdin:
        message = json.loads(line)
        number, parameters = message.get("id"), message.get("params", {})
        if number is None:
            continue
        if message["method"] == "initialize":
            told = {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}}
            answer(number, result={**told, "serverInfo": {"name": "faulty", "version": "1"}})
        elif message["method"] == "tools/list":
            answer(number, result={"tools": [listed(name) for name in TOOLS]})
        elif message["method"] != "tools/call":
            answer(number, error={"code": -32601, "message": "no such method"})
        elif parameters["name"] == "block":
            answer(number, result=called("block", parameters["arguments"]))
        else:

            def run(number=number, parameters=parameters):
                answer(number, result=called(parameters["name"], parameters.get("arguments") or {}))

            threading.Thread(target=run, daemon=True).start()


def over_http(port):
    from mcp.server import mcpserver
    from mcp.server.mcpserver import exceptions

    server = mcpserver.MCPServer("faulty")
    server.tool()(echo)
    server.tool()(die)

    @server.tool(name="fail")
    async def anticipated(text: str) -> str:
        """Raises."""
        raise exceptions.ToolError(text)

    server.run("streamable-http", port=port)


if len(sys.argv) > 1:
    over_http(int(sys.argv[1]))
else:
    over_pipes()
    os._exit(0)  # whatever its threads still do
