"""Counts what a compiled program communicates, multiplies and keeps.

The counts are of one execution on one device. A loop whose number of iterations depends on the data counts as one
iteration for collectives, and its matrix products do not count: the chunked attention kernel has such loops. The loop
over tiles of experts (`models.experts`) counts as for experts that are taken equally often. What runs only if they are
taken very unequally does not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax.models import communication_bounds
from libra_jax.planning.compiled import hlo

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_DIMENSIONS = {
    "dot": re.compile(r"lhs_contracting_dims=\{([\d,]*)\}"),
    "custom-call": re.compile(r'"lhs_contracting_dimensions":\[([\d", ]*)\]'),
}
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->(\w+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')

EXPERTS = "expert_rows"
"""Part of the label of the loops over rows of experts (`models.experts.expert_rows.SCOPE`)."""

OVERFLOW = "expert_overflow"
"""Part of the label of what runs if the tokens of experts find no place (`models.experts.experts.OVERFLOW`)."""

GROUPED = "grouped_product"
"""Part of the label of a product of rows with their groups' matrices (`models.experts.grouped_products.SCOPE`)."""

SCALARS_PER_TOKEN = 4
"""Float32 numbers of each token that the vocabulary loop may sum over `tensor`: maximum, sum, target, entropy."""


@dataclass(frozen=True)
class Collective:
    """A collective operation of a program.

    Attributes:
      kind: XLA's name, such as "all-gather".
      axes: axes of the mesh that a group spans; empty for a permutation along no single axis.
      devices: devices of a group.
      span: devices from the first to the last of a group, counted along the mesh.
      executions: how often it runs.
      wire_bytes: bytes that a device sends in all executions, in a ring algorithm.
      in_vocabulary_loop: it stands in a loop that multiplies with a part of the vocabulary, and moves more than
        `SCALARS_PER_TOKEN` numbers of each token.
      label: path of the JAX operation that it comes from.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    span: int
    executions: float
    wire_bytes: float
    in_vocabulary_loop: bool
    label: str


@dataclass(frozen=True)
class Counts:
    """What one execution of a program does on one device.

    Attributes:
      collectives: collective operations, largest first.
      matmul_flops: operations of matrix products outside fused attention.
      attention_forward: executions of a fused attention kernel's forward pass.
      attention_backward: executions of its backward pass.
      data_dependent_loops: loops whose number of iterations the text does not give.
      vocabulary_arrays: arrays that hold logits of all of the device's tokens.
    """

    collectives: tuple[Collective, ...]
    matmul_flops: float
    attention_forward: float
    attention_backward: float
    data_dependent_loops: int
    vocabulary_arrays: tuple[str, ...]

    @property
    def vocabulary_collectives(self) -> tuple[Collective, ...]:
        """Collectives in the vocabulary loop."""
        return tuple(item for item in self.collectives if item.in_vocabulary_loop)


@dataclass(frozen=True)
class Sizes:
    """Sizes by which arrays are recognised.

    Attributes:
      mesh: size of each mesh axis, outermost first.
      vocabulary: rows of the embedding table.
      hidden: width of the model.
      tokens: tokens of a micro-batch on each device.
      logits_chunk: tokens whose logits exist at once.
      expert_iterations: expected iterations of the loop over rows of experts.
    """

    mesh: Mapping[str, int]
    vocabulary: int
    hidden: int
    tokens: int
    logits_chunk: int
    expert_iterations: float = 0.0

    @property
    def vocabulary_parts(self) -> set[int]:
        """Sizes that the vocabulary axis of an array may have on a device."""
        return {self.vocabulary, self.vocabulary // self.mesh.get("tensor", 1)}


def count(text: str, sizes: Sizes) -> Counts:
    """Counts what a program does.

    Args:
      text: the optimised HLO module.
      sizes: sizes of the micro-batch and the mesh.

    Raises:
      DataError: the text is no HLO module, or a collective's groups are written in an unknown form.
    """
    module = hlo.Module(text)
    unknown = {body for body, loop in module.loops.items() if not loop.has_trip_count}
    over_experts = {body for body in unknown if EXPERTS in module.loops[body].label}
    over_vocabulary: set[str] = set()
    flops = forward = backward = 0.0
    for place, instruction in module.instructions():
        operands = module.operands(place, instruction)
        target = _TARGET.search(instruction.attributes) if instruction.opcode == "custom-call" else None
        if target and (passes := _attention(target[1], instruction.label)) is not None:
            # Splash attention runs once for each of a device's rows, cuDNN's kernels once for all. Splash results are
            # [heads, tokens, head_dim]; the kernel's scratch space has two axes.
            splash = instruction.shapes if target[1] == "tpu_custom_call" else ()
            tokens = max((shape.sizes[1] for shape in splash if len(shape.sizes) == 3), default=math.inf)
            # Attention sees whole rows, of which `context` splits the tokens elsewhere.
            executions = place.executions * min(1.0, tokens / (sizes.tokens * sizes.mesh.get("context", 1)))
            forward += executions * passes[0]
            backward += executions * passes[1]
        product = _product_flops(instruction, operands)
        if product and place.loops:
            lengths = {size for shape in (*instruction.shapes, *operands) for size in shape.sizes}
            if lengths & sizes.vocabulary_parts:
                over_vocabulary.add(place.loops[-1])
        if OVERFLOW not in instruction.label and not (unknown - over_experts).intersection(place.loops):
            flops += product * place.executions * (sizes.expert_iterations if over_experts & {*place.loops} else 1.0)
    collectives = sorted(_collectives(module, sizes, over_vocabulary), key=lambda item: -item.wire_bytes)
    return Counts(tuple(collectives), flops, forward, backward, len(unknown), tuple(_logits(module, sizes)))


def _collectives(module: hlo.Module, sizes: Sizes, over_vocabulary: set[str]) -> Iterator[Collective]:
    devices = math.prod(sizes.mesh.values())
    scalars = SCALARS_PER_TOKEN * communication_bounds.SUM_BYTES * min(sizes.tokens, sizes.logits_chunk)
    for place, instruction in module.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _KINDS or OVERFLOW in instruction.label:
            continue
        # XLA's TPU compiler writes a reduce-scatter as a fusion of an all-reduce and the slice that a device keeps.
        if kind == "all-reduce" and place.computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        groups = hlo.device_groups(instruction, devices)
        widest = max(groups, key=len)
        width = len(widest)
        operand_bytes = sum(shape.bytes for shape in module.operands(place, instruction))
        # A gather's operands are a part of its result; those of every other kind are whole.
        factors = {
            "all-gather": width - 1.0,
            "all-reduce": 2 * communication_bounds.share(width),
            "collective-permute": 1.0,
        }
        bytes_per_execution = operand_bytes * factors.get(kind, communication_bounds.share(width))
        if width > 1 and bytes_per_execution > 0:
            small = kind == "all-reduce" and operand_bytes <= scalars
            # A group spans the axes along which the coordinates of its devices differ.
            coordinates = np.unravel_index(np.array(widest), tuple(sizes.mesh.values()))
            along = zip(sizes.mesh, coordinates, strict=True)
            yield Collective(
                kind=kind,
                axes=tuple(axis for axis, places in along if len(set(places.tolist())) > 1),
                devices=width,
                span=max(max(group) - min(group) + 1 for group in groups),
                executions=place.executions,
                wire_bytes=bytes_per_execution * place.executions,
                in_vocabulary_loop=bool(over_vocabulary.intersection(place.loops)) and not small,
                label=instruction.label,
            )


def _attention(target: str, label: str) -> tuple[float, float] | None:
    """Returns how many forward and backward passes of attention a fused kernel computes; None if it is another kernel.

    cuDNN's kernels have targets of their own. Every Pallas kernel on TPU has the same target, so there the label
    counts; a backward pass of two kernels counts by its kernel of keys and values.
    """
    if "fmha" in target:
        return (0.0, 1.0) if "Backward" in target else (1.0, 0.0)
    if target == "tpu_custom_call" and "splash" in label:
        if "dq" in label.rsplit("splash", 1)[1] and "dkv" not in label:
            return 0.0, 0.0
        return (0.0, 1.0) if "dkv" in label else (1.0, 0.0)
    return None


def _product_flops(instruction: hlo.Instruction, operands: Sequence[hlo.ArrayShape]) -> float:
    """Returns the operations of one matrix product; 0 for other instructions."""
    if not operands or not instruction.shapes:
        return 0.0
    result = instruction.shapes[0]
    if instruction.opcode == "convolution":  # XLA writes matrix products for TPUs as convolutions
        labels = _LABELS.search(instruction.attributes)
        if labels is None or len(operands) < 2:
            return 0.0
        kernel, output = labels[1], labels[2]
        sizes = operands[1].sizes
        flops = 2.0 * result.elements * sizes[kernel.index("i")]
        for label in kernel:
            # A spatial axis of the kernel is contracted where the output has only one position of it.
            if label.isdigit() and (label not in output or result.sizes[output.index(label)] == 1):
                flops *= sizes[kernel.index(label)]
        return flops
    if instruction.opcode == "custom-call" and GROUPED in instruction.label:
        # The rows of both factors, or of the one and the result, come first; all else is one matrix of a group.
        rows = max(shape.sizes[0] for shape in operands if len(shape.sizes) == 2)
        widths = max((shape.sizes[1:] for shape in (*operands, result) if len(shape.sizes) == 3), default=())
        return 2.0 * rows * math.prod(widths)
    pattern = _DIMENSIONS.get(instruction.opcode)
    match = pattern.search(instruction.attributes) if pattern else None
    if match is None:
        return 0.0
    contracted = [int(part) for part in re.findall(r"\d+", match[1])]
    return 2.0 * result.elements * math.prod(operands[0].sizes[index] for index in contracted)


def _logits(module: hlo.Module, sizes: Sizes) -> Iterator[str]:
    """Yields arrays in memory with a column of the vocabulary for each of the device's tokens. What stands inside a
    fusion is never in memory."""
    for place, instruction in module.instructions():
        if place.computation in module.fused:
            continue
        for shape in instruction.shapes:
            parts = sizes.vocabulary_parts & set(shape.sizes)
            # A table and its gradient have the vocabulary and the model's width, or a part of each.
            other_sizes = [size for size in shape.sizes if size > 1 and size not in parts]
            table = len(other_sizes) == 1 and sizes.hidden % other_sizes[0] == 0
            if not table and any(sizes.tokens <= shape.elements // part for part in parts):
                yield f"{shape.dtype}{list(shape.sizes)} {instruction.label}"
