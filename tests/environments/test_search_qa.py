"""Questions to search for: scores as SQuAD's evaluation gives them, and a made-up society that its corpus answers."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import search_cpu
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.chat import tokenizers
from libra_jax.environments import datasets, search_qa
from libra_jax.examples import acquaintances
from libra_jax.rollouts import factories, splits
from libra_jax.tools import toolkit

WORLD = {"people": 40, "world": 3}
SEARCH = {"results": 1, "template": "{snippet}", "paging": False}
GENERATED = {"source": "libra_jax.examples.acquaintances:corpus", "source_arguments": WORLD, **SEARCH}

# Scores -------------------------------------------------------------------------------------------------------------

ANSWERS = st.lists(
    st.sampled_from(["The", "the", "a", "An", "cat", "Cat.", "CAT!", "dog's", "dogs", "  ", "42", "(4)2", "é", "-"])
).map(" ".join)


@given(ANSWERS | st.text(max_size=20), st.lists(ANSWERS | st.text(max_size=20), min_size=1, max_size=4))
@settings(max_examples=300)
def test_exact_match_and_f1_are_those_of_squad(given_answer, accepted):
    squad = pytest.importorskip("transformers.data.metrics.squad_metrics")
    # SQuAD's evaluation takes an article for the empty text; an empty answer earned the reward of the answer "A".
    accepted = [answer for answer in accepted if squad.normalize_answer(answer)] or ["cat"]
    if squad.normalize_answer(given_answer):
        assert search_qa.normalised(given_answer) == squad.normalize_answer(given_answer)
    best = max(squad.compute_exact(answer, given_answer) for answer in accepted)
    scores = search_qa.scores(given_answer, accepted)
    assert scores["em"] == best
    best = max(squad.compute_f1(answer, given_answer) for answer in accepted)
    assert scores["f1"] == pytest.approx(best)


@pytest.mark.parametrize("answer", ["A", "the", "?", ""])
def test_an_empty_answer_earns_nothing(answer):
    assert search_qa.scores("", [answer]) == {"em": 0.0, "f1": 0.0}
    assert search_qa.scores(answer, [answer])["em"] == float(answer != "")


def attempt(payload, outputs, tools=None, **arguments):
    """The opening messages and the results of the steps."""

    async def body():
        configured = config_lib.ToolsConfig(use=("search",), format="tags", arguments={"search": tools or GENERATED})
        async with toolkit.Toolkit(configured, config_lib.SandboxConfig()) as opened:
            environment = search_qa.environment(opened, **arguments)
            opening = await environment.reset(protocols.Task("t", payload))
            results = [await environment.step(output) for output in outputs]
            await environment.close()
            return opening, results

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("match", "output", "reward", "em", "f1"),
    [
        ("em", "<think>Rome?</think>The Paris.", 1.0, 1.0, 1.0),
        ("em", "It is <answer>city of light</answer>", 1.0, 1.0, 1.0),
        ("em", "Paris, the city of light", 0.0, 0.0, 2 * (3 / 4) / (3 / 4 + 1)),
        ("f1", "Paris in France", 0.5, 0.0, 0.5),
        ("f1", "Rome", 0.0, 0.0, 0.0),
    ],
)
def test_the_reward_is_the_match_asked_for_and_both_are_metrics(match, output, reward, em, f1):
    payload = {"prompt": "q", "answer": ["Paris", "The City of Light"]}
    _, (result,) = attempt(payload, [output], match=match)
    assert result.done
    assert result.reward == pytest.approx(reward)
    assert (result.metrics["em"], result.metrics["f1"]) == pytest.approx((em, f1))


def test_an_attempt_searches_reads_and_answers():
    people = acquaintances.society(**WORLD)
    name, friend = people[0].name, people[people[0].friend]
    payload = {"prompt": [{"role": "user", "content": f"Where does a friend of {name} live?"}], "answer": friend.city}
    outputs = [f"<search>{name}</search>", f"<search>{friend.name}</search>", friend.city]
    opening, results = attempt(payload, outputs, system="Be brief.")
    assert [message.role for message in opening] == ["system", "user"]
    assert opening[0].content.startswith("Be brief.\n\n# Tools")
    assert [result.tool_returns[0].content for result in results[:2]] == [
        acquaintances.passage(people, 0),
        acquaintances.passage(people, people[0].friend),
    ]
    assert results[2].reward == 1.0


def test_a_match_that_there_is_not_is_refused():
    with pytest.raises(
        protocols.ConfigError, match=r"task\.environment_arguments\.match: 'exact' is not one of em, f1"
    ):
        search_qa.environment(None, match="exact")


# The society --------------------------------------------------------------------------------------------------------


def test_all_names_differ_and_all_passages_have_one_length():
    people = acquaintances.society(20_000, 1)
    names = [person.name for person in people]
    assert len({*names, *(person.city for person in people)}) > 20_000
    assert len(set(names)) == 20_000
    assert {len(text) for person in people for text in (person.name, person.city)} == {6}
    assert len({len(acquaintances.passage(people, place)) for place in range(20_000)}) == 1
    assert acquaintances.society(50, 1) != acquaintances.society(50, 2)


def test_everybody_has_a_friend_and_is_one_persons_friend():
    people = acquaintances.society(500)
    friends = [person.friend for person in people]
    assert sorted(friends) == list(range(500))
    assert all(friend != place for place, friend in enumerate(friends))


def test_tasks_are_of_each_kind_in_turn_and_held_out_questions_never_train():
    source = acquaintances.task_source(seed=5, people=100)
    train = [source.task(index).payload for index in range(800)]
    held_out = [source.evaluation_task(index).payload for index in range(800)]
    assert [len(payload["lookups"]) for payload in train[:8]] == [1, 2, 1, 2] * 2
    assert [payload["prompt"].split()[0] for payload in train[:8]] == ["City", "City", "Job", "Job"] * 2
    assert not {payload["prompt"] for payload in train} & {payload["prompt"] for payload in held_out}
    again = acquaintances.task_source(seed=5, people=100)
    assert [again.task(index).payload for index in range(800)] == train
    other = acquaintances.task_source(seed=6, people=100)
    assert [other.task(index).payload for index in range(800)] != train
    assert [other.evaluation_task(index).payload for index in range(800)] == held_out
    json.dumps(train)


def check_demonstrations(run, source):
    """Each is what the live environment and its tool answer to the same outputs, earns the reward, and has room."""

    async def body():
        async with (
            toolkit.Toolkit(run.tools, run.sandbox) as opened,
            factories.demonstrator(run.task, opened, needed=True) as demonstrator,
        ):
            for index in range(40):
                shown = list(demonstrator.demonstration(source.task(index)))
                environment = factories.environment_factory(run.task, opened)()
                live = list(await environment.reset(source.task(index)))
                for message in shown[1:]:
                    if message.role == "assistant":
                        live.append(message)
                        result = await environment.step(message.content)
                        live += [protocols.Message("tool", answer.content) for answer in result.tool_returns]
                await environment.close()
                assert live == shown
                assert result.reward == 1.0
                tokenizer = tokenizers.CharacterTokenizer()
                whole = tokenizers.demonstration_trajectory(source.task(index), demonstrator, tokenizer)
                assert len(whole.turns) <= run.task.max_turns
                assert len(whole.token_ids) < run.rollout.max_context
                assert max(turn.generated_tokens for turn in whole.turns) <= run.rollout.max_tokens

    asyncio.run(body())


def test_demonstrations_of_the_shipped_config_are_what_its_tool_returns():
    run = config_lib.checked(search_cpu.get_config())
    check_demonstrations(run, factories.task_source(run.task, run.seed))


def test_demonstrations_of_its_files_are_what_the_tool_returns(tmp_path):
    acquaintances.write(tmp_path, **WORLD)
    source = datasets.task_source(str(tmp_path / "questions.jsonl"), columns=("lookups",))
    tools = config_lib.ToolsConfig(
        use=("search",),
        format="tags",
        describe=False,
        arguments={"search": {"path": str(tmp_path / "corpus.jsonl"), **SEARCH}},
    )
    task = config_lib.TaskConfig(environment="libra_jax.environments.search_qa:environment")
    check_demonstrations(config_lib.RunConfig(task=task, tools=tools), source)


def test_the_files_hold_each_question_once(tmp_path):
    acquaintances.write(tmp_path / "new", **WORLD)
    rows = [json.loads(line) for line in (tmp_path / "new" / "questions.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 4 * WORLD["people"]
    assert {splits.held_out(row["prompt"]) for row in rows} == {True, False}
    assert len((tmp_path / "new" / "corpus.jsonl").read_text().splitlines()) == WORLD["people"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"people": 7}, r"task\.arguments\.people: must lie in 8\.\.100000, not 7"),
        ({"searches": ()}, r"task\.arguments\.searches: must hold 1, 2 or both, not \[\]"),
        ({"searches": (3,)}, r"task\.arguments\.searches: must hold 1, 2 or both, not \[3\]"),
        ({"asked": ("Age",)}, r"task\.arguments\.asked: must hold City, Job or both, not \['Age'\]"),
        ({"path": "questions.jsonl"}, r"task\.path: these questions are generated; for a file set task\.source"),
    ],
)
def test_an_argument_that_cannot_be_is_named(arguments, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        acquaintances.task_source(**arguments)


def test_a_warm_start_on_what_cannot_be_demonstrated_is_refused():
    plain = protocols.Task("t", {"prompt": "q", "answer": "a"})
    shown = protocols.Task("t", {"prompt": "q", "answer": "a", "lookups": []})
    tools = toolkit.Toolkit(config_lib.ToolsConfig(), config_lib.SandboxConfig())
    with pytest.raises(protocols.ConfigError, match=r"warm_start\.steps: task t has no lookups to demonstrate"):
        search_qa.environment(tools).demonstration(plain)
    with pytest.raises(protocols.ConfigError, match=r"tools\.describe: must be False for a warm start"):
        search_qa.environment(tools).demonstration(shown)


# Several accepted answers -------------------------------------------------------------------------------------------


def test_a_file_may_give_several_accepted_answers(tmp_path):
    path = tmp_path / "several.jsonl"
    path.write_text('{"prompt": "p", "answer": ["Paris", 75]}\n{"prompt": "q", "answer": "Rome"}\n')
    source = datasets.task_source(str(path), holdout=0)
    answers = {source.task(index).payload["prompt"]: source.task(index).payload["answer"] for index in range(2)}
    assert answers == {"p": ["Paris", 75], "q": "Rome"}
    path.write_text('{"prompt": "p", "answer": ["Paris", null]}\n')
    with pytest.raises(protocols.DataError, match=r"line 1: column .answer. must be .* list of them, not None"):
        datasets.task_source(str(path), holdout=0)
