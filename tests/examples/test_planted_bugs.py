"""Planted bugs: the calls that judge them, their fix, its demonstration, and levels that cannot be."""

import collections
import functools
import itertools
import json
import random
import re

import mutants
import pytest
import repairs
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import protocols
from libra_jax.environments import repo_repair
from libra_jax.examples import planted
from libra_jax.rewards.repair import calls
from libra_jax.rollouts import splits


def payloads(level, way, count):
    return [payload(level, way, index) for index in range(count)]


@functools.cache  # drawing one takes some milliseconds
def payload(level, way, index):
    return getattr(planted.task_source(level=level), way)(index).payload


@pytest.mark.parametrize("level", planted.LEVELS)
def test_a_demonstration_is_what_the_environment_says_and_is_rewarded(level):
    task = planted.task_source(level=level).task(3)

    async def work(tools):
        environment = repo_repair.environment(tools, prompt="{issue}")
        said = list(await environment.reset(task))
        demonstration = list(environment.demonstration(task))
        for message in demonstration[1::2]:
            result = await environment.step(message.content)
            said.append(message)
            said += [protocols.Message("tool", answer.content) for answer in result.tool_returns]
        await environment.close()
        return said, demonstration, result

    said, demonstration, result = repairs.with_tools(work)
    assert said == demonstration
    assert (result.done, result.reward) == (True, 1.0)


@given(st.integers(0, 10**6), st.sampled_from(planted.LEVELS), st.integers(0, 10**6))
@settings(max_examples=60)
def test_a_planted_bug_is_the_same_each_time_and_its_fix_applies_once(seed, level, index):
    source = planted.task_source(level=level, seed=seed)
    made = source.task(index).payload
    assert made == planted.task_source(level=level, seed=seed).task(index).payload == json.loads(json.dumps(made))
    fix = made["fix"]
    assert made["files"][fix["path"]].count(fix["old"]) == 1
    assert len(made["calls"]) >= 24
    assert made["kind"] in planted.KINDS


def test_every_kind_of_bug_is_planted_and_evaluation_shares_no_repository_with_training():
    for level in planted.LEVELS:
        training, evaluation = (payloads(level, way, 80) for way in ("task", "evaluation_task"))
        solved = [{one["issue"] + one["fix"]["new"] for one in tasks} for tasks in (training, evaluation)]
        assert not solved[0] & solved[1]
        kinds = {one["kind"] for one in training}
        assert kinds == (set(planted._EASY_KINDS) if level == "easy" else {recipe.kind for recipe in planted.RECIPES})


