"""Computes how long things take from a hardware sheet and a model's shape.

`CostModel` is a roofline. Each operator takes the longer of its arithmetic and its memory traffic, at the shares of
the sheet's peaks that `Coefficients` names. Nothing is fitted to a scheduling policy: the values were committed before
any comparison. `measured_costs.Calibration` has the same methods over measured costs;
`planning.costs.calibration` fits them.
Lengths are tokens, sizes bytes, times seconds. `degree` is an instance's tensor-parallel degree throughout.

A mixture of experts computes with the experts that a token takes, and stores and syncs all of them. A step of an engine
reads the experts that its tokens take, for experts that are taken equally often.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from libra_jax import config as config_lib
from libra_jax.models import config as model_config
from libra_jax.models.adapters import adapters
from libra_jax.planning.costs import hardware

if TYPE_CHECKING:
    from libra_jax.planning.costs import measured_costs

BYTES_PER_VALUE = 2
"""Bytes of a value: weights, activations and key-value cache are bfloat16."""

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value, by the dtypes that a config may name."""


@dataclass(unsafe_hash=True)
@config_lib.group("simulation.coefficients")
class Coefficients:
    """Shares of a sheet's peaks that software reaches, and fixed times; each with its source."""

    # Share of memory bandwidth while a step reads the weights, on an A100; sheets have factors. 28 decode steps of 7 to
    # 70 billion parameters at degrees 1 to 8 (LambdaLabsML/vllm-benchmark, vLLM 0.6.0), fitted together with
    # `layer_overhead`: 0.79 (0.77 to 0.80 by bootstrap).
    memory_share: float = config_lib.field(0.79, gt=0, le=1)
    # Share of memory bandwidth while attention reads keys and values; gpt-fast (PyTorch blog "Accelerating Generative
    # AI with PyTorch II", 2023) reads 0.69 in all.
    context_share: float = config_lib.field(0.7, gt=0, le=1)
    # Share of peak FLOP/s in an engine's matrix products. lmdeploy's and TensorRT-LLM's tables of prefill on A100s ask
    # for 0.56 to 0.70 (7 to 180 billion parameters), gpustack's of vLLM, with decoding, 0.54.
    rollout_flops_share: float = config_lib.field(0.6, gt=0, le=1)
    # Model FLOP/s utilisation of training. Llama 3 (arXiv 2407.21783, table 4) reports 0.38 to 0.43, Megatron-LM (arXiv
    # 2104.04473, abstract) 0.52 on A100s.
    train_flops_share: float = config_lib.field(0.4, gt=0, le=1)
    # Seconds of an engine step besides its kernels: scheduling, input preparation, sampling. This value has no bias
    # over the 33 published steps on A100s (docs/results/machines.md). vLLM's version 1 takes 0.3 to 0.9 ms on H100s
    # (pull requests 17866 and 30407), version 0 up to 6 ms more at degree 8 (issue 16300).
    step_overhead: float = config_lib.field(1.5e-3, ge=0)
    # Seconds that each layer adds to a step at any degree: small kernels, and the start of each matrix product. Fitted
    # with `memory_share`: 55 to 61 microseconds over all degrees.
    layer_overhead: float = config_lib.field(55e-6, ge=0)
    # Seconds that each decoding request adds to a step besides its arithmetic and its context. Up to 239 requests in
    # the runs of `memory_share`: 51 microseconds at degree 1, of which products of large batches are a part, 35 at
    # degree 8; vllm issue 10634: 20.
    sequence_overhead: float = config_lib.field(30e-6, ge=0)
    # Seconds to start a one-shot all-reduce, in which each device reads all others' values. This, and the next four:
    # vLLM's kernels in a CUDA graph on 2, 4 and 8 A100s and H100s, as ai-dynamo/aiconfigurator measured them: 6.9
    # microseconds for 16 KiB on 8 A100s, 17 for 128 KiB, 22 for 512 KiB, 45 for 2 MiB.
    collective_latency: float = config_lib.field(5.5e-6, ge=0)
    one_shot_share: float = config_lib.field(0.28, gt=0, le=1)  # share of the link's bandwidth that it reaches
    # Seconds to start a two-shot all-reduce, in which each device reduces its part.
    two_shot_latency: float = config_lib.field(12e-6, ge=0)
    two_shot_share: float = config_lib.field(0.37, gt=0, le=1)  # share of the link's bandwidth that it reaches
    # Seconds to start a ring all-reduce, which replaces both if it is faster (NCCL).
    large_message_latency: float = config_lib.field(40e-6, ge=0)
    # Share of the link's bandwidth in a ring all-reduce; NCCL's own tests report 0.7 to 0.8.
    large_message_share: float = config_lib.field(0.7, gt=0, le=1)
    # Share of the network's bandwidth in bulk transfers (weights, key-value cache).
    network_share: float = config_lib.field(0.8, gt=0, le=1)
    # Share of the bandwidth between an accelerator and its host's memory in bulk transfers.
    host_link_share: float = config_lib.field(0.8, gt=0, le=1)
    host_memory_share: float = config_lib.field(0.5, gt=0, le=1)  # share of the host's memory that keeps contexts
    # Share of device memory that an engine takes; vLLM's default is 0.9.
    memory_fraction: float = config_lib.field(0.9, gt=0, le=1)
    # Bytes of that memory, on each device, kept for activations and graphs.
    activation_bytes: float = config_lib.field(4e9, ge=0)
    # Prefill tokens that share one engine step (vLLM's max_num_batched_tokens).
    chunk_tokens: int = config_lib.field(4096, gt=0)
    # Seconds of putting new weights in place on an engine, besides the transfer (the four verbs).
    load_overhead: float = config_lib.field(0.5, ge=0)
    # Seconds of each micro-batch on each device, besides its arithmetic: launching its program. An accelerator's queue
    # hides it.
    micro_batch_overhead: float = config_lib.field(0.0, ge=0)
    # Further seconds of each training step: packing, and work of the host. An accelerator's queue hides it.
    train_overhead: float = config_lib.field(0.0, ge=0)


