"""How JAX compiles in tests: less optimised code, and one cache of programs for all processes of a session.

With XLA_FLAGS set, to nothing for XLA's own defaults, the tests compile as it says.
"""

import os
import pathlib
import shutil
import tempfile

_FAST = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_use_fusion_emitters": "false",
}
OPTIMISED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_use_fusion_emitters": True,
}
"""Options of a program that runs long enough to be worth it: `jax.stages.Lowered.compile`."""

_CACHE = "JAX_COMPILATION_CACHE_DIR"
# Most of a test's programs are small ones, of which JAX keeps none by default.
_KEPT = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


def begin() -> None:
    """Sets the variables, for this process and those that it starts. Call before JAX is imported."""
    os.environ.setdefault("XLA_FLAGS", " ".join(f"--{name}={value}" for name, value in _FAST.items()))
    if _CACHE not in os.environ:
        os.environ[_CACHE] = tempfile.mkdtemp(prefix="libra-jax-programs-")
    for name, value in _KEPT.items():
        os.environ.setdefault(name, value)


def end() -> None:
    """Removes the cache that `begin` made."""
    cache = pathlib.Path(os.environ[_CACHE])
    if cache.name.startswith("libra-jax-programs-"):
        shutil.rmtree(cache, ignore_errors=True)


def variables() -> dict[str, str]:
    """The variables, for processes that do not inherit this one's."""
    return {name: os.environ[name] for name in ("XLA_FLAGS", _CACHE, *_KEPT)}
