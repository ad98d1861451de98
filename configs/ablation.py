"""What each mechanism adds, and other frameworks' ways, on the simulated 48 A800s of configs/simulate.py.

The steps of the published ablation (arXiv 2606.03077), each with what the one before it has. Its authors' controls
balance by the number of connections, and move no accelerator while a run goes on unless they have the elastic pool
(configs/*homogeneous_lb.yaml and *no_ehp.yaml of github.com/NetX-lab/Libra); so do these:

* static: half of the accelerators train, half roll out, instances of one degree; each request goes to the instance with
  the fewest for its slots (least_loaded).
* homogeneous: the planner splits the accelerators, once, when it first pays; instances keep one degree. Ranges of
  lengths may still be drawn anew.
* heterogeneous: the planner also chooses degrees.
* cmlfq: requests go to the degrees by what tools returned.
* elastic: the planner may move again, every five steps, as a pool of hybrid workers lets it. A move costs what it
  costs in the rows above.

Peers' ways, with the same hardware and the same costs. A request stays with the instance that holds its context unless
loads differ (sticky), as conversations do in verl's agent loop:

* colocated: all accelerators roll out, then all train (synchronous).
* one_step_off: a fixed split in halves, rollout one version ahead.
* static_optimal: a fixed split and layout, the best for the whole run's lengths, up to four versions ahead.
* greedy: after every step the plan that is best for the last one, whatever the move costs.
* libra: what stands against them, as its authors run it (configs/*production_base.yaml): begins with the planner's
  layout for the lengths that static_optimal's was made for, may be as far ahead as that, routes by what tools
  returned, and the planner may move.

What a pool of hybrid workers adds to splits that stay:

* planned: the layout of libra, which never changes: 24 train.
* train16, train20, train32: other splits that never change; 2 instances of degree 2, the others of degree 4.
* pool: of the same 48, 16 train, 16 roll out, and 16 are four hybrid workers of degree 4, which train as data-parallel
  replicas while rollout is ahead.

What to measure against: free looks after every step, and its moves cost nothing. Lengths drift over the whole run, so
over 100 steps the planner has to follow: --configs=cmlfq,elastic,free --steps=100.

A name may be followed by a workload: static-search, cmlfq-math; without, it is software engineering.

  python launch/sweep.py --of=configs/ablation.py --configs=static,homogeneous,heterogeneous,cmlfq,elastic --steps=48
  python launch/sweep.py --of=configs/ablation.py --configs=static_optimal-search,libra-search --steps=48
"""

import math

from configs import simulate
from libra_jax.simulator import settings

DEGREE = 2
"""Of all instances where they have one: the narrowest with room for several of the longest contexts."""

LONGEST = {"swe": (131_072, 65_536), "search": (24_576, 12_288), "math": (40_960, 32_768)}
"""Tokens of a context (and of a row of the trainer) and of a turn, by workload."""

BEST = {"swe": ((1, 5, 4), 14), "search": ((3, 10, 1), 9), "math": ((1, 20, 1), 14)}
"""(data, fsdp, tensor) and instances: what launch/plan.py finds best for homogeneous-<workload> at eta 4."""

PLANNED = {
    "swe": ((3, 2, 4), {2: (2, 8_360), 4: (5, None)}),
    "search": ((3, 10, 1), {2: (3, 3_600), 4: (3, None)}),
    "math": ((1, 20, 1), {1: (8, 8_877), 2: (6, 20_556), 4: (2, None)}),
}
"""(data, fsdp, tensor), and of each degree the instances and the most tokens that a request of theirs has still to
generate (None: any): what launch/plan.py finds best for libra-<workload>."""

AHEAD = 4
"""Versions that a trajectory may be behind where asynchronous systems are compared: AReaL's for code (arXiv
2505.24298), and max_head_offpolicyness of the production runs of Libra's authors."""

SPLITS = {"train16": (2, 2, 4), "train20": (1, 5, 4), "train32": (2, 4, 4)}
"""(data, fsdp, tensor) of those that stay beside `planned`."""

HALVES = (3, 2, 4)
"""(data, fsdp, tensor) of the 24 accelerators that train in a split in halves."""

ALL = (3, 4, 4)
"""Of all 48."""

NEVER = 1_000_000
"""Steps until a planner whose workers keep their stage may move a second time."""

WORKLOADS = ("swe", "search", "math")
NAMES = (
    "static",
    "homogeneous",
    "heterogeneous",
    "cmlfq",
    "elastic",
    "colocated",
    "one_step_off",
    "static_optimal",
    "greedy",
    "libra",
    "free",
    "planned",
    *SPLITS,
    "pool",
)


