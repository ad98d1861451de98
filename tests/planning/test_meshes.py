"""Meshes: what fits, what a step takes on them, and which are worth having."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.models import communication_bounds
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters
from libra_jax.planning.compiled import programs
from libra_jax.planning.costs import costs, hardware
from libra_jax.planning.forecast import meshes

MODEL = costs.CostModel(hardware.sheet("h100"), model_config.load_preset("Qwen3-8B", "model"))
SPARSE = costs.CostModel(hardware.sheet("h100"), model_config.load_preset("Qwen3-30B-A3B", "model"))
TRAINER = meshes.TrainerProperties(lengths=(8_192, 32_768))
LENGTHS = st.lists(st.integers(2, 30_000), min_size=1, max_size=60)


def training(lengths, trainer: meshes.TrainerProperties = TRAINER) -> meshes.Training:
    return meshes.Training(MODEL, lengths, trainer)


@hypothesis.settings(max_examples=40)
@hypothesis.given(LENGTHS, st.integers(8, 64))
def test_no_mesh_that_fits_beats_the_front_in_devices_and_time(lengths, most):
    made = training(lengths)
    room = MODEL.sheet.memory_bytes * MODEL.coefficients.memory_fraction
    front = made.front(most)
    assert all(mesh.memory_bytes <= room and mesh.devices <= most for mesh in front)
    devices, seconds = [mesh.devices for mesh in front], [mesh.seconds for mesh in front]
    assert devices == sorted(set(devices))
    assert seconds == sorted(set(seconds), reverse=True)
    for tensor in (1, 2, 4, 8):
        for fsdp in range(1, most // tensor + 1):
            if MODEL.shape.hidden_size % fsdp:
                continue
            for data in range(1, most // (fsdp * tensor) + 1):
                if made.memory_bytes(data, fsdp, tensor) > room:
                    continue
                time = made.seconds(data, fsdp, tensor)
                reached = [mesh.seconds for mesh in front if mesh.devices <= data * fsdp * tensor]
                assert reached
                assert min(reached) <= time


@hypothesis.settings(max_examples=40)
@hypothesis.given(LENGTHS, st.integers(2, 30_000))
def test_a_step_takes_no_less_time_with_one_sequence_more_in_rows_of_their_own(lengths, further):
    alone = meshes.TrainerProperties(lengths=(32_768,), packed=False)
    before, after = (training(one, alone).seconds(1, 4, 2) for one in (lengths, [*lengths, further]))
    assert after >= before


def test_a_long_compute_bound_step_approaches_the_share_of_peak_that_the_coefficients_name():
    """Rows filled to the brim on one node, nothing computed again: what is left are the update and the rows' ends."""
    lengths = [8_193] * 512
    made = training(lengths, meshes.TrainerProperties(lengths=(8_192,), remat="none"))
    seconds = made.seconds(1, 8, 1)
    ideal = MODEL.train_seconds([8_192] * 512, 8)
    assert ideal < seconds < 1.1 * ideal


def test_recomputation_costs_a_third_more_and_saves_memory():
    lengths = [8_000] * 64
    plain, again = (training(lengths, meshes.TrainerProperties((8_192,), remat=remat)) for remat in ("none", "full"))
    times = [one.seconds(1, 8, 1) for one in (plain, again)]
    assert times[1] / times[0] == pytest.approx(4 / 3, rel=0.05)
    assert again.memory_bytes(1, 8, 1) < plain.memory_bytes(1, 8, 1)


def test_a_split_row_takes_a_part_of_the_memory_and_of_the_time_and_sends_what_attention_exchanges():
    lengths = [32_000] * 64
    rows = meshes.TrainerProperties((32_768,))
    whole, split = (training(lengths, dataclasses.replace(rows, context=context)) for context in (1, 4))
    # The state is split over fsdp x context, the activations over context alone.
    assert split.memory_bytes(1, 2, 1) < 0.3 * whole.memory_bytes(1, 2, 1)
    assert split.memory_bytes(1, 2, 1) < whole.memory_bytes(1, 8, 1)
    assert 0.25 < split.seconds(1, 2, 1) / whole.seconds(1, 2, 1) < 0.4
    one, four = whole.volumes(1, 8, 1, 32_768), split.volumes(1, 2, 1, 8_192)
    assert (one.context, one.fsdp) == (0, four.fsdp)
    # Queries and outputs of 32 heads, keys and values of 8, three passes (the forward one again) of 36 layers.
    assert four.context == pytest.approx(3 * 36 * 8_192 * (2 * 32 + 2 * 8) * 128 * 2 * 3 / 4)


