"""Records of samples, with text that would take over a terminal."""

from __future__ import annotations

from typing import Any

NASTY = "\x1b[2J\x1b]0;owned\x07<script>alert(1)</script>\u202egnp.exe\x9b31m"


def record(step: int, rank: int = 1, of: int = 4, **changes: Any) -> dict[str, Any]:
    turn = {"text": f"I call {NASTY}", "generated_tokens": 7, "tool": "look", "status": "failure", "tool_seconds": 0.5}
    return {
        "step": step,
        "evaluation": False,
        "policy_version": step - 1,
        "group_id": 3,
        "rank": rank,
        "of": of,
        "trajectory_id": f"task-{step}/{rank}",
        "prompt_id": f"task-{step}",
        "reward": 1.0 - rank / of,
        "reward_parts": {"length": -0.25},
        "finish": "answered",
        "token_versions": [step - 1, step],
        "prompt": f"What is {step}?",
        "turns": [{**turn, "returned": f"no such thing {NASTY}"}, {"text": "It is 4", "generated_tokens": 3}],
        **changes,
    }
