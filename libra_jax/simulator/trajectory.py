"""Trajectories of counted tokens: a context of 60,000 tokens is a handful of runs, and a turn costs a constant time.

They behave like `protocols.Trajectory` in every use of the agent loop and the coordinator, so both run unchanged.
"""

from __future__ import annotations

import asyncio
import bisect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.simulator import scripts

TEXT, SAMPLED, STOP = 0, 1, 2
"""Token ids of the simulated world: a token that no policy sampled, a sampled token, and the token that ends an
output."""


class Runs(Sequence[Any]):
    """A sequence kept as runs of equal values: append, length and last element cost a constant time.

    Attributes:
      name: name of the trajectory that owns the tokens; slices keep it, so that decoding finds the trajectory.
    """

    __slots__ = ("_ends", "_values", "name")

    def __init__(self, runs: Iterable[tuple[Any, int]] = (), name: str = "") -> None:
        self._values: list[Any] = []
        self._ends: list[int] = []
        self.name = name
        for value, count in runs:
            self.append_run(value, count)

    def append_run(self, value: Any, count: int) -> None:
        """Appends `count` copies of `value`."""
        if count <= 0:
            return
        end = self._ends[-1] + count if self._ends else count
        # Neighbours are kept different, so that equal sequences have equal runs (`__eq__`).
        if self._values and self._values[-1] == value:
            self._ends[-1] = end
        else:
            self._values.append(value)
            self._ends.append(end)

    def runs(self) -> Iterator[tuple[Any, int]]:
        """Yields each run's value and length."""
        start = 0
        for value, end in zip(self._values, self._ends, strict=True):
            yield value, end - start
            start = end

    def extend(self, values: Iterable[Any]) -> None:
        """Appends values, run by run if they come as runs."""
        for value, count in values.runs() if isinstance(values, Runs) else ((value, 1) for value in values):
            self.append_run(value, count)

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()
        self._ends.clear()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int | slice) -> Any:
        """Returns one value, or the runs of a slice."""
        if not isinstance(index, slice):
            at = index + len(self) if index < 0 else index
            if not 0 <= at < len(self):
                raise IndexError(index)
            return self._values[bisect.bisect_right(self._ends, at)]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError("a run-length sequence has slices of step 1 only")
        # Costs as many steps as the slice has runs, not tokens.
        part = Runs(name=self.name)
        at = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = min(self._ends[at], stop)
            part.append_run(self._values[at], end - start)
            start, at = end, at + 1
        return part

    def __iter__(self) -> Iterator[Any]:
        for value, count in self.runs():
            for _ in range(count):
                yield value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Runs):
            return self._values == other._values and self._ends == other._ends
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable, as a list is


class Context(Sequence[int]):
    """A segment's tokens at one moment, as a simulated engine is asked to continue them.

    Attributes:
      segment: owner of the tokens.
      turn: number of completed outputs, which is the index of the output to continue.
      sampled: tokens of that output which the context already holds.
      fresh: tokens at the end that no engine has seen: text since the last sampled token.
    """

    __slots__ = ("_length", "fresh", "sampled", "segment", "turn")

    def __init__(self, segment: Counted) -> None:
        self.segment = segment
        self.turn = segment.outputs
        self.sampled = segment.sampled
        self.fresh = segment.fresh
        self._length = segment.context_tokens

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice) -> Any:
        # The segment may have grown since; this context keeps its length.
        return _context_of(self.segment)[: self._length][index]


