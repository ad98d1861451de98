"""The shape of a Llama, Qwen2, Qwen3 or Qwen3-MoE decoder, read from and written to Hugging Face's config.json.

Standard library only, so that the planner and the coordinator can read a model's shape without an accelerator library.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax.protocols import ConfigError, DataError

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""Supported values of `model_type`, each with its class name in `architectures`."""

QWEN2 = ("qwen2", "qwen2_moe")
"""Architectures with biases on queries, keys and values, and none on the output."""

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_PRESETS = pathlib.Path(__file__).parent / "presets"

PUBLISHERS = ("qwen", "meta-llama")
"""Hugging Face namespaces, in lower case, that publish the presets' models under the presets' names."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, and its stretching to longer contexts.

    Attributes:
      theta: base of the wavelengths.
      kind: "default"; "linear"; "llama3" (Llama 3.1, by wavelength); "yarn" (arXiv 2309.00071).
      factor: ratio of the stretched to the original context; 1 for "default".
      original_max_positions: context length before stretching (llama3, yarn).
      low_freq_factor: llama3: wavelengths above original/low are divided by the factor.
      high_freq_factor: llama3: wavelengths below original/high are kept.
      beta_fast: yarn: dimensions that turn more often than this over the original context are kept.
      beta_slow: yarn: dimensions that turn less often than this are divided by the factor.
      attention_factor: yarn: scale of cosine and sine; None means the paper's 0.1 ln(factor) + 1.
      mscale: yarn: slope in the numerator of that scale, used with `mscale_all_dim`.
      mscale_all_dim: yarn: slope in the denominator of that scale.
      truncate: yarn: the ramp's ends are rounded outwards to whole dimensions.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters on the projections of a model (LoRA, arXiv 2106.09685).

    Attributes:
      rank: rows of A and columns of B.
      alpha: numerator of `scale`.
      targets: names of the adapted projections.
      layers: numbers of the adapted layers, ascending.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    layers: tuple[int, ...]

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder-only transformer: the fields of config.json under this project's names.

    Attributes:
      architecture: "llama", "qwen2", "qwen3", "qwen2_moe" or "qwen3_moe".
      vocab_size: rows of the embedding table.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated feed-forward layer; with experts, no layer has it.
      num_kv_heads: key and value heads; divides `num_heads`.
      head_dim: width of a head; not necessarily hidden_size / num_heads.
      max_position_embeddings: longest context in tokens that the model was made for; for yarn, after stretching.
      rms_norm_eps: constant added to the mean square under the root.
      qkv_bias: query, key and value projections have a bias.
      output_bias: the attention output projection has a bias.
      mlp_bias: the three feed-forward projections have a bias.
      qk_norm: RMS norm over each query and key head before rotation.
      tie_word_embeddings: the output projection is the embedding table.
      bos_token_id: begin-of-text token, or None.
      eos_token_ids: end-of-text tokens.
      pad_token_id: padding token, or None.
      initializer_range: standard deviation of random initial weights.
      num_experts: experts of each layer; 0 for a dense feed-forward layer.
      experts_per_token: experts that each token takes.
      expert_intermediate_size: width of an expert.
      normalize_expert_shares: the shares of a token's experts sum to 1.
      shared_expert_intermediate_size: width of the expert that every token takes, too; 0 for none.
      adapter: adapters on the model; None without. No field of config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    normalize_expert_shares: bool = False
    shared_expert_intermediate_size: int = 0
    adapter: AdapterConfig | None = None

    @property
    def longest_context(self) -> int:
        """Returns the maximum number of tokens in a sequence; a linear factor multiplies it, as in vLLM."""
        return int(self.max_position_embeddings * (self.rope.factor if self.rope.kind == "linear" else 1))

    @property
    def routing_width(self) -> int:
        """Number of experts that a token takes, over all layers; 0 without experts."""
        return self.num_layers * self.experts_per_token

    @property
    def routing_dtype(self) -> str:
        """Numpy's name of the smallest unsigned integer that numbers the experts, little-endian."""
        return "<u1" if self.num_experts <= 256 else "<u2"


def feed_forward_columns(config: TransformerConfig) -> int:
    """Returns the columns of a feed-forward matrix, which tensor parallelism splits: of an expert, if there are any."""
    return config.expert_intermediate_size if config.num_experts else config.intermediate_size


