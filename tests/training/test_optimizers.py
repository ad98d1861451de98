"""Optimizers and schedules by name: optax's own steps on one and four devices, sharded state, the user's functions."""

import dataclasses
import inspect
import sys
import textwrap

import jax
import numpy as np
import optax
import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import preflight
from libra_jax.config import optimizers as config_optimizers
from libra_jax.models import transformer
from libra_jax.models.adapters import adapters
from libra_jax.training import checkpoints, optimizer, resize, state

RATE, DECAY = 1e-2, 0.1
SETTINGS = {
    "adamw": {"weight_decay": DECAY, "offload": True},
    "sgd": {"arguments": {"momentum": 0.9}},
    "adafactor": {"arguments": {"min_dim_size_to_factor": 8}},
    "muon": {"weight_decay": DECAY, "offload": True},
    "lion": {"weight_decay": DECAY, "decay_all": True},
}
ALIKE = {"b1": 0.9, "b2": 0.99}


def _config(small, name, trainer=None):
    settings = config_lib.OptimizerConfig(name=name, clip_norm=0.0, **SETTINGS[name])
    return small.config(trainer=trainer, optimizer=settings)


def _gradients(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(0, 1, leaf.shape).astype(np.float32), params)


def _steps(learner, params):
    """Takes two updates on given gradients; the second one reads the moments of the first."""
    for seed in range(2):
        places = state.shardings_of(learner.layout.accumulator.gradients)
        sums = learner.programs.zeros()
        sums = dataclasses.replace(
            sums, gradients=jax.device_put(_gradients(params, seed), places), count=sums.count + 1
        )
        learner.state, _, _ = learner.programs.apply_step(learner.state, sums, RATE)
    return jax.device_get(learner.params)


def _decayed(params):
    """Mask of the parameters that decay, by name."""
    kept = {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "bias"}
    return jax.tree_util.tree_map_with_path(lambda path, _: not kept & {key.key for key in path}, params)


def _follow(reference, params):
    held = reference.init(params)
    for seed in range(2):
        updates, held = reference.update(_gradients(params, seed), held, params)
        params = optax.apply_updates(params, updates)
    return params


def _textbook_muon(params):
    """Muon for each layer's matrices by themselves, and AdamW with Nesterov momentum for everything else."""
    decayed, wanted = _decayed(params), []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        mask = decayed
        for key in path:
            mask = mask[key.key]
        own = [_gradients(params, seed) for seed in range(2)]
        for key in path:
            own = [tree[key.key] for tree in own]
        decay = DECAY if mask else 0.0
        muon = optax.contrib.muon(RATE, weight_decay=decay, consistent_rms=0.2)
        adam = optax.nadamw(RATE, weight_decay=decay, **ALIKE)
        is_matrix = path[0].key == "layers" and leaf.ndim == 3
        layers = list(leaf) if is_matrix else [leaf]
        for index, layer in enumerate(layers):
            rule = muon if is_matrix else adam
            held = rule.init(layer)
            for gradient in own:
                updates, held = rule.update(gradient[index] if is_matrix else gradient, held, layer)
                layer = optax.apply_updates(layer, updates)
            layers[index] = np.asarray(layer)
        wanted.append(np.stack(layers) if is_matrix else layers[0])
    return jax.tree.unflatten(jax.tree.structure(params), wanted)


