"""What is known of the tokens that a request has still to generate: a predictive distribution, not a number.

A request's path is its causal states: which tool returned, how much, and whether it worked (arXiv 2606.03077, section
4). Payload sizes are put in octave classes, so that returns of 900 and of 1,000 tokens are the same evidence.

Four kinds of evidence are blended. The more specific kind weighs as much as its samples allow: a node with n samples
weighs n / (n + prior_count) and the evidence behind it the rest (empirical-Bayes shrinkage, on quantile functions).
- All finished trajectories.
- Trajectories whose path ended alike: their last causal state; how many returns failed and how large the largest was;
  how much had been generated; the state before the last. Each is a level of one tree, so that what is not known backs
  off to the level above.
- How this prompt's siblings fare, finished and running: a gamma frailty (Vaupel, Manton and Stallard, 1979). H is the
  cumulative hazard of a length over all prompts. If a prompt's siblings have got through hazards H_1, H_2, ... and d of
  them have finished, the prompt is (sum H + a) / (d + a) times as long as the typical one. What a return leaves open
  may depend less on the prompt than whole lengths do. So after a return that factor is taken to a power, which is
  fitted as predicted and true remainders are compared (least squares through the origin, of logarithms).
- This prompt's finished siblings that came the very same path.
Tokens generated since the last tool return condition all of it: only samples that lasted as long count.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.scheduling import prefix_tree

SMALLEST_BITS = 6
"""Payloads below 2**6 tokens share class 0: a number or a short message says the same at any such size."""

LARGEST_CLASS = 12
"""Payloads of 2**17 tokens and more share one class."""

FRAILTY = 4.0
"""a: the weight, in siblings, of the belief that a prompt is typical."""

FRAILTY_RANGE = (0.25, 4.0)
"""Smallest and largest factor by which a prompt may differ from the typical one."""

SIBLINGS_BELIEF = 1.0
"""Weight of the belief that the factor holds after returns too, in returns that had a factor of e and were right."""

SIBLINGS_FORGOTTEN = 1e-3
"""Share of what is known of the factor's power that each further return makes forgotten."""

UNKNOWN_TOKENS = 1024.0
"""Mean of the exponential distribution that is assumed before anything has finished."""

UNKNOWN = tuple(-UNKNOWN_TOKENS * math.log(1.0 - level) for level in prefix_tree.LEVELS)
"""Quantiles of that distribution."""

DROWNING = 8.0
"""A node with this many times `prior_count` samples drowns the evidence behind it, which is then left out."""

RENEWALS = 32
"""A node's blend is renewed after the tree has seen this share (1 / 32) of its trajectories since."""

MOST_TRAJECTORIES = 64
"""Most trajectories between two renewals of a blend."""

LESSONS = 2
"""Samples taken in at an event: what a finished path teaches is spread over events, so that none takes long."""

MOST_KEYS = 4096
"""Causal states whose keys are kept, so that paths share them."""

MOST_FAILURES = 4
"""Failures of a path beyond which no more are counted."""

LINDY = (0.11, 0.43, 1.0, 2.3, 7.0, 39.0)
"""Quantiles of what is left of a length beyond all samples, in units of what it has reached (Pareto, exponent 1)."""

KNOWN_SAMPLES = 10
"""Samples that make a node known to the published rule.

Of one or two samples, mean and percentile agree in any case, and a request would follow a single sibling, there and
back at each return. The number is ours, set with the published figures for search in view.
"""

Key = tuple[str, int, str]
"""(tool, payload-size class, status): a causal state as an edge of a prefix tree."""


def size_class(payload_tokens: int) -> int:
    """Returns the octave of a payload size in tokens, from 0 to `LARGEST_CLASS`."""
    octave = payload_tokens.bit_length() - SMALLEST_BITS
    return 0 if octave < 0 else LARGEST_CLASS if octave > LARGEST_CLASS else octave


def causal_key(state: protocols.CausalState) -> Key:
    """Returns the state's key in a prefix tree."""
    return state.tool, size_class(state.payload_tokens), state.status


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt's requests: the live ones, the finished ones, and the hazard that all of them have got through."""

    live: int = 0
    finished: int = 0
    hazard: float = 0.0


