"""Simulates a cluster of 32 H800s and 32 H20s that post-trains Qwen3-14B; compares what each is used for.

  python launch/simulate.py --config=configs/mixed_hardware.py --policies=cmlfq --output=runs/mixed.json
  python launch/simulate.py --config=configs/mixed_hardware.py:h800,12 --policies=cmlfq --output=runs/h800.json
  python launch/plan.py --config=configs/mixed_hardware.py --inventory=h800:32,h20:32

An H800 has 6.7 times the arithmetic of an H20, which training and prefill take; an H20 has 1.2 times the bandwidth and
memory, which decoding takes (planning/costs/hardware.py). Variants, each followed by a comma and the
accelerators that train:

* mixed: H800s train; all other accelerators roll out. C-MLFQ prices each instance by its own accelerator.
* alike: as many accelerators of each kind train, at the pace of the slower one; the others roll out.
* h800, h20: the accelerators of that kind alone, and the others idle.
* bought: 42 H800s, the price of the whole cluster if an H20 costs a third of an H800 (RollArt, arXiv 2512.22560).

Expected: docs/results/mixed_hardware.md; one to two minutes a policy and seed on one core.
"""

from libra_jax.simulator import settings

H800, H20 = 32, 32
"""Accelerators of each kind."""

DEGREE = 4
"""Tensor-parallel degree of every instance: the best of 1, 2 and 4, by the plan below."""

SLOTS = {"h800": 132, "h20": 164}
"""Slots of an instance: contexts of 10k tokens that fill nine tenths of its cache."""

VARIANTS = ("mixed", "alike", "h800", "h20", "bought")


def get_config(variant: str = "mixed,24") -> settings.SimulatedRun:
    """Returns the run of a variant and its number of training accelerators, such as "mixed,24"."""
    name, _, given = variant.partition(",")
    if name not in VARIANTS or not given.isdigit():
        raise ValueError(f"configs/mixed_hardware.py has {', '.join(VARIANTS)}, each as in 'mixed,24', not {variant!r}")
    train = int(given)
    config = settings.SimulatedRun()
    config.name = f"mixed-hardware-{name}-{train}"
    config.steps = 8  # 8,192 trajectories

    config.simulation.model = "Qwen3-14B"
    config.simulation.kv_cache = "offload"
    config.simulation.train_devices = train
    # A step of data-parallel training is as fast as its slowest shard.
    config.simulation.hardware = "h20" if name in ("alike", "h20") else "h800"
    roll_out(config, *rolling_out(name, train))

    config.rollout.max_context = 131_072
    config.rollout.max_tokens = 65_536
    config.rollout.health_seconds = 60.0
    config.rollout.stream_interval = 1_000

    config.trainer.row_tokens = 131_072
    config.trainer.rows_per_micro_batch = 1
    config.model.remat = "full"
    config.task.max_turns = 10_000
    config.task.tool_seconds = 3_600.0

    config.coordinator.groups_per_step = 64
    config.coordinator.group_size = 16
    config.coordinator.max_staleness = 1
    config.workload.shape = "swe"

    config.checkpoint.every = 0
    config.deadlines.first_token = 3_600.0
    config.deadlines.train_step = 36_000.0
    config.telemetry.console = False
    return config


def rolling_out(name: str, train: int) -> tuple[int, int]:
    """Returns the H800s and the H20s that roll out, where `train` accelerators train."""
    match name:
        case "mixed":
            return H800 - train, H20
        case "alike":
            return H800 - train // 2, H20 - train // 2
        case "h20":
            return 0, H20 - train
        case "bought":
            return H800 + H20 // 3 - train, 0
        case _:
            return H800 - train, 0


def roll_out(config: settings.SimulatedRun, h800: int, h20: int) -> None:
    """Gives the run instances of `DEGREE` on these accelerators."""
    names = ("h800",) * (h800 // DEGREE) + ("h20",) * (h20 // DEGREE)
    config.rollout.tensor_parallel = (DEGREE,) * len(names)
    config.rollout.accelerators = names
    config.simulation.slots = tuple(SLOTS[name] for name in names)
    config.scheduler.max_remaining_tokens = (8_000,) if len(set(names)) > 1 else ()