TEXTBOOK = {
    "adamw": lambda params: _follow(optax.adamw(RATE, weight_decay=DECAY, mask=_decayed(params), **ALIKE), params),
    "sgd": lambda params: _follow(optax.sgd(RATE, momentum=0.9), params),
    "adafactor": lambda params: _follow(optax.adafactor(RATE, min_dim_size_to_factor=8), params),
    "muon": _textbook_muon,
    "lion": lambda params: _follow(optax.lion(RATE, weight_decay=DECAY, **ALIKE), params),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_optimizer_takes_the_steps_of_optax_on_one_and_four_devices(small, name, tmp_path):
    wanted = jax.tree.leaves(TEXTBOOK[name](small.params))
    one = small.learner(_config(small, name))
    four = small.learner(_config(small, name, {"fsdp": 2, "tensor": 2}))
    for learner in (one, four):
        for leaf, expected in zip(jax.tree.leaves(_steps(learner, small.params)), wanted, strict=True):
            np.testing.assert_allclose(leaf, expected, atol=1e-6)
    if name not in ("adafactor", "muon"):
        return  # their states have the structure of Adam's
    held = jax.device_get(four.state)
    smaller, _ = resize.MeshChange(four, protocols.MeshSizes(1, 2, 1), jax.devices()).take_over(120)
    saver = checkpoints.Checkpointer()
    try:
        saver.save(str(tmp_path / "a"), smaller.state)
        saver.wait()
        restored = saver.restore(str(tmp_path / "a"), one.layout.state)
    finally:
        saver.close()
    for tree, layout in ((smaller.state, smaller.layout), (restored, one.layout)):
        assert jax.tree.structure(tree) == jax.tree.structure(held)
        for leaf, place, value in zip(*map(jax.tree.leaves, (tree, layout.state, held)), strict=True):
            assert leaf.sharding == place.sharding
            np.testing.assert_array_equal(np.asarray(leaf), value)


@pytest.mark.parametrize("model", ["small", "sparse", "adapter"])
def test_moments_are_split_like_their_parameters(small, sparse, model):
    shape, base = (sparse.shape if model == "sparse" else small.shape), None
    if model == "adapter":
        shape, base = adapters.adapted(shape, config_lib.LoraConfig(rank=4, alpha=8.0)), "float32"
    mesh = state.make_mesh(config_lib.TrainerConfig(fsdp=2, tensor=2), jax.devices())
    for name in SETTINGS:
        rule = optimizer.transform(_config(small, name).optimizer)
        layout = state.layout(shape, mesh, rule, dtype="float32", offload=True, base=base)
        places = [(leaf.shape, leaf.sharding.spec) for leaf in jax.tree.leaves(layout.state.params)]
        if name != "adafactor":
            whole = [leaf for leaf in jax.tree.leaves(layout.state.opt_state) if leaf.shape in dict(places)]
            assert whole
            assert {leaf.sharding.memory_kind for leaf in whole} == {state.HOST}
            assert all((leaf.shape, leaf.sharding.spec) in places for leaf in whole)
        elif model != "adapter":
            found = jax.tree.leaves(layout.state.opt_state, is_leaf=lambda item: hasattr(item, "v_row"))
            rows, columns = (
                tree["layers"]["self_attn"]["o_proj"]["weight"] for tree in (found[0].v_row, found[0].v_col)
            )
            assert (rows.shape, rows.sharding.shard_shape(rows.shape)) == ((2, 16), (2, 8))
            assert (columns.shape, columns.sharding.shard_shape(columns.shape)) == ((2, 32), (2, 16))


def test_decay_leaves_norms_biases_and_the_embedding_alone(small):
    biased = dataclasses.replace(small.shape, qkv_bias=True)
    tree = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), transformer.abstract_params(biased))
    zeros = jax.tree.map(np.zeros_like, tree)

    def moved(params, gradients, **fields):
        rule = optimizer.transform(config_lib.OptimizerConfig(weight_decay=DECAY, **fields))
        updates, _ = rule.update(gradients, rule.init(params), params)
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        return {jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if np.any(leaf)}

    everything = moved(tree, zeros, decay_all=True)
    assert len(everything) == len(jax.tree.leaves(tree))
    assert everything - moved(tree, zeros) == {
        name for name in everything if "norm" in name or "bias" in name or "embed_tokens" in name
    }
    adapter = {"layers": {"q_proj": {"lora_a": np.ones(3, np.float32), "lora_b": np.ones(2, np.float32)}}}
    assert len(moved(adapter, jax.tree.map(np.zeros_like, adapter))) == 2


USERS = """
    import optax

    def signs(config, scale=1.0):
        return optax.chain(optax.scale_by_sign(), optax.scale(scale))

    def halves(config, steps, every):
        return lambda step: config.learning_rate * 0.5 ** (step // every)

    def none(config):
        return None

    def broken(config):
        def init(params):
            raise KeyError("moment")
        return optax.GradientTransformation(init, lambda updates, state, params: (updates, state))

    def negative(config, steps):
        return lambda step: -1.0
"""


