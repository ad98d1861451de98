"""The least that a training micro-batch has to communicate, by formula.

Parallelism that is well compiled moves each parameter over `fsdp` once in the forward pass and once in the backward
pass, in the compute dtype, and sums each gradient once. Over `tensor`, activations travel as in Megatron-LM with
sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2). Over `context`, attention exchanges tokens
for heads in each pass (Ulysses, arXiv 2309.14509), and the state is split as over `fsdp`. The planner predicts with
these formulas, and the tests of compiled programs compare with them.

All bytes are wire bytes: bytes that a device sends in a ring algorithm. Over n devices, a gather or a scatter of an
array of S bytes takes S (n - 1) / n, an all-reduce twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra_jax.models import config as model_config
from libra_jax.models import feasibility
from libra_jax.models.adapters import adapters

COMPUTE_BYTES = 2
"""Bytes of a value in the compute dtype, bfloat16."""

EXPERT_HEADROOM = 1.2
"""Places of an all-to-all of tokens, as a multiple of those that tokens need whose experts are taken equally often."""

SUM_BYTES = 4
"""Bytes of a value in float32, the dtype of sums over many tokens."""


@dataclass(frozen=True)
class Volumes:
    """Wire bytes of a device, by the axis that they travel over.

    Attributes:
      fsdp: parameters gathered and gradients scattered, over `fsdp` and `context` together.
      data: gradients reduced over the replicas.
      tensor: activations.
      context: heads and tokens that attention exchanges.
      experts: tokens that are gathered for experts over `fsdp`, and sums that are scattered back.
    """

    fsdp: float
    data: float
    tensor: float
    context: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        """Wire bytes over all axes."""
        return self.fsdp + self.data + self.tensor + self.context + self.experts


def share(devices: int) -> float:
    """Returns (n - 1) / n: the part of an array that a device of n sends to gather or to scatter it in a ring."""
    return (devices - 1) / devices


def over_fsdp(values: float, fsdp: int, passes: float, gradient_bytes: float) -> float:
    """Returns the bytes of gathering `values` parameters in each of `passes` and of scattering their gradients once."""
    return (passes * COMPUTE_BYTES + gradient_bytes) * values * share(fsdp)


def over_data(values: float, data: int, gradient_bytes: float) -> float:
    """Returns the bytes of reducing the gradients of `values` parameters over replicas."""
    return 2.0 * gradient_bytes * values * share(data)


def over_tensor(columns: float, hidden_size: int, tensor: int, moves: float) -> float:
    """Returns the bytes of gathering or scattering `columns` hidden vectors `moves` times."""
    return moves * columns * hidden_size * COMPUTE_BYTES * share(tensor)


def places_for_experts(fsdp: int, of_token: int) -> float:
    """Returns the places of an all-to-all for the tokens of experts, as a share of a device's tokens; 1: all tokens."""
    return min(1.0, EXPERT_HEADROOM * (1 - (1 - 1 / fsdp) ** of_token))


def for_experts(
    shape: model_config.TransformerConfig, columns: float, fsdp: int, tensor: int, moves: float
) -> tuple[float, float]:
    """Returns the bytes over `fsdp` and over `tensor` of bringing tokens to their experts, or of bringing the sums back
    (`models.experts`), for experts that are taken equally often.

    Args:
      columns: tokens of a device's shard.
      fsdp: ways that the experts are split.
      tensor: ways that an expert's columns are split.
      moves: times that a layer's tokens or sums travel.
    """
    # Beside its hidden vector, an average move takes 4 bytes for each of a token's experts: their numbers or shares.
    token = COMPUTE_BYTES * shape.hidden_size + 4 * shape.experts_per_token
    moved = moves * shape.num_layers * columns * token * places_for_experts(fsdp, shape.experts_per_token)
    return moved * (fsdp - 1) / tensor, moved * fsdp * share(tensor)


