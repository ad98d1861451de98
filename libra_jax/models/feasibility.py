"""Checks what a model's shape allows: the number of devices that it splits over, and its attention kernel.

Standard library only, like the shape itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from libra_jax.config import checks
from libra_jax.models.config import TransformerConfig, feed_forward_columns
from libra_jax.protocols import ConfigError

SPLASH_LANES = 128
"""Splash attention needs head widths and row lengths that are multiples of this number."""


def check_tensor_parallel(config: TransformerConfig, degree: int) -> None:
    """Checks that a rollout instance can split the model over `degree` devices.

    Key and value heads may also be copied: vLLM copies them if the degree is a multiple of their number.

    Raises:
      ConfigError: a size is not divisible by `degree`; the message names the size.
    """
    columns = feed_forward_columns(config)
    for name, size in (("attention heads", config.num_heads), ("feed-forward columns", columns)):
        if size % degree:
            raise ConfigError(
                f"config.rollout.tensor_parallel: {degree} does not divide the model's {size} {name}; use "
                f"{checks.either(_served_degrees(config))}."
            )
    if config.num_kv_heads % degree and degree % config.num_kv_heads:
        raise ConfigError(
            f"config.rollout.tensor_parallel: {degree} neither divides the model's {config.num_kv_heads} key and value "
            f"heads nor is a multiple of them; use {checks.either(_served_degrees(config))}."
        )


def _served_degrees(config: TransformerConfig) -> list[int]:
    """Lists the degrees that `check_tensor_parallel` accepts."""
    even = math.gcd(config.num_heads, feed_forward_columns(config))
    return [
        degree
        for degree in (1, 2, 4, 8)
        if even % degree == 0 and (config.num_kv_heads % degree == 0 or degree % config.num_kv_heads == 0)
    ]


def check_served(config: TransformerConfig) -> None:
    """Checks that vLLM serves the model as the trainer computes it.

    Raises:
      ConfigError: the model is a Qwen2 whose head_dim is not hidden_size / num_attention_heads. vLLM's Qwen2 reads no
        head_dim (vllm/model_executor/models/qwen2.py) and dies while it loads the weights.
    """
    width = config.hidden_size // config.num_heads
    if config.architecture == "qwen2" and config.head_dim != width:
        raise ConfigError(
            f"config.model: vLLM takes no head_dim of its own for Qwen2, and the model's config.json has head_dim "
            f"{config.head_dim} where hidden_size / num_attention_heads = {width}; use another model, or weights of a "
            "qwen3 or llama model_type, whose head_dim vLLM reads."
        )


def check_mesh(config: TransformerConfig, mesh_shape: Mapping[str, int]) -> None:
    """Checks that the model splits evenly over a mesh.

    Args:
      mesh_shape: size of each mesh axis; a missing axis has size 1.

    Raises:
      ConfigError: a size is not divisible by its axis; the message names both.
    """
    splits = {
        "tensor": {
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
        },
        "fsdp": {"hidden_size": config.hidden_size},
    }
    if config.num_experts:
        # No layer has columns of `intermediate_size`.
        del splits["tensor"]["intermediate_size"]
        splits["tensor"]["moe_intermediate_size"] = config.expert_intermediate_size
        splits["tensor"]["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
        splits["fsdp"]["num_experts"] = config.num_experts
    fsdp, context = mesh_shape.get("fsdp", 1), mesh_shape.get("context", 1)
    for axis, sizes in splits.items():
        ways = mesh_shape.get(axis, 1)
        for name, size in sizes.items():
            if size % ways:
                common = math.gcd(*sizes.values())
                if axis == "fsdp" and config.hidden_size % context == 0:
                    # What is offered divides with `context`, too.
                    common = math.gcd(common, config.hidden_size // context)
                raise ConfigError(
                    f"config.trainer.{axis}: {ways} does not divide the model's {name} = {size}; use "
                    f"{checks.divisors(common, ways)}."
                )
    # The state is split over both (`models.sharding`).
    if config.hidden_size % (fsdp * context):
        raise ConfigError(
            f"config.trainer.context: fsdp x context = {fsdp} x {context} does not divide the model's hidden_size = "
            f"{config.hidden_size}; use a trainer.context of {checks.divisors(config.hidden_size // fsdp, context)}."
        )


def check_context(heads: int, context: int, row_tokens: int, tensor: int = 1) -> None:
    """Checks that attention can be computed if `context` devices split rows of this length.

    Args:
      heads: query heads of a tensor shard.
      context: devices that a row is split over.
      tensor: tensor shards, among which a row divides, too.

    Raises:
      ConfigError: `context` does not divide the heads, so it splits the queries, and the row does not divide into an
        early and a late part for each device.
    """
    if not splits_heads(heads, context) and row_tokens % (2 * context):
        step = math.lcm(2 * context, context * tensor)
        raise ConfigError(
            f"config.trainer.row_tokens: context = {context} does not divide the {heads} query heads of a tensor "
            f"shard, so each device takes two parts of a row, and {row_tokens} does not divide into "
            f"2 x {context}; use {-(-row_tokens // step) * step} tokens, or a trainer.context that divides the heads: "
            f"{checks.divisors(heads, context)}."
        )


@dataclass(frozen=True)
class ContextHeads:
    """Key and value heads that devices of `context` send to each other, so that each can attend with its query heads.

    Attributes:
      per_device: heads that one device is sent.
      copies: heads in the order in which they are sent, `per_device` for each device in turn.
      of_query: for each device, the place among its heads of each query head's head; None if equally many query heads
        in a row share each head, as attention kernels take it.
    """

    per_device: int
    copies: tuple[int, ...]
    of_query: tuple[tuple[int, ...], ...] | None


def splits_heads(heads: int, context: int) -> bool:
    """Returns whether attention over `context` devices exchanges tokens for heads; if not, it splits the queries.

    Args:
      heads: query heads of a `tensor` shard.
      context: devices that a row is split over.
    """
    return heads % context == 0


def context_heads(heads: int, kv_heads: int, context: int) -> ContextHeads:
    """Returns which key and value heads each of `context` devices needs for its part of the query heads.

    Args:
      heads: query heads of a `tensor` shard, a multiple of `context`.
      kv_heads: key and value heads of that shard.
      context: devices that a row is split over.
    """
    group, queries = heads // kv_heads, heads // context
    needed = [
        [query // group for query in range(device * queries, (device + 1) * queries)] for device in range(context)
    ]
    per_device = max(of[-1] - of[0] + 1 for of in needed)
    # A device that needs fewer is sent a further one, because an exchange has equal parts.
    firsts = [min(of[0], kv_heads - per_device) for of in needed]
    places = tuple(tuple(head - first for head in of) for of, first in zip(needed, firsts, strict=True))
    # Kernels take it that each head serves the next `queries / per_device` query heads.
    even = queries % per_device == 0 and set(places) == {
        tuple(query * per_device // queries for query in range(queries))
    }
    copies = tuple(first + number for first in firsts for number in range(per_device))
    return ContextHeads(per_device, copies, None if even else places)


@dataclass(frozen=True)
class CompileTarget:
    """Kind of device that a program is compiled for.

    Attributes:
      platform: JAX's platform name: "cpu", "gpu" or "tpu".
      capability: compute capability of an NVIDIA GPU, such as (9, 0) for Hopper. None if it is not known yet; (0, 0)
        for other devices.
    """

    platform: str
    capability: tuple[int, int] | None = None


CPU = CompileTarget("cpu", (0, 0))


def choose_attention(
    kernel: str, target: CompileTarget, tokens: int, head_dim: int, dtype: str, packed: bool, *, whole_rows: bool = True
) -> str:
    """Returns the attention kernel to run: "chunked", "splash" or "cudnn".

    Args:
      kernel: kernel that the config requests; "auto" takes the platform's own kernel if it can compute the case.
      target: device that runs the kernel. An unknown capability counts as sufficient.
      tokens: length of a row.
      dtype: dtype of the queries.
      packed: several sequences may share a row.
      whole_rows: each device attends with all queries of a row; False if `context` splits them.

    Raises:
      ConfigError: the requested kernel cannot run on this device, or not with these shapes and dtype.
    """
    problems: dict[str, str] = {}
    if target.platform != "tpu":
        problems["splash"] = "needs a TPU"
    elif tokens % SPLASH_LANES:
        problems["splash"] = f"needs rows of a multiple of {SPLASH_LANES} tokens, not {tokens}"
    # JAX refuses cuDNN's packed layout below Hopper, and cuDNN's fused attention needs Ampere.
    minimum, generation = ((9, 0), "Hopper") if packed else ((8, 0), "Ampere")
    if target.platform != "gpu":
        problems["cudnn"] = "needs a GPU"
    elif target.capability is not None and target.capability < minimum:
        rows = "rows of several sequences" if packed else "rows of one sequence"
        problems["cudnn"] = f"needs an NVIDIA GPU of the {generation} generation or later for {rows}"
    elif dtype != "bfloat16" or head_dim > 128 or head_dim % 8:
        problems["cudnn"] = f"needs bfloat16 and heads of at most 128, not {dtype}, {head_dim}"
    if not whole_rows:
        needs = "needs a trainer.context that divides the query heads of each tensor shard"
        problems = {"splash": needs, "cudnn": needs} | problems
    if kernel == "auto":
        return next((name for name in ("splash", "cudnn") if name not in problems), "chunked")
    if kernel in problems:
        raise ConfigError(
            f"config.model.attention: {kernel} {problems[kernel]} (this is {target.platform}); use auto or chunked."
        )
    return kernel


GROUPED_STEP = 128
"""Grouped products need a model width and columns of an expert that are multiples of this number."""


def choose_experts(target: CompileTarget, width: int, columns: int, dtype: str) -> str:
    """Returns how a device computes its experts: "groups" (`expert_groups`) or "tiles" (`expert_tiles`).

    Args:
      target: device that runs the program. An unknown capability counts as sufficient.
      width: width of the model.
      columns: columns of an expert that one device has.
      dtype: dtype of the products.
    """
    # JAX's kernels use instructions that GPUs after Hopper lack, too.
    hopper = target.platform == "gpu" and target.capability in (None, (9, 0))
    even = width % GROUPED_STEP == 0 and columns % GROUPED_STEP == 0
    return "groups" if hopper and even and dtype == "bfloat16" else "tiles"
