"""Tools by name: what the policy writes is answered, never raised; and the tools of a workspace."""

import asyncio
import json
import math

import pytest
import sandboxes

from libra_jax import protocols
from libra_jax.tools import schemas, toolbox, workspace
from libra_jax.tools.sandbox import pool

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "times": {"type": "integer", "minimum": 1},
        "style": {"type": "string", "enum": ["plain", "loud"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["text"],
    "additionalProperties": False,
}


class Echo:
    """Says its text again; raises where it is told to."""

    description = "Says it again."

    def __init__(self, name="echo", parameters=SCHEMA):
        self.name, self.parameters = name, parameters

    async def call(self, arguments):
        if arguments["text"] == "break":
            raise OSError("the disk is gone")
        return protocols.ToolReturn(self.name, "success", arguments["text"] * arguments.get("times", 1))


def called(name, arguments, most_characters=1000):
    return asyncio.run(toolbox.Toolbox([Echo()], most_characters).call(name, arguments))


@pytest.mark.parametrize("arguments", [{"text": "a", "times": 2}, '{"text": "a", "times": 2}'], ids=["object", "text"])
def test_a_call_is_carried_out_and_timed(arguments):
    answer = called("echo", arguments)
    assert (answer.tool, answer.status, answer.content) == ("echo", "success", "aa")
    assert answer.seconds > 0


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("ecco", {}, "no tool 'ecco'; there are: echo"),
        (None, {}, "no tool None"),
        (["echo"], {}, "no tool"),
        ({"echo": 1}, {}, "no tool"),
        ("x" * 10_000, {}, "characters left out"),
        ("echo", "{", "are no JSON"),
        ("echo", "[" * 100_000, "are no JSON"),
        ("echo", "[]", "must be a JSON object"),
        ("echo", None, "must be a JSON object"),
        ("echo", 7, "must be a JSON object"),
        ("echo", {}, "arguments: 'text' is a required property"),
        ("echo", {"text": 3}, "arguments.text: 3 is not of type 'string'"),
        ("echo", {"text": None}, "arguments.text: None is not of type 'string'"),
        ("echo", {"text": "a", "time": 2}, "arguments: Additional properties are not allowed ('time' was unexpected)"),
        ("echo", {"text": "a", "times": True}, "arguments.times: True is not of type 'integer'"),
        ("echo", {"text": "a", "times": 2.0}, "arguments.times: 2.0 is not of type 'integer'"),
        ("echo", {"text": "a", "times": 0}, "arguments.times: 0 is less than the minimum of 1"),
        ("echo", {"text": "a", "style": "shy"}, "arguments.style: 'shy' is not one of ['plain', 'loud']"),
        ("echo", {"text": "a", "tags": ["b", 3]}, "arguments.tags[1]: 3 is not of type 'string'"),
        ("echo", {"text": "\ud800"}, "the arguments hold what JSON cannot say"),
        ("echo", '{"text": "\\ud800"}', "the arguments hold what JSON cannot say"),
        ("echo", {"text": "a", "times": math.inf}, "the arguments hold what JSON cannot say"),
        pytest.param("echo", '{"tags": ' + "[" * 900 + "]" * 900 + "}", "argument", id="deep"),
    ],
)
def test_a_malformed_call_is_a_failure_that_the_policy_sees(name, arguments, problem):
    answer = called(name, arguments)
    assert answer.status == "failure"
    assert answer.content.startswith("error: ")
    assert problem in answer.content
    assert len(answer.content) < 1100


def test_a_long_return_is_cut_in_the_middle_and_marked():
    answer = called("echo", {"text": "abcdef" * 100}, most_characters=10)
    assert answer.content == "abcde\n[... 590 characters left out ...]\nbcdef"


def test_a_tool_that_raises_is_a_failure_that_the_policy_reads(caplog):
    answer = called("echo", {"text": "break"})
    assert (answer.tool, answer.status, answer.content) == ("echo", "failure", "error: OSError: the disk is gone")
    assert "raised OSError: the disk is gone (" in caplog.text, "the author of the tool learns the line"


def test_a_tool_whose_worker_is_lost_is_no_failure_of_the_policy():
    async def lost(self, arguments):
        raise protocols.WorkerLost("the server is gone")

    with pytest.raises(protocols.WorkerLost):
        asyncio.run(toolbox.Toolbox([tool_with(lost)()]).call("mine", {"text": "a"}))


