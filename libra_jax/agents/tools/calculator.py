"""The calculator as a tool: exact arithmetic for a policy that computes badly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libra_jax import config, protocols
from libra_jax.agents import arithmetic


class Calculator:
    """Evaluates an expression exactly.

    Args:
      max_characters: Largest length of an expression. A longer expression fails.

    Raises:
      ConfigError: The limit is not positive.
    """

    name = arithmetic.TOOL
    description = (
        "Gives the exact value of an expression of numbers, + - * / ** and parentheses: a whole number, or a fraction "
        "in its lowest terms."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example 12*(345-6)."}},
        "required": ["expression"],
        "additionalProperties": False,
    }
    eager = True  # no side effects: a call may begin before the output that makes it has ended

    def __init__(self, max_characters: int = 120) -> None:
        good = isinstance(max_characters, int) and max_characters > 0
        config.check(good, "tools.arguments.calculator.max_characters", f"must be positive, not {max_characters!r}")
        self._max_characters = max_characters

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        """See `toolbox.Tool`."""
        return arithmetic.carry_out(arguments["expression"], self._max_characters, stepwise=False)
