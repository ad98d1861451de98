"""A training step's compiled programs as the planner reads them: memory, communication, arithmetic, and expected MFU.

`launch/compile.py --json=FILE` writes the file; `planner.compiled=FILE` makes plans take the memory and communication
of its mesh from it instead of from the planner's formulas.

Expected MFU is model FLOPs (6ND + attention, `costs.train_flops`) over a micro-batch's seconds and the peak rate. The
seconds have two bounds. With arithmetic A = executed FLOPs / (MATMUL_SHARE x peak), and communication C = the sum of
wire bytes / bandwidth over all collectives, a micro-batch takes between max(A, C), if all communication hides behind
arithmetic, and A + C, if none does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.planning.compiled import compiled
from libra_jax.planning.costs import costs, hardware

MATMUL_SHARE = 0.6
"""Share of peak that large bfloat16 products and fused attention reach. FlashAttention-3 (arXiv 2407.08608, section
4.1) measures 0.4 to 0.6 on an H100 for causal backward passes, and cuBLAS 0.6 to 0.7."""


@dataclass(frozen=True)
class Traffic:
    """Wire bytes of a device over one set of mesh axes.

    Attributes:
      span: devices from the first to the last of a group, counted along the mesh.
      executions: number of collectives that run.
      wire_bytes: bytes that a device sends.
    """

    axes: tuple[str, ...]
    span: int
    executions: float
    wire_bytes: float


@dataclass(frozen=True)
class Program:
    """One compiled program, counted on one device and for one execution.

    Attributes:
      argument_bytes: bytes of the arguments.
      temporary_bytes: bytes that it needs beside the arguments, results that reuse no argument's buffer included.
      traffic: communication by axes.
      matmul_flops: operations of matrix products outside fused attention.
      attention_forward: executions of a fused attention kernel's forward pass.
      attention_backward: executions of its backward pass.
      data_dependent_loops: loops of the chunked attention kernel.
      vocabulary_collectives: collectives in the loop over the vocabulary that move more than a few numbers a token.
      vocabulary_arrays: arrays that hold logits of all of the device's tokens.
      compile_seconds: seconds of tracing and compiling.
    """

    argument_bytes: float
    temporary_bytes: float
    traffic: tuple[Traffic, ...]
    matmul_flops: float
    attention_forward: float
    attention_backward: float
    data_dependent_loops: int
    vocabulary_collectives: tuple[str, ...]
    vocabulary_arrays: tuple[str, ...]
    compile_seconds: float

    @classmethod
    def counted(
        cls, counts: compiled.Counts, argument_bytes: float, temporary_bytes: float, compile_seconds: float
    ) -> Program:
        """Returns a program's record from its counts."""
        by_axes: dict[tuple[tuple[str, ...], int], tuple[float, float]] = {}
        for item in counts.collectives:
            executions, sent = by_axes.get((item.axes, item.span), (0.0, 0.0))
            by_axes[item.axes, item.span] = executions + item.executions, sent + item.wire_bytes
        return cls(
            argument_bytes=argument_bytes,
            temporary_bytes=temporary_bytes,
            traffic=tuple(Traffic(*key, *value) for key, value in by_axes.items()),
            matmul_flops=counts.matmul_flops,
            attention_forward=counts.attention_forward,
            attention_backward=counts.attention_backward,
            data_dependent_loops=counts.data_dependent_loops,
            vocabulary_collectives=tuple(
                f"{item.kind} over {' and '.join(item.axes)}, {item.executions:.0f} times, "
                f"{item.wire_bytes / 1e9:.3f} GB: {item.label}"
                for item in counts.vocabulary_collectives
            ),
            vocabulary_arrays=counts.vocabulary_arrays,
            compile_seconds=compile_seconds,
        )

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends."""
        return sum(item.wire_bytes for item in self.traffic)


@dataclass(frozen=True)
class Added:
    """What a program adds to the state of a device.

    Attributes:
      argument_bytes: bytes of its arguments outside the state: sums of gradients, and a micro-batch.
      temporary_bytes: bytes of its temporaries.
    """

    name: str
    argument_bytes: float
    temporary_bytes: float


@dataclass(frozen=True)
class CompiledCase:
    """What was compiled, and its programs.

    Attributes:
      parameters: its parameters.
      target: name of the accelerator's hardware sheet.
      data: replicas.
      fsdp: ways that the state is sharded.
      tensor: ways that a layer's matrices are split.
      rows: rows of a micro-batch, over all shards.
      packed: several sequences share a row.
      remat: what the backward pass computes again.
      state_bytes: bytes of parameters, optimizer and reference model on a device.
      parameter_bytes: bytes of the parameters alone.
      programs: the compiled programs by name: "policy" is the gradient of a micro-batch; "apply"; "score".
      reference: the state holds a frozen reference model.
      context: ways that the tokens of a row are split.
      adapter_parameters: parameters of the adapter, on frozen weights; 0 without one.
    """

    model: str
    parameters: int
    target: str
    data: int
    fsdp: int
    tensor: int
    rows: int
    row_tokens: int
    packed: bool
    remat: str
    state_bytes: float
    parameter_bytes: float
    programs: Mapping[str, Program]
    reference: bool = False
    context: int = 1
    adapter_parameters: int = 0

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Sizes of data, fsdp and tensor."""
        return self.data, self.fsdp, self.tensor

    @property
    def gradient(self) -> Program:
        """The program that runs once a micro-batch."""
        return self.programs["policy"]

    @property
    def columns(self) -> int:
        """Tokens of a micro-batch on each data, fsdp and context shard."""
        return self.rows // (self.data * self.fsdp) * self.row_tokens // self.context

    @property
    def memory_bytes(self) -> float:
        """Largest number of bytes that a device holds at once: the state, and what the largest program adds."""
        return self.state_bytes + self.largest.argument_bytes + self.largest.temporary_bytes

    @property
    def largest(self) -> Added:
        """What the program adds that adds most to the state."""
        additions = []
        for name, program in self.programs.items():
            # An update takes the whole state as arguments; the other programs take the parameters alone.
            state_arguments = self.state_bytes if name == "apply" else self.parameter_bytes
            additions.append(Added(name, max(0.0, program.argument_bytes - state_arguments), program.temporary_bytes))
        return max(additions, key=lambda one: one.argument_bytes + one.temporary_bytes)

    def communication_seconds(
        self,
        sheet: hardware.HardwareSheet,
        coefficients: costs.Coefficients,
        *,
        over_tensor: bool,
        program: str = "policy",
    ) -> float:
        """Returns the seconds of a program's collectives, one after another.

        Args:
          coefficients: shares of its bandwidths that collectives reach.
          over_tensor: only collectives over `tensor`; else only all others.
          program: name of the program.
        """
        return sum(
            item.wire_bytes
            / sheet.collective_rate(item.span, coefficients.large_message_share, coefficients.network_share)
            + item.executions * coefficients.large_message_latency
            for item in self.programs[program].traffic
            if ("tensor" in item.axes) == over_tensor
        )


