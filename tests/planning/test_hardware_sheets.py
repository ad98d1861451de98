"""Hardware sheets: figures that hang together, and a sentence for a name that is not there."""

import pytest

from libra_jax import protocols
from libra_jax.planning.costs import hardware


@pytest.mark.parametrize("name", hardware.NAMES)
def test_a_sheet_is_found_by_name_and_its_rates_descend_away_from_the_arithmetic(name):
    sheet = hardware.sheet(name)
    assert sheet.name == name
    assert sheet.flops > sheet.memory_bytes_per_second > sheet.node_link_bytes_per_second
    assert sheet.node_link_bytes_per_second > sheet.network_bytes_per_second > 0


def test_an_a800_is_an_a100_with_two_thirds_of_its_links():
    a100, a800 = hardware.sheet("a100"), hardware.sheet("a800")
    assert (a800.flops, a800.memory_bytes) == (a100.flops, a100.memory_bytes)
    assert a800.node_link_bytes_per_second == pytest.approx(a100.node_link_bytes_per_second * 2 / 3)


def test_a_device_has_the_peak_of_its_own_sheet_or_none():
    assert hardware.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert hardware.peak_flops("TPU v5 lite") == 197e12
    assert hardware.peak_flops("NVIDIA H100 PCIe") is None  # 756e12: another board
    assert hardware.peak_flops("cpu") is None
    assert set(hardware.DEVICE_KINDS.values()) == set(hardware.NAMES)


def test_an_unknown_accelerator_is_answered_with_the_nearest_name():
    with pytest.raises(protocols.ConfigError, match="did you mean 'a800'"):
        hardware.sheet("A80O")
