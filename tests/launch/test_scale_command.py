"""`launch/scale.py` as a user meets it: a table, a file, its own costs, and one sentence for each kind of bad input."""

import functools
import json
import re

import pytest
import scripts

scale = functools.partial(scripts.run, "scale.py")
KEPT = scripts.ROOT / "launch" / "benchmarks" / "costs.json"


def test_three_sizes_are_told_of_with_the_first_bottleneck_and_what_to_do_about_it(tmp_path):
    output = tmp_path / "scale.json"
    result = scale(f"--output={output}")
    assert result.returncode == 0, result.stderr
    made = json.loads(output.read_text())
    assert (made["model"], made["hardware"]) == ("Qwen3-14B", "a800")
    assert result.stdout.startswith("Qwen3-14B on a800, ")
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
    changed = scale("--accelerators=10240", "--loop_workers", "--chunk_mib=2048", f"--output={paths[1]}")
    assert changed.returncode == 0, changed.stderr
    before, after = (json.loads(path.read_text())["loads"][0]["parts"] for path in paths)
    assert {name for name in before if before[name] != after[name]} == {"coordinator", "weight sync"}
    assert after["coordinator"]["value"] < before["coordinator"]["value"]
    assert after["weight sync"]["value"] < before["weight sync"]["value"]


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
        (["--costs=missing.json"], ["--costs: missing.json cannot be read"]),
        (["--stream_interval=0"], ["--stream_interval=0"]),
        (["--config=configs/quickstart.py"], ["--config", "take the config of a simulated run"]),
        (["--output=/proc/scale.json"], ["--output"]),
        (["--config.optimizer.learning_rate=1.0"], ["optimizer.learning_rate: launch/scale.py does not read it"]),
        (["--config.rollout.stream_interval=64"], ["rollout.stream_interval: ", "takes --stream_interval"]),
    ],
)
def test_what_cannot_be_is_refused_by_one_sentence(arguments, said):
    scripts.assert_one_sentence(scale(*arguments), *said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no JSON", "--costs: {path} has no costs (it is no JSON object)"),
        ("{}", "--costs: {path} has no costs (it lacks 'date')"),
        ('{"date": "today", "embedded": {}, "costs": {"turn": 1}}', "its costs are not those of launch/scale.py"),
    ],
)
def test_a_file_without_costs_is_refused_by_one_sentence(tmp_path, content, said):
    path = tmp_path / "costs.json"
    path.write_text(content)
    scripts.assert_one_sentence(scale(f"--costs={path}"), said.format(path=path))


def test_help_says_what_it_is_for():
    result = scale("--help")
    assert "the first bottleneck" in result.stdout
    assert "python -m tests.benchmarks.costs" in result.stdout
