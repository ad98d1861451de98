"""Serves a run's checkpoint or a model behind the gateway, for any client. The work of launch/serve.py."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import api, evaluating
from libra_jax.harness.gateway import server
from libra_jax.utils import resolving


def serve(
    request: evaluating.EvaluationRequest,
    explicit_config: config_lib.RunConfig | None,
    *,
    host: str | None,
    port: int | None,
    key_env: str,
    ready: Callable[[protocols.Endpoint], None],
) -> None:
    """Starts the engines of a config with the chosen weights, and serves them until SIGINT or SIGTERM.

    Args:
      request: which weights to serve; the fields of an evaluation stay unset.
      explicit_config: config of --config; None takes the one of the run's folder.
      host: address to listen at; None: the config's.
      port: port to listen at, 0 is any; None: the config's.
      key_env: environment variable with the clients' key; empty: a random key.
      ready: called with the address once it is served.
    """
    secret = os.environ.get(key_env, "") if key_env else ""
    if key_env and not secret:
        raise protocols.ConfigError(f"--key_env: the environment has no variable {key_env}, or it is empty")
    config, checkpoint, source = evaluating.chosen(request, explicit_config)
    config = evaluating.located(config, request)
    changes = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    try:
        gateway = dataclasses.replace(config.gateway, **changes)  # type: ignore[arg-type]
        # Now, and not once the engines have loaded for minutes.
        server.bound(gateway).close()
    except protocols.ConfigError as error:
        raise protocols.ConfigError(str(error).replace("config.gateway.", "--")) from error
    config = dataclasses.replace(config, gateway=gateway)
    if config.rollout.engine == "fake":
        print("warning: config.rollout.engine is fake, a test double without a model: its answers are noise.")
    print(f"Loading {source}.")
    with resolving.contain_task_exits():
        asyncio.run(api.serve(config, checkpoint, secret=secret, ready=ready))
