"""The decoder: Llama, Qwen2, Qwen3 and Qwen3-MoE in Flax NNX, with stacked and scanned layers.

The modules define the parameters and the computation of a layer. Other rooms use a functional interface: parameters are
a nested plain dict of arrays, and `forward` is a pure function of the dict. Axis 0 of the leaves under "layers" is the
layer. If the shape has an adapter, its leaves are part of the dict (`models.lora`).

Letters: B rows, T tokens, D hidden size, V vocabulary, H query heads, N key and value heads, K head width, L layers.
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

from libra_jax import config as run_config
from libra_jax.models import attention, embedding, experts, feasibility, lora, rope, router, sharding
from libra_jax.models import config as model_config
from libra_jax.planning import rows

Params = Mapping[str, Any]
"""Nested plain dict of arrays; `hf_names.weight_map` names its leaves."""


LAYER_INPUT = "layer_input"
"""`checkpoint_name` of the residual stream before a layer."""


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
    target: feasibility.Target = feasibility.CPU

    @classmethod
    def from_config(cls, model: run_config.ModelConfig, *, packed: bool, target: feasibility.Target) -> ComputeOptions:
        """Returns the options that a run's config requests, for rows and a device of this kind."""
        return cls(model.compute_dtype, model.remat, model.attention, model.attention_chunk, packed, target)


class Routing(NamedTuple):
    """Experts of each token in every layer, chosen elsewhere.

    Attributes:
      experts_BxTxLxK: unsigned; L layers, K experts of a token.
      known_BxT: bool, tokens whose experts are given; other tokens take the routers' own choice.
    """

    experts_BxTxLxK: jax.Array
    known_BxT: jax.Array


class Scanned(NamedTuple):
    """What differs among the layers.

    Attributes:
      state: parameters.
      experts_BxTxK: experts given to the tokens, or None.
    """

    state: nnx.State
    experts_BxTxK: jax.Array | None


class Sequences(NamedTuple):
    """The sequences of a batch's rows.

    Attributes:
      segments_BxT: sequence of the row that a token belongs to, from 1; 0 is padding.
      most: the most sequences of a row.
    """

    segments_BxT: jax.Array
    most: int


