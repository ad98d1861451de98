"""launch/status.py as a person gives it: the newest run, a named one, one that is no run."""

import json
import os
import subprocess
import sys

import pytest
import scripts

from libra_jax import protocols
from libra_jax.telemetry import screen, status


def write(workdir, name: str, **changes) -> None:
    view = status.RunStatus(name, 10, 1, lambda: 0.0).view()
    workdir.mkdir(parents=True)
    (workdir / status.STATUS_FILE).write_text(json.dumps({**view, **changes}))


def shown(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script's answer, given in a folder that has `runs/`."""
    return subprocess.run(
        [sys.executable, str(scripts.ROOT / "launch" / "status.py"), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(scripts.ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_workdir_it_shows_the_run_that_wrote_last_and_how_it_ended(tmp_path):
    write(tmp_path / "runs" / "b", "newer", ended={"how": "failed", "sentence": "It broke."})
    write(tmp_path / "runs" / "a", "older")
    os.utime(tmp_path / "runs" / "a" / status.STATUS_FILE, (1, 1))
    newest = shown(tmp_path)
    assert (newest.returncode, "newer" in newest.stdout) == (1, True)
    assert "It has ended (failed). It broke." in newest.stdout
    named = shown(tmp_path, "runs/a")
    assert (named.returncode, "older" in named.stdout, "It lives." in named.stdout) == (0, True, True)


def test_a_run_whose_process_is_gone_is_dead_and_watching_it_ends(tmp_path):
    write(tmp_path / "run", "killed", pid=2**22 + 1)
    answer = shown(tmp_path, "run", "--watch")
    assert answer.returncode == 1
    assert "DEAD: its process is gone, and it has not said why." in answer.stdout


@pytest.mark.parametrize("arguments", [(), ("nothing",)])
def test_what_is_no_run_is_said_in_a_sentence(tmp_path, arguments):
    answer = shown(tmp_path, *arguments)
    scripts.assert_one_sentence(answer, "holds no", status.STATUS_FILE, "give the workdir of")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"began": "yesterday"}, "began: 'yesterday' is not of type 'number'"),
        ({"began": 1e300}, "began: 1e+300 is greater than the maximum"),
        ({"workers": {"trainer": "trains"}}, "workers.trainer: 'trains' is not of type 'object'"),
        ({"scalars": {"loss": []}}, "scalars.loss: [] is not of type 'number', 'null'"),
        ({"ended": {"how": "done"}}, "ended: "),
        ({"seconds": float("nan")}, "it holds NaN"),
        ({"notes": [3]}, "notes.0: 3 is not of type 'string'"),
    ],
)
def test_a_malformed_status_is_refused_naming_the_field(tmp_path, changes, problem):
    write(tmp_path / "run", "odd", **changes)
    with pytest.raises(protocols.DataError) as caught:
        status.read(tmp_path / "run")
    assert f"status.json cannot be read ({problem}" in str(caught.value)


def test_the_script_says_a_sentence_of_a_malformed_status(tmp_path):
    write(tmp_path / "run", "odd", workers=[1], steps={})
    scripts.assert_one_sentence(shown(tmp_path, "run"), "status.json cannot be read (", "is not of type")
    (tmp_path / "run" / status.STATUS_FILE).write_text("[" * 100_000)
    scripts.assert_one_sentence(shown(tmp_path, "run"), "status.json cannot be read (")


def test_the_screen_fits_a_terminal_and_shows_markup_as_text():
    run = status.RunStatus("demo", 10, 1, lambda: 0.0)
    run.status("rollout-[0]", "[bold]serving[/]")
    run.note("[red]" + "long " * 60)
    text = screen.text(run.view(), "It lives.")
    assert "rollout-[0]" in text
    assert "[bold]serving[/]" in text
    assert max(map(len, text.splitlines())) <= screen.WIDTH