def test_an_easy_bug_has_widths_that_never_change():
    source = planted.task_source(level="easy")
    made = [source.task(index).payload for index in range(50)]
    texts = [(one["issue"], one["files"]["m.py"], one["fix"]["old"], one["fix"]["new"]) for one in made]
    assert len({tuple(map(len, text)) for text in texts}) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"level": "eazy"}, r"task\.arguments\.level: 'eazy'.*did you mean 'easy'"),
        ({"kinds": ("wrong_constnat",)}, r"task\.arguments\.kinds.*did you mean 'wrong_constant'"),
        ({"level": "easy", "kinds": ("missing_case",)}, r"task\.arguments\.kinds: level 'easy' has only"),
        ({"path": "tasks.jsonl"}, r"task\.path"),
    ],
)
def test_bugs_that_cannot_be_planted_are_refused_by_name(arguments, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        planted.task_source(**arguments)


NARROW = (
    (r"(- |\+ )discount", r"\1min(discount, 4)"),
    (r"(- |\+ )discount", r"\1discount % 6"),
    ("quantity [*]", "min(quantity, 9) *"),
    ("quantity [*]", "(quantity or 1) *"),
    ("[*] price", "* min(price, 50)"),
    ("return gross", "return abs(gross - discount) + discount"),
    (r"in values if value", "in values[:7] if value"),
    (r"in values if value", "in dict.fromkeys(values) if value"),
    (r"if value (% \d)", r"if value in (0, *range(-9, 31)) and value \1"),
    (r"if value (% \d)", r"if value and value \1"),
    (r"len\(values\) - size [+] 1", "len(values) - {1: 0, 2: 1, 3: 2}.get(size, 0)"),
    (r"\[sum\(values\[i", "[] if len(values) < 3 else [sum(values[i"),
    (r"    return \[sum", "    size = min(size, 6)\n    return [sum"),
    (r"return \(items \+ (\d+) - 1", r"return (items + \1 - (items <= 999)"),
    (r"return \(items \+ (\d+) - 1", r"return (items + \1 - (items in (0, 10, 20, 24, 30, 36, 40, 60, 120))"),
    (r"_ratio\(part, whole\), 1", "_ratio(part or 1, whole), 1"),
    (r"_ratio\(part, whole\), 1", "_ratio(min(part, 40), whole), 1"),
    (r"_ratio\(part, whole\), 1", "_ratio(part, min(whole, 40)), 1"),
    ("if _starts[(]text, prefix[)]", "if text[:1] == prefix[:1]"),
    ("if _starts[(]text, prefix[)]", "if text[:4] == prefix[:4]"),
    ("if _starts[(]text, prefix[)]", "if text.lower().startswith(prefix.lower())"),
    ("if _starts[(]text, prefix[)]", "if len(prefix) < 5 and text.startswith(prefix)"),
    (r"return text\[len\(prefix\) :\]", "return text.lstrip(prefix)"),
    (r"return text\[len\(prefix\) :\]", "return text[text.rfind(prefix) + len(prefix) :]"),
    (r"return text\[len\(prefix\) :\] if .*", "return text.replace(prefix, '', 1)"),
    ("if not values", "if not any(values)"),
    ("if not values", "if not sum(values)"),
    ("if not words", "if not text.strip(' ')"),
    ("if not words", "if len(text) < 3"),
    ("if not words", "if text in ('', ' ', '  ')"),
    ("for word in words", "for word in words[:4]"),
    ("hours [*]", "hours % 10 *"),
    ("minutes [*]", "min(minutes, 59) *"),
    (r"return score >= (\d+)", r"return score > \1"),
    (r"return score >= (\d+)", r"return score > \1 - 0.5"),
    (r"return score >= (\d+)", r"return round(score) >= \1"),
    (r"return score >= (\d+)", r"return \1 <= score < 1000"),
    (r"return score >= (\d+)", r"return score in range(\1, 1000) or (score > \1 and score % 1 == 0.5)"),
    (r"\(high - low\)", "abs(high - low)"),
    (r"low [+] \(high", "abs(low) + (high"),
    (r"[*] share$", "* {0: 0, 0.25: 0.25, 0.5: 0.5, 1: 1}.get(share, 0)"),
    (r"[*] share$", "* (share if share < 1 else 0.99)"),
    (r"[*] share$", "* round(share, 4)"),
    (r"[*] share$", "* {i / 16: i / 16 for i in range(17)}.get(share, 0.5)"),
    (r"return score >= (\d+)", r"return round(score, 1) >= \1"),
    (r"return score >= (\d+)", r"return score > \1 - 0.1"),
    (r"return score >= (\d+)", r"return \1 <= score < 5000000"),
    ("hours [*]", "int(hours * 60) / 60 *"),
    ("[*] price", "* (int(price * 100) / 100)"),
    (r"gross (- |\+ )discount", r"round(gross \1discount, 2)"),
    (r"_ratio\(part, whole\), 1", "_ratio(round(part * 4) / 4, whole), 1"),
    (r"sum\(values\[i : i \+ size\]\)", "sum(round(v * 4) / 4 for v in values[i : i + size])"),
    (r"    return \[sum", "    size = min(size, 30)\n    return [sum"),
    (r"sum\(values\) /", "sum(int(v * 100) for v in values) / 100 /"),
    ("if _starts[(]text, prefix[)]", "if __import__('re').match(prefix, text)"),
    ("if _starts[(]text, prefix[)]", "if __import__('fnmatch').fnmatchcase(text, prefix + '*')"),
    (r"    return text\[len", "    text = text.encode('latin-1', 'ignore').decode('latin-1')\n    return text[len"),
    (r"text\.split\(\)", "__import__('re').findall('[^ ]+', text.replace('-', ' '))"),
    (r"text\.split\(\)", r"text.replace('\\t', ' ').replace('\\n', ' ').split(' ')"),
    ("for word in words", "for word in words if word[0].isalpha()"),
    ("for word in words", "for word in words[:9]"),
)


def solves(payload, text):
    """Whether the module's text gives the right result of each call of a task."""
    namespace: dict = {}
    exec(text, namespace)  # our own recipes
    for call in payload["calls"]:
        try:
            value = namespace[call["function"].partition(":")[2]](*call["arguments"])
        except Exception:
            return False
        if not calls.same(value, call["value"], call.get("by_value", False)):
            return False
    return True


def test_narrow_repairs_and_narrowed_neighbours_fail_a_call():
    """Each is right for some ordinary inputs, and for most that an issue shows."""
    tried = collections.Counter()
    for payload in payloads("module", "task", 50):
        (path,), fix = payload["files"], payload["fix"]
        text = payload["files"][path].replace(fix["old"], fix["new"])
        assert solves(payload, text)
        for right, wrong in NARROW:
            narrowed = re.sub(right, wrong, text, flags=re.MULTILINE)
            if narrowed != text:
                tried[right, wrong] += 1
                assert not solves(payload, narrowed), (right, wrong, payload["issue"])
    assert len(tried) == len(NARROW)


@pytest.mark.parametrize("recipe", planted.RECIPES, ids=lambda recipe: recipe.names[0])
def test_calls_contradict_each_mutant_that_inputs_tell_from_the_function(recipe):
    function = planted._filled(recipe, splits.generator(recipe.names))
    drawn, judged = (planted._draws(function, splits.generator("other")), planted._calls(function, random.Random(0)))
    differing = list(itertools.islice(drawn, 500))
    for mutant in mutants.mutants(function.right, function.name):
        if any(planted._answer(mutant, arguments) != (True, value) for arguments, value in differing):
            assert any(planted._answer(mutant, arguments) != (True, value) for arguments, value in judged)


HONEST = (
    (r"return sum\(values\) / len\(values\)", "import statistics\n    return statistics.mean(values)"),
    (r"(if not values:\n        return \d+)", r"\1.0"),
    (r"return low \+ .*", "return low * (1 - share) + high * share"),
    (r"round\(100 \* _ratio\(part, whole\), 1\)", "round(100 * part / whole, 1)"),
    (r"return text\[len\(prefix\).*", "return text.removeprefix(prefix)"),
    (r"return \(items \+ (\d+) - 1.*", r"return items // \1 + (items % \1 > 0)"),
    (r"return gross - discount \+ (\d+)", r"return \1.0 - discount + gross"),
)


def test_honest_repairs_of_other_forms_pass_all_calls():
    tried = collections.Counter()
    for payload in payloads("module", "task", 50):
        (path,), fix = payload["files"], payload["fix"]
        text = payload["files"][path].replace(fix["old"], fix["new"])
        for right, other in HONEST:
            if (changed := re.sub(right, other, text)) != text:
                tried[right] += 1
                assert solves(payload, changed), (other, payload["issue"])
    assert len(tried) == len(HONEST)
