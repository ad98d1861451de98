"""Adapters that a config may ask for, and what is refused by name."""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors_headers

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.models import transformer
from libra_jax.models.adapters import adapters, lora
from libra_jax.models.hf import hf_names

DENSE = model_config.load_preset("libra-tiny")
SPARSE = model_config.load_preset("libra-tiny-moe")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rank": 513}, r"model.lora.rank: must lie in \[0, 512\], not 513"),
        ({"rank": 1, "alpha": 0.0}, "model.lora.alpha: must be positive"),
        ({"rank": 1, "targets": ("q_prj",)}, "model.lora.targets: 'q_prj' is not one of .*; did you mean 'q_proj'"),
        ({"rank": 1, "targets": ()}, "model.lora.targets: must not be empty"),
        ({"rank": 1, "layers": (1, 0)}, "model.lora.layers: must ascend"),
        ({"rank": 1, "sync": "merged"}, "model.lora.sync: 'merged' is not one of adapter, merge; did you mean 'merge'"),
        ({"path": "somewhere"}, "model.lora.path: somewhere has no effect with model.lora.rank=0"),
    ],
)
def test_an_adapter_that_no_model_can_have_is_refused(fields, problem):
    with pytest.raises(protocols.ConfigError, match=problem):
        config_lib.RunConfig(model=config_lib.ModelConfig(lora=config_lib.LoraConfig(**fields)))


def test_an_adapter_that_this_model_cannot_have_is_refused():
    with pytest.raises(protocols.ConfigError, match="there is no layer 2, because the model's 2 layers end with"):
        adapters.adapted(DENSE, config_lib.LoraConfig(rank=1, layers=(0, 2)))
    with pytest.raises(protocols.ConfigError, match="gate_proj, up_proj, down_proj are projections of experts"):
        adapters.adapted(SPARSE, config_lib.LoraConfig(rank=1))
    given = config_lib.LoraConfig(rank=1, targets=hf_names.ATTENTION)
    with pytest.raises(protocols.ConfigError, match=r"no mixtures of experts .*; set model.lora.sync=merge"):
        adapters.adapted(SPARSE, given)
    assert adapters.adapted(DENSE, config_lib.LoraConfig()) == DENSE


def test_a_mixture_of_experts_with_an_adapter_equals_its_merged_weights():
    given = config_lib.LoraConfig(rank=4, targets=("q_proj", "o_proj"), layers=(1,), sync="merge")
    shape = adapters.adapted(SPARSE, given)
    base = transformer.init_params(shape, jax.random.key(0))
    places, _ = lora.split(transformer.abstract_params(shape))
    adapter = jax.tree.map(lambda leaf: leaf + 0.1, lora.init(places, jax.random.key(1)))
    tokens = jnp.arange(24)[None]

    def hidden(params, config):
        options = transformer.ComputeOptions()
        return transformer.forward(params, config, options, tokens, tokens, jnp.ones_like(tokens))

    ours, before = hidden(lora.join(base, adapter), shape), hidden(base, SPARSE)
    np.testing.assert_allclose(ours, hidden(lora.merged(base, adapter, shape, "float32"), SPARSE), atol=1e-4)
    assert jnp.abs(ours - before).max() > 0.1


def test_rematerialisation_keeps_no_product_as_large_as_a_projections():
    shape = adapters.adapted(DENSE, config_lib.LoraConfig(rank=4))
    places = transformer.abstract_params(shape, "bfloat16")
    adapter, base = lora.split(places)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)

    def kept(trained, frozen, config, remat):
        """Elements that the scan over the layers keeps for the backward pass."""
        options = transformer.ComputeOptions(compute_dtype="bfloat16", remat=remat)

        def loss(trained, frozen, tokens):
            params = trained if frozen is None else lora.join(frozen, trained)
            hidden = transformer.forward(params, config, options, tokens, tokens, jnp.ones_like(tokens))
            return hidden.astype(jnp.float32).sum()

        program = jax.make_jaxpr(jax.grad(loss))(trained, frozen, tokens).jaxpr
        scans = [item for item in program.eqns if item.primitive.name == "scan"]
        sizes = [[out.aval.size for out in item.outvars[item.params["num_carry"] :]] for item in scans]
        return max(map(sum, sizes))

    with_adapter = kept(adapter, base, shape, "dots")
    inner = 7 * 2 * 2 * 64 * 4  # x A^T of each projection and layer
    assert with_adapter <= kept(base, None, DENSE, "dots") + inner
    assert with_adapter < kept(adapter, base, shape, "none") / 2


