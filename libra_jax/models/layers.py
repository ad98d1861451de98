"""The layers of a decoder-only transformer in Flax NNX: projections, norms, attention and feed-forward blocks.

Letters: B rows, T tokens, D model width, H query heads, N key and value heads, K head width (of experts: experts of a
token), E experts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from libra_jax.models import config as model_config
from libra_jax.models import rope, sharding
from libra_jax.models.attention import attention
from libra_jax.models.experts import expert_rows, experts, router


class Sequences(NamedTuple):
    """The sequences of a batch's rows.

    Attributes:
      segments_BxT: sequence of the row that a token belongs to, from 1; 0 is padding.
      max_segments: the most sequences of a row.
    """

    segments_BxT: jax.Array
    max_segments: int


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
        gathered = tuple(None if name == "embed" else name for name in self.names)
        weight = sharding.reshard(self.weight[...].astype(x.dtype), gathered, self.names)
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

        def gather(leaf: nnx.Param, names: tuple[str, str]) -> jax.Array:
            gathered = tuple(None if name == "embed" else name for name in names)
            return sharding.reshard(leaf[...].astype(x_BxTxD.dtype), gathered, names)

        a_RxD = gather(self.lora_a, ("rank", self.names[1]))
        b_OxR = gather(self.lora_b, (self.names[0], "rank"))
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv 1910.07467).

    Both passes compute in float32 and round each result once, to the dtype of its input. The backward pass keeps x in
    its own dtype and computes 1 / rms again, so no float32 array of the size of x outlives the pass that made it.

    Args:
      x: [B, T, ..., D]. Tokens are axis 1.
      weight: [D].
      eps: added to the mean square.
    """
    x32 = x.astype(jnp.float32)
    return (x32 * _inverse_rms(x32, eps) * weight.astype(jnp.float32)).astype(x.dtype)


def _inverse_rms(x32: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


def _rms_norm_backward(eps: float, saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    x32, grad32 = x.astype(jnp.float32), grad.astype(jnp.float32)
    scale = _inverse_rms(x32, eps)
    inner = grad32 * weight.astype(jnp.float32)
    x_grad = scale * (inner - x32 * (scale * scale * jnp.mean(inner * x32, axis=-1, keepdims=True)))
    # Summed over tokens first, with all later axes as one. A sum over tokens and heads at once makes XLA's GPU compiler
    # store every array around it with the heads last, which triples the time of the query and key norms.
    by_column = (grad32 * x32 * scale).reshape(*x.shape[:2], -1).sum(axis=(0, 1))
    weight_grad = by_column.reshape(-1, x.shape[-1]).sum(axis=0)
    return x_grad.astype(x.dtype), weight_grad.astype(weight.dtype)


rms_norm.defvjp(lambda x, weight, eps: (rms_norm(x, weight, eps), (x, weight)), _rms_norm_backward)


class RMSNorm(nnx.Module):
    """A norm by the root mean square (`rms_norm`) with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones((size,)), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


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


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up (arXiv 2002.05202).

    Both passes compute in float32 and round each result once, to the dtype of its input. The backward pass keeps the
    two inputs and computes the sigmoid again.
    """
    gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
    return (jax.nn.silu(gate32) * up32).astype(gate.dtype)


def _gated_backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate32, up32, grad32 = (array.astype(jnp.float32) for array in (*saved, grad))
    share = jax.nn.sigmoid(gate32)
    gate_grad = grad32 * up32 * share * (1 + gate32 * (1 - share))
    return gate_grad.astype(grad.dtype), (grad32 * gate32 * share).astype(grad.dtype)


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gated_backward)


class MLP(nnx.Module):
    """The gated feed-forward layer: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: model_config.TransformerConfig, rngs: nnx.Rngs, columns: int | None = None) -> None:
        """Makes the layer; `columns` replaces the model's `intermediate_size`."""
        width, ffn, bias = config.hidden_size, columns or config.intermediate_size, config.mlp_bias
        on = functools.partial(_adapter_on, config)
        self.gate_proj = Linear(width, ffn, bias, ("mlp", "embed"), rngs, on("gate_proj"))
        self.up_proj = Linear(width, ffn, bias, ("mlp", "embed"), rngs, on("up_proj"))
        self.down_proj = Linear(ffn, width, bias, ("embed", "mlp"), rngs, on("down_proj"))

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        x_BxTxD = sharding.gather_tokens(x_BxTxD)
        hidden = gated(self.gate_proj(x_BxTxD), self.up_proj(x_BxTxD))
        return self.down_proj(sharding.constrain(hidden, ("batch", "tokens", "mlp")))


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
        self, x_BxTxD: jax.Array, routing: router.GivenExperts | None, sequences: Sequences, kernel: str
    ) -> tuple[jax.Array, router.Losses]:
        logits_BxTxE = self.gate(x_BxTxD)
        chosen_BxTxK, share_BxTxK = router.choose(logits_BxTxE, self.experts_per_token, self.normalize, routing)
        of = self.experts
        weights = expert_rows.LayerExperts(*(module.weight[...] for module in (of.gate_proj, of.up_proj, of.down_proj)))
        losses = router.losses(logits_BxTxE, chosen_BxTxK, *sequences)
        # Padding takes no expert: all of it would take the same ones, and find no place in the exchange.
        taken_BxTxK = jnp.where(sequences.segments_BxT[..., None] > 0, chosen_BxTxK, -1)
        mixed_BxTxD = experts.mix(kernel, x_BxTxD, share_BxTxK, taken_BxTxK, weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            mixed_BxTxD += jax.nn.sigmoid(self.shared_expert_gate(x_BxTxD)) * self.shared_expert(x_BxTxD)
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
        routing: router.GivenExperts | None,
        sequences: Sequences,
        expert_kernel: str,
    ) -> tuple[jax.Array, router.Losses | None]:
        x_BxTxD = x_BxTxD + self.self_attn(self.input_layernorm(x_BxTxD), cos, sin, attend)
        inner_BxTxD, losses = self.post_attention_layernorm(x_BxTxD), None
        if isinstance(self.mlp, SparseMLP):
            mixed_BxTxD, losses = self.mlp(inner_BxTxD, routing, sequences, expert_kernel)
        else:
            mixed_BxTxD = self.mlp(inner_BxTxD)
        return sharding.constrain(x_BxTxD + mixed_BxTxD, sharding.RESIDUAL), losses
