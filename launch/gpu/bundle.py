"""Packs vLLM for a GPU machine that has torch and JAX, and neither vLLM nor a network.

  python launch/gpu/bundle.py --wheel=vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl

Without --wheel, pip downloads the pinned one. The bundle is two archives under build/gpu_bundle, each small enough for
one transfer. `launch/gpu/unpack.py` installs them there:

  part_1.tar.xz  vLLM's Python, its basic kernels, and the packages of third_party/cuda/bundle.txt
  part_2.tar.xz  FlashAttention 3 and the kernels of experts, which an engine starts without

vLLM's kernels are built on torch's stable ABI, so they run on an older torch than the pinned one. Machine code of other
GPU architectures is removed (`fat_binaries`). The script needs the standard library and pip.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "launch"))  # so that it runs by its path, as the other scripts do

from gpu import fat_binaries  # noqa: E402 (found through the line above)

PART_LIMIT_MIB = 50.0
"""Most MiB of a part, so that it travels with a checkout in one transfer of 64 MiB."""

PRESET: Final = 3
"""Compression level of xz. Level 6 takes four times as long and saves a tenth."""

PIP_SECONDS = 900.0
"""Deadline in seconds of one call of pip."""

PYTHON = "3.12"
PLATFORMS = tuple(
    f"manylinux{version}_x86_64" for version in ("_2_34", "_2_31", "_2_28", "_2_27", "_2_17", "2014", "_2_5", "1")
)
"""Python of the GPU machine, and the tags of wheels that its C library (glibc 2.34 or newer) takes."""

KERNELS = ("vllm/_C_stable_libtorch.abi3.so", "vllm/cumem_allocator.abi3.so", "vllm/spinloop.abi3.so")
"""Libraries of part 1. vLLM imports the first whenever it finds a GPU; the second is its sleep mode."""

OPTIONAL_KERNELS = ("vllm/_moe_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
"""Libraries of part 2."""

UNUSED = ("vllm/third_party/fmha_sm100", "vllm/third_party/deep_gemm", "vllm/third_party/tml_fa4", "vllm/benchmarks")
"""Folders of vLLM for other GPUs, or for its own benchmarks."""


class BundleError(Exception):
    """The bundle cannot be made; the message says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the bundle and prints the size of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="Wheel of vLLM for CUDA. Default: pip downloads the pinned one.")
    parser.add_argument("--packages", type=Path, default=REPOSITORY / "third_party" / "cuda" / "bundle.txt")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "build" / "gpu_bundle")
    parser.add_argument("--architecture", type=int, default=90, help="Compute capability times ten. Default: 90.")
    flags = parser.parse_args(arguments)
    try:
        parts = make(flags.wheel, flags.packages, flags.output, flags.architecture)
    except BundleError as error:
        print(error, file=sys.stderr)
        return 2
    for part in parts:
        print(f"{part}: {part.stat().st_size / 2**20:.1f} MiB")
    print(f"On the GPU machine: python launch/gpu/unpack.py {' '.join(part.name for part in parts)}")
    return 0


def make(wheel: Path | None, packages: Path, output: Path, architecture: int) -> list[Path]:
    """Writes the parts and returns their paths.

    Args:
      wheel: wheel of vLLM for CUDA; None downloads the one that `third_party/cuda/lock.txt` pins.
      packages: requirements file of the packages that the GPU machine lacks.
      output: folder of the parts.
      architecture: compute capability of the GPU times ten.

    Raises:
      BundleError: a file is missing or is no CUDA wheel of vLLM, a package cannot be had, or a part is too large.
    """
    for path in (packages, *([wheel] if wheel else [])):
        if not path.is_file():
            raise BundleError(f"{path}: no such file")
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=output) as scratch:
        folder = Path(scratch)
        source = wheel or _download(folder / "wheel")
        engine, kernels = folder / "engine", folder / "kernels"
        print(f"Unpacking {source.name} and removing the code of other GPUs ...", flush=True)
        _unpack_wheel(source, engine, kernels, architecture)
        print(f"Fetching the packages of {packages.name} for Python {PYTHON} ...", flush=True)
        _install(packages, engine)
        _describe_checkout(engine)
        parts = [output / "part_1.tar.xz", output / "part_2.tar.xz"]
        for part, tree in zip(parts, (engine, kernels), strict=True):
            print(f"Writing {part.name} ...", flush=True)
            _write(part, tree)
    return parts


