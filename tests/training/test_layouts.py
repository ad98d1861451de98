"""A step is the same in every layout of its batch, or refused by name: drawn options, batches and layouts.

The plain layout, one rollout a row, is compared with packed rows, rows of other lengths, shared prompts, streamed
groups, a batch divided among processes, shares of hybrid workers, and meshes: all metrics, and the change of every
parameter. LAYOUT_EXAMPLES sets the number of drawn options; each is tried on three batches in six to eight layouts.

2026-11-28, two cores, LAYOUT_EXAMPLES=35 --hypothesis-profile=explore --hypothesis-seed=2: 731 drawn cases, of which
443 were equal, 288 refused by name, and none different.
"""

import dataclasses
import os
import re
from collections import Counter

import hypothesis
import jax
import numpy as np
import pytest
import segment_rollouts
import small_model
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import dividing, packing
from libra_jax.models.hf import hf
from libra_jax.training import background, learner, shares, state, step, trainer

EXAMPLES, BATCHES = int(os.environ.get("LAYOUT_EXAMPLES", "1")), 3
SHORT, LONG, VERSION = small_model.ROW_TOKENS, 96, 1

PLAIN = {"pack": False}
# Fields of the trainer, and what is done beside it.
LAYOUTS = {
    "packed": ({}, ""),
    "few rows": ({"rows_per_micro_batch": 2}, ""),
    "short rows": ({"row_tokens": SHORT}, ""),
    "shared": ({"share_prompt": True}, ""),
    "streamed": ({"stream": "group"}, "begun"),
    "streamed and shared": ({"stream": "group", "share_prompt": True}, "begun"),
    "divided": ({}, "divided"),
    "hybrid": ({}, "hybrid"),
    "copies": ({"data": 2, "tensor": 2}, ""),
    "shards": ({"fsdp": 2, "context": 2}, ""),
}
SOMETIMES = ("few rows", "copies", "shards")
"""Layouts that are drawn, because their programs take long to compile."""

REFUSED = {
    "short rows": r"algorithm\.\w+: .* longer than a row; add a longer row to trainer\.row_buckets",
    "shared": r"[\w.]+: .*, or trainer\.share_prompt=False",
    "streamed": r"[\w.]+: .*, or set trainer\.stream=off",
    "hybrid": r"elastic\.hybrid",
}
REFUSED["streamed and shared"] = f"{REFUSED['streamed']}|{REFUSED['shared']}"
OF_A_LAYOUT = ("tokens/processed", "tokens/shared", "train/", "padding_fraction", "micro_batches", "compiled_shapes")
SEEN: Counter = Counter()


