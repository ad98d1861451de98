"""Whole runs of `launch/train.py` on one GPU, with real vLLM: the quickstart, and shapes with random weights.

Each run leaves an archive of its metrics, timeline and logs beside the results. In a dry run, the engine is vLLM's CPU
build, or the double of an engine where no vLLM is installed.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu import random_text, rows
from libra_jax import protocols
from libra_jax.models import config as model_config
from libra_jax.telemetry import metrics
from libra_jax.utils import parent_death

DEADLINE_SECONDS = 130.0
"""Deadline of a run in seconds, below that of every case, so that a run that hangs leaves its logs."""

DRY_PATIENCE = 4.0
"""Factor on the deadline in a dry run, because other work may share its few cores."""

END_SECONDS = 10.0
TRAINER_FRACTION = 0.45
"""Share of the GPU's memory for the trainer. The engine's share is a setting of each run."""

QUICKSTART_STEPS = 30
RISE = 0.1
"""Least rise of the quickstart's reward from its first five steps to its last five. Seeds rise by 0.4 in 50 steps."""

ARCHIVE_BYTES = 16 * 2**20
"""Most bytes of a run's archive; a larger timeline stays out of it."""

REPOSITORY = Path(__file__).resolve().parents[2]

SHOWN = (
    "step/seconds",
    "rollout/seconds",
    "train/seconds",
    "sync/seconds",
    "tokens_per_second",
    "train/tokens_per_second",
    "train/mfu",
    "tokens/mean",
    "staleness/max",
    "mismatch/kl",
    "mismatch/ratio_max",
    "routing/moves",
)
"""Metrics of a row: medians over the steps after the first, which compiles."""


def quickstart(bench: rows.Bench) -> rows.Outcome:
    """Trains the quickstart with trainer and engine on one GPU; the reward must rise."""
    flags = [f"--config={REPOSITORY / 'configs' / 'quickstart.py'}", "--config.evaluation.every=0"]
    if bench.tiny:
        flags += ["--config.steps=2", "--config.warm_start.steps=2", "--config.coordinator.groups_per_step=2"]
    else:
        flags += [f"--config.steps={QUICKSTART_STEPS}", *_one_gpu(0.3)]
    steps = _train(bench, "quickstart", flags)
    rewards = [float(step["reward/mean"]) for step in steps]
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    figures = {**_figures(steps), "reward_first": first, "reward_last": last}
    rose = bench.tiny or last >= first + RISE
    return rows.Outcome(figures, "" if rose else f"the reward went from {first:.2f} to {last:.2f}")


def random_weights(bench: rows.Bench, preset: str, staleness: int) -> rows.Outcome:
    """Trains a shape with random weights on 32 prompts of 8 rollouts, 5 steps.

    Args:
      bench: where it runs.
      preset: name of the model's shape.
      staleness: `coordinator.max_staleness`.
    """
    source = Path(random_text.__file__)
    if bench.tiny:
        # Every shape and staleness is the same code.
        flags = [f"--config={source}:{random_text.DRY}", f"--config.coordinator.max_staleness={staleness}"]
    else:
        tokenizer = Path(bench.scratch) / "tokenizer"
        random_text.write_tokenizer(tokenizer, model_config.load_preset(preset).vocab_size)
        flags = [f"--config={source}:{preset},{staleness}", f"--config.task.tokenizer={tokenizer}"]
    steps = _train(bench, f"run_{preset}_{staleness}", flags)
    return rows.Outcome(_figures(steps))


def routing(bench: rows.Bench) -> rows.Outcome:
    """Trains the C-MLFQ example over two engines on the one GPU, and counts the requests that move."""
    flags = [
        f"--config={REPOSITORY / 'configs' / 'cmlfq_cpu.py'}",
        "--config.rollout.tensor_parallel=(1, 1)",
        "--config.scheduler.max_remaining_tokens=()",
    ]
    if bench.tiny:
        flags += ["--config.steps=2", "--config.warm_start.steps=2", "--config.coordinator.groups_per_step=2"]
    else:
        flags += ["--config.steps=6", *_one_gpu(0.2)]
    return rows.Outcome(_figures(_train(bench, "routing", flags)))


