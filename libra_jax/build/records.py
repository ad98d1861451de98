"""Reads what a run has written into its folder: `libra_jax.load`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.build import evaluating
from libra_jax.telemetry import metrics, samples


@dataclass(frozen=True)
class Loaded:
    """The records of a run, as far as it has come.

    Attributes:
      workdir: the run's folder.
      config: the config that the run was begun with.
      metrics: a `pyarrow.Table` with a row for each step, a column `step`, and a column for each metric of
        `metrics.jsonl`, null where a step lacks it. `metrics.to_pandas()` makes a `pandas.DataFrame` of it.
      samples: the rollouts that the run kept as text, in the order of their steps (`telemetry.samples`).
    """

    workdir: Path
    config: config_lib.RunConfig
    metrics: pyarrow.Table
    samples: list[samples.Sample]


def load(workdir: str | Path) -> Loaded:
    """Reads the records of a run, which may still be going on, to look at or to draw.

    >>> run = libra_jax.load("runs/mine")                                # doctest: +SKIP
    >>> run.metrics.to_pandas().plot("step", "reward/mean")              # doctest: +SKIP
    >>> print(run.config.optimizer.learning_rate, run.samples[0].text()) # doctest: +SKIP

    Args:
      workdir: the run's folder, such as `Trained.workdir`.

    Returns:
      The run's config, its metrics as a table with a row for each step, and the rollouts that it kept as text.

    Raises:
      DataError: the folder holds no config of a run that this version can read.
    """
    folder = Path(workdir)
    try:
        config = evaluating.read_config(folder)
    except protocols.DataError as error:
        raise protocols.DataError(str(error).replace("--workdir=", "workdir: ", 1)) from error
    steps = metrics.read(folder / metrics.METRICS_FILE)
    names = dict.fromkeys(name for numbers in steps.values() for name in numbers)
    columns = {"step": pyarrow.array(list(steps), pyarrow.int64())}
    columns |= {
        name: pyarrow.array([numbers.get(name) for numbers in steps.values()], pyarrow.float64()) for name in names
    }
    return Loaded(folder, config, pyarrow.table(columns), list(samples.read(folder / samples.SAMPLES_FILE)))
