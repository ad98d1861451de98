"""Which machine this is, and its address: that of the interface which leads to the others, or any that is up."""

import os
import socket
import subprocess
import sys
import types

import psutil
import pytest

from libra_jax.utils import machine


def test_a_machine_is_told_by_its_boot_and_its_process_table_alike_in_all_its_processes():
    boot, _, namespace = machine.identity().partition("/")
    assert namespace == os.readlink("/proc/self/ns/pid")
    assert boot
    command = [sys.executable, "-c", "from libra_jax.utils import machine; print(machine.identity())"]
    other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == machine.identity()


def test_on_the_way_to_itself_it_is_the_loopback():
    assert machine.address("127.0.0.1") == "127.0.0.1"
    assert machine.cluster_address("127.0.0.1:6379") == "127.0.0.1"


@pytest.mark.parametrize("address", ["", "auto"])
def test_a_cluster_without_a_named_head_is_met_on_the_way_out(address):
    assert machine.cluster_address(address) == machine.address()


@pytest.fixture
def no_route(monkeypatch):
    """Nothing can be connected to."""

    class Cut(socket.socket):
        def connect(self, target):
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(machine.socket, "socket", Cut)


def interface(monkeypatch, *found, up=True):
    listed = [types.SimpleNamespace(family=socket.AF_INET, address=address) for address in found]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": listed})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": types.SimpleNamespace(isup=up)})


@pytest.mark.usefixtures("no_route")
def test_without_a_way_out_it_is_that_of_an_interface_that_is_up(monkeypatch):
    interface(monkeypatch, "127.0.0.1", "198.18.7.2")
    assert machine.address() == "198.18.7.2"


@pytest.mark.usefixtures("no_route")
def test_without_any_network_it_is_the_loopback(monkeypatch):
    interface(monkeypatch, "198.18.7.2", up=False)
    assert machine.address() == "127.0.0.1"
