"""The prefix tree against a brute-force reference, and the predictions that are made from it."""

from __future__ import annotations

import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.scheduling.prediction import evidence, paths, prefix_tree

EDGES = st.sampled_from(["a", "b", ("c", 1, "success")])
PATHS = st.lists(EDGES, max_size=4)
OPERATIONS = st.lists(st.tuples(st.booleans(), PATHS, st.integers(0, 1_000)), max_size=40)
WINDOW, NODES, DEPTH = 3, 9, 3


class Reference:
    """The same by brute force: a dictionary of paths, each with all its samples and when it was used."""

    def __init__(self) -> None:
        self.samples: dict[tuple, list[int]] = {(): []}
        self.used: dict[tuple, int] = {}
        self.time = 0

    def add(self, path: list, remaining: list[int]) -> None:
        path = path[:DEPTH]
        for depth in range(len(path) + 1):
            self.samples.setdefault(tuple(path[:depth]), []).append(remaining[depth])
        self.touch(tuple(path))
        while len(self.samples) > NODES:
            oldest = min(self.used, key=self.used.__getitem__)
            assert not any(other[:-1] == oldest for other in self.used), "a parent went before its child"
            del self.used[oldest], self.samples[oldest]

    def find(self, path: list) -> tuple:
        known = max((path[:depth] for depth in range(len(path) + 1) if tuple(path[:depth]) in self.samples), key=len)
        self.touch(tuple(known))
        return tuple(known)

    def touch(self, path: tuple) -> None:
        while path:  # a parent counts as used after its children
            self.time += 1
            self.used[path] = self.time
            path = path[:-1]

    def window(self, path: tuple) -> list[int]:
        return self.samples[path][-WINDOW:]


def fill(operations) -> tuple[prefix_tree.PrefixTree, Reference]:
    tree, reference = prefix_tree.PrefixTree(WINDOW, NODES, DEPTH), Reference()
    for adds, path, length in operations:
        if adds:
            remaining = [length + 7 * step for step in range(len(path), -1, -1)]
            tree.add(path, remaining)
            reference.add(path, remaining)
        else:
            node, depth = tree.find(path)
            tree.use(node)
            known = reference.find(path)
            assert depth == len(known)
            assert node.oldest_first == reference.window(known)
    return tree, reference


def contents(tree: prefix_tree.PrefixTree) -> dict[tuple, list[int]]:
    """Every node's window by path."""
    found: dict[tuple, list[int]] = {}
    pending = [((), tree.root)]
    while pending:
        path, node = pending.pop()
        found[path] = node.oldest_first
        pending += [((*path, edge), child) for edge, child in (node.children or {}).items()]
    return found


@hypothesis.given(OPERATIONS)
def test_lookups_windows_and_evictions_are_those_of_the_reference(operations):
    tree, reference = fill(operations)
    assert contents(tree) == {path: reference.window(path) for path in reference.samples}
    assert len(tree) == len(reference.samples) <= NODES


@hypothesis.given(OPERATIONS, PATHS)
def test_a_look_finds_a_node_and_uses_nothing(operations, path):
    tree, _ = fill(operations)
    before = tree.snapshot()
    node, depth = tree.find(path)
    assert tree.snapshot() == before
    known = contents(tree)
    assert node.oldest_first == known[tuple(path[:depth])]
    assert depth == len(path) or tuple(path[: depth + 1]) not in known


@hypothesis.given(OPERATIONS)
def test_a_snapshot_survives_json_and_goes_on_alike(operations):
    tree, _ = fill(operations)
    again = prefix_tree.PrefixTree(WINDOW, NODES, DEPTH)
    again.restore(json.loads(json.dumps(tree.snapshot())))
    assert contents(again) == contents(tree)
    for path in (["a", "b"], ["b"], [("c", 1, "success"), "a"], ["a", "a", "a"]):  # evictions follow the same order
        for item in (tree, again):
            item.add(path, [9, 8, 7, 6][: len(path) + 1])
    assert contents(again) == contents(tree)
    assert again.snapshot() == tree.snapshot()


@hypothesis.given(OPERATIONS, OPERATIONS)
def test_a_merge_holds_both_windows_our_own_latest_first_to_stay(first, second):
    big = 10_000
    ours, theirs = prefix_tree.PrefixTree(WINDOW, big, DEPTH), prefix_tree.PrefixTree(WINDOW, big, DEPTH)
    for tree, operations in ((ours, first), (theirs, second)):
        for _, path, length in operations:
            tree.add(path, [length] * (len(path) + 1))
    before, other = contents(ours), contents(theirs)
    ours.merge(theirs)
    expected = {
        path: (other.get(path, []) + before.get(path, []))[-WINDOW:] for path in sorted({*before, *other}, key=str)
    }
    assert contents(ours) == expected