def get_config(variant: str = "cmlfq") -> settings.SimulatedRun:
    """The run of `variant`: a name, or a name and a workload with a dash between."""
    name, _, workload = variant.partition("-")
    workload = workload or "swe"
    if name not in NAMES or workload not in WORKLOADS:
        raise ValueError(
            f"configs/ablation.py has {', '.join(NAMES)}, each also with -{', -'.join(WORKLOADS)}, not {variant!r}"
        )
    config = simulate.get_config(workload)
    config.name = f"ablation-{variant}"
    config.rollout.max_context, config.rollout.max_tokens = LONGEST[workload]
    config.trainer.row_tokens = config.rollout.max_context
    _halves(config)
    if name in ("static", "homogeneous", "heterogeneous"):
        config.scheduler.policy = "least_loaded"
    if name in ("homogeneous", "heterogeneous", "cmlfq", "elastic", "greedy", "libra", "free"):
        config.planner.period = 5
        config.planner.degrees = (DEGREE,) if name == "homogeneous" else (1, 2, 4, 8)
    if name in ("homogeneous", "heterogeneous", "cmlfq"):
        config.planner.cooldown = NEVER
    if name in ("cmlfq", "elastic", "libra", "free", "planned", "pool", *SPLITS):
        config.scheduler.policy = "cmlfq"
    if name == "free":
        config.planner.period, config.planner.cooldown, config.planner.least_gain = 1, 0, 0.0
        config.planner.start_seconds = config.planner.resize_seconds = 0.0
    if name == "greedy":
        config.planner.period, config.planner.cooldown, config.planner.least_gain = 1, 0, 0.0
        config.planner.window, config.planner.horizon = 1, 1_000_000
    if name == "colocated":
        _colocated(config)
    if name == "static_optimal":
        _static_optimal(config, workload)
    if name in ("libra", "planned"):
        _libra(config, workload)
    if name in SPLITS:
        _split(config, SPLITS[name])
    if name == "pool":
        _pool(config)
    return config


def _halves(config: settings.SimulatedRun) -> None:
    """24 accelerators train, 24 roll out on instances of one degree."""
    config.simulation.train_devices, config.simulation.train_mesh = 24, HALVES
    _instances(config, 24 // DEGREE)
    config.scheduler.policy = "sticky"


def _instances(config: settings.SimulatedRun, count: int) -> None:
    config.rollout.slots = config.simulation.slots[0]  # of whatever degree
    config.simulation.slots = ()
    config.rollout.tensor_parallel = (DEGREE,) * count
    config.scheduler.max_remaining_tokens = ()


def _colocated(config: settings.SimulatedRun) -> None:
    """Both stages have everything, one after the other."""
    config.simulation.train_devices, config.simulation.train_mesh = 48, ALL
    config.rollout.tensor_parallel = (DEGREE,) * (48 // DEGREE)
    config.coordinator.staleness = 0


def _static_optimal(config: settings.SimulatedRun, workload: str) -> None:
    """The best split by `launch/plan.py` of the whole run's lengths, of one degree."""
    mesh, instances = BEST[workload]
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    config.rollout.tensor_parallel = (DEGREE,) * instances
    config.coordinator.staleness = AHEAD


def _libra(config: settings.SimulatedRun, workload: str) -> None:
    """The best split by `launch/plan.py` of the same lengths, of any degrees."""
    mesh, instances = PLANNED[workload]
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    config.rollout.tensor_parallel = tuple(degree for degree, (count, _) in instances.items() for _ in range(count))
    config.scheduler.max_remaining_tokens = tuple(bound for _, bound in instances.values() if bound is not None)
    config.coordinator.staleness = AHEAD


def _split(config: settings.SimulatedRun, mesh: tuple[int, int, int]) -> None:
    """Two instances of degree 2, and as many of degree 4 as the mesh leaves devices for."""
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    config.rollout.tensor_parallel = (2, 2) + (4,) * ((44 - math.prod(mesh)) // 4)
    config.scheduler.max_remaining_tokens = (8_360,)
    config.coordinator.staleness = AHEAD


def _pool(config: settings.SimulatedRun) -> None:
    """A third each for training, for rollout, and for those who change sides."""
    config.simulation.train_devices, config.simulation.train_mesh = 16, (2, 2, 4)
    config.rollout.tensor_parallel = (2, 2) + (4,) * 3 + (4,) * 4
    config.scheduler.max_remaining_tokens = (8_360,)
    config.coordinator.staleness = AHEAD
    config.elastic.hybrid = 4
