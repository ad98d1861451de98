"""Adapters on frozen weights: against PEFT in float64, on meshes, in checkpoints, and several over one model."""

import math

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.data import packing
from libra_jax.models.adapters import adapters, lora
from libra_jax.models.adapters import peft as peft_files
from libra_jax.models.hf import hf, hf_names
from libra_jax.training import base as base_lib
from libra_jax.training import learner as learner_lib
from libra_jax.training import resize, step
from libra_jax.training import state as state_lib

RATE = 1e-2
ADAM = config_lib.OptimizerConfig(learning_rate=RATE)
ALL = config_lib.LoraConfig(rank=4, alpha=8.0)
SOME = config_lib.LoraConfig(rank=2, alpha=3.0, targets=("q_proj", "down_proj"), layers=(1,))


@pytest.fixture(scope="module")
def make(small):
    """(lora settings, trainer and other groups) -> a learner whose adapter has moved from its start."""

    def made(given=ALL, trainer=None, model=None, moved=True, **groups):
        config = small.config(trainer=trainer, model={"lora": given, **(model or {})}, **groups)
        learner = learner_lib.Learner(config, adapters.adapted(small.shape, given), jax.devices())
        base = state_lib.cast_like(small.params, learner.layout.state.base)
        learner.begin(base=jax.device_put(base, state_lib.shardings_of(learner.layout.state.base)))
        if moved:
            places = learner.layout.state.params
            adapter = jax.tree.map(_noise, jax.device_get(learner.params))
            learner.begin(jax.device_put(adapter, state_lib.shardings_of(places)))
        return learner

    return made


def _noise(leaf):
    return leaf + np.random.default_rng(leaf.size).normal(0, 0.3, leaf.shape).astype(np.float32)


def _packed(small, learner, count=8, seed=0):
    return packing.pack(small.examples(count, seed, longest=20), learner.config.trainer)


def _sums(small, learner):
    packed = _packed(small, learner)
    found, _ = learner.sums(step.SUPERVISED, learner.policy, packed, [{}] * len(packed.micro_batches), [0])
    return found


def _on_host(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))]


def _assert_equal(tree, wanted):
    for leaf, other in zip(_on_host(tree), _on_host(wanted), strict=True):
        np.testing.assert_array_equal(leaf, other)


def _exported(learner, small, folder):
    """Our base and our adapter, as PEFT reads them, in float64."""
    hf.save(small.params, small.shape, folder / "base")
    peft_files.save(
        learner.params, adapters.adapted(small.shape, learner.config.model.lora), folder / "adapter", "base"
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).double()


@pytest.mark.parametrize("given", [ALL, SOME], ids=["all", "some"])
def test_loss_and_gradient_equal_those_of_peft_in_float64(make, small, tmp_path, given):
    learner = make(given)
    found, total = _sums(small, learner), 0.0
    model = _exported(learner, small, tmp_path)
    for example in small.examples(8, longest=20):
        tokens = torch.tensor(example.tokens_N, dtype=torch.long)
        log_probs = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        chosen = log_probs.gather(1, tokens[1:, None])[:, 0]
        total = total - chosen[torch.tensor(example.mask_N[1:])].sum()
    total.backward()
    np.testing.assert_allclose(found.loss, float(total.detach()), rtol=1e-6)
    theirs = {name: weight.grad.numpy() for name, weight in model.named_parameters() if weight.requires_grad}
    shape = adapters.adapted(small.shape, given)
    assert len(theirs) == len(hf_names.adapter_map(shape))
    for entry in hf_names.adapter_map(shape):
        ours = found.gradients
        for key in entry.path:
            ours = ours[key]
        wanted = theirs[f"{adapters.PREFIX}{entry.hf_name}".replace(".weight", ".default.weight")]
        np.testing.assert_allclose(ours[entry.layer], wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)