@pytest.mark.parametrize(
    ("tools", "most_characters", "sentence"),
    [
        ([Echo(), Echo("other"), Echo()], 10, r"tools: two tools have the name 'echo'"),
        ([Echo("two words")], 10, r"tools: 'two words' is no name of a tool: take letters, digits, _ - \. : /"),
        ([Echo("<b>")], 10, r"tools: '<b>' is no name of a tool"),
        ([Echo(None)], 10, r"tools: None is no name of a tool"),
        ([Echo()], 0, r"tools\.most_characters: must be positive, not 0"),
    ],
)
def test_a_toolbox_that_cannot_be_is_refused(tools, most_characters, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        toolbox.Toolbox(tools, most_characters)


def test_an_object_that_is_no_tool_is_refused():
    class Nameless:
        name = "thing"
        description = "A thing."

    with pytest.raises(protocols.ConfigError, match=r"Nameless has no parameters and no call; tools have name, "):
        toolbox.Toolbox([Nameless()])


def test_a_schema_that_is_none_is_refused():
    with pytest.raises(protocols.ConfigError, match="parameters of 'echo' must be a JSON schema of type object"):
        toolbox.Toolbox([Echo(parameters={"text": "string"})])
    broken = {"type": "object", "properties": {"text": {"type": "strin"}}}
    with pytest.raises(
        protocols.ConfigError, match=r"'echo' are no JSON schema: \$\.properties\.text\.type: 'strin' is"
    ):
        toolbox.Toolbox([Echo(parameters=broken)])
    with pytest.raises(protocols.ConfigError, match="'echo' are no JSON schema: Object of type set is not JSON"):
        toolbox.Toolbox([Echo(parameters={"type": "object", "required": {"text"}})])


@pytest.mark.parametrize("reference", ["http://127.0.0.1:9/x.json", "#/$defs/b", "#/required", "#/type/x"])
def test_a_schema_that_refers_to_what_is_not_in_it_is_refused(reference):
    schema = {**SCHEMA, "$defs": {"a": {"anyOf": [True, {"$ref": reference}]}}}
    with pytest.raises(protocols.ConfigError, match=r"'echo' are no JSON schema: its \$ref '.*' leads to no schema"):
        toolbox.Toolbox([Echo(parameters=schema)])


def test_references_within_a_schema_are_followed_and_one_that_leads_to_nonsense_raises_nothing():
    schema = {
        "type": "object",
        "properties": {"text": {"$ref": "#/$defs/a"}, "$ref": {"$ref": "#/odd"}},
        "$defs": {"a": {"$ref": "#words"}, "b": {"$anchor": "words", "type": "string"}},
        "odd": {"type": "strin"},
    }
    box = toolbox.Toolbox([Echo(parameters=schema)])
    good, bad, odd = (asyncio.run(box.call("echo", call)) for call in ({"text": "a"}, {"text": 3}, {"$ref": 3}))
    assert (good.status, good.content) == ("success", "a")
    assert bad.content == "error: arguments.text: 3 is not of type 'string'"
    assert odd.content == "error: the tool's own schema cannot be applied to the arguments (UnknownType)"


def test_no_schema_is_fetched_for_a_call(monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("fetched a schema"))
    schema = {"type": "object", "properties": {"text": {"$ref": "http://127.0.0.1:9/x.json"}}}
    assert "cannot be applied" in schemas.mismatch({"text": "a"}, schema, "arguments")


def test_the_policy_is_told_names_descriptions_and_schemas():
    (schema,) = toolbox.Toolbox([Echo()]).schemas()
    assert schema["function"]["name"] == "echo"
    assert json.loads(json.dumps(schema))["function"]["parameters"] == SCHEMA


# The tools of a workspace -------------------------------------------------------------------------------------------


def in_workspace(*calls):
    """The returns of (tool, arguments), one after the other in one session."""
    sandboxes.skip_without_bubblewrap()

    async def body():
        async with pool.Sandbox(sandboxes.SMALL, warm=1) as sandbox, sandbox.session() as session:
            box = toolbox.Toolbox([workspace.Python(session), workspace.Shell(session), workspace.Edit(session)])
            return [await box.call(*call) for call in calls]

    return asyncio.run(body())


def test_python_shell_and_edit_work_on_one_workspace():
    returns = in_workspace(
        ("edit", {"command": "create", "path": "pkg/area.py", "text": "def area(r):\n    return 3 * r * r\n"}),
        ("edit", {"command": "replace", "path": "pkg/area.py", "old": "3 *", "new": "4 *"}),
        ("edit", {"command": "view", "path": "pkg/area.py", "first": 2}),
        ("edit", {"command": "view", "path": "."}),
        ("python", {"code": "from pkg import area\narea.area(5)"}),
        ("shell", {"command": "grep -c r pkg/area.py"}),
    )
    assert [answer.status for answer in returns] == ["success"] * 6
    assert [answer.content for answer in returns[1:]] == [
        "changed pkg/area.py",
        "2\t    return 4 * r * r\n",
        "pkg/\n",
        "100\n",
        "2\n",
    ]
    assert all(answer.seconds > 0 for answer in returns)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"command": "view", "path": "missing"}, "No such file"),
        ({"command": "delete", "path": "a"}, "arguments.command: 'delete' is not one of ['view', 'create', 'replace']"),
        ({"command": "create", "path": "b"}, "create needs 'text'"),
        ({"command": "replace", "path": "a", "old": "x"}, "replace needs 'new'"),
        ({"command": "replace", "path": "a", "old": "x", "new": "y"}, "found 2 times in a; it must be there once"),
        ({"command": "replace", "path": "a", "old": "z", "new": "y"}, "found 0 times"),
        ({"command": "replace", "path": "a", "old": "", "new": "y"}, "found 0 times"),
        ({"command": "create", "path": ".", "text": ""}, "Is a directory"),
        ({"command": "create", "path": "a/b", "text": ""}, "File exists"),
        ({"command": "view", "path": "a", "first": 0}, "arguments.first: 0 is less than the minimum of 1"),
    ],
)
def test_an_edit_that_cannot_be_made_is_a_failure(arguments, problem):
    made, answer = in_workspace(("edit", {"command": "create", "path": "a", "text": "x x\n"}), ("edit", arguments))
    assert made.status == "success"
    assert answer.status == "failure"
    assert problem in answer.content


