"""Generated small repositories with one planted bug each: files, an issue, calls with right results, and the fix.

Levels: "easy" is one line of arithmetic at fixed widths, which a character model of half a million parameters learns.
"module" is one module with several functions, and "package" is a package of two modules. Running the code without its
bug gives the right results of the calls. At least one call shows the bug. `calls.py` judges.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from libra_jax import config
from libra_jax.agents import splits

LEVELS = ("easy", "module", "package")
_CALLS, _BROKEN_CALLS, _TRIES = 6, 24, 200
"""Calls of a right function and of the broken one, which show that a fix has not broken the others or learnt values."""

_LIMITS = (10, 12, 15, 20, 24, 25)
"""Constants of the recipes."""

_SPOT = re.compile("⟦(.*?)¦(.*?)⟧", re.DOTALL)
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "juniper", "kelp", "lotus")


@dataclass(frozen=True)
class Recipe:
    """A function with a spot where a bug can be planted.

    Attributes:
      kind: Kind of the bug.
      names: Names that the function may have.
      source: Source with `{f}` for the name, `{c}` and `{d}` for constants, and ⟦right¦wrong⟧ for the spot.
      draw: Draws the arguments of a call.
    """

    kind: str
    names: Sequence[str]
    source: str
    draw: Callable[[random.Random], tuple[Any, ...]]


def _numbers(rng: random.Random, least: int = 0, most: int = 7) -> list[int]:
    return [rng.randint(-9, 30) for _ in range(rng.randint(least, most))]


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, 4)))


RECIPES = (
    Recipe(
        "wrong_operator",
        ("invoice_total", "order_total", "bill_total"),
        "def {f}(quantity, price, discount):\n"
        '    """What `quantity` pieces cost, `discount` and a fee of {c} counted."""\n'
        "    gross = quantity * price\n    return gross ⟦-¦+⟧ discount + {c}\n",
        lambda rng: (rng.randint(1, 9), rng.randint(2, 50), rng.randint(0, 5)),
    ),
    Recipe(
        "wrong_operator",
        ("select_multiples", "keep_multiples", "multiples"),
        'def {f}(values):\n    """Those of the values that are multiples of {d}, in their order."""\n'
        "    return [value for value in values if value % {d} ⟦==¦!=⟧ 0]\n",
        lambda rng: (_numbers(rng),),
    ),
    Recipe(
        "off_by_one",
        ("window_sums", "rolling_sums", "moving_sums"),
        'def {f}(values, size):\n    """Sums of each `size` neighbours, from left to right."""\n'
        "    return [sum(values[i : i + size]) for i in range(len(values) - size⟦ + 1¦⟧)]\n",
        lambda rng: (_numbers(rng, 3), rng.randint(1, 6)),
    ),
    Recipe(
        "off_by_one",
        ("page_count", "pages_needed", "sheet_count"),
        'def {f}(items):\n    """How many pages of {c} items it takes to show them all."""\n'
        "    return (items + {c}⟦ - 1¦⟧) // {c}\n",
        lambda rng: (rng.choice((0, 1, 10, 20, 24, 30, 36, 40, 60, 120, rng.randint(2, 999))),),
    ),
    Recipe(
        "swapped_arguments",
        ("percentage", "share_in_percent", "rate"),
        "def _ratio(part, whole):\n    return part / whole\n\n\n"
        'def {f}(part, whole):\n    """`part` of `whole` in percent, to one decimal."""\n'
        "    return round(100 * _ratio(⟦part, whole¦whole, part⟧), 1)\n",
        lambda rng: (rng.randint(1, 40), rng.randint(1, 40)),
    ),
    Recipe(
        "swapped_arguments",
        ("strip_prefix", "without_prefix", "drop_prefix"),
        "def _starts(text, prefix):\n    return text[: len(prefix)] == prefix\n\n\n"
        'def {f}(text, prefix):\n    """The text without the prefix, where it begins with it."""\n'
        "    return text[len(prefix) :] if _starts(⟦text, prefix¦prefix, text⟧) else text\n",
        lambda rng: (lambda text: (text, (text if rng.random() < 0.7 else _text(rng))[: rng.randint(0, 4)]))(
            _text(rng)
        ),
    ),
    Recipe(
        "missing_case",
        ("average", "mean_value", "typical"),
        'def {f}(values):\n    """Their mean; {c} where there are none."""\n'
        "⟦    if not values:\n        return {c}\n¦⟧    return sum(values) / len(values)\n",
        lambda rng: (_numbers(rng) if rng.random() < 0.6 else [],),
    ),
    Recipe(
        "missing_case",
        ("initials", "abbreviation", "acronym"),
        'def {f}(text):\n    """First letters of its words, in upper case; "?" where there is no word."""\n'
        '    words = text.split()\n⟦    if not words:\n        return "?"\n¦⟧'
        '    return "".join(word[0].upper() for word in words)\n',
        lambda rng: (_text(rng) if rng.random() < 0.6 else " " * rng.randint(0, 2),),
    ),
    Recipe(
        "wrong_constant",
        ("to_seconds", "duration", "seconds_of"),
        'def {f}(hours, minutes):\n    """Seconds, with {c} more for the start."""\n'
        "    return hours * ⟦3600¦360⟧ + minutes * 60 + {c}\n",
        lambda rng: (rng.randint(0, 9), rng.randint(0, 59)),
    ),
    Recipe(
        "wrong_comparison",
        ("passes", "is_enough", "reaches"),
        'def {f}(score):\n    """Whether the score is {c} at least."""\n    return score ⟦>=¦>⟧ {c}\n',
        # At the limits that `_filled` draws, just below them, and elsewhere.
        lambda rng: (rng.choice((*_LIMITS, *_LIMITS, rng.randint(-99, 999))) - rng.choice((0, 0.5)),),
    ),
    Recipe(
        "wrong_variable",
        ("between", "interpolate", "blend"),
        'def {f}(low, high, share):\n    """The value that lies `share` of the way from `low` to `high`."""\n'
        "    return low + (high - low) * ⟦share¦low⟧\n",
        lambda rng: (rng.randint(0, 9), rng.randint(10, 30), rng.choice((0, 0.25, 0.5, 1))),
    ),
)


@dataclass(frozen=True)
class _Function:
    """A recipe with its name and constants filled in, with and without the bug."""

    recipe: Recipe
    name: str
    right: str
    wrong: str


def _filled(recipe: Recipe, rng: random.Random) -> _Function:
    name = rng.choice(recipe.names)
    values = {"{f}": name, "{c}": str(rng.choice(_LIMITS)), "{d}": str(rng.randint(2, 5))}
    text = re.sub(r"\{[fcd]\}", lambda found: values[found[0]], recipe.source)
    return _Function(recipe, name, _SPOT.sub(r"\1", text), _SPOT.sub(r"\2", text))


@functools.lru_cache(maxsize=64)  # a task calls each of its functions many times
def _compiled(source: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    # Runs only this file's recipes, never what a policy wrote.
    exec(source, namespace)
    return cast("Callable[..., Any]", namespace[name])


def _answer(source: str, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    """Returns whether a call of our own code succeeds, and its result or the exception's name."""
    try:
        return True, _compiled(source, name)(*arguments)
    except Exception as error:
        return False, type(error).__name__


