"""The scheduler and the planner's queues compiled to C, held to all that they are held to in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import compiled

pytestmark = pytest.mark.drill  # compiling takes a minute and a half, and only the benchmark of calls is compiled

TESTS = Path(__file__).resolve().parents[1]
HELD_TO = (TESTS / "scheduling", TESTS / "planning" / "test_pipeline.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("compiled") / "package"
    made.mkdir()
    compiled.build(made)
    return made


def test_the_compiled_scheduler_is_what_is_imported(folder):
    names = [f"scheduling.{name}" for name in ("cmlfq", "slots", "evidence", "prefix_tree")]
    names += ["planning.pipeline", "planning.pools"]
    imports = "; ".join(f"import libra_jax.{name} as m; print(m.__file__)" for name in names)
    made = compiled.run(folder, ["-c", imports], seconds=60)
    files = made.stdout.split()
    assert len(files) == len(names), made.stderr
    assert all(Path(file).suffix == ".so" and Path(file).is_relative_to(folder) for file in files)


def test_what_is_compiled_passes_the_tests_of_its_source(folder):
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *map(str, HELD_TO)]
    made = compiled.run(folder, arguments, seconds=240)
    assert made.returncode == 0, made.stdout[-3_000:] + made.stderr[-1_000:]