def from_hf(values: Mapping[str, Any], source: str = "config.json") -> TransformerConfig:
    """Reads the fields of a Hugging Face config.json, in the spelling of transformers 4 or 5.

    Args:
      values: the parsed file.
      source: name of the file, for errors.

    Raises:
      DataError: the architecture or one of its options is not supported, or a field is missing or out of range.
    """
    architecture = _supported_architecture(values, source)
    sizes = {name: _positive(values, name, source) for name in _REQUIRED}
    _check_layer_types(values, sizes["num_hidden_layers"], source)
    heads = sizes["num_attention_heads"]
    kv_heads = heads if values.get("num_key_value_heads") is None else _positive(values, "num_key_value_heads", source)
    if heads % kv_heads:
        raise DataError(f"{source}: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}.")
    head_dim = _head_dim(values, architecture, sizes["hidden_size"], heads, source)
    bias = bool(values.get("attention_bias", False))
    # The defaults of transformers' configs.
    max_positions = int(values.get("max_position_embeddings") or (2048 if architecture == "llama" else 32768))
    rope = _rope_from_hf(values, max_positions, source)
    if rope.kind == "yarn":
        # Model cards add yarn and leave max_position_embeddings unchanged, but vLLM expects the stretched value.
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
    eos = values.get("eos_token_id")
    return TransformerConfig(
        architecture=architecture,
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=rope,
        # Qwen2 always has query, key and value biases and never an output bias; its config.json does not say so.
        qkv_bias=bool(values.get("qkv_bias", True)) if architecture in QWEN2 else bias,
        output_bias=architecture not in QWEN2 and bias,
        mlp_bias=architecture == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        pad_token_id=values.get("pad_token_id"),
        initializer_range=float(values.get("initializer_range", 0.02)),
        **(_experts_from_hf(values, source) if architecture.endswith("_moe") else {}),
    )


def to_hf(config: TransformerConfig, dtype: str = "float32") -> dict[str, Any]:
    """Returns the config.json of `config`, readable by transformers 4 and 5 and by vLLM.

    Args:
      dtype: dtype of the weights: "float32", "bfloat16" or "float16".
    """
    eos = list(config.eos_token_ids)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "use_cache": True,
        # Both spellings: transformers 5 reads `dtype`, transformers 4 `torch_dtype`.
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.architecture not in QWEN2:
        values["attention_bias"] = config.qkv_bias
    if config.shared_expert_intermediate_size:
        values |= {
            "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
            "qkv_bias": config.qkv_bias,
        }
    if config.num_experts:
        values |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_intermediate_size,
            "norm_topk_prob": config.normalize_expert_shares,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if config.architecture == "llama":
        values["mlp_bias"] = config.mlp_bias
    else:
        values["use_sliding_window"] = False
    return values | _rope_to_hf(config.rope)


