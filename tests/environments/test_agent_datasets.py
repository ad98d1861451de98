"""Tasks from files, the question environment, and factories named in config."""

import asyncio
import json
import pathlib
import sys
import types

import chat_templates
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.environments import datasets, question
from libra_jax.rollouts import factories


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def hundred(tmp_path):
    return write(tmp_path / "sums.jsonl", [{"prompt": f"{n}+{n}?", "answer": 2 * n, "kind": "sum"} for n in range(100)])


def prompts(source, count, start=0):
    return [source.task(index).payload["prompt"] for index in range(start, start + count)]


def test_each_epoch_holds_every_training_task_once_in_an_order_of_its_own(hundred):
    source = datasets.task_source(hundred, seed=1, holdout=0.1)
    first, second = prompts(source, 90), prompts(source, 90, 90)
    assert len(set(first)) == 90
    assert sorted(first) == sorted(second)
    assert first != second
    assert prompts(datasets.task_source(hundred, seed=1, holdout=0.1), 180) == first + second
    assert prompts(datasets.task_source(hundred, seed=2, holdout=0.1), 90) != first
    ids = [source.task(index).prompt_id for index in range(180)]
    ids += [source.evaluation_task(index).prompt_id for index in range(20)]
    assert len(set(ids)) == 200


def test_held_out_tasks_never_train_even_where_rows_repeat(tmp_path):
    path = write(tmp_path / "twice.jsonl", [{"prompt": f"q{n % 40}", "answer": n} for n in range(80)])
    held_out = set()
    for seed in range(3):
        source = datasets.task_source(path, seed=seed, holdout=0.2)
        held_out |= {source.evaluation_task(index).payload["prompt"] for index in range(50)}
        assert not held_out & set(prompts(source, 300))
    assert len(held_out) == 8


def test_without_a_holdout_all_rows_train_and_evaluation_is_refused(hundred):
    source = datasets.task_source(hundred, holdout=0)
    assert len(set(prompts(source, 100))) == 100
    with pytest.raises(protocols.DataError, match=r"""no task is held out .*arguments="\{'holdout': 0\.05\}\""""):
        source.evaluation_task(0)


def test_the_payload_holds_prompt_answer_and_the_columns_asked_for(hundred):
    payload = datasets.task_source(hundred, columns=("kind",)).task(0).payload
    assert set(payload) == {"prompt", "answer", "kind"}
    assert isinstance(payload["answer"], int)


def test_parquet_rows_are_read_like_lines(tmp_path, hundred):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [json.loads(line) for line in pathlib.Path(hundred).read_text().splitlines()]
    path = tmp_path / "sums.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    ours, theirs = datasets.task_source(str(path), seed=4), datasets.task_source(hundred, seed=4)
    assert [ours.task(index) for index in range(150)] == [theirs.task(index) for index in range(150)]
    with pytest.raises(protocols.DataError, match=r"sums\.parquet, row 1: no column 'promt'; did you mean 'prompt'"):
        datasets.task_source(str(path), prompt_column="promt")
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(protocols.DataError, match=r"sums\.parquet: not a readable Parquet file") as caught:
        datasets.task_source(str(path))
    assert "\n" not in str(caught.value)


GOOD = '{"prompt": "q", "answer": 1}\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no tasks"),
        ("\n\n", "holds no tasks"),
        (GOOD + '{"prompt": "q", "answ', "line 2: not a JSON object (Unterminated string starting at, column 17)"),
        (GOOD + '{"prompt": \n' + GOOD, "line 2: not a JSON object (Expecting value, column 11)"),
        (GOOD + "\n[1, 2]\n", "line 3: a JSON object is expected, not list"),
        (GOOD + '{"promt": "q", "answer": 1}', "line 2: no column 'prompt'; did you mean 'promt'"),
        ('{"text": "q", "solution": 1}', "line 1: no column 'prompt'; it has 'text', 'solution'"),
        ('{"prompt": "q"}', "line 1: no column 'answer'"),
        ('{"prompt": "  ", "answer": 1}', "line 1: column 'prompt' must be a text that is not empty"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "line 1: column 'prompt' must be"),
        (GOOD + '{"prompt": "q", "answer": true}', "line 2: column 'answer' must be a text or a finite number, or a"),
        (
            GOOD + '{"prompt": "q", "answer": Infinity}',
            "line 2: column 'answer' must be a text or a finite number, or a",
        ),
        (GOOD, "only one prompt, so none can be held out; give --config.task.arguments=\"{'holdout': 0}\""),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, text, problem):
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(protocols.DataError) as caught:
        datasets.task_source(str(path))
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_held_out_tasks_and_prompts_with_unlike_answers_are_counted():
    rows = [{"prompt": f"{n}", "answer": f"{n}"} for n in range(8)] + [{"prompt": "3", "answer": "4"}] * 2
    assert datasets.of_rows(rows, holdout=0).describe() == ", 1 posed again with another answer"
    unlike = [{**row, "setting": n} for n, row in enumerate(rows)]
    assert datasets.of_rows(unlike, holdout=0).describe() == ""
    assert datasets.of_rows(rows[:8], holdout=0.25).describe() == ", 2 held out"


