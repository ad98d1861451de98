"""configs/cmlfq_cpu.py on doubles: requests move between its two instances by what the tool returned."""

import collections
import importlib.util
import pathlib

import coordinator_doubles as doubles
import pytest
import stepwise_policy

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.rollouts import factories

CONFIG = pathlib.Path(__file__).parents[2] / "configs/cmlfq_cpu.py"
INSTANCES = ("narrow", "wide")


def make_config(policy):
    spec = importlib.util.spec_from_file_location("cmlfq_cpu", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(policy)
    config.steps, config.warm_start.steps = 10, 0
    return config_lib.checked(config)


def engine_specs(rollout):
    specs = []
    for name, degree, slots in zip(INSTANCES, rollout.tensor_parallel, rollout.instance_slots, strict=True):
        arguments = {
            "name": name,
            "model_config": {},
            "rollout": {"slots": slots, "max_context": rollout.max_context},
            "tensor_parallel": degree,
            "seed": 0,
            "script": "stepwise_policy:solve",
            "tokens_per_second": 100.0 * degree,
        }
        specs.append(protocols.ActorSpec(name, "libra_jax.engines.fake_engine:create", arguments))
    return specs


def run(policy, workdir):
    """The recorder of a run whose policy solves every task."""
    config = make_config(policy)
    bench = doubles.Bench(
        config,
        workdir,
        specs=engine_specs(config.rollout),
        make_environment=factories.environment_factory(config.task),
        tasks=factories.task_source(config.task, config.seed),
        tokenizer=stepwise_policy.TOKENIZER,
    )
    bench.run()
    return bench.recorder


def follow_ups(recorder):
    """How often each (instance before, tool that returned, instance that goes on) came."""
    by_request = collections.defaultdict(list)
    for track, name, start, _, arguments in recorder.spans:
        if "request" in arguments:
            by_request[arguments["request"]].append((start, track, name))
    counts = collections.Counter()
    for spans in by_request.values():
        spans.sort()
        for (_, before, _), (_, track, tool), (_, after, _) in zip(spans, spans[1:], spans[2:], strict=False):
            if track == "tools":
                counts[before, tool, after] += 1
    return counts


@pytest.mark.parametrize("policy", ["cmlfq", "cmlfq_paper"])
def test_a_request_moves_to_the_wide_instance_more_often_where_the_return_says_that_more_is_left(policy, tmp_path):
    recorder = run(policy, tmp_path)
    for _, scalars in recorder.steps:
        assert scalars["reward/mean"] == 1.0
        assert scalars["routing/moves"] > 0
        assert scalars["routing/moved_tokens"] > 40 * scalars["routing/moves"], "a prompt and a call at least"
        assert scalars["routing/judged"] == 256
    counts = follow_ups(recorder)
    widened = {
        tool: counts["narrow", tool, "wide"] / sum(counts["narrow", tool, name] for name in INSTANCES)
        for tool in ("simplifier", "calculator")
    }
    assert widened["simplifier"] > widened["calculator"], counts


def test_the_published_rule_knows_the_bucket_of_nearly_every_return(tmp_path):
    assert run("cmlfq_paper", tmp_path).steps[-1][1]["routing/one_shot_accuracy"] > 0.9
