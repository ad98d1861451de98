"""Layers of experts against transformers, and on meshes against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transformers.models.qwen3_moe import modeling_qwen3_moe

from libra_jax.models import communication_bounds, feasibility, layers, transformer
from libra_jax.models import config as model_config
from libra_jax.models.experts import expert_rows, experts, router
from libra_jax.models.hf import hf

AXES = ("data", "fsdp", "tensor", "context")
CASES = [(8, 1, True), (8, 2, False), (8, 8, True), (128, 1, False), (128, 2, True), (128, 8, False)]
"""Experts, experts of a token, and whether its shares add up to one: each pair of these three occurs."""


@pytest.fixture(scope="session")
def make_sparse(make_reference):
    """(experts, experts of a token, normalized) -> a Qwen3-MoE of transformers."""

    def make(count, taken, normalized=True, tied=False):
        return make_reference(
            "qwen3_moe",
            tied,
            "small",
            num_experts=count,
            num_experts_per_tok=taken,
            moe_intermediate_size=24,
            norm_topk_prob=normalized,
            vocab_size=96,
        )

    return make


@pytest.fixture(scope="module")
def shared(make_reference):
    """A Qwen2-MoE of transformers: with a shared expert, its gate, and biases."""
    return make_reference(
        "qwen2_moe",
        False,
        "small",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        vocab_size=96,
    )


def _tokens(config, rows=2, length=59):
    return np.random.default_rng(3).integers(0, config.vocab_size, (rows, length)).astype(np.int32)


def _logits(params, config, tokens):
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    @jax.jit
    def run(params, tokens, positions):
        options = transformer.ComputeOptions()
        hidden = transformer.forward(params, config, options, tokens, positions, jnp.ones_like(tokens))
        return hidden @ transformer.unembedding(params, config)

    return np.asarray(run(params, tokens, positions))


def _torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


@pytest.mark.parametrize(("count", "taken", "normalized"), CASES)
def test_logits_equal_transformers_both_ways(make_sparse, tmp_path, count, taken, normalized):
    reference = make_sparse(count, taken, normalized, tied=taken == 2)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    config = model_config.read_directory(tmp_path / "theirs")
    assert (config.num_experts, config.experts_per_token) == (count, taken)
    tokens = _tokens(config)
    expected = _torch_logits(reference, tokens)
    assert np.abs(expected).max() > 1
    params = hf.load(tmp_path / "theirs", config)
    np.testing.assert_allclose(_logits(params, config, tokens), expected, atol=1e-4, rtol=0)

    hf.save(params, config, tmp_path / "ours", max_shard_bytes=60_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_array_equal(_torch_logits(again.eval(), tokens), expected)
    reloaded = hf.load(tmp_path / "ours", model_config.read_directory(tmp_path / "ours"))
    jax.tree.map(np.testing.assert_array_equal, reloaded, params)


def test_a_shared_expert_computes_what_it_does_in_transformers_both_ways_and_on_a_mesh(shared, tmp_path):
    shared.save_pretrained(tmp_path / "theirs")
    config = model_config.read_directory(tmp_path / "theirs")
    assert (config.shared_expert_intermediate_size, config.qkv_bias, config.qk_norm) == (40, True, False)
    assert model_config.parameter_count(config) == sum(leaf.numel() for leaf in shared.parameters())
    params, tokens = hf.load(tmp_path / "theirs", config), _tokens(config)
    expected = _torch_logits(shared, tokens)
    np.testing.assert_allclose(_logits(params, config, tokens), expected, atol=1e-4, rtol=0)
    hf.save(params, config, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    for name, leaf in again.state_dict().items():
        np.testing.assert_array_equal(leaf, shared.state_dict()[name], err_msg=name)
    loss, gradient = jax.jit(_step, static_argnums=0)(config, params, *_batch())
    mesh = jax.make_mesh((1, 2, 2, 1), AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        step = jax.jit(_step, static_argnums=0, out_shardings=(None, transformer.shardings(config, mesh)))
        placed = jax.device_put(params, transformer.shardings(config, mesh))
        rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
        got_loss, got = step(config, placed, *jax.device_put(_batch(), rows))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for ours, whole in zip(jax.tree.leaves(got), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, whole, atol=1e-5 * np.abs(whole).max(), rtol=0)


def _batch(rows=8, length=24):
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 4, (rows, length)), axis=1)[:, ::-1]
    tokens, positions = rng.integers(0, 96, (rows, length)), np.broadcast_to(np.arange(length), segments.shape)
    return [np.ascontiguousarray(array, np.int32) for array in (tokens, positions, segments)]


def _step(config, params, tokens, positions, segments, routing=None):
    def loss(params):
        options = transformer.ComputeOptions(attention_chunk=8)
        hidden = transformer.forward(params, config, options, tokens, positions, segments, routing)
        logits = hidden @ transformer.unembedding(params, config)
        return (jax.nn.logsumexp(logits, axis=-1) * (segments != 0)).sum()

    return jax.value_and_grad(loss)(params)


@pytest.fixture(scope="module")
def sparse(make_sparse, tmp_path_factory):
    """Shape, parameters, loss and gradient of one device."""
    path = tmp_path_factory.mktemp("sparse")
    make_sparse(8, 2).save_pretrained(path)
    config = model_config.read_directory(path)
    params = hf.load(path, config)
    return config, params, jax.jit(_step, static_argnums=0)(config, params, *_batch())


def test_gradients_equal_those_of_transformers(sparse, make_sparse):
    config, _, (loss, gradient) = sparse
    tokens, _, segments = _batch()
    model, total = make_sparse(8, 2), 0.0
    model.zero_grad()
    for row in range(len(tokens)):
        for segment in np.unique(segments[row]):
            at = np.flatnonzero(segments[row] == segment)
            if segment:
                logits = model(
                    torch.tensor(tokens[row, at], dtype=torch.long)[None],
                    position_ids=torch.tensor(at, dtype=torch.long)[None],
                    attention_mask=torch.ones((1, len(at))),
                ).logits
                total = total + logits.logsumexp(-1).sum()
    total.backward()
    np.testing.assert_allclose(loss, float(total.detach()), rtol=1e-5)
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    for layer in range(config.num_layers):
        ours = jax.tree.map(lambda leaf, layer=layer: np.asarray(leaf[layer]), gradient["layers"]["mlp"])
        prefix = f"model.layers.{layer}.mlp"
        both = theirs[f"{prefix}.experts.gate_up_proj"]
        pairs = [
            (ours["gate"]["weight"], theirs[f"{prefix}.gate.weight"]),
            (ours["experts"]["gate_proj"]["weight"], both[:, : config.expert_intermediate_size]),
            (ours["experts"]["up_proj"]["weight"], both[:, config.expert_intermediate_size :]),
            (ours["experts"]["down_proj"]["weight"], theirs[f"{prefix}.experts.down_proj"]),
        ]
        for got, wanted in pairs:
            np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


QUICK = [(1, 1, 2, 1), (1, 8, 1, 1), (2, 2, 2, 1)]
OTHERS = [(2, 1, 1, 1), (1, 2, 1, 1), (1, 4, 1, 1), (1, 2, 2, 1), (1, 4, 2, 1)]
MESHES = [*QUICK, *(pytest.param(shape, marks=pytest.mark.drill) for shape in OTHERS)]


@pytest.mark.parametrize("shape", MESHES)
def test_loss_and_gradient_on_a_mesh_equal_those_of_one_device(sparse, shape):
    config, params, (loss, gradient) = sparse
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: int(np.prod(shape))])
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    with jax.set_mesh(mesh):
        step = jax.jit(_step, static_argnums=0, out_shardings=(None, transformer.shardings(config, mesh)))
        placed = jax.device_put(params, transformer.shardings(config, mesh))
        got_loss, got = step(config, placed, *(jax.device_put(array, rows) for array in _batch()))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for ours, whole in zip(jax.tree.leaves(got), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, whole, atol=1e-5 * np.abs(whole).max(), rtol=0)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 4, 1, 1)])
def test_a_batch_whose_tokens_all_take_one_expert_loses_none(shape):
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: int(np.prod(shape))])
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (4, 6, 16))
    weights = expert_rows.LayerExperts(*(jax.random.normal(key, (8, 16, 16)) for key in keys[1:]))
    chosen, share = jnp.full((4, 6, 1), 5, jnp.int32), jnp.full((4, 6, 1), 0.5)
    with jax.set_mesh(mesh):
        got = jax.jit(experts.mix, static_argnums=0)("tiles", x, share, chosen, weights)
    gate, up, down = (leaf[5] for leaf in weights)
    np.testing.assert_allclose(got, 0.5 * (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T, rtol=1e-4, atol=1e-4)


def _routing(config, seed):
    """Different experts for every token, known for all but one in five."""
    rng = np.random.default_rng(seed)
    shape = (*_batch()[0].shape, config.num_layers)
    chosen = np.argsort(rng.random((*shape, config.num_experts)))[..., : config.experts_per_token]
    return router.GivenExperts(chosen.astype(np.uint8), rng.random(shape[:2]) < 0.8)


@pytest.mark.parametrize("shape", [pytest.param((1, 2, 2, 1), marks=pytest.mark.drill), (2, 2, 2, 1)])
def test_replayed_routing_on_a_mesh_equals_that_of_one_device(sparse, shape):
    config, params, (without, _) = sparse
    routing = _routing(config, 0)
    loss, gradient = jax.jit(_step, static_argnums=0)(config, params, *_batch(), routing)
    assert abs(loss - without) > 1e-3, "other experts make another loss"
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: int(np.prod(shape))])
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    with jax.set_mesh(mesh):
        step = jax.jit(_step, static_argnums=0, out_shardings=(None, transformer.shardings(config, mesh)))
        placed = jax.device_put(params, transformer.shardings(config, mesh))
        got_loss, got = step(config, placed, *jax.device_put([*_batch(), routing], rows))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for ours, whole in zip(jax.tree.leaves(got), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, whole, atol=1e-5 * np.abs(whole).max(), rtol=0)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("gap", [0.0, 110.0])
def test_shares_of_given_experts_and_their_gradient_are_exact(normalized, gap):
    rng = np.random.default_rng(1)
    logits, weight = rng.normal(size=(2, 5, 8)), rng.normal(size=(2, 5, 3))
    given = np.argsort(rng.random((2, 5, 8)))[..., :3]
    known = np.array([[True] * 5, [True, False] * 2 + [True]])
    # In the last token, an expert that is not given is e^gap times as probable as any that is.
    given[1, 4] = [1, 2, 3]
    logits[1, 4, 0] += gap

    def total(logits):
        chosen, share = router.choose(logits, 3, normalized, router.GivenExperts(given.astype(np.uint8), known))
        return (share * weight).sum(), (chosen, share)

    (_, (chosen, share)), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logits, jnp.float32))
    theirs = torch.tensor(logits, requires_grad=True)
    expected = torch.where(torch.tensor(known)[..., None], torch.tensor(given), theirs.topk(3).indices)
    wanted = theirs.softmax(-1).gather(-1, expected)
    if normalized:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    (wanted * torch.tensor(weight)).sum().backward()
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(share, wanted.detach(), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(gradient, theirs.grad, atol=1e-6)
    assert np.abs(theirs.grad.numpy()).max() > 0.01


def test_losses_of_the_routers_are_those_of_transformers_sequence_by_sequence():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(2, 12, 8)).astype(np.float32)
    segments = np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3])
    chosen, _ = router.choose(jnp.asarray(logits), 2, True)
    found = router.losses(jnp.asarray(logits), chosen, jnp.asarray(segments), 4)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        at = segments[row] == segment
        theirs = modeling_qwen3_moe.load_balancing_loss_func((torch.tensor(logits[row, at]),), 8, 2)
        # Theirs counts each of a token's experts as a token of its own.
        np.testing.assert_allclose(found.balance_BxT[row, at], float(theirs) / 2, rtol=1e-5)
    np.testing.assert_array_equal(found.balance_BxT[1, 9:], 0)
    np.testing.assert_allclose(found.z_BxT, np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2, rtol=1e-5)


def test_padding_takes_no_expert(sparse):
    config, segments = sparse[0], jnp.asarray(_batch()[2])
    layer = layers.SparseMLP(config, nnx.Rngs(params=0))
    x = jax.random.normal(jax.random.key(0), (*segments.shape, config.hidden_size))
    mixed, losses = layer(x, None, layers.Sequences(segments, 4), "tiles")
    whole, _ = layer(x, None, layers.Sequences(jnp.ones_like(segments), 4), "tiles")
    assert (segments == 0).any()
    np.testing.assert_array_equal(mixed[segments == 0], 0)
    np.testing.assert_allclose(mixed[segments > 0], whole[segments > 0], atol=1e-5)
    # Its logits are those of its embedding, which no loss sees.
    np.testing.assert_array_equal(losses.balance_BxT[segments == 0], 0)


def test_evenly_spread_tokens_have_a_balance_of_one_and_a_gradient_spreads_others():
    even = jnp.asarray(np.eye(8)[np.arange(16) % 8] * 1e-3)[None]
    segments = jnp.ones((1, 16), jnp.int32)

    def balance(logits):
        return router.losses(logits, router.choose(logits, 1, True)[0], segments, 1).balance_BxT[0, 0]

    np.testing.assert_allclose(balance(even), 1.0, rtol=1e-3)
    skewed = even + jnp.asarray(np.eye(8)[0])
    lower = skewed - 0.5 * jax.grad(balance)(skewed)
    assert 1.0 < balance(lower) < balance(skewed)


@pytest.fixture
def fresh_programs():
    """No program is taken from JAX's caches, whose keys do not hold constants of modules."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def grouped(monkeypatch):
    """Grouped products by XLA, instead of kernels for GPUs. Rows of no group get NaN, as memory may hold.

    The kernel of outer products multiplies them with 0, so what is not finite in them reaches its result.
    """
    outside = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def unwritten(product, counts):
        return jnp.where((jnp.arange(len(product)) < counts.sum())[:, None], product, jnp.nan)

    def ragged_dot(x, weights, *, group_sizes, transpose_rhs, **blocks):
        weights = weights.swapaxes(1, 2) if transpose_rhs else weights
        return unwritten(jax.lax.ragged_dot(x, weights, group_sizes), group_sizes)

    def transposed_ragged_dot(a, b, *, group_sizes, **blocks):
        assert a.shape[0] % 8 == 0
        return jax.lax.ragged_dot_general(a, b, group_sizes, outside) + 0 * (a.sum() + b.sum())

    monkeypatch.setattr(ragged_dot_mgpu, "ragged_dot", ragged_dot)
    monkeypatch.setattr(transposed_ragged_dot_mgpu, "transposed_ragged_dot", transposed_ragged_dot)
    monkeypatch.setattr(feasibility, "GROUPED_STEP", 8)  # several parts