def test_missing_answers_are_counted_and_skipped_only_if_asked(tmp_path, caplog):
    lost = ["null", "NaN", '""', '"  "', "[]"]
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        "".join(f'{{"prompt": "q{n}", "answer": {value}}}\n' for n, value in enumerate(["1", *lost, "0", '"x"']))
        + '{"prompt": "without"}\n'
    )
    sentence = (
        r"tasks\.jsonl, line 2: 6 of 9 rows have no answer \(column 'answer'\), this one first; .*'missing_answers'"
    )
    with pytest.raises(protocols.DataError, match=sentence):
        datasets.task_source(str(path))
    source = datasets.task_source(str(path), holdout=0, missing_answers="skip")
    assert sorted(str(source.task(index).payload["answer"]) for index in range(len(source))) == ["0", "1", "x"]
    assert "tasks.jsonl: 6 of 9 rows have no answer (column 'answer'), and are skipped" in caplog.text
    with pytest.raises(protocols.ConfigError, match="did you mean 'skip'"):
        datasets.task_source(str(path), missing_answers="skipp")


@pytest.mark.parametrize("answer", [None, float("nan")])
def test_a_row_of_a_program_without_an_answer_is_refused(answer):
    with pytest.raises(
        protocols.DataError, match=r"tasks\[1\]: 'answer' is (None|nan); write it, or leave it or the row"
    ):
        datasets.of_rows([{"prompt": "p", "answer": 1}, {"prompt": "q", "answer": answer}])
    datasets.of_rows([{"prompt": "p", "answer": 1}, {"prompt": "q"}, {"prompt": "r", "answer": ""}])


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(GOOD.encode() + b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(protocols.DataError, match=r"tasks\.jsonl, line 2: not UTF-8"):
        datasets.task_source(str(path))


def test_a_table_of_another_format_is_refused_by_its_ending(tmp_path):
    path = tmp_path / "tasks.xlsx"
    path.write_bytes(b"PK")
    with pytest.raises(protocols.DataError, match=r"tasks\.xlsx: \.parquet, \.jsonl, .* are read, not \.xlsx; convert"):
        datasets.task_source(str(path))


def test_a_missing_file_is_offered_its_neighbour(hundred):
    with pytest.raises(protocols.DataError, match=r"no such file of tasks; did you mean .*sums\.jsonl"):
        datasets.task_source(hundred.replace("sums", "sum"))
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.path: is empty"):
        datasets.task_source()
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.arguments\.holdout: must lie in \[0, 1\), not 1"):
        datasets.task_source(hundred, holdout=1)


# The question environment ---------------------------------------------------------------------------------------------


def ask(answer, outputs, prompt="q", **arguments):
    async def main():
        environment = question.environment(**arguments)
        opening = await environment.reset(protocols.Task("t", {"prompt": prompt, "answer": answer}))
        return opening, [await environment.step(output) for output in outputs]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("match", "expected", "given", "reward"),
    [
        ("exact", "Paris", " Paris\n", 1.0),
        ("exact", "Paris", "paris", 0.0),
        ("exact", "Paris", "<think>Rome?</think>\nParis", 1.0),
        ("exact", "Paris", "It is <answer>Paris</answer>, I think.", 1.0),
        ("numeric", "48/2 = 24, so #### 1,024", "The total is $1024.00.", 1.0),
        ("numeric", "72", "\\boxed{72} apples, not 9", 1.0),
        ("numeric", "0.5", "1/2", 1.0),
        ("numeric", "-3", "5-3", 0.0),
        ("numeric", "72", "seventy-two", 0.0),
        ("numeric", "72", "1/0", 0.0),
    ],
)
def test_answers_are_compared_as_asked(match, expected, given, reward):
    _, (result,) = ask(expected, [given], match=match)
    assert result.done
    assert result.reward == reward


