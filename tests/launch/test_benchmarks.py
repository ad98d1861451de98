"""Benchmarks measure real objects, and refuse the name of a part that does not exist."""

import asyncio

import scripts

from tests.benchmarks import coordinator


def test_a_request_is_measured_through_the_real_dispatcher():
    (seconds,) = asyncio.run(coordinator.cpu_seconds(coordinator.Shape(), 2))
    assert 0.0 < seconds < 1.0


def test_a_part_that_does_not_exist_is_refused(tmp_path):
    refused = scripts.run("tests.benchmarks", "--only=schedular", f"--output={tmp_path / 'out.json'}")
    scripts.assert_one_sentence(refused, "error: --only: 'schedular' is not one of relay, adapters, staggered,")
