"""Plans over real vLLM engines on two CPU cores: the planner changes the rollout layout during the run.

The run begins with one instance of tensor-parallel degree 2. After a few steps the planner has measured how long
trajectories are and how long the stages take. A model of 0.4 million parameters gains nothing from being split, and two
narrow instances decode twice as many requests at a time. So the planner ends the wide instance and starts two narrow
ones in the background. Requests of the wide instance wait for the narrow ones, and go on from their tokens.

Expected: the planner moves to two instances of degree 1 at step 5 of 16. After the move a step generates about twice as
many tokens a second (530 before, 920 to 1,120 after). In the run's folder, plans.jsonl has every look, and report.html
shows the predictions beside the measurements. It took about 6 minutes on 2 cores.

  python launch/train.py --config=configs/planned_cpu.py
  python launch/train.py --config=configs/planned_cpu.py --config.planner.shadow  # decides, logs, and never moves
"""

from configs import cmlfq_cpu
from libra_jax import config as config_lib


def get_config() -> config_lib.RunConfig:
    """Returns the run."""
    config = cmlfq_cpu.get_config()
    config.name = "planned_cpu"
    config.rollout.tensor_parallel = (2,)
    config.rollout.slots_by_instance = ()
    config.rollout.slots = 16
    config.scheduler.max_remaining_tokens = ()
    config.planner.period = 2
    config.planner.degrees = (1, 2)
    config.planner.horizon = 50
    config.planner.start_seconds = 30.0  # a cold start of vLLM, on busy cores
    config.checkpoint.every = 4
    return config
