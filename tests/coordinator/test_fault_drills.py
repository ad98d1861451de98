"""Whole runs in which tools hang, sandboxes and servers die, and environments crash: each group trains once or is told.

What a tool returns is data that the policy sees; what breaks under it is retried afresh and then costs its whole group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import coordinator_doubles as doubles
import pytest
import sandboxes
import tool_doubles

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools import toolkit
from libra_jax.tools.sandbox import backends
from libra_jax.utils import resolving


def check_books(bench: doubles.Bench, summary: Any, group_size: int) -> set[str]:
    """Every prompt begun was trained once or reported, by everything that tells of it; returns those replaced."""
    trained = bench.trained["prompts"]
    begun = {f"task-{index}" for index in range(bench.coordinator._parts.batches.data_position)}
    told = {re.match(r"Prompt (\S+) was replaced \(environment\)", note) for note in bench.recorder.notes}
    replaced = {match.group(1) for match in told if match}
    assert len(trained) == len(set(trained)) == summary.trained
    assert set(trained).isdisjoint(replaced)
    assert set(trained) | replaced == begun
    assert sum(summary.replaced.values()) == len(replaced) == len(begun) - len(trained)
    steps = [scalars for _, scalars in bench.recorder.steps]
    assert sum(scalars["groups/replaced"] for scalars in steps) == len(replaced)
    assert sum(scalars.get("groups/replaced_environment", 0) for scalars in steps) == len(replaced)
    traced = sorted(record["trajectory_id"] for record in bench.recorder.trajectories)
    assert traced == sorted(f"{prompt}/{sample}" for prompt in trained for sample in range(group_size))
    assert all(record["finish"] == "answered" for record in bench.recorder.trajectories)
    return replaced


# Environments that crash ----------------------------------------------------------------------------------------------


class Crashing(doubles.TwoTurns):
    """Of the attempts, 5% break in one of their steps; `crashes` is the ledger."""

    draw: random.Random
    crashes: dict[str, int]
    open = 0

    async def reset(self, task):
        type(self).open += 1
        self._prompt, self._breaks_at = task.prompt_id, 0
        if self.draw.random() < 0.05:
            self._breaks_at = self.draw.choice((1, 2))
        return await super().reset(task)

    async def step(self, output):
        if self._turns + 1 == self._breaks_at:
            self.crashes[self._prompt] = self.crashes.get(self._prompt, 0) + 1
            raise OSError("injected")
        return await super().step(output)

    async def close(self):
        type(self).open -= 1


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("retries", [0, 2])
def test_of_500_trajectories_with_5_percent_crashes_every_prompt_is_trained_once_or_reported(
    tmp_path, staleness, retries
):
    Crashing.draw, Crashing.crashes, Crashing.open = random.Random(7), {}, 0
    config = doubles.make_config(
        steps=25,
        coordinator={"groups_per_step": 5, "group_size": 4, "max_staleness": staleness},
        task={"environment_retries": retries},
    )
    bench = doubles.Bench(config, tmp_path, make_environment=Crashing)
    summary = bench.run()
    assert len(bench.recorder.trajectories) == 500
    replaced = check_books(bench, summary, 4)
    assert max(bench.trained["staleness"]) <= staleness
    assert Crashing.open == 0
    assert sum(Crashing.crashes.values()) >= 20
    scalars = [scalars for _, scalars in bench.recorder.steps]
    voids, most = (sum(step[f"voids/{name}"] for step in scalars) for name in ("rollouts", "most_of_a_prompt"))
    assert 20 <= voids <= sum(Crashing.crashes.values())
    assert staleness or voids == sum(Crashing.crashes.values())
    assert 0 < most <= voids
    if retries == 0:
        assert replaced == set(Crashing.crashes), "exactly the prompts of which an attempt crashed"
        assert summary.replaced == {"environment": len(replaced)}
        assert not any("begins again" in note for note in bench.recorder.notes)
    else:
        assert not replaced, "no one crashed three times in a row"
        assert max(Crashing.crashes.values()) >= 1
        told = [note for note in bench.recorder.notes if "begins again" in note]
        assert len(told) == resolving.MOST_TOLD
        assert all("step raised OSError: injected" in note for note in told)
        assert [note.endswith("; further ones are not shown.") for note in told] == [*[False] * 9, True]


# A server that several attempts share ---------------------------------------------------------------------------------


def run_with_server(tmp_path: Path, config: config_lib.RunConfig, **arguments: Any) -> tuple[Any, Any, Any]:
    """A run on the virtual clock whose tool is a server; bench, summary and the server."""
    tools_config = config_lib.ToolsConfig(use=("tool_doubles:Server",), arguments={"tool_doubles:Server": arguments})
    tool_doubles.Server.made.clear()
    tool_doubles.ToolTurns.open = 0

    async def body() -> tuple[Any, Any]:
        async with toolkit.Toolkit(tools_config, config_lib.SandboxConfig()) as tools:
            bench = doubles.Bench(
                config, tmp_path, make_environment=lambda: tool_doubles.ToolTurns(tools, "lookup", {"task": 0})
            )
            return bench, await bench.coordinator.run()

    bench, summary = doubles.run_on_clock(body())
    (server,) = tool_doubles.Server.made
    assert not server.is_open
    assert tool_doubles.ToolTurns.open == 0
    return bench, summary, server


def test_a_server_that_dies_for_a_moment_costs_attempts_and_no_group(tmp_path):
    bench, summary, server = run_with_server(tmp_path, doubles.make_config(), dead=(0.5, 2.0))
    assert server.lost > 0
    assert check_books(bench, summary, 2) == set()
    statuses = {turn["status"] for record in bench.recorder.trajectories for turn in record["turns"]}
    assert statuses == {"success", None}, "no policy is told of what it did not do"


def test_a_server_that_is_gone_for_long_costs_whole_groups_which_are_told_with_the_reason(tmp_path):
    config = doubles.make_config(coordinator={"max_replacements": 20.0})
    bench, summary, _ = run_with_server(tmp_path, config, dead=(0.5, 12.0))
    replaced = check_books(bench, summary, 2)
    assert replaced
    assert summary.replaced == {"environment": len(replaced)}
    told = [note for note in bench.recorder.notes if note.startswith("Prompt ")]
    assert all("the server 'lookup' is gone" in note for note in told)
    assert summary.steps == config.steps


def test_a_server_that_never_comes_back_ends_the_run_with_a_sentence(tmp_path):
    with pytest.raises(protocols.LibraError, match=r"'lookup' is gone.*groups were replaced \(environment \d+\)"):
        run_with_server(tmp_path, doubles.make_config(), dead=(0.0, 1e9))


def test_a_server_that_is_deaf_to_a_call_is_a_timeout_of_its_tool_and_the_call_is_given_up(tmp_path):
    config = doubles.make_config(task={"tool_seconds": 8.0})
    bench, summary, server = run_with_server(tmp_path, config, deaf=(2, 5))
    assert check_books(bench, summary, 2) == set()
    turns = {record["prompt_id"]: record["turns"][0] for record in bench.recorder.trajectories}
    late = {prompt: turn["tool"] for prompt, turn in turns.items() if turn["status"] == "timeout"}
    assert late == {"task-2": "lookup", "task-5": "lookup"}
    assert server.cancelled == 4
    timeouts = [scalars["tool/lookup/timeouts"] for _, scalars in bench.recorder.steps]
    assert sum(timeouts) == 4


# Sandboxes ------------------------------------------------------------------------------------------------------------


MOST = 6
"""Sandboxes in use at once."""


class Unstartable:
    """A backend none of whose sandboxes starts."""

    def launch(self, *, group: bool) -> backends.SandboxCommand:
        return backends.SandboxCommand(("false",), {})

    def caveats(self, *, group: bool) -> list[str]:
        return []


async def kill_all(made: Any) -> None:
    """Kills every sandbox at once, with -9: of one the first process inside, of the next the one outside of it."""
    for place, worker in enumerate(list(made._live)):
        with contextlib.suppress(ProcessLookupError):
            if place % 2 and worker._first >= 0:
                signal.pidfd_send_signal(worker._first, signal.SIGKILL)
            else:
                os.kill(worker.process.pid, signal.SIGKILL)


async def outage(made: Any, seconds: float, seen: list[Any]) -> None:
    """Once calls are under way, kills their sandboxes, and lets no other start for a while."""
    for _ in range(1000):
        if made._places._value <= MOST - 2:  # two attempts have theirs, which were warm, and call
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    seen.extend(sandboxes.processes_of(made))
    whole, made._backend = made._backend, Unstartable()
    await kill_all(made)
    await asyncio.sleep(seconds)
    made._backend = whole


def run_with_sandboxes(tmp_path: Path, config: config_lib.RunConfig, seconds: float) -> tuple[Any, Any, list[Any]]:
    """A run in real time whose tool is Python in a sandbox, with an outage; bench, summary, processes seen."""
    sandboxes.skip_without_bubblewrap()
    tools_config = config_lib.ToolsConfig(use=("python",))
    sandbox = config_lib.SandboxConfig(seconds=5.0, memory_mib=256, warm=2, most=MOST)
    seen: list[Any] = []
    tool_doubles.ToolTurns.open = 0

    async def body() -> tuple[Any, Any]:
        async with toolkit.Toolkit(tools_config, sandbox) as tools:
            made = await tools.sandbox()
            code = {"code": "import time\ntime.sleep(0.6)\n6 * 7"}
            bench = doubles.Bench(
                config, tmp_path, make_environment=lambda: tool_doubles.ToolTurns(tools, "python", code)
            )
            drill = asyncio.ensure_future(outage(made, seconds, seen))
            summary = await bench.coordinator.run()
            await drill
            seen.extend(sandboxes.processes_of(made))
        assert not await sandboxes.gone(seen), "a process of a sandbox was left behind"
        return bench, summary

    bench, summary = asyncio.run(body())
    assert tool_doubles.ToolTurns.open == 0
    return bench, summary, seen


def test_sandboxes_killed_in_mid_call_are_failures_that_the_policy_sees_and_an_outage_is_outlasted(tmp_path):
    config = doubles.make_config(
        task={"retry_seconds": 0.5, "environment_retries": 4}, coordinator={"max_staleness": 1}
    )
    bench, summary, seen = run_with_sandboxes(tmp_path, config, 1.0)
    assert seen
    assert check_books(bench, summary, 2) == set()
    turns = [record["turns"][0] for record in bench.recorder.trajectories]
    statuses = [turn["status"] for turn in turns]
    assert {turn["tool"] for turn in turns} == {"python"}
    assert statuses.count("failure") >= 1, "those whose sandbox was killed under them"
    assert statuses.count("success") >= 12
    assert statuses.count("timeout") == 0


def test_an_outage_of_sandboxes_beyond_the_retries_costs_whole_groups_which_are_told_with_the_reason(tmp_path):
    config = doubles.make_config(
        task={"retry_seconds": 0.2, "environment_retries": 1},
        coordinator={"max_replacements": 50.0, "max_staleness": 1},
    )
    bench, summary, _ = run_with_sandboxes(tmp_path, config, 3.0)
    replaced = check_books(bench, summary, 2)
    assert replaced
    told = [note for note in bench.recorder.notes if note.startswith("Prompt ")]
    assert all("the sandbox did not start" in note for note in told)