class Counted(protocols.Segment):
    """A `protocols.Segment` with counted tokens, and the lengths of its outputs.

    Only `token_ids` is kept; the other per-token sequences are built from parts on request.

    Attributes:
      lengths: tokens of each output that the script has for the segment.
      outputs: number of completed model outputs (with their stop token).
      sampled: tokens of the output in progress.
      fresh: tokens at the end that no policy sampled.
      life: number of times that the rollout was cleared, so that a prefix held for an earlier life is not reused.
      unstreamed: (version, tokens) that an engine sampled and had not streamed when the request left. A real engine
        streams every few tokens, a simulated one every thousand, so the next engine streams these as its own.
    """

    parent: Counted | None

    def _begin(self, trajectory_id: str, prompt_id: str, lengths: Sequence[int], index: int = 0) -> None:
        self.trajectory_id = trajectory_id
        self.prompt_id = prompt_id
        self.index, self.parent, self.shared = index, None, 0
        self.lengths = lengths
        self.token_ids: Any = Runs(name=self.name)
        self.turns = []
        self.routing = []
        self.reward = None
        self.outputs = self.sampled = self.fresh = self.life = 0
        self.unstreamed: list[tuple[int, int]] = []
        self._parts: list[tuple[protocols.TokenSource, int, protocols.TokenDelta | None]] = []
        self._generated = 0

    # By identity: the dataclass compares every field, which here would build the per-token ones, and has no hash.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def key(self) -> tuple[str, int]:
        """Name of the segment in its present life, under which an engine holds its keys and values."""
        return self.name, self.life

    def scripted(self, output: int) -> int:
        """Returns the tokens of an output. One beyond the script is one stop token: a tool that timed out took the
        place of the script's end."""
        return self.lengths[output] if output < len(self.lengths) else 1

    def append_text(self, token_ids: Sequence[int], source: protocols.TokenSource) -> None:
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self._parts.append((source, count, None))
        self.fresh += count

    def append_sampled(self, delta: protocols.TokenDelta) -> None:
        count = len(delta.token_ids)
        if not count:
            return
        self.token_ids.extend(delta.token_ids)
        self._parts.append((protocols.TokenSource.MODEL, count, delta))
        self._generated += count
        self.fresh = 0
        # A stop token ends the output; the next tokens belong to the next one.
        if delta.token_ids[-1] == STOP:
            self.outputs, self.sampled = self.outputs + 1, 0
        else:
            self.sampled += count

    def context(self) -> Context:
        return Context(self)

    @property
    def generated_tokens(self) -> int:
        return self._generated

    @property
    def prompt_tokens(self) -> int:
        return sum(count for source, count, _ in self._parts if source is protocols.TokenSource.PROMPT)

    @property
    def sources(self) -> Any:  # type: ignore[override]
        return Runs((int(source), count) for source, count, _ in self._parts)

    @property
    def loss_mask(self) -> Any:  # type: ignore[override]
        return Runs((int(delta is not None), count) for _, count, delta in self._parts)

    @property
    def log_probs(self) -> Any:  # type: ignore[override]
        return self._of_deltas("log_probs", 0.0)

    @property
    def policy_versions(self) -> Any:  # type: ignore[override]
        return self._of_deltas("policy_versions", protocols.NO_VERSION)

    def _of_deltas(self, name: str, elsewhere: float) -> Runs:
        values = Runs()
        # Text was not sampled: it has no log-probability and no version.
        for _, count, delta in self._parts:
            if delta is None:
                values.append_run(elsewhere, count)
            else:
                values.extend(getattr(delta, name))
        return values


class CountedSegment(Counted):
    """A segment after the first one of its rollout."""

    def __init__(self, rollout: CountedTrajectory, lengths: Sequence[int]) -> None:
        self._begin(rollout.trajectory_id, rollout.prompt_id, lengths, len(rollout.branches) + 1)
        self.life = rollout.life


class CountedTrajectory(Counted, protocols.Trajectory):
    """A `protocols.Trajectory` with counted tokens, and the script that it follows.

    Attributes:
      branches: the further segments that have begun, as in a real one.
    """

    branches: list[protocols.Segment]

    def __init__(self, trajectory_id: str, prompt_id: str, *, script: scripts.Script) -> None:
        self.script = script
        self._begin(trajectory_id, prompt_id, self._lengths(0))
        self.branches = []
        self.environment_reward = None
        self.finish = None
        self.metrics = {}
        self.start_seconds = 0.0
        self.seconds = 0.0
        self.snapshot = None

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _lengths(self, place: int) -> tuple[int, ...]:
        script = self.script
        turns = zip(script.turns, script.places or (0,) * len(script.turns), strict=True)
        return tuple(max(1, turn.generated_tokens) for turn, at in turns if at == place)

    def begin(self, place: int, parent: Counted | None, shared: int) -> CountedSegment:
        """Begins the script's segment of this number, as `branch` does."""
        segment = CountedSegment(self, self._lengths(place))
        segment.parent, segment.shared = parent, shared
        # As in `branch`: tokens shared with the parent's own beginning belong to the segment that holds them.
        while segment.parent is not None and shared <= segment.parent.shared:
            segment.parent = segment.parent.parent
        if segment.parent is None:
            segment.shared = 0
        self.branches.append(segment)
        return segment

    @property
    def finish(self) -> str | None:
        """How the rollout ended. A rollout that replays a script to its end reports the limit of the recorded
        rollout."""
        return self._finish

    @finish.setter
    def finish(self, finish: str | None) -> None:
        self._finish = self.script.limit or finish if finish == "answered" else finish

    def clear(self) -> None:
        self.token_ids.clear()
        self.turns.clear()
        self._parts.clear()
        self.branches.clear()
        self.outputs = self.sampled = self.fresh = self._generated = 0
        self.unstreamed.clear()
        self.seconds, self.snapshot = 0.0, None
        self.life += 1


def _context_of(segment: Counted) -> Any:
    """Returns the tokens of the segment's context; the caller must not change them."""
    if segment.parent is None:
        return segment.token_ids
    tokens = Runs(name=segment.name)
    tokens.extend(_context_of(segment.parent)[: segment.shared])
    tokens.extend(segment.token_ids)
    return tokens


