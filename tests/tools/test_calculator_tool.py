"""The calculator as a tool of `config.tools`."""

import asyncio

import pytest

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools import toolkit


def called(*expressions, **arguments):
    async def body():
        chosen = config_lib.ToolsConfig(use=("calculator",), arguments={"calculator": arguments} if arguments else {})
        async with toolkit.Toolkit(chosen, config_lib.SandboxConfig()) as tools:
            box = await tools.toolbox()
            return [await box.call("calculator", {"expression": expression}) for expression in expressions]

    return asyncio.run(body())


def test_values_are_exact_and_mistakes_are_failures_that_the_policy_reads():
    returns = called("12*(345-6)", "7/21", "2**0.5", "1/0", "import os", "", "9" * 200)
    assert [(answer.status, answer.content) for answer in returns] == [
        ("success", "4068"),
        ("success", "1/3"),
        ("failure", "error: power too large"),
        ("failure", "error: division by zero"),
        ("failure", "error: not an expression"),
        ("failure", "error: not an expression"),
        ("failure", "error: too long"),
    ]
    assert {answer.tool for answer in returns} == {"calculator"}


def test_the_longest_expression_is_the_configs():
    (answer,) = called("100+100+100", max_characters=8)
    assert answer.content == "error: too long"
    with pytest.raises(
        protocols.ConfigError, match=r"tools\.arguments\.calculator\.max_characters: must be positive, not 0"
    ):
        called("1", max_characters=0)
