"""Compares Libra's mechanisms, and other frameworks' ways of working, on the 48 simulated A800s of configs/simulate.py.

The first five variants are the steps of the published ablation (arXiv 2606.03077). Each variant keeps everything that
the variant before it has. In its authors' configurations, only the elastic pool moves accelerators during a run, and
the controls balance by the number of connections (configs/*homogeneous_lb.yaml and *no_ehp.yaml of
github.com/NetX-lab/Libra). These variants do the same:

* static: half of the accelerators train and half roll out. All instances have one degree. Each request goes to the
  instance with the fewest requests relative to its slots (least_loaded).
* homogeneous: the planner splits the accelerators once, as soon as a split pays. Instances keep one degree. The planner
  may still redraw the length ranges of the instances.
* heterogeneous: the planner also chooses the degrees.
* cmlfq: requests go to the degrees according to the tool returns.
* elastic: the planner may move again, every five steps, as a pool of hybrid workers lets it. Moves cost the same as in
  the variants above.

The next variants work as other frameworks do, with the same hardware and the same costs. A request stays with the
instance that holds its context unless loads differ (sticky), as conversations do in verl's agent loop:

* colocated: all accelerators roll out, then all train (synchronous).
* one_step_off: a fixed split in halves; rollout is one version ahead.
* static_optimal: a fixed split and layout, the best for the whole run's lengths; up to four versions ahead.
* greedy: after every step, moves to the plan that is best for the last step, and ignores the cost of the move.
* libra: Libra as its authors run it (configs/*production_base.yaml), to compare with the four above. It begins with the
  planner's layout for the same lengths as static_optimal, and may be as many versions ahead. It routes by tool returns,
  and the planner may move.

These variants show what a pool of hybrid workers adds to fixed splits:

* planned: the layout of libra, which never changes: 24 accelerators train.
* train16, train20, train32: other splits that never change; 2 instances of degree 2, the others of degree 4.
* pool: 16 of the 48 accelerators train, 16 roll out, and 16 form four hybrid workers of degree 4. The hybrid workers
  train as data-parallel replicas while rollout is ahead.

The variant free is the reference: it looks after every step, and its moves cost nothing. Lengths drift over the whole
run, so over 100 steps the planner has to follow: --configs=cmlfq,elastic,free --steps=100.

A workload may follow a name, as in static-search or cmlfq-math. The default workload is software engineering.

  python launch/sweep.py --of=configs/ablation.py --configs=static,homogeneous,heterogeneous,cmlfq,elastic --steps=48
  python launch/sweep.py --of=configs/ablation.py --configs=static_optimal-search,libra-search --steps=48
"""

import math

from configs import simulate
from libra_jax.simulator import settings

DEGREE = 2
"""Degree of all instances in variants with one degree: the narrowest that has room for several of the longest
contexts."""

LONGEST = {"swe": (131_072, 65_536), "search": (24_576, 12_288), "math": (40_960, 32_768)}
"""Most tokens of a context (and of a row of the trainer), and most tokens of a turn, by workload."""

BEST = {"swe": ((1, 5, 4), 14), "search": ((3, 10, 1), 9), "math": ((1, 20, 1), 14)}
"""(data, fsdp, tensor) and number of instances: the best that launch/plan.py finds for homogeneous-<workload> at max
staleness 4."""

PLANNED = {
    "swe": ((3, 2, 4), {2: (2, 8_360), 4: (5, None)}),
    "search": ((3, 10, 1), {2: (3, 3_600), 4: (3, None)}),
    "math": ((1, 20, 1), {1: (8, 8_877), 2: (6, 20_556), 4: (2, None)}),
}
"""(data, fsdp, tensor), then for each degree the number of instances and the most tokens that their requests may
have left to generate (None: no limit). This is the best that launch/plan.py finds for libra-<workload>."""

AHEAD = 4
"""Max staleness, in versions, where asynchronous systems are compared. AReaL's value for code (arXiv 2505.24298),
and max_head_offpolicyness in the production runs of Libra's authors."""

SPLITS = {"train16": (2, 2, 4), "train20": (1, 5, 4), "train32": (2, 4, 4)}
"""(data, fsdp, tensor) of the fixed splits beside `planned`."""

HALVES = (3, 2, 4)
"""(data, fsdp, tensor) of the 24 accelerators that train in a split in halves."""

ALL = (3, 4, 4)
"""(data, fsdp, tensor) of all 48 accelerators."""

NEVER = 1_000_000
"""Steps until the planner may move a second time, in variants without an elastic pool; longer than any run."""

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
    """Returns the run of `variant`: a name, or a name and a workload with a dash between."""
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
    # Every variant begins as the split in halves; the branches below change it.
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
    """Lets 24 accelerators train and 24 roll out, on instances of one degree."""
    config.simulation.train_devices, config.simulation.train_mesh = 24, HALVES
    _instances(config, 24 // DEGREE)
    config.scheduler.policy = "sticky"


def _instances(config: settings.SimulatedRun, count: int) -> None:
    config.rollout.slots = config.simulation.slots[0]  # every instance gets the slots of the first one
    config.simulation.slots = ()
    config.rollout.tensor_parallel = (DEGREE,) * count
    config.scheduler.max_remaining_tokens = ()


def _colocated(config: settings.SimulatedRun) -> None:
    """Gives all accelerators to both stages, which take turns."""
    config.simulation.train_devices, config.simulation.train_mesh = 48, ALL
    config.rollout.tensor_parallel = (DEGREE,) * (48 // DEGREE)
    config.coordinator.max_staleness = 0


def _static_optimal(config: settings.SimulatedRun, workload: str) -> None:
    """Uses the best split with one degree that `launch/plan.py` finds for the whole run's lengths."""
    mesh, instances = BEST[workload]
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    config.rollout.tensor_parallel = (DEGREE,) * instances
    config.coordinator.max_staleness = AHEAD


def _libra(config: settings.SimulatedRun, workload: str) -> None:
    """Uses the best split with any degrees that `launch/plan.py` finds for the lengths of `static_optimal`."""
    mesh, instances = PLANNED[workload]
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    config.rollout.tensor_parallel = tuple(degree for degree, (count, _) in instances.items() for _ in range(count))
    config.scheduler.max_remaining_tokens = tuple(bound for _, bound in instances.values() if bound is not None)
    config.coordinator.max_staleness = AHEAD


def _split(config: settings.SimulatedRun, mesh: tuple[int, int, int]) -> None:
    """Adds two instances of degree 2, and as many of degree 4 as the mesh leaves devices for."""
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    # 44 = 48 devices less the 4 of the two instances of degree 2.
    config.rollout.tensor_parallel = (2, 2) + (4,) * ((44 - math.prod(mesh)) // 4)
    config.scheduler.max_remaining_tokens = (8_360,)
    config.coordinator.max_staleness = AHEAD


def _pool(config: settings.SimulatedRun) -> None:
    """Gives a third of the accelerators each to training, to rollout, and to hybrid workers."""
    config.simulation.train_devices, config.simulation.train_mesh = 16, (2, 2, 4)
    # The last `elastic.hybrid` instances are the hybrid workers.
    config.rollout.tensor_parallel = (2, 2) + (4,) * 3 + (4,) * 4
    config.scheduler.max_remaining_tokens = (8_360,)
    config.coordinator.max_staleness = AHEAD
    config.elastic.hybrid = 4
