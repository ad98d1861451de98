"""Eight CPU devices for every test of the process, set before JAX is first imported; who shares a worker.

What tests of several rooms share is in `common/`, whose modules they import by name.
"""

import os
import pathlib
import signal
import sys

import hypothesis
import pytest

sys.path.append(str(pathlib.Path(__file__).parent / "common"))

import compiling

compiling.begin()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LIBRA_JAX_STRICT_METRICS", "1")  # names of metrics that are not registered are refused

ENGINES = ("build", "cluster", "engines", "launch")
"""Folders with tests that start engines, whole runs or a Ray cluster: of those with vLLM one at a time, and one of the
others beside it, or they crowd each other out."""

HEAVY = ("vllm", "ray", "slow", "multiprocess")
"""Marks of those tests."""


# The same examples each time, on a busy machine too: a failure is of the change. --hypothesis-profile has others.
PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeatable", derandomize=True, max_examples=50, **PATIENT)
hypothesis.settings.register_profile("explore", derandomize=False, print_blob=True, **PATIENT)
hypothesis.settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what is in the background, and all it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the session's own process, whose workers have ended
        compiling.end()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drills",
        action="store_true",
        help="Also the longer runs, most of them hit: some fifteen minutes on two cores.",
    )
    parser.addoption(
        "--accelerators",
        nargs="?",
        const="all",
        choices=("all", "h100"),
        help="Also the gates of programs compiled for H100 and TPU; =h100 for one of them, which takes a minute.",
    )


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one file run on one worker (pytest-xdist) and share what its fixtures made; all engines on one."""
    if not config.getoption("--drills"):
        left_out = [item for item in items if item.get_closest_marker("drill")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    chosen = config.getoption("--accelerators")
    gates = {item: mark.args for item in items if (mark := item.get_closest_marker("accelerators"))}
    left_out = [item for item, args in gates.items() if chosen is None or (chosen != "all" and "quick" not in args)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        group = item.path.stem
        if item.path.parent.name in ENGINES and any(map(item.get_closest_marker, HEAVY)):
            group = "engines" if item.get_closest_marker("vllm") else "clusters"
        item.add_marker(pytest.mark.xdist_group(group))
