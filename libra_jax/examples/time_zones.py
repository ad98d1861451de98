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

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.environments import dialogue, question
from libra_jax.rewards import answers
from libra_jax.rollouts import splits
from libra_jax.tools import toolbox, toolkit

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
"""Number of characters to which prompts are padded, so that what a call copies lies at a constant distance."""


def _moments(time: str, zone: str) -> tuple[datetime.datetime, datetime.datetime]:
    """Returns a time of today in UTC, and the same moment in a zone."""
    hour, minute = map(int, time.split(":"))
    here = datetime.datetime.now(datetime.UTC).replace(hour=hour, minute=minute, second=0, microsecond=0)
    return here, here.astimezone(zoneinfo.ZoneInfo(zone))


def task_source(path: str = "", seed: int = 0) -> splits.Tasks:
    """Returns generated questions."""
    config_lib.check(not path, "task.path", "questions of time zones are generated; no file is read")

    def draw(index: int, rng: random.Random) -> tuple[str, Mapping[str, object]]:
        del index
        time, zone = f"{rng.randrange(24):02}:{rng.randrange(60):02}", rng.choice(_ZONES)
        answer = _moments(time, zone)[1].strftime("%H:%M")
        prompt = f"{time} UTC in {zone}".ljust(_WIDTH)
        return f"{time} {zone}", {"prompt": prompt, "time": time, "zone": zone, "answer": answer}

    return splits.generated("time", seed, draw, stream="time-zones")


def environment(tools: toolkit.Toolkit, system: str = "") -> dialogue.Dialogue:
    """Returns the environment for one rollout. The reward is 1 if the last output gives the time as HH:MM.

    Args:
      tools: Tools of the run. One of them should be the server's.
      system: System message. Empty means none.
    """

    def score(task: protocols.Task, output: str, _: toolbox.Toolbox) -> dialogue.Verdict:
        return dialogue.Verdict(float(answers.final(output) == task.payload["answer"]))

    def demonstrate(task: protocols.Task) -> Sequence[protocols.Message]:
        time, zone = task.payload["time"], task.payload["zone"]
        here, there = _moments(time, zone)
        hours = (there.utcoffset() or datetime.timedelta()).total_seconds() / 3600
        # Written as the server writes it: one decimal for whole hours, otherwise as many as needed.
        difference = f"{hours:+.1f}h" if hours.is_integer() else f"{hours:+.2f}".rstrip("0") + "h"
        moments = {
            name: {
                "timezone": place,
                "datetime": moment.isoformat(timespec="seconds"),
                "day_of_week": moment.strftime("%A"),
                "is_dst": bool(moment.dst()),
            }
            for name, moment, place in (("source", here, "UTC"), ("target", there, zone))
        }
        call = tools.format.write(TOOL, {"source_timezone": "UTC", "time": time, "target_timezone": zone})
        returned = json.dumps({**moments, "time_difference": difference}, indent=2)
        return dialogue.solved(
            question.opening(task.payload["prompt"], system), [(call, returned)], task.payload["answer"]
        )

    return dialogue.Dialogue(tools, dialogue.posed, score, system=system, demonstrate=demonstrate)
