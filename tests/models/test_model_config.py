"""Shapes: presets, both spellings of config.json, counts, and sentences for what cannot be used."""

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from libra_jax.models import config as model_config
from libra_jax.models import feasibility, rope, transformer
from libra_jax.models.hf import hf_names
from libra_jax.protocols import ConfigError, DataError

PUBLISHED_PARAMETERS = {  # as the model cards' safetensors metadata counts them
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-70B": 70_553_706_496,
}
TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("name", model_config.preset_names())
def test_preset_has_the_published_size_everywhere_it_is_counted(name):
    config = model_config.load_preset(name)
    count = model_config.parameter_count(config)
    if name.startswith("libra-tiny"):
        assert 300_000 <= count < 1_000_000
        assert config.tie_word_embeddings
    else:
        assert count == PUBLISHED_PARAMETERS[name]
    abstract = transformer.abstract_params(config)
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract)) == count
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**model_config.to_hf(config))
        )
    expected = {key: tuple(value.shape) for key, value in reference.named_parameters() if "experts" not in key}
    ours = [(name, shape) for entry in hf_names.weight_map(config) for name, shape in entry.tensors().items()]
    # transformers joins a layer's experts in memory, and not in files.
    assert {name: shape for name, shape in ours if "experts" not in name} == expected
    joined = {key: tuple(value.shape) for key, value in reference.named_parameters() if "experts" in key}
    apart = {}
    for key, (count, out, width) in joined.items():
        for expert in range(count):
            prefix = key.rpartition(".")[0] + f".{expert}"
            if key.endswith("gate_up_proj"):
                apart |= {f"{prefix}.{kind}_proj.weight": (out // 2, width) for kind in ("gate", "up")}
            else:
                apart[f"{prefix}.down_proj.weight"] = (out, width)
    assert {name: shape for name, shape in ours if "experts" in name} == apart


@pytest.mark.parametrize("name", model_config.preset_names())
def test_config_survives_hugging_face_and_back(name):
    config = model_config.load_preset(name)
    assert model_config.from_hf(model_config.to_hf(config)) == config
    theirs = transformers.AutoConfig.for_model(**model_config.to_hf(config)).to_dict()
    assert model_config.from_hf(theirs) == config


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_both_spellings_of_rope_scaling_mean_the_same(kind):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.5}
    old = TINY | {"rope_theta": 5e5, "rope_scaling": {"type": kind, **scaling}}
    new = TINY | {"rope_parameters": {"rope_theta": 5e5, **scaling}}
    read = model_config.from_hf(old).rope
    assert read == model_config.from_hf(new).rope
    assert (read.kind, read.theta, read.factor) == (kind, 5e5, 4.0)
    assert model_config.from_hf(model_config.to_hf(model_config.from_hf(new))).rope == read


CARD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
"""As model cards tell users to add it."""


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6, "rope_scaling": CARD_YARN},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": CARD_YARN | {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": CARD_YARN},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_scaling": {}},
        {"rope_scaling": CARD_YARN | {"rope_type": "linear"}},
        {"rope_scaling": CARD_YARN, "original_max_position_embeddings": 16},
    ],
)
def test_both_rope_fields_are_read_as_transformers_reads_them(fields):
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(TINY | fields | {"head_dim": 16}))
    embedding = modeling_llama.LlamaRotaryEmbedding(theirs)
    frequencies, scale = rope.frequencies(model_config.from_hf(TINY | fields | {"head_dim": 16}).rope, 16)
    np.testing.assert_allclose(frequencies, embedding.inv_freq.numpy(), rtol=1e-6)
    assert scale == embedding.attention_scaling


def test_a_theta_that_rope_scaling_would_drop_is_refused():
    fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": CARD_YARN}
    with pytest.raises(DataError, match=r"rope_theta would be 10000 and not 1e\+06; write the rope_theta"):
        model_config.from_hf(TINY | fields)


def test_the_stretched_context_counts():
    def longest(scaling):
        return model_config.from_hf(TINY | {"max_position_embeddings": 40, "rope_scaling": scaling}).longest_context

    assert longest(CARD_YARN) == 128
    assert longest(CARD_YARN | {"factor": 1.0}) == 40
    assert longest({"type": "linear", "factor": 4.0}) == 160
    card = model_config.from_hf(TINY | {"max_position_embeddings": 40, "rope_scaling": CARD_YARN})
    assert model_config.to_hf(card)["max_position_embeddings"] == 128  # vLLM does not multiply yarn's again
    assert model_config.from_hf(model_config.to_hf(card)) == card


def test_head_count_defaults_are_those_of_the_architecture():
    llama = model_config.from_hf(TINY)
    assert (llama.num_kv_heads, llama.head_dim, llama.qkv_bias, llama.qk_norm) == (4, 4, False, False)
    qwen2 = model_config.from_hf(TINY | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    qwen3 = model_config.from_hf(TINY | {"model_type": "qwen3"})
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)