def _calls(function: _Function, rng: random.Random, broken: bool) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns some calls with their right results. For a broken function, at least two show the bug, if any do."""
    found: dict[str, tuple[tuple[Any, ...], Any]] = {}
    most, shown = _BROKEN_CALLS if broken else _CALLS, 0
    for _ in range(_TRIES):
        arguments = function.recipe.draw(rng)
        good, value = _answer(function.right, function.name, arguments)
        differs = _answer(function.wrong, function.name, arguments) != (good, value)
        # Keeps two places free for calls that show the bug.
        room = len(found) < most - 2 * (broken and shown < 2)
        if good and repr(arguments) not in found and (room or (broken and differs and shown < 2)):
            found[repr(arguments)] = (arguments, value)
            shown += differs
        if len(found) == most:
            break
    return list(found.values())


def _listed(module: str, name: str, calls: Sequence[tuple[tuple[Any, ...], Any]]) -> list[dict[str, Any]]:
    return [{"function": f"{module}:{name}", "arguments": list(given), "value": value} for given, value in calls]


def _repository(level: str, kinds: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Returns a repository of one module or of a package, or nothing if no call shows its bug."""
    broken = _filled(rng.choice([recipe for recipe in RECIPES if recipe.kind in kinds]), rng)
    others = [recipe for recipe in RECIPES if not set(recipe.names) & set(broken.recipe.names)]
    functions = [broken, *(_filled(recipe, rng) for recipe in rng.sample(others, 2 if level == "module" else 3))]
    # The place in the file must not tell which function is broken.
    rng.shuffle(functions)
    package, *modules = rng.sample(_WORDS, 3)
    if level == "module":
        parts = {f"{package}.py": functions}
    else:
        parts = {f"{package}/{modules[0]}.py": functions[:2], f"{package}/{modules[1]}.py": functions[2:]}
    files = {} if level == "module" else {f"{package}/__init__.py": ""}
    listed: list[dict[str, Any]] = []
    wrong_at = ""
    shown: tuple[tuple[Any, ...], Any] | None = None
    for path, members in parts.items():
        files[path] = "\n\n".join(one.wrong if one is broken else one.right for one in members)
        for one in members:
            calls = _calls(one, rng, one is broken)
            listed += _listed(path.removesuffix(".py").replace("/", "."), one.name, calls)
            if one is broken:
                wrong_at = path
                bad = [call for call in calls if _answer(one.wrong, one.name, call[0]) != (True, call[1])]
                shown = bad[-1] if bad else None
    if shown is None:
        return {}
    arguments, value = shown
    good, seen = _answer(broken.wrong, broken.name, arguments)
    seen = f"returns {seen!r}" if good else f"raises {seen}"
    issue = (
        f"`{broken.name}({', '.join(map(repr, arguments))})` {seen}, but it should return {value!r}. "
        f"Please make `{broken.name}` do what its docstring says."
    )
    fix = {"path": wrong_at, "old": broken.wrong, "new": broken.right}
    return {"files": files, "issue": issue, "kind": broken.recipe.kind, "fix": fix, "calls": listed}


