"""The time in other time zones: questions for `convert_time`, a tool of the public MCP server `mcp-server-time`.

Made for a character model of half a million parameters, like the calculator. All prompts have the same width, and calls
for the same zone look alike. The tool returns in the demonstrations have the format of that server.
"""

from __future__ import annotations

import datetime
import json
import random
import zoneinfo
from collections.abc import Mapping, Sequence

from libra_jax import config, protocols
from libra_jax.agents import question, splits
from libra_jax.agents.environments import dialogue
from libra_jax.agents.tools import toolbox, toolkit

TOOL = "convert_time"

_ZONES = (
    "Asia/Tokyo",
    "Asia/Dubai",
    "Asia/Kolkata",
    "Africa/Lagos",
    "Africa/Nairobi",
    "America/Bogota",
    "America/Lima",
)
"""Zones without daylight saving time, so that an answer does not depend on the day."""

_WIDTH = 30


def _draw(index: int, rng: random.Random) -> tuple[str, Mapping[str, object]]:
    del index
    time, zone = f"{rng.randrange(24):02}:{rng.randrange(60):02}", rng.choice(_ZONES)
    return f"{time} {zone}", {"time": time, "zone": zone, "answer": _there(time, zone).strftime("%H:%M")}


def _here(time: str) -> datetime.datetime:
    today = datetime.datetime.now(datetime.UTC)
    hour, minute = map(int, time.split(":"))
    return today.replace(hour=hour, minute=minute, second=0, microsecond=0)


def _there(time: str, zone: str) -> datetime.datetime:
    return _here(time).astimezone(zoneinfo.ZoneInfo(zone))


async def _pose(task: protocols.Task, tools: toolbox.Toolbox) -> Sequence[protocols.Message]:
    del tools
    return [_question(task)]


def _question(task: protocols.Task) -> protocols.Message:
    return protocols.Message("user", f"{task.payload['time']} UTC in {task.payload['zone']}".ljust(_WIDTH))


async def _score(task: protocols.Task, output: str, tools: toolbox.Toolbox) -> dialogue.Verdict:
    del tools
    return dialogue.Verdict(float(question.final_answer(output) == task.payload["answer"]))


def _told(moment: datetime.datetime, zone: str) -> dict[str, object]:
    return {
        "timezone": zone,
        "datetime": moment.isoformat(timespec="seconds"),
        "day_of_week": moment.strftime("%A"),
        "is_dst": bool(moment.dst()),
    }


def task_source(path: str = "", seed: int = 0) -> splits.Generated:
    """Returns generated questions.

    Args:
      path: Must be empty, because nothing is read.
      seed: Seed of the training stream.

    Raises:
      ConfigError: A path is given.
    """
    config.check(not path, "task.path", "questions of time zones are generated; no file is read")
    return splits.Generated("time", seed, _draw, stream="time-zones")


def environment(tools: toolkit.Toolkit, system: str = "") -> dialogue.Dialogue:
    """Returns the environment for one rollout. The reward is 1 if the last output gives the time as HH:MM.

    Args:
      tools: Tools of the run. One of them should be the server's.
      system: System message. Empty means none.
    """

    def demonstrate(task: protocols.Task) -> Sequence[protocols.Message]:
        time, zone = task.payload["time"], task.payload["zone"]
        here, there = _here(time), _there(time, zone)
        hours = (there.utcoffset() or datetime.timedelta()).total_seconds() / 3600
        difference = f"{hours:+.1f}h" if hours.is_integer() else f"{hours:+.2f}".rstrip("0") + "h"
        told = {"source": _told(here, "UTC"), "target": _told(there, zone), "time_difference": difference}
        call = tools.format.write(TOOL, {"source_timezone": "UTC", "time": time, "target_timezone": zone})
        opening = [protocols.Message("system", system)] if system else []
        return [
            *opening,
            _question(task),
            protocols.Message("assistant", call),
            protocols.Message("tool", json.dumps(told, indent=2)),
            protocols.Message("assistant", task.payload["answer"]),
        ]

    return dialogue.Dialogue(tools, _pose, _score, system=system, demonstrate=demonstrate)
