"""A device of a topology description answers for the GPU that this machine lacks."""

import pathlib
import re
import types

import jax
from jax._src.cudnn import fused_attention_stablehlo as stablehlo

from libra_jax.training import topology

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")


def test_a_device_on_paper_answers_only_inside_the_block():
    before = [getattr(stablehlo, name) for name in NAMES]
    device = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    with topology.answering_for(device):
        assert stablehlo.check_cudnn_version() == topology.cudnn_version()
        assert [stablehlo.check_compute_capability(least) for least in ("8.9", "9.0", "10.0")] == [True, True, False]
        assert stablehlo.is_cuda_compute_capability_equal("9.0")
        assert not stablehlo.is_cuda_compute_capability_equal("10.3")
    assert [getattr(stablehlo, name) for name in NAMES] == before
    with topology.answering_for(jax.devices("cpu")[0]):
        assert [getattr(stablehlo, name) for name in NAMES] == before


def test_programs_are_compiled_for_the_libraries_that_a_gpu_machine_installs():
    lock = (ROOT / "third_party/cuda/lock.txt").read_text()
    description = topology._description(topology.TARGETS["h100"])
    major, minor, patch = re.search(r"^nvidia-cudnn-cu13==(\d+)\.(\d+)\.(\d+)", lock, re.MULTILINE).groups()
    assert f'dnn_version: "{major}.{minor}.{patch}"' in description
    assert topology.cudnn_version() == 10_000 * int(major) + 100 * int(minor) + int(patch)
    runtime = re.search(r"^nvidia-cuda-runtime==(\d+\.\d+)\.", lock, re.MULTILINE)[1]
    assert f'runtime_version: "{runtime}.0"' in description
