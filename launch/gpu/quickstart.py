"""Runs a few steps of the quickstart with trainer and engine on one GPU, if vLLM is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from gpu import rows
from libra_jax import parent_death, protocols

STEPS = 3
DEADLINE_SECONDS = 540.0
END_SECONDS = 30.0
FRACTION = 0.3
"""Share of the GPU's memory for the trainer, and for the engine."""

REPOSITORY = Path(__file__).resolve().parents[2]


def measure(bench: rows.Bench) -> rows.Outcome:
    """Trains some steps. The shipped config is for CPU; flags put both sides on the first GPU."""
    if bench.tiny:
        raise rows.LeftOut("it is for a GPU; bash launch/quickstart.sh runs it on CPU")
    # Looks, and imports nothing.
    if importlib.util.find_spec("vllm") is None:
        raise rows.LeftOut("vllm is not installed")
    workdir = Path(bench.scratch) / "quickstart"
    command = [
        sys.executable,
        str(REPOSITORY / "launch" / "train.py"),
        f"--config={REPOSITORY / 'configs' / 'quickstart.py'}",
        f"--workdir={workdir}",
        # The trainer and the engine share the first GPU.
        "--config.trainer.platform=auto",
        f"--config.rollout.gpu_memory_fraction={FRACTION}",
        f"--config.steps={STEPS}",
        "--config.warm_start.steps=20",
        "--config.evaluation.every=0",
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = {
        **{name: value for name, value in os.environ.items() if "MEM_FRACTION" not in name},
        "JAX_PLATFORMS": "cuda,cpu",
        "CUDA_VISIBLE_DEVICES": visible,
        "XLA_CLIENT_MEM_FRACTION": str(FRACTION),
    }
    said = _run(command, environment)
    lines = (workdir / "metrics.jsonl").read_text().splitlines() if (workdir / "metrics.jsonl").exists() else []
    steps = [json.loads(line) for line in lines]
    if len(steps) < STEPS:
        raise protocols.LibraError(f"{len(steps)} of {STEPS} steps were trained; its last words: {said}")
    last = steps[-1]
    shown = ("reward/mean", "mismatch/kl", "mismatch/ratio_max", "rollout/seconds", "train/seconds", "sync/seconds")
    return rows.Outcome({name.replace("/", "_"): last[name] for name in shown if name in last} | {"steps": len(steps)})


def _run(command: list[str], environment: dict[str, str]) -> str:
    """Runs a command to its end, and returns its last words. SIGTERM ends it in order if it takes too long."""
    process = subprocess.Popen(
        parent_death.command(command),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            said, _ = process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate(timeout=END_SECONDS)
    return " ".join(said.split())[-300:]
