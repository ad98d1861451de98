"""The search tool: BM25 (or vectors) over a corpus of your own. It returns pages of ids, titles and snippets.

config.tools.use = ("search",)
config.tools.arguments = {"search": {"path": "wiki.jsonl", "title_column": "", "text_column": "contents"}}

The index (`bm25`) is built when a run first opens the corpus. It is kept beside the corpus for later runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools import bm25, toolbox
from libra_jax.utils import deadlines, resolving, scratch, tables

FIELD = "tools.arguments.search"

MOST_PAGES = 100

TURN_SECONDS = 60.0
"""Seconds that a search may wait for its turn.

The run's own deadline of a step, `task.tool_seconds`, is usually shorter.
"""

_QUIET_SECONDS = 3.0
"""Seconds between two progress lines of a build, and before the first line."""


Embed = Callable[[Sequence[str]], Any]
"""Function from n texts to an array of shape (n, width), on any device. One thread at a time calls it."""

_BLOCK_BYTES = 64 << 20
"""Bytes of vectors that are multiplied at once. A search checks the clock between two blocks."""


class Search:
    """Finds passages of a corpus.

    All rollouts of a run share one object. It is a `toolkit.Shared`, and its own only tool.

    Args:
      path: A .jsonl, .parquet or .csv file with one passage per row.
      source: Used instead of a file: `"package.module:factory"`. The factory returns passages as mappings with "id",
        "title" and "text". Their index is made for the run and removed after it.
      source_arguments: Keyword arguments of the factory.
      id_column: Column of a passage's id. Empty: the row's number is the id.
      title_column: Column of a passage's title, which is searched too. Empty: passages have no titles.
      text_column: Column of a passage's text.
      index: Path of a file's index. Empty: beside the file, or in the user's cache folder if that place is not
        writable. An index of another corpus, or of an earlier content of the file, is replaced.
      results: Number of passages per page.
      snippet_words: Number of words shown of a text, around the matches. At most 64.
      template: Format of a shown passage, with {place}, {id}, {title} and {snippet}. Empty: a default with all of them.
      paging: Whether the policy may ask for further pages, and is told if more exist.
      seconds: Deadline of a search in seconds, from the start of its turn. A later result is a timeout.
      vectors: A .npy file with a vector for each passage (see `Vectors`). If given, vectors rank instead of BM25.
      embed: `"package.module:factory"` of the function that makes vectors of queries (`Embed`).
      embed_arguments: Keyword arguments of that factory.
      effort: Largest number of passages that a search may score; `bm25` explains the effect. 0: no limit.
      at_once: Number of searches that run at once.
      build_seconds: Seconds that building the index may take.

    Attributes:
      open_seconds: Equal to `build_seconds`, for the toolkit.
      eager: True: a call changes nothing, so it may run before the output that contains it has ended.
    """

    name = "search"
    eager = True

    def __init__(
        self,
        path: str = "",
        source: str = "",
        source_arguments: Mapping[str, Any] | None = None,
        id_column: str = "id",
        title_column: str = "title",
        text_column: str = "text",
        index: str = "",
        results: int = 3,
        snippet_words: int = 48,
        template: str = "",
        paging: bool = True,
        seconds: float = 5.0,
        vectors: str = "",
        embed: str = "",
        embed_arguments: Mapping[str, Any] | None = None,
        effort: int = 10_000,
        at_once: int = 2,
        build_seconds: float = 7200.0,
    ) -> None:
        problem = (
            'name a .jsonl, .parquet or .csv file of passages, or in source a "package.module:factory", and not both'
        )
        config_lib.check(bool(path) != bool(source), f"{FIELD}.path", problem)
        config_lib.check(
            bool(path) or not index, f"{FIELD}.index", "is kept for a file (path); that of a source is not kept"
        )
        config_lib.check(bool(text_column), f"{FIELD}.text_column", "is empty: name the column of the passages' texts")
        _check_factory(source, source_arguments, "source")
        _check_factory(embed, embed_arguments, "embed")
        config_lib.check(
            bool(vectors) == bool(embed), f"{FIELD}.vectors", "need embed, and embed needs them; name both"
        )
        for name, value, minimum in (("results", results, 1), ("effort", effort, 0), ("at_once", at_once, 1)):
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            config_lib.check(
                is_integer and value >= minimum, f"{FIELD}.{name}", f"must be {minimum} or more, not {value!r}"
            )
        max_words = bm25.MOST_SNIPPET_WORDS
        good = isinstance(snippet_words, int) and 0 < snippet_words <= max_words
        config_lib.check(good, f"{FIELD}.snippet_words", f"must lie in 1..{max_words}, not {snippet_words!r}")
        for name, allowed in (("seconds", seconds), ("build_seconds", build_seconds)):
            config_lib.check(
                0 < allowed < float("inf"), f"{FIELD}.{name}", f"must be positive and finite, not {allowed}"
            )
        self._path, self._index_path = path, index
        self._source, self._source_arguments = source, dict(source_arguments or {})
        self._vectors_path, self._embed, self._embed_arguments = vectors, embed, dict(embed_arguments or {})
        self._columns = {"id": id_column, "title": title_column, "text": text_column}
        self._results, self._snippet_words, self._seconds = results, snippet_words, seconds
        self._effort, self._at_once, self._paging = effort, at_once, paging
        self._template = template or (
            "{place}. {title} [{id}]\n{snippet}" if title_column else "{place}. [{id}]\n{snippet}"
        )
        # Formats an empty hit now, so that a bad template fails at the start and not at the first search.
        _format_hit(self._template, 1, bm25.Hit("", "", ""))
        self.open_seconds = build_seconds
        self._index: bm25.Index | None = None
        self._vectors: Vectors | None = None
        self._stopped = threading.Event()
        self._opening = threading.Lock()
        self._turns = asyncio.Semaphore(at_once)
        fitting = "the one that fits" if results == 1 else f"the {results} that fit"
        self.description = f"Searches a collection of texts and returns {fitting} the query best."
        properties: dict[str, Any] = {"query": {"type": "string", "description": "Words to look for."}}
        if paging:
            page = {"type": "integer", "minimum": 1, "maximum": MOST_PAGES, "description": "Of the results, from 1."}
            properties["page"] = page
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": ["query"],
            "additionalProperties": False,
        }

    # As a `toolkit.Shared` -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Opens the index. Builds it first if this corpus has none.

        Raises:
          DataError: The corpus cannot be used. The message names the file and the row.
          ConfigError: The index cannot be written.
        """
        self._stopped.clear()
        self._turns = asyncio.Semaphore(self._at_once)  # a semaphore belongs to the event loop that first uses it
        await deadlines.off_loop(self._open)

    def missing(self) -> list[str]:
        """See `toolkit.ReadsFiles`."""
        problems = []
        if self._path and not Path(self._path).exists():
            try:
                next(tables.rows(self._path, of="passages"), None)
            except protocols.DataError as error:  # its message suggests the nearest file name
                problems.append(f"config.{FIELD}.path: {error}")
        if self._vectors_path and not Path(self._vectors_path).exists():
            problems.append(f"config.{FIELD}.vectors: {self._vectors_path}: no such file of vectors")
        return problems

    def tools(self) -> Sequence[toolbox.Tool]:
        """Returns this object as the only tool."""
        return (self,)

    async def close(self) -> None:
        """Ends a running build and running searches. No half-made index stays."""
        self._stopped.set()

        def end() -> None:
            with self._opening:  # free once a running build has noticed that it is stopped
                index, self._index = self._index, None
                if index is not None:
                    index.close()

        await deadlines.off_loop(end)

    def _open(self) -> None:
        with self._opening:
            folder = None if self._path else scratch.folder("search")
            try:
                if folder:
                    place = folder / "index"
                    self._build(place, {})
                else:
                    place = self._current()
                self._index = bm25.Index(place, self._at_once, self._effort)
                if self._embed:
                    make = resolving.resolve(self._embed, f"{FIELD}.embed")
                    embed = resolving.call(make, self._embed, self._embed_arguments, f"{FIELD}.embed_arguments")
                    with resolving.named(self._embed, f"{FIELD}.embed", "embedding a query"):
                        self._vectors = Vectors(Path(self._vectors_path), embed, self._index.passages)
            except bm25.BuildStopped:
                return
            except (sqlite3.Error, OSError) as error:
                raise protocols.ConfigError(
                    f"config.{FIELD}.index: the index of {self._path or self._source} cannot be written or read "
                    f"({error}); name another place for it"
                ) from error
            finally:
                if folder:  # the open index stays readable after its file name is removed
                    shutil.rmtree(folder, ignore_errors=True)

    # The index ------------------------------------------------------------------------------------------------------

    def _current(self) -> Path:
        """Returns the path of the file's index. Builds it unless a current one exists.

        It compares size and time of the corpus, then its content.
        """
        file = Path(self._path)
        config_lib.check(
            not file.is_dir(),
            f"{FIELD}.path",
            f"{file} is a folder; name a .jsonl, .parquet or .csv file, or a factory of the passages in {FIELD}.source",
        )
        if missing := self.missing():
            raise protocols.DataError(missing[0])
        # Other columns make another index of the same file, so they are part of its name.
        mapping = hashlib.sha256(json.dumps(self._columns).encode()).hexdigest()[:8]
        corpus_path = file.resolve()
        place = corpus_path.parent / f"{corpus_path.name}.{mapping}.fts5"
        if self._index_path:
            place = Path(self._index_path)
        elif not place.exists() and not os.access(corpus_path.parent, os.W_OK):
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "libra_jax"
            place = cache / f"{hashlib.sha256(str(place).encode()).hexdigest()[:16]}.fts5"
        state = file.stat()
        about = {
            "version": bm25.VERSION,
            "columns": json.dumps(self._columns),
            "size": str(state.st_size),
            "time": str(state.st_mtime_ns),
        }
        old_facts = bm25.about(place) if place.exists() else None
        # Size and time of the file are unchanged, so its content need not be read.
        if old_facts is not None and about.items() <= old_facts.items():
            return place
        with file.open("rb") as content:
            about["content"] = hashlib.file_digest(content, "sha256").hexdigest()
        lasting = ("version", "columns", "content")
        if old_facts is None or any(old_facts.get(key) != about[key] for key in lasting):
            self._build(place, about)
        return place

    def _build(self, place: Path, about: Mapping[str, str]) -> None:
        corpus, field = (self._path, "path") if self._path else (self._source, "source")
        passages = self._passages()
        # Takes one passage first, so that an empty corpus fails before an index is written.
        first = next(passages, None)
        if first is None:
            raise protocols.DataError(f"config.{FIELD}.{field}: {corpus} holds no passages: nothing could be found")
        start = last_report = time.monotonic()

        def tell(count: int) -> None:
            nonlocal last_report
            now = time.monotonic()
            if now - last_report > _QUIET_SECONDS:
                last_report = now
                with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                    print(f"search: indexing {corpus}: {count:,} passages in {now - start:.0f} s", file=sys.stderr)

        all_passages = itertools.chain([first], passages)
        bm25.build(place, all_passages, about, stopped=self._stopped.is_set, progress=tell)

    def _passages(self) -> Iterator[bm25.Passage]:
        """Yields the passages of the file, or those that the factory makes."""
        hint = f" (name its columns in config.{FIELD}.text_column and the like)"
        rows: Iterable[Any] = ()
        if self._path:
            rows = tables.rows(self._path, [column for column in self._columns.values() if column], of="passages")
        else:
            factory = resolving.resolve(self._source, f"{FIELD}.source")
            rows = resolving.call(factory, self._source, self._source_arguments, f"{FIELD}.source_arguments")
        # Errors of the user's code arise while passages are drawn, because a factory may be a generator.
        named = resolving.named(self._source, f"{FIELD}.source", "a passage")
        with named if self._source else contextlib.nullcontext():
            for number, row in enumerate(rows, start=1):
                if isinstance(row, tables.TableRow):
                    # Without a column for them, a passage's id is its number, and its title is empty.
                    fields = {"id": row.number, "title": ""}
                    fields |= {key: tables.value(row, name, hint) for key, name in self._columns.items() if name}
                    where = row.where
                else:
                    fields, where = row, f"{self._source}, passage {number}"
                name, title, text = fields["id"], fields["title"], fields["text"]
                if not isinstance(text, str) or not isinstance(title, str):
                    problem = f"title and text of a passage must be texts, not {title!r} and {text!r}"
                    raise protocols.DataError(f"{where}: {problem}")
                if not isinstance(name, str | int):
                    raise protocols.DataError(f"{where}: the id of a passage must be a text or a number, not {name!r}")
                yield bm25.Passage(str(name), title, text)

    # As a `toolbox.Tool` --------------------------------------------------------------------------------------------

    async def call(self, arguments: Mapping[str, Any]) -> protocols.ToolReturn:
        """See `toolbox.Tool`. An empty result is not a failure; a query without a word is."""
        index = self._index
        if index is None:
            raise RuntimeError("call before open")
        query, page = arguments["query"], arguments.get("page", 1)
        if not any(bm25.words(query)):
            return protocols.ToolReturn(self.name, "failure", "error: the query has no words")

        async def in_turn() -> str:
            # No waiting search holds a thread. The search keeps its own deadline.
            async with self._turns:
                return await deadlines.off_loop(self._answer, index, query, page)

        try:
            content = await deadlines.cancel_after(TURN_SECONDS + self._seconds, in_turn())
        except (bm25.SearchOverdue, deadlines.Overdue):
            text = f"error: the search took more than {self._seconds:g} s; ask for rarer words"
            return protocols.ToolReturn(self.name, "timeout", text)
        except sqlite3.Error as error:
            corpus = self._path or self._source
            raise protocols.EnvironmentCrashed(f"search: the index of {corpus} cannot be read ({error})") from error
        return protocols.ToolReturn(self.name, "success", content)

    def _answer(self, index: bm25.Index, query: str, page: int) -> str:
        before = (page - 1) * self._results
        if self._vectors is None:
            hits, has_more = index.search(query, before, self._results, self._snippet_words, self._seconds)
        else:
            due = time.monotonic() + self._seconds
            places = self._vectors.best(query, before + self._results + 1, due)
            has_more = len(places) > before + self._results
            hits = index.passages_at(places[before : before + self._results], self._snippet_words, due)
        if not hits:
            return "no results" if page == 1 else f"no results on page {page}"
        lines = [_format_hit(self._template, before + place, hit) for place, hit in enumerate(hits, start=1)]
        if has_more and self._paging and page < MOST_PAGES:
            lines.append(f"more results: page {page + 1}")
        return "\n".join(lines)


