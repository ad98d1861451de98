"""What a batch costs on its way to the trainer's processes: nanoseconds a token, by the number of processes.

  python -m tests.benchmarks.handover [--processes=1,2,4]     # a minute; starts Ray

A batch of 64 rollouts of ten turns, 1.2 million tokens, goes to actors that count its tokens. `call` is until all have
answered. `loop` is the coordinator's CPU time in it. `prepare` is one process's, from trajectories to checked arrays.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

from absl import app, flags

from libra_jax import config as configuration
from libra_jax import protocols
from libra_jax.cluster import create
from libra_jax.models import config as model_config
from libra_jax.training import sequences

GROUPS, SIZE, TURNS, GENERATED, RETURNED, PROMPT, DELTA = 4, 16, 10, 700, 1_100, 1_500, 16
VOCABULARY, VERSION, ROUNDS = 150_000, 5, 5

_PROCESSES = flags.DEFINE_list("processes", ["1", "2", "4"], "Numbers of processes.")


class Receiver:
    """Stands for a process of the trainer."""

    async def tokens(self, batch: protocols.TrainBatch) -> int:
        """Returns the tokens of a batch."""
        return sum(len(rollout.token_ids) for group in batch.groups for rollout in group.trajectories)


def main(argv: list[str]) -> None:
    del argv
    made = batch()
    rollouts = [rollout for group in made.groups for rollout in group.trajectories]
    count = sum(len(rollout.token_ids) for rollout in rollouts)
    shape = model_config.load_preset("Qwen3-14B", "model")
    spent = []
    for _ in range(ROUNDS):
        began = time.process_time()
        sequences.examples(rollouts, VERSION, shape)
        spent.append(time.process_time() - began)
    print(f"{count:,} tokens. prepare: {1e9 * min(spent) / count:.1f} ns a token")
    for processes in map(int, _PROCESSES.value):
        call, loop = asyncio.run(handed_over(made, processes))
        print(f"{processes} processes: call {1e9 * call / count:.0f}, loop {1e9 * loop / count:.0f} ns a token")


def seconds_a_token(processes: int) -> tuple[float, float]:
    """Returns the caller's CPU seconds, and the seconds until each process has made arrays of it, for each token."""
    made = batch()
    rollouts = [rollout for group in made.groups for rollout in group.trajectories]
    count = sum(len(rollout.token_ids) for rollout in rollouts)
    call, loop = asyncio.run(handed_over(made, processes))
    shape, spent = model_config.load_preset("Qwen3-14B", "model"), []
    for _ in range(ROUNDS):
        began = time.process_time()
        sequences.examples(rollouts, VERSION, shape)
        spent.append(time.process_time() - began)
    return loop / count, (call + statistics.median(spent)) / count


async def handed_over(made: protocols.TrainBatch, processes: int) -> tuple[float, float]:
    """Returns the seconds until all processes have the batch, and the caller's CPU seconds; medians."""
    cluster = create.create(configuration.ClusterConfig(backend="ray"))
    try:
        specs = [
            protocols.ActorSpec(f"trainer.{number}", "tests.benchmarks.handover:Receiver", {}, cpus=0.1)
            for number in range(processes)
        ]
        actors = [await cluster.spawn(spec) for spec in specs]
        calls, loops = [], []
        for _ in range(ROUNDS + 1):
            again = protocols.TrainBatch(made.policy_version, made.groups)
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(actor.call(Receiver.tokens, again) for actor in actors))
            calls.append(time.perf_counter() - began)
            loops.append(time.process_time() - cpu)
        return statistics.median(calls[1:]), statistics.median(loops[1:])
    finally:
        await cluster.shutdown()


def batch() -> protocols.TrainBatch:
    """Returns the batch, whose rollouts grew delta by delta as in a run."""
    drawn, groups = random.Random(0), []
    for number in range(GROUPS):
        task = protocols.Task(f"p{number}", {})
        rollouts = [_rollout(f"p{number}/{sample}", task.prompt_id, drawn) for sample in range(SIZE)]
        groups.append(protocols.Group(number, task, VERSION, rollouts))
    return protocols.TrainBatch(VERSION, tuple(groups))


def _rollout(name: str, prompt_id: str, drawn: random.Random) -> protocols.Trajectory:
    made = protocols.Trajectory(name, prompt_id, reward=1.0)
    made.append_text([drawn.randrange(VOCABULARY) for _ in range(PROMPT)], protocols.TokenSource.PROMPT)
    for _ in range(TURNS):
        for first in range(0, GENERATED, DELTA):
            count = min(DELTA, GENERATED - first)
            ids = tuple(drawn.randrange(VOCABULARY) for _ in range(count))
            made.append_sampled(
                protocols.TokenDelta(ids, tuple(-drawn.random() for _ in range(count)), (VERSION,) * count)
            )
        made.append_text([drawn.randrange(VOCABULARY) for _ in range(RETURNED)], protocols.TokenSource.TOOL)
        made.turns.append(protocols.Turn(GENERATED, "bash", "success", RETURNED, 1.0, 2.0))
    return made


if __name__ == "__main__":
    app.run(main)
