"""Converts a published dataset from its downloaded files to tasks: a JSONL or Parquet file, each prompt once.

  python launch/prepare_data.py --dataset=dapo_math --input=downloads/dapo-math-17k.parquet --output=data/dapo.jsonl
  python launch/prepare_data.py --dataset=search_r1 --input=downloads/nq_hotpotqa_train --output=data/search.parquet
  python launch/prepare_data.py --dataset=r2e_gym --input=downloads/R2E-Gym-Subset --output=data/repairs.jsonl

`libra_jax/environments/published.py` lists the columns of each dataset. The input is a file, or a folder as it was
downloaded or saved to disk. Nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from support import cli

from absl import flags

from libra_jax import protocols
from libra_jax.environments import published

_DATASET = flags.DEFINE_enum("dataset", None, sorted(published.DATASETS), "Which dataset it is.", required=True)
_INPUT = flags.DEFINE_string("input", None, "Its file, or the folder of its files.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "File to write: .jsonl or .parquet.", required=True)
_SPLIT = flags.DEFINE_string("split", "train", "Which part of a folder.")

_BETWEEN_LINES = 5.0  # seconds
_BATCH_ROWS = 1000


def main() -> None:
    dataset, output = published.DATASETS[_DATASET.value], Path(_OUTPUT.value)
    if output.suffix not in (".jsonl", ".parquet"):
        raise protocols.ConfigError(f"--output: {output} must end in .jsonl or .parquet")
    if output.exists() and Path(_INPUT.value).exists() and output.samefile(_INPUT.value):
        raise protocols.ConfigError(f"--output: {output} is the input; name another file")
    cli.check_output(output)
    count = published.Count()
    records = _with_progress(published.tasks(dataset, _INPUT.value, _SPLIT.value, count), count)
    # An interrupted conversion must leave no file that looks whole.
    partial = output.with_name(f"{output.name}.partial")
    try:
        _write(records, partial, output.suffix)
        reasons = ", ".join(f"{number:,} ({reason})" for reason, number in count.dropped.most_common())
        drops = f"dropped: {reasons or 'none'}"
        if not count.tasks:
            raise protocols.DataError(f"{_INPUT.value}: none of its {count.read:,} rows makes a task: {drops}")
        partial.replace(output)
    except OSError as error:
        raise protocols.DataError(f"--output: {output} cannot be written ({error.strerror or error})") from error
    finally:
        partial.unlink(missing_ok=True)
    print(f"{_DATASET.value}: {count.read:,} rows read, {count.tasks:,} tasks written to {output}; {drops}")
    once = f", once {dataset.needs}" if dataset.needs else ""
    print(f"Train on them{once}: --config.task.path={shlex.quote(str(output))} {dataset.flags}")


def _with_progress(records: Iterable[published.Record], count: published.Count) -> Iterator[published.Record]:
    """Yields the records, with a line on standard error every few seconds."""
    next_line = time.monotonic() + _BETWEEN_LINES
    for record in records:
        if time.monotonic() >= next_line:
            print(f"{count.read:,} rows read, {count.tasks:,} kept", file=sys.stderr, flush=True)
            next_line = time.monotonic() + _BETWEEN_LINES
        yield record


def _write(records: Iterable[published.Record], file: Path, ending: str) -> None:
    if ending == ".jsonl":
        with file.open("w", encoding="utf-8") as lines:
            for record in records:
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
        return
    import pyarrow  # only here, so that a conversion to JSONL does not pay for it
    import pyarrow.parquet

    writer: Any = None
    left = iter(records)
    try:
        while batch := list(itertools.islice(left, _BATCH_ROWS)):
            # Every batch must have the first one's schema: a file has one.
            table = pyarrow.Table.from_pylist(batch, schema=None if writer is None else writer.schema)
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


if __name__ == "__main__":
    cli.run(main)
