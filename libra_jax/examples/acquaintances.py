"""A generated society as a corpus, and questions about it that only a search can answer.

Each passage tells one person's job, city and friend: "Kamoru is a pilot in Velita and a friend of Betino." Half of the
questions need one search ("City of Kamoru?"). The other half need two ("Job of the friend of Kamoru?"), because the
first result contains the friend's name. Names mean nothing, so a policy cannot know the answers; it has to search.

A character model of half a million parameters can learn these tasks on a CPU. All names have six letters, all jobs have
five, and a question ends with the name. So the copied text always lies at the same few distances.

  config.task.source = "libra_jax.examples.acquaintances:task_source"
  config.tools.arguments = {"search": {"source": "libra_jax.examples.acquaintances:corpus", ...}}

`write` writes the same as files: a corpus, and questions for `libra_jax.environments.datasets:task_source`.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import config as config_lib
from libra_jax.rollouts import splits

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_LAST_VOWELS = "aou"
"""Last letters of names. No rule of the Porter stemmer removes them, so the search never takes two names for one."""

_NAMES = (len(_CONSONANTS) * len(_VOWELS)) ** 2 * len(_CONSONANTS) * len(_LAST_VOWELS)
"""Number of names: two syllables, and a third that ends in one of the last vowels."""

_JOBS = ("baker", "clerk", "coach", "diver", "guard", "judge", "mason", "miner", "nurse", "pilot", "tutor", "valet")
_ASKED = ("City", "Job")

PEOPLE_PER_CITY = 4
MOST_PEOPLE = 100_000


@dataclass(frozen=True)
class Person:
    """A person of the society. `friend` is the friend's position among the people."""

    name: str
    job: str
    city: str
    friend: int


# Cached, because the tasks and the corpus of a run ask for the same world.
@functools.lru_cache(maxsize=4)
def society(people: int = 2000, world: int = 0) -> tuple[Person, ...]:
    """Returns the people of a world.

    Args:
      people: Number of people.
      world: Number of the world. Different worlds have different people.
    """
    field = "task.arguments.people"
    config_lib.check(8 <= people <= MOST_PEOPLE, field, f"must lie in 8..{MOST_PEOPLE}, not {people}")
    # Independent of the run's seed: the tasks and the corpus are made apart, and must show the same world.
    rng = splits.generator("acquaintances", "world", world)
    cities = people // PEOPLE_PER_CITY
    # One sample without repetition for both, so that no city has the name of a person.
    numbers = rng.sample(range(_NAMES), people + cities)
    words = []
    for number in numbers:
        letters = []
        for alphabet in (_LAST_VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS):
            number, place = divmod(number, len(alphabet))
            letters.append(alphabet[place])
        words.append("".join(reversed(letters)).capitalize())
    names, towns = words[:people], words[people:]
    order = list(range(people))
    rng.shuffle(order)
    # One ring: every person is the friend of exactly one other.
    friends = dict(zip(order, [*order[1:], order[0]], strict=True))
    return tuple(Person(name, rng.choice(_JOBS), rng.choice(towns), friends[place]) for place, name in enumerate(names))


def passage(people: Sequence[Person], place: int) -> str:
    """Returns the corpus's passage about a person."""
    person = people[place]
    friend = people[person.friend].name
    return f"{person.name} is a {person.job} in {person.city} and a friend of {friend}."


def corpus(people: int = 2000, world: int = 0) -> Iterator[Mapping[str, str]]:
    """Yields the passages in the form of the search tool: "id", "title" and "text".

    The arguments are those of `society`.
    """
    everybody = society(people, world)
    for place, person in enumerate(everybody):
        yield {"id": f"person-{place}", "title": person.name, "text": passage(everybody, place)}


def question(people: Sequence[Person], place: int, fact: str, searches: int) -> Mapping[str, object]:
    """Returns the payload of a task.

    Args:
      people: People of the world.
      place: Position of the person that the question names.
      fact: "City" or "Job".
      searches: 1 to ask about the person, 2 to ask about the person's friend.
    """
    # The first search finds the friend's name, and the second one the answer.
    path = [place] if searches == 1 else [place, people[place].friend]
    person = people[path[-1]]
    of_friend = "the friend of " if searches == 2 else ""
    return {
        "prompt": f"{fact} of {of_friend}{people[place].name}?",
        "answer": person.city if fact == "City" else person.job,
        "lookups": [[people[step].name, passage(people, step)] for step in path],
    }


def task_source(
    path: str = "",
    seed: int = 0,
    people: int = 2000,
    world: int = 0,
    asked: Sequence[str] = _ASKED,
    searches: Sequence[int] = (1, 2),
) -> splits.Tasks:
    """Returns a source of generated questions for `environments.search_qa`. The kinds of questions take turns.

    Args:
      path: Must be empty.
      seed: Seed of the training stream.
      people: Number of people in the world. Must equal the search tool's.
      world: Number of the world. Must equal the search tool's.
      asked: Facts to ask for: "City", "Job" or both.
      searches: Number of searches that a question takes: 1, 2 or both.
    """
    elsewhere = (
        "these questions are generated; for a file set task.source to libra_jax.environments.datasets:task_source"
    )
    config_lib.check(not path, "task.path", elsewhere)
    good = bool(searches) and set(searches) <= {1, 2}
    config_lib.check(good, "task.arguments.searches", f"must hold 1, 2 or both, not {list(searches)}")
    good = bool(asked) and set(asked) <= set(_ASKED)
    config_lib.check(good, "task.arguments.asked", f"must hold City, Job or both, not {list(asked)}")
    kinds = [(thing, steps) for thing in asked for steps in searches]
    everybody = society(people, world)

    def draw(index: int, rng: random.Random) -> tuple[str, Mapping[str, object]]:
        payload = question(everybody, rng.randrange(people), *kinds[index % len(kinds)])
        return str(payload["prompt"]), payload

    return splits.generated("acquaintances", seed, draw)


def write(folder: str | Path, people: int = 2000, world: int = 0) -> None:
    """Writes a world as files: `corpus.jsonl` for the search tool, and `questions.jsonl` with each question once.

    A run uses the files with

      config.task.source = "libra_jax.environments.datasets:task_source"
      config.task.path = "<folder>/questions.jsonl"
      config.task.arguments = {"columns": ("lookups",)}
      config.tools.arguments = {"search": {"path": "<folder>/corpus.jsonl", ...}}
    """
    everybody, folder = society(people, world), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [(thing, steps) for thing in _ASKED for steps in (1, 2)]
    questions = [question(everybody, place, *kind) for place in range(people) for kind in kinds]
    splits.generator("acquaintances", "file", world).shuffle(questions)
    for name, rows in (("corpus", corpus(people, world)), ("questions", questions)):
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
