"""BM25 over an index of SQLite's FTS5. An index is written once and searched from several threads.

BM25 of an OR of words scores every passage that contains at least one of them. With a common word such as "the", this
takes a second or more per million passages. So a search scores at most `effort` passages. If the query's words occur in
fewer passages, the result is exactly FTS5's own: https://sqlite.org/fts5.html#the_bm25_function. If they occur in more:

1. Words that a tenth or more of all passages contain are left out, unless the query has no other words.
2. Passages with all remaining words come first, ranked by BM25.
3. Passages with any of the rarest words follow, ranked by BM25. The rarest words are as many as occur in at most
   `effort` passages in total.

bm25s is not used. Over a million passages, one query took 50 ms (28 ms with its files mapped) against 3 ms here. The
build took 4.2 GiB and 155 processor seconds, against 0.2 GiB and 65. It also stores neither titles nor texts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra_jax import protocols

APPLICATION_ID = 0x4C424658
"""Mark in an index's header. A file without this mark is never overwritten."""

VERSION = "1"
TOKENIZER = "porter unicode61 remove_diacritics 2"

_BATCH = 10_000
_FREQUENT = 1000
"""Number of passages from which on a word's count is stored. Looking up counts of rarer words is fast."""

_BUILD_OPCODES = 10_000
"""SQLite instructions between two checks whether to stop a build."""

MOST_WORDS = 32
"""Largest number of a query's words that count. Later words are ignored."""

MOST_SNIPPET_WORDS = 64
"""Largest number of words in a snippet, which is FTS5's own limit."""

_COMMON_SHARE = 0.1
_CLOSE_SECONDS = 5.0
_OPCODES = 1000
"""SQLite instructions between two checks of the clock."""

_WORD = re.compile(r"[^\W_]+")


# Building -------------------------------------------------------------------------------------------------------------


class BuildStopped(Exception):
    """The build was told to stop. It left nothing behind."""


@dataclass(frozen=True)
class Passage:
    """A document of a corpus."""

    passage_id: str
    title: str
    text: str


def build(
    path: Path,
    passages: Iterable[Passage],
    about: Mapping[str, str],
    *,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes an index under a temporary name and renames it to `path` when it is complete.

    Args:
      path: Path of the index. An existing file is replaced.
      passages: The corpus.
      about: Facts that the function `about` will return.
      stopped: Polled during the build. The build ends once it returns true.
      progress: Called with the number of passages written so far.

    Raises:
      Stopped: `stopped` returned true.
      sqlite3.Error, OSError: The index cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename between file systems would not be atomic.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as connection:
            count = _write(connection, passages, stopped, progress)
            connection.executemany("INSERT INTO about VALUES (?, ?)", {**about, "passages": str(count)}.items())
            connection.execute("COMMIT")
        # mkstemp makes a file that only its owner can read.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write(
    connection: sqlite3.Connection,
    passages: Iterable[Passage],
    stopped: Callable[[], bool],
    progress: Callable[[int], None],
) -> int:
    """Makes the tables of an index, adds the passages and returns their number."""
    for statement in (
        f"PRAGMA application_id = {APPLICATION_ID}",
        "PRAGMA page_size = 8192",
        "PRAGMA journal_mode = OFF",  # no journal: an interrupted build is thrown away as a whole
        "PRAGMA synchronous = OFF",
        "PRAGMA cache_size = -65536",
        "BEGIN",
        f"CREATE VIRTUAL TABLE passages USING fts5(title, text, passage_id UNINDEXED, tokenize='{TOKENIZER}')",
        "CREATE VIRTUAL TABLE vocabulary USING fts5vocab(passages, row)",
        "CREATE TABLE frequent (term TEXT PRIMARY KEY, passages INTEGER) WITHOUT ROWID",
        "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
        "INSERT INTO passages(passages, rank) VALUES ('hashsize', 67108864)",  # bytes in memory before a segment
    ):
        connection.execute(statement)
    rest, count = iter(passages), 0
    while batch := list(itertools.islice(rest, _BATCH)):
        if stopped():
            raise BuildStopped
        # JSON text may hold unpaired surrogates, but SQLite refuses them.
        rows = [
            tuple(text.encode("utf-8", "replace").decode() for text in (item.passage_id, item.title, item.text))
            for item in batch
        ]
        connection.executemany("INSERT INTO passages(passage_id, title, text) VALUES (?, ?, ?)", rows)
        count += len(rows)
        progress(count)
    # Merges the index into one segment, so that a search looks up each word in one place.
    connection.set_progress_handler(lambda: int(stopped()), _BUILD_OPCODES)
    try:
        connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        connection.execute("INSERT INTO frequent SELECT term, doc FROM vocabulary WHERE doc >= ?", (_FREQUENT,))
    except sqlite3.OperationalError:
        if stopped():
            raise BuildStopped from None
        raise
    return count


