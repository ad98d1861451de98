"""The decoder: Llama, Qwen2, Qwen3 and their mixtures of experts in Flax NNX, with stacked and scanned layers.

The modules define the parameters and the computation of a layer. Other rooms use a functional interface: parameters are
a nested plain dict of arrays, and `forward` is a pure function of the dict. Axis 0 of the leaves under "layers" is the
layer. If the shape has an adapter, its leaves are part of the dict (`models.adapters.lora`).

Letters: B rows, T tokens, D hidden size, V vocabulary, H query heads, N key and value heads, K head width, L layers,
M sequences that a row may hold.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.models import embedding, feasibility, layers, rope, rows, sharding
from libra_jax.models.adapters import lora
from libra_jax.models.attention import attention
from libra_jax.models.experts import router

Params = Mapping[str, Any]
"""Nested plain dict of arrays; `hf_names.weight_map` names its leaves."""


LAYER_INPUT = "layer_input"
"""`checkpoint_name` of the residual stream before a layer."""

UNROLLED_LAYERS = 4
"""Most layers that a program for CPUs has one after the other. A loop over layers first fills the stacks of saved
activations with zeros, then copies into them: a tenth of a training step's time for two layers of width 128."""


@dataclass(frozen=True)
class ComputeOptions:
    """Options of the forward pass; hashable, so that they can be a static argument.

    Attributes:
      compute_dtype: dtype of activations and matrix products ("float32" or "bfloat16"). Norms, rotary embedding and
        softmax are always float32.
      remat: activations that the backward pass recomputes. "none"; "dots" keeps the outputs of the projections and of
        attention; "full" keeps only the input of each layer; "offload" keeps it in the host's memory.
      attention: "auto", "chunked", "splash" (TPU) or "cudnn" (GPU).
      attention_chunk: number of queries and keys in a block of the chunked attention.
      packed: several sequences may share a row.
      target: device that the program is compiled for.
    """

    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    attention_chunk: int = 512
    packed: bool = True
    target: feasibility.CompileTarget = feasibility.CPU

    @classmethod
    def from_config(
        cls, model: config_lib.ModelConfig, *, packed: bool, target: feasibility.CompileTarget
    ) -> ComputeOptions:
        """Returns the options that a run's config requests, for rows and a device of this kind."""
        return cls(model.compute_dtype, model.remat, model.attention, model.attention_chunk, packed, target)


Tap = Callable[[Any], Any]
"""Returns a tree of parameters unchanged, and looks at its gradient on the way back (`training.score_norms`)."""


class Scanned(NamedTuple):
    """One layer's part of the arrays that the scan over the layers takes.

    Attributes:
      state: parameters of the layer.
      experts_BxTxK: experts that the layer's tokens are given, or None.
    """

    state: nnx.State
    experts_BxTxK: jax.Array | None


class Table(nnx.Module):
    """A [V, D] table: the embedding, or the output projection of an untied model."""

    def __init__(self, config: model_config.TransformerConfig, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape), logical_axes=("vocab", "embed"))