def read_directory(path: str | pathlib.Path) -> TransformerConfig:
    """Reads `<path>/config.json`.

    Raises:
      DataError: the directory or the file is missing, incomplete, or describes an unsupported model.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise DataError(f"{directory}: no such model directory; give the path of a downloaded Hugging Face model.")
    file = directory / "config.json"
    if not file.is_file():  # a FIFO would never answer
        raise DataError(f"{file}: missing, so {directory} is not a Hugging Face model directory.")
    try:
        values = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise DataError(f"{file}: is not whole JSON ({error}); download it again.") from None
    if not isinstance(values, dict):
        raise DataError(f"{file}: must hold a JSON object, not a {type(values).__name__}.")
    return from_hf(values, str(file))


def preset_names() -> tuple[str, ...]:
    """Lists the names of the shapes that ship with the package."""
    return tuple(sorted(file.stem for file in _PRESETS.glob("*.json")))


def preset_of(name: str) -> str:
    """Returns the preset of a Hugging Face id such as `Qwen/Qwen3-8B`. Returns any other name as it is."""
    namespace, _, model = name.partition("/")
    # Instruct and base variants are other ids, because their longest contexts differ.
    return model if namespace.lower() in PUBLISHERS and model in preset_names() else name


def load_preset(name: str, field: str = "model.preset") -> TransformerConfig:
    """Loads the shape that ships under `name`, the value of the config's `field`.

    Raises:
      ConfigError: the preset does not exist; the message offers the nearest name.
    """
    names = preset_names()
    if name not in names:
        by_lower, query = {preset.lower(): preset for preset in names}, name.lower().rpartition("/")[2]
        # A shortened name is nearer in meaning to what it begins than to a name with other digits.
        longer = [preset for preset in by_lower if preset.startswith(query)]
        near = difflib.get_close_matches(query, longer or by_lower, n=1, cutoff=0.5)
        hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
        raise ConfigError(f"config.{field}: {name!r} is not one of {', '.join(names)}{hint}")
    return from_hf(json.loads((_PRESETS / f"{name}.json").read_text()), f"preset {name}")


def untied(config: TransformerConfig) -> TransformerConfig:
    """Returns the same shape with a separate output projection."""
    return dataclasses.replace(config, tie_word_embeddings=False)


def parameter_count(config: TransformerConfig) -> int:
    """Counts the parameters of the model; a tied table counts once."""
    width, ffn = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Two norms; query and output, key and value projections; gate, up and down projections.
    layer = 2 * width + width * (2 * query + 2 * kv) + 3 * width * ffn
    if config.num_experts:
        layer += 3 * width * (config.num_experts * config.expert_intermediate_size - ffn) + width * config.num_experts
    if config.shared_expert_intermediate_size:
        layer += 3 * width * config.shared_expert_intermediate_size + width  # and its gate
    # Biases and per-head norms, where the architecture has them.
    layer += (query + 2 * kv) * config.qkv_bias + width * config.output_bias
    layer += (2 * ffn + width) * config.mlp_bias + 2 * config.head_dim * config.qk_norm
    tables = 1 if config.tie_word_embeddings else 2
    return config.num_layers * layer + tables * config.vocab_size * width + width


def expert_parameter_count(config: TransformerConfig, experts: int) -> int:
    """Counts the parameters of `experts` experts of every layer."""
    return 3 * config.num_layers * experts * config.hidden_size * config.expert_intermediate_size


def active_parameter_count(config: TransformerConfig) -> int:
    """Counts all parameters but those of the experts that a token does not take."""
    return parameter_count(config) - expert_parameter_count(config, config.num_experts - config.experts_per_token)


def multiplied_parameter_count(config: TransformerConfig) -> int:
    """Counts the parameters that multiply a token: all but an untied input table, whose rows are looked up, and the
    experts that the token does not take."""
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return active_parameter_count(config) - looked_up


def _supported_architecture(values: Mapping[str, Any], source: str) -> str:
    """Returns the name of the architecture; refuses options that the forward pass does not compute."""
    name = values.get("model_type")
    if name is None:
        classes = values.get("architectures") or [None]
        name = next((kind for kind, cls in ARCHITECTURES.items() if cls == classes[0]), classes[0])
    if name not in ARCHITECTURES:
        raise DataError(f"{source}: architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}.")
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise DataError(f"{source}: hidden_act {activation!r} is not supported; supported is silu.")
    if values.get("quantization_config"):
        raise DataError(f"{source}: quantized weights cannot be trained; use the model's unquantized release.")
    return str(name)


def _check_layer_types(values: Mapping[str, Any], layers: int, source: str) -> None:
    """Refuses layers that are not full attention, and a list of another length than the model."""
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list | tuple):
        raise DataError(f"{source}: layer_types must be a list of one name a layer, not {kinds!r}.")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise DataError(
            f"{source}: layer_types has layers of type {unknown[0]!r}, which is not supported; every layer must be "
            "full_attention. Use another model."
        )
    if kinds and len(kinds) != layers:
        raise DataError(
            f"{source}: layer_types has {len(kinds)} entries, and num_hidden_layers is {layers}; correct the one that "
            "is wrong."
        )
    edits = ["set use_sliding_window to false"] if values.get("use_sliding_window") else []
    if "sliding_attention" in kinds:
        edits.append("remove layer_types")
    if edits:
        window = values.get("sliding_window") or 4096  # the default of transformers' Qwen2Config and Qwen3Config
        raise DataError(
            f"{source}: sliding-window attention is not supported. Contexts within the window are computed alike "
            f"without: in a copy of the file, {' and '.join(edits)}, and set rollout.max_context to at most {window}."
        )


def _experts_from_hf(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reads the experts; refuses layers without, which would not stack with the others."""
    # transformers 5 writes num_local_experts, which transformers 4 and vLLM call num_experts.
    named = "num_experts" if "num_experts" in values else "num_local_experts"
    count, per_token = _positive(values, named, source), _positive(values, "num_experts_per_tok", source)
    shared = "shared_expert_intermediate_size"
    if per_token > count:
        raise DataError(f"{source}: num_experts_per_tok = {per_token} is more than {named} = {count}.")
    if values.get("mlp_only_layers") or int(values.get("decoder_sparse_step") or 1) != 1:
        raise DataError(
            f"{source}: layers without experts among layers with them (mlp_only_layers, decoder_sparse_step) are not "
            "supported."
        )
    return {
        "num_experts": count,
        "experts_per_token": per_token,
        "expert_intermediate_size": _positive(values, "moe_intermediate_size", source),
        "normalize_expert_shares": bool(values.get("norm_topk_prob", False)),
        "shared_expert_intermediate_size": _positive(values, shared, source) if values.get(shared) else 0,
    }


