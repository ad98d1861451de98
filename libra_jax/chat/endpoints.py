"""Clients of servers with OpenAI's API, such as vLLM's: a judge, or a teacher."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from libra_jax import config as config_lib
from libra_jax import protocols

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class ServerEndpoint:
    """A server and the key that it asks for.

    Attributes:
      client: An `openai.AsyncOpenAI`. It retries a request that timed out, did not connect, or was refused for the
        moment (408, 409, 429, 5xx). Waits between retries double from 0.5 s to 8 s, with jitter, or follow the
        endpoint's Retry-After.
      key: Key that errors must not repeat. Empty means none.
    """

    client: Any = field(repr=False)
    key: str = field(repr=False)

    def safe(self, text: str) -> str:
        """Returns the text without the key, which an endpoint's error may repeat."""
        return text.replace(self.key, "[key]") if self.key else text


def create(
    base_url: str, *, api_key_env: str, seconds: float, retries: int, field_name: str, owner_prefix: str = ""
) -> ServerEndpoint:
    """Returns an endpoint. Nothing is asked of it yet.

    Args:
      base_url: Address of the endpoint, including "/v1".
      api_key_env: Environment variable with the key. Empty if the endpoint needs no key.
      seconds: Deadline of one request in seconds.
      retries: Number of retries of a request.
      field_name: Field of the config for errors.
      owner_prefix: Owner of the arguments for errors, such as "the judge's ".
    """
    try:
        import openai  # imported here: it is optional and takes a second to import
    except ModuleNotFoundError as error:
        owner = owner_prefix.removesuffix("'s ") or "an endpoint"
        raise protocols.ConfigError(
            f"config.{field_name}: {owner} needs the package openai; install it with `pip install openai`"
        ) from error

    def check(condition: bool, problem: str) -> None:
        config_lib.check(condition, field_name, f"{owner_prefix}{problem}")

    check(base_url.startswith(("http://", "https://")), "base_url must start with http:// or https://")
    check(0 < seconds < math.inf and retries >= 0, "seconds must be positive, and its retries not negative")
    key = ""
    if api_key_env:
        # The error never repeats the name of an unusable variable, which may be the key itself.
        check(
            _VARIABLE.fullmatch(api_key_env) is not None,
            "api_key_env must be the name of an environment variable that holds the key, never the key itself",
        )
        key = os.environ.get(api_key_env, "")
        check(bool(key), f"api_key_env names {api_key_env}, which is not set where it is needed")
    # The package refuses an empty key, also for an endpoint that needs none.
    client = openai.AsyncOpenAI(base_url=base_url, api_key=key or "none", timeout=seconds, max_retries=retries)
    return ServerEndpoint(client, key)
