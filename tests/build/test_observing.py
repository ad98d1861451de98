"""What `status.json` says after a start that was refused, and after a run that failed."""

import asyncio
import dataclasses

import pytest

from configs import quickstart
from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import observing
from libra_jax.telemetry import status


def start(workdir, *, steps=0, error=None):
    """One start in the workdir that takes these steps and ends with this error."""
    config = dataclasses.replace(config_lib.checked(quickstart.get_config()), steps=10)

    async def main():
        with observing.observed(config, workdir, None) as run:
            for step in range(1, steps + 1):
                run.metrics(step, {"loss": 0.0})
            if error is not None:
                raise error
            run.end("done", "Trained.")

    asyncio.run(main())


def test_a_refused_start_leaves_the_status_of_the_earlier_run(tmp_path):
    start(tmp_path, steps=3)
    earlier = (tmp_path / status.STATUS_FILE).read_bytes()
    with pytest.raises(protocols.ConfigError):
        start(tmp_path, error=protocols.ConfigError("trainer.fsdp: 3 does not divide the model"))
    assert (tmp_path / status.STATUS_FILE).read_bytes() == earlier
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("steps", "error"), [(0, protocols.WorkerLost("the trainer is lost")), (2, protocols.ConfigError("a wrong field"))]
)
def test_a_run_that_failed_says_so(tmp_path, steps, error):
    start(tmp_path, steps=3)
    with pytest.raises(type(error)):
        start(tmp_path, steps=steps, error=error)
    assert status.read(tmp_path)["ended"] == {"how": "failed", "sentence": str(error)}


def test_a_first_start_that_is_refused_says_so(tmp_path):
    with pytest.raises(protocols.ConfigError):
        start(tmp_path, error=protocols.ConfigError("a wrong field"))
    assert status.read(tmp_path)["ended"]["sentence"] == "a wrong field"