def test_gradients_sums_and_moments_exist_for_the_adapter_only(make, small):
    learner = make(model={"compute_dtype": "bfloat16"}, moved=False)
    entries = hf_names.adapter_map(adapters.adapted(small.shape, ALL))
    adapter_bytes = 4 * sum(math.prod(entry.shape) for entry in entries)

    def nbytes(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf.ndim)

    state = learner.train_state()
    assert nbytes(state.params) == adapter_bytes
    assert nbytes(state.opt_state) == 2 * adapter_bytes
    assert nbytes(learner.programs.zeros()) == adapter_bytes
    assert state.reference is None
    weights, norms = 0, 0
    for entry in hf_names.weight_map(small.shape):
        size = math.prod(entry.shape)
        weights, norms = (weights, norms + size) if "norm" in entry.hf_name else (weights + size, norms)
    assert nbytes(state.base) == 2 * weights + 4 * norms
    # What the programs take and return is this state, without the frozen weights in an update.
    text = str(learner.layout.accumulator)
    assert "lora_a" in text
    assert "embed_tokens" not in text


def test_fifty_steps_learn_and_change_no_bit_of_the_base(make, small):
    learner = make(model={"compute_dtype": "bfloat16"}, moved=False)
    before, digest, packed = _on_host(learner.state.base), base_lib.digest(learner.state.base), _packed(small, learner)
    losses = [learner.update(step.SUPERVISED, packed, RATE)["loss"] for _ in range(50)]
    assert losses[-1] < losses[0] - 0.2
    _assert_equal(learner.state.base, before)
    assert base_lib.digest(learner.state.base) == digest
    leaves, structure = jax.tree.flatten(learner.state.base)
    for number in (0, len(leaves) // 2, len(leaves) - 1):
        # The lowest bit of the last element of one leaf.
        (end,) = before[number].reshape(-1)[-1:].view({2: np.uint16, 4: np.uint32}[before[number].itemsize])
        other = np.array(end ^ 1, end.dtype).view(before[number].dtype)
        changed = [leaf.at[(-1,) * leaf.ndim].set(other) if leaf is leaves[number] else leaf for leaf in leaves]
        assert base_lib.digest(jax.tree.unflatten(structure, changed)) != digest


def test_weights_are_merged_by_one_program_for_each_dtype(make, monkeypatch):
    traced, merged = [], lora.merged
    monkeypatch.setattr(
        lora, "merged", lambda *trees, config, dtype: traced.append(dtype) or merged(*trees, config=config, dtype=dtype)
    )
    learner = make(SOME)
    for dtype in ("float32", "bfloat16", "float32", "bfloat16", "float32"):
        assert str(learner.merged(dtype)["layers"]["mlp"]["down_proj"]["weight"].dtype) == dtype
    assert traced == ["float32", "bfloat16"]


def test_the_reference_model_is_the_base_without_the_adapter(make, small):
    with_kl = config_lib.AlgorithmConfig(kl_coefficient=0.1)
    learner, plain = make(algorithm=with_kl), small.learner(small.config(algorithm=with_kl))
    packed = _packed(small, learner)
    (ours,), (wanted,) = learner.reference_log_probs(packed, [{}]), plain.reference_log_probs(packed, [{}])
    np.testing.assert_array_equal(ours, wanted)
    extras = [{"advantages": np.ones_like(wanted), "reference": ours}]
    metrics = learner.update(step.POLICY, packed, RATE, extras)
    assert metrics["kl/reference"] > 0.01


@pytest.fixture(scope="module")
def wanted(make, small):
    return _sums(small, make())


@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (1, 2, 2, 2)])
def test_gradients_on_a_mesh_equal_those_of_one_device(make, small, wanted, sizes):
    found = _sums(small, make(trainer=dict(zip(state_lib.AXES, sizes, strict=True))))
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-5)
    for ours, whole in zip(_on_host(found.gradients), _on_host(wanted.gradients), strict=True):
        np.testing.assert_allclose(ours, whole, atol=1e-5 * np.abs(whole).max(), rtol=0)


def test_a_resize_changes_no_bit(make, small):
    learner = make(trainer={"fsdp": 2, "tensor": 2})
    packed, digest = _packed(small, learner), base_lib.digest(learner.state.base)
    learner.update(step.SUPERVISED, packed, RATE)
    for sizes in [(2, 1, 1), (1, 2, 2)]:
        before = _on_host(learner.state)
        learner, _ = resize.MeshChange(learner, protocols.MeshSizes(*sizes), jax.devices()).take_over(120.0)
        _assert_equal(learner.state, before)
        assert base_lib.digest(learner.state.base) == digest
        learner.update(step.SUPERVISED, packed, RATE)
