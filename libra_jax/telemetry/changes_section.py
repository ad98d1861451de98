"""The report's table of settings that changed while the run went on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from libra_jax.telemetry import page


def sections(history: Sequence[dict[str, Any]]) -> list[page.Section]:
    """Builds the table, one row a setting and change; no section where nothing changed.

    Args:
      history: records of `config_history.jsonl`, in order.
    """
    rows = [
        (f"{entry.get('step', 0):,}", name, json.dumps(values[0]), json.dumps(values[1]))
        for entry in history
        for name, values in (entry.get("changes") or {}).items()
    ]
    if not rows:
        return []
    note = "Settings that the run went on with from this step, each with its value before and after."
    return [page.Section("Changed settings", page.table(("step", "setting", "before", "after"), rows), note, wide=True)]
