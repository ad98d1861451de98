"""Parameters that several processes share, brought to the first of them a layer at a time."""

import json
import socket
import subprocess
import sys

import gathering_process
import numpy as np
import pytest
import safetensors.numpy


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_snapshot_of_two_processes_needs_two_layers_beside_it(tmp_path):
    """Resident memory counts everything; the export that follows holds the same parameters."""
    port = free_port()
    command = [sys.executable, gathering_process.__file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), str(tmp_path / "model")], stdout=-1, text=True)
        for rank in range(2)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=280)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert found[0]["wrong"] == []
    for each in found:
        assert each["peak"] <= 2 * each["layer"], found
    tensors = safetensors.numpy.load_file(tmp_path / "model" / "model.safetensors")
    assert set(tensors) == set(gathering_process.ENTRIES)
    for name, tensor in tensors.items():
        assert np.array_equal(tensor, gathering_process.value(gathering_process.ENTRIES[name])), name
