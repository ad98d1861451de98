"""Trains a tool-using policy: JAX trainer, vLLM rollouts, and the coordinator between them.

  python launch/train.py --config=configs/quickstart.py --config.steps=20 --workdir=runs/mine

A run that is started again with the same workdir goes on from its last checkpoint. Exit status 75 (`EX_TEMPFAIL`)
means that the same command should be given again. Either SIGTERM or SIGHUP stopped the run before its last step, or
the run lost a worker too often. A worker is a process or a whole host that the run needs, and may be restarted a
limited number of times (`trainer.restarts`, `rollout.restarts`, ...).
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import types
from pathlib import Path

from support import cli, overrides

from absl import flags
from ml_collections import config_flags

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import api, changes, dry_run, huge_pages, observing, preflight, workdirs
from libra_jax.coordinator import stopping
from libra_jax.models.hf import hub
from libra_jax.rewards import trial
from libra_jax.rollouts import rehearsal
from libra_jax.telemetry import escapes
from libra_jax.utils import resolving, user_code

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The run's config file, such as configs/quickstart.py.", lock_config=True
)
_PLAN = flags.DEFINE_string("plan", None, "Plan of launch/plan.py to lay the run out by.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run writes; default runs/<config>-<hash of config>.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check the run, print changed settings, tasks and partition, and stop.")
_TAKE_OVER = flags.DEFINE_bool(
    "take_over", False, "End a run that still lives in the workdir, on any host, and go on in its place."
)
_ALLOW_CHANGES = flags.DEFINE_string(
    "allow_changes",
    "",
    "Settings in which the run may go on otherwise than its workdir's config.json says, with commas between them: "
    "optimizer.learning_rate,algorithm.kl_coefficient. Each change is recorded in config_history.jsonl.",
)


def main() -> int:
    config = overrides.config(flags.FLAGS["config"], _PLAN.value)
    last_resort = observing.LastResort(config.deadlines.grace)
    # These handlers hold until the run exists, which then stops in its own way.
    for number in stopping.caught_ends():
        signal.signal(number, functools.partial(_leave, last_resort))
    changes.allowed_names(_ALLOW_CHANGES.value)  # a mistyped name is refused before anything starts
    found = hub.resolved(config, download=not _DRY_RUN.value)
    if _DRY_RUN.value:
        _describe(config, found)
        return 0
    if found.problems:
        raise protocols.DataError("; ".join(found.problems))
    huge_pages.restart(found.config)
    for note in found.notes:
        print(f"{note[0].upper()}{note[1:]}.")
    checked = preflight.validate(found.config, need_weights=True)
    dry_run.try_rewards(found.config)
    preflight.warn(checked)
    run = api.start(
        config,
        checked,
        workdir=_WORKDIR.value,
        take_over=_TAKE_OVER.value,
        allow_changes=changes.allowed_names(_ALLOW_CHANGES.value),
        at_signal=last_resort.begin,
    )
    with resolving.contain_task_exits():
        summary = asyncio.run(run)
    if summary.terminated:
        observing.end_process()
    return 0


def _describe(named: config_lib.RunConfig, found: hub.LocalConfig) -> None:
    """Prints what the run would be: changed settings, unless it cannot start, and what follows from all of them.

    Raises:
      ConfigError: a setting is wrong, or the workdir belongs to another config or a living run.
      DataError: it cannot run here, because weights, a tokenizer or tasks are missing, or a reward function fails.
    """
    run = preflight.validate(found.config, need_weights=False)
    workdir = workdirs.foreseen(
        named,
        _WORKDIR.value,
        take_over=_TAKE_OVER.value,
        allow_changes=changes.allowed_names(_ALLOW_CHANGES.value),
    )
    example = dry_run.example(found.config)
    scored = trial.functions(found.config.reward, example)
    failing, doubtful = dry_run.failures(found.config, scored)
    played = rehearsal.Rehearsed()
    if example is not None:
        played = rehearsal.play(found.config, example.task, example.transcript.answer)
    if played.problem:
        (failing if played.certain else doubtful).append(played.problem)
    missing = [*found.problems, *preflight.missing(run, found.fields)]
    missing += [*preflight.missing_disk(run, Path(_WORKDIR.value or workdirs.default(named))), *failing]
    posed = None if example is None or played.problem else rehearsal.pose(found.config, example.task)
    said = f"{dry_run.describe(run, found.notes, scored, posed, played.reward)}\nworkdir     {workdir}"
    if not missing:  # they would hide what is missing
        said = f"{dry_run.settings(named)}\n{said}"
    print(escapes.visible(said, lines=True), flush=True)  # it quotes a task, which may be anybody's
    preflight.warn(run)  # last, where a reader looks
    for sentence in doubtful:
        print(f"warning: {escapes.visible(sentence)}.", file=sys.stderr)
    if missing:
        known = run.shape is not None
        checked = "All else" if known else "What does not depend on the model's shape"
        own = not found.config.task.environment.startswith(resolving.SHIPPED)
        if example is None and (own or found.config.reward.functions):
            checked += ", except what needs a task (a rollout in the environment, scores of reward functions),"
        problems = "; ".join(missing)
        stop = "" if problems.endswith(("?", ".")) else "."
        raise protocols.DataError(f"this run cannot start here: {problems}{stop} {checked} was checked")


def _leave(last_resort: observing.LastResort, number: int, _: types.FrameType | None) -> None:
    """Ends a run that has not begun, at a scheduler's signal: closes open files, and the status asks for the command
    again."""
    last_resort.begin(signal.Signals(number))
    print("stopped before the run began; the same command begins it.", file=sys.stderr)
    raise user_code.SignalExit(os.EX_TEMPFAIL)


if __name__ == "__main__":
    cli.run(
        main,
        interrupted="interrupted; the same command goes on from the last checkpoint, if there is one.",
        lost=os.EX_TEMPFAIL,
        needs_config=True,
    )
