"""configs/published.py and the variants of configs/ablation.py for a mixture of experts: valid, and they fit."""

import math

import pytest

from configs import ablation, published
from libra_jax.build import preflight
from libra_jax.planning.costs import memory
from libra_jax.planning.forecast import meshes

VARIANTS = [
    f"{workload}-{model}{accelerator}"
    for workload in published.CONTEXTS
    for model in published.MODELS
    for accelerator in ("", "-h100")
]
RIVALS = ("static", "homogeneous", "heterogeneous", "cmlfq", "elastic", "colocated", "static_optimal", "libra")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_published_workload_is_valid_and_fits(variant):
    config = published.get_config(variant)
    shape = preflight.validate(config, need_weights=False).shape
    assert memory.verdict(config, shape).startswith("fits a100")
    assert config.trainer.devices + sum(config.rollout.tensor_parallel) == (64 if "h100" in variant else 48)
    assert max(config.rollout.max_context, config.trainer.row_tokens) <= shape.max_position_embeddings == 40_960


@pytest.mark.parametrize("variant", ["swe", "math-7b", "games-14b", "swe-14b-h100-2", "swe-14b-v5e"])
def test_an_unknown_published_variant_is_refused(variant):
    with pytest.raises(ValueError, match=r"configs/published\.py has swe, search, math, each with -14b or -30b"):
        published.get_config(variant)


@pytest.mark.parametrize("workload", ablation.WORKLOADS)
@pytest.mark.parametrize("name", RIVALS)
def test_rivals_of_30b_use_48_accelerators_and_fit(name, workload):
    config = ablation.get_config(f"{name}-{workload}-30b")
    model, mesh = config.simulation.cost_model(config.model.lora), config.simulation.train_mesh
    assert model.shape.num_experts == 128
    meshes.check_fits(model, meshes.TrainerProperties.from_config(config, model.sheet), mesh, "simulation.train_mesh")
    rollout = sum(config.rollout.tensor_parallel)
    assert max(math.prod(mesh), rollout) == 48 if name == "colocated" else math.prod(mesh) + rollout == 48
    for degree in config.rollout.tensor_parallel:
        assert model.kv_tokens(degree) >= config.rollout.max_context


def test_a_variant_without_a_model_stays_14b():
    assert ablation.get_config("libra-math").simulation == ablation.get_config("libra-math-14b").simulation
    for name in ("pool", "train16"):
        with pytest.raises(ValueError, match="for 14b only"):
            ablation.get_config(f"{name}-swe-30b")