@dataclass(frozen=True)
class Expected:
    """What is expected of a compiled micro-batch; see the module's docstring.

    Attributes:
      model_flops: 6ND + attention of a device's tokens.
      executed_flops: operations that the device executes, rematerialisation included.
      recomputed_flops: operations that the settings make it execute twice: the projection onto the vocabulary, whose
        logits are never kept, and with remat "full" the layers' forward pass.
      arithmetic_seconds: A.
      communication_seconds: C.
      peak_flops: peak operations a second of a device.
    """

    model_flops: float
    executed_flops: float
    recomputed_flops: float
    arithmetic_seconds: float
    communication_seconds: float
    peak_flops: float

    @property
    def mfu(self) -> tuple[float, float]:
        """Model FLOP/s over peak FLOP/s if no communication hides behind arithmetic, and if all does."""
        ideal = self.model_flops / self.peak_flops
        arithmetic, communication = self.arithmetic_seconds, self.communication_seconds
        return ideal / (arithmetic + communication), ideal / max(arithmetic, communication)


def expected(
    case: CompiledCase, shape: model_config.TransformerConfig, coefficients: costs.Coefficients | None = None
) -> Expected:
    """Returns what is expected of a micro-batch of full rows of one sequence each."""
    coefficients, sheet = coefficients or costs.Coefficients(), hardware.sheet(case.target)
    rows = case.rows // (case.data * case.fsdp)
    # A layer's causal attention in the forward pass; the backward pass has twice as much.
    parts = case.tensor * case.context  # `context` splits attention by heads or evenly by queries, all else by tokens
    attention = rows * 2.0 * shape.num_heads * shape.head_dim * case.row_tokens**2 / parts
    sequences = [case.row_tokens] * rows
    model = costs.train_flops(shape, model_config.multiplied_parameter_count(shape), sequences) / parts
    head = 2.0 * shape.vocab_size * shape.hidden_size * rows * case.row_tokens / parts
    layers = model / 3 - head
    executed = case.gradient.matmul_flops
    if case.gradient.attention_forward:
        executed += attention * (case.gradient.attention_forward + 2 * case.gradient.attention_backward)
    elif case.gradient.data_dependent_loops:
        # The chunked kernel's loops end where a row's segments do, so their products are counted by formula.
        executed += attention * shape.num_layers * (4 if case.remat in ("full", "offload") else 3)
    return Expected(
        model_flops=model,
        executed_flops=executed,
        recomputed_flops=head + (layers if case.remat in ("full", "offload") else 0.0),
        arithmetic_seconds=executed / (MATMUL_SHARE * sheet.flops),
        communication_seconds=sum(
            case.communication_seconds(sheet, coefficients, over_tensor=over_tensor) for over_tensor in (False, True)
        ),
        peak_flops=sheet.flops,
    )


def write(file: Path, cases: Sequence[CompiledCase]) -> None:
    """Writes cases as JSON. Raises DataError if the file cannot be written."""
    try:
        file.write_text(json.dumps({"cases": [dataclasses.asdict(case) for case in cases]}, indent=2) + "\n")
    except OSError as error:
        raise protocols.DataError(f"{file} cannot be written ({error.strerror or error})") from error


def read(file: Path, field: str = "planner.compiled") -> tuple[CompiledCase, ...]:
    """Reads the cases of a file of `write`.

    Args:
      field: config field that names it.

    Raises:
      ConfigError: the file is missing, or is no file of `launch/compile.py`.
    """
    try:
        cases = []
        for values in json.loads(file.read_text())["cases"]:
            if not isinstance(values["programs"], dict) or "policy" not in values["programs"]:
                raise ValueError("a case has no program named policy")
            programs = {}
            for name, item in values["programs"].items():
                # JSON has lists where a program has tuples.
                lists = {field: tuple(value) for field, value in item.items() if isinstance(value, list)}
                lists["traffic"] = tuple(Traffic(**{**part, "axes": tuple(part["axes"])}) for part in item["traffic"])
                programs[name] = Program(**{**item, **lists})
            cases.append(CompiledCase(**{**values, "programs": programs}))
        return tuple(cases)
    except OSError as error:
        raise protocols.ConfigError(f"config.{field}: {file} cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise protocols.ConfigError(
            f"config.{field}: {file} was not written by launch/compile.py --json ({type(error).__name__}: {error})"
        ) from error
