"""launch/setup.sh by hand: it ends with what it did and the next command; called by other scripts, it is quiet."""

import os
import shutil
import subprocess

import pytest
import scripts


@pytest.fixture
def repository(tmp_path):
    """A repository whose .venv is a double: installing anything succeeds at once."""
    (tmp_path / "launch").mkdir()
    shutil.copy(scripts.ROOT / "launch/setup.sh", tmp_path / "launch")
    (tmp_path / "third_party/cpu").mkdir(parents=True)
    for file in ("third_party/cpu/lock.txt", "third_party/cpu/lock_dev.txt", "setup.py"):
        (tmp_path / file).touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "pip"):
        (tmp_path / ".venv/bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    for asked in ("bubblewrap", "slurmctld"):
        (tmp_path / f".venv/.asked-{asked}").touch()
    return tmp_path


def set_up(repository, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repository / "launch/setup.sh"), *arguments],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_set_up_ends_with_what_it_did_and_the_next_command(repository):
    first = set_up(repository)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("Set up: .venv holds Libra-JAX and what third_party/cpu/lock.txt pins.\nNext")
    assert "bash launch/quickstart.sh" in first.stdout
    assert "source .venv/bin/activate" in first.stdout
    again = set_up(repository)
    assert again.stdout.startswith("Nothing to do: .venv holds Libra-JAX and all that is pinned.\nNext")
    assert "bash launch/test.sh" in set_up(repository, "--dev").stdout


def test_set_up_is_quiet_where_a_script_goes_on_and_refuses_other_flags(repository):
    set_up(repository)
    assert set_up(repository, "--quiet").stdout == ""
    for script in ("quickstart.sh", "test.sh"):
        calls = [line for line in (scripts.ROOT / "launch" / script).read_text().splitlines() if "setup.sh" in line]
        assert all("--quiet" in line for line in calls if line.startswith("bash ")), script
    wrong = set_up(repository, "--develop")
    assert (wrong.returncode, wrong.stderr) == (2, "usage: bash launch/setup.sh [--dev] [--quiet], not --develop\n")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_every_platform_installs_what_the_package_imports_from_its_start(platform):
    lists = [scripts.ROOT / "third_party" / name / "requirements.txt" for name in ("cpu", platform)]
    cpu, other = ([line.split()[0] for line in file.read_text().splitlines() if line.strip()] for file in lists)
    for name in ("google-re2==", "huggingface_hub=="):
        assert [pin for pin in other if pin.startswith(name)] == [pin for pin in cpu if pin.startswith(name)] != []