def _positive(values: Mapping[str, Any], name: str, source: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        problem = "is missing" if name not in values else f"must be a positive integer, not {value!r}"
        raise DataError(f"{source}: {name} {problem}.")
    return value


def _head_dim(values: Mapping[str, Any], architecture: str, hidden_size: int, heads: int, source: str) -> int:
    if values.get("head_dim") is not None:
        head_dim = _positive(values, "head_dim", source)
    elif architecture == "qwen3":
        head_dim = 128  # the default of transformers' Qwen3Config; Qwen3MoeConfig has none
    elif hidden_size % heads:
        raise DataError(f"{source}: hidden_size = {hidden_size} is not a multiple of num_attention_heads = {heads}.")
    else:
        head_dim = hidden_size // heads
    if head_dim % 2:
        raise DataError(f"{source}: head_dim = {head_dim} must be even, because rotary embeddings turn pairs.")
    return head_dim


def _rope_from_hf(values: Mapping[str, Any], max_positions: int, source: str) -> RopeConfig:
    # transformers 5 keeps everything in `rope_parameters`; version 4 has `rope_theta` beside `rope_scaling`. If a file
    # has both, transformers uses `rope_scaling` alone, because model cards add it to an existing file.
    replaced, scaling = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    merged = scaling or replaced
    if any(isinstance(value, Mapping) for value in merged.values()):
        raise DataError(
            f"{source}: rope parameters that differ by layer are not supported; give one set for all layers."
        )
    theta = float(merged.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    if float(replaced.get("rope_theta") or theta) != theta:
        raise DataError(
            f"{source}: rope_scaling replaces rope_parameters, as in transformers, so rope_theta would be {theta:g} "
            f"and not {replaced['rope_theta']:g}; write the rope_theta that is meant into rope_scaling."
        )
    if float(merged.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise DataError(f"{source}: partial_rotary_factor other than 1 is not supported.")
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "dynamic":
        raise DataError(
            f"{source}: rope type 'dynamic' depends on the batch's longest row, so trainer and engine would disagree; "
            "use linear, llama3 or yarn."
        )
    if kind not in ("linear", "llama3", "yarn"):
        raise DataError(f"{source}: rope type {kind!r} is not supported; supported are default, linear, llama3, yarn.")
    original = values.get("original_max_position_embeddings") or merged.get("original_max_position_embeddings")
    original = int(original or max_positions)
    factor = merged.get("factor")
    if factor is None and kind == "yarn":
        factor = max_positions / original
    if factor is None:
        raise DataError(f"{source}: rope type {kind!r} needs a factor.")
    rope = RopeConfig(theta=theta, kind=kind, factor=float(factor))
    if kind == "linear":
        return rope
    rope = dataclasses.replace(rope, original_max_positions=original)
    names = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_fast", "beta_slow")
    optional = () if kind == "llama3" else ("attention_factor", "mscale", "mscale_all_dim")
    parameters = {name: float(merged[name]) for name in (*names, *optional) if merged.get(name) is not None}
    truncate = bool(merged.get("truncate", True))
    return dataclasses.replace(rope, truncate=truncate, **parameters)  # type: ignore[arg-type]


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        scaling |= {name: getattr(rope, name) for name in optional if getattr(rope, name) is not None}
    values: dict[str, Any] = {"rope_theta": rope.theta, "rope_parameters": {"rope_theta": rope.theta, **scaling}}
    if rope.kind != "default":
        # Both spellings, so that transformers 4 finds `rope_scaling` and transformers 5 `rope_parameters`.
        values["rope_scaling"] = scaling
    return values