def about(path: Path) -> dict[str, str] | None:
    """Returns the facts that an index was built with. None if they cannot be read.

    Raises:
      DataError: The file is not an index of ours.
    """
    header = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        header = file.read(72)
    # The mark lies at byte 68 of SQLite's header: https://sqlite.org/fileformat.html#the_database_header. It is read
    # without SQLite, which cannot open a truncated index; one of ours may still be replaced.
    if not header.startswith(b"SQLite format 3\0") or int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise protocols.DataError(
            f"{path}: is no index of a corpus, so it is not overwritten; name another place as "
            "config.tools.arguments.search.index"
        )
    try:
        with contextlib.closing(connect(path)) as connection:
            return dict(connection.execute("SELECT name, value FROM about"))
    except sqlite3.Error:
        return None


def connect(path: Path) -> sqlite3.Connection:
    """Opens an index read-only. The connection never sees a file that is renamed into its place later."""
    # immutable=1: SQLite takes no locks, because an index is replaced as a whole and never changed in place.
    address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)


# Searching ------------------------------------------------------------------------------------------------------------


class SearchOverdue(Exception):
    """A search missed its deadline."""


@dataclass(frozen=True)
class Hit:
    """A passage that was found.

    Attributes:
      passage_id: id in the corpus.
      title: title in the corpus.
      snippet: part of the text around the matches, or all of a short text.
    """

    passage_id: str
    title: str
    snippet: str


@dataclass(frozen=True)
class _Term:
    """A word of a query, and the number of passages that have it."""

    word: str
    passages: int