def test_eos_may_be_one_token_or_several():
    assert model_config.from_hf(TINY | {"eos_token_id": 3}).eos_token_ids == (3,)
    several = model_config.from_hf(TINY | {"eos_token_id": [3, 5]})
    assert several.eos_token_ids == (3, 5)
    assert model_config.to_hf(several)["eos_token_id"] == [3, 5]
    assert model_config.to_hf(model_config.from_hf(TINY))["eos_token_id"] is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"model_type": "mamba"},
            "architecture 'mamba' is not supported; supported are llama, qwen2, qwen3",
        ),
        ({"model_type": None, "architectures": ["FooForCausalLM"]}, "architecture 'FooForCausalLM' is not supported"),
        ({"model_type": None}, "architecture None is not supported"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"vocab_size": -1}, "vocab_size must be a positive integer, not -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ({"hidden_size": 18}, "hidden_size = 18 is not a multiple of num_attention_heads = 4"),
        ({"head_dim": 5}, "head_dim = 5 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        (
            {"layer_types": ["full_attention", "linear_attention"], "use_sliding_window": True},
            "layer_types has layers of type 'linear_attention', which is not supported",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, and num_hidden_layers is 2"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types has 3 entries, and num_hidden_layers is 2"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of one name a layer"),
        ({"quantization_config": {"bits": 4}}, "quantized weights cannot be trained"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' depends on the batch"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
    ],
)
def test_unusable_config_is_a_sentence_that_names_the_file(change, sentence):
    with pytest.raises(DataError) as caught:
        model_config.from_hf(TINY | change, "some/config.json")
    assert str(caught.value).startswith("some/config.json: ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("change", "edits"),
    [
        ({"use_sliding_window": True}, {"use_sliding_window": False}),
        ({"layer_types": ["sliding_attention", "full_attention"]}, {"layer_types": None}),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
            {"use_sliding_window": False, "layer_types": None},
        ),
    ],
)
def test_the_sliding_window_refusal_names_edits_that_work(change, edits):
    with pytest.raises(DataError, match="sliding-window attention is not supported") as caught:
        model_config.from_hf(TINY | change | {"sliding_window": 2048})
    words = {"use_sliding_window": "set use_sliding_window to false", "layer_types": "remove layer_types"}
    for field, sentence in words.items():
        assert (sentence in str(caught.value)) == (field in edits)
    assert "rollout.max_context to at most 2048" in str(caught.value)
    model_config.from_hf({k: v for k, v in (TINY | change | edits).items() if v is not None})


def test_a_config_nested_too_deeply_is_a_sentence(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"config\.json: is not whole JSON"):
        model_config.read_directory(tmp_path)


def test_bad_directories_are_sentences(tmp_path):
    def message():
        with pytest.raises(DataError) as caught:
            model_config.read_directory(tmp_path / "model")
        return str(caught.value)

    assert "no such model directory" in message()
    (tmp_path / "model").mkdir()
    assert "config.json: missing" in message()
    text = json.dumps(TINY)
    (tmp_path / "model" / "config.json").write_text(text[: len(text) // 2])
    assert "is not whole JSON" in message()
    (tmp_path / "model" / "config.json").write_bytes(b"\xff\xfe\x00garbage")
    assert "is not whole JSON" in message()
    (tmp_path / "model" / "config.json").write_text("[1]")
    assert "must hold a JSON object, not a list" in message()
    (tmp_path / "model" / "config.json").write_text(text)
    assert model_config.read_directory(tmp_path / "model").num_layers == 2


def test_unknown_preset_offers_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'Qwen3-1\.7B'"):
        model_config.load_preset("qwen3-1.7b")
    with pytest.raises(ConfigError, match="did you mean 'libra-tiny'"):
        model_config.load_preset("libra-tiney")
    for shortened in ("Qwen3-30B", "Qwen/Qwen3-30B"):
        with pytest.raises(ConfigError, match="did you mean 'Qwen3-30B-A3B'"):
            model_config.load_preset(shortened)


def test_untied_adds_one_table():
    config = model_config.load_preset("libra-tiny")
    free = model_config.untied(config)
    table = config.vocab_size * config.hidden_size
    assert model_config.parameter_count(free) == model_config.parameter_count(config) + table
    assert dataclasses.replace(free, tie_word_embeddings=True) == config


def test_tensor_parallel_degree_is_checked_by_name():
    config = model_config.load_preset("Qwen2.5-0.5B")  # 14 heads, 2 key and value heads
    for degree in (1, 2):
        feasibility.check_tensor_parallel(config, degree)
    with pytest.raises(ConfigError, match="4 does not divide the model's 14 attention heads; use 1 or 2"):
        feasibility.check_tensor_parallel(config, 4)
    feasibility.check_tensor_parallel(model_config.load_preset("Qwen2.5-7B"), 4)
    feasibility.check_tensor_parallel(dataclasses.replace(config, num_heads=16), 8)  # heads copied, 8 = 4 x 2
    odd = dataclasses.replace(config, num_heads=24, num_kv_heads=6)
    with pytest.raises(ConfigError, match="4 neither divides the model's 6 key and value heads"):
        feasibility.check_tensor_parallel(odd, 4)