SHARES = tuple(item.name for item in dataclasses.fields(Coefficients) if item.name.endswith(("share", "fraction")))
"""Coefficients that are shares of a whole, and so at most 1."""


def moved(coefficients: Coefficients, by: float) -> Iterator[tuple[str, float]]:
    """Yields each coefficient's name with its value a share `by` lower, then higher; shares end at 1, and zeros are
    skipped."""
    for item in dataclasses.fields(coefficients):
        value = getattr(coefficients, item.name)
        if not value:
            continue
        for factor in (1.0 - by, 1.0 + by):
            # A coefficient that counts tokens stays whole.
            new_value = type(value)(round(value * factor)) if isinstance(value, int) else value * factor
            yield item.name, min(1.0, new_value) if item.name in SHARES else new_value


def train_flops(
    shape: model_config.TransformerConfig, parameters: int, lengths: Sequence[int], pairs: float | None = None
) -> float:
    """Returns the model FLOPs of a training step: 6ND + attention.

    `6 N D = 6 * parameters * sum(lengths)`: 2 for the forward pass and 4 for the backward pass, a multiplication and an
    addition each. Attention: `12 * layers * heads * head_dim * T^2 / 2` of each sequence of T tokens. This is the count
    of PaLM (arXiv 2204.02311, appendix B) with half of its attention, because a causal token attends to half of its
    sequence on average. What rematerialisation computes again does not count. Frozen weights under an adapter have no
    gradient, which saves 2 of their 6; the adapter's own parameters count 6.

    Args:
      parameters: N of the formula: with experts, only those that a token takes.
      lengths: tokens of each sequence, without padding.
      pairs: pairs of tokens that attention multiplies; None: T^2 / 2 of each sequence, as without trees.
    """
    if pairs is None:
        pairs = float(sum(length * length for length in lengths)) / 2
    attention = 12.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    flops_per_token = (
        6.0 * parameters if shape.adapter is None else 4.0 * parameters + 6.0 * adapters.parameter_count(shape)
    )
    return flops_per_token * sum(lengths) + attention


