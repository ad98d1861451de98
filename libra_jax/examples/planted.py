"""Generated small repositories with one planted bug each: files, an issue, calls with right results, and the fix.

Levels: "easy" is one line of arithmetic at fixed widths, which a character model of half a million parameters learns.
"module" is one module with several functions, and "package" is a package of two modules. Running the code without its
bug gives the right results of the calls. Calls cover all
functions, at edges and in many combinations, so that a repair has to be right in general. `calls.py` judges.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from libra_jax import config as config_lib
from libra_jax.rollouts import splits

LEVELS = ("easy", "module", "package")
_CALLS = 30
"""Calls of a function that are drawn for each task, next to those that all tasks with this function share."""

_LIMITS = (10, 12, 15, 20, 24, 25)
"""Constants of the recipes."""

_SPOT = re.compile("⟦(.*?)¦(.*?)⟧", re.DOTALL)
_ODD_WORDS = [
    "éa",
    "e\u0301a",
    "ßa",
    "日本",
    "jean-luc",
    "o'brien",
    "3rd",
    "v1.2",
    "a.b",
    "(a)",
    "[ab]",
    "x*",
    "?",
    "a|b",
]
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "juniper", "kelp", "lotus")


@dataclass(frozen=True)
class Recipe:
    """A function with a spot where a bug can be planted.

    Attributes:
      kind: Kind of the bug.
      names: Names that the function may have.
      source: Source with `{f}` for the name, `{c}` and `{d}` for constants, and ⟦right¦wrong⟧ for the spot.
      draw: Draws the arguments of a call, given the constants of the function. Its docstring says what is right for
        them, and no order of operations changes it.
    """

    kind: str
    names: Sequence[str]
    source: str
    draw: Callable[[random.Random, Sequence[int]], tuple[Any, ...]]


def _number(rng: random.Random, near: Sequence[int], lowest: int = -(10**6)) -> int:
    """Draws an edge, a number next to one of `near` or its multiples, or one of up to six digits."""
    edge = rng.choice((0, 1, 2, 3, 10, 60, 100, 10**7))
    multiple = rng.choice(near) * rng.choice((1, 1, rng.randint(0, 10 ** rng.randint(1, 4)))) + rng.randint(-1, 1)
    digits = rng.randint(0, 10 ** rng.randint(1, 6))
    return max(lowest, rng.choice((1, 1, -1)) * rng.choice((edge, multiple, digits)))


def _decimal(rng: random.Random, near: Sequence[int], lowest: int = -(10**6)) -> float:
    """Draws a number of few binary places. Sums of them are exact in any order, and products nearly (`calls.same`)."""
    return _number(rng, near, lowest) + rng.choice(
        (0, 0, 0, 0.25, 0.5, 0.75, 1 / 1024, 1023 / 1024, rng.randint(1, 1023) / 1024)
    )


def _share(rng: random.Random) -> float:
    return rng.choice((0, 1, rng.randint(1, 15) / 16, rng.randint(1, 2**20 - 1) / 2**20))


def _list(rng: random.Random, draw: Callable[..., float], near: Sequence[int]) -> list[float]:
    pool = [draw(rng, near) for _ in range(rng.choice((1, 2, 9)))]
    values = rng.choices(pool, k=rng.choice((0, 1, 2, 3, rng.randint(4, 9), rng.randint(21, 90))))
    return values + [-value for value in values] * (rng.random() < 0.2)


def _text(rng: random.Random) -> str:
    odd_words = rng.choices(_ODD_WORDS, k=5)
    words = rng.choices((*_WORDS, "a", "aa", "Aab", "AMBER", *odd_words), k=rng.choice((0, 1, 1, 2, 3, 5, 9, 14)))
    blanks = rng.choices((" ", " ", "   ", "\t", "\n ", "\r\n"), k=len(words) + 1)
    text = blanks[0] + "".join(word + blank for word, blank in zip(words, blanks[1:], strict=True))
    return rng.choice((text, text.strip(), text.strip()))


def _text_and_prefix(rng: random.Random) -> tuple[str, str]:
    text = _text(rng)
    end = rng.randint(0, min(len(text), rng.choice((3, 9, 40))))
    begin, inside = text[:end], text[end : end + rng.randint(1, 3)]
    # As a pattern, these fit the text; as a text, they do not begin it.
    patterns = [begin[:-1] + "?", begin[:-1] + ".", f"{begin}*", f"[{begin}]"]
    prefix = rng.choice((begin, begin, begin, begin.swapcase(), begin[:-1] + "z", inside, text + "a", *patterns))
    return rng.choice((text, text, prefix * 2 + text, text + prefix)), prefix


def _part_and_whole(rng: random.Random, near: Sequence[int]) -> tuple[float, int]:
    part, total = _decimal(rng, near), _number(rng, near, 1)
    # Half of a last digit is rounded up or down, depending on the order of operations.
    return (part, total) if 2000 * part % (2 * total) != total else _part_and_whole(rng, near)


RECIPES = (
    Recipe(
        "wrong_operator",
        ("invoice_total", "order_total", "bill_total"),
        "def {f}(quantity, price, discount):\n"
        '    """What `quantity` pieces cost, `discount` and a fee of {c} counted."""\n'
        "    gross = quantity * price\n    return gross ⟦-¦+⟧ discount + {c}\n",
        lambda rng, near: (_number(rng, near, 0), _decimal(rng, near, 0), _decimal(rng, near, 0)),
    ),
    Recipe(
        "wrong_operator",
        ("select_multiples", "keep_multiples", "multiples"),
        'def {f}(values):\n    """Those of the values that are multiples of {d}, in their order."""\n'
        "    return [value for value in values if value % {d} ⟦==¦!=⟧ 0]\n",
        lambda rng, near: (_list(rng, _number, near),),
    ),
    Recipe(
        "off_by_one",
        ("window_sums", "rolling_sums", "moving_sums"),
        'def {f}(values, size):\n    """Sums of each `size` neighbours, from left to right."""\n'
        "    return [sum(values[i : i + size]) for i in range(len(values) - size⟦ + 1¦⟧)]\n",
        lambda rng, near: (_list(rng, _decimal, near), rng.choice((1, 2, 3, rng.randint(4, 9), rng.randint(10, 80)))),
    ),
    Recipe(
        "off_by_one",
        ("page_count", "pages_needed", "sheet_count"),
        'def {f}(items):\n    """How many pages of {c} items it takes to show them all."""\n'
        "    return (items + {c}⟦ - 1¦⟧) // {c}\n",
        lambda rng, near: (_number(rng, near, 0),),
    ),
    Recipe(
        "swapped_arguments",
        ("percentage", "share_in_percent", "rate"),
        "def _ratio(part, whole):\n    return part / whole\n\n\n"
        'def {f}(part, whole):\n    """`part` of `whole` in percent, to one decimal."""\n'
        "    return round(100 * _ratio(⟦part, whole¦whole, part⟧), 1)\n",
        _part_and_whole,
    ),
    Recipe(
        "swapped_arguments",
        ("strip_prefix", "without_prefix", "drop_prefix"),
        "def _starts(text, prefix):\n    return text[: len(prefix)] == prefix\n\n\n"
        'def {f}(text, prefix):\n    """The text without the prefix, where it begins with it."""\n'
        "    return text[len(prefix) :] if _starts(⟦text, prefix¦prefix, text⟧) else text\n",
        lambda rng, near: _text_and_prefix(rng),
    ),
    Recipe(
        "missing_case",
        ("average", "mean_value", "typical"),
        'def {f}(values):\n    """Their mean; {c} where there are none."""\n'
        "⟦    if not values:\n        return {c}\n¦⟧    return sum(values) / len(values)\n",
        lambda rng, near: (_list(rng, _decimal, near),),
    ),
    Recipe(
        "missing_case",
        ("initials", "abbreviation", "acronym"),
        'def {f}(text):\n    """First letters of its words, in upper case; "?" where there is no word."""\n'
        '    words = text.split()\n⟦    if not words:\n        return "?"\n¦⟧'
        '    return "".join(word[0].upper() for word in words)\n',
        lambda rng, near: (_text(rng),),
    ),
    Recipe(
        "wrong_constant",
        ("to_seconds", "duration", "seconds_of"),
        'def {f}(hours, minutes):\n    """Seconds, with {c} more for the start."""\n'
        "    return hours * ⟦3600¦360⟧ + minutes * 60 + {c}\n",
        lambda rng, near: (_decimal(rng, near, 0), _decimal(rng, near, 0)),
    ),
    Recipe(
        "wrong_comparison",
        ("passes", "is_enough", "reaches"),
        'def {f}(score):\n    """Whether the score is {c} at least."""\n    return score ⟦>=¦>⟧ {c}\n',
        lambda rng, near: (_decimal(rng, near),),
    ),
    Recipe(
        "wrong_variable",
        ("between", "interpolate", "blend"),
        'def {f}(low, high, share):\n    """The value that lies `share` of the way from `low` to `high`."""\n'
        "    return low + (high - low) * ⟦share¦low⟧\n",
        lambda rng, near: (_decimal(rng, near), _decimal(rng, near), _share(rng)),
    ),
)


_Call = tuple[tuple[Any, ...], Any]


@dataclass(frozen=True)
class _Function:
    """A recipe with its name and constants filled in, with and without the bug."""

    recipe: Recipe
    name: str
    right: str
    wrong: str

    @property
    def near(self) -> Sequence[int]:
        """The constants of the function, next to which it is most often wrong."""
        return [int(digits) for digits in re.findall(r"\d+", self.right) if int(digits)] or [10]


def _filled(recipe: Recipe, rng: random.Random) -> _Function:
    name = rng.choice(recipe.names)
    values = {"{f}": name, "{c}": str(rng.choice(_LIMITS)), "{d}": str(rng.randint(2, 5))}
    text = re.sub(r"\{[fcd]\}", lambda match: values[match[0]], recipe.source)
    return _Function(recipe, name, _SPOT.sub(r"\1", text), _SPOT.sub(r"\2", text))


@functools.lru_cache(maxsize=64)  # a task calls each of its functions many times
def _compiled(source: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    # Runs only this file's recipes, never what a policy wrote.
    exec(source, namespace)
    return cast("Callable[..., Any]", namespace[name])


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """Returns whether a call of our own code succeeds, and its result or the exception's name."""
    try:
        return True, function(*arguments)
    except Exception as error:
        return False, type(error).__name__


