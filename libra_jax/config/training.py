"""Settings of the policy, the trainer and the warm start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra_jax.config.checks import check, check_choice, divisors, multiples
from libra_jax.config.fields import field
from libra_jax.config.group import group

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections of a layer, as Hugging Face names them."""

DEFAULT_ROWS = 8
"""Rows in a micro-batch if neither the config nor a processor's cache decides."""

MOST_RANK = 512
"""Largest rank that vLLM's LoRA runtime serves (vllm/config/lora.py, 0.32)."""


@dataclass
@group("model.lora")
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685). A run with a rank above 0 trains adapters, and freezes all weights.

    The frozen weights are stored once, in model.compute_dtype, without gradients and optimizer moments. They are also
    the reference model of the KL term. A warm start still trains all weights, and the adapters begin after it.
    """

    # Rank of the adapters, 1 to 512; 0 is off: the run trains all weights.
    rank: int = field(0, ge=0, le=MOST_RANK, hint="0 trains all weights")
    alpha: float = field(32.0, gt=0)  # the product of an adapter is scaled by alpha / rank
    # Projections that get an adapter. With experts: q_proj, k_proj, v_proj and o_proj only, with sync=merge.
    targets: tuple[str, ...] = field(PROJECTIONS, choices=PROJECTIONS, nonempty=True, unique=True)
    # Numbers of the layers that get adapters, ascending from 0; empty: all layers.
    layers: tuple[int, ...] = field((), ge=0, ascending=True)
    # What a weight sync sends: adapter (the adapter alone, to vLLM's LoRA runtime; needs rollout.transport=memfd), or
    # merge (all weights, with the adapter added). With merge and rollout.dtype=bfloat16, the sum is rounded.
    sync: str = field("adapter", choices=("adapter", "merge"))
    path: str = field("", needs=("rank",))  # directory of a PEFT adapter to start from; empty: A is random and B is 0


@dataclass
@group("model")
class ModelConfig:
    """The policy. Set `path` for pretrained weights, or `preset` for random initial ones."""

    preset: str = "libra-tiny"  # name of a shipped config.json (libra_jax/models/presets), used where path is empty
    path: str = ""  # Hugging Face model directory (config.json, *.safetensors, tokenizer files), or an id on the hub
    # Dtype of activations and matrix products: float32 or bfloat16. On GPUs and TPUs float32 sets
    # jax_default_matmul_precision=highest, unless JAX_DEFAULT_MATMUL_PRECISION is set. By default products would take
    # TF32 or bfloat16 inputs, and the trainer's log-probabilities would differ from the engine's.
    compute_dtype: str = field("float32", choices=("float32", "bfloat16"))
    param_dtype: str = "float32"  # dtype of master weights and optimizer moments; only float32
    # Activations that the backward pass recomputes: none, dots (all but matmul outputs), full (all but the layers'
    # inputs), offload (like full, with the layers' inputs in the host's memory meanwhile).
    remat: str = field("none", choices=("none", "dots", "full", "offload"))
    # Kernel: chunked (any device), splash (TPU), cudnn (NVIDIA GPU, bfloat16; packed rows from Hopper on), or auto: the
    # device's own kernel where it can compute the rows, else chunked.
    attention: str = field("auto", choices=("auto", "chunked", "splash", "cudnn"))
    attention_chunk: int = field(512, gt=0)  # queries and keys of a block of the chunked online softmax
    # Tokens whose vocabulary logits are in memory at once, on each device. Each device loops over its own rows.
    logits_chunk: int = field(1024, gt=0)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check(
            self.param_dtype != "bfloat16",
            "model.param_dtype",
            "bfloat16 has 8 significant bits, so it rounds away every update below 1/512 of a weight: at a learning "
            "rate of 1e-6, 100 Adam steps move 2% of the weights; keep float32, and compute in bfloat16 "
            "(model.compute_dtype). To save memory raise trainer.fsdp",
        )
        check_choice(self.param_dtype, ("float32",), "model.param_dtype")


@dataclass
@group("trainer")
class TrainerConfig:
    """The trainer's mesh and the shapes it compiles for."""

    # JAX platform: auto (what JAX finds, at most one GPU), cpu (as many virtual devices as the mesh has), cuda, tpu.
    platform: str = field("auto", choices=("auto", "cpu", "cuda", "tpu"))
    # Number of trainer processes, with equal shares of the mesh; above 1 with cluster.backend=ray.
    processes: int = field(1, gt=0, needs=("cluster.backend", "ray"))
    data: int = field(1, gt=0)  # number of data-parallel replicas
    fsdp: int = field(1, gt=0)  # number of shards of parameters and optimizer
    tensor: int = field(1, gt=0)  # number of shards of a layer's matrices
    # Number of parts that the tokens of a row are split into (context parallelism), for rows too long for one device.
    # The state is split over fsdp x context. Row lengths must divide by context x tensor. Fastest if it divides the
    # query heads of a tensor shard.
    context: int = field(1, gt=0)
    row_tokens: int = field(512, gt=0)  # tokens of a packed row; a longer trajectory gets a longer row from row_buckets
    # Further row lengths in tokens, ascending, all above row_tokens. Their programs compile in the background from the
    # trainer's start on.
    row_buckets: tuple[int, ...] = ()
    # Rows in a micro-batch, over all data and fsdp shards. 0: with platform=cpu, what the processor's cache holds
    # (docs/guides/cpu.md), else 8, or the next multiple of the shards.
    rows_per_micro_batch: int = field(0, ge=0)
    # Dtype of the sums of gradients over micro-batches: float32, or bfloat16, which takes 2 bytes a parameter less and
    # rounds every sum.
    accumulation_dtype: str = field("float32", choices=("float32", "bfloat16"))
    # Begin of a step: off (on the whole batch), group (on each finished group, while others still roll out), or
    # micro_batch (on finished groups that fill a micro-batch). The update is the same, but for rounding.
    stream: str = field("off", choices=("off", "group", "micro_batch"))
    # Rollouts of one prompt in one row that computes the prompt once. Their attention is the chunked kernel's, which is
    # slower than cuDNN's by more than that saves: not for GPUs. On CPUs it gains where prompts are long.
    share_prompt: bool = False
    pack: bool = True  # several trajectories in a row, separated by segment ids
    # Huge pages for the memory of a trainer on CPUs (platform=cpu), from glibc's malloc. launch/train.py then starts
    # itself a second time, because malloc reads GLIBC_TUNABLES only at a program's start. False leaves malloc as it is.
    huge_pages: bool = True
    cores: tuple[int, ...] = ()  # CPU cores to which the trainer's threads are pinned; empty: not pinned
    # Share of each GPU's memory that JAX reserves at its start (CUDA). The rest is for CUDA's context, NCCL and the
    # buffers of weight sync. Lower it if another program uses the trainer's GPUs. XLA_CLIENT_MEM_FRACTION in the
    # environment wins. Hybrid workers reserve nothing, because an engine shares their GPUs.
    memory_fraction: float = field(0.9, gt=0, le=1)
    # Directory in which JAX keeps compiled programs for the next start, at most 16 GiB: auto (libra_jax/programs in
    # XDG_CACHE_HOME or ~/.cache on GPUs and TPUs, off on CPU), off, or a path. JAX_COMPILATION_CACHE_DIR wins. Its
    # files are code: no one else may write there.
    compilation_cache: str = field("auto", nonempty=True, hint="take auto, off or a path")
    # Peak FLOP/s of a device, for train/mfu. 0: of its hardware sheet (planning/costs/hardware.py). A device
    # without a sheet, such as a CPU, then has no train/mfu.
    peak_flops: float = field(0.0, ge=0)
    max_skipped_steps: int = 10  # non-finite steps in a row after which the run stops
    # Times that a lost trainer is restarted from the last checkpoint. Groups trained since that checkpoint stay in
    # memory (about 20 bytes a token, and with routing replay the bytes of its experts: docs/guides/experts.md) and are
    # trained again. With 0, or checkpoint.every=0, its loss ends the run. So it does if checkpoints have failed for
    # more than 4 times checkpoint.every steps: no more groups are kept.
    restarts: int = field(3, ge=0)

    def __post_init__(self) -> None:
        check(
            self.devices % self.processes == 0,
            "trainer.processes",
            f"the mesh's {self.devices} devices do not divide over {self.processes} processes; use "
            f"{divisors(self.devices, self.processes)}",
        )
        lengths = (self.row_tokens, *self.row_buckets)
        check(list(lengths) == sorted(set(lengths)), "trainer.row_buckets", "must ascend and exceed row_tokens")
        parts, named = self.context * self.tensor, f"tensor = {self.tensor}"
        if self.context > 1:
            named = f"context x tensor = {self.context} x {self.tensor}"
        # Of twice context, too: if context does not divide the model's heads, a device takes two parts of a row.
        fitting = math.lcm(parts, 2 * self.context) if self.context > 1 else parts
        for length in lengths:
            name = "row_tokens" if length == self.row_tokens else "row_buckets"
            other = ""
            if self.context > 1 and length % (2 * self.tensor) == 0:
                other = f", or a trainer.context of {divisors(length // (2 * self.tensor), self.context)}"
            check(
                length % parts == 0,
                f"trainer.{name}",
                f"{length} does not divide over {named}; use {-(-length // fitting) * fitting}, the next multiple of "
                f"{fitting}{other}",
            )
        shards, rows = self.data * self.fsdp, self.micro_batch_rows
        check(
            rows % shards == 0,
            "trainer.rows_per_micro_batch",
            f"{rows} does not divide over data x fsdp = {shards} shards; use {multiples(shards, rows)}, or a data x "
            f"fsdp of {divisors(rows, shards)}",
        )

    @property
    def micro_batch_rows(self) -> int:
        """Rows in a micro-batch: those of the setting, or 8 rounded up to the shards if it is 0."""
        shards = self.data * self.fsdp
        return self.rows_per_micro_batch or -(-DEFAULT_ROWS // shards) * shards

    @property
    def replica_devices(self) -> int:
        """Devices of one data-parallel replica."""
        return self.fsdp * self.tensor * self.context

    @property
    def devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.replica_devices


@dataclass
@group("warm_start")
class WarmStartConfig:
    """Supervised steps on the environment's demonstrations before reinforcement learning begins."""

    steps: int = field(0, ge=0)  # most supervised steps
    batch_size: int = field(64, gt=0)  # demonstrations of a step
    learning_rate: float = field(3e-3, ge=0)  # constant learning rate of the supervised steps
    target_loss: float = field(0.0, ge=0)  # mean token loss at which the warm start ends early; 0 is off
    # Arguments of task.source for demonstrations, instead of those in task.arguments: shorter or easier tasks.
    arguments: Mapping[str, Any] = field(default_factory=dict)