@pytest.mark.parametrize(
    ("kernel", "headroom", "shape", "exchanges"),
    [
        ("tiles", 2.0, (1, 4, 2, 1), True),
        ("tiles", 0.01, (1, 4, 1, 1), False),
        ("groups", 2.0, (1, 1, 1, 1), False),
        ("groups", 2.0, (1, 4, 2, 1), True),
        ("groups", 0.01, (1, 4, 1, 1), False),
    ],
)
def test_exchanged_and_gathered_tokens_make_one_devices_gradient(
    fresh_programs, monkeypatch, grouped, kernel, headroom, shape, exchanges
):
    monkeypatch.setattr(communication_bounds, "EXPERT_HEADROOM", headroom)
    ran = _told_of_exchanges(monkeypatch)
    keys, (tokens, count, width) = jax.random.split(jax.random.key(0), 5), (24, 8, 16)
    x, grad = (jax.random.normal(key, (8, tokens, width)) for key in keys[:2])
    weights = expert_rows.LayerExperts(*(jax.random.normal(key, (count, width, width)) / 4 for key in keys[2:]))
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((8, tokens, count)))[..., :2].astype(np.int32)
    chosen[:, -3:] = -1  # padding, whose gradient may be anything
    grad = grad.at[:, -3:].set(jnp.nan)
    chosen[chosen == 3] = 5  # an expert without a token
    share = jnp.asarray(rng.random(chosen.shape), jnp.float32)

    def run(kernel, x, share, weights):
        out, transposed = jax.vjp(
            lambda *given: experts.mix(kernel, given[0], given[1], chosen, given[2]), x, share, weights
        )
        return out, transposed(grad)

    wanted = jax.jit(run, static_argnums=0)("tiles", x, share, weights)
    ran.clear()
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[: int(np.prod(shape))])
    with jax.set_mesh(mesh):
        got = jax.block_until_ready(jax.jit(lambda *given: run(kernel, *given))(x, share, weights))
    assert set(ran) == {exchanges}
    for ours, whole in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, whole, atol=1e-5 * np.abs(whole).max(), rtol=0)


