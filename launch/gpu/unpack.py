"""Unpacks the bundle of `launch/gpu/bundle.py` beside a machine's torch and JAX, and checks what can be imported.

  python launch/gpu/unpack.py part_1.tar.xz part_2.tar.xz --target=/tmp/libra_vllm
  export PYTHONPATH=$PWD:/tmp/libra_vllm

It runs with the Python that has torch, writes nothing into that Python's environment, and needs the standard library
alone. Both parts, or one after the other, go into the same target. The check imports what an engine imports; a name
with * needs a GPU, and is left out where the machine has no driver. The exit status is 1 if an import failed.
"""

from __future__ import annotations

import argparse
import ctypes
import lzma
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = REPOSITORY / "build" / "gpu_bundle"

MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.sample.sampler",
    "vllm.compilation.backends",
    "vllm.distributed.weight_transfer.ipc_engine",
    "vllm.distributed.weight_transfer.nccl_engine",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "libra_jax.engines.vllm_engine",
    "libra_jax.engines.vllm_weights",
    "libra_jax.engines.vllm_weight_sender",
    "libra_jax.build.api",
    "ml_collections.config_flags",
    "tensorboardX",
)
"""What a run's processes import."""

KERNELS = {
    "vllm._C_stable_libtorch": "torch.ops._C.rms_norm",
    "vllm._moe_C_stable_libtorch": "torch.ops._moe_C.topk_softmax",
    "vllm.vllm_flash_attn._vllm_fa3_C": "torch.ops._vllm_fa3_C.fwd",
    "vllm.cumem_allocator": "",
}
"""Libraries that load only where a GPU's driver is, and an operator that each one registers."""

CHECK = """
import importlib, importlib.metadata, sys
failed = 0
try:
    version = importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    sys.exit("FAILED: there is no vllm in the target; unpack part_1.tar.xz")
print(f"vllm {version}")
if "cpu" in version:
    failed, _ = 1, print("FAILED: vLLM would take the CPU for its platform")
plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
if not any(plugin.name == "libra_jax" for plugin in plugins):
    failed, _ = 1, print("FAILED: the plug-in of Libra-JAX is not registered")
for name, operator in CASES:
    try:
        importlib.import_module(name)
        if operator:
            import torch
            namespace, _, function = operator.removeprefix("torch.ops.").partition(".")
            getattr(getattr(torch.ops, namespace), function)
        print(f"imported {name}")
    except BaseException as error:
        failed = 1
        print(f"FAILED: {name}: {type(error).__name__}: {str(error)[:300]}")
sys.exit(failed)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Unpacks the parts and runs the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="Parts, by path or by their name under build/gpu_bundle; none checks.")
    parser.add_argument("--target", type=Path, default=Path("/tmp/libra_vllm"))
    flags = parser.parse_args(arguments)
    for name in flags.parts:
        part = Path(name) if Path(name).exists() else PARTS / name
        if not part.is_file():
            print(f"{name}: no such file, and none of that name under {PARTS}", file=sys.stderr)
            return 2
        flags.target.mkdir(parents=True, exist_ok=True)
        try:
            with lzma.open(part) as content, tarfile.open(fileobj=content) as archive:
                archive.extractall(flags.target, filter="data")
                # A tar ends before its compressed file does. Only the end of the latter shows that nothing is cut off.
                while content.read(2**20):
                    pass
        except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
            print(f"{part} does not unpack: {error}", file=sys.stderr)
            return 2
    return check(flags.target)


def check(target: Path) -> int:
    """Imports everything in a process of its own; prints a line each. Returns 1 if an import failed."""
    cases = [(name, "") for name in MODULES]
    for name, operator in KERNELS.items():
        if not (target / (name.replace(".", "/") + ".abi3.so")).is_file():
            print(f"left out {name}*: its part is not unpacked")
        elif not _has_driver():
            print(f"left out {name}*: this machine has no GPU driver")
        else:
            cases.append((name, operator))
    # VLLM_CONFIGURE_LOGGING: what vLLM says of the machine does not belong into the table.
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{target}",
        "VLLM_CONFIGURE_LOGGING": "0",
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    }
    command = [sys.executable, "-W", "ignore", "-c", CHECK.replace("CASES", repr(cases))]
    try:
        return min(subprocess.run(command, env=environment, timeout=600, check=False).returncode, 1)
    except subprocess.TimeoutExpired:
        print("FAILED: the imports did not end within 600 s")
        return 1


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