def _draws(function: _Function, rng: random.Random) -> Iterator[_Call]:
    """Yields calls with their right results."""
    while True:
        arguments = function.recipe.draw(rng, function.near)
        good, value = _answer(_compiled(function.right, function.name), arguments)
        if good:
            yield arguments, value


def _classes(argument: Any, near: Sequence[int]) -> set[Any]:
    """Returns what an argument is like. A wrong repair is often right for arguments of some classes only."""
    match argument:
        case str():
            short = argument if len(argument) < 4 else None
            kinds = {sign if sign.isspace() else unicodedata.category(sign) for sign in argument}
            return {short, *kinds, ("lower", argument.islower()), ("long", len(argument.split()) > 9)}
        case list():
            return {
                (min(len(argument), 9), len(argument) > 30),
                len({*argument}) < len(argument),
                (any(argument), sum(argument) != 0),
            }
        case _:
            size = int(argument) if -2 < argument < 10 else len(str(int(argument))) + 10
            part = argument % 1
            fraction = part if part * 4 % 1 == 0 else "sixteenth" if part * 16 % 1 == 0 else "finer"
            distances = ((k, max(-1, min(argument - k, 1)), argument % k == 0, abs(argument - k) < 0.01) for k in near)
            return {size, (fraction,), *distances}


