"""Keeps compiled programs on disk, so that a restarted trainer need not compile them again.

JAX's persistent compilation cache also serves programs that are compiled ahead of time (`step.Programs`).
"""

from __future__ import annotations

import os
import pathlib

import jax

from libra_jax import protocols

MAX_BYTES = 16 * 2**30
"""Size above which JAX removes the programs that were not used for longest. A program of a large model takes tens of
MB."""


def use(setting: str, platform: str) -> pathlib.Path | None:
    """Turns JAX's cache on as `config.trainer.compilation_cache` says. Call before the first compilation.

    Args:
      setting: value of the setting: auto, off or a path.
      platform: JAX's platform name: "cpu", "gpu" or "tpu".

    Returns:
      The directory of the cache; None if the setting leaves JAX as it is.

    Raises:
      ConfigError: the path cannot be written.
    """
    # Off on CPU by default: XLA compiles for the features of this machine's CPU, which are not part of the cache's key.
    # A home directory that several machines share would hand a program to a CPU that lacks an instruction. On a GPU,
    # the small programs of JAX's CPU backend are not kept, because they compile in less than JAX's minimum of 1 s.
    chosen = setting != "off" and (setting != "auto" or platform != "cpu")
    if not chosen or jax.config.jax_compilation_cache_dir is not None:
        return None
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    directory = (cache / "libra_jax" / "programs" if setting == "auto" else pathlib.Path(setting)).expanduser()
    try:
        # A user who can write here can run code in the trainer.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if setting == "auto":  # a host without a home directory trains all the same
            return None
        raise protocols.ConfigError(
            f"config.trainer.compilation_cache: {directory} cannot be made ({error.strerror}); use another path, or off"
        ) from error
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(directory.absolute()))
    return directory