@dataclass(eq=False)
class Book:
    """Makes a run's trajectories from its workload and finds them by name while they live.

    Trajectory ids are `<prompt_id>/<sample>`; a simulated prompt id is the task's index.

    Attributes:
      workload: script of each trajectory.
      trajectory_count: number of trajectories made.
    """

    workload: scripts.Workload
    trajectory_count: int = field(default=0, init=False)
    # Weak: the simulator must not keep 100,000 finished trajectories alive.
    _alive: weakref.WeakValueDictionary[str, CountedTrajectory] = field(
        default_factory=weakref.WeakValueDictionary, init=False
    )
    _prompt_tokens: dict[str, int] = field(default_factory=dict, init=False)

    def make(self, trajectory_id: str, prompt_id: str) -> CountedTrajectory:
        """Returns a trajectory that has not begun."""
        task, _, sample = trajectory_id.rpartition("/")
        script = self.workload.script(int(task), int(sample))
        trajectory = CountedTrajectory(trajectory_id, prompt_id, script=script)
        self._alive[trajectory_id] = trajectory
        self.trajectory_count += 1
        return trajectory

    def prompt_tokens(self, prompt_id: str) -> int:
        """Returns the tokens of a task's prompt."""
        # Kept, because a workload draws the whole script again at each call, and all siblings ask.
        tokens = self._prompt_tokens.get(prompt_id)
        if tokens is None:
            tokens = self._prompt_tokens[prompt_id] = self.workload.script(int(prompt_id), 0).prompt_tokens
        return tokens

    def script(self, trajectory_id: str) -> scripts.Script:
        """Returns the script of a live trajectory."""
        return self._alive[trajectory_id].script

    def remaining(self, request_id: str) -> int:
        """Returns the tokens that a segment has yet to generate: the truth that only a simulator knows."""
        trajectory_id, _, index = request_id.partition("+")
        segment: Any = self._alive[trajectory_id].segments[int(index or 0)]
        return max(0, sum(segment.lengths) - segment.generated_tokens)


class CountedText:
    """A `protocols.Tokenizer` without text: a message's content is its token count, and an output decodes to its
    trajectory's name.

    Content that is no number (the agent loop's own text for a time-out) counts four characters a token.
    """

    vocab_size = 3
    stop_token_ids: tuple[int, ...] = (STOP,)
    pad_token_id = TEXT

    def encode(self, text: str) -> list[int]:
        return [TEXT] * _tokens(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return token_ids.name if isinstance(token_ids, Runs) else ""

    def render(self, messages: Sequence[protocols.Message], *, first: bool, generation_prompt: bool) -> Any:
        return Runs([(TEXT, sum(_tokens(message.content) for message in messages))])

    def render_output(
        self, before: Sequence[protocols.Message], output: protocols.Message, *, first: bool
    ) -> list[int]:
        return [*self.encode(output.content), STOP]


def _tokens(content: str) -> int:
    return int(content) if content.isdigit() else -(-len(content) // 4)


@dataclass(eq=False)
class ScriptedEnvironment:
    """A `protocols.Environment` of one rollout. Its reward alternates by sample, which has no effect on time.

    Attributes:
      book: trajectories of the run, which have the scripts.
      running_tool: name of the tool that the last step called; empty if it called none. A step beside another one, of
        another segment, that calls none leaves the other's.
    """

    book: Book
    running_tool: str = field(default="", init=False)
    _turn: int = field(default=0, init=False)
    _steps: int = field(default=0, init=False)  # under way

    async def reset(self, task: protocols.Task) -> Sequence[protocols.Message]:
        """Shows a prompt of the scripted length."""
        self._turn = 0
        return [protocols.Message("user", str(self.book.prompt_tokens(task.prompt_id)))]

    async def step(self, output: str) -> protocols.StepResult:
        """Runs the tool that the script's turn calls; `output` is the rollout's name, as `CountedText` decodes it."""
        # Told by the output's name: an environment learns of its task only, and siblings share that.
        turns = self.book.script(output).turns
        at, self._turn = self._turn, self._turn + 1
        if at < len(turns):  # else a tool that timed out took the place of the script's end
            turn = turns[at]
            if turn.tool or not self._steps:
                self.running_tool = turn.tool or ""
            self._steps += 1
            try:
                if turn.tool_seconds > 0:
                    await asyncio.sleep(turn.tool_seconds)
            finally:
                self._steps -= 1
        if at + 1 >= len(turns):
            return protocols.StepResult(done=True, reward=float(int(output.rpartition("/")[2]) % 2))
        payload = str(turn.payload_tokens)
        if turn.tool is None:
            return protocols.StepResult(messages=[protocols.Message("user", payload)])
        status = turn.status or "success"
        returned = protocols.ToolReturn(turn.tool, status, payload, turn.tool_seconds, turn.call, turn.error)
        return protocols.StepResult(tool_returns=[returned])

    async def close(self) -> None:
        """Does nothing: the environment holds nothing."""


class NumberedTasks:
    """A `protocols.TaskSource`: the task at position n is called "n"."""

    def task(self, index: int) -> protocols.Task:
        return protocols.Task(str(index), {})

    def evaluation_task(self, index: int) -> protocols.Task:
        """Returns a held-out task, which a task source must have; the simulator evaluates nothing."""
        return protocols.Task(f"held-out-{index}", {})
