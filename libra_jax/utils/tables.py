"""Rows of tables on disk: JSONL, JSON, Parquet, CSV, and folders of them. Each row knows its place, for messages.

Values keep their type. Numbers of 16 and 32 bits have the fewest digits that tell them apart, as 0.1 and not
0.10000000149011612. A decimal becomes the int or float of the same value, or a text if no float has all its digits.

A folder contains files named by split, such as `train-00000-of-00002.parquet` or `test.csv`, directly or in its
`data/`. Published datasets have this layout. A folder may also be written by `save_to_disk` of Hugging Face's `Dataset`
or `DatasetDict`: Arrow streams beside a `state.json`.
"""

from __future__ import annotations

import codecs
import decimal
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from libra_jax import protocols

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".csv", ".tsv")
"""Endings of the files that are read in a folder. A single file with another ending is read as JSONL or as JSON."""

_BATCH_ROWS = 256
"""Rows of a table in memory at once. A row of a published dataset may have megabytes."""

_CSV_BLOCK = 16 * 2**20
"""Bytes of the longest row of a CSV file."""


class TableRow(NamedTuple):
    """A row of a table.

    Attributes:
      number: Line in a JSONL file, or position from 1 in any other table.
      where: File and line or row, for messages.
      values: Values by column.
    """

    number: int
    where: str
    values: Mapping[str, Any]


def rows(path: str, wanted: Sequence[str] = (), split: str = "train", of: str = "tasks") -> Iterator[TableRow]:
    """Reads a table row by row.

    Args:
      path: A JSONL file (one object per line), a JSON file with one list of objects, a Parquet file, a CSV file with a
        header (separated by commas or semicolons; `.tsv`: by tabs), or a folder. `.gz` files are unpacked. Values of
        CSV files are texts, exactly as written.
      wanted: Columns that will be asked for, named as for `value`. Other columns may be skipped, which is faster.
        Empty: all columns.
      split: Part of a folder to read.
      of: What the table contains, for messages.
    """
    named = Path(path)
    if not named.is_dir() and not named.is_file():
        beside = [item.name for item in named.parent.iterdir()] if named.parent.is_dir() else []
        near = difflib.get_close_matches(named.name, beside, n=1)
        hint = f"; did you mean {named.parent / near[0]}?" if near else ""
        raise protocols.DataError(f"{named}: no such file of {of}{hint}")
    if named.is_file() and named.suffix.lower() == ".xlsx":
        raise protocols.DataError(f"{named}: {', '.join(ENDINGS)} files are read, not .xlsx; convert it")
    # Numbers go on over the files of a folder; the places that messages name start at 1 in each file.
    number = 0
    for file in _files_of_folder(named, split) if named.is_dir() else [named]:
        if _kind(file) not in (".parquet", ".csv", ".tsv", ".arrow"):
            yield from _lines(file)
            continue
        within = 0
        for batch in _batches(file, wanted):
            narrow = [field for field in batch.schema if re.search("float|decimal", str(field.type))]
            for values in batch.to_pylist():
                number, within = number + 1, within + 1
                values |= {field.name: _shortest(field.type, values[field.name]) for field in narrow}
                yield TableRow(number, f"{file}, row {within}", values)


def value(row: TableRow, column: str, hint: str = "") -> Any:
    """Returns a row's value in a column.

    Args:
      row: A row of the table.
      column: Name of the column. `reward_model.ground_truth` reaches into a structure, `prompt.0` into a list.
      hint: Text to add to the error message.
    """
    # First, because a column may have dots in its own name.
    if column in row.values:
        return row.values[column]
    here: Any = row.values
    outer = ""
    for part in column.split("."):
        if isinstance(here, Mapping) and part in here:
            here = here[part]
        elif isinstance(here, list) and part.isdecimal() and int(part) < len(here):
            here = here[int(part)]
        else:
            subject = repr(outer) if outer else "it"
            if isinstance(here, list):
                there = f"{subject} is a list of {len(here)}"
            elif not isinstance(here, Mapping):
                there = f"{subject} is {here!r:.40}"
            elif near := difflib.get_close_matches(part, here, n=1):
                there = f"did you mean {f'{outer}.{near[0]}'.lstrip('.')!r}?"
            else:
                there = f"{subject} has {', '.join(map(repr, here)) or 'no columns'}"
            raise protocols.DataError(f"{row.where}: no column {column!r}; {there}{hint}")
        outer = f"{outer}.{part}".lstrip(".")
    return here