@pytest.mark.parametrize(
    "arguments",
    [{"command": "create", "text": "\ud800"}, {"command": "replace", "old": "kept", "new": "\ud800"}],
    ids=["create", "replace"],
)
def test_an_edit_whose_text_cannot_be_encoded_leaves_the_file_as_it_was(arguments):
    returns = in_workspace(
        ("edit", {"command": "create", "path": "f", "text": "kept"}),
        ("edit", {"path": "f", **arguments}),
        ("python", {"code": "open('f').read()"}),
    )
    assert [answer.status for answer in returns] == ["success", "failure", "success"]
    assert returns[2].content == "'kept'\n"


def test_an_edit_keeps_what_is_no_text_and_line_ends_as_they_are():
    returns = in_workspace(
        ("shell", {"command": r"printf 'one\r\ntwo\xff\r\n' >f"}),
        ("edit", {"command": "replace", "path": "f", "old": "one", "new": "1"}),
        ("python", {"code": "open('f', 'rb').read()"}),
    )
    assert returns[2].content == "b'1\\r\\ntwo\\xff\\r\\n'\n"


def test_a_timeout_is_the_tools_status():
    (answer,) = in_workspace(("shell", {"command": "sleep 60"}))
    assert (answer.tool, answer.status) == ("shell", "timeout")


def tool_with(call):
    return type("Mine", (), {"name": "mine", "description": "d", "parameters": SCHEMA, "call": call})


def test_a_tool_whose_call_is_not_async_is_refused_when_it_is_made():
    with pytest.raises(
        protocols.ConfigError, match=r"call of the tool 'mine' \(\S*Mine\) is no async method; write async def"
    ):
        toolbox.Toolbox([tool_with(lambda self, arguments: "text")()])
    with pytest.raises(protocols.ConfigError, match=r"call of the tool 'mine' .* is no async method"):
        toolbox.Toolbox([tool_with("text")()])


def returning(answer):
    async def call(self, arguments):
        return answer

    return asyncio.run(toolbox.Toolbox([tool_with(call)()]).call("mine", {"text": "a"}))


def test_a_tool_may_return_its_text_and_nothing_else_than_a_return():
    answer = returning("found it")
    assert (answer.tool, answer.status, answer.content) == ("mine", "success", "found it")
    with pytest.raises(
        protocols.EnvironmentCrashed, match="call of the tool 'mine' returned int; write async def call"
    ):
        returning(3)
    with pytest.raises(protocols.EnvironmentCrashed, match="a ToolReturn whose content is of type int; write async"):
        returning(protocols.ToolReturn("mine", "success", 3))


@pytest.mark.parametrize("status", ["great", "", None, ["success"]])
def test_a_return_of_an_unknown_status_is_refused_with_the_known_ones(status):
    why = r"call of the tool 'mine' returned a ToolReturn with the status .*; a status is success, failure, timeout"
    with pytest.raises(protocols.EnvironmentCrashed, match=why):
        returning(protocols.ToolReturn("mine", status, "x"))


def test_a_return_counts_for_the_tool_that_was_called():
    assert returning(protocols.ToolReturn("another", "success", "x")).tool == "mine"