class Transformer(nnx.Module):
    """Embedding, stacked layers and final norm; also an output projection if the model is untied."""

    def __init__(self, config: model_config.TransformerConfig, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> layers.DecoderLayer:
            return layers.DecoderLayer(config, rngs)

        self.config = config
        self.embed_tokens = Table(config, rngs)
        self.layers = stack(rngs)
        self.norm = layers.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Table(config, rngs)

    def __call__(
        self,
        tokens_BxT: jax.Array,
        positions_BxT: jax.Array,
        segments_BxT: jax.Array,
        options: ComputeOptions,
        routing: router.GivenExperts | None,
        lengths_BxM: jax.Array | None,
        until_BxT: jax.Array | None,
        tap: Tap | None = None,
    ) -> tuple[jax.Array, router.Losses | None]:
        config = self.config
        angles = rope.tables(config.rope, config.head_dim, positions_BxT)
        # Each device rotates its own tokens, before attention exchanges them.
        cos, sin = (sharding.constrain(table, sharding.WHOLE_TOKENS) for table in angles)
        attend = attention.prepare(
            segments_BxT,
            lengths_BxM,
            until_BxT,
            kernel=options.attention,
            chunk=options.attention_chunk,
            heads=config.num_heads,
            head_dim=config.head_dim,
            dtype=options.compute_dtype,
            on=options.target,
            packed=options.packed,
        )
        graph, stacked = nnx.split(self.layers)

        columns = config.expert_intermediate_size // sharding.ways("tensor")
        expert_kernel = feasibility.choose_experts(options.target, config.hidden_size, columns, options.compute_dtype)
        sequences = layers.Sequences(segments_BxT, rows.max_segments(segments_BxT.shape[1], options.packed))

        def layer(x_BxTxD: jax.Array, inputs: Scanned) -> tuple[jax.Array, router.Losses | None]:
            state, experts_BxTxK = inputs
            # Here and not on the stack, so that the gradients of one layer at a time exist.
            state = state if tap is None else tap(state)
            if options.remat == "offload":
                x_BxTxD = checkpoint_name(x_BxTxD, LAYER_INPUT)
            layer_routing = None if routing is None else routing._replace(experts=experts_BxTxK)
            return nnx.merge(graph, state)(x_BxTxD, cos, sin, attend, layer_routing, sequences, expert_kernel)

        scanned: Callable[[jax.Array, Scanned], tuple[jax.Array, router.Losses | None]] = layer
        if options.remat != "none":
            policies = jax.checkpoint_policies
            policy = policies.nothing_saveable
            if options.remat == "dots":
                products = lora.saveable(config.adapter, policies.dots_with_no_batch_dims_saveable)
                policy = policies.save_from_both_policies(products, attention.saveable)
            elif options.remat == "offload":
                policy = policies.save_and_offload_only_these_names(
                    names_which_can_be_saved=[],
                    names_which_can_be_offloaded=[LAYER_INPUT],
                    offload_src="device",
                    offload_dst="pinned_host",
                )
            # A scan already prevents the merging of both passes that prevent_cse guards against.
            scanned = jax.checkpoint(layer, policy=policy, prevent_cse=False)
        x_BxTxD = embedding.lookup(self.embed_tokens.weight[...], tokens_BxT, options.compute_dtype)
        experts_LxBxTxK = None if routing is None else jnp.moveaxis(routing.experts, 2, 0)
        # Not with rematerialisation: outside a loop, the compiler could merge the second computation with the first.
        unroll = options.target.platform == "cpu" and options.remat == "none" and config.num_layers <= UNROLLED_LAYERS
        x_BxTxD, losses = jax.lax.scan(scanned, x_BxTxD, Scanned(stacked, experts_LxBxTxK), unroll=unroll or 1)
        return self.norm(x_BxTxD), jax.tree.map(lambda values_LxBxT: values_LxBxT.mean(axis=0), losses)


def init_params(config: model_config.TransformerConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Draws random parameters as Hugging Face does: weights normal with standard deviation
    `config.initializer_range`, biases 0, norm weights 1.

    Args:
      dtype: dtype of every leaf.

    Returns:
      The parameters without an adapter. To draw each shard on its device, `jit` with `out_shardings=shardings(...)`.
    """
    config = dataclasses.replace(config, adapter=None)
    params = nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(params=key)), nnx.Param))

    def scaled(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        """Scales projections and tables, which the modules draw at unit scale; keeps norms and biases."""
        module, kind = path[-2].key, path[-1].key
        is_random = kind == "weight" and "norm" not in module
        return (config.initializer_range * leaf if is_random else leaf).astype(dtype)

    return jax.tree_util.tree_map_with_path(scaled, params)


def forward(
    params: Params,
    config: model_config.TransformerConfig,
    options: ComputeOptions,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segments_BxT: jax.Array,
    routing: router.GivenExperts | None = None,
    lengths_BxM: jax.Array | None = None,
    until_BxT: jax.Array | None = None,
) -> jax.Array:
    """Returns the hidden states after the final norm, as `forward_and_losses`."""
    arrays = tokens_BxT, positions_BxT, segments_BxT
    return forward_and_losses(params, config, options, *arrays, routing, lengths_BxM, until_BxT)[0]


def forward_and_losses(
    params: Params,
    config: model_config.TransformerConfig,
    options: ComputeOptions,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segments_BxT: jax.Array,
    routing: router.GivenExperts | None = None,
    lengths_BxM: jax.Array | None = None,
    until_BxT: jax.Array | None = None,
    tap: Tap | None = None,
) -> tuple[jax.Array, router.Losses | None]:
    """Returns the hidden states after the final norm, and the losses of the routers.

    Args:
      params: parameters of the model, with the leaves of its adapter.
      options: dtypes, rematerialisation and attention kernel.
      tokens_BxT: int, token ids.
      positions_BxT: int, position of each token in its own context.
      segments_BxT: int, sequence of the row that a token belongs to; 0 is padding. A token attends to itself and to
        earlier tokens of its sequence, in a tree to those whose subtree it is in.
      routing: experts of a mixture's tokens in all layers, chosen elsewhere; None: the routers choose.
      lengths_BxM: int32 tokens of each sequence of a row, for cuDNN's attention (`attention.prepare`).
      until_BxT: int32 end of each token's subtree, in rows of trees (`attention.prepare`).
      tap: goes over the parameters of each layer, not over those outside the layers.

    Returns:
      [B, T, D] in the compute dtype; values at padding are finite and meaningless. The losses are None without experts.
    """
    graph, state = _abstract(config)
    state = nnx.clone(state)
    nnx.replace_by_pure_dict(state, dict(lora.spread(params, config)))
    return nnx.merge(graph, state)(
        tokens_BxT, positions_BxT, segments_BxT, options, routing, lengths_BxM, until_BxT, tap
    )


def unembedding(params: Params, config: model_config.TransformerConfig) -> jax.Array:
    """Returns the output projection [D, V] in the parameters' dtype: logits are hidden @ unembedding."""
    return params["embed_tokens" if config.tie_word_embeddings else "lm_head"]["weight"].T


def abstract_params(config: model_config.TransformerConfig, dtype: str = "float32") -> Params:
    """Returns the parameters' shapes, adapter included, as `jax.ShapeDtypeStruct` leaves without a sharding."""
    _, state = _abstract(config)

    def shape(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        # The modules of all layers are alike, and only adapted layers have leaves of the adapter.
        adapted = config.adapter is not None and path[-1].key in lora.LEAVES
        rows = (len(config.adapter.layers),) if config.adapter is not None and adapted else leaf.shape[:1]
        return jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), dtype)

    return jax.tree_util.tree_map_with_path(shape, nnx.to_pure_dict(state))


def shardings(config: model_config.TransformerConfig, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Any:
    """Returns a NamedSharding for each parameter on the mesh (`models.sharding`), in the parameters' nesting."""
    _, state = _abstract(config)
    result: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        *parents, name = (str(part) for part in path)
        # The modules name the axes of one layer; the stacked leaves have one more.
        stacked = ("layers",) if parents[0] == "layers" else ()
        module = functools.reduce(lambda tree, part: tree.setdefault(part, {}), parents, result)
        spec = sharding.spec((*stacked, *variable.get_metadata("logical_axes")))
        module[name] = jax.sharding.NamedSharding(mesh, spec)
    return result


@functools.lru_cache(maxsize=32)
def _abstract(config: model_config.TransformerConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))