@hypothesis.given(st.lists(st.integers(0, 100), min_size=1, max_size=30), st.floats(0.01, 1.0), st.integers(1, 100))
def test_statistics_are_those_of_the_sorted_window(samples, level, since):
    node = prefix_tree.PathNode()
    for stamp, sample in enumerate(samples):
        node.add(sample, 12, stamp, 100.0)
    window = sorted(samples[-12:])
    assert node.mean == pytest.approx(sum(window) / len(window))
    assert node.quantile(level) == window[max(0, math.ceil(level * len(window)) - 1)]
    longer = [sample for sample in window if sample > since]
    assert node.above(since) == pytest.approx(max(0.5, len(longer)) / len(window))
    assert node.sketch() == prefix_tree.sketch_of(window)
    assert node.sketch(since) == (tuple(value - since for value in prefix_tree.sketch_of(longer)) if longer else ())


def test_evidence_that_is_not_renewed_fades():
    tree = prefix_tree.PrefixTree(half_life=10)
    for _ in range(4):
        tree.add(["old"], [5, 5])
    for _ in range(10):
        tree.add(["new"], [5, 5])
    ages = range(10, 14)
    assert tree.weight(tree.find(["old"])[0]) == pytest.approx(sum(0.5 ** (age / 10) for age in ages))
    assert tree.weight(tree.find(["new"])[0]) == pytest.approx(sum(0.5 ** (age / 10) for age in range(10)))


@pytest.mark.parametrize("samples", [20, 63, 64, 150])
def test_a_prediction_forgets_a_cause_that_has_long_not_been_seen(samples):
    """However many samples it rests on, since a policy that drifts leaves the largest nodes the most outdated."""
    known = evidence.Evidence(config_lib.SchedulerConfig(half_life=100))
    for index in range(samples):
        track = known.start(f"old-{index}", 0)
        known.observe(track, LONG, 100)
        known.finish(track, 50_100)
    asked = known.start("unseen", 0)
    known.observe(asked, LONG, 100)
    assert mean(known.predict(asked, 100)) == pytest.approx(50_000, rel=0.01)
    for index in range(2_000):
        track = known.start(f"new-{index}", 0)
        known.observe(track, SHORT, 100)
        known.finish(track, 300)
    asked = known.start("still unseen", 0)
    known.observe(asked, LONG, 100)
    assert mean(known.predict(asked, 100)) < 2_000


def test_siblings_that_finished_before_a_restart_are_siblings_still():
    known = taught()
    for _ in range(15):
        track = known.start("prompt", 0)
        known.observe(track, SHORT, 100)
        known.finish(track, 8_100)
    again, merged = (evidence.Evidence(config_lib.SchedulerConfig()) for _ in range(2))
    again.restore(json.loads(json.dumps(known.snapshot())))
    merged.merge(known.snapshot())
    for item in (known, again, merged):
        track = item.start("prompt", 0)
        item.observe(track, SHORT, 100)
        assert mean(item.predict(track, 100)) > 4_000


def test_payload_sizes_fall_into_octaves():
    states = [protocols.CausalState("tool", tokens, "success") for tokens in (0, 63, 64, 900, 1_000, 1_024, 10**9)]
    assert [paths.causal_key(state)[1] for state in states] == [0, 0, 1, 4, 4, 5, 12]


# Predictions ----------------------------------------------------------------------------------------------------------

SHORT, LONG = (protocols.CausalState("bash", 100, status) for status in ("success", "failure"))


def mean(sketch) -> float:
    return sum(tokens * mass for tokens, mass in zip(sketch, prefix_tree.MASSES, strict=True))


def taught(prompt: str = "{index}", rounds: int = 40) -> evidence.Evidence:
    """Finished trajectories: 100 tokens to the first return, then 200 more after a success, 5,000 after a failure."""
    known = evidence.Evidence(config_lib.SchedulerConfig())
    for index in range(rounds):
        for state, rest in ((SHORT, 200), (LONG, 5_000)):
            track = known.start(prompt.format(index=index), 0)
            known.observe(track, state, 100)
            known.finish(track, 100 + rest + index)
    return known


def test_a_cause_that_was_seen_tells_short_from_long_on_a_new_prompt():
    known = taught()
    for state, low, high in ((SHORT, 200, 900), (LONG, 3_500, 5_500)):
        track = known.start("unseen", 0)
        known.observe(track, state, 100)
        assert low < mean(known.predict(track, 100)) < high


