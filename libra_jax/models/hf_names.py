"""Maps each Hugging Face tensor to our parameters: one table for import, export and weight sync.

Standard library only, because the engine reads this table too. Projections are stored as in Hugging Face, [out, in],
stacked over layers on axis 0. Every Hugging Face tensor is therefore one leaf, or one index into axis 0 of a leaf. It
needs no transpose or reshape, and a weight sync sends it with one contiguous copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra_jax.models import config as model_config


@dataclass(frozen=True)
class HfEntry:
    """One Hugging Face tensor.

    Attributes:
      hf_name: name in the checkpoint.
      path: keys of the leaf in the nested dict of parameters.
      layer: index into the leaf's axis 0, or None if the whole leaf is the tensor.
      shape: shape of the tensor.
    """

    hf_name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]


def weight_map(config: model_config.TransformerConfig) -> tuple[HfEntry, ...]:
    """Lists every tensor of the checkpoint in file order: embedding, layer by layer, norm, head.

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
    for name in ("gate_proj", "up_proj"):
        linear("mlp", name, width, ffn, config.mlp_bias)
    linear("mlp", "down_proj", ffn, width, config.mlp_bias)

    entries = [HfEntry("model.embed_tokens.weight", ("embed_tokens", "weight"), None, (config.vocab_size, width))]
    for layer in range(config.num_layers):
        entries.extend(
            HfEntry(f"model.layers.{layer}.{'.'.join(path)}", ("layers", *path), layer, shape)
            for path, shape in shapes.items()
        )
    entries.append(HfEntry("model.norm.weight", ("norm", "weight"), None, (width,)))
    if not config.tie_word_embeddings:
        entries.append(HfEntry("lm_head.weight", ("lm_head", "weight"), None, (config.vocab_size, width)))
    return tuple(entries)