def _unpack_wheel(wheel: Path, engine: Path, kernels: Path, architecture: int) -> None:
    """Writes vLLM's Python and slimmed libraries into the trees of both parts."""
    try:
        archive = zipfile.ZipFile(wheel)
    except zipfile.BadZipFile as error:
        raise BundleError(f"--wheel: {wheel} is no wheel ({error})") from error
    with archive:
        names = archive.namelist()
        if missing := [name for name in (*KERNELS[:1], *OPTIONAL_KERNELS) if name not in names]:
            raise BundleError(
                f"--wheel: {wheel.name} lacks {missing[0]}; give vLLM's wheel for CUDA, not one for CPUs, of the "
                "version that third_party/cuda/lock.txt pins"
            )
        for name in names:
            path = PurePosixPath(name)
            if ".." in path.parts or path.is_absolute() or any(path.is_relative_to(folder) for folder in UNUSED):
                continue
            if path.suffix == ".so" and name not in (*KERNELS, *OPTIONAL_KERNELS):
                continue
            # A program in Rust is larger than all of vLLM's Python; only its command line starts it.
            if name == "vllm/vllm-rs" or name.endswith("/"):
                continue
            target = (kernels if name in OPTIONAL_KERNELS else engine) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.read(name)
            try:
                target.write_bytes(fat_binaries.slim(content, architecture) if path.suffix == ".so" else content)
            except ValueError as error:
                raise BundleError(f"--wheel: {name} of {wheel.name}: {error}; download the wheel again") from error


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise BundleError(f"pip {arguments[0]} did not end within {PIP_SECONDS:.0f} s; is the network there?") from None
    if result.returncode:
        errors = [line.strip() for line in result.stderr.splitlines() if line.lower().lstrip().startswith("error")]
        reason = next(iter(errors), " ".join(result.stderr.split())[-300:])
        raise BundleError(f"pip failed: {reason}")


def _platform_flags() -> list[str]:
    flags = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
    return flags + [f"--platform={platform}" for platform in PLATFORMS]


def _download(folder: Path) -> Path:
    lock = REPOSITORY / "third_party" / "cuda" / "lock.txt"
    (pin,) = [line for line in lock.read_text().splitlines() if line.startswith("vllm==")]
    print(f"Downloading {pin} ...", flush=True)
    _pip("download", pin, f"--dest={folder}", *_platform_flags())
    return next(folder.glob("vllm-*.whl"))


def _install(packages: Path, engine: Path) -> None:
    """Installs the packages for the GPU machine's Python into the tree; nothing of them runs here."""
    _pip("install", f"--requirement={packages}", f"--target={engine}", "--no-compile", *_platform_flags())
    shutil.rmtree(engine / "bin", ignore_errors=True)  # their command lines name this machine's Python


def _describe_checkout(engine: Path) -> None:
    """Adds Libra-JAX's metadata alone, whose entry point vLLM looks up. Its code comes from the checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        _pip("wheel", str(REPOSITORY), f"--wheel-dir={scratch}")
        with zipfile.ZipFile(next(Path(scratch).glob("libra_jax-*.whl"))) as wheel:
            wheel.extractall(engine, [name for name in wheel.namelist() if ".dist-info/" in name])


def _write(part: Path, tree: Path) -> None:
    """Writes an archive of a tree. A part that is too large is removed again."""
    with tarfile.open(part, "w:xz", preset=PRESET) as archive:
        # Sorted, so that the same input gives the same archive; neighbours of one kind compress better, too.
        for path in sorted(tree.rglob("*"), key=lambda path: (path.suffix, path)):
            if path.is_file():
                archive.add(path, str(path.relative_to(tree)), filter=_anonymous)
    size = part.stat().st_size / 2**20
    if size > PART_LIMIT_MIB:
        part.unlink()
        raise BundleError(
            f"{part.name} has {size:.1f} MiB, and at most {PART_LIMIT_MIB:.0f} travel at once: take packages out of "
            "third_party/cuda/bundle.txt that no import check needs"
        )


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    sys.exit(main())
