"""`launch/scale.py` as a user meets it: a table, a file, its own costs, and one sentence for each kind of bad input."""

import asyncio
import dataclasses
import functools
import importlib
import json
import re
import sys

import pytest
import scripts

scale = functools.partial(scripts.run, "scale.py")
KEPT = scripts.ROOT / "launch" / "benchmarks" / "costs.json"


@pytest.fixture
def benchmarks(monkeypatch):
    """The modules of launch/benchmarks, by name."""
    monkeypatch.syspath_prepend(str(scripts.ROOT / "launch"))
    before = set(sys.modules)
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "benchmarks":
            del sys.modules[name]


def test_three_sizes_are_told_of_with_the_first_bottleneck_and_what_to_do_about_it(tmp_path):
    output = tmp_path / "scale.json"
    result = scale(f"--output={output}")
    assert result.returncode == 0, result.stderr
    made = json.loads(output.read_text())
    assert [one["accelerators"] for one in made["loads"]] == [48, 1_024, 10_240]
    for name in made["loads"][0]["parts"]:
        values = [one["parts"][name]["value"] for one in made["loads"]]
        assert values == sorted(values), name
        assert f"{name}: at its limit with" in result.stdout
        assert f"│ {name} (limit" in result.stdout
    first, at = re.search(r"The first bottleneck is (\S+), from ([\d,]+) accelerators on", result.stdout).groups()
    parts = made["loads"][-1]["parts"]
    assert parts[first]["value"] > parts[first]["limit"], f"beyond {at} accelerators"
    assert re.search(rf"Remedy at 10,240, {first}: .*\d", result.stdout)
    assert f"Costs of {made['date']}" in result.stdout
    assert "Check: an attempt of 12 turns, ray: " in result.stdout
    assert "Simulated, 1,024 accelerators: " in result.stdout
    again = scale(f"--costs={output}")
    assert again.stdout == result.stdout.replace(f"wrote {output}\n", ""), (
        "the file that it writes is one that it reads"
    )


def test_settings_of_the_run_change_what_they_are_about_and_nothing_else(tmp_path):
    paths = tmp_path / "plain.json", tmp_path / "changed.json"
    assert scale("--accelerators=10240", f"--output={paths[0]}").returncode == 0
    changed = scale("--accelerators=10240", "--stream_interval=512", "--bucket_mib=2048", f"--output={paths[1]}")
    assert changed.returncode == 0, changed.stderr
    before, after = (json.loads(path.read_text())["loads"][0]["parts"] for path in paths)
    assert {name for name in before if before[name] != after[name]} == {"coordinator", "publication"}
    assert after["coordinator"]["value"] < before["coordinator"]["value"]
    assert after["publication"]["value"] < before["publication"]["value"]


def test_costs_that_come_along_are_whole_and_within_reason():
    kept = json.loads(KEPT.read_text())
    assert all(abs(check["error"]) < 0.5 for check in kept["checks"])
    assert {load["accelerators"] for load in kept["simulated"]} >= {48, 1_024}
    for name, value in kept["costs"].items():
        for one in value.values() if isinstance(value, dict) else [value]:
            assert 0.0 <= one < 1e3, name
    assert kept["costs"]["turn"] > kept["embedded"]["turn"], "an engine in another process costs more"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--accelerators=many"], ["--accelerators", "'many'", "48,1024"]),
        (["--accelerators=0"], ["--accelerators", "from 1"]),
        (["--simulate=8"], ["--simulate", "48 or more"]),
        (["--measure", "--costs=a.json"], ["--costs", "leave"]),
        (["--costs=missing.json"], ["--costs: missing.json cannot be read"]),
        (["--stream_interval=0"], ["--stream_interval=0"]),
        (["--config=configs/quickstart.py"], ["--config", "no simulated run"]),
        (["--output=/proc/scale.json"], ["--output"]),
    ],
)
def test_what_cannot_be_is_refused_by_one_sentence(arguments, said):
    scripts.assert_one_sentence(scale(*arguments), *said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no JSON", "--costs: {path} has no costs (JSONDecodeError"),
        ("{}", "--costs: {path} has no costs (KeyError: 'date')"),
        ('{"date": "today", "embedded": {}, "costs": {"turn": 1}}', "its costs are not those of launch/scale.py"),
    ],
)
def test_a_file_without_costs_is_refused_by_one_sentence(tmp_path, content, said):
    path = tmp_path / "costs.json"
    path.write_text(content)
    scripts.assert_one_sentence(scale(f"--costs={path}"), said.format(path=path))


def test_help_says_what_it_is_for():
    result = scale("--help")
    assert "what holds them up first" in result.stdout
    assert "--measure" in result.stdout


def test_costs_of_hosts_and_engines_are_measured_on_the_real_publication(benchmarks):
    made = benchmarks("publishing").costs(1)
    assert set(made) == {"engine_update", "engine_bucket", "host_bucket", "health", "serving"}
    assert 0.0 < made["health"] < 0.01
    assert 0.0 < made["serving"] < 0.01
    assert 0.0 < made["engine_bucket"] + made["host_bucket"] < 0.01


def test_costs_of_an_attempt_are_found_from_whole_attempts_and_foretell_another_one(benchmarks):
    calls = benchmarks("calls")
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

    values, foretold = calls.fit(seconds)
    assert values == pytest.approx(planted, rel=1e-6)
    assert foretold == pytest.approx(seconds(calls.HELD_OUT), rel=1e-6)


def test_what_an_attempt_is_made_of_is_what_its_engine_sees(benchmarks, monkeypatch):
    calls, coordinator = benchmarks("calls"), benchmarks("coordinator")
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


def test_costs_of_an_attempt_are_measured_through_the_real_dispatcher(benchmarks):
    values, check = benchmarks("calls").attempts("inprocess", 2)
    assert all(0.0 <= value < 0.05 for value in values.values()), "seconds"
    assert any(values.values())
    assert min(check.predicted, check.measured) > 0.0


@pytest.mark.slow
def test_a_simulated_coordinator_is_told_apart_from_the_simulated_machines(benchmarks):
    load = benchmarks("simulated_load").measure(48, 1)
    assert load.requests == 512
    assert load.turns > load.requests
    assert 0.2 * load.cpu_seconds < load.coordinator_seconds < 0.95 * load.cpu_seconds
    assert load.virtual_seconds > 100.0