def _check_factory(name: str, arguments: Mapping[str, Any] | None, argument: str) -> None:
    """Checks that the factory exists and takes the arguments."""
    config_lib.check(bool(name) or not arguments, f"{FIELD}.{argument}_arguments", f"are for {argument}; it is empty")
    if name:
        factory = resolving.resolve(name, f"{FIELD}.{argument}")
        resolving.check_arguments(factory, name, arguments or {}, f"{FIELD}.{argument}_arguments")


def _format_hit(template: str, place: int, hit: bm25.Hit) -> str:
    try:
        return template.format(place=place, id=hit.passage_id, title=hit.title, snippet=hit.snippet)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise protocols.ConfigError(
            f"config.{FIELD}.template: {template!r} may have {{place}}, {{id}}, {{title}} and {{snippet}} "
            f"({type(error).__name__}: {error})"
        ) from error


class Vectors:
    """A dense index: ranks passages by the inner product of their vectors with the query's.

    The vectors are memory-mapped from a file. Any thread may search them.

    Args:
      path: A .npy file with an array of shape (passages, width), float32 or float16, in the corpus's order.
      embed: Function that makes vectors of queries.
      passages: Number of passages in the corpus.

    Raises:
      DataError: The file cannot be read, or its vectors do not fit the corpus or `embed`.
    """

    def __init__(self, path: Path, embed: Embed, passages: int) -> None:
        try:
            self._vectors = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise protocols.DataError(f"{path}: no vectors can be read ({error})") from error
        shape: tuple[int, ...] = getattr(self._vectors, "shape", ())
        kind = getattr(self._vectors, "dtype", None)
        if len(shape) != 2 or shape[0] != passages or kind not in (numpy.float32, numpy.float16):
            raise protocols.DataError(
                f"{path}: has the shape {shape} and type {kind}; one vector for each of the {passages:,} "
                "passages is expected, as float32 or float16"
            )
        self._path, self._embed, self._one_at_a_time = path, embed, threading.Lock()
        self._block = max(1, _BLOCK_BYTES // max(1, 4 * shape[1]))
        # Embed once now, so that a model that does not fit the file fails at the start and not at the first search.
        self._vector("a query")

    def best(self, query: str, max_rows: int, due: float) -> list[int]:
        """Returns the rows (from 0) of the passages with the largest inner products, largest first.

        Args:
          query: Any text.
          max_rows: Largest number of rows.
          due: Deadline as a time of `time.monotonic()`.

        Raises:
          bm25.SearchOverdue: The search missed the deadline.
        """
        # The model is called by one thread at a time (`Embed`), and the wait for it counts towards the deadline.
        if not self._one_at_a_time.acquire(timeout=max(0.0, due - time.monotonic())):
            raise bm25.SearchOverdue
        try:
            vector = self._vector(query)
        finally:
            self._one_at_a_time.release()
        scores, rows = numpy.empty(0, numpy.float32), numpy.empty(0, numpy.int64)
        for start in range(0, len(self._vectors), self._block):
            if time.monotonic() > due:
                raise bm25.SearchOverdue
            block = numpy.asarray(self._vectors[start : start + self._block], numpy.float32) @ vector
            scores = numpy.concatenate([scores, block])
            rows = numpy.concatenate([rows, numpy.arange(start, start + len(block))])
            # Keep only the best so far: memory stays bounded by one block.
            if len(scores) > max_rows:
                top = numpy.argpartition(-scores, max_rows - 1)[:max_rows]
                scores, rows = scores[top], rows[top]
        # lexsort takes its last key first: it sorts by score, and by row if scores are equal.
        return [int(row) for row in rows[numpy.lexsort((rows, -scores))]]

    def _vector(self, query: str) -> Any:
        """Returns the query's vector, of shape (width,)."""
        vectors = numpy.asarray(self._embed([query]), numpy.float32)
        if vectors.shape != (1, self._vectors.shape[1]):
            raise protocols.DataError(
                f"{self._path}: its vectors have {self._vectors.shape[1]} numbers, but of one query an array of shape "
                f"{vectors.shape} was made; use the model that made the file"
            )
        return vectors[0]
