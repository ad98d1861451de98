"""Measures on this machine what a run needs: rollout, weight sync, the train step and the gateway.

  python launch/benchmark.py [--only=rollout,train] [--peer_python=PATH] [--output=benchmark.json]

  rollout      tokens a second through the coordinator, over bare vLLM
  bridge       bytes a second from JAX arrays to tensors in the engine's process, over memcpy
  weight_sync  seconds of a whole weight sync, vLLM's reload included
  train        tokens a second of the train step, on padded and on real lengths; with --peer_python over google-tunix's
  gateway      requests a second of 1,000 live sessions, their latency, and memory a session

The two sides of a ratio take turns, in one process or in two, so that a machine whose speed drifts slows both.
Medians are compared. It asks malloc for huge pages, as launch/train.py does on CPUs; GLIBC_TUNABLES in the environment
with a value for glibc.malloc.hugetlb wins. `--peer_python` is an interpreter with google-tunix, in an environment of
its own. Benchmarks of single parts, such as the scheduler or the planner, are in tests/benchmarks (`python -m
tests.benchmarks`).
"""

from __future__ import annotations

import asyncio

from support import cli

from absl import flags

from benchmarks import bridge, gateway, parts, rollout, train, weight_sync
from libra_jax import config as config_lib
from libra_jax.build import huge_pages

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of the two sides; short ones get a multiple.", lower_bound=1)
_PEER = flags.DEFINE_string("peer_python", None, "Interpreter with google-tunix; without it that ratio is left out.")

PARTS: parts.Parts = {
    "rollout": lambda: asyncio.run(rollout.measure(3 * _ROUNDS.value)),
    "bridge": lambda: bridge.measure(6 * _ROUNDS.value),
    "weight_sync": lambda: asyncio.run(weight_sync.measure(_ROUNDS.value)),
    "train": lambda: train.measure(_ROUNDS.value, _PEER.value),
    "gateway": lambda: gateway.measure(_ROUNDS.value),
}

_measure = parts.main(PARTS)


def main() -> None:
    huge_pages.restart(config_lib.RunConfig(trainer=config_lib.TrainerConfig(platform="cpu")))
    _measure()


if __name__ == "__main__":
    cli.run(main)