@functools.lru_cache(maxsize=256)
def _cover(function: _Function) -> Sequence[_Call]:
    """Returns calls that show each pair of an argument's classes that some draws show, with and without an effect."""
    covered_pairs: set[Any] = set()
    cover = []
    for arguments, value in itertools.islice(_draws(function, splits.generator("cover")), 1000):
        call_pairs = set()
        for place, argument in enumerate(arguments):
            pairs = itertools.product(_classes(argument, function.near), repeat=2)
            call_pairs |= {(place, *pair, not value, value in arguments) for pair in pairs}
        if call_pairs - covered_pairs:
            cover.append((arguments, value))
            covered_pairs |= call_pairs
    return cover


def _calls(function: _Function, rng: random.Random) -> Sequence[_Call]:
    """Returns calls with their right results."""
    # The first ones do not depend on the name, so that functions of other names share them.
    right = function.right.replace(f"def {function.name}(", "def f(")
    cover = _cover(_Function(function.recipe, "f", right, wrong=""))
    return [*cover, *itertools.islice(_draws(function, rng), _CALLS)]


def _listed(module: str, name: str, calls: Sequence[_Call]) -> list[dict[str, Any]]:
    """Returns calls as a task has them. No docstring promises an int or a float, so numbers are compared by value."""
    common = {"function": f"{module}:{name}", "by_value": True}
    return [{**common, "arguments": list(arguments), "value": value} for arguments, value in calls]


