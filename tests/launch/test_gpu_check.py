"""launch/gpu_check.py as a dry run on CPU, without the packages that a GPU machine may lack; and its runner."""

import contextlib
import dataclasses
import json
import pathlib
import re
import time

import jax
import psutil
import pytest
import scripts

from gpu import attention_parity, cases, peer, rows, runner, shapes
from libra_jax.models.attention import attention

BLOCKED = ("vllm", "ray", "ml_collections", "transformers", "pybase64")
"""Packages that the command has to do without."""

PEERS = {case.name for case in cases.CASES if case.process == "torch"}
"""Cases of transformers' model."""

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def check(folder: pathlib.Path, *arguments: str, blocked: tuple[str, ...] = BLOCKED, seconds: float = 280.0):
    """Runs the command in a Python that cannot import some packages; returns its result and its report."""
    (folder / "sitecustomize.py").write_text(BLOCKER.format(names=set(blocked)))
    environment = {"PYTHONPATH": f"{folder}:{scripts.ROOT}"}
    output = folder / "gpu_check.json"
    flags = ("--platform=cpu", "--minutes=20", f"--output={output}", *arguments)
    result = scripts.run("gpu_check.py", *flags, seconds=seconds, environment=environment)
    return result, json.loads(output.read_text()) if output.exists() else {}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_case_passes_on_cpu_without_vllm(tmp_path):
    result, report = check(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = {row["case"]: row for row in report["rows"]}
    assert list(found) == [case.name for case in cases.CASES]
    same_code = {f"grad_step/{model}/{tokens}" for model in ("1.7B", "4B") for tokens in ("32k", "64k")}
    same_code |= {"train_step/1.7B", "prompt/2k", "prompt/8k", "prompt/8k/shared"}
    engines = {case.name for case in cases.ENGINE_CASES}
    assert {name for name, row in found.items() if row["state"] == "left out"} == {*engines, *PEERS} | same_code
    for name in ("attention/packed", "attention/few", "attention/unpacked"):
        figures = found[name]["figures"]
        assert figures["kernel"] == "chunked"
        assert 0 < figures["forward_error"] < 1e-5
        assert 0 < figures["gradient_error"] < 1e-5
        assert figures["padding_written"] == 0
    assert found["experts"]["figures"]["kernel"] == "tiles"
    assert found["dlpack"]["figures"]["copies"] == 0
    assert 0 < found["train_step/0.6B"]["figures"]["padding"] < 0.5
    assert found["train_step/0.6B"]["figures"]["tokens_per_second"] > 0
    for name in ("weight_sync/ipc", "weight_sync/memfd"):
        assert found[name]["figures"]["gigabytes_per_second"] > 0
    decode = found["decode"]["figures"]
    for sequences in (1, 16):
        assert decode[f"degree_1_sequences_{sequences}_milliseconds"] > 0
    assert "memory_share" not in decode, "a CPU has no sheet"
    for name in ("vocabulary/1k", "vocabulary/4k"):
        assert found[name]["figures"]["log_prob_error"] < 1e-4
    steps = [row["figures"] for row in report["rows"] if row["case"].startswith("grad_step/") and row["figures"]]
    assert len({(figures["parameters"], figures["tokens"]) for figures in steps}) == 6
    assert all(figures["tokens_per_second"] > 0 and "mfu" not in figures for figures in steps), "a CPU has no peak"
    assert report["machine"]["platform"] == "cpu"
    assert "jax" in report["machine"]["versions"]
    tables = (tmp_path / "gpu_check.md").read_text()
    assert tables.startswith("### DRY RUN on ")
    assert all(f"| {name} | " in tables for name in found)
    progress = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(progress) == len(found)
    assert "] attention/packed: passed in " in progress[0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda q, out: out * 1.001, "chunked is off by 0.001, and 1e-05 is allowed"),
        (lambda q, out: out + (1e-3 * q - jax.lax.stop_gradient(1e-3 * q)), "gradients of chunked are off by"),
        (lambda q, out: out + 1e-9, "numbers at padding that are not 0"),
    ],
)
def test_a_kernel_that_is_wrong_fails_its_case(fault, said, monkeypatch):
    prepare = attention.prepare

    def wrong(*arguments, **more):
        attend = prepare(*arguments, **more)
        return lambda q, k, v: fault(q, attend(q, k, v))

    monkeypatch.setattr(attention, "prepare", wrong)
    assert said in attention_parity.measure(rows.Bench("cpu", ""), "packed").problem


@pytest.mark.drill
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_every_case_of_vllm_passes_on_cpu(tmp_path):
    names = [case.name for case in cases.ENGINE_CASES]
    result, report = check(tmp_path, f"--cases={','.join(names)}", blocked=(), seconds=850.0)
    assert result.returncode == 0, result.stdout + result.stderr
    found = {row["case"]: row for row in report["rows"]}
    assert list(found) == names
    # Only CUDA has CUDA IPC and vLLM's sleep mode.
    left_out = {name for name, row in found.items() if row["state"] == "left out"}
    assert left_out == {"engine/sync/ipc", "engine/sleep"}
    for name in ("engine/start", "engine/sync/memfd"):
        assert 0 < found[name]["figures"]["log_prob_error"] < 1e-4
    assert found["engine/pause"]["figures"]["requests_with_both_versions"] > 0
    for name in ("quickstart", "routing", *(name for name in names if name.startswith("run/"))):
        assert found[name]["figures"]["steps"] == 2
        assert (tmp_path / f"{archive_name(name)}.tar.gz").exists()