@pytest.fixture
def users(tmp_path, monkeypatch):
    (tmp_path / "my_optimizers.py").write_text(textwrap.dedent(USERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_optimizers", None)


def test_functions_of_the_user_make_the_optimizer_and_the_schedule(small, users):
    settings = config_lib.OptimizerConfig(
        name="my_optimizers:signs",
        arguments={"scale": 3.0},
        weight_decay=DECAY,
        learning_rate=1.0,
        schedule="my_optimizers:halves",
        schedule_arguments={"every": 10},
    )
    rule, params, gradients = (
        optimizer.transform(settings),
        {"w": np.full(2, 2, np.float32)},
        {"w": np.float32([5, -7])},
    )
    updates, _ = rule.update(gradients, rule.init(params), params)
    np.testing.assert_allclose(updates["w"], [3 + 0.2, -3 + 0.2], rtol=1e-6)
    rate = optimizer.schedule(settings, steps=100)
    assert [rate(step) for step in (0, 9, 10, 35)] == [1.0, 1.0, 0.5, 0.125]
    preflight.validate(small.config(optimizer=settings), need_weights=False)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "my_optimizers:sings"}, r"optimizer\.name: my_optimizers has no 'sings'; did you mean 'signs'"),
        (
            {"name": "my_optimizers:signs", "arguments": {"scal": 1}},
            r"optimizer\.arguments: .*cannot be called with these .*did you mean 'scale'",
        ),
        (
            {"schedule": "my_optimizers:halves"},
            r"optimizer\.schedule_arguments: .*cannot be called with these .*'every'",
        ),
    ],
)
def test_wrong_names_and_arguments_of_functions_are_refused_early(small, users, fields, sentence):
    run = small.config(optimizer=config_lib.OptimizerConfig(**fields))
    with pytest.raises(protocols.ConfigError, match=sentence):
        preflight.validate(run, need_weights=False)


def test_what_the_functions_of_the_user_return_is_checked(users):
    with pytest.raises(protocols.ConfigError, match=r"my_optimizers:none returned None, not an optax\.Gradient"):
        optimizer.transform(config_lib.OptimizerConfig(name="my_optimizers:none"))
    rule = optimizer.transform(config_lib.OptimizerConfig(name="my_optimizers:broken"))
    with pytest.raises(protocols.ConfigError, match=r"init of my_optimizers:broken raised KeyError: 'moment' \(.*py, "):
        rule.init({})
    rate = optimizer.schedule(config_lib.OptimizerConfig(schedule="my_optimizers:negative"), 10)
    with pytest.raises(protocols.ConfigError, match=r"gave a learning rate of -1\.0 at step 0; it must be finite"):
        rate(0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "muom"}, r"optimizer\.name: 'muom' is not one of adamw, .*; did you mean 'muon'"),
        (
            {"name": "sgd", "weight_decay": 0.1},
            r"weight_decay: 0\.1 has no effect .*=sgd; leave it at 0, or set .* adamw, muon or",
        ),
        ({"name": "adafactor", "beta1": 0.8}, r"optimizer\.beta1: 0\.8 has no effect with optimizer\.name=adafactor"),
        ({"name": "lion", "eps": 1e-6}, r"optimizer\.eps: .* to adamw, adam or muon$"),
        ({"name": "sgd", "offload": True}, r"optimizer\.offload: has no effect .* keeps no moments"),
        ({"decay_all": True}, r"decay_all: True has no effect with optimizer\.weight_decay=0"),
        ({"min_ratio": 0.1}, r"min_ratio: 0\.1 has no effect with optimizer\.schedule=constant"),
        ({"schedule": "cosine", "decay_share": 0.5}, r"decay_share: 0\.5 has no effect .* to wsd$"),
        (
            {"schedule_arguments": {"every": 3}},
            r"schedule_arguments: constant takes no argument 'every'; it takes none",
        ),
        ({"name": "muon", "arguments": {"momentun": 0.9}}, r"takes no argument 'momentun'; did you mean 'momentum'\?"),
        ({"arguments": {"momentum": 0.9}}, r"adamw takes no argument 'momentum'; it takes none"),
    ],
)
def test_settings_without_an_effect_are_refused_with_the_fix(fields, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        config_lib.RunConfig(optimizer=config_lib.OptimizerConfig(**fields))


def test_config_knows_the_arguments_of_the_named_optimizers():
    takes = {name: tuple(inspect.signature(made).parameters)[1:] for name, made in optimizer.NAMED.items()}
    assert {name: dict.fromkeys(names) for name, names in takes.items() if names} == (
        config_optimizers.OPTIMIZER_ARGUMENTS
    )
