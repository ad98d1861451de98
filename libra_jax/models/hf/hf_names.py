"""Maps each Hugging Face tensor to our parameters: one table for import, export and weight sync.

Standard library only, because the engine reads this table too. Projections are stored as in Hugging Face, [out, in],
stacked over layers on axis 0. Every entry is therefore one leaf, or one index into axis 0 of a leaf. It needs no
transpose or reshape, and a weight sync sends it with one contiguous copy. It is one tensor of Hugging Face; that of a
layer's experts is one for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from libra_jax.models import config as model_config

Tensor = TypeVar("Tensor", bound=Any)


@dataclass(frozen=True)
class HfEntry:
    """One Hugging Face tensor, or a layer's experts' tensors of one kind.

    Attributes:
      hf_name: name in the checkpoint; with experts, "{}" stands for the number of the expert.
      path: keys of the leaf in the nested dict of parameters.
      layer: index into the leaf's axis 0, or None if the whole leaf is the tensor.
      shape: shape of the tensor; with experts, of all of them, on axis 0.
    """

    hf_name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]

    @property
    def of_experts(self) -> bool:
        """The entry stands for one tensor an expert."""
        return "{}" in self.hf_name

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each Hugging Face tensor by its name; those of experts in their order."""
        if not self.of_experts:
            return {self.hf_name: self.shape}
        return {self.hf_name.format(expert): self.shape[1:] for expert in range(self.shape[0])}


def split(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the Hugging Face tensors of an entry, with their names.

    Args:
      name: `hf_name` of the entry.
      tensor: the entry's values, as an array of numpy or JAX or a tensor of torch.
    """
    if "{}" in name:
        yield from ((name.format(expert), part) for expert, part in enumerate(tensor))
    else:
        yield name, tensor


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Projections of the attention block; the others are of the feed-forward block."""


def adapter_map(config: model_config.TransformerConfig) -> tuple[HfEntry, ...]:
    """Lists the tensors of the adapter, layer by layer, under PEFT's names without their prefix "base_model.model.".

    An entry's layer counts adapted layers only, because the leaves hold no others.
    """
    adapter, entries = config.adapter, []
    if adapter is None:
        return ()
    outer = {entry.hf_name: entry.shape for entry in weight_map(config)}
    for place, layer in enumerate(adapter.layers):
        for target in adapter.targets:
            block = "self_attn" if target in ATTENTION else "mlp"
            module = f"model.layers.{layer}.{block}.{target}"
            size_out, size_in = outer[f"{module}.weight"]
            for part, shape in (("A", (adapter.rank, size_in)), ("B", (size_out, adapter.rank))):
                path = ("layers", block, target, f"lora_{part.lower()}")
                entries.append(HfEntry(f"{module}.lora_{part}.weight", path, place, shape))
    return tuple(entries)


def weight_map(config: model_config.TransformerConfig) -> tuple[HfEntry, ...]:
    """Lists all tensors of the checkpoint in file order: embedding, layer by layer, norm, head.

    A tied model has no `lm_head.weight`. The map of `config.untied(config)` has it, at the path ("lm_head", "weight").
    """
    width, ffn = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Of one layer; all are alike.
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {("input_layernorm", "weight"): (width,)}

    def linear(block: str, name: str, size_in: int, size_out: int, bias: bool) -> None:
        shapes[block, name, "weight"] = (size_out, size_in)
        if bias:
            shapes[block, name, "bias"] = (size_out,)

    for name, size in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        linear("self_attn", name, width, size, config.qkv_bias)
    linear("self_attn", "o_proj", query, width, config.output_bias)
    if config.qk_norm:
        shapes["self_attn", "q_norm", "weight"] = (config.head_dim,)
        shapes["self_attn", "k_norm", "weight"] = (config.head_dim,)
    shapes["post_attention_layernorm", "weight"] = (width,)
    if experts := config.num_experts:
        ffn = config.expert_intermediate_size
        shapes["mlp", "gate", "weight"] = (experts, width)
        for name, shape in (("gate_proj", (ffn, width)), ("up_proj", (ffn, width)), ("down_proj", (width, ffn))):
            shapes["mlp", "experts", name, "weight"] = (experts, *shape)
        if shared := config.shared_expert_intermediate_size:
            for name in ("gate_proj", "up_proj"):
                shapes["mlp", "shared_expert", name, "weight"] = (shared, width)
            shapes["mlp", "shared_expert", "down_proj", "weight"] = (width, shared)
            shapes["mlp", "shared_expert_gate", "weight"] = (1, width)
    else:
        for name in ("gate_proj", "up_proj"):
            linear("mlp", name, width, ffn, config.mlp_bias)
        linear("mlp", "down_proj", ffn, width, config.mlp_bias)

    entries = [HfEntry("model.embed_tokens.weight", ("embed_tokens", "weight"), None, (config.vocab_size, width))]
    for layer in range(config.num_layers):
        entries.extend(
            HfEntry(
                f"model.layers.{layer}.{'.'.join(path).replace('.experts.', '.experts.{}.')}",
                ("layers", *path),
                layer,
                shape,
            )
            for path, shape in shapes.items()
        )
    entries.append(HfEntry("model.norm.weight", ("norm", "weight"), None, (width,)))
    if not config.tie_word_embeddings:
        entries.append(HfEntry("lm_head.weight", ("lm_head", "weight"), None, (config.vocab_size, width)))
    return tuple(entries)