def test_a_question_may_be_answered_after_using_the_calculator():
    opening, (first, second) = ask("408", ["<tool_call>12*34</tool_call>", "408"], calculator=True)
    assert [message.role for message in opening] == ["system", "user"]
    (answer,) = first.tool_returns
    assert (answer.tool, answer.content, first.done) == ("calculator", "408", False)
    assert second.reward == 1.0


def test_a_prompt_may_be_a_list_of_messages():
    opening, _ = ask("a", [], prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    assert opening == [protocols.Message("system", "s"), protocols.Message("user", "q")]


CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"q": "é"}}}
WORDS = st.text("ab \né{", min_size=1, max_size=5)
ASKED = st.builds(lambda text: [{"role": "user", "content": text, "tool_calls": None, "name": ""}], WORDS)
SAID = st.builds(
    lambda text, thought, calls: [
        {"role": "assistant", "content": text, "reasoning_content": thought, "tool_calls": calls},
        *({"role": "tool", "content": text, "tool_call_id": call["id"], "name": "look"} for call in calls),
    ],
    WORDS | st.just(""),
    WORDS | st.just(""),
    st.sampled_from([[], [CALL], [CALL, CALL | {"id": "call00002"}]]),
)


@given(rounds=st.lists(st.tuples(ASKED, SAID), min_size=1, max_size=3), text=st.booleans())
@pytest.mark.parametrize("name", ["THINKS", "PLAIN", "NAMES"])
def test_a_prompt_of_messages_is_what_the_template_makes_of_the_row(hugging_face, tmp_path_factory, name, rounds, text):
    """Calls, their ids, names and reasoning included. Arguments may be an object or its text."""
    rows = [message for asked, said in rounds for message in (*asked, *said)] + [{"role": "user", "content": "so?"}]
    tokenizer = hugging_face[name]
    expected = tokenizer.hugging_face.apply_chat_template(
        # A field that is None is absent in a table of one schema.
        [{key: value for key, value in row.items() if value or key == "content"} for row in rows],
        add_generation_prompt=True,
        return_dict=False,
    )
    written = json.loads(json.dumps(rows))
    for call in (call["function"] for row in written for call in row.get("tool_calls") or ()):
        call["arguments"] = json.dumps(call["arguments"]) if text else call["arguments"]
    path = write(tmp_path_factory.getbasetemp() / "chats.jsonl", [{"prompt": written, "answer": 1}])
    task = datasets.task_source(path, holdout=0).task(0)
    opening = question.opening(json.loads(json.dumps(task.payload["prompt"])))
    assert tokenizer.render(opening, first=True, generation_prompt=True) == list(expected)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    return {
        name: tokenizers.load(chat_templates.save(folder / name, getattr(chat_templates, name)))
        for name in ("THINKS", "PLAIN", "NAMES")
    }


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "a", "images": ["cat.png"]}, "of the role 'user' has 'images', which no chat template gets"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "has content of the kind 'image_url'"),
        ({"content": "a", "function_call": {"name": "f"}}, "has 'function_call'"),
        ({"content": "a", "tool_calls": [CALL]}, "has tool_calls; only the assistant calls tools"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}, "has the call {'id': 'c'}"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "no JSON"}}]},
            "a call is {",
        ),
        ({"content": None}, "has the content None"),
        ({"content": "a", "name": 3}, "has a tool_call_id, name or reasoning that is no text"),
    ],
)
def test_a_part_of_a_message_that_no_policy_would_see_is_refused(tmp_path, message, problem):
    path = write(tmp_path / "chats.jsonl", [{"prompt": [{"role": "user", **message}], "answer": 1}])
    with pytest.raises(protocols.DataError) as caught:
        datasets.task_source(path, holdout=0)
    assert "chats.jsonl, line 1: column 'prompt'" in str(caught.value)
    assert problem in str(caught.value)


