"""Refuses environments of the `verifiers` package. Its release 0.4 removed the API through which they could run."""

from __future__ import annotations

from typing import Any, NoReturn

from libra_jax import protocols


def _refuse(field: str) -> NoReturn:
    raise protocols.ConfigError(
        f"config.task.{field}: environments of verifiers cannot be run, because its release 0.4 removed MultiTurnEnv; "
        "write an environment of your own and name it as 'package.module:factory'"
    )


def task_source(**arguments: Any) -> NoReturn:
    """Refuses the tasks.

    Raises:
      ConfigError: Always.
    """
    del arguments
    _refuse("source")


def environment(**arguments: Any) -> NoReturn:
    """Refuses the environment.

    Raises:
      ConfigError: Always.
    """
    del arguments
    _refuse("environment")
