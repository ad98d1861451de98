"""launch/setup.sh by hand: it ends with what it did and the next command; called by other scripts, it is quiet."""

import os
import re
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


def set_up(repository, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repository / "launch/setup.sh"), *arguments],
        env={"PATH": os.environ["PATH"], **environment},
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
    usage = "usage: bash launch/setup.sh [--dev] [--cuda] [--quiet] [--accelerators[=h100|=v6e]], not --develop\n"
    assert (wrong.returncode, wrong.stderr) == (2, usage)


def test_cuda_has_an_environment_of_its_own(repository):
    (repository / "third_party/cuda").mkdir()
    (repository / "third_party/cuda/lock.txt").touch()
    shutil.copytree(repository / ".venv", repository / ".venv-cuda")
    (repository / "python3.11").write_text("#!/bin/sh\ncase $2 in *print*) echo True ;; esac\n")
    (repository / "python3.11").chmod(0o755)
    made = set_up(repository, "--cuda", PYTHON=str(repository / "python3.11"))
    assert made.stdout.startswith("Set up: .venv-cuda holds Libra-JAX and what third_party/cuda/lock.txt pins.\nNext")
    assert "source .venv-cuda/bin/activate" in made.stdout
    assert "quickstart" not in made.stdout  # it runs in .venv
    assert not (repository / ".venv/.installed-cpu").exists()


def test_cuda_is_locked_for_one_python_and_says_so(repository):
    (repository / "python3.12").write_text("#!/bin/sh\necho False\n")
    (repository / "python3.12").chmod(0o755)
    refused = set_up(repository, "--cuda", PYTHON=str(repository / "python3.12"))
    assert (refused.returncode, refused.stderr.startswith("The CUDA pins are for Python 3.11; ")) == (1, True)


def test_the_cuda_lock_holds_what_its_list_and_the_package_ask_for():
    folder = scripts.ROOT / "third_party/cuda"
    asked = [line.split()[0] for line in (folder / "requirements.txt").read_text().splitlines() if line[0] not in "#"]
    locked = {line.lower().replace("_", "-") for line in (folder / "lock.txt").read_text().splitlines()}
    assert {re.sub(r"\[.*\]", "", pin).lower().replace("_", "-") for pin in asked} <= locked
    needed = re.search(r"install_requires=\[(.*?)\]", (scripts.ROOT / "setup.py").read_text(), re.DOTALL)[1]
    names = {name.lower().replace("_", "-") for name in re.findall(r'"([\w-]+)>=', needed)}
    assert names <= {pin.split("==")[0] for pin in locked}


def test_compilers_for_accelerators_are_installed_once_into_a_folder_of_their_own(repository):
    (repository / "third_party/accelerators").mkdir()
    shutil.copy(scripts.ROOT / "third_party/accelerators/lock.txt", repository / "third_party/accelerators")
    (repository / ".venv/bin/python").write_text('#!/bin/sh\necho "$@" >>"$(dirname "$0")/calls"\n')

    def installed(*arguments: str) -> list[str]:
        (repository / ".venv/bin/calls").write_text("")
        assert set_up(repository, *arguments).returncode == 0
        calls = (repository / ".venv/bin/calls").read_text().splitlines()
        return [call for call in calls if "--target .venv/accelerators" in call]

    assert installed() == []
    (gpu,) = installed("--accelerators=h100")
    pins = (repository / gpu.rsplit(" -r ", 1)[1]).read_text().splitlines()
    assert [pin.split("==")[0] for pin in pins] == ["jax-cuda13-pjrt", "jax-cuda13-plugin"]
    (tpu,) = installed("--accelerators")
    assert (repository / tpu.rsplit(" -r ", 1)[1]).read_text().startswith("libtpu==")
    assert installed("--accelerators") == []


def test_compilers_are_of_the_jax_that_the_trainer_runs():
    pins = (scripts.ROOT / "third_party/accelerators/lock.txt").read_text().splitlines()
    of_jax = [pin.split()[0].split("==")[1] for pin in pins if pin.startswith("jax-")]
    lock = (scripts.ROOT / "third_party/cpu/lock.txt").read_text().splitlines()
    assert {f"jax=={version}" for version in of_jax} <= set(lock)
    assert len(of_jax) == 2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_every_platform_installs_what_the_package_imports_from_its_start(platform):
    lists = [scripts.ROOT / "third_party" / name / "requirements.txt" for name in ("cpu", platform)]
    cpu, other = ([line.split()[0] for line in file.read_text().splitlines() if line.strip()] for file in lists)
    for name in ("google-re2==", "huggingface_hub=="):
        assert [pin for pin in other if pin.startswith(name)] == [pin for pin in cpu if pin.startswith(name)] != []