@dataclass(slots=True, eq=False)
class Track:
    """A request's path.

    Attributes:
      prompt_id: id of its prompt.
      prompt: its prompt's requests.
      start: tokens generated when it arrived; above 0 its early path is unknown, so that it teaches nothing.
      path: keys of its causal states.
      marks: tokens generated by each tool return.
      failures: causal states other than successes, up to `MOST_FAILURES`.
      largest: size class of the largest payload.
      hazard: its own part of the prompt's hazard.
      predicted: return to (logarithm of the siblings' factor, mean predicted without the factor).
    """

    prompt_id: str
    prompt: Prompt
    start: int = 0
    path: list[Key] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    failures: int = 0
    largest: int = 0
    hazard: float = 0.0
    predicted: dict[int, tuple[float, float]] = field(default_factory=dict)

    def remaining(self, generated_tokens: int) -> list[int]:
        """Returns the tokens that were left at the start and after each return of a path of this whole length."""
        return [generated_tokens, *(generated_tokens - mark for mark in self.marks)]


class Evidence:
    """Learns from finished requests and predicts for live ones.

    Args:
      config: `window`, `tree_nodes`, `path_depth`, `half_life` and `prior_count` apply here.
    """

    def __init__(self, config: configuration.SchedulerConfig) -> None:
        window, nodes, half_life = config.window, config.tree_nodes, config.half_life
        self._config = config
        self._prior = config.prior_count
        self.by_prompt = prefix_tree.PrefixTree(window, nodes, config.path_depth + 1, half_life)
        self.by_suffix = prefix_tree.PrefixTree(window, nodes, 4, half_life)
        self._depth = config.path_depth
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()
        self._keys: dict[tuple[str, int, str], Key] = {}  # by tool, bits of the payload's size, status
        self._lessons: deque[tuple[tuple[Any, ...], int]] = deque()  # of the suffixes: path and sample
        self._siblings = (0.0, 0.0)  # sums over returns, of factor x error and of factor squared, all logarithms

    def start(self, prompt_id: str, generated_tokens: int) -> Track:
        """Returns the empty path of a request that has arrived with these tokens generated before."""
        prompt = self._prompts.get(prompt_id)
        if prompt is None:
            prompt = self._prompts[prompt_id] = Prompt()
            limit, prompts = max(64, self.by_prompt.nodes // 16), self._prompts
            # The least recently used go first; while the first has live requests, all stay.
            while len(prompts) > limit and not next(iter(prompts.values())).live:
                prompts.popitem(last=False)
        self._prompts.move_to_end(prompt_id)
        prompt.live += 1
        return Track(prompt_id, prompt, generated_tokens)

    def observe(self, track: Track, causal_state: protocols.CausalState, generated_tokens: int) -> None:
        """Adds a tool return to a path."""
        seen = causal_state.tool, causal_state.payload_tokens.bit_length(), causal_state.status
        key = self._keys.get(seen)
        if key is None:
            # Tools may return any name, so the table is bounded; what is dropped is only made once more.
            if len(self._keys) >= MOST_KEYS:
                self._keys.clear()
            key = self._keys[seen] = causal_key(causal_state)
        track.path.append(key)
        track.marks.append(generated_tokens)
        track.failures, track.largest = _counted(key, track.failures, track.largest)
        self._survived(track, generated_tokens)
        if self._lessons:
            self._learn(LESSONS)

    def finish(self, track: Track, generated_tokens: int, *, learn: bool = True) -> None:
        """Ends a path; its length is evidence for others if `learn`."""
        prompt = track.prompt
        prompt.live -= 1
        # A length of an aborted request, or of one whose early path is unknown, would teach too short remainders.
        if not learn or track.start or not generated_tokens:
            prompt.hazard -= track.hazard
            return
        self._survived(track, generated_tokens)
        prompt.finished += 1
        # The first edge of `by_prompt` is the prompt itself, at which the whole length was left as well.
        remaining = track.remaining(generated_tokens)
        self.by_prompt.add((track.prompt_id, *track.path), (generated_tokens, *remaining))
        # The root alone, for the hazard; what the path teaches below it follows as lessons.
        self.by_suffix.add((), (generated_tokens,))
        # True remainders beside predicted ones: a running least-squares fit of the factor's power, in logarithms.
        kept = 1.0 - SIBLINGS_FORGOTTEN
        for place, (factor, mean) in track.predicted.items():
            error = math.log((generated_tokens - track.marks[place] + 1.0) / (mean + 1.0))
            errors, factors = self._siblings
            self._siblings = kept * errors + factor * error, kept * factors + factor**2
        # The first returns of an endless path suffice, so that no single request fills the windows.
        before, failures, largest = None, 0, 0
        for key, mark in zip(track.path[: 2 * self._depth], track.marks, strict=False):
            failures, largest = _counted(key, failures, largest)
            self._lessons.append((_suffix(key, failures, largest, mark, before), generated_tokens - mark))
            before = key

    def predict(self, track: Track, generated_tokens: int) -> prefix_tree.Sketch:
        """Returns quantiles at `prefix_tree.LEVELS` of the tokens that the request has still to generate.

        A prediction at a tool return is kept in `track`, to be compared when the request is over.
        """
        tree, path, marks = self.by_suffix, track.path, track.marks
        if path:
            mark, before = marks[-1], path[-2] if len(path) > 1 else None
            since = generated_tokens - mark
            node, _ = tree.find(_suffix(path[-1], track.failures, track.largest, mark, before))
        else:
            since, node = generated_tokens, tree.root
        if since:
            # Enough samples drown the evidence behind them; the rest is blended from the widest node to the narrowest.
            chain = [node]
            while node.parent is not None and tree.weight(node) < DROWNING * self._prior:
                node = node.parent
                chain.append(node)
            sketch = self._blend((), chain[::-1], tree, since)
        else:  # at a tool return, which is frequent: the blend of the node itself is kept
            if tree.clock >= node.due:
                tree.use(node)
                self._renew(tree, node)
            sketch = node.blend
        if not sketch:
            sketch = tuple(share * since for share in LINDY) if since and tree.clock else UNKNOWN
        # The frailty: how many times as long as the typical one the prompt is, by its siblings. The request's own
        # survival is taken off, because it is conditioned on above.
        low, high = FRAILTY_RANGE
        hazard = max(0.0, track.prompt.hazard - track.hazard)
        factor = (hazard + FRAILTY) / (track.prompt.finished + FRAILTY)
        factor = low if factor < low else high if factor > high else factor
        if factor != 1.0:
            if path:
                if not since:
                    mean = sum(map(operator.mul, sketch, prefix_tree.MASSES))
                    track.predicted[len(path) - 1] = math.log(factor), mean
                factor **= self.siblings_power
            # Tokens are whole: a factor next to 1 leaves a length that all have as it is.
            sketch = tuple([round(factor * tokens) for tokens in sketch])
        same = self.by_prompt.below(track.prompt_id, path)
        if same is not None:
            self.by_prompt.use(same)
            sketch = self._blend(sketch, [same], self.by_prompt, since)
        return sketch

    @property
    def siblings_power(self) -> float:
        """Power of the siblings' factor after a return: from 0, if siblings tell nothing of what is left, to 1."""
        errors, factors = self._siblings
        return min(1.0, max(0.0, (errors + SIBLINGS_BELIEF) / (factors + SIBLINGS_BELIEF)))

    def snapshot(self) -> dict[str, Any]:
        """Returns JSON-able statistics. Live requests are left out: they arrive again after a restart."""
        # Lessons are not stored, so they are taken in first.
        self._learn(len(self._lessons))
        return {
            "by_prompt": self.by_prompt.snapshot(),
            "by_suffix": self.by_suffix.snapshot(),
            "siblings": list(self._siblings),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the statistics by those of a snapshot."""
        if "by_suffix" in snapshot:  # a run may change its policy, and other policies keep other statistics
            self.by_suffix.restore(snapshot["by_suffix"])
        if "by_prompt" in snapshot:
            self.by_prompt.restore(snapshot["by_prompt"])
        if "siblings" in snapshot:
            errors, factors = snapshot["siblings"]
            self._siblings = float(errors), float(factors)

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Adds the statistics of another coordinator's snapshot."""
        other = Evidence(self._config)
        other.restore(snapshot)
        self._learn(len(self._lessons))
        self.by_prompt.merge(other.by_prompt)
        self.by_suffix.merge(other.by_suffix)
        mine, theirs = self._siblings, other._siblings
        self._siblings = mine[0] + theirs[0], mine[1] + theirs[1]

    def _learn(self, count: int) -> None:
        """Takes up to `count` samples in."""
        lessons, add = self._lessons, self.by_suffix.add_below
        while count and lessons:
            add(*lessons.popleft())
            count -= 1

    def _survived(self, track: Track, generated_tokens: int) -> None:
        """Adds to the prompt's hazard what the request has got through since it was last asked about."""
        hazard = -math.log(self.by_suffix.root.above(generated_tokens))
        # The whole hazard replaces the request's former part: the curve itself may have changed since.
        track.prompt.hazard += hazard - track.hazard
        track.hazard = hazard

    def _renew(self, tree: prefix_tree.PrefixTree, node: prefix_tree.Node) -> None:
        """Renews the node's blend: its own sketch, shrunk towards the blend of the node behind it."""
        parent, clock = node.parent, tree.clock
        node.blend = node.sketch() if node.samples else ()
        if parent is not None and tree.weight(node) < DROWNING * self._prior:
            if clock >= parent.due:
                self._renew(tree, parent)
            node.blend = _shrunk(node.blend, parent.blend, tree.weight(node), self._prior)
        # One more trajectory changes an old tree less than a young one, so renewals get rarer as it grows.
        node.due = clock + 1 + min(MOST_TRAJECTORIES, clock // RENEWALS)

    def _blend(
        self,
        sketch: prefix_tree.Sketch,
        chain: list[prefix_tree.Node],
        tree: prefix_tree.PrefixTree,
        since: int,
    ) -> prefix_tree.Sketch:
        """Shrinks each node's own sketch, of samples that lasted `since` tokens, towards what is behind it."""
        for node in chain:
            weight = tree.weight(node)
            if since:
                mine = node.sketch_after(since)
                # Only samples that lasted as long are evidence.
                weight *= node.above(since)
            else:
                mine = node.sketch() if node.samples else ()
            sketch = _shrunk(mine, sketch, weight, self._prior)
        return sketch


class PathStatistics:
    """Remaining tokens by path, in each prompt's tree and in one of all prompts.

    Args:
      config: `window`, `tree_nodes`, `path_depth` and `half_life` apply here.
    """

    def __init__(self, config: configuration.SchedulerConfig) -> None:
        self._config = config
        limits = config.window, config.tree_nodes
        # One edge deeper, because the prompt itself is the first edge.
        self.by_prompt = prefix_tree.PrefixTree(*limits, config.path_depth + 1, config.half_life)
        self.shared = prefix_tree.PrefixTree(*limits, config.path_depth, config.half_life)

    def start(self, prompt_id: str, generated_tokens: int) -> Track:
        """Returns the empty path of a request that has arrived with these tokens generated before."""
        return Track(prompt_id, Prompt(), generated_tokens)

    def observe(self, track: Track, causal_state: protocols.CausalState, generated_tokens: int) -> None:
        """Adds a tool return to a path."""
        track.path.append(causal_key(causal_state))
        track.marks.append(generated_tokens)

    def finish(self, track: Track, generated_tokens: int, *, learn: bool) -> None:
        """Ends a path; its length is evidence for others if `learn`."""
        if track.start or not generated_tokens or not learn:
            return
        remaining = track.remaining(generated_tokens)
        self.by_prompt.add((track.prompt_id, *track.path), (generated_tokens, *remaining))
        self.shared.add(track.path, remaining)

    def known(self, track: Track) -> prefix_tree.Node | None:
        """Returns the deepest known node of the path, in the prompt's tree first; None if no part of it is known."""
        # In the prompt's tree the first edge is the prompt itself, which says nothing of the path.
        for tree, path, least in ((self.by_prompt, (track.prompt_id, *track.path), 2), (self.shared, track.path, 1)):
            node, depth = tree.find(path)
            tree.use(node)
            while node.parent is not None and len(node.samples) < KNOWN_SAMPLES:
                node, depth = node.parent, depth - 1
            if depth >= least:
                return node
        return None

    def snapshot(self) -> Mapping[str, Any]:
        """Returns JSON-able statistics."""
        return {"by_prompt": self.by_prompt.snapshot(), "shared": self.shared.snapshot()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replaces the statistics by those of a snapshot."""
        if "by_prompt" in snapshot:
            self.by_prompt.restore(snapshot["by_prompt"])
        if "shared" in snapshot:  # a run may change its policy, and other policies keep other statistics
            self.shared.restore(snapshot["shared"])

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Adds the statistics of another coordinator's snapshot."""
        other = PathStatistics(self._config)
        other.restore(snapshot)
        self.by_prompt.merge(other.by_prompt)
        self.shared.merge(other.shared)


def _counted(key: Key, failures: int, largest: int) -> tuple[int, int]:
    """Returns a path's failures, and the size class of its largest payload, after a further tool return."""
    if key[2] != "success" and failures < MOST_FAILURES:
        failures += 1
    return failures, key[1] if key[1] > largest else largest


def _suffix(key: Key, failures: int, largest: int, generated_tokens: int, before: Key | None) -> tuple[Any, ...]:
    """Returns the path's end at a tool return as edges of `by_suffix`, the most telling first."""
    return key, (failures, largest), generated_tokens.bit_length(), before


def _shrunk(mine: prefix_tree.Sketch, behind: prefix_tree.Sketch, weight: float, prior: float) -> prefix_tree.Sketch:
    """Blends a node's own sketch with that of the evidence behind it; either may be empty."""
    if not mine or not behind:
        return mine or behind
    # n / (n + prior) of empirical Bayes. A list comprehension: this is faster than a generator for six numbers.
    share = weight / (weight + prior)
    return tuple([old + share * (new - old) for old, new in zip(behind, mine, strict=True)])
