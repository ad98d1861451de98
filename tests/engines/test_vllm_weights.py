"""What the engine's front end refuses before a worker loads anything; no engine is started."""

import dataclasses

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.engines import vllm_weights
from libra_jax.models import config as models_config
from libra_jax.models.adapters import adapters
from libra_jax.models.hf import hf_names

LORA = config_lib.LoraConfig(rank=8)
SHAPE = models_config.load_preset("libra-tiny")
ENTRIES = tuple(
    protocols.WeightEntry(entry.hf_name, "float32", entry.shape, 0, 4)
    for entry in hf_names.weight_map(models_config.untied(SHAPE))
)


def chunk(entries=ENTRIES, version=3, index=0, count=1) -> protocols.WeightChunk:
    return protocols.WeightChunk(version, index, count, tuple(entries), 4, {"kind": "memfd", "pid": 1, "fd": 2})


@pytest.fixture
def checker():
    made = vllm_weights.Checker("rollout-0", models_config.to_hf(SHAPE))
    made.start(3)
    return made


def test_a_tied_models_whole_checkpoint_with_its_output_projection_is_taken(checker):
    checker.add(chunk(ENTRIES[:5], index=0, count=2))
    checker.add(chunk(ENTRIES[5:], index=1, count=2))
    checker.finish(3)
    assert checker.version is None


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([chunk(version=2)], "a chunk of version 2 came while version 3 is loaded"),
        ([chunk([dataclasses.replace(ENTRIES[0], name="other")])], "weight other is not part of the engine's model"),
        (
            [chunk([dataclasses.replace(ENTRIES[0], shape=(1,))])],
            r"weight model.embed_tokens.weight has shape \(1,\), not the mod",
        ),
        ([], "0 of 0 weight chunks of version 3 came"),
        ([chunk(count=2)], "1 of 2 weight chunks of version 3 came"),
        ([chunk(ENTRIES[:-1])], r"version 3 lacks lm_head.weight \(1 tensors in all\)"),
    ],
)
def test_what_does_not_make_up_the_model_is_refused(checker, sent, problem):
    def update():
        for item in sent:
            checker.add(item)
        checker.finish(3)

    with pytest.raises(protocols.LibraError, match=f"engine rollout-0 cannot take these weights: {problem}"):
        update()


def test_a_new_update_forgets_the_one_that_was_refused(checker):
    checker.add(chunk(ENTRIES[:5], index=0, count=2))
    checker.start(4)
    checker.add(chunk(version=4))
    checker.finish(4)


def test_frozen_weights_are_loaded_once_and_again_if_an_update_of_theirs_was_refused():
    checker = vllm_weights.Checker("rollout-0", models_config.to_hf(SHAPE), LORA)
    adapter = tuple(
        protocols.WeightEntry(entry.hf_name, "float32", entry.shape, 0, 4)
        for entry in hf_names.adapter_map(adapters.adapted(SHAPE, LORA))
    )

    def update(version, frozen, base=ENTRIES, confirmed=True):
        """Returns which of both chunks are to be loaded."""
        checker.start(version)
        sent = [chunk(adapter, version, 0, 2), dataclasses.replace(chunk(base, version, 1, 2), frozen=frozen)]
        wanted = [checker.add(item) for item in sent]
        checker.finish(version)
        if confirmed:
            checker.confirm()
        return wanted

    assert update(1, "a") == [True, True]
    assert update(2, "a") == [True, False]
    with pytest.raises(protocols.LibraError, match=r"version 3 lacks lm_head.weight"):
        update(3, "b", ENTRIES[:-1])
    assert update(4, "a") == [True, True], "half of other weights has been loaded over them"
    assert update(4, "a", confirmed=False) == [True, False]
    assert update(4, "a") == [True, True], "the workers failed before they served it"
    checker.start(5)
    with pytest.raises(protocols.LibraError, match=r"has shape \(9,\), not the model's \(8, 128\)"):
        checker.add(chunk([dataclasses.replace(adapter[0], shape=(9,))], 5))
    # An adapter alone makes no model.
    checker.add(chunk(adapter, 5))
    with pytest.raises(protocols.LibraError, match="version 5 lacks"):
        checker.finish(5)


def test_the_workers_payload_is_plain(checker):
    payload = vllm_weights.payload(chunk(), "any")
    assert payload["entries"][0] == ("model.embed_tokens.weight", "float32", [128, 128], 0, 4)
    assert payload["transport"] == {"kind": "memfd", "pid": 1, "fd": 2}
