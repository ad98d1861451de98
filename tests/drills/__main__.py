"""Drills: real runs over emulated hosts that lose a process, a host, their network, their disk or the right time.

  python -m tests.drills --workdir=drills                      # all of them, with vLLM: half an hour on two idle cores
  python -m tests.drills --workdir=drills --only=kills --runs=3 --engine=fake

  kills       kill -9 of every kind of actor, of the driver, of Ray's raylets and of whole hosts, a run each
  partition   30 seconds without a network between the hosts that train and those that roll out
  grace       SIGTERM, and 20 seconds to end
  disk        a full disk under the workdir
  clock       hosts whose clocks are an hour ahead and an hour behind

Each run has to train every prompt once, to say in its log what happened, and to leave no process and no port behind. It
has to go on by itself; only one that was told to end, or whose driver was hit, is given its command again.
`drills.json` and `drills.md` in --workdir have the table; exit status 1 says that a drill did not go as it should. What
this machine lacks for a drill is told, and that drill is skipped, with status 1 unless others were asked for with
--only. Linux; partitions take root.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support import cli

from absl import flags
from rich import console

from libra_jax import protocols
from tests.drills import faults, judging, kills, partition, report, runs

_RUNS = flags.DEFINE_integer("runs", 20, "Runs of the drill kills, each of which is hit once.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of victims and moments.", lower_bound=0)
_KINDS = flags.DEFINE_list("kinds", [], "Kinds of victims of the drill kills; none given: all.")
_ENGINE = flags.DEFINE_enum("engine", "vllm", ["vllm", "fake"], "rollout.engine of the runs.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs, their logs and the table; new, or empty.")

STEPS = {"vllm": 20, "fake": 30}
STEP_SECONDS = {"vllm": 2.0, "fake": 0.5}

DRILLS: dict[str, Callable[[runs.Plan], Iterator[judging.Outcome]]] = {
    "kills": lambda plan: kills.drill(plan, _chosen()),
    "partition": partition.drill,
    "grace": faults.grace,
    "disk": faults.disk,
    "clock": faults.clock,
}

_ONLY = flags.DEFINE_list("only", list(DRILLS), "Which drills.")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # whatever is open is closed on the way
    plan = _plan()
    outcomes: list[judging.Outcome] = []
    for name in _ONLY.value:
        for outcome in DRILLS[name](plan):
            outcomes.append(outcome)
            plan.say(report.line(outcome))
            report.write(plan.workdir, plan.engine, outcomes)  # what there is so far, however this ends
    console.Console(width=report.WIDTH).print(report.table(outcomes))
    return int(not all(outcome.passed for outcome in outcomes))


def _chosen() -> list[kills.Kind]:
    return kills.chosen(_KINDS.value, _ENGINE.value, _RUNS.value, _SEED.value)


def _plan() -> runs.Plan:
    _chosen()  # nonsense is refused before anything is run
    for name in _ONLY.value:
        if name not in DRILLS:
            raise protocols.ConfigError(f"--only: {name!r} is not one of {', '.join(DRILLS)}")
    if not _WORKDIR.value:
        raise protocols.ConfigError("--workdir: say where the runs, their logs and the table are to be")
    workdir = Path(_WORKDIR.value).resolve()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if any(workdir.iterdir()):
            raise protocols.ConfigError(f"--workdir={workdir} is not empty; give a new folder")
    except OSError as error:
        raise protocols.ConfigError(
            f"--workdir={workdir} cannot be used ({error.strerror or error}); choose a folder that can be written"
        ) from error
    # Spares all runs but the first their compilations.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(workdir / "cache"))
    engine, began = _ENGINE.value, time.monotonic()

    def say(sentence: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {sentence}", file=sys.stderr, flush=True)

    return runs.Plan(engine, STEPS[engine], workdir, _SEED.value, STEP_SECONDS[engine], say)


if __name__ == "__main__":
    cli.run(main)