def test_meshes_of_a_front_have_the_configs_context():
    made = training([32_000] * 64, meshes.TrainerProperties((32_768,), context=4))
    front = made.front(32)
    assert {mesh.context for mesh in front} == {4}
    assert all(mesh.devices == 4 * mesh.data * mesh.fsdp * mesh.tensor <= 32 for mesh in front)
    with pytest.raises(protocols.ConfigError, match=r"trainer.context: 4 needs more than the 2 devices"):
        made.front(2)


def test_a_model_that_fits_nowhere_is_refused_with_the_number_that_is_short():
    large = costs.CostModel(hardware.sheet("v5e"), model_config.load_preset("Qwen3-14B", "model"))
    with pytest.raises(protocols.ConfigError, match=r"on no mesh of 4 v5e devices: .* needs \d+\.\d GB .* has 14\.4;"):
        meshes.Training(large, [1_000], meshes.TrainerProperties((2_048,))).front(4)


@pytest.mark.parametrize(("remat", "advised"), [("none", True), ("dots", True), ("full", False)])
def test_recomputation_is_advised_only_where_there_is_not_all_of_it(remat, advised):
    large = costs.CostModel(hardware.sheet("v5e"), model_config.load_preset("Qwen3-14B", "model"))
    with pytest.raises(protocols.ConfigError, match=r"take more devices .*or shorter or fewer rows") as refused:
        meshes.Training(large, [1_000], meshes.TrainerProperties((2_048,), remat=remat)).front(4)
    assert ("model.remat='full'" in str(refused.value)) == advised


def test_a_sequence_that_no_row_holds_is_refused():
    with pytest.raises(protocols.ConfigError, match=r"row_tokens: a sequence of 40000 tokens does not fit"):
        training([40_000])
    with pytest.raises(protocols.DataError, match="there is none"):
        training([])


def test_a_compiled_mesh_takes_its_memory_and_communication_from_the_program():
    parts = (programs.Traffic(("fsdp",), 8, 100, 9e12), programs.Traffic(("tensor",), 2, 100, 9e9))
    program = programs.Program(9e9, 30e9, parts, 1e12, 0, 0, 0, (), (), 1.0)
    case = programs.CompiledCase(
        "a", MODEL.parameters, "h100", 1, 4, 2, 8, 32_768, True, "full", 5e9, 1e9, {"policy": program}
    )
    plain, known = (meshes.TrainerProperties((8_192, 32_768), rows=8, compiled=compiled) for compiled in ((), (case,)))
    lengths = [16_000] * 16
    before, after = meshes.Training(MODEL, lengths, plain), meshes.Training(MODEL, lengths, known)
    assert after.memory_bytes(1, 4, 2) == case.memory_bytes == 43e9
    assert after.seconds(1, 4, 2) > before.seconds(1, 4, 2)
    # Other meshes and other rows were not compiled.
    assert after.mesh(1, 8, 1) == before.mesh(1, 8, 1)
    other = meshes.Training(MODEL, lengths, dataclasses.replace(known, rows=16))
    assert other.memory_bytes(1, 4, 2) != case.memory_bytes