def _repository(level: str, kinds: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Returns a repository of one module or of a package."""
    broken = _filled(rng.choice([recipe for recipe in RECIPES if recipe.kind in kinds]), rng)
    correct_recipes = [recipe for recipe in RECIPES if not set(recipe.names) & set(broken.recipe.names)]
    functions = [
        broken,
        *(_filled(recipe, rng) for recipe in rng.sample(correct_recipes, 2 if level == "module" else 3)),
    ]
    # The place in the file must not tell which function is broken.
    rng.shuffle(functions)
    package, *modules = rng.sample(_WORDS, 3)
    if level == "module":
        parts = {f"{package}.py": functions}
    else:
        parts = {f"{package}/{modules[0]}.py": functions[:2], f"{package}/{modules[1]}.py": functions[2:]}
    files = {} if level == "module" else {f"{package}/__init__.py": ""}
    listed: list[dict[str, Any]] = []
    for path, members in parts.items():
        files[path] = "\n\n".join(function.wrong if function is broken else function.right for function in members)
        for function in members:
            calls = _calls(function, rng)
            listed += _listed(path.removesuffix(".py").replace("/", "."), function.name, calls)
            if function is broken:
                wrong_at, bug = path, _compiled(function.wrong, function.name)
                failing_calls = [call for call in calls if _answer(bug, call[0]) != (True, call[1])]
    # A short example of some.
    arguments, value = min(rng.sample(failing_calls, min(3, len(failing_calls))), key=lambda call: len(repr(call)))
    good, outcome = _answer(bug, arguments)
    outcome = f"returns {outcome!r}" if good else f"raises {outcome}"
    issue = (
        f"`{broken.name}({', '.join(map(repr, arguments))})` {outcome}, but it should return {value!r}. "
        f"Please make `{broken.name}` do what its docstring says."
    )
    fix = {"path": wrong_at, "old": broken.wrong, "new": broken.right}
    return {"files": files, "issue": issue, "kind": broken.recipe.kind, "fix": fix, "calls": listed}


_EASY_KINDS = ("wrong_constant", "wrong_operator", "off_by_one")
_EASY = Recipe("", (), "", lambda rng, near: (_decimal(rng, near),))


def _easy(kinds: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Returns a one-line repository. All widths are fixed, so that copied text lies at a constant distance."""
    kind = rng.choice([kind for kind in _EASY_KINDS if kind in kinds])
    first, second, large, small = rng.choice("+-*"), rng.choice("+-*"), rng.randint(10, 99), rng.randint(1, 8)
    right, wrong_sign = f"x{first}{large}{second}{small}", rng.choice([sign for sign in "+-*" if sign != first])
    wrong = {
        "wrong_constant": f"x{first}{rng.choice([one for one in range(10, 100) if one != large])}{second}{small}",
        "wrong_operator": f"x{wrong_sign}{large}{second}{small}",
        "off_by_one": f"x{first}{large}{second}{small + 1}",
    }[kind]
    function = _Function(_EASY, "f", f"def f(x): return {right}\n", f"def f(x): return {wrong}\n")
    return {
        "files": {"m.py": function.wrong},
        "issue": f"f(x) must be {right}",
        "kind": kind,
        "fix": {"path": "m.py", "old": wrong, "new": right},
        "calls": _listed("m", "f", list(itertools.islice(_draws(function, rng), 2 * _CALLS))),
    }


KINDS = tuple(dict.fromkeys((*_EASY_KINDS, *(recipe.kind for recipe in RECIPES))))


def task_source(path: str = "", seed: int = 0, level: str = "module", kinds: Sequence[str] = ()) -> splits.Tasks:
    """Returns repositories with a planted bug, for `libra_jax.environments.repo_repair:environment`.

    A payload has `files` (text by path), `issue`, `calls` with their right results, the `kind` of the bug, and `fix`:
    in the file `path`, `old` becomes `new`.

    Args:
      path: Must be empty.
      seed: Seed of the training stream.
      level: "easy", "module" or "package".
      kinds: Kinds of bugs, from `KINDS`. Empty: all kinds of the level.
    """
    config_lib.check(not path, "task.path", "planted bugs are made up; files are repo_repair:task_source's")
    config_lib.check_choice(level, LEVELS, "task.arguments.level")
    for kind in kinds:
        config_lib.check_choice(kind, KINDS, "task.arguments.kinds")
    able = _EASY_KINDS if level == "easy" else tuple(recipe.kind for recipe in RECIPES)
    chosen = tuple(kind for kind in kinds or able if kind in able)
    config_lib.check(bool(chosen), "task.arguments.kinds", f"level {level!r} has only {', '.join(dict.fromkeys(able))}")

    def draw(index: int, rng: random.Random) -> tuple[str, Mapping[str, Any]]:
        del index
        payload = _easy(chosen, rng) if level == "easy" else _repository(level, chosen, rng)
        return payload["fix"]["new"] + payload["issue"], payload

    return splits.generated(f"planted-{level}", seed, draw, stream="planted")