def _one_gpu(engine_fraction: float) -> list[str]:
    """Returns flags that put the trainer and the engines of a CPU config on the first GPU."""
    return ["--config.trainer.platform=auto", f"--config.rollout.gpu_memory_fraction={engine_fraction}"]


def _train(bench: rows.Bench, name: str, flags: Sequence[str]) -> Sequence[Mapping[str, float]]:
    """Runs `launch/train.py` to its end and returns the metrics of its steps.

    Raises:
      LibraError: the run failed; the message ends with its last words.
    """
    workdir = Path(bench.scratch) / name
    if not rows.is_installed("ml_collections"):
        raise rows.LeftOut("ml_collections is not installed, which configs need")
    engine = [] if rows.is_installed("vllm") else ["--config.rollout.engine=fake"]
    if engine and not bench.tiny:
        raise rows.LeftOut("vllm is not installed; docs/results/gpu.md shows how to bring it")
    command = [sys.executable, str(REPOSITORY / "launch" / "train.py"), f"--workdir={workdir}", *flags, *engine]
    environment = {name: value for name, value in os.environ.items() if "MEM_FRACTION" not in name}
    if not bench.tiny:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment |= {
            "JAX_PLATFORMS": "cuda,cpu",
            "CUDA_VISIBLE_DEVICES": visible,
            "XLA_CLIENT_MEM_FRACTION": str(TRAINER_FRACTION),
        }
    try:
        code, output = _run(command, environment, DEADLINE_SECONDS * (DRY_PATIENCE if bench.tiny else 1.0))
    finally:
        _archive(bench, name, workdir)
    path = workdir / metrics.METRICS_FILE
    # Step 0 is the warm start.
    steps = [numbers for step, numbers in metrics.read(path).items() if step] if path.exists() else []
    if code:
        words = " ".join(output.split())[-300:]
        raise protocols.LibraError(f"the run ended after {len(steps)} steps with status {code}: {words}")
    return steps


def _figures(steps: Sequence[Mapping[str, float]]) -> dict[str, rows.Value]:
    """Returns medians of the steps after the first, and the shares of time in which the trainer or all engines idle.

    Engines count as busy while any group runs. The timeline in the archive shows each engine's own gaps.
    """
    timed = steps[1:] or steps
    figures: dict[str, rows.Value] = {"steps": len(steps)}
    for name in SHOWN:
        if values := [step[name] for step in timed if name in step]:
            figures[name.replace("/", "_")] = statistics.median(values)
    for side in ("train", "rollout"):
        shares = [1.0 - step[f"{side}/seconds"] / step["step/seconds"] for step in timed if f"{side}/seconds" in step]
        if shares:
            figures[f"{side}_idle_share"] = max(0.0, statistics.median(shares))
    return figures


def _run(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """Runs a command; returns its status and what it printed. SIGTERM ends it in order if it takes too long."""
    process = subprocess.Popen(
        parent_death.command(command),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=END_SECONDS)
    return process.returncode, output


def _archive(bench: rows.Bench, name: str, workdir: Path) -> None:
    """Keeps a run's records and logs beside the results, also those of a run that failed."""
    if not bench.results or not workdir.exists():
        return
    size = 0
    with tarfile.open(Path(bench.results) / f"{name}.tar.gz", "w:gz") as archive:
        for path in sorted(workdir.rglob("*"), key=lambda path: path.stat().st_size):
            kept = path.suffix in (".jsonl", ".json", ".log") and "checkpoints" not in path.parts
            if not kept or not path.is_file():
                continue
            size += path.stat().st_size
            # Text shrinks to an eighth or less.
            if size > 8 * ARCHIVE_BYTES:
                break
            archive.add(path, f"{name}/{path.relative_to(workdir)}")