def test_a_sync_that_cannot_bring_the_adapter_is_refused():
    def run(lora, **groups):
        return config_lib.RunConfig(model=config_lib.ModelConfig(lora=lora), **groups)

    merged, alone = config_lib.LoraConfig(rank=1, sync="merge"), config_lib.LoraConfig(rank=1)
    device = config_lib.RolloutConfig(transport="nccl")
    with pytest.raises(protocols.ConfigError, match=r"rollout.transport is nccl; set model.lora.sync=merge"):
        run(alone, rollout=device)
    assert run(merged, rollout=device).model.lora.sync == "merge"
    both = config_lib.RolloutConfig(tensor_parallel=(1, 1))
    hybrid = config_lib.ElasticConfig(hybrid=1)
    with pytest.raises(protocols.ConfigError, match="merge sends no adapter, which hybrid workers train"):
        run(merged, rollout=both, elastic=hybrid)
    assert run(alone, rollout=both, elastic=hybrid).elastic.hybrid == 1


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"r": 4}, "r is 4, and config.model.lora.rank asks for 2"),
        ({"lora_alpha": 1}, "lora_alpha is 1, and config.model.lora.alpha asks for 32"),
        ({"target_modules": ["q_proj"]}, "target_modules is .*, and config.model.lora.targets asks for"),
        ({"use_rslora": True}, "use_rslora = True is not supported"),
        ({"alpha_pattern": {"q_proj": 1}}, "alpha_pattern = .* is not supported"),
    ],
)
def test_another_adapter_of_peft_is_refused(tmp_path, changed, problem):
    shape = adapters.adapted(DENSE, config_lib.LoraConfig(rank=2))
    values = adapters.to_peft(shape, "base")
    (tmp_path / adapters.CONFIG_FILE).write_text(json.dumps(values))
    tensors = {f"{adapters.PREFIX}{entry.hf_name}": entry.shape for entry in hf_names.adapter_map(shape)}
    safetensors_headers.write(tmp_path / adapters.WEIGHTS_FILE, tensors)
    adapters.check_directory(shape, tmp_path)
    (tmp_path / adapters.CONFIG_FILE).write_text(json.dumps(values | changed))
    with pytest.raises(protocols.DataError, match=rf"^config\.model\.lora\.path: .*{problem}"):
        adapters.check_directory(shape, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns the model, the folder of an adapter that PEFT wrote, and our shape of both."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    import transformers

    torch.manual_seed(0)
    values = model_config.to_hf(DENSE, "float32")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values))
    fields = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=8, **fields))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    given = config_lib.LoraConfig(rank=2, alpha=8.0, targets=("q_proj", "v_proj"))
    return adapted.unload(), folder, adapters.adapted(DENSE, given)


def _with(saved, tmp_path, **changed):
    """Copies PEFT's adapter with other fields, and tells whether we take it."""
    _, folder, shape = saved
    values = json.loads((folder / adapters.CONFIG_FILE).read_text())
    (tmp_path / adapters.CONFIG_FILE).write_text(json.dumps(values | changed))
    (tmp_path / adapters.WEIGHTS_FILE).write_bytes((folder / adapters.WEIGHTS_FILE).read_bytes())
    try:
        adapters.check_directory(shape, tmp_path)
    except protocols.DataError:
        return False
    return True


@pytest.mark.parametrize(
    "changed",
    [
        *({"init_lora_weights": init} for init in (False, "gaussian", "orthogonal", "pissa", "pissa_niter_2", "olora")),
        *({"layers_to_transform": layers} for layers in (0, [1], [0, 1], [])),
        *({name: ["v_proj"]} for name in ("exclude_modules", "target_modules")),
        {"use_rslora": True},
        {"lora_dropout": 0.5},
        {"rank_pattern": {}, "alpha_pattern": {"q_proj": 4}},
    ],
)
def test_an_adapter_is_refused_where_peft_computes_otherwise(saved, tmp_path, changed):
    import peft
    import torch

    model, folder, _ = saved
    tokens = torch.arange(8)[None]

    def logits(directory):
        adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), directory).eval()
        with torch.no_grad():
            return adapted(tokens).logits

    accepted = _with(saved, tmp_path, **changed)
    assert accepted == torch.allclose(logits(tmp_path), logits(folder), atol=1e-5)


def test_every_field_of_an_adapters_description_is_harmless_or_refused(saved, tmp_path):
    import peft

    harmless = {"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "inference_mode"}
    harmless |= {"lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"}
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)} | {"field_of_a_later_version"}
    for name in sorted(names):
        assert _with(saved, tmp_path, **{name: {"unlike": [1]}}) == (name in harmless), name


def test_tensors_of_another_adapter_are_refused(tmp_path):
    shape = adapters.adapted(DENSE, config_lib.LoraConfig(rank=2))
    (tmp_path / adapters.CONFIG_FILE).write_text(json.dumps(adapters.to_peft(shape, "base")))
    wanted = {f"{adapters.PREFIX}{entry.hf_name}": entry.shape for entry in hf_names.adapter_map(shape)}
    first = next(iter(wanted))
    for tensors, problem in (
        ({name: size for name, size in wanted.items() if name != first}, f"{first} has shape None, not"),
        (wanted | {first: (1, 1)}, r"has shape \(1, 1\), not"),
        (wanted | {"more": (1,)}, "more has no place in the adapter"),
    ):
        safetensors_headers.write(tmp_path / adapters.WEIGHTS_FILE, tensors)
        with pytest.raises(protocols.DataError, match=problem):
            adapters.check_directory(shape, tmp_path)
