"""Compiles a config's training programs for accelerators, and says whether they fit and what they would reach.

No accelerator and no weights are needed, only the compilers (`bash launch/setup.sh --accelerators`). What happens if
this config starts on H100s?

  python launch/compile.py --config=configs/qwen3_1p7b_8gpu.py --target=h100

And Qwen3-8B over 64 of them, 8 hosts of 8?

  python launch/compile.py --config=configs/qwen3_1p7b_8gpu.py --target=h100 --topology=8x8 \\
    --config.model.path="" --config.model.preset=Qwen3-8B --config.trainer.fsdp=64 \\
    --config.trainer.rows_per_micro_batch=64 --json=runs/compiled.json

A config that does not fit is refused with settings that do, each of them compiled. --json writes a file for
planner.compiled. The kernels' speed is not known without an accelerator: expected MFU is an estimate from the counted
operations and bytes (docs/guides/compile.md).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from support import cli, overrides

from absl import flags
from ml_collections import config_flags
from rich import console, table

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import fitting
from libra_jax.cluster import resolved_run
from libra_jax.models import communication_bounds
from libra_jax.models import config as model_config
from libra_jax.planning.compiled import programs
from libra_jax.planning.costs import hardware, memory

TARGETS = ("h100", "v6e")

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run's config file.", lock_config=True)
_TARGET = flags.DEFINE_enum("target", "h100", TARGETS, "Accelerator to compile for.")
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Hosts x GPUs of a host (2x8), or a TPU slice's grid (2x4). Default: the smallest that suffices."
)
_JSON = flags.DEFINE_string("json", None, "File to write what was counted to, for planner.compiled.")
_HLO = flags.DEFINE_string("hlo", None, "Folder to write the compiled programs' text to, a file a program.")


def main() -> None:
    config: config_lib.RunConfig = _CONFIG.value
    # The planner's own formulas are compared with what is compiled.
    config = dataclasses.replace(config, planner=dataclasses.replace(config.planner, compiled=""))
    shape = resolved_run.resolve(config, need_weights=False).shape
    if shape is None:
        raise protocols.ConfigError(
            f"config.model.path: {config.model.path} does not exist here; set model.preset to the shape to compile"
        )
    named = config.model.path
    given = overrides.fields(flags.FLAGS["config"])
    if named and not Path(named).exists() and "model.path" in given and "model.preset" not in given:
        raise protocols.ConfigError(
            f"config.model.path: {named} does not exist here, and config.model.preset is {config.model.preset}; set "
            "model.preset to the shape to compile, or model.path to a folder with a config.json"
        )
    outputs = [Path(name) for name in (_JSON.value,) if name is not None]
    for output in outputs:
        cli.check_output(output)
    grid = None
    if _TOPOLOGY.value is not None:
        sizes = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", _TOPOLOGY.value)
        if sizes is None:
            raise protocols.ConfigError(f"--topology: {_TOPOLOGY.value!r} is no topology; one looks like 2x8")
        grid = int(sizes[1]), int(sizes[2])
        _tell_unused(grid, config.trainer)
    case, text = _compiled(config, shape, grid)
    for output in outputs:
        programs.write(output, [case])
    if _HLO.value is not None:
        folder = Path(_HLO.value)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, program in text.items():
                (folder / f"{name}.hlo").write_text(program)
        except OSError as error:
            raise protocols.DataError(f"--hlo: {folder} cannot be written ({error.strerror or error})") from error
    room = hardware.sheet(case.target).memory_bytes * config.trainer.memory_fraction
    _print(case, config, shape, room)
    if case.memory_bytes > room:
        _refuse(case, config, shape, room)
    for output in outputs:
        print(f"wrote {output}")


def _tell_unused(grid: tuple[int, int], trainer: config_lib.TrainerConfig) -> None:
    """Says which devices of a topology the mesh uses, if there are more of them than the mesh has."""
    total, used = math.prod(grid), trainer.devices
    if total > used:
        print(
            f"note: --topology={grid[0]}x{grid[1]} has {total:,} devices, and the mesh uses the first {used:,} of "
            "them; trainer.data, trainer.fsdp and trainer.tensor set its size.",
            flush=True,
        )


def _compiled(
    config: config_lib.RunConfig,
    shape: model_config.TransformerConfig,
    grid: tuple[int, int] | None,
    names: Sequence[str] = (),
) -> tuple[programs.CompiledCase, dict[str, str]]:
    # A GPU of this machine would be initialised by the first computation, and its memory taken.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Imported here, because --help and a wrong flag need no JAX.
    from libra_jax.training import compiling, topology

    devices = topology.devices(_TARGET.value, config.trainer.devices, grid)
    text: dict[str, str] = {}
    return compiling.case(config, shape, devices, _TARGET.value, names or compiling.ALL, text), text


def _print(
    case: programs.CompiledCase, config: config_lib.RunConfig, shape: model_config.TransformerConfig, room: float
) -> None:
    gradient, foreseen = case.gradient, programs.expected(case, shape)
    bound = communication_bounds.volumes(shape, *case.mesh, case.columns, case.context)
    moved = gradient.wire_bytes
    slow, fast = foreseen.mfu
    mesh = f"data {case.data} x fsdp {case.fsdp} x tensor {case.tensor}"
    mesh += f" x context {case.context}" if case.context > 1 else ""
    rows = table.Table("a device", f"{case.target}, {mesh}", show_header=True)
    grid = f" of the {_TOPOLOGY.value}" if _TOPOLOGY.value else ""
    rollout = sum(config.rollout.tensor_parallel)
    rows.add_row("devices", f"{config.trainer.devices} train{grid}; {rollout} more for rollout, not compiled here")
    path = config.model.path
    elsewhere = f": {path} is not here" if path and not Path(path).exists() else ""
    rows.add_row("parameters", f"{case.parameters / 1e9:.2f} billion ({case.model}{elsewhere})")
    rows.add_row("micro-batch", f"{case.rows} rows x {case.row_tokens:,} tokens over all devices, remat {case.remat}")
    fits = "fits" if case.memory_bytes <= room else "DOES NOT FIT"
    rows.add_row("memory", f"{case.memory_bytes / 1e9:.1f} GB of {room / 1e9:.1f} usable: {fits}")
    rows.add_row("  state", f"{case.state_bytes / 1e9:.1f} GB: parameters, optimizer, reference model")
    if config.optimizer.offload:
        rows.add_row("", "the moments, too: without a device, the compiler knows no host memory (optimizer.offload)")
    rows.add_row("  sums", f"{case.largest.argument_bytes / 1e9:.1f} GB: sums of gradients, and the micro-batch")
    for name, program in case.programs.items():
        rows.add_row(f"  {name}", f"{program.temporary_bytes / 1e9:.1f} GB of temporaries")
    rows.add_row("  by formula", _formula(memory.trainer_bytes(config, shape), case.memory_bytes))
    ratio = f"{moved / bound.total:.2f} x" if bound.total else "one device has none:"
    rows.add_row("communication", f"{moved / 1e9:.2f} GB a micro-batch, {ratio} the least possible")
    for item in sorted(gradient.traffic, key=lambda item: -item.wire_bytes):
        if item.wire_bytes >= 1e-3 * moved:
            over = " x ".join(item.axes) or "other devices"
            rows.add_row(f"  over {over}", f"{item.wire_bytes / 1e9:.2f} GB in {item.executions:,.0f} collectives")
    rows.add_row("  by formula", _formula(memory.wire_bytes(config, shape), moved))
    rows.add_row("FLOPs", f"{foreseen.executed_flops / foreseen.model_flops:.2f} x (6ND + attention)")
    attention = "chunked loop" if gradient.data_dependent_loops else "one dense block"
    if gradient.attention_forward:
        passes = f"{gradient.attention_forward:.0f} forward, {gradient.attention_backward:.0f} backward"
        attention = f"fused kernel, {passes} a micro-batch"
    rows.add_row("attention", attention)
    rows.add_row("vocabulary loop", f"{len(gradient.vocabulary_collectives)} collectives in it")
    rows.add_row("logits of all tokens", f"{len(gradient.vocabulary_arrays)} arrays")
    rows.add_row("expected MFU", f"{slow:.0%} to {fast:.0%}: no or all communication behind arithmetic")
    each = foreseen.communication_seconds, foreseen.arithmetic_seconds
    rows.add_row("  seconds", f"{each[1]:.3f} arithmetic, {each[0]:.3f} communication a micro-batch")
    compiling = ", ".join(f"{name} {program.compile_seconds:.0f} s" for name, program in case.programs.items())
    rows.add_row("compiled in", compiling)
    console.Console().print(rows)


def _formula(predicted: float, counted: float) -> str:
    """Describes a prediction of the planner's."""
    off = f", {predicted / counted - 1:+.0%}" if counted else ""
    return f"{predicted / 1e9:.2f} GB{off}: the planner's without --config.planner.compiled"


