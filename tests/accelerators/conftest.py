"""What the gates of compiled programs share: a config file, and running launch/compile.py on it."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from libra_jax.planning.compiled import programs
from libra_jax.training import topology

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = pathlib.Path(__file__).parent / "compiled_config.py"

Compile = Callable[..., programs.CompiledCase]


@pytest.fixture
def compiled(tmp_path) -> Compile:
    """Compiles for a target with these settings. Skips where the target's compiler is not installed."""

    def compile_for(target: str, settings: dict[str, object], *arguments: str) -> programs.CompiledCase:
        if not topology.available(target):
            pytest.skip(f"the compiler for {target} is not installed: bash launch/setup.sh --accelerators={target}")
        output = tmp_path / "compiled.json"
        flags = [f"--config.{name}={value}" for name, value in settings.items()]
        command = ["launch/compile.py", f"--config={CONFIG}", f"--target={target}", f"--json={output}"]
        result = subprocess.run(
            [sys.executable, *command, *flags, *arguments],
            cwd=ROOT,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""},  # as users compile
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        print(result.stdout)
        (case,) = programs.read(output)
        return case

    return compile_for