# Files of a path ------------------------------------------------------------------------------------------------------


def _files_of_folder(folder: Path, split: str) -> list[Path]:
    """Returns the files of a split: of a dataset that `save_to_disk` wrote, or of files named by split."""
    if (folder / "dataset_dict.json").is_file():
        # A DatasetDict keeps each split in a folder of that name.
        _check_split(folder, split, _listed(folder / "dataset_dict.json", "splits"))
        folder = folder / split
    if (state := folder / "state.json").is_file():
        if _listed(state, "_indices_data_files", needed=False):
            raise protocols.DataError(
                f"{folder}: was saved as a selection of rows; call flatten_indices() before save_to_disk()"
            )
        names = [item.get("filename") if isinstance(item, dict) else None for item in _listed(state, "_data_files")]
        files = [folder / str(name) for name in names]
        for file in files:
            if not file.is_file():
                raise protocols.DataError(f"{file}: no such file, and {state} names it; copy the folder whole")
        return files
    shards = {
        file: ending for place in (folder, folder / "data") for ending in ENDINGS for file in place.glob(f"*{ending}")
    }
    if not shards:
        raise protocols.DataError(
            f"{folder}: is a folder without tables: give the one that save_to_disk wrote (it holds state.json or "
            f"dataset_dict.json), one with files of {', '.join(ENDINGS)}, or a single file"
        )
    # train-00000-of-00002.parquet
    splits = {shard: shard.name.removesuffix(ending).split("-")[0] for shard, ending in shards.items()}
    _check_split(folder, split, sorted(set(splits.values())))
    files = sorted(shard for shard in shards if splits[shard] == split)
    endings = sorted({shards[shard] for shard in files})
    if len(endings) > 1:
        raise protocols.DataError(
            f"{folder}: has the split {split!r} as {' and '.join(endings)}; name a single file, or remove one kind"
        )
    return files


def _check_split(folder: Path, split: str, splits: Sequence[Any]) -> None:
    if split not in splits:
        raise protocols.DataError(
            f"{folder}: has no split {split!r}; it has {', '.join(map(str, splits)) or 'none'} (choose as "
            "--config.task.arguments=\"{'split': 'test'}\")"
        )


def _listed(file: Path, key: str, *, needed: bool = True) -> list[Any]:
    try:
        items = json.loads(file.read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError) as error:
        raise protocols.DataError(f"{file}: not readable as Hugging Face's datasets writes it ({error})") from error
    if isinstance(items, list) or not (needed or items):
        return items or []
    raise protocols.DataError(f"{file}: has no list {key!r}, as Hugging Face's datasets writes it")


# Rows of a file -------------------------------------------------------------------------------------------------------


# JSONL is read line by line, because a payload must stay as it was written. pyarrow.dataset turns texts that look like
# dates into dates and large integers into floats, refuses columns of mixed types, and adds absent names to structures.
def _lines(file: Path) -> Iterator[TableRow]:
    try:
        with _opened(file) as lines:
            # Some editors write a byte order mark in front of the first line.
            listed = _kind(file) == ".json" and lines.read(512).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
            lines.seek(0)
            for number, where, values in _items(file, lines) if listed else _json_lines(file, lines):
                if not isinstance(values, dict):
                    raise protocols.DataError(f"{where}: a JSON object is expected, not {type(values).__name__}")
                yield TableRow(number, where, values)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise protocols.DataError(f"{file}: not a readable gzip file ({error})") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object, in which a key that stands twice would hide the first value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return values