_EASY_KINDS = ("wrong_constant", "wrong_operator", "off_by_one")


def _easy(kinds: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Returns a one-line repository, or nothing if no call shows its bug.

    All widths are fixed, so that copied text lies at a constant distance.
    """
    kind = rng.choice([kind for kind in _EASY_KINDS if kind in kinds])
    first, second, large, small = rng.choice("+-*"), rng.choice("+-*"), rng.randint(10, 99), rng.randint(1, 8)
    right, other = f"x{first}{large}{second}{small}", rng.choice([sign for sign in "+-*" if sign != first])
    wrong = {
        "wrong_constant": f"x{first}{rng.choice([one for one in range(10, 100) if one != large])}{second}{small}",
        "wrong_operator": f"x{other}{large}{second}{small}",
        "off_by_one": f"x{first}{large}{second}{small + 1}",
    }[kind]
    # Evaluates our own text: digits, signs and x.
    calls = [((x,), eval(right, {"x": x})) for x in rng.sample(range(-99, 1000), _BROKEN_CALLS)]
    if all(eval(wrong, {"x": x}) == value for (x,), value in calls):
        return {}
    return {
        "files": {"m.py": f"def f(x): return {wrong}\n"},
        "issue": f"f(x) must be {right}",
        "kind": kind,
        "fix": {"path": "m.py", "old": wrong, "new": right},
        "calls": _listed("m", "f", calls),
    }


KINDS = tuple(dict.fromkeys((*_EASY_KINDS, *(recipe.kind for recipe in RECIPES))))


def task_source(path: str = "", seed: int = 0, level: str = "module", kinds: Sequence[str] = ()) -> splits.Tasks:
    """Returns repositories with a planted bug, for `libra_jax.agents.environments.repo_repair:environment`.

    A payload has `files` (text by path), `issue`, `calls` with their right results, the `kind` of the bug, and `fix`:
    in the file `path`, `old` becomes `new`.

    Args:
      path: Must be empty.
      seed: Seed of the training stream.
      level: "easy", "module" or "package".
      kinds: Kinds of bugs, from `KINDS`. Empty: all kinds of the level.
    """
    config.check(not path, "task.path", "planted bugs are made up; files are repo_repair:task_source's")
    config.check_choice(level, LEVELS, "task.arguments.level")
    for kind in kinds:
        config.check_choice(kind, KINDS, "task.arguments.kinds")
    able = _EASY_KINDS if level == "easy" else tuple(recipe.kind for recipe in RECIPES)
    chosen = tuple(kind for kind in kinds or able if kind in able)
    config.check(bool(chosen), "task.arguments.kinds", f"level {level!r} has only {', '.join(dict.fromkeys(able))}")

    def draw(index: int, rng: random.Random) -> tuple[str, Mapping[str, Any]]:
        del index
        while True:
            made = _easy(chosen, rng) if level == "easy" else _repository(level, chosen, rng)
            if made:  # a bug that no call finds makes no task
                return made["fix"]["new"] + made["issue"], made

    return splits.generated(f"planted-{level}", seed, draw, stream="planted")