@dataclass(frozen=True)
class PrefillTerms:
    """Seconds of prefilling beside decoding requests, term by term.

    Attributes:
      new: seconds of a token that is new to the instance.
      cached: seconds of a context token that the instance has seen.
      pair: seconds of a pair of tokens that attention multiplies.
      prefill: fixed seconds of each prefill.
    """

    new: float
    cached: float
    pair: float
    prefill: float


class RolloutTimes(abc.ABC):
    """Times of an instance that follow from the parts of a step, computed or measured alike."""

    @property
    @abc.abstractmethod
    def chunk_tokens(self) -> int:
        """Prefill tokens that share one engine step."""

    @abc.abstractmethod
    def fixed_seconds(self, degree: int, decoding: int, prefill: float = 0.0) -> float:
        """Returns the seconds of one step without attention over contexts."""

    @abc.abstractmethod
    def context_seconds(self, degree: int) -> float:
        """Returns the seconds that each token of decoding context adds to a step."""

    @abc.abstractmethod
    def attention_seconds(self, degree: int, new: int, cached: int) -> float:
        """Returns the seconds that prefilling `new` tokens behind `cached` ones takes beside `fixed_seconds`."""

    def prefill_seconds(self, degree: int, new: int, cached: int = 0) -> float:
        """Returns the seconds of prefilling `new` tokens on an idle instance."""
        chunks = max(1, -(-new // self.chunk_tokens))
        return chunks * self.fixed_seconds(degree, 0, new / chunks) + self.attention_seconds(degree, new, cached)

    def step_seconds(self, degree: int, decoding: int, context: float) -> float:
        """Returns the seconds in which `decoding` requests with `context` tokens in all get one token each."""
        return self.fixed_seconds(degree, decoding) + self.context_seconds(degree) * context


@dataclass(frozen=True)
class CostModel(RolloutTimes):
    """Costs of one model on one accelerator, computed.

    Attributes:
      shape: shape of the model, with its adapter.
      coefficients: shares of the sheet's peaks, and fixed times.
      merged: a weight sync sends all weights, with the adapter added; False sends the adapter alone.
      active_parameters: parameters without the experts that a token does not take; all parameters of a dense model.
      expert_parameters: parameters of all experts; 0 for a dense model.
      trained_parameters: parameters with gradients and moments: those of the adapter, if the model has one.
      weight_bytes: bytes of the weights that an instance holds.
      sync_bytes: bytes of a weight sync: of the adapter alone, unless the run merges it into the weights.
      kv_bytes_per_token: bytes of the key-value cache of one token over all layers.
    """

    sheet: hardware.HardwareSheet
    shape: model_config.TransformerConfig
    coefficients: Coefficients = dataclasses.field(default_factory=Coefficients)
    merged: bool = False

    parameters: int = dataclasses.field(init=False, compare=False)
    active_parameters: int = dataclasses.field(init=False, compare=False)
    expert_parameters: int = dataclasses.field(init=False, compare=False)
    trained_parameters: int = dataclasses.field(init=False, compare=False)
    weight_bytes: int = dataclasses.field(init=False, compare=False)
    sync_bytes: int = dataclasses.field(init=False, compare=False)
    kv_bytes_per_token: int = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        shape, parameters = self.shape, model_config.parameter_count(self.shape)
        trained = parameters if shape.adapter is None else adapters.parameter_count(shape)
        # Written into the instance's dict, because the fields of a frozen dataclass cannot be assigned.
        vars(self).update(
            parameters=parameters,
            active_parameters=model_config.active_parameter_count(shape),
            expert_parameters=model_config.expert_parameter_count(shape, shape.num_experts),
            trained_parameters=trained,
            weight_bytes=BYTES_PER_VALUE * parameters,
            sync_bytes=BYTES_PER_VALUE * (parameters if self.merged else trained),
            # The leading 2 is for keys and values.
            kv_bytes_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * BYTES_PER_VALUE,
        )

    @property
    def chunk_tokens(self) -> int:
        """Prefill tokens that share one engine step."""
        return self.coefficients.chunk_tokens

    def kv_tokens(self, degree: int) -> int:
        """Returns the tokens that an instance's key-value cache holds; 0 or less if the weights alone do not fit."""
        bytes_per_device = (
            self.sheet.memory_bytes * self.coefficients.memory_fraction - self.coefficients.activation_bytes
        )
        # Beyond the number of key-value heads, every further device holds copies of the heads.
        spread = min(degree, self.shape.num_kv_heads) / degree
        return int((degree * bytes_per_device - self.weight_bytes) * spread / self.kv_bytes_per_token)

    def context_seconds(self, degree: int) -> float:
        """Returns the seconds that each token of decoding context adds to a step, for reading and multiplying its
        keys and values."""
        sheet, shape, share = self.sheet, self.shape, self.coefficients
        rate = sheet.memory_bytes_per_second * min(1.0, share.context_share * sheet.memory_factor)
        read = self.kv_bytes_per_token / (min(degree, shape.num_kv_heads) * rate)
        flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
        return max(read, flops / (degree * sheet.flops * share.rollout_flops_share))

    def fixed_seconds(self, degree: int, decoding: int, prefill: float = 0.0) -> float:
        """Returns the seconds of one step without attention over contexts.

        Args:
          degree: degree of the instance.
          decoding: requests that get one token each.
          prefill: tokens prefilled in the same step.
        """
        tokens = decoding + prefill
        work = max(self.reading_seconds(degree, tokens), self.token_seconds(degree) * tokens)
        return work + self.collective_seconds(degree, tokens) + self.overhead(decoding)

    def overhead(self, decoding: int) -> float:
        """Returns the seconds of a step that neither arithmetic nor memory explains."""
        coefficients, sheet = self.coefficients, self.sheet
        host = sheet.host_factor * (coefficients.step_overhead + coefficients.sequence_overhead * decoding)
        return host + sheet.layer_factor * coefficients.layer_overhead * self.shape.num_layers

    def attention_seconds(self, degree: int, new: int, cached: int) -> float:
        """Returns the seconds of causal attention while prefilling `new` tokens behind `cached` ones."""
        shape = self.shape
        # Causal: a new token attends to half of the new tokens on average.
        flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim * new * (cached + new / 2)
        return flops / (degree * self.sheet.flops * self.coefficients.rollout_flops_share)

    def prefill_terms(self, degree: int) -> PrefillTerms:
        """Returns the seconds that prefilling adds to steps in which others decode: its arithmetic and its
        collectives."""
        chunk = self.coefficients.chunk_tokens
        new = self.token_seconds(degree) + self.collective_seconds(degree, chunk) / chunk
        # `attention_seconds` of one new token without a cache counts half a pair. A cached token costs no more than
        # the pairs that it is part of.
        return PrefillTerms(new, 0.0, self.attention_seconds(degree, 1, 0) / 0.5, 0.0)

    def token_seconds(self, degree: int) -> float:
        """Returns the seconds of a token's arithmetic in the matrix products of a step."""
        multiplied = self.active_parameters - self._looked_up
        return 2.0 * multiplied / (degree * self.sheet.flops * self.coefficients.rollout_flops_share)

    @property
    def _looked_up(self) -> int:
        """Parameters of the input embedding, of which a step takes one row a token, unless the output projection is
        the same table."""
        shape = self.shape
        return 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size

    def reading_seconds(self, degree: int, tokens: float) -> float:
        """Returns the seconds in which a step of `tokens` tokens reads the weights."""
        read: float = self.weight_bytes - BYTES_PER_VALUE * self._looked_up
        if self.shape.num_experts:
            # Expected share of a layer's experts that none of the tokens takes.
            idle = (1.0 - self.shape.experts_per_token / self.shape.num_experts) ** tokens
            read -= BYTES_PER_VALUE * self.expert_parameters * idle
        share = min(1.0, self.coefficients.memory_share * self.sheet.memory_factor)
        return read / (degree * self.sheet.memory_bytes_per_second * share)

    def collective_seconds(self, degree: int, tokens: float) -> float:
        """Returns the seconds of the all-reduces of one step: two a layer, of one hidden vector a token."""
        if degree == 1:
            return 0.0
        share, link = self.coefficients, self.sheet.node_link_bytes_per_second
        values = tokens * self.shape.hidden_size * BYTES_PER_VALUE
        # Two-shot and ring all-reduces send 2 (n - 1) / n of the bytes over each link.
        volume = 2 * (degree - 1) / degree * values
        one_shot = share.collective_latency + (degree - 1) * values / (link * share.one_shot_share)
        two_shot = share.two_shot_latency + volume / (link * share.two_shot_share)
        ring = share.large_message_latency + volume / (link * share.large_message_share)
        return 2 * self.shape.num_layers * min(one_shot, two_shot, ring)

    def train_seconds(self, lengths: Sequence[int], devices: int) -> float:
        """Returns the seconds of one training step.

        Args:
          lengths: tokens of each trajectory, prompts and tool returns included.
          devices: number of devices that share the work.
        """
        flops = train_flops(self.shape, self.active_parameters, lengths)
        return flops / (devices * self.sheet.flops * self.coefficients.train_flops_share)

    def gather_seconds(self, devices: int) -> float:
        """Returns the seconds in which the trainer's devices put a snapshot in the wire dtype together."""
        rate = self.sheet.network_bytes_per_second * self.coefficients.network_share
        return self.sync_bytes / (min(devices, self.sheet.devices_per_node) * rate)

    def load_seconds(self, degree: int) -> float:
        """Returns the seconds in which an instance receives a snapshot, each device its part, and puts it in place."""
        rate = degree * self.sheet.network_bytes_per_second * self.coefficients.network_share
        return self.sync_bytes / rate + self.coefficients.load_overhead

    def transfer_seconds(self, degree: int, context: int) -> float:
        """Returns the seconds of moving a request's key-value cache to an instance over the network."""
        rate = degree * self.sheet.network_bytes_per_second * self.coefficients.network_share
        return context * self.kv_bytes_per_token / rate

    def host_seconds(self, degree: int, context: int) -> float:
        """Returns the seconds of fetching a request's key-value cache from the host's memory."""
        rate = degree * self.sheet.host_link_bytes_per_second * self.coefficients.host_link_share
        return context * self.kv_bytes_per_token / rate

    def host_tokens(self, degree: int) -> int:
        """Returns the tokens of context that the host memory of an instance keeps; 0 if the sheet has none."""
        return int(
            degree * self.sheet.host_memory_bytes * self.coefficients.host_memory_share / self.kv_bytes_per_token
        )


def of_hardware(name: str, shape: model_config.TransformerConfig, field: str) -> CostModel:
    """Returns the costs of a model on the hardware that a config names; an engine on a CPU keeps no memory for graphs.

    Args:
      name: name of a sheet, or "cpu".
      field: config field that names the hardware.

    Raises:
      ConfigError: there is no such sheet.
    """
    coefficients = Coefficients(activation_bytes=0.0) if name == hardware.THIS_MACHINE else Coefficients()
    return CostModel(hardware.sheet(name, field), shape, coefficients)


RolloutCosts: TypeAlias = "CostModel | measured_costs.MeasuredEngines"
"""Costs of rollout instances, computed or measured; both have the same methods."""

Costs: TypeAlias = "CostModel | measured_costs.Calibration"
"""Costs of simulated machines, computed or measured; both have the same methods."""
