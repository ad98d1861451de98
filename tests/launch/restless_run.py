"""A run of real processes whose hybrid worker changes sides all the time, and of which some are killed on the way.

Trainer, replica and loop worker are real, placed by Ray; the engines are doubles in processes of their own, which
start fast.

  PYTHONPATH=.:launch python restless_run.py WORKDIR STEPS [STATE:VICTIM ...]

Each STATE:VICTIM, in this order, is one kill -9 as the worker comes into that state: of its replica, its engine, or
the core trainer, which ends the run. Prints a line for each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from configs import quickstart
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import preflight, wiring, workdirs
from libra_jax.hybrid import pool, switching, transitions
from libra_jax.hybrid.pool import WorkerState
from libra_jax.tools import toolkit

GROUPS, ATTEMPTS = 4, 2


def config(steps: int) -> config_lib.RunConfig:
    values = quickstart.get_config()
    values.name, values.steps = "restless", steps
    values.coordinator.groups_per_step = GROUPS
    values.coordinator.group_size = ATTEMPTS
    values.coordinator.max_staleness = 1
    values.rollout.tensor_parallel = (1, 1)
    values.rollout.slots = 4
    values.rollout.max_tokens = 24
    values.rollout.engine = "fake"
    values.rollout.restarts = 20
    values.rollout.loop_workers = 1
    values.trainer.rows_per_micro_batch = 1
    values.trainer.row_tokens = 128
    values.trainer.restarts = 0
    values.warm_start.steps = values.evaluation.every = 0
    values.checkpoint.every = 1
    values.cluster.backend = "ray"
    values.elastic.hybrid = 1
    values.elastic.restarts = 20
    values.elastic.late_min_seconds = 30.0
    values.telemetry.report = False
    values.telemetry.tensorboard = False
    return config_lib.checked(values)


class Restless:
    """Instead of `switching.Switching`: a worker that was on one side for three steps is told to change sides.

    The steps are counted from the end of the switch. Counted from the start of the run, they could all pass in
    switches on a machine where a switch takes three steps: the worker would return before its first share.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self._side, self._steps = (False,), 0

    def look(self, sight: switching.Sight) -> switching.SwitchDecision:
        side = tuple(worker.trains for worker in sight.workers)
        self._steps = self._steps + 1 if side == self._side else 1
        self._side = side
        if not sight.workers or self._steps < 3:
            return switching.SwitchDecision(sight.step, "stay", (), "", 1.0, 1.0)
        (worker,) = sight.workers
        kind: switching.Kind = "to_rollout" if worker.trains else "to_training"
        return switching.SwitchDecision(sight.step, kind, (worker.name,), "it is restless", 1.0, 1.0)


class Killer:
    """Kills as told, one after the other."""

    def __init__(self, plan: list[str]) -> None:
        self.plan = [tuple(item.split(":")) for item in plan]

    def came_into(self, workers: transitions.Transitions, worker: pool.HybridWorker) -> None:
        if not self.plan or worker.state != self.plan[0][0]:
            return
        state, victim = self.plan[0]
        if processes := self._processes(workers, worker.name, victim):
            del self.plan[0]
            for pid in processes:
                os.kill(pid, signal.SIGKILL)
            print(f"killed {victim} {state}", flush=True)

    @staticmethod
    def _processes(workers: Any, name: str, victim: str) -> list[int]:
        actors = workers._sides._cluster._actors
        if victim == "engine":
            return list(workers._engines.engines[name].info.process_ids)
        name = "trainer" if victim == "trainer" else name.replace("rollout", "hybrid")
        return [actors[name].birth.pid] if name in actors else []  # one that was killed is made when it is needed


def main() -> None:
    workdir, steps, killer = Path(sys.argv[1]), int(sys.argv[2]), Killer(sys.argv[3:])
    switching.Switching = Restless  # type: ignore[misc, assignment]
    in_state, rested = transitions.Transitions._work, transitions.Transitions._rested

    def watched(self: transitions.Transitions, worker: pool.HybridWorker) -> Any:
        killer.came_into(self, worker)
        return in_state(self, worker)

    def at_rest(self: transitions.Transitions, worker: pool.HybridWorker, outcome: str, why: str) -> None:
        rested(self, worker, outcome, why)
        if worker.state is WorkerState.TRAINING:
            killer.came_into(self, worker)

    transitions.Transitions._work = watched  # type: ignore[method-assign]
    transitions.Transitions._rested = at_rest  # type: ignore[method-assign]
    run = config(steps)
    resolved = preflight.validate(run, need_weights=True)
    try:
        tools = toolkit.Toolkit(run.tools, run.sandbox)
        asyncio.run(wiring.train(resolved, workdirs.open_workdir(run, str(workdir)), tools))
    except protocols.LibraError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(1) from None
    print(f"left to kill: {len(killer.plan)}", flush=True)


if __name__ == "__main__":
    main()