def test_parts_of_text_are_joined_and_plain_messages_keep_their_form(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rows = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": parts, "tool_calls": []}]
    path = write(tmp_path / "chats.jsonl", [{"prompt": rows, "answer": 1}])
    prompt = datasets.task_source(path, holdout=0).task(0).payload["prompt"]
    assert prompt[0] == {"role": "system", "content": "s"}
    assert question.opening(prompt)[1] == protocols.Message("user", "a\nb")


def test_the_character_tokenizer_writes_calls_of_a_prompt():
    message = {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"}
    tokenizer = tokenizers.CharacterTokenizer()
    tokens = tokenizer.render(question.opening([message]), first=True, generation_prompt=False)
    said = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"q": "\ufffd"}}\n</tool_call>'
    assert tokenizer.decode(tokens) == f"<|assistant|>{said}<|im_end|>"


@pytest.mark.parametrize(("said", "reward"), [("NYC", 1.0), ("New York", 1.0), ("York", 0.0)])
def test_several_answers_may_be_right(said, reward):
    _, (result,) = ask(["New York", "NYC"], [said])
    assert result.reward == reward


def test_an_unknown_way_to_match_is_offered_its_nearest():
    with pytest.raises(protocols.ConfigError, match="did you mean 'numeric'"):
        question.environment(match="numerical")


# Factories ------------------------------------------------------------------------------------------------------------


def demonstrator_of(task, *, needed=True):
    """The demonstrator, as it is after it was given back."""

    async def borrow():
        async with factories.demonstrator(task, None, needed=needed) as lent:
            return lent

    return asyncio.run(borrow())


def test_the_default_config_resolves_to_the_calculator():
    task = config_lib.TaskConfig()
    source = factories.task_source(task, seed=1)
    make = factories.environment_factory(task)
    assert make() is not make()
    lent = demonstrator_of(task)
    assert lent is not None
    assert lent.demonstration(source.task(0))[-1].role == "assistant"
    assert demonstrator_of(task, needed=False) is None
    assert factories.limits(config_lib.RunConfig(), temperature=0.0).temperature == 0.0
    assert factories.limits(config_lib.RunConfig()).temperature == 1.0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("libra_jax.examples.calculater:task_source", "no module .*; did you mean 'libra_jax.examples.calculator'"),
        ("libra_jax.agent.calculator:task_source", "no module 'libra_jax.agent.calculator'"),
        ("libra_jax.examples.calculator:tasks_source", "has no 'tasks_source'; did you mean 'task_source'"),
        ("libra_jax.tools.arithmetic:FAILED", "is not callable"),
    ],
)
def test_a_factory_that_cannot_be_found_is_named_with_its_field(name, problem):
    with pytest.raises(protocols.ConfigError, match=rf"config\.task\.source: .*{problem}"):
        factories.task_source(config_lib.TaskConfig(source=name), seed=0)


