"""Simulates 48 A800s that post-train Qwen3-14B on an agentic workload; compares scheduling policies.

  python launch/simulate.py --config=configs/simulate.py --output=runs/simulate.json
  python launch/simulate.py --config=configs/simulate.py:search --policies=cmlfq_paper,mlfq --output=runs/search.json
  python launch/simulate.py --config=configs/simulate.py --trace=trace.jsonl --output=runs/trace.json
  python launch/simulate.py --config=configs/simulate.py:trace --trace=trace.jsonl   # buckets that fit its lengths

Batch, split and layout are the same for every policy. They were fixed before any policy was compared, from an earlier
cost model. The present one (planning/costs/costs.py) says of the middle of the software-engineering run:

* Split: 20 devices train and 28 roll out. At the middle of the run a batch of 512 trajectories has 3.7 M generated
  tokens and 9.8 M tokens of context. That is 527 s of training on 20 devices and, with all slots in use, 501 s of
  rollout on 28: neither stage hides the other. (24 and 24 would be 439 s and 585 s.)
* Layout: each degree gets the devices that its range of lengths asks for. At the middle of the run, tokens of requests
  with at most 3k still to generate take 26% of the device-seconds. Up to 8k they take 23%, up to 20k 36%, and beyond
  15%. Of 28 devices that is 7.3, 6.5, 10.0 and 4.3. The layout has 6, 6, 8 and 8: six instances of degree 1, three
  of degree 2, two of degree 4, and one of degree 8, the fewest that there can be.
* Slots: 32 requests, because the cache of a degree-1 instance (235k tokens) holds 32 contexts of 7k. The one wide
  instance has 64: its cache is 13 times as large and its requests are the longest (50k).

Expected: the table in docs/results/routing.md; one to two minutes a policy and seed on one core.
"""

from libra_jax.simulator import settings

LAYOUT = {1: 6, 2: 3, 4: 2, 8: 1}
"""Instances of each tensor-parallel degree: 28 devices."""

SLOTS = {1: 32, 2: 32, 4: 32, 8: 64}
"""Slots of an instance of each degree."""

SEARCH_LAYOUT = {1: 16, 2: 6}
SEARCH_SLOTS = {1: 96, 2: 96}


def get_config(variant: str = "swe") -> settings.SimulatedRun:
    """Returns the run of `variant`: swe, search, math or agents (synthetic), trace (with --trace), or large (swe, 1,024
    devices)."""
    if variant not in ("swe", "search", "math", "agents", "trace", "large"):
        raise ValueError(f"configs/simulate.py has swe, search, math, agents, trace and large, not {variant!r}")
    config = settings.SimulatedRun()
    config.name = f"simulate-{variant}"
    config.steps = 16  # 8,192 trajectories

    config.simulation.hardware = "a800"
    config.simulation.model = "Qwen3-14B"
    config.simulation.train_devices = 20
    lay_out(config, LAYOUT, SLOTS)

    config.rollout.max_context = 131_072  # Qwen3-14B's 40,960 stretched by YaRN, as for the published workload
    config.rollout.max_tokens = 65_536
    config.rollout.health_seconds = 60.0  # streams show a dead instance at once; this check finds an idle one
    config.rollout.stream_interval = 1_000  # tokens between two looks at a request that outruns its budget

    config.trainer.row_tokens = 131_072  # holds a whole context
    config.trainer.rows_per_micro_batch = 1  # one row a shard
    config.model.remat = "full"  # a row of that length fits no device otherwise
    config.task.max_turns = 10_000  # scripts end by themselves
    config.task.tool_seconds = 3_600.0  # a hanging tool's deadline; scripted time-outs are shorter

    config.coordinator.groups_per_step = 32
    config.coordinator.group_size = 16
    config.coordinator.max_staleness = 1
    config.scheduler.max_remaining_tokens = (3_000, 8_000, 20_000)
    config.workload.shape = "swe" if variant == "large" else variant  # trace asks for --trace=FILE
    config.workload.fit_buckets = variant == "trace"
    if variant == "search":
        lay_out(config, SEARCH_LAYOUT, SEARCH_SLOTS)
        config.scheduler.max_remaining_tokens = (2_000,)
    if variant == "large":
        # 21 times the layout of 28 devices: 588.
        lay_out(config, {degree: 21 * count for degree, count in LAYOUT.items()}, SLOTS)
        config.simulation.train_devices = 436  # with 588 that roll out, 1,024
        config.coordinator.groups_per_step = 625
        config.steps = 10  # 100,000 trajectories

    config.checkpoint.every = 0
    config.deadlines.first_token = 3_600.0
    config.deadlines.train_step = 36_000.0
    config.telemetry.console = False
    return config


def lay_out(config: settings.SimulatedRun, layout: dict[int, int], slots: dict[int, int]) -> None:
    """Gives the run the instances of each degree that `layout` counts, and each instance the slots of its degree."""
    degrees = [degree for degree, count in layout.items() for _ in range(count)]
    config.rollout.tensor_parallel = tuple(degrees)
    config.simulation.slots = tuple(slots[degree] for degree in degrees)
