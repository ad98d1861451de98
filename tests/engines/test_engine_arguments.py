"""vLLM's own arguments: which pass, which are refused and why; every field of the pinned vLLM is in a table."""

import dataclasses

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.config import engine_arguments

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}

REFUSED = {
    "an argument of another setting": ({"max_num_seqs": 4}, "max_num_seqs comes from config.rollout.slots"),
    "the log-prob contract": ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode breaks the log-prob contract"),
    "a logits processor": ({"logits_processors": ["mine:Ban"]}, "logits_processors breaks the log-prob contract"),
    "another kind of parallelism": ({"data_parallel_size": 2}, "add instances to config.rollout.tensor_parallel"),
    "a typing error": ({"enable_prefix_cachng": True}, "no argument .* did you mean enable_prefix_caching"),
    "a cache of old weights": ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, "LMCache would serve"),
    "a draft model": ({"speculative_config": {"method": "eagle"}}, "a draft model would keep dummy weights"),
    "drafts accepted by rate": (
        {"speculative_config": {**NGRAM, "rejection_sample_method": "synthetic"}},
        "the log-probs are not those of the sampled distribution",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_argument_names_its_reason(arguments, message):
    with pytest.raises(protocols.ConfigError, match=rf"config\.rollout\.engine_arguments: .*{message}"):
        config_lib.RolloutConfig(engine_arguments=arguments)


def test_arguments_that_keep_the_distribution_pass_and_the_test_double_takes_none():
    arguments = {"enable_prefix_caching": True, "max_num_batched_tokens": 8192, "speculative_config": NGRAM}
    assert config_lib.RolloutConfig(engine_arguments=arguments).engine_arguments == arguments
    with pytest.raises(protocols.ConfigError, match=r"has no effect with rollout\.engine=fake"):
        config_lib.RunConfig(rollout=config_lib.RolloutConfig(engine="fake", engine_arguments=arguments))


@pytest.mark.parametrize("name", ["quantization", "kv_cache_dtype"])
def test_a_quantised_engine_needs_an_importance_correction(name):
    rollout = config_lib.RolloutConfig(engine_arguments={name: "fp8"})
    with pytest.raises(protocols.ConfigError, match=f"{name} makes the engine sample from another policy"):
        config_lib.RunConfig(rollout=rollout)
    config_lib.RunConfig(rollout=rollout, algorithm=config_lib.AlgorithmConfig(correction="truncated"))
    config_lib.RunConfig(rollout=config_lib.RolloutConfig(engine_arguments={"kv_cache_dtype": "bfloat16"}))


@pytest.mark.vllm
def test_every_argument_of_the_pinned_vllm_is_allowed_set_by_us_or_refused():
    from vllm.engine import arg_utils

    fields = {item.name for item in dataclasses.fields(arg_utils.AsyncEngineArgs)}
    tables = (engine_arguments.ALLOWED, engine_arguments.OWNED, engine_arguments.REFUSED)
    listed = [name for table in tables for name in table]
    assert len(listed) == len(set(listed))
    assert fields - set(listed) == set(), "new in vLLM: allow it, or refuse it with its reason"
    assert set(listed) - fields == set(), "no longer in vLLM"