@pytest.mark.parametrize(("name", "hint"), [("tasckets", "; did you mean 'taskets'?"), ("zzdeps", "")])
def test_a_module_at_the_top_is_offered_only_what_is_much_like_it(tmp_path, monkeypatch, name, hint):
    for module in ("taskets", "zzdepyfine"):
        (tmp_path / f"{module}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(protocols.ConfigError) as caught:
        factories.task_source(config_lib.TaskConfig(source=f"{name}:make"), seed=0)
    assert str(caught.value) == f"config.task.source: there is no module {name!r}{hint}"


def test_an_argument_that_a_factory_does_not_take_is_offered_the_nearest():
    with pytest.raises(protocols.ConfigError, match=r"task\.arguments: .*'level'.*; did you mean 'levels'"):
        factories.task_source(config_lib.TaskConfig(arguments={"level": ("plain",)}), seed=0)
    with pytest.raises(protocols.ConfigError, match=r"task\.arguments: must not hold 'seed'"):
        factories.task_source(config_lib.TaskConfig(arguments={"seed": 3}), seed=0)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_agent_parts.py").write_text(
        "def nothing():\n    return None\n"
        "async def later(**_):\n    return None\n"
        "def breaks():\n    raise RuntimeError('no license')\n"
    )
    (tmp_path / "my_environments.py").write_text(
        "log = []\n"
        "class Plain:\n"
        "    def __init__(self): log.append('made')\n"
        "    async def reset(self, task): ...\n"
        "    async def step(self, output): ...\n"
        "    async def close(self): log.append('closed')\n"
        "class Solved(Plain):\n"
        "    def demonstration(self, task): ...\n"
        "class Stubborn(Plain):\n"
        "    async def close(self): raise OSError('no reset')\n"
        "class Stepless:\n"
        "    def __init__(self): log.append('made')\n"
        "    async def reset(self, task): ...\n"
        "def make(kind): return globals()[kind]()\n"
    )
    (tmp_path / "my_broken_parts.py").write_text("import absent_dependency\n")
    yield
    for name in ("my_agent_parts", "my_broken_parts", "my_environments"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("module")
def test_the_users_own_modules_are_found_in_the_working_directory():
    with pytest.raises(protocols.ConfigError, match="my_agent_parts:breaks raised RuntimeError: no license"):
        demonstrator_of(config_lib.TaskConfig(environment="my_agent_parts:breaks"))
    with pytest.raises(protocols.ConfigError, match="which has no method reset"):
        demonstrator_of(config_lib.TaskConfig(environment="my_agent_parts:nothing"))
    with pytest.raises(protocols.ConfigError, match="my_broken_parts needs the module absent_dependency"):
        factories.environment_factory(config_lib.TaskConfig(environment="my_broken_parts:make"))


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("field", "use"),
    [
        ("source", lambda task: factories.task_source(task, seed=0)),
        ("environment", demonstrator_of),
    ],
)
def test_an_async_factory_is_refused_without_being_called(field, use, recwarn):
    with pytest.raises(protocols.ConfigError) as caught:
        use(config_lib.TaskConfig(**{field: "my_agent_parts:later"}))
    assert str(caught.value).startswith(f"config.task.{field}: 'my_agent_parts:later' is async; ")
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


@pytest.mark.usefixtures("module")
def test_naming_an_environment_makes_none_and_a_class_is_checked_all_the_same():
    make = factories.environment_factory(config_lib.TaskConfig(environment="my_environments:Plain"))
    with pytest.raises(protocols.ConfigError, match="makes a Stepless, which has no method step"):
        factories.environment_factory(config_lib.TaskConfig(environment="my_environments:Stepless"))
    with pytest.raises(protocols.ConfigError, match=r"config\.task\.environment_arguments: .*'kind'"):
        factories.environment_factory(config_lib.TaskConfig(environment="my_environments:make"))
    left_over = config_lib.TaskConfig(environment="my_environments:make", environment_arguments={"match": "exact"})
    with pytest.raises(protocols.ConfigError, match=r"it takes kind\. .* --config\.task\.environment_arguments=\{\}$"):
        factories.environment_factory(left_over)
    log = sys.modules["my_environments"].log
    assert log == []
    make()
    assert log == ["made"]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("needed", [True, False])
def test_a_trial_environment_is_the_demonstrator_where_one_is_needed_and_is_closed_once(needed):
    for kind in ("Plain", "Solved"):
        task = config_lib.TaskConfig(environment="my_environments:make", environment_arguments={"kind": kind})

        async def borrow(task=task, kind=kind):
            async with factories.demonstrator(task, None, needed=needed) as lent:
                log = sys.modules["my_environments"].log
                assert (lent is not None) == (needed and kind == "Solved")
                assert log == (["made"] if lent is not None else ["made", "closed"])
            assert log == ["made", "closed"]
            log.clear()

        asyncio.run(borrow())


@pytest.mark.usefixtures("module")
def test_a_trial_that_cannot_be_closed_is_no_error():
    assert demonstrator_of(config_lib.TaskConfig(environment="my_environments:Stubborn")) is None


def test_a_source_without_a_path_parameter_is_refused_one_and_works_without(monkeypatch):
    module = types.ModuleType("pathless_tasks")
    module.make = lambda seed: [seed]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pathless_tasks", module)
    assert factories.task_source(config_lib.TaskConfig(source="pathless_tasks:make"), seed=3) == [3]
    with pytest.raises(protocols.ConfigError, match=r"task\.path: 'x\.jsonl' would be ignored, because pathless_tasks"):
        factories.task_source(config_lib.TaskConfig(source="pathless_tasks:make", path="x.jsonl"), seed=3)
