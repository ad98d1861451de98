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

These variants are libra with one mechanism off. Staleness is a setting: --sweep=coordinator.max_staleness=0,1,4.

* libra_halves: no planner. The accelerators are split in halves, with one degree.
* libra_sticky, libra_least: no C-MLFQ. Requests stay with their context, or go where fewest are.
* planned, below: no elastic pool.

These variants show what a pool of hybrid workers adds to fixed splits:

* planned: the layout of libra, which never changes.
* train16, train20, train24, train32: splits that never change, with instances of degree 4.
* pool: 16 of the 48 accelerators train, 16 roll out, and 16 form four hybrid workers of degree 4. The hybrid workers
  train as data-parallel replicas while rollout is ahead.

The variant free is the reference: it looks after every step, and its moves cost nothing. Lengths drift over the whole
run, so over 100 steps the planner has to follow: --configs=cmlfq,elastic,free --steps=100.

A workload may follow a name, as in static-search or cmlfq-math. The default workload is software engineering. A model
may follow the workload, as in elastic-swe-30b: 14b is Qwen3-14B, the default, and 30b is Qwen3-30B-A3B. Its replica
needs 16 accelerators, so its split in halves is 16 and 32, and variants of other splits do not exist for it.

  python launch/sweep.py --of=configs/ablation.py --configs=static,homogeneous,heterogeneous,cmlfq,elastic --steps=48
  python launch/sweep.py --of=configs/ablation.py --configs=static_optimal-search,libra-search --steps=48
  python launch/sweep.py --of=configs/ablation.py --configs=colocated-search-30b,libra-search-30b --steps=48
"""

import math
from collections.abc import Mapping

from configs import simulate
from libra_jax.simulator import settings

DEGREE = 2
"""Degree of all instances in variants with one degree: the narrowest that has room for several of the longest
contexts."""

DEGREES = {"14b": (1, 2, 4, 8), "30b": (2, 4, 8)}
"""Degrees that the planner may choose, by model. A single A800 holds Qwen3-30B-A3B and 70k tokens of context, which is
too little for the slots of an instance."""

SLOTS = {
    "14b": {"swe": 96, "search": 96, "math": 96},
    "30b": {"swe": 96, "search": 256, "math": 96},
}
"""Slots of an instance, by model. Qwen3-14B has what an instance of degree 2 holds of math. With 96 instead of 32 a
step of software engineering takes 3% less, and a step of math 7% less (seed 0). Qwen3-30B-A3B has as many as its
narrowest instance holds requests of the run's middle, at most vLLM's default of 256. A step reads nearly all of its
experts from 32 requests on, so more requests cost little."""

LONGEST = {"swe": (131_072, 65_536), "search": (18_432, 12_288), "math": (33_792, 32_768)}
"""Most tokens of a context (and of a row of the trainer), and most tokens of a turn, by workload. Contexts of search
reach 16k, and those of math 33k. Shorter rows leave memory for activations."""

REMAT = {"swe": "full", "search": "none", "math": "dots"}
"""Activations that the trainer of Qwen3-14B computes again, by workload: the fewest that fit on 24 accelerators. By the
cost model, training on search takes 25% less than with "full", and training on math 18% less. A row of software
engineering fits with "full" only."""

MODELS = {"14b": "Qwen3-14B", "30b": "Qwen3-30B-A3B"}
"""Presets by the names that variants have."""

BEST = {
    "14b": {"swe": ((1, 5, 4), 4), "search": ((3, 2, 4), 4), "math": ((1, 5, 4), 4)},
    "30b": {"swe": ((1, 4, 4), 2), "search": ((1, 4, 4), 2), "math": ((1, 4, 4), 2)},
}
"""(data, fsdp, tensor) and degree of the instances, by model. For Qwen3-14B: the best of the splits with one degree
that were simulated under sticky at max staleness 4 (docs/results/ablation.md). For Qwen3-30B-A3B: the best that
launch/plan.py finds for homogeneous-<workload>."""

PLANNED = {
    "14b": {
        "swe": ((1, 5, 4), {4: (7, None)}),
        "search": ((3, 2, 4), {4: (6, None)}),
        "math": ((1, 5, 4), {4: (7, None)}),
    },
    "30b": {
        "swe": ((1, 4, 4), {2: (16, None)}),
        "search": ((1, 4, 4), {4: (8, None)}),
        "math": ((1, 4, 4), {4: (8, None)}),
    },
}
"""(data, fsdp, tensor), then for each degree the number of instances and the most tokens that their requests may
have left to generate (None: no limit). This is the best that launch/plan.py finds for libra-<workload> at max staleness
4, by model."""

AHEAD = 4
"""Max staleness, in versions, where asynchronous systems are compared. AReaL's value for code (arXiv 2505.24298),
and max_head_offpolicyness in the production runs of Libra's authors."""

SPLITS = {"train16": (2, 2, 4), "train20": (1, 5, 4), "train24": (3, 2, 4), "train32": (2, 4, 4)}
"""(data, fsdp, tensor) of the fixed splits; `planned` is one of them."""

HALVES = {"14b": (3, 2, 4), "30b": (1, 4, 4)}
"""(data, fsdp, tensor) of the accelerators that train in a split in halves, by model: 24, or one replica of 16."""

