"""CPU time of the coordinator in simulated runs of many accelerators, and what of it is the simulated machines'.

The coordinator, the agent loop and the scheduler are those of a real run; engines, trainer and tools are models in the
same process. Whose code runs is looked at once every `SAMPLE_SECONDS` of CPU time, so what else the machine does
counts nowhere.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from libra_jax import config as configuration
from libra_jax.simulator import comparison, settings

SAMPLE_SECONDS = 0.004
"""Of CPU time, between two looks; the kernel's clock allows no shorter."""

PACKAGE = f"{pathlib.Path(comparison.__file__).parents[1]}/"
MACHINES = "simulator"
CLOCK = "simulator/clock.py"
"""The event loop: of its time each side has the share that it has of the rest."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What a simulated run asked of its coordinator.

    Attributes:
      accelerators: that trained and rolled out.
      instances: of rollout.
      steps: training steps.
      requests: attempts trained.
      turns: model outputs of these.
      deltas: parts in which their tokens came.
      virtual_seconds: that the run took.
      cpu_seconds: that the simulation took.
      coordinator_seconds: of these, in coordinator, agent loop and scheduler.
      resident_bytes: at most, of the process.
    """

    accelerators: int
    instances: int
    steps: int
    requests: int
    turns: int
    deltas: int
    virtual_seconds: float
    cpu_seconds: float
    coordinator_seconds: float
    resident_bytes: int


def configured(accelerators: int, steps: int) -> settings.SimulatedRun:
    """The run of configs/simulate.py with so many accelerators: its layout as often, and as large a batch for each."""
    from configs import simulate  # found from where scripts are launched, once they run

    config, times = simulate.get_config("swe"), accelerators // 48
    simulate.lay_out(config, {degree: times * count for degree, count in simulate.LAYOUT.items()}, simulate.SLOTS)
    config.simulation.train_devices = accelerators - sum(config.rollout.tensor_parallel)
    config.coordinator.groups_per_step = round(config.coordinator.groups_per_step * accelerators / 48)
    config.steps = steps
    return configuration.checked(config)


def measure(accelerators: int, steps: int) -> Load:
    """Simulates so many training steps.

    Args:
      accelerators: at least 48.
      steps: of which each has 32 prompts x 16 attempts for 48 accelerators.
    """
    run = comparison.prepare(configured(accelerators, steps), ["cmlfq"])
    workload, groups = comparison.workload(run), run.steps * run.coordinator.groups_per_step
    began = time.process_time()
    with _sampled() as samples:
        result = comparison.simulate(comparison.with_policy(run, "cmlfq"))
    spent = time.process_time() - began
    mine = sum(count for room, count in samples.items() if room not in (MACHINES, CLOCK))
    known = mine + samples[MACHINES]
    requests = turns = deltas = 0
    for task in range(groups):
        for sample in range(run.coordinator.group_size):
            script = workload.script(task, sample)
            requests, turns = requests + 1, turns + len(script.turns)
            deltas += sum(-(-turn.generated_tokens // run.rollout.stream_interval) for turn in script.turns)
    return Load(
        accelerators,
        len(run.rollout.tensor_parallel),
        steps,
        requests,
        turns,
        deltas,
        result.seconds,
        spent,
        spent * mine / max(1, known),
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


@contextmanager
def _sampled() -> Iterator[collections.Counter[str]]:
    """Counts looks at the running code by the room of the package that it belongs to."""
    samples: collections.Counter[str] = collections.Counter()

    def look(number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        if frame is not None:
            file = frame.f_code.co_filename.removeprefix(PACKAGE)
            samples[CLOCK if file == CLOCK else file.partition("/")[0]] += 1

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    try:
        yield samples
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