@pytest.mark.drill
def test_runs_pass_with_the_double_of_an_engine(tmp_path):
    result, report = check(tmp_path, "--cases=run/0.6B/1", blocked=("vllm",))
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = report["rows"]
    assert row["figures"]["steps"] == 2
    assert row["figures"]["staleness_max"] <= 1


def archive_name(case: str) -> str:
    group, *variant = case.split("/")
    return f"run_{cases.MODELS[variant[0]]}_{variant[1]}" if group == "run" else group


def commands(page: str) -> list[tuple[float, list[str]]]:
    """Returns minutes and cases of the commands of a page."""
    text = (scripts.ROOT / page).read_text().replace("\\\n", " ")
    lines = re.findall(r"gpu_check\.py --platform=gpu .*", text)
    assert lines
    found = []
    for line in lines:
        (minutes,) = re.findall(r"--minutes=([\d.]+)", line)
        found.append(
            (float(minutes), [name for flag in re.findall(r"--cases=(\S+)", line) for name in flag.split(",")])
        )
    return found


@pytest.mark.parametrize("page", ["docs/results/gpu.md", "launch/gpu_check.py"])
def test_the_commands_that_a_page_shows_have_time_for_their_cases(page):
    for minutes, names in commands(page):
        assert 60 * minutes >= sum(case.expected_seconds for case in cases.chosen(names))


def test_the_peer_takes_the_same_row():
    outcome = peer.grad_step(rows.Bench("cpu", ""), "Qwen3-0.6B", 8192)
    assert outcome.problem == ""
    assert outcome.figures["tokens"] == 8192 // shapes.SMALLER
    assert outcome.figures["tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_missing_package_fails_its_own_cases_and_the_command(tmp_path):
    result, report = check(tmp_path, "--cases=dlpack,attention/unpacked", blocked=(*BLOCKED, "orbax"))
    assert result.returncode == 1
    assert [(row["case"], row["state"]) for row in report["rows"]] == [
        ("attention/unpacked", "passed"),
        ("dlpack", "failed"),
    ]
    assert "No module named 'orbax'" in report["rows"][1]["reason"]
    assert not list(tmp_path.glob(".gpu_check-*")), "the scratch folder is removed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cases=atention",), "--cases: 'atention' is no case and no group of attention, experts, dlpack, "),
        (("--minutes=0",), "--minutes"),
        (("--output=x.md",), "--output: x.md is the name of the tables"),
        (("--platform=gpu",), "--platform: JAX finds no gpu device here, only cpu; install JAX"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(arguments, said, tmp_path):
    environment = {"JAX_PLATFORMS": "cpu"}
    result = scripts.run_forked("gpu_check.py", f"--output={tmp_path / 'x.json'}", *arguments, environment=environment)
    scripts.assert_one_sentence(result, said)
    assert result.returncode == 2


def run(*chosen: cases.Case, seconds: float = 60.0, platform: str = "cpu") -> list[rows.Row]:
    folder = str(pathlib.Path(__file__).parent)
    running = runner.Runner(seconds, {}, "", path=(folder,))
    try:
        return list(running.run(chosen, platform))
    finally:
        running.end()


def double(name: str, *arguments: str, **more: float) -> cases.Case:
    return cases.Case(name, f"gpu_doubles:{name}", arguments, **more)


@pytest.mark.multiprocess
def test_cases_that_raise_or_die_leave_the_others_alone():
    found = run(
        double("passes"), double("has_nothing"), double("passes"), double("raises"), double("dies"), double("exceeds"),
        double("passes"), cases.Case("missing", "gpu_doubles:missing"), cases.Case("nowhere", "no_such_module:x"),
    )  # fmt: skip
    assert [row.state for row in found] == [
        "passed", "left out", "passed", "failed", "failed", "failed", "passed", "failed", "failed",
    ]  # fmt: skip
    reasons = [row.reason for row in found]
    assert reasons[1] == "there is one device"
    assert reasons[3:6] == ["ValueError: of no use", "its process ended: killed by SIGSEGV", "0.5 is too much"]
    assert "has no attribute 'missing'" in reasons[7]
    assert "No module named 'no_such_module'" in reasons[8]
    assert found[5].figures == {"error": 0.5}
    assert found[0].figures == found[2].figures, "one process runs case after case"
    assert found[6].figures != found[0].figures, "a process that has seen a failure runs no further case"
    assert rows.Report(None, "", 8.0, 1.0, found).failed
    assert not rows.Report(None, "", 8.0, 1.0, found[:3]).failed


@pytest.mark.multiprocess
def test_a_case_that_hangs_is_ended_with_its_children(tmp_path):
    began, pids = time.monotonic(), tmp_path / "pids"
    hanging = double("hangs", str(pids), most_seconds=8.0, expected_seconds=0.0)
    found = run(hanging, double("passes"), platform="gpu")
    assert [(row.case, row.state) for row in found] == [("hangs", "failed"), ("passes", "passed")]
    assert found[0].reason == "its process did not answer within 8 s"
    for pid in map(int, pids.read_text().split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - began < 60


@pytest.mark.multiprocess
def test_the_budget_ends_a_case_and_leaves_out_those_after_it(tmp_path):
    long = double("hangs", str(tmp_path / "pids"), expected_seconds=4.0)
    short = double("passes", expected_seconds=1.0)
    found = run(long, dataclasses.replace(short, name="later"), seconds=6.0, platform="gpu")
    assert [row.state for row in found] == ["left out", "left out"]
    assert found[1].reason == "--minutes are over"