class Linear(nnx.Module):
    """A projection whose weight has Hugging Face's layout, [out, in].

    A projection into "embed" has its rows split over `tensor`, every other projection its columns (`models.sharding`).

    With an adapter, the result is x W^T + scale (x A^T) B^T, where A is `lora_a` [rank, in] and B `lora_b` [out, rank].
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        bias: bool,
        names: tuple[str, str],
        rngs: nnx.Rngs,
        adapter: model_config.AdapterConfig | None = None,
    ) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (size_out, size_in)), logical_axes=names)
        self.bias = nnx.Param(jnp.zeros((size_out,)), logical_axes=names[:1]) if bias else None
        self.names = names
        self.scale = adapter.scale if adapter else 0.0
        rank = adapter.rank if adapter else 0
        # Only their shapes count here: `lora.init` draws them.
        self.lora_a = nnx.Param(jnp.zeros((rank, size_in)), logical_axes=("rank", names[1])) if rank else None
        self.lora_b = nnx.Param(jnp.zeros((size_out, rank)), logical_axes=(names[0], "rank")) if rank else None

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """Projects the last axis.

        Args:
          x_BxTxD: every device of `tensor` holds the same tokens (`sharding.gather_tokens`).
        """
        x = x_BxTxD
        # Cast before it is gathered over `fsdp` and `context`, so that fewer bytes travel. Its gradient is summed over
        # the rows and split again.
        whole = tuple(None if name == "embed" else name for name in self.names)
        weight = sharding.reshard(self.weight[...].astype(x.dtype), whole, self.names)
        if sharding.ways("tensor") > 1 or sharding.ways("context") > 1:
            # With the token axis apart: the compiler only finds the reduce-scatter over it if nothing reshapes the sum,
            # and it would gather tokens that are split over `context` to join them with the rows.
            y = jnp.einsum("bti,oi->bto", x, weight)
        else:
            # With one token axis: given two, XLA's CPU backend first transposes each factor of the weight's gradient.
            y = jnp.einsum("ri,oi->ro", x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
        if self.names[0] == "embed":
            # Sums over `tensor`, which splits the rows of this weight, and splits the tokens.
            y = sharding.reshard(y, sharding.RESIDUAL, sharding.WHOLE_TOKENS)
        if self.lora_a is not None:
            y = y + self._adapter_product(x)
        if self.bias is None:
            return y
        # The forward sum rounds once either way. The bias gradient sums over tokens and would stop growing in bfloat16.
        bias = self.bias[...].astype(x.dtype).astype(jnp.float32)
        return (y.astype(jnp.float32) + bias).astype(x.dtype)

    def _adapter_product(self, x_BxTxD: jax.Array) -> jax.Array:
        """Returns scale (x A^T) B^T. Letters: R the rank of the adapter, O the outputs."""
        assert self.lora_a is not None
        assert self.lora_b is not None

        def whole(leaf: nnx.Param, names: tuple[str, str]) -> jax.Array:
            gathered = tuple(None if name == "embed" else name for name in names)
            return sharding.reshard(leaf[...].astype(x_BxTxD.dtype), gathered, names)

        a_RxD = whole(self.lora_a, ("rank", self.names[1]))
        b_OxR = whole(self.lora_b, (self.names[0], "rank"))
        inner_BxTxR = jnp.einsum("btd,rd->btr", x_BxTxD, a_RxD)
        if self.names[0] == "embed":
            # `tensor` splits the columns of A: the sum is taken here, where it has rank columns and not D.
            inner_BxTxR = sharding.reshard(inner_BxTxR, sharding.RESIDUAL, sharding.WHOLE_TOKENS)
        else:
            inner_BxTxR = sharding.constrain(inner_BxTxR, sharding.WHOLE_TOKENS)
        return jnp.einsum("btr,or->bto", self.scale * inner_BxTxR, b_OxR)


def _adapter_on(config: model_config.TransformerConfig, name: str) -> model_config.AdapterConfig | None:
    """Returns the adapter of a projection, or None if it has none."""
    return config.adapter if config.adapter is not None and name in config.adapter.targets else None


class RMSNorm(nnx.Module):
    """Computes x / rms(x) * weight over the last axis, in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones((size,)), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions, causal within a segment."""

    def __init__(self, config: model_config.TransformerConfig, rngs: nnx.Rngs) -> None:
        width, head_dim = config.hidden_size, config.head_dim
        query, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim = head_dim
        on = functools.partial(_adapter_on, config)
        self.q_proj = Linear(width, query, config.qkv_bias, ("heads", "embed"), rngs, on("q_proj"))
        self.k_proj = Linear(width, kv, config.qkv_bias, ("kv_heads", "embed"), rngs, on("k_proj"))
        self.v_proj = Linear(width, kv, config.qkv_bias, ("kv_heads", "embed"), rngs, on("v_proj"))
        self.o_proj = Linear(query, width, config.output_bias, ("embed", "heads"), rngs, on("o_proj"))
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None

    def __call__(self, x_BxTxD: jax.Array, cos: jax.Array, sin: jax.Array, attend: attention.Attend) -> jax.Array:
        x_BxTxD = sharding.gather_tokens(x_BxTxD)

        def heads(projection: Linear, norm: RMSNorm | None) -> jax.Array:
            y = projection(x_BxTxD).reshape(*x_BxTxD.shape[:2], -1, self.head_dim)
            y = y if norm is None else norm(y)
            return sharding.constrain(y, ("batch", "tokens", "heads", None))

        q_BxTxHxK = rope.rotate(heads(self.q_proj, self.q_norm), cos, sin)
        k_BxTxNxK = rope.rotate(heads(self.k_proj, self.k_norm), cos, sin)
        out_BxTxHxK = attend(q_BxTxHxK, k_BxTxNxK, heads(self.v_proj, None))
        return self.o_proj(out_BxTxHxK.reshape(*x_BxTxD.shape[:2], -1))


class MLP(nnx.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: model_config.TransformerConfig, rngs: nnx.Rngs, columns: int | None = None) -> None:
        """Makes the layer; `columns` replaces the model's `intermediate_size`."""
        width, ffn, bias = config.hidden_size, columns or config.intermediate_size, config.mlp_bias
        on = functools.partial(_adapter_on, config)
        self.gate_proj = Linear(width, ffn, bias, ("mlp", "embed"), rngs, on("gate_proj"))
        self.up_proj = Linear(width, ffn, bias, ("mlp", "embed"), rngs, on("up_proj"))
        self.down_proj = Linear(ffn, width, bias, ("embed", "mlp"), rngs, on("down_proj"))

    def __call__(self, x_BxTxD: jax.Array, given: router.Given | None, sequences: Sequences) -> tuple[jax.Array, None]:
        del given, sequences  # a dense layer has no router
        x_BxTxD = sharding.gather_tokens(x_BxTxD)
        hidden = jax.nn.silu(self.gate_proj(x_BxTxD)) * self.up_proj(x_BxTxD)
        return self.down_proj(sharding.constrain(hidden, ("batch", "tokens", "mlp"))), None