def _told_of_exchanges(monkeypatch):
    """Returns a list that gets True for each exchange that ran on a device, and False for each gathering."""
    ran, bring = [], experts.TokenExchange.bring_experts

    def told(exchange, chosen_NxK):
        jax.debug.callback(lambda exchanged: ran.append(bool(exchanged)), exchange.slot_WxC is not None)
        return bring(exchange, chosen_NxK)

    monkeypatch.setattr(experts.TokenExchange, "bring_experts", told)
    return ran


def test_tokens_are_exchanged_if_all_find_a_place_and_else_gathered():
    mesh = jax.make_mesh((1, 8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4)
    tokens, everyone = 160, jnp.arange(8 * 160)

    def exchanged(chosen):
        return experts._exchanged(chosen, 1, lambda exchange: jnp.full((1,), exchange.slot_WxC is not None))

    with jax.set_mesh(mesh):
        split = jax.jit(
            jax.shard_map(exchanged, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec("fsdp"), check_vma=False)
        )
        spread = (everyone % 8)[:, None]
        assert np.asarray(split(spread)).tolist() == [True] * 8
        padded = jnp.where(everyone[:, None] % tokens < tokens // 2, spread, -1)
        assert np.asarray(split(padded)).tolist() == [True] * 8
        # One device's tokens all take one expert: every device gathers, or they would wait for each other.
        skewed = jnp.where((everyone < tokens)[:, None], 3, spread)
        assert np.asarray(split(skewed)).tolist() == [False] * 8
