"""What a drill's records say: which prompts were trained once, which sentences tell what happened. Pure functions."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.drills import processes

STEP = re.compile(r"step +(\d+)/\d+  ")
_PROGRESS = re.compile(r"step +\d+/|libra-jax · |[\w.-]+: (idle|training step|training|starting|reading|saving)")
_SENTENCE = re.compile(r"[A-Z][\w']*:? .+ .+|[a-z]+[-.]\d+ [a-z]+ .+|error: .*|warning: .*")
_LOGGED = re.compile(r"[WE]\d{4} \S+ +\d+ [^\]]*\] ")
"""What stands before a library's warning."""


@dataclass(frozen=True)
class Prompts:
    """What became of the prompts of a run.

    Attributes:
      once: trained once, with every attempt.
      lost: never trained, or with too few attempts, and not reported as replaced.
      twice: trained in two steps, or with too many attempts.
      replaced: reported as such.
    """

    once: int = 0
    lost: int = 0
    twice: int = 0
    replaced: int = 0


def prompts(
    trace: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]], *, groups: int, attempts: int, steps: int
) -> Prompts:
    """Counts them.

    Args:
      trace: the records of `trace.jsonl`; prompts have their number after the last dash of their names.
      metrics: those of `metrics.jsonl`.
      groups: a step.
      attempts: a group.
      steps: of the whole run, which has ended.
    """
    times: collections.Counter[int] = collections.Counter()
    taken: collections.defaultdict[int, set[int]] = collections.defaultdict(set)
    for record in trace:
        prompt = int(record["prompt_id"].rpartition("-")[2])
        times[prompt] += 1
        taken[prompt].add(record["step"])
    replaced = sum(int(record.get("groups/replaced", 0)) for record in metrics)
    twice = {prompt for prompt in times if times[prompt] > attempts or len(taken[prompt]) > 1}
    short = {prompt for prompt in times if times[prompt] < attempts} - twice
    never = sum(prompt not in times for prompt in range(groups * steps + replaced))
    # One that is replaced may be the last, after which no one knows how many there would have been.
    lost = len(short) + max(0, never - replaced)
    return Prompts(len(times) - len(short) - len(twice), lost, len(twice), replaced)


def wrong_steps(metrics: Iterable[Mapping[str, Any]], steps: int) -> str:
    """What is wrong with the steps that were recorded, a sentence; empty if each of them is there once, in order."""
    found = [record["step"] for record in metrics if "loss" in record]
    if found == list(range(1, steps + 1)):
        return ""
    twice = [step for step, count in collections.Counter(found).items() if count > 1]
    missing = sorted(set(range(1, steps + 1)) - set(found))
    return f"metrics.jsonl holds steps {twice} twice and lacks {missing}"


def longest_step(metrics: Iterable[Mapping[str, Any]], after: int) -> float:
    """Seconds of the longest step after this one: a blow may cost nothing at once, where a batch is ready."""
    return max((record.get("step/seconds", 0.0) for record in metrics if record["step"] > after), default=0.0)


def last_step(log: str) -> int:
    """The last step that a log tells of; 0 if none."""
    return max((int(found[1]) for line in log.splitlines() if (found := STEP.match(line))), default=0)


def sentences(log: str) -> list[str]:
    """The lines of a log that tell something: no steps, no progress; each once, in order."""
    lines = (_LOGGED.sub("", line.strip()) for line in log.splitlines())
    return list(dict.fromkeys(line for line in lines if _SENTENCE.fullmatch(line) and not _PROGRESS.match(line)))


@dataclass(frozen=True)
class Outcome:
    """What came of one drill.

    Attributes:
      drill: its name, and its number where there are several.
      hit: what was hit.
      when: at which moment of the run.
      said: what the run's log said of it.
      again_seconds: from the blow to the next training step done, or, where the run ended, from its restart command on;
        None: it did not go on.
      longest_step_seconds: of a step that was taken after the blow.
      ended: the run ended, and was started again.
      ended_seconds: from the blow to that end.
      prompts: what became of them.
      left: what was left when all had ended.
      seconds: the whole drill took.
      problems: what is not as it should be, in sentences.
      skipped: why it was not run; empty: it was.
    """

    drill: str
    hit: str = ""
    when: str = ""
    said: Sequence[str] = ()
    again_seconds: float | None = None
    longest_step_seconds: float = 0.0
    ended: bool = False
    ended_seconds: float | None = None
    prompts: Prompts = field(default_factory=Prompts)
    left: processes.Left = field(default_factory=processes.Left)
    seconds: float = 0.0
    problems: Sequence[str] = ()
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems and not self.skipped


def problems(
    *,
    log: str,
    said: Sequence[str],
    expected: str,
    again_seconds: float | None,
    ended: bool,
    may_end: bool,
    steps: str,
    trained: Prompts,
    left: processes.Left,
) -> list[str]:
    """What is not as a drill wants it, a sentence each; none: it has passed.

    Args:
      log: all that the run wrote to its terminal.
      said: its sentences from the blow on.
      expected: a regular expression, which one of those sentences has to match.
      again_seconds: as of `Outcome`.
      ended: likewise.
      may_end: it may, of what was hit; otherwise it has to go on by itself.
      steps: of `wrong_steps`.
      trained: of `prompts`.
      left: when all had ended.
    """
    found = []
    if not any(re.search(expected, sentence) for sentence in said):
        found.append(f"no sentence of the log tells what happened (none matches {expected!r})")
    if "Traceback (most recent call last)" in log:
        found.append("the log holds a traceback")
    if again_seconds is None:
        found.append("the run did not go on")
    if ended and not may_end:
        found.append("the run ended, and should have gone on by itself")
    if steps:
        found.append(steps)
    if trained.lost:
        found.append(f"{trained.lost} prompts were lost")
    if trained.twice:
        found.append(f"{trained.twice} prompts were trained twice")
    if not trained.once:
        found.append("no prompt was trained")
    for what in (*left.processes, *left.ports, *left.files):
        found.append(f"{what} was left behind")
    return found
