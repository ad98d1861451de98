"""Which machine this is."""

import os
import subprocess
import sys

from libra_jax import machine


def test_a_machine_is_told_by_its_boot_and_its_process_table_alike_in_all_its_processes():
    boot, _, namespace = machine.identity().partition("/")
    assert namespace == os.readlink("/proc/self/ns/pid")
    assert boot
    command = [sys.executable, "-c", "from libra_jax import machine; print(machine.identity())"]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == machine.identity()
