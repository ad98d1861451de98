"""Weights from two processes of a trainer to two instances by nccl's path, as far as it goes without CUDA."""

import json
import pathlib
import subprocess
import sys

import pytest
from test_gathering import free_port

SCRIPT = pathlib.Path(__file__).parent / "nccl_process.py"


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.multiprocess
def test_two_instances_receive_what_two_trainer_processes_hold():
    """An instance of two workers and one of one, in one group; then a restarted instance alone, in another."""
    run = subprocess.run([sys.executable, SCRIPT, str(free_port())], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    received = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('["')]
    assert [name for name, _, _ in received] == ["a0", "a1", "b0", "b0"]
    for _, loads, wrong in received:
        assert wrong == []
        # About a layer each, the tables alone: an engine never buffers much of the model.
        assert 30 <= loads <= 45
