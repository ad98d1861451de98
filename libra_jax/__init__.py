"""Libra-JAX: agentic RL post-training of LLMs that keeps every accelerator busy.

    import libra_jax
    from libra_jax import config as config_lib

    trained = libra_jax.train(config_lib.RunConfig(), environment=MyEnvironment, reward=my_reward, tasks=my_tasks)

The functions are imported when they are used: vLLM's processes import this package, too, and must not load JAX.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libra_jax.build.api import evaluate, evaluate_async, plan, simulate, simulate_async, train, train_async
    from libra_jax.build.records import load
else:

    def __getattr__(name):
        """Imports a public function at its first use. Type checkers see the functions above."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("libra_jax.build." + ("records" if name == "load" else "api")), name)


# No HTTP client asks a proxy for this machine, here or in a process that starts here. Clients read either name.
for _name, _other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
    _hosts = [host for host in os.environ.get(_name, os.environ.get(_other, "")).split(",") if host.strip()]
    if "*" not in _hosts:
        _hosts += [host for host in ("127.0.0.1", "localhost", "::1") if host not in _hosts]
    os.environ[_name] = ",".join(_hosts)

__all__ = ["evaluate", "evaluate_async", "load", "plan", "simulate", "simulate_async", "train", "train_async"]


def __dir__() -> list[str]:
    """Returns what the module offers, for completion and documentation."""
    return [*globals(), *__all__]
