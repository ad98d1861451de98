"""Evaluates a run or a model with several attempts a task: pass@k and mean reward, with intervals over tasks.

  python launch/evaluate.py --workdir=runs/mine --attempts=8 --temperature=1
  python launch/evaluate.py --model=Qwen/Qwen3-0.6B --config=configs/questions.py --tasks=test.jsonl --attempts=4

The environment, the tools, the reward and the engines are those of training. The table is printed, and the output
folder gets evaluation.json and evaluation.svg.
"""

from __future__ import annotations

from pathlib import Path

from support import cli, overrides

from absl import flags
from ml_collections import config_flags

from libra_jax import protocols
from libra_jax.build import evaluating

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file that names tasks, environment and engine, beside --model.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run; its config and its newest checkpoint count.")
_STEP = flags.DEFINE_integer("step", None, "Training step of the checkpoint in --workdir; default the newest.")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory or id, instead of --workdir.")
_TASKS = flags.DEFINE_string("tasks", None, "File of tasks, all evaluated, instead of the config's held-out tasks.")
_MOST_TASKS = flags.DEFINE_integer(
    "most_tasks", None, "Most tasks to evaluate; default evaluation.tasks held-out tasks, or all of --tasks."
)
_ATTEMPTS = flags.DEFINE_integer("attempts", None, "Rollouts of each task; default evaluation.attempts of the config.")
_K = flags.DEFINE_list("k", [], "Values of k for pass@k, such as 1,4,8; default powers of two up to --attempts.")
_THRESHOLD = flags.DEFINE_float(
    "threshold", None, "Reward from which on a task counts as solved; default evaluation.threshold of the config."
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", None, "Sampling temperature, 0 is greedy; default evaluation.temperature of the config."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for evaluation.json and evaluation.svg; default evaluation in --workdir or here."
)


def main() -> None:
    workdir = None if _WORKDIR.value is None else Path(_WORKDIR.value)
    output = Path(_OUTPUT.value) if _OUTPUT.value else (workdir or Path()) / "evaluation"
    wrong = [text for text in _K.value if not text.strip().isdigit()]
    if wrong:
        raise protocols.ConfigError(f"--k: {wrong[0]!r} is not a whole number; write it as --k=1,4,8")
    request = evaluating.EvaluationRequest(
        workdir=workdir,
        step=_STEP.value,
        model=_MODEL.value,
        tasks=_TASKS.value,
        most_tasks=_MOST_TASKS.value,
        attempts=_ATTEMPTS.value,
        k=tuple(int(text) for text in _K.value),
        threshold=_THRESHOLD.value,
        temperature=_TEMPERATURE.value,
    )
    explicit_config = None if _CONFIG.value is None else overrides.config(flags.FLAGS["config"])
    result = evaluating.evaluate(request, explicit_config)
    print(evaluating.table(result))
    evaluating.write(result, output)
    print(f"wrote {output / evaluating.FILE} and {output / evaluating.PICTURE}")


if __name__ == "__main__":
    cli.run(main, interrupted="interrupted; nothing was written. The same command begins the evaluation again.")