@pytest.mark.parametrize(
    ("mesh", "rows", "row_tokens", "over_fsdp", "over_tensor", "memory"),
    [
        ((1, 16, 1), 16, 8_192, 65.9e9, 0.0, 44.1e9),
        ((1, 8, 2), 16, 8_192, 53.7e9, 61.4e9, 43.9e9),
        ((2, 4, 4), 8, 40_960, 31.92e9, 158.48e9, 45.2e9),
    ],
)
def test_experts_cost_what_compiled_programs_count(mesh, rows, row_tokens, over_fsdp, over_tensor, memory):
    """Programs for H100s with remat full, by launch/compile.py (docs/results/experts.md, published_sizes.md)."""
    made, (data, fsdp, _) = meshes.Training(SPARSE, [2], meshes.TrainerProperties((row_tokens,), rows=rows)), mesh
    volumes = made.volumes(*mesh, rows // (data * fsdp) * row_tokens)
    assert volumes.fsdp + volumes.experts == pytest.approx(over_fsdp, rel=0.15)
    assert volumes.tensor == pytest.approx(over_tensor, rel=0.15)
    assert volumes.total - volumes.data == pytest.approx(over_fsdp + over_tensor, rel=0.08)
    assert made.memory_bytes(*mesh) == pytest.approx(memory, rel=0.05)


def test_experts_compute_what_compiled_programs_count():
    """1.32 times 6ND + attention, with N the parameters that multiply a token and remat full."""
    free = dataclasses.replace(SPARSE.sheet, node_link_bytes_per_second=1e30, network_bytes_per_second=1e30)
    known = dataclasses.replace(SPARSE.coefficients, large_message_latency=0.0)
    trainer, lengths = meshes.TrainerProperties((8_192,), rows=16), [8_193] * 256
    made = meshes.Training(dataclasses.replace(SPARSE, sheet=free, coefficients=known), lengths, trainer)
    ideal = costs.train_flops(SPARSE.shape, model_config.multiplied_parameter_count(SPARSE.shape), [8_192] * 256)
    assert made.seconds(1, 16, 1) * 16 * free.flops * 0.4 / ideal == pytest.approx(1.32, rel=0.15)


def test_tokens_for_experts_hide_behind_nothing():
    slow, fast = (
        dataclasses.replace(SPARSE, sheet=dataclasses.replace(SPARSE.sheet, network_bytes_per_second=rate))
        for rate in (50e9, 100e9)
    )
    made = meshes.Training(slow, [8_193] * 32, meshes.TrainerProperties((8_192,), rows=16))
    saved = made.seconds(1, 16, 1) - made.with_costs(fast).seconds(1, 16, 1)
    tokens = 2 * made.volumes(1, 16, 1, 8_192).experts  # two micro-batches
    assert saved == pytest.approx(tokens / (0.8 * 50e9) - tokens / (0.8 * 100e9), rel=1e-6)


def test_a_mesh_divides_the_experts_or_is_refused():
    made = meshes.Training(SPARSE, [8_193] * 512, meshes.TrainerProperties((8_192,)))
    assert all(128 % mesh.fsdp == 0 for mesh in made.front(192))
    wide = dataclasses.replace(SPARSE, shape=dataclasses.replace(SPARSE.shape, num_experts=120))
    with pytest.raises(protocols.ConfigError, match="fsdp a divisor of 2048 and of 120 experts"):
        meshes.check_fits(wide, meshes.TrainerProperties((8_192,)), (1, 16, 1), "trainer")


def test_experts_of_a_compiled_mesh_take_longer_with_more_columns():
    """The program's bytes over `fsdp` are those of its longest rows; shorter rows move fewer tokens."""
    parts = (programs.Traffic(("fsdp",), 16, 500, 65.9e9),)
    program = programs.Program(9e9, 9e9, parts, 1e12, 0, 0, 0, (), (), 1.0)
    sizes = "h100", 1, 16, 1, 16, 32_768, True, "full", 38e9, 8e9
    case = programs.CompiledCase("a", SPARSE.parameters, *sizes, {"policy": program})
    made = meshes.Training(SPARSE, [8_193] * 16, meshes.TrainerProperties((8_192, 32_768), rows=16, compiled=(case,)))
    seconds = [made._collective_seconds(1, 16, 1, columns, case) for columns in (8_192, 32_768)]
    assert sum(seconds[1]) == pytest.approx(65.9e9 / (0.8 * 50e9) + 500 * 40e-6)
    assert seconds[0][1] == pytest.approx(seconds[1][1] / 4)


def test_an_adapter_saves_gradients_updates_and_bytes():
    shape = adapters.adapted(MODEL.shape, config_lib.LoraConfig(rank=8))
    adapted = dataclasses.replace(MODEL, shape=shape)
    lengths, trainer = [8_193] * 64, meshes.TrainerProperties((8_192,), rows=8, remat="none")
    whole = meshes.Training(MODEL, lengths, trainer)
    light = meshes.Training(adapted, lengths, dataclasses.replace(trainer, frozen_bytes=2))
    # Frozen weights have no gradient: 2 of 3 products are left, and attention takes as long as before.
    assert light.seconds(1, 8, 1) / whole.seconds(1, 8, 1) == pytest.approx(
        adapted.train_seconds([8_192] * 64, 8) / MODEL.train_seconds([8_192] * 64, 8), rel=0.05
    )
    # Two gathers in bfloat16 are left of two and a sum in float32.
    assert light.volumes(1, 8, 1, 8_192).fsdp == pytest.approx(whole.volumes(1, 8, 1, 8_192).fsdp / 2, rel=0.02)
    assert light.volumes(2, 8, 1, 8_192).data < 0.02 * whole.volumes(2, 8, 1, 8_192).data


def test_an_adapter_costs_what_its_compiled_program_counts():
    """Qwen3-1.7B with rank 16 for 8 H100s, 8 rows of 8,192 tokens, remat full (launch/compile.py)."""
    shape = adapters.adapted(model_config.load_preset("Qwen3-1.7B"), config_lib.LoraConfig(rank=16))
    trainer = meshes.TrainerProperties((8_192,), rows=8, frozen_bytes=2)
    made = meshes.Training(costs.CostModel(MODEL.sheet, shape), [2], trainer)
    assert made.volumes(1, 8, 1, 8_192).total == pytest.approx(5.58e9, rel=0.15)
    assert communication_bounds.volumes(shape, 1, 8, 1, 8_192).total == pytest.approx(5.58e9, rel=0.03)
    assert made.memory_bytes(1, 8, 1) == pytest.approx(3.9e9, rel=0.15)


def test_a_program_compiled_without_an_adapter_is_not_taken_for_one_with_it():
    shape = adapters.adapted(MODEL.shape, config_lib.LoraConfig(rank=8))
    program = programs.Program(9e9, 30e9, (), 1e12, 0, 0, 0, (), (), 1.0)
    case = programs.CompiledCase(
        "a", MODEL.parameters, "h100", 1, 8, 1, 8, 8_192, True, "full", 5e9, 1e9, {"policy": program}
    )
    trainer = meshes.TrainerProperties((8_192,), rows=8, compiled=(case,))
    assert trainer.case(MODEL, (1, 8, 1)) == case
    assert trainer.case(dataclasses.replace(MODEL, shape=shape), (1, 8, 1)) is None


def test_memory_and_time_count_the_moments_of_the_optimizer():
    found = {}
    for name, arguments in (("adamw", {}), ("muon", {}), ("lion", {}), ("sgd", {"momentum": 0.9}), ("sgd", {})):
        optimizer = config_lib.OptimizerConfig(name=name, arguments=arguments)
        trainer = meshes.TrainerProperties.from_config(config_lib.RunConfig(optimizer=optimizer), MODEL.sheet)
        made = meshes.Training(MODEL, [100], trainer)
        found[name, bool(arguments)] = made.memory_bytes(1, 1, 1), made.seconds(1, 1, 1)
    adam, muon, lion, momentum, sgd = found.values()
    tables = MODEL.shape.vocab_size * MODEL.shape.hidden_size * (1 if MODEL.shape.tie_word_embeddings else 2)
    assert adam[0] - lion[0] == pytest.approx(4 * MODEL.parameters)
    assert adam[0] - muon[0] == pytest.approx(4 * (MODEL.parameters - tables))
    assert adam[0] - sgd[0] == pytest.approx(8 * MODEL.parameters)
    assert lion == momentum
    assert adam[1] > muon[1] > lion[1] > sgd[1]
