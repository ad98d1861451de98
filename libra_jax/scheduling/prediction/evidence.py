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

A request is a segment of a rollout: what is predicted, and learnt when it finishes, are its own tokens. Path and marks
are its own, too. A segment after the first one begins at a state of its own, its *opening*, by its number in the
rollout. Siblings are compared segment by segment, the k-th with the k-th. The frailty goes by first segments, because
how many others follow is the agent's way of work, and no length.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling.prediction import paths, prefix_tree

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

ROOT_WINDOWS = 8
"""Samples of the root, in windows of other nodes. In a step short requests finish first, so a window of less than a
few steps would hold the short ones of one step, or the long ones."""

MOST_KEYS = 4096
"""Causal states whose keys are kept, so that paths share them."""

LINDY = (0.11, 0.43, 1.0, 2.3, 7.0, 39.0)
"""Quantiles of what is left of a length beyond all samples, in units of what it has reached (Pareto, exponent 1)."""


class Evidence:
    """Learns from finished requests and predicts for live ones: a `learning.PredictionLearner`.

    Args:
      config: `evidence`, `window`, `tree_nodes`, `path_depth`, `half_life` and `prior_count` apply here.
    """

    def __init__(self, config: config_lib.SchedulerConfig) -> None:
        window, nodes, half_life = config.window, config.tree_nodes, config.half_life
        self._config = config
        self._prior = config.prior_count
        self._sees = config.evidence
        self.by_prompt = prefix_tree.PrefixTree(window, nodes, config.path_depth + 1, half_life)
        self.by_suffix = prefix_tree.PrefixTree(window, nodes, 4, half_life, ROOT_WINDOWS * window)
        self._depth = config.path_depth
        self._prompts: OrderedDict[str, paths.PromptPaths] = OrderedDict()
        self._keys: dict[tuple[str, int, str], paths.Key] = {}  # by tool, bits of the payload's size, status
        self._lessons: deque[tuple[tuple[Any, ...], int]] = deque()  # of the suffixes: path and sample
        self._siblings = (0.0, 0.0)  # sums over returns, of factor x error and of factor squared, all logarithms

    def start(self, prompt_id: str, generated_tokens: int, segment: int = 0) -> paths.RequestTrack:
        """Returns the empty path of a request that has arrived.

        Args:
          generated_tokens: tokens that it had generated before.
          segment: number of the segment in its rollout.
        """
        prompt = self._prompts.get(prompt_id)
        if prompt is None:
            prompt = self._prompts[prompt_id] = paths.PromptPaths()
            limit, prompts = max(64, self.by_prompt.nodes // 16), self._prompts
            # The least recently used go first; while the first has live requests, all stay.
            while len(prompts) > limit and not next(iter(prompts.values())).live:
                prompts.popitem(last=False)
        self._prompts.move_to_end(prompt_id)
        prompt.live += 1
        track = paths.start_track(prompt_id, prompt, generated_tokens, segment)
        if segment and self._sees == "causes":
            track.opening = paths.opening_key(segment)
        return track

    def observe(self, track: paths.RequestTrack, causal_state: protocols.CausalState, generated_tokens: int) -> None:
        if self._sees != "causes":
            self._survived(track, generated_tokens)
            return
        cache_key = causal_state.tool, causal_state.payload_tokens.bit_length(), causal_state.status
        key = self._keys.get(cache_key)
        if key is None:
            # Tools may return any name, so the table is bounded; what is dropped is only made once more.
            if len(self._keys) >= MOST_KEYS:
                self._keys.clear()
            key = self._keys[cache_key] = paths.causal_key(causal_state)
        track.path.append(key)
        track.marks.append(generated_tokens)
        track.failures, track.largest = paths.counted(key, track.failures, track.largest)
        self._survived(track, generated_tokens)
        if self._lessons:
            self._learn(LESSONS)

    def finish(self, track: paths.RequestTrack, generated_tokens: int, *, learn: bool = True) -> None:
        prompt = track.prompt
        prompt.live -= 1
        # A length of an aborted request, or of one whose early path is unknown, would teach too short remainders.
        if not learn or track.start or not generated_tokens:
            prompt.hazard -= track.hazard
            return
        before, failures, largest = track.opening, 0, 0
        if before is not None:
            self._lessons.append(((before,), generated_tokens))
        else:
            self._survived(track, generated_tokens)
            prompt.finished += 1
            # The root alone, for the hazard; what the path teaches below it follows as lessons.
            self.by_suffix.add((), (generated_tokens,))
        # The first edge of `by_prompt` is the prompt itself, at which the whole length was left as well.
        remaining = track.remaining(generated_tokens)
        self.by_prompt.add((track.place, *track.path), (generated_tokens, *remaining))
        # True remainders beside predicted ones: a running least-squares fit of the factor's power, in logarithms.
        decay = 1.0 - SIBLINGS_FORGOTTEN
        for place, (factor, mean) in track.predicted.items():
            error = math.log((generated_tokens - track.marks[place] + 1.0) / (mean + 1.0))
            errors, factors = self._siblings
            self._siblings = decay * errors + factor * error, decay * factors + factor**2
        # The first returns of an endless path suffice, so that no single request fills the windows.
        for key, mark in zip(track.path[: 2 * self._depth], track.marks, strict=False):
            failures, largest = paths.counted(key, failures, largest)
            self._lessons.append((paths.suffix(key, failures, largest, mark, before), generated_tokens - mark))
            before = key

    def predict(self, track: paths.RequestTrack, generated_tokens: int) -> prefix_tree.Sketch:
        """Returns quantiles at `prefix_tree.LEVELS` of the tokens that the request has still to generate.

        A prediction at a tool return is kept in `track`, to be compared when the request is over. Of `mean`, it is the
        one by tokens.
        """
        tree, path, marks = self.by_suffix, track.path, track.marks
        if path:
            mark = marks[-1]
            before = path[-2] if len(path) > 1 else track.opening
            since = generated_tokens - mark
            node, _ = tree.find(paths.suffix(path[-1], track.failures, track.largest, mark, before))
        else:
            since, node = generated_tokens, tree.root
            if track.opening:
                node, _ = tree.find((track.opening,))
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
        if self._sees == "mean" and sketch:
            return sketch
        if not sketch:
            sketch = _beyond(since) if tree.clock else UNKNOWN
        factor = self._factor(track)
        if factor != 1.0:
            if path and not since:
                mean = sum(map(operator.mul, sketch, prefix_tree.MASSES))
                track.predicted[len(path) - 1] = math.log(factor), mean
            if path or track.opening:
                factor **= self.siblings_power
            # Tokens are whole: a factor next to 1 leaves a length that all have as it is.
            sketch = tuple([round(factor * tokens) for tokens in sketch])
        # Only the node of this very path counts, and the tree holds no node of a longer path.
        if len(path) < self.by_prompt.depth:
            same, depth = self.by_prompt.find((track.place, *path))
            if depth > len(path):
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
        if "by_suffix" in snapshot:  # a run may change its policy, and other policies keep other statistics
            self.by_suffix.restore(snapshot["by_suffix"])
        if "by_prompt" in snapshot:
            self.by_prompt.restore(snapshot["by_prompt"])
        if "siblings" in snapshot:
            errors, factors = snapshot["siblings"]
            self._siblings = float(errors), float(factors)

    def merge(self, snapshot: Mapping[str, Any]) -> None:
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

    def _survived(self, track: paths.RequestTrack, generated_tokens: int) -> None:
        """Adds to the prompt's hazard what a first segment has got through since it was last asked about."""
        if track.opening:
            return
        hazard = -math.log(self.by_suffix.root.above(generated_tokens))
        # The whole hazard replaces the request's former part: the curve itself may have changed since.
        track.prompt.hazard += hazard - track.hazard
        track.hazard = hazard

    def _factor(self, track: paths.RequestTrack) -> float:
        """Returns the frailty: how many times as long as the typical one the prompt is, by its siblings."""
        low, high = FRAILTY_RANGE
        # Without the request's own survival, on which its prediction is conditioned.
        hazard = max(0.0, track.prompt.hazard - track.hazard)
        factor = (hazard + FRAILTY) / (track.prompt.finished + FRAILTY)
        return low if factor < low else high if factor > high else factor

    def _renew(self, tree: prefix_tree.PrefixTree, node: prefix_tree.PathNode) -> None:
        """Renews the node's blend: its own sketch, shrunk towards the blend of the node behind it."""
        parent, clock = node.parent, tree.clock
        node.blend = node.sketch()
        if parent is not None and tree.weight(node) < DROWNING * self._prior:
            if clock >= parent.due:
                self._renew(tree, parent)
            node.blend = _shrunk(node.blend, parent.blend, tree.weight(node), self._prior)
        # One more trajectory changes an old tree less than a young one, so renewals get rarer as it grows.
        node.due = clock + 1 + min(MOST_TRAJECTORIES, clock // RENEWALS)

    def _blend(
        self,
        sketch: prefix_tree.Sketch,
        chain: list[prefix_tree.PathNode],
        tree: prefix_tree.PrefixTree,
        since: int,
    ) -> prefix_tree.Sketch:
        """Shrinks each node's own sketch, of samples that lasted `since` tokens, towards what is behind it."""
        for node in chain:
            weight = tree.weight(node)
            # Only samples that lasted as long are evidence.
            if since:
                weight *= node.above(since)
            sketch = _shrunk(node.sketch(since), sketch, weight, self._prior)
        return sketch


def _beyond(tokens: int) -> prefix_tree.Sketch:
    """Returns what is left of a length beyond all samples that has reached these tokens."""
    return tuple(share * tokens for share in LINDY) if tokens else UNKNOWN


def _shrunk(mine: prefix_tree.Sketch, behind: prefix_tree.Sketch, weight: float, prior: float) -> prefix_tree.Sketch:
    """Blends a node's own sketch with that of the evidence behind it; either may be empty."""
    if not mine or not behind:
        return mine or behind
    # n / (n + prior) of empirical Bayes. A list comprehension: this is faster than a generator for six numbers.
    share = weight / (weight + prior)
    return tuple([old + share * (new - old) for old, new in zip(behind, mine, strict=True)])