class ExpertWeights(nnx.Module):
    """One projection of all experts, [E, out, in]."""

    def __init__(self, shape: tuple[int, int, int], names: sharding.Axes, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape), logical_axes=names)


class Experts(nnx.Module):
    """The experts of a layer, each a gated feed-forward layer without biases."""

    def __init__(self, config: model_config.TransformerConfig, rngs: nnx.Rngs) -> None:
        count, width, ffn = config.num_experts, config.hidden_size, config.expert_intermediate_size
        self.gate_proj = ExpertWeights((count, ffn, width), experts.COLUMNS, rngs)
        self.up_proj = ExpertWeights((count, ffn, width), experts.COLUMNS, rngs)
        self.down_proj = ExpertWeights((count, width, ffn), experts.ROWS, rngs)


class SparseMLP(nnx.Module):
    """The router and the experts of a layer (Qwen3-MoE, arXiv 2505.09388; routing as in arXiv 1701.06538).

    With a shared expert (Qwen2-MoE, arXiv 2407.10671, section 2.2.2), every token takes that one, too, times a gate of
    its own.
    """

    def __init__(self, config: model_config.TransformerConfig, rngs: nnx.Rngs) -> None:
        self.gate = Linear(config.hidden_size, config.num_experts, False, ("router", "embed"), rngs)
        self.experts = Experts(config, rngs)
        self.experts_per_token = config.experts_per_token
        self.normalize = config.normalize_expert_shares
        shared = config.shared_expert_intermediate_size
        self.shared_expert = MLP(config, rngs, shared) if shared else None
        # One column, which no axis splits.
        self.shared_expert_gate = Linear(config.hidden_size, 1, False, ("router", "embed"), rngs) if shared else None

    def __call__(
        self, x_BxTxD: jax.Array, given: router.Given | None, sequences: Sequences
    ) -> tuple[jax.Array, router.Losses]:
        logits_BxTxE = self.gate(x_BxTxD)
        chosen_BxTxK, share_BxTxK = router.choose(logits_BxTxE, self.experts_per_token, self.normalize, given)
        of = self.experts
        weights = experts.Weights(*(module.weight[...] for module in (of.gate_proj, of.up_proj, of.down_proj)))
        losses = router.losses(logits_BxTxE, chosen_BxTxK, *sequences)
        mixed_BxTxD = experts.mix(x_BxTxD, share_BxTxK, chosen_BxTxK, weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            shared_BxTxD, _ = self.shared_expert(x_BxTxD, given, sequences)
            mixed_BxTxD += jax.nn.sigmoid(self.shared_expert_gate(x_BxTxD)) * shared_BxTxD
        return mixed_BxTxD, losses


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: model_config.TransformerConfig, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMLP(config, rngs) if config.num_experts else MLP(config, rngs)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attend: attention.Attend,
        given: router.Given | None,
        sequences: Sequences,
    ) -> tuple[jax.Array, router.Losses | None]:
        x_BxTxD = x_BxTxD + self.self_attn(self.input_layernorm(x_BxTxD), cos, sin, attend)
        mixed_BxTxD, losses = self.mlp(self.post_attention_layernorm(x_BxTxD), given, sequences)
        return sharding.constrain(x_BxTxD + mixed_BxTxD, sharding.RESIDUAL), losses


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
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, rngs)

        self.config = config
        self.embed_tokens = Table(config, rngs)
        self.layers = stack(rngs)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Table(config, rngs)

    def __call__(
        self,
        tokens_BxT: jax.Array,
        positions_BxT: jax.Array,
        segments_BxT: jax.Array,
        options: ComputeOptions,
        routing: Routing | None,
    ) -> tuple[jax.Array, router.Losses | None]:
        config = self.config
        angles = rope.tables(config.rope, config.head_dim, positions_BxT)
        # Each device rotates its own tokens, before attention exchanges them.
        cos, sin = (sharding.constrain(table, sharding.WHOLE_TOKENS) for table in angles)
        attend = attention.prepare(
            segments_BxT,
            kernel=options.attention,
            chunk=options.attention_chunk,
            heads=config.num_heads,
            head_dim=config.head_dim,
            dtype=options.compute_dtype,
            on=options.target,
            packed=options.packed,
        )
        graph, stacked = nnx.split(self.layers)

        sequences = Sequences(segments_BxT, rows.max_segments(segments_BxT.shape[1], options.packed))

        def layer(x_BxTxD: jax.Array, own: Scanned) -> tuple[jax.Array, router.Losses | None]:
            state, experts_BxTxK = own
            if options.remat == "offload":
                x_BxTxD = checkpoint_name(x_BxTxD, LAYER_INPUT)
            given = None if routing is None or experts_BxTxK is None else router.Given(experts_BxTxK, routing.known_BxT)
            return nnx.merge(graph, state)(x_BxTxD, cos, sin, attend, given, sequences)

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
        experts_LxBxTxK = None if routing is None else jnp.moveaxis(routing.experts_BxTxLxK, 2, 0)
        x_BxTxD, losses = jax.lax.scan(scanned, x_BxTxD, Scanned(stacked, experts_LxBxTxK))
        return self.norm(x_BxTxD), jax.tree.map(lambda values_LxBxT: values_LxBxT.mean(axis=0), losses)