ALL = (3, 4, 4)
"""(data, fsdp, tensor) of all 48 accelerators."""

NEVER = 1_000_000
"""Steps until the planner may move a second time, in variants without an elastic pool; longer than any run."""

LIBRA = ("libra", "libra_sticky", "libra_least")
"""Variants with the planner's layout, which may change."""

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
    *LIBRA,
    "libra_halves",
    "free",
    "planned",
    *SPLITS,
    "pool",
)


def get_config(variant: str = "cmlfq") -> settings.SimulatedRun:
    """Returns the run of `variant`: a name, and perhaps a workload and a model, with dashes between."""
    name, workload, model, *more = (*variant.split("-"), *("swe", "14b")[variant.count("-") :])
    if name not in NAMES or workload not in WORKLOADS or model not in MODELS or more:
        raise ValueError(
            f"configs/ablation.py has {', '.join(NAMES)}, each also with -{', -'.join(WORKLOADS)}, and then with "
            f"-{' or -'.join(MODELS)}, not {variant!r}"
        )
    if model != "14b" and name in ("planned", "pool", *SPLITS):
        raise ValueError(f"configs/ablation.py has {name} for 14b only, not {variant!r}")
    config = simulate.get_config(workload)
    config.name = f"ablation-{variant}"
    config.simulation.model = MODELS[model]
    config.rollout.max_context, config.rollout.max_tokens = LONGEST[workload]
    config.trainer.row_tokens = config.rollout.max_context
    # Every variant begins as the split in halves; the branches below change it.
    _halves(config, model)
    config.rollout.slots = SLOTS[model][workload]
    if model == "14b":
        config.model.remat = REMAT[workload]
    if name in ("static", "homogeneous", "heterogeneous"):
        config.scheduler.policy = "least_loaded"
    if name in ("homogeneous", "heterogeneous", "cmlfq", "elastic", "greedy", "free", *LIBRA):
        config.planner.period = 5
        config.planner.degrees = (DEGREE,) if name == "homogeneous" else DEGREES[model]
    if name in ("homogeneous", "heterogeneous", "cmlfq"):
        config.planner.cooldown = NEVER
    if name in ("cmlfq", "elastic", "libra", "libra_halves", "free", "planned", "pool", *SPLITS):
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
        _static_optimal(config, *BEST[model][workload])
    if name in (*LIBRA, "planned"):
        _libra(config, *PLANNED[model][workload])
    if name == "libra_least":
        config.scheduler.policy = "least_loaded"
    if name == "libra_halves":
        config.coordinator.max_staleness = AHEAD
    if name in SPLITS:
        _split(config, SPLITS[name])
    if name == "pool":
        _pool(config)
    return config


def _halves(config: settings.SimulatedRun, model: str) -> None:
    """Lets half of the accelerators train and the others roll out, on instances of one degree."""
    mesh = HALVES[model]
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    _instances(config, (48 - math.prod(mesh)) // DEGREE)
    config.scheduler.policy = "sticky"


def _instances(config: settings.SimulatedRun, count: int) -> None:
    config.simulation.slots = ()  # all have those of `SLOTS`
    config.rollout.tensor_parallel = (DEGREE,) * count
    config.scheduler.max_remaining_tokens = ()


def _colocated(config: settings.SimulatedRun) -> None:
    """Gives all accelerators to both stages, which take turns."""
    config.simulation.train_devices, config.simulation.train_mesh = 48, ALL
    config.rollout.tensor_parallel = (DEGREE,) * (48 // DEGREE)
    config.coordinator.max_staleness = 0


def _static_optimal(config: settings.SimulatedRun, mesh: tuple[int, int, int], degree: int) -> None:
    """Uses a split with instances of one degree."""
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    config.rollout.tensor_parallel = (degree,) * ((48 - math.prod(mesh)) // degree)
    config.coordinator.max_staleness = AHEAD


def _libra(
    config: settings.SimulatedRun, mesh: tuple[int, int, int], instances: Mapping[int, tuple[int, int | None]]
) -> None:
    """Uses the best split with any degrees that `launch/plan.py` finds for the lengths of `static_optimal`."""
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    config.rollout.tensor_parallel = tuple(degree for degree, (count, _) in instances.items() for _ in range(count))
    config.scheduler.max_remaining_tokens = tuple(bound for _, bound in instances.values() if bound is not None)
    config.coordinator.max_staleness = AHEAD


def _split(config: settings.SimulatedRun, mesh: tuple[int, int, int]) -> None:
    """Gives the accelerators beside the mesh to instances of degree 4."""
    config.simulation.train_devices, config.simulation.train_mesh = math.prod(mesh), mesh
    config.rollout.tensor_parallel = (4,) * ((48 - math.prod(mesh)) // 4)
    config.coordinator.max_staleness = AHEAD


def _pool(config: settings.SimulatedRun) -> None:
    """Gives a third of the accelerators each to training, to rollout, and to hybrid workers."""
    config.simulation.train_devices, config.simulation.train_mesh = 16, (2, 2, 4)
    # The last `elastic.hybrid` instances are the hybrid workers.
    config.rollout.tensor_parallel = (4,) * 4 + (4,) * 4
    config.coordinator.max_staleness = AHEAD
    config.elastic.hybrid = 4
