"""The search tool over a million short passages: how long its index takes, and a query, over the raw library's."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from libra_jax import protocols
from libra_jax.tools import bm25, search

PASSAGES = 1_000_000
WORDS = (16, 48)
"""Of a passage, fewest and most."""
VOCABULARY = 200_000
QUERY_WORDS = (2, 6)
"""Fewest and most; they are a random passage's own, so common words are in them as often as in texts."""
QUERIES = 400
RAW_QUERIES = 20
"""The raw library takes a second for one with common words."""
RESULTS = 3
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


async def measure(passages: int = PASSAGES) -> dict[str, Any]:
    """Milliseconds a query, one after the other and two at once, and seconds of the build.

    Args:
      passages: how many there are.

    Returns:
      Figures; `found_share` is of the queries for which the passage that they were drawn from is on the first page.

    Raises:
      LibraError: a query came back with anything but results.
    """
    with tempfile.TemporaryDirectory(prefix="libra-benchmark-") as name:
        corpus, index = Path(name) / "corpus.jsonl", Path(name) / "index"
        queries = _write(corpus, passages)
        tool = search.Search(str(corpus), title_column="", index=str(index), results=RESULTS)
        began = time.perf_counter()
        await tool.open()
        build_seconds = time.perf_counter() - began
        try:
            for query in queries[: QUERIES // 4]:  # the index comes into memory
                await _ask(tool, query)
            answers, cpu_ms = [], []
            for query in queries:
                began = time.process_time()
                answers.append(await _ask(tool, query))
                cpu_ms.append(1000 * (time.process_time() - began))
            began = time.perf_counter()
            await asyncio.gather(*(_ask_all(tool, queries[side::2]) for side in range(2)))
            both_seconds = time.perf_counter() - began
        finally:
            await tool.close()
        megabytes = index.stat().st_size / 1e6
        few = queries[:RAW_QUERIES]
        any_ms, any_found = _raw(index, few, " OR ")
        all_ms, _ = _raw(index, few, " AND ")
    alone = [milliseconds for milliseconds, _ in answers]
    found = [known for _, known in answers]
    return {
        "passages": passages,
        "build_seconds": build_seconds,
        "index_megabytes": megabytes,
        "query_ms_median": statistics.median(alone),
        "query_ms_p95": _p95(alone),
        "query_cpu_ms_median": statistics.median(cpu_ms),  # what a busy machine makes of it left out
        "query_cpu_ms_p95": _p95(cpu_ms),
        "queries_per_second_two_at_once": len(queries) / both_seconds,
        "raw_or_ms_median": statistics.median(any_ms),
        "raw_or_ms_p95": _p95(any_ms),
        "raw_and_ms_median": statistics.median(all_ms),
        "raw_and_ms_p95": _p95(all_ms),
        "found_share": statistics.fmean(found),
        "found_share_of_raw_queries": statistics.fmean(found[:RAW_QUERIES]),
        "raw_or_found_share": statistics.fmean(any_found),
        "queries": len(queries),
        "raw_queries": RAW_QUERIES,
    }


@dataclass(frozen=True)
class Query:
    """Words of a passage."""

    text: str
    passage_id: int


def _write(corpus: Path, passages: int) -> list[Query]:
    """Writes the corpus, and returns queries."""
    picker, queries = random.Random(1), []
    asked = set(picker.sample(range(passages), QUERIES))
    with corpus.open("w") as file:
        for place, words in enumerate(_texts(passages)):
            file.write(json.dumps({"id": place, "text": " ".join(words)}) + "\n")
            if place in asked:
                count = picker.randint(*QUERY_WORDS)
                queries.append(Query(" ".join(picker.sample(words, count)), place))
    picker.shuffle(queries)
    return queries


def _texts(passages: int) -> Iterator[list[str]]:
    """Words drawn as languages have them: the n-th most frequent one 1/n as often as the first (Zipf's law)."""
    rng = numpy.random.default_rng(0)
    vocabulary = [_word(number) for number in range(VOCABULARY)]
    shares = numpy.cumsum(1.0 / numpy.arange(1, VOCABULARY + 1))
    while passages > 0:
        count = min(10_000, passages)
        lengths = rng.integers(WORDS[0], WORDS[1] + 1, count)
        drawn = numpy.searchsorted(shares, rng.random(int(lengths.sum())) * shares[-1]).tolist()
        start = 0
        for length in lengths.tolist():
            yield [vocabulary[number] for number in drawn[start : start + length]]
            start += length
        passages -= count


def _word(number: int) -> str:
    """A word of its own for each number; frequent ones are short."""
    letters = ""
    while number or not letters:
        number, place = divmod(number, len(_SYLLABLES))
        letters += _SYLLABLES[place]
    return letters + "x"  # no two have one stem


async def _ask(tool: search.Search, query: Query) -> tuple[float, bool]:
    """Milliseconds, and whether the query's own passage is among the results."""
    began = time.perf_counter()
    answer = await tool.call({"query": query.text})
    seconds = time.perf_counter() - began
    if answer.status != "success" or not answer.content.startswith("1. "):
        raise protocols.LibraError(f"a search for {query.text!r} returned {answer.content!r}")
    return 1000 * seconds, f"[{query.passage_id}]" in answer.content


async def _ask_all(tool: search.Search, queries: Sequence[Query]) -> None:
    for query in queries:
        await _ask(tool, query)


def _raw(index: Path, queries: Sequence[Query], joint: str) -> tuple[list[float], list[bool]]:
    """Likewise, for the same queries as FTS5's own over the same index."""
    connection = sqlite3.connect(index)
    try:
        connection.execute("PRAGMA mmap_size = 8589934592")
        milliseconds, found = [], []
        for query in queries:
            expression = joint.join(f'"{word}"' for word in bm25.words(query.text))
            began = time.perf_counter()
            rows = connection.execute(
                "SELECT passage_id, title, snippet(passages, 1, '', '', '...', 48) FROM passages "
                "WHERE passages MATCH ? ORDER BY rank LIMIT ?",
                (expression, RESULTS),
            ).fetchall()
            milliseconds.append(1000 * (time.perf_counter() - began))
            found.append(str(query.passage_id) in [row[0] for row in rows])
        return milliseconds, found
    finally:
        connection.close()


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]