def init_params(config: model_config.TransformerConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Draws random parameters as Hugging Face does: weights normal with standard deviation
    `config.initializer_range`, biases 0, norm weights 1.

    Args:
      config: shape of the model.
      key: a jax.random key.
      dtype: dtype of every leaf.

    Returns:
      The parameters without an adapter. To draw each shard on its device, `jit` with `out_shardings=shardings(...)`.
    """
    config = dataclasses.replace(config, adapter=None)
    params = nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(params=key)), nnx.Param))

    def scaled(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        """Scales projections and tables, which the modules draw at unit scale; keeps norms and biases."""
        module, kind = path[-2].key, path[-1].key
        drawn = kind == "weight" and "norm" not in module
        return (config.initializer_range * leaf if drawn else leaf).astype(dtype)

    return jax.tree_util.tree_map_with_path(scaled, params)


def forward(
    params: Params,
    config: model_config.TransformerConfig,
    options: ComputeOptions,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segments_BxT: jax.Array,
    routing: Routing | None = None,
) -> jax.Array:
    """Returns the hidden states after the final norm, as `forward_and_losses`."""
    return forward_and_losses(params, config, options, tokens_BxT, positions_BxT, segments_BxT, routing)[0]


def forward_and_losses(
    params: Params,
    config: model_config.TransformerConfig,
    options: ComputeOptions,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segments_BxT: jax.Array,
    routing: Routing | None = None,
) -> tuple[jax.Array, router.Losses | None]:
    """Returns the hidden states after the final norm, and the losses of the routers.

    Args:
      params: parameters of the model, with the leaves of its adapter.
      config: shape of the model.
      options: dtypes, rematerialisation and attention kernel.
      tokens_BxT: int, token ids.
      positions_BxT: int, position of each token in its own segment.
      segments_BxT: int, sequence of the row that a token belongs to; 0 is padding. A token attends to itself and to
        earlier tokens of its segment.
      routing: experts of a mixture's tokens, chosen elsewhere; None: the routers choose.

    Returns:
      [B, T, D] in the compute dtype; values at padding are finite and meaningless. The losses are None without experts.
    """
    graph, state = _abstract(config)
    state = nnx.clone(state)
    nnx.replace_by_pure_dict(state, dict(lora.spread(params, config)))
    return nnx.merge(graph, state)(tokens_BxT, positions_BxT, segments_BxT, options, routing)


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
    found: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(state):
        *parents, name = (str(part) for part in path)
        # The modules name the axes of one layer; the stacked leaves have one more.
        stacked = ("layers",) if parents[0] == "layers" else ()
        module = functools.reduce(lambda tree, part: tree.setdefault(part, {}), parents, found)
        spec = sharding.spec((*stacked, *variable.get_metadata("logical_axes")))
        module[name] = jax.sharding.NamedSharding(mesh, spec)
    return found


@functools.lru_cache(maxsize=32)
def _abstract(config: model_config.TransformerConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))
