"""A whole run with 64 sessions in flight, in a process of its own, to be killed: `python gateway_child.py WORKDIR`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "coordinator")]

import coordinator_doubles as doubles

from libra_jax import config as config_lib
from libra_jax import harness, protocols
from libra_jax.chat import chat_format, tokenizers
from libra_jax.cluster import inprocess
from libra_jax.coordinator import checkpoints, parts
from libra_jax.coordinator import run as run_module
from libra_jax.harness.gateway import fronts
from libra_jax.rollouts import harness_loop, rollouts
from libra_jax.scheduling import registry
from libra_jax.telemetry import recorder

GROUPS, SIZE, STEPS = 8, 8, 4
"""64 rollouts of a step, all under way at once."""


def config(**changes: Any) -> config_lib.RunConfig:
    """The configuration of a run with 64 sessions in flight."""
    return doubles.make_config(
        **{
            "steps": STEPS,
            "rollout": {"slots": 16, "max_context": 512, "max_tokens": 24, "stream_interval": 4},
            "coordinator": {"groups_per_step": GROUPS, "group_size": SIZE},
            "checkpoint": {"every": 1, "keep": 2},
            "telemetry": {"console": False, "tensorboard": False, "report": False},
            **changes,
        }
    )


def make(
    config: config_lib.RunConfig,
    cluster: protocols.Cluster,
    record: protocols.Recorder,
    workdir: Path,
    environment: dict[str, Any],
    **engines: Any,
) -> run_module.Coordinator:
    """Returns a coordinator over doubles whose environment is a harness with these arguments."""
    context = parts.CoordinatorContext(config, cluster, record, workdir)
    tokenizer, tasks = tokenizers.CharacterTokenizer(), doubles.Tasks()
    host = harness_loop.SessionResources(
        fronts.Fronts(context, "policy"), lambda: chat_format.CharacterFormat(tokenizer)
    )
    specs = parts.WorkerSpecs(
        protocols.ActorSpec(
            "trainer", "coordinator_doubles:make_trainer", {"seconds": 0.02, "log": str(workdir / "trainer.json")}
        ),
        doubles.engine_specs(config, **engines),
    )
    agent = rollouts.Agent(
        tasks=tasks,
        make_environment=lambda: harness.environment(**environment),
        tokenizer=tokenizer,
        demonstrator=tasks,
        host=host,
    )
    return run_module.Coordinator(context, specs, agent, registry.create(config.scheduler), None)


async def main(workdir: Path) -> None:
    settings = config()
    recorder.cut_back(workdir, checkpoints.newest_step(workdir))
    record = recorder.create(settings, workdir, asyncio.get_running_loop().time)
    arguments = {"callable": "gateway_agents:agent", "arguments": {"seconds": 0.05}}
    made = make(
        settings,
        inprocess.InProcessCluster(shutdown_seconds=5.0),
        record,
        workdir,
        arguments,
        tokens_per_second=400.0,
    )
    print("running", flush=True)
    summary = await made.run()
    record.close()
    print(summary.sentence, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
