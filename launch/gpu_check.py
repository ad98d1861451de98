"""Measures on a GPU what a run needs of it: kernels, training speed, weight sync, real vLLM, and whole runs.

One command for all, about 27 minutes on an H100, and one for what needs vLLM. docs/results/gpu.md shows how to bring
vLLM to a machine without it; all other cases need torch, jax, flax, optax and orbax alone.

  python launch/gpu_check.py --platform=gpu --minutes=30 --output=runs/gpu_check.json

  attention    the platform's kernel against plain attention: results and gradients, packed rows, empty rows
  experts      the platform's way to compute experts, against all tokens times all experts
  dlpack       arrays from JAX to torch and back without a copy
  weight_sync  weights to a second process, over a plain copy of their bytes
  vocabulary   the loop over the vocabulary, as a share of what matrix products reach
  reshard      a train state to another mesh and back
  offload      parameters to the host's memory and back
  checkpoint   a train state to disk and back
  grad_step    MFU of Qwen3 0.6B, 1.7B and 4B at 8k, 32k and 64k tokens, and of 30B-A3B at 8k, random weights
  train_step   whole steps over long-tailed trajectories: packing, gradients, Adam
  prompt       the same with long prompts, computed once a group or for each rollout
  peer         MFU of transformers' model in torch on the same rows, if transformers is installed
  decode       matrix products of a decode step of Qwen3-14B: share of the memory's bandwidth, and time a layer
  engine       real vLLM: start, log-probs against transformers, weight sync, pause with 64 requests, sleep mode
  quickstart   the quickstart with trainer and engine on one GPU; the reward must rise
  run          0.6B and 1.7B with random weights, 32 prompts of 8 rollouts, staleness 0 and 1: where the time goes
  routing      C-MLFQ over two engines on one GPU

A case that fails does not end the others: it gets a row with a sentence, and the exit status is 1. Cases that no longer
fit into --minutes are left out. The JSON has all figures, the Markdown beside it their tables, and an archive for each
whole run its records. On a machine without a GPU it is a dry run with tiny sizes (--platform=cpu).
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support import cli

from absl import flags

from gpu import cases, rows, runner, worker
from libra_jax import protocols

_PLATFORM = flags.DEFINE_enum("platform", None, ("cpu", "gpu"), "Where to measure. Default: what JAX finds.")
_OUTPUT = flags.DEFINE_string("output", "runs/gpu_check.json", "File for the JSON; the tables lie beside it, as .md.")
_MINUTES = flags.DEFINE_float(
    "minutes", 8.0, "Budget, at least 1; cases that no longer fit are left out.", lower_bound=1.0
)
_TRACES = flags.DEFINE_string("traces", "", "Folder for profiles of one training step a case of grad_step.")
_CASES = flags.DEFINE_list("cases", [], "Cases or groups to measure. Default: all.")

MEMORY_FRACTION = "0.85"
"""Share of the GPU's memory that JAX reserves. The rest is for torch, here and in the second process."""

CPU_DEVICES = "4"
"""Devices of a dry run, so that a mesh can change."""


def main() -> int:
    chosen = cases.chosen(_CASES.value)
    output = Path(_OUTPUT.value)
    cli.check_output(output)
    if output.suffix == ".md":
        raise protocols.ConfigError(
            f"--output: {output} is the name of the tables, which lie beside the JSON; use .json"
        )
    # Otherwise SIGTERM would leave the scratch folder, and processes on the GPU.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    worker.adopt_orphans()
    # Beside the output, so that a checkpoint is measured on its disk.
    with tempfile.TemporaryDirectory(prefix=".gpu_check-", dir=output.parent) as scratch:
        running = runner.Runner(60.0 * _MINUTES.value, _environment(_PLATFORM.value), scratch)
        try:
            report = _measured(running, chosen)
            running.end()
        finally:
            # Finds no worker after `end`. After an error or SIGTERM, it must not outlive the scratch folder.
            running.abort()
    tables = rows.write(report, output)
    count = {state: sum(row.state == state for row in report.rows) for state in ("passed", "failed", "left out")}
    told = ", ".join(f"{number} {state}" for state, number in count.items() if number)
    print(f"{told} in {report.seconds:.0f} s; wrote {output} and {tables}")
    return cli.FAILED if report.failed else 0


def _measured(running: runner.Runner, chosen: list[cases.Case]) -> rows.Report:
    fix = "install JAX for it (bash launch/setup.sh --cuda), or use --platform=cpu, a dry run"
    try:
        machine = running.machine()
    except runner.NoDevice as error:
        raise protocols.ConfigError(f"--platform: {error}; {fix}") from error
    if machine.platform not in ("cpu", "gpu") or _PLATFORM.value not in (None, machine.platform):
        raise protocols.ConfigError(
            f"--platform: JAX finds no {_PLATFORM.value or 'GPU'} device here, only {machine.platform}; {fix}"
        )
    print(f"{machine.devices} x {machine.device}" + (": a dry run, tiny sizes" if machine.platform == "cpu" else ""))
    found = []
    for row in running.run(chosen, machine.platform, _TRACES.value, str(Path(_OUTPUT.value).resolve().parent)):
        found.append(row)
        figures = ", ".join(f"{name.replace('_', ' ')} {rows.text(value)}" for name, value in row.figures.items())
        said = f"{row.case}: {row.state} in {row.seconds:.1f} s" + (f": {row.reason}" if row.reason else "")
        print(f"[{running.seconds:4.0f} s] {said}" + (f" ({figures})" if figures else ""), flush=True)
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return rows.Report(machine, command, _MINUTES.value, running.seconds, found)


def _environment(platform: str | None) -> Mapping[str, str]:
    """Returns the variables of the process in which JAX runs. What the user has set stays."""
    wanted = {"JAX_NUM_CPU_DEVICES": CPU_DEVICES, "TF_CPP_MIN_LOG_LEVEL": "1"}
    # JAX refuses to start if its old and its new name are both set.
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & set(os.environ):
        wanted["XLA_CLIENT_MEM_FRACTION"] = MEMORY_FRACTION
    if platform == "gpu":
        wanted["JAX_PLATFORMS"] = "cuda,cpu"
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    # The flag wins over the environment.
    return wanted | ({"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {})


if __name__ == "__main__":
    cli.run(main)