def test_tokens_since_the_return_rule_out_what_was_shorter():
    known = taught()
    track = known.start("unseen", 0)
    before = mean(known.predict(track, 0))
    assert mean(known.predict(track, 1_000)) > before
    assert min(known.predict(track, 1_000)) > 3_000


def test_a_length_beyond_all_that_was_seen_is_expected_to_go_on_in_proportion():
    known = taught()
    track = known.start("unseen", 0)
    assert mean(known.predict(track, 100_000)) > mean(known.predict(track, 10_000)) > 5_000


def test_running_siblings_that_have_got_far_make_a_prompt_long():
    known = taught()
    fresh = mean(known.predict(known.start("typical", 0), 0))
    for _ in range(8):
        known.observe(known.start("slow", 0), SHORT, 4_000)
    assert mean(known.predict(known.start("slow", 0), 0)) > 1.2 * fresh


def test_finished_siblings_weigh_more_than_strangers():
    known = taught()
    for _ in range(12):
        track = known.start("prompt", 0)
        known.observe(track, SHORT, 100)
        known.finish(track, 2_100)
    track = known.start("prompt", 0)
    known.observe(track, SHORT, 100)
    assert 1_000 < mean(known.predict(track, 100)) < 3_500


def test_what_was_learnt_survives_a_restart_and_adds_up_across_coordinators():
    known, fresh, joined = taught(), *(evidence.Evidence(config_lib.SchedulerConfig()) for _ in range(2))
    fresh.restore(json.loads(json.dumps(known.snapshot())))
    joined.merge(known.snapshot())
    predictions = []
    for item in (known, fresh, joined):
        track = item.start("unseen", 0)
        item.observe(track, LONG, 100)
        predictions.append(item.predict(track, 100))
    assert predictions[0] == predictions[1] == predictions[2]


def test_who_is_given_up_teaches_nothing():
    known = taught()
    before = known.snapshot()
    track = known.start("unseen", 0)
    known.observe(track, LONG, 100)
    known.finish(track, 100, learn=False)
    known.finish(known.start("resumed", 50), 100)
    assert known.snapshot() == before


def test_a_long_path_is_learnt_over_the_next_returns_and_before_any_snapshot():
    def finish_long(known: evidence.Evidence) -> None:
        track = known.start("long", 0)
        for index in range(20):
            known.observe(track, SHORT, 10 * (index + 1))
        known.finish(track, 1_000)

    known, other = (evidence.Evidence(config_lib.SchedulerConfig()) for _ in range(2))
    finish_long(known)
    finish_long(other)
    track = known.start("later", 0)
    for _ in range(10):
        known.observe(track, SHORT, 5)
    learnt = [len(item.by_suffix.snapshot()["nodes"]) for item in (known, other)]
    assert learnt[1] == 1 < learnt[0]
    assert known.snapshot() == other.snapshot()


def test_a_prediction_follows_what_is_learnt_within_a_few_trajectories():
    known = taught()
    track = known.start("unseen", 0)
    known.observe(track, SHORT, 100)
    before = mean(known.predict(track, 100))
    for index in range(evidence.MOST_TRAJECTORIES + 200):
        other = known.start(f"drifted-{index}", 0)
        known.observe(other, SHORT, 100)
        known.finish(other, 9_100)
    assert before < 900
    assert mean(known.predict(track, 100)) > 8_000


@hypothesis.given(OPERATIONS, OPERATIONS)
def test_a_merge_evicts_what_only_the_other_tree_has_before_our_own(first, second):
    ours, theirs = (prefix_tree.PrefixTree(WINDOW, NODES, DEPTH) for _ in range(2))
    for tree, operations in ((ours, first), (theirs, second)):
        for _, path, length in operations:
            tree.add(path, [length] * (len(path) + 1))
    before = contents(ours)
    ours.merge(theirs)
    assert len(ours) <= NODES
    assert set(before) <= set(contents(ours))


@pytest.mark.parametrize("behind", [0, 30])
def test_evidence_that_is_merged_keeps_its_age(behind):
    """Whichever of the two trees has seen more."""
    ours, theirs = (prefix_tree.PrefixTree(half_life=10) for _ in range(2))
    for _ in range(behind):
        ours.add(["a"], [5, 5])
    for _ in range(20):
        theirs.add(["b"], [5, 5])
    for _ in range(10):
        theirs.add(["c"], [5, 5])
    weights = {edge: theirs.weight(theirs.find([edge])[0]) for edge in ("b", "c")}
    own = ours.weight(ours.root)
    ours.merge(theirs)
    for edge, weight in weights.items():
        assert ours.weight(ours.find([edge])[0]) == pytest.approx(weight)
    assert ours.weight(ours.root) == pytest.approx(own + theirs.weight(theirs.root))