def over_context(
    shape: model_config.TransformerConfig, columns: float, tensor: int, context: int, passes: float
) -> float:
    """Returns the bytes that attention of all layers sends over `context`.

    Args:
      columns: tokens of a device.
      tensor: ways that a layer's matrices are split.
      context: ways that a row is split.
      passes: forward and backward passes; each moves queries, keys, values and outputs, or their gradients, once.
    """
    if context == 1:
        return 0.0
    heads, kv_heads = shape.num_heads // tensor, shape.num_kv_heads // tensor
    if feasibility.splits_heads(heads, context):
        sent = feasibility.context_heads(heads, kv_heads, context)
        vectors = 2 * (heads + len(sent.copies)) * share(context)
    else:
        # Each device's keys and values go to all others. All parts of the queries and of the outputs are charged,
        # though one or two stay where they are: for 2, 3, 4 and 8 devices, 2 of 4, 5 of 6, 6 of 8 and 14 of 16 move.
        vectors = 2 * kv_heads * (context - 1) + 2 * heads
    return passes * shape.num_layers * columns * vectors * shape.head_dim * COMPUTE_BYTES


def volumes(
    shape: model_config.TransformerConfig, data: int, fsdp: int, tensor: int, columns: int, context: int = 1
) -> Volumes:
    """Returns the least wire bytes of one micro-batch's forward and backward pass.

    Args:
      data: replicas.
      fsdp: ways that parameters are split.
      tensor: ways that a layer's matrices are split.
      columns: tokens of the micro-batch on each data, fsdp and context shard.
      context: ways that a row is split.
    """
    state = fsdp * context  # the devices that the state is split over
    tables = shape.vocab_size * shape.hidden_size / tensor
    layers = model_config.parameter_count(shape) / tensor - tables * (1 if shape.tie_word_embeddings else 2)
    # Experts stay where they are, and tokens travel to them.
    experts = 3 * shape.num_layers * shape.num_experts * shape.hidden_size * shape.expert_intermediate_size / tensor
    layers -= experts
    # Frozen weights under an adapter have no gradients.
    trained = shape.adapter is None
    # The projection onto the vocabulary is gathered once, and its gradient sums over all tokens in float32. The lookup
    # needs no table, only the rows of its tokens, and sends their gradients back.
    gathered = over_fsdp(layers, state, 2, COMPUTE_BYTES * trained) + over_fsdp(tables, state, 1, SUM_BYTES * trained)
    gathered += (1 + trained) * COMPUTE_BYTES * columns * shape.hidden_size / tensor * share(state)
    if shape.num_experts:
        # To each other device that holds an expert of theirs, of experts that are taken equally often: the input and
        # the sum in the forward pass; the input again, its gradient and the sum's in the backward pass.
        copies = (fsdp - 1) * (1 - (1 - 1 / fsdp) ** shape.experts_per_token)
        gathered += 5 * shape.num_layers * copies * columns * shape.hidden_size / tensor * COMPUTE_BYTES
        # Over `context`, the weights of a device's experts travel instead.
        gathered += over_fsdp(experts / fsdp, context, 2, COMPUTE_BYTES * trained)
    reduced = over_data((layers + experts) / state, data, COMPUTE_BYTES * trained)
    reduced += over_data(tables / state, data, SUM_BYTES * trained) * (1 if shape.tie_word_embeddings else 2)
    # The adapter's own parameters, as those of other layers.
    gathered += over_fsdp(adapters.parameter_count(shape), state, 2, COMPUTE_BYTES)
    reduced += over_data(adapters.parameter_count(shape) / state, data, COMPUTE_BYTES)
    # Two gathers and two scatters a layer and pass, and two gathers more in the backward pass: the inputs of the
    # projections are kept split. The projection onto the vocabulary gathers its input in each pass and scatters its
    # gradient; the lookup scatters its output and gathers its gradient.
    moves = 10 * shape.num_layers + 5
    exchanged = over_context(shape, columns, tensor, context, 2)
    return Volumes(gathered, reduced, over_tensor(columns, shape.hidden_size, tensor, moves), exchanged)