@st.composite
def objectives(draw):
    """Fields of the algorithm and of other groups."""

    def pick(*values):
        return draw(st.sampled_from(values))

    kind = pick("plain", "plain", "kl", "critic", "teacher", "experts", "experts")
    algorithm = {
        "advantage": pick("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        "loss": pick("clipped", "clipped", "clipped", *config_lib.LOSSES),
        "aggregation": pick("token_mean", "token_mean", *config_lib.AGGREGATIONS),
        "minibatches": pick(1, 1, 2),
        "epochs": pick(1, 1, 2),
        "entropy_share": pick(1.0, 1.0, 0.5),
        "entropy_coefficient": pick(0.0, 0.01),
        "ess_scaling": pick("off", "off", "off", "sqrt"),
        "objective": pick("behaviour", "decoupled"),
        "correction": pick("none", "truncated", "masked"),
        "correction_cap": 1.05,
    }
    arguments = {"clip_cov": {"least": 0.05, "share": 0.2}, "kl_cov": {"share": 0.1}}
    algorithm["loss_arguments"] = arguments.get(algorithm["loss"], {})
    if algorithm["correction"] == "none":
        del algorithm["correction_cap"]
    elif algorithm["objective"] == "decoupled" or algorithm["correction"] == "masked":
        algorithm["correction_level"] = pick("token", "token", "sequence", "geometric")
    if algorithm["objective"] == "decoupled" and algorithm["loss"] not in config_lib.BATCH_LOSSES:
        algorithm["proximal"] = pick("recompute", "interpolate")
    if algorithm["aggregation"] == "sequence_sum":
        algorithm["sequence_length_constant"] = 7.0
    if algorithm["advantage"] in config_lib.BASELINE_ADVANTAGES[::2]:  # grpo, reinforce_plus_plus_baseline
        algorithm["baseline"] = pick("mean", "mean", *config_lib.BASELINES)
    groups = {"task": {"cut_off": pick("mask", "zero")}}
    if kind == "kl":
        estimator = pick("k1", "k3", "k3+")
        algorithm |= {"kl_coefficient": 0.1, "kl_in_reward": draw(st.booleans()), "kl_estimator": estimator}
    elif kind == "teacher":
        taught = {"advantage": "distillation", "kl_in_reward": True, "kl_estimator": "k1", "baseline": "mean"}
        algorithm |= {"teacher": "http://host:1/v1", "kl_coefficient": 0.1, **(taught if draw(st.booleans()) else {})}
        if algorithm["advantage"] == "distillation":
            algorithm["advantage_arguments"] = {"reward_weight": 0.5}
    elif kind == "critic":
        algorithm |= {"advantage": pick("gae", "egae"), "baseline": "mean"}
        groups = {"task": {"cut_off": "bootstrap" if algorithm["advantage"] == "egae" else "mask"}}
        groups["critic"] = {"enabled": True}
    elif kind == "experts":
        algorithm |= {
            "balance_coefficient": pick(0.0, 0.5),
            "router_z_coefficient": pick(0.0, 0.01),
            "routing_replay": pick("off", "rollout"),
        }
    return kind, algorithm, groups


def rollout(rng, name, prompt, experts, kind):
    """One or two turns after the group's prompt; `experts` of the prompt, of which some engines report others."""
    made = protocols.Trajectory(name, name.split("/")[0], reward=float(rng.integers(0, 3)) / 2)
    made.append_text(prompt, protocols.TokenSource.PROMPT)
    for turn in range(rng.integers(0, 3) or 1):
        if turn:
            made.append_text(rng.integers(0, 16, 3).tolist(), protocols.TokenSource.TOOL)
        count = int(rng.integers(1, 10))
        made.append_sampled(
            protocols.TokenDelta(
                tuple(rng.integers(0, 16, count).tolist()),
                tuple(rng.normal(-np.log(16), 0.2, count).tolist()),
                tuple(rng.integers(0, VERSION + 1, count).tolist()),
            )
        )
    known = len(made.token_ids) - 1
    own = [np.argsort(rng.random((2, 8)))[:, :2].astype(np.uint8).tobytes() for _ in range(known)]
    if kind == "experts":
        made.routing.extend([*experts[: len(prompt)], *own][:known] if rng.random() < 0.7 else own)
    made.finish = "max_context" if rng.random() < 0.15 else "answered"
    made.metrics = {"moves": float(rng.random() < 0.5)}
    if rng.random() < 0.1:
        made.disown(0, len(made.token_ids))
    return made


def batch(seed, kind, segments):
    """Three groups of rollouts of one prompt each; with `segments`, some have several, of which one exceeds a row."""
    rng, groups = np.random.default_rng(seed), []
    for number in range(3):
        prompt = rng.integers(0, 16, rng.integers(1, 11)).tolist()
        experts = [np.argsort(rng.random((2, 8)))[:, :2].astype(np.uint8).tobytes() for _ in prompt]
        made = [
            segment_rollouts.scripted(int(rng.integers(99)), f"p{number}/{index}", 1.0, 8 if kind == "experts" else 0)
            if segments and rng.random() < 0.3
            else rollout(rng, f"p{number}/{index}", prompt, experts, kind)
            for index in range(3)
        ]
        if kind == "teacher":
            for segment in [segment for each in made for segment in each.segments]:
                segment.teacher_log_probs.extend(rng.normal(-2, 1, len(segment.token_ids)).tolist())
        groups.append(protocols.Group(number, protocols.Task(f"p{number}", {}), VERSION, made))
    return protocols.TrainBatch(VERSION, tuple(groups))


def run_config(directory, trainer_fields, algorithm, groups, hybrid):
    rollout = dataclasses.replace(small_model.ROLLOUT, tensor_parallel=(1, 1), temperature=1.0)
    values = {
        "rollout": config_lib.to_dict(rollout),
        "optimizer": {"name": "sgd", "learning_rate": 0.05, "clip_norm": 0.0},
        "model": {"path": directory, "logits_chunk": 64},
        "trainer": {"row_tokens": LONG, "rows_per_micro_batch": 4, **trainer_fields},
        "coordinator": {"groups_per_step": 3, "group_size": 4},
        "algorithm": algorithm,
        "elastic": {"hybrid": int(hybrid)},
        **groups,
    }
    return config_lib.parse(config_lib.RunConfig, values)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Directories of a dense model and of one with experts, by whether they have experts."""
    found = {}
    for experts, shape in ((False, small_model.shape()), (True, small_model.sparse())):
        made = learner.Learner(config_lib.RunConfig(rollout=small_model.ROLLOUT), shape, jax.devices())
        params = jax.device_get(state.random_params(shape, made.layout, 0))
        # Large enough that another choice of experts makes another policy.
        params = jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 2 else leaf, params)
        found[experts] = str(tmp_path_factory.mktemp("model") / "made")
        hf.save(params, shape, found[experts])
    return found


@pytest.fixture(autouse=True)
def no_further_programs(monkeypatch):
    """Compiles what a step needs, and nothing ahead."""
    monkeypatch.setattr(background.Compilation, "begin", lambda self: None)


def divided(actor, whole):
    """What the processes of a trainer prepare together, each from its part: the rows that it holds."""
    rows = [(0, 1), (2, 3)]
    parts = dividing.divide(actor._config, whole, rows)
    if parts is None:  # each process takes the whole batch
        return actor._prepared(whole)
    prepared = [actor._prepared(part.joined()) for part in parts]

    def together(arrays):
        merged = np.array(arrays[0])
        for own, array in zip(rows, arrays, strict=True):
            merged[list(own)] = np.asarray(array)[list(own)]
        return merged

    names = [field.name for field in dataclasses.fields(packing.MicroBatch)]
    micro_batches = [
        dataclasses.replace(items[0], **{name: together([getattr(item, name) for item in items]) for name in names})
        for items in zip(*(each.packed.micro_batches for each in prepared), strict=True)
    ]
    extras = [
        {name: together([item[name] for item in items]) for name in items[0]}
        for items in zip(*(each.extras for each in prepared), strict=True)
    ]
    packed = dataclasses.replace(prepared[0].packed, micro_batches=tuple(micro_batches))
    return dataclasses.replace(prepared[0], packed=packed, extras=extras)


def shared_out(made, take):
    """A step whose first update a hybrid worker shares in."""

    def train(packed, rate, extras, minibatches):
        work = [packed.micro_batches[index].tokens.size for index in minibatches[0]]
        own, theirs = shares.split(work, [protocols.Share("r", 1, 0.5)])
        sums, report = made.sums(step.POLICY, made.policy, packed, extras, theirs)
        received = step.Received([np.array(leaf) for leaf in jax.tree.leaves(sums)], report)
        return take(packed, rate, extras, minibatches, own, lambda seconds: iter([received] if theirs else []))

    return lambda packed, rate, extras, minibatches, own, rest: train(packed, rate, extras, minibatches)


class Steps:
    """Takes the first step of a config from the same weights again and again; keeps the trainers by their mesh."""

    def __init__(self):
        self.actors = {}

    def trainer(self, config):
        """A trainer in its first state."""
        key = str(dataclasses.replace(config.trainer, stream="off"))
        if key not in self.actors:
            made = trainer.create(config_lib.to_dict(config), "unused")
            made.stand_by()
            made.running().begin()
            self.actors[key] = made, [(part, jax.device_get(part.state)) for part in learners(made)]
        made, first = self.actors[key]
        for part, at_first in first:
            part.state = jax.device_put(at_first, state.shardings_of(part.layout.state))
            part.forget()
        made._config, made._version = config, VERSION
        return made

    def take(self, config, way, whole, order):
        """Returns the metrics and the change of each parameter."""
        actor = self.trainer(config)
        made = actor.running().learner
        before = parameters(actor)
        if way == "begun":
            for number in order:
                actor.accumulate(whole.of((number,)))
            whole = dataclasses.replace(whole, begun=tuple(order))
        with pytest.MonkeyPatch.context() as patch:
            if way == "divided":
                prepared = divided(actor, whole)
                patch.setattr(actor, "_prepared", lambda batch: prepared)
            if way == "hybrid":
                patch.setattr(made, "train", shared_out(made, made.train))
            metrics = actor.train_step(whole)
        return metrics, [leaf - old for leaf, old in zip(parameters(actor), before, strict=True)]

    def close(self):
        for actor, _ in self.actors.values():
            actor.shutdown()


def learners(actor):
    return [part for part in (actor.running().learner, actor.running().critic) if part is not None]


def parameters(actor):
    """Copies of the policy's parameters and the critic's."""
    return [np.array(leaf) for part in learners(actor) for leaf in jax.tree.leaves(part.params)]


def assert_same(found, wanted, name):
    (metrics, moved), (others, plainly) = found, wanted
    kept = [
        {key: value for key, value in each.items() if not key.startswith(OF_A_LAYOUT)} for each in (metrics, others)
    ]
    absent = kept[1].keys() - kept[0].keys()
    assert not kept[0].keys() - kept[1].keys(), name
    # Metrics of single rollouts, where a row holds several as one sequence, or a part of one.
    assert not absent or name in ("shared", "streamed and shared", "short rows"), (name, absent)
    assert all(f"/{key}".endswith(("/ess", "/router/balance")) for key in absent), (name, absent)
    for key, value in kept[0].items():
        assert value == pytest.approx(kept[1][key], rel=5e-4, abs=2e-6), (name, key)
    for leaf, other in zip(moved, plainly, strict=True):
        np.testing.assert_allclose(leaf, other, atol=2e-7 + 3e-4 * np.abs(other).max(), rtol=0, err_msg=name)


@pytest.mark.timeout(900 * EXAMPLES)
@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(
    objectives(),
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([False, False, True])), min_size=BATCHES, max_size=BATCHES
    ),
    st.permutations(range(3)),
    st.integers(1, 2),
    st.sampled_from([(), *((name,) for name in SOMETIMES)]),
)
@hypothesis.example(
    ("experts", {"routing_replay": "rollout", "loss": "clip_cov", "loss_arguments": {"least": 0.05, "share": 0.2}}, {}),
    [(0, False), (1, False), (2, False)],
    [2, 0, 1],
    1,
    (),
)
def test_every_layout_takes_the_same_step_or_is_refused(directories, objective, batches, order, begun, sometimes):
    kind, algorithm, groups = objective
    steps = Steps()

    def take(fields, way, given):
        try:
            config = run_config(directories[kind == "experts"], fields, algorithm, groups, way == "hybrid")
            return steps.take(config, way, given, order[:begun])
        except protocols.LibraError as error:
            return error

    try:
        run_config(directories[False], PLAIN, algorithm, groups, False)
    except protocols.ConfigError:
        hypothesis.reject()  # settings that never go together
    try:
        for seed, segments in batches:
            given = batch(seed, kind, segments)
            wanted = take(PLAIN, "", given)
            if isinstance(wanted, protocols.LibraError):  # refused of rollouts of several segments, or nothing to train
                continue
            for name, (fields, way) in LAYOUTS.items():
                if (name in SOMETIMES and name not in sometimes) or (name == "short rows" and not segments):
                    continue
                found = take(fields, way, given)
                refused = isinstance(found, protocols.LibraError)
                if refused:
                    assert isinstance(found, protocols.ConfigError), (name, found)
                    assert re.search(REFUSED.get(name, "never"), str(found)), (name, found)
                else:
                    assert_same(found, wanted, name)
                SEEN["refused" if refused else "equal"] += 1
    finally:
        steps.close()
        print(dict(SEEN))