class Index:
    """An open index. Any thread may search it. Searches run at once up to the number of connections.

    Args:
      path: Path of an index that `build` wrote.
      connections: Number of searches that can run at once.
      effort: Largest number of passages that a search may score. 0 means all.

    Attributes:
      passages: Number of passages.
    """

    def __init__(self, path: Path, connections: int = 2, effort: int = 10_000) -> None:
        self._all = [connect(path) for _ in range(connections)]
        self._idle: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()
        for connection in self._all:
            for statement in (
                # 8 GiB of the file are mapped, so that all connections share the kernel's cache of it.
                "PRAGMA mmap_size = 8589934592",
                "PRAGMA temp_store = MEMORY",
                f"CREATE VIRTUAL TABLE temp.words USING fts5(word, tokenize='{TOKENIZER}')",
                "CREATE VIRTUAL TABLE temp.tokens USING fts5vocab(temp, words, instance)",
            ):
                connection.execute(statement)
            self._idle.put(connection)
        first = self._all[0]
        self.passages = int(first.execute("SELECT value FROM about WHERE name = 'passages'").fetchone()[0])
        self._frequent: dict[str, int] = dict(first.execute("SELECT term, passages FROM frequent"))
        self._effort = effort or 2**62

    def search(
        self, query: str, first: int, max_hits: int, snippet_words: int, seconds: float
    ) -> tuple[list[Hit], bool]:
        """Finds the passages that fit best, best first.

        Args:
          query: Any text. Only its words count.
          first: Number of passages to skip.
          max_hits: Largest number of passages to return.
          snippet_words: Number of words of a snippet, 1 to `MOST_SNIPPET_WORDS`.
          seconds: Deadline of the search in seconds, including the wait for a connection.

        Returns:
          The passages, and whether more exist.

        Raises:
          Overdue: The search missed its deadline.
          sqlite3.Error: The index cannot be read.
        """
        due = time.monotonic() + seconds
        with self._connection(due) as connection:
            terms = self._terms(connection, list(words(query)))
            quoted = [f'"{term.word}"' for term in terms]
            ranking: dict[int, None] = {}
            # Tried in order, until enough passages are found. The module docstring has the rules.
            touched = itertools.accumulate(term.passages for term in terms)
            rarest = [word for word, passages in zip(quoted, touched, strict=True) if passages <= self._effort]
            expressions = [" OR ".join(rarest or quoted[:1])] if terms else []
            if 1 < len(terms) != len(rarest):
                expressions.insert(0, " AND ".join(quoted))
            for expression in expressions:
                # The inner LIMIT bounds how many passages are scored; the outer one picks the best of them. One passage
                # more than asked for tells whether another page exists.
                places = connection.execute(
                    "SELECT place FROM (SELECT rowid AS place, bm25(passages) AS score FROM passages WHERE passages "
                    "MATCH ? LIMIT ?) ORDER BY score, place LIMIT ?",
                    (expression, self._effort, first + max_hits + 1),
                )
                ranking.update(dict.fromkeys(place for (place,) in places))
                if len(ranking) > first + max_hits:
                    break
            snippet = (
                "SELECT passage_id, title, snippet(passages, 1, '', '', '...', ?) FROM passages "
                "WHERE passages MATCH ? AND rowid = ?"
            )
            rows = [
                connection.execute(snippet, (snippet_words, " OR ".join(quoted), place)).fetchone()
                for place in list(ranking)[first : first + max_hits]
            ]
            return [Hit(*row) for row in rows], len(ranking) > first + max_hits

    def passages_at(self, places: Sequence[int], snippet_words: int, due: float) -> list[Hit]:
        """Returns the passages at these positions in the corpus, counted from 0, with the beginning of each text.

        Raises:
          Overdue: `due`, a time of `time.monotonic()`, has passed.
        """
        hits = []
        with self._connection(due) as connection:
            query = "SELECT passage_id, title, text FROM passages WHERE rowid = ?"
            for place in places:
                # SQLite counts rows from 1.
                name, title, text = connection.execute(query, (place + 1,)).fetchone()
                end = next(itertools.islice(re.finditer(r"\S+", text), snippet_words, None), None)
                hits.append(Hit(name, title, text if end is None else text[: end.start()].rstrip() + "..."))
        return hits

    def close(self) -> None:
        """Interrupts the running searches and waits for them. No search may begin afterwards."""
        for connection in self._all:
            connection.interrupt()
        for _ in self._all:
            with contextlib.suppress(queue.Empty):
                self._idle.get(timeout=_CLOSE_SECONDS).close()

    @contextlib.contextmanager
    def _connection(self, due: float) -> Iterator[sqlite3.Connection]:
        """Yields a connection whose statements are interrupted after the deadline."""
        try:
            connection = self._idle.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            raise SearchOverdue from None
        try:
            connection.set_progress_handler(lambda: int(time.monotonic() > due), _OPCODES)
            yield connection
        except sqlite3.OperationalError:
            if time.monotonic() > due:
                raise SearchOverdue from None
            raise
        finally:
            self._idle.put(connection)

    def _terms(self, connection: sqlite3.Connection, query_words: Sequence[str]) -> list[_Term]:
        """Returns the query's words that occur in the corpus, rarest first. Words with the same stem count once.

        Leaves out common words if all occur in more than `effort` passages and others exist.
        """
        # The temporary FTS5 table splits the words with the index's own tokenizer, so that stems match exactly.
        connection.execute("DELETE FROM temp.words")
        connection.executemany("INSERT INTO temp.words(rowid, word) VALUES (?, ?)", enumerate(query_words))
        stems: dict[int, list[str]] = {}
        for place, stem in connection.execute("SELECT doc, term FROM temp.tokens ORDER BY doc, offset"):
            stems.setdefault(place, []).append(stem)
        counts: dict[str, int] = {}
        for stem in itertools.chain.from_iterable(stems.values()):
            # SQLite counts a frequent word by reading all its places, so these counts were stored.
            if (count := self._frequent.get(stem)) is None:
                row = connection.execute("SELECT doc FROM vocabulary WHERE term = ?", (stem,)).fetchone()
                count = int(row[0]) if row else 0
            counts[stem] = count
        # Reversed, so that the first of several words with the same stem wins.
        distinct = {tuple(parts): place for place, parts in reversed(stems.items())}
        terms = [_Term(query_words[place], min(map(counts.__getitem__, parts))) for parts, place in distinct.items()]
        terms = sorted((term for term in terms if term.passages), key=lambda term: (term.passages, term.word))
        if sum(term.passages for term in terms) <= self._effort:
            return terms
        return [term for term in terms if term.passages < _COMMON_SHARE * self.passages] or terms


def words(query: str) -> Iterator[str]:
    """Yields the words of a query, each once, up to `MOST_WORDS`."""
    matches = (match[0] for match in _WORD.finditer(query))
    return itertools.islice(dict.fromkeys(itertools.islice(matches, 4 * MOST_WORDS)), MOST_WORDS)