def _refuse(
    case: programs.CompiledCase, config: config_lib.RunConfig, shape: model_config.TransformerConfig, room: float
) -> None:
    """Raises the error of a config that does not fit, with settings that do."""
    print("Looking for settings that fit ...", flush=True)

    def tell(setting: fitting.FittedSetting, needed: float) -> None:
        # Each takes up to a minute, so a search that is interrupted has shown what it found.
        fits = "fits" if needed <= room else "does not fit"
        print(f"  {fits}: {setting.flags} ({needed / 1e9:.1f} GB)", flush=True)

    found = fitting.search(
        config,
        shape,
        case.memory_bytes,
        room,
        lambda other: _compiled(other, shape, None, ("policy", "apply"))[0].memory_bytes,
        tell,
    )
    said = "; ".join(
        f"{setting.flags} ({needed / 1e9:.1f} GB, {setting.config.trainer.devices} training devices)"
        for setting, needed in found
    )
    parts = (
        f"{case.state_bytes / 1e9:.1f} GB are state, {case.largest.argument_bytes / 1e9:.1f} GB sums of gradients and "
        f"{case.largest.temporary_bytes / 1e9:.1f} GB temporaries of {case.largest.name}"
    )
    raise protocols.ConfigError(
        f"config.trainer: a device needs {case.memory_bytes / 1e9:.1f} GB ({parts}) and has "
        f"{room / 1e9:.1f} usable; these fit: {said or 'none of the settings tried; take more devices'}"
    )


if __name__ == "__main__":
    cli.run(main, needs_config=True, interrupted="interrupted; settings listed above as fitting were compiled.")