def _items(file: Path, content: IO[bytes]) -> Iterator[tuple[int, str, Any]]:
    try:
        items = json.loads(content.read().decode("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise protocols.DataError(f"{file}: not a JSON list ({error})") from error
    for number, values in enumerate(items, start=1):
        yield number, f"{file}, item {number}", values


def _json_lines(file: Path, lines: IO[bytes]) -> Iterator[tuple[int, str, Any]]:
    for number, line in enumerate(lines, start=1):
        # Skipped but counted, so that the number in a message is the one that an editor shows.
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
            values = json.loads(text, object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            raise protocols.DataError(f"{where}: not UTF-8 text ({error.reason})") from error
        except json.JSONDecodeError as error:  # the error's own text has line numbers too, counted from this line
            raise protocols.DataError(f"{where}: not a JSON object ({error.msg}, column {error.colno})") from error
        except (ValueError, RecursionError) as error:
            raise protocols.DataError(f"{where}: not a JSON object ({error})") from error
        yield number, where, values


def _batches(file: Path, needed_columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow  # imported here, so that only runs on such files pay for it
    from pyarrow import csv, dataset, fs

    local, kind, schema = fs.LocalFileSystem(), _kind(file), None
    try:
        if kind == ".arrow":
            # An Arrow stream, which pyarrow.dataset cannot read.
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                names = _needed(stream.schema.names, needed_columns)
                for batch in stream:
                    yield batch if names is None else batch.select(names)
            return
        if kind == ".parquet":
            layout = dataset.ParquetFileFormat()
        else:
            layout = dataset.CsvFileFormat(
                parse_options=csv.ParseOptions(delimiter=_delimiter(file), newlines_in_values=True),
                read_options=csv.ReadOptions(block_size=_CSV_BLOCK),
            )
            # All columns are read as text: the answer 007 is not the number 7.
            schema = pyarrow.schema([(name, pyarrow.string()) for name in layout.inspect(str(file), local).names])
        table = dataset.dataset(str(file), schema=schema, format=layout, filesystem=local)
        columns = _needed(table.schema.names, needed_columns)
        # Little is read ahead, because a file may be larger than the memory.
        yield from table.to_batches(columns=columns, batch_size=_BATCH_ROWS, batch_readahead=1)
    except (pyarrow.ArrowException, OSError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0].rpartition("Invalid: ")[2]
        # Arrow counts the header as row 1; our rows begin after it.
        match = re.search(r"Row #(\d+): ", message)
        row = f", row {int(match[1]) - 1}" if match else ""
        message = message.replace(match[0], "") if match else message
        named = {".parquet": "Parquet", ".arrow": "Arrow"}.get(kind, "CSV")
        raise protocols.DataError(f"{file}{row}: not a readable {named} file ({message})") from error


def _kind(file: Path) -> str:
    """Returns the ending that tells how to read a file, in lower case."""
    return Path(file.stem if file.suffix.lower() == ".gz" else file.name).suffix.lower()


def _opened(file: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file)) if file.suffix.lower() == ".gz" else file.open("rb")


def _delimiter(file: Path) -> str:
    """Returns what separates the columns of a CSV file: semicolons if its header has some, and no commas."""
    if _kind(file) == ".tsv":
        return "\t"
    with _opened(file) as lines:
        header = re.sub(rb'"[^"]*"', b"", lines.readline(_CSV_BLOCK))
    return ";" if b";" in header and b"," not in header else ","


def _shortest(kind: Any, value: Any) -> Any:
    """Returns a value of an Arrow type with the numbers in it as the module's first lines say."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_float16(kind) or types.is_float32(kind):
        # By way of a text: a cast to 64 bits keeps the digits that no one wrote.
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_decimal(kind):
        number = int(value) if value == int(value) else float(value)
        return number if decimal.Decimal(repr(number)) == value else f"{value:f}"
    if types.is_struct(kind):
        return {field.name: _shortest(field.type, value[field.name]) for field in kind}
    if types.is_map(kind):
        return [(_shortest(kind.key_type, key), _shortest(kind.item_type, item)) for key, item in value]
    if types.is_dictionary(kind):
        return _shortest(kind.value_type, value)
    # All kinds of lists have a type of their values.
    return [_shortest(kind.value_type, item) for item in value] if hasattr(kind, "value_type") else value


def _needed(names: Sequence[str], columns: Sequence[str]) -> list[str] | None:
    """Returns the columns to read.

    None means all, which is used if one is missing: the error then names the existing ones.
    """
    outer = list(dict.fromkeys(column if column in names else column.split(".")[0] for column in columns))
    return outer if outer and all(name in names for name in outer) else None
