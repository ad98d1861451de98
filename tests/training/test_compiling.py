"""Compiling a run's programs and counting them, on CPU devices, against XLA's own count and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.planning.compiled import compiled
from libra_jax.training import compiling, topology


def test_products_and_collectives_of_a_scan_match_xlas_count():
    """XLA's cost analysis counts a loop's body once; this count multiplies by the iterations."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())

    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    arrays = jax.ShapeDtypeStruct((16, 64), jnp.float32), jax.ShapeDtypeStruct((5, 64, 64), jnp.float32)
    program = jax.jit(layers, in_shardings=(whole, split), out_shardings=whole).lower(*arrays).compile()
    sizes = compiled.Sizes(dict(mesh.shape), vocabulary=7, hidden=64, tokens=16, logits_chunk=4)
    counts = compiled.count(program.as_text(), sizes)
    once = program.cost_analysis()["flops"]
    assert counts.matmul_flops == pytest.approx(5 * once, rel=0.1)  # XLA counts tanh and the loop's counter, too
    assert {item.executions for item in counts.collectives if item.wire_bytes > 4_000} == {5.0}
    assert not counts.vocabulary_collectives


def test_a_runs_programs_are_compiled_and_counted():
    config = config_lib.RunConfig()
    config.model.preset = "libra-tiny"
    config.trainer.fsdp, config.trainer.data = 4, 2
    config.trainer.row_tokens, config.trainer.rows_per_micro_batch = 512, 8
    shape = model_config.load_preset("libra-tiny")
    case = compiling.case(config, shape, jax.devices()[:8], "h100")
    assert list(case.programs) == list(compiling.ALL)
    assert case.mesh == (2, 4, 1)
    assert case.columns == 512
    # Parameters and two moments of float32, a fourth each; norms are not split.
    assert case.state_bytes == pytest.approx(3 * 4 * case.parameters / 4, rel=0.05)
    gradient = case.gradient
    assert gradient.argument_bytes == pytest.approx(2 * 4 * case.parameters / 4, rel=0.1)
    linear = 6 * (case.parameters - (0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size)) * 512
    assert 1.0 < gradient.matmul_flops / linear < 2.0
    assert {axis for item in gradient.traffic for axis in item.axes} <= {"data", "fsdp"}
    assert gradient.wire_bytes > 0
    assert case.memory_bytes > case.state_bytes


def test_a_target_without_compiler_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv(topology.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(Exception, match=r"bash launch/setup.sh --accelerators"):
        topology.devices("h100", 8)
    with pytest.raises(Exception, match="needs 9 devices, and the topology 1x8 has 8"):
        topology.devices("h100", 9, (1, 8))
    with pytest.raises(Exception, match="is not one of h100, v6e"):
        topology.devices("h200", 8)


def test_positions_of_groups_are_those_of_the_mesh():
    """The second axis of a mesh of 2 x 4 joins neighbours."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "fsdp"),
        mesh=mesh,
        in_specs=PartitionSpec("data", "fsdp"),
        out_specs=PartitionSpec("data"),
    )
    program = jax.jit(summed).lower(np.zeros((8, 8), np.float32)).compile()
    counts = compiled.count(program.as_text(), compiled.Sizes(dict(mesh.shape), 7, 64, 16, 4))
    (only,) = counts.collectives
    assert (only.axes, only.devices, only.span) == (("fsdp",), 4, 4)
    # Each device's part: 4 x 2 float32, twice three quarters of it.
    assert only.wire_bytes == 2 * 32 * 3 / 4
