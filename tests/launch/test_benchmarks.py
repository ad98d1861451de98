"""The costs that launch/scale.py takes, as they are measured: by the real objects, and told apart from each other."""

import asyncio
import dataclasses

import pytest
import scripts

from tests.benchmarks import calls, coordinator, publishing, simulated_load


def test_costs_of_hosts_and_engines_are_measured_on_the_real_publication():
    made = publishing.costs(1)
    assert set(made) == {"engine_update", "engine_chunk", "host_chunk", "health", "serving"}
    assert 0.0 < made["health"] < 0.01
    assert 0.0 < made["serving"] < 0.01
    assert 0.0 < made["engine_chunk"] + made["host_chunk"] < 0.01


def test_costs_of_an_attempt_are_found_from_whole_attempts_and_predict_another_one():
    planted = {
        "request": 4e-4,
        "turn": 3e-4,
        "delta": 5e-5,
        "generated_token": 2e-7,
        "payload_token": 4e-7,
        "context_token": 1e-8,
    }

    def seconds(shape):
        return sum(count * planted[name] for name, count in zip(calls.ATTEMPT_COSTS, calls.counts(shape), strict=True))

    values, predicted = calls.fit(seconds)
    assert values == pytest.approx(planted, rel=1e-6)
    assert predicted == pytest.approx(seconds(calls.HELD_OUT), rel=1e-6)


def test_what_an_attempt_is_made_of_is_what_its_engine_sees(monkeypatch):
    seen = {}

    class Counting(coordinator.Instant):
        async def generate(self, request):
            seen["turn"] += 1
            seen["context_token"] += len(request.token_ids)
            async for delta in super().generate(request):
                seen["delta"] += 1
                seen["generated_token"] += len(delta.token_ids)
                yield delta

    monkeypatch.setattr(coordinator, "instant", Counting)
    differences = []
    for shape in (calls.HELD_OUT, dataclasses.replace(calls.HELD_OUT, tokens=64, payload=50)):
        seen.update(dict.fromkeys(calls.ATTEMPT_COSTS, 0))
        asyncio.run(coordinator.cpu_seconds(shape, 1))
        counted = dict(zip(calls.ATTEMPT_COSTS, calls.counts(shape), strict=True))
        for name in ("turn", "delta", "generated_token"):
            assert seen[name] == counted[name], name
        assert counted["payload_token"] == (shape.turns - 1) * shape.payload
        differences.append(seen["context_token"] - counted["context_token"])
    assert differences[0] == differences[1] > 0, "the prompt and the template around each output and return, no more"


def test_costs_of_an_attempt_are_measured_through_the_real_dispatcher():
    values, check = calls.attempts("inprocess", 2)
    assert all(0.0 <= value < 0.05 for value in values.values()), "seconds"
    assert any(values.values())
    assert min(check.predicted, check.measured) > 0.0


@pytest.mark.slow
def test_a_simulated_coordinator_is_told_apart_from_the_simulated_machines():
    load = simulated_load.measure(48, 1)
    assert load.requests == 512
    assert load.turns > load.requests
    assert 0.2 * load.cpu_seconds < load.coordinator_seconds < 0.95 * load.cpu_seconds
    assert load.virtual_seconds > 100.0


@pytest.mark.parametrize(
    ("module", "flag", "problem"),
    [
        ("tests.benchmarks", "--only=schedular", "--only: 'schedular' is not one of relay, adapters, staggered,"),
        ("tests.benchmarks.costs", "--simulate=8", "--simulate: '8' are no sizes of 48 or more"),
    ],
)
def test_nonsense_is_refused_before_anything_is_measured(tmp_path, module, flag, problem):
    scripts.assert_one_sentence(scripts.run(module, flag, f"--output={tmp_path / 'out.json'}"), f"error: {problem}")
