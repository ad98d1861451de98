"""Search: the ranking is FTS5's own where a query is cheap, cost is bounded where it is not, and no query breaks it."""

import asyncio
import itertools
import json
import os
import sqlite3
import tempfile
import threading
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.tools import bm25, search, toolbox, toolkit
from libra_jax.utils import scratch

ROWS = [
    {"id": "a1", "title": "Ada Lovelace", "text": "Ada wrote the first program, for an engine that was never built."},
    {"id": "b2", "title": "Charles Babbage", "text": "He designed an engine of brass; Ada described it."},
    {"id": "c3", "title": "Alan Turing", "text": "He asked whether machines think, and ran very far."},
    {"id": "d4", "title": "Grace Hopper", "text": "She wrote a compiler, and found a moth in the machine."},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus.jsonl", ROWS)


def ask(calls, **arguments):
    """The returns of calls, one after the other, through the toolbox."""

    async def body():
        tools = config_lib.ToolsConfig(use=("search",), arguments={"search": arguments})
        async with toolkit.Toolkit(tools, config_lib.SandboxConfig()) as opened:
            box = await opened.toolbox()
            return [await box.call("search", call) for call in calls]

    return asyncio.run(body())


def found(query, **arguments):
    """Ids of the first page."""
    (answer,) = ask([{"query": query}], template="{id}", paging=False, **arguments)
    assert answer.status == "success"
    return answer.content.split("\n")


# What is found ------------------------------------------------------------------------------------------------------


def test_passages_are_shown_with_place_title_id_and_text_the_best_first(corpus):
    (answer,) = ask([{"query": "who designed the engine?"}], path=corpus, results=2)
    assert (answer.tool, answer.status) == ("search", "success")
    assert answer.seconds > 0
    assert answer.content == (
        "1. Charles Babbage [b2]\nHe designed an engine of brass; Ada described it.\n"
        "2. Ada Lovelace [a1]\nAda wrote the first program, for an engine that was never built.\n"
        "more results: page 2"
    )


def test_titles_count_and_words_are_found_in_any_form(corpus):
    assert found("grace hoppers compilers", path=corpus)[0] == "d4"
    assert found("MÀCHINE thinks", path=corpus)[0] == "c3"


def test_a_snippet_is_cut_from_around_the_matches(tmp_path):
    text = " ".join([f"before{n}" for n in range(100)] + ["needle"] + [f"after{n}" for n in range(100)])
    path = write(tmp_path / "long.jsonl", [{"id": 1, "title": "", "text": text}])
    (answer,) = ask([{"query": "needle"}], path=path, snippet_words=7, template="{snippet}")
    assert answer.content == "...before97 before98 before99 needle after0 after1 after2..."


def test_pages_follow_each_other_without_gap_or_repetition(tmp_path):
    path = write(tmp_path / "many.jsonl", [{"id": n, "title": "", "text": "word " * (n + 1)} for n in range(10)])
    calls = [{"query": "word", "page": page} for page in range(1, 6)]
    pages = [answer.content.split("\n") for answer in ask(calls, path=path, template="{id}", results=3)]
    assert [page[-1] for page in pages] == [*(f"more results: page {n}" for n in (2, 3, 4)), pages[3][0], pages[4][0]]
    ids = [line for page in pages[:4] for line in page if line.isdigit()]
    assert sorted(ids, key=int) == [str(n) for n in range(10)]
    assert ids == found("word", path=path, results=10)
    assert pages[4] == ["no results on page 5"]


def test_without_paging_there_is_one_page_and_nothing_said_of_more(corpus):
    one, other = ask([{"query": "wrote"}, {"query": "wrote", "page": 2}], path=corpus, results=1, paging=False)
    assert "more" not in one.content
    assert other.status == "failure"


def test_what_fits_nothing_is_no_failure_and_no_words_are_one(corpus):
    nothing, empty, signs = ask([{"query": "zebra"}, {"query": " "}, {"query": '"* - ()'}], path=corpus)
    assert (nothing.status, nothing.content) == ("success", "no results")
    assert {(answer.status, answer.content) for answer in (empty, signs)} == {
        ("failure", "error: the query has no words")
    }


def test_parquet_other_columns_and_row_numbers_as_ids(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "wiki.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"contents": row["text"]} for row in ROWS]), path)
    assert found("moth", path=str(path), id_column="", title_column="", text_column="contents") == ["4"]


# Any query ----------------------------------------------------------------------------------------------------------

WORDS = ["engine", "engines", "ada", "the", "of", "moth", "brass", "very", "AND", "OR", "NOT", "NEAR", "zebra", "naïve"]
PASSAGES = [bm25.Passage(str(n), "", " ".join(WORDS[(n * k) % 7] for k in range(1, 3 + n % 9))) for n in range(60)]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "index"
    bm25.build(path, PASSAGES, {"made": "here"})
    opened = bm25.Index(path)
    opened.path = path
    yield opened
    opened.close()


@given(st.text() | st.text("ab\"*():^{}+-' \0\n") | st.lists(st.sampled_from([*WORDS, '"', "(", "*"])).map(" ".join))
@settings(max_examples=150)
def test_no_query_is_an_error(index, query):
    hits, more = index.search(query, 0, 3, 8, 10)
    assert len(hits) <= 3
    assert len(hits) == 3 or not more


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6, unique=True), st.integers(0, 4), st.integers(1, 70))
@settings(max_examples=100)
def test_a_cheap_query_ranks_as_fts5_itself_does(index, query, first, most):
    with sqlite3.connect(index.path) as raw:
        expression = " OR ".join(f'"{word}"' for word in query if word != "engines" or "engine" not in query)
        scores = dict(
            raw.execute(
                "SELECT passage_id, bm25(passages) AS score FROM passages WHERE passages MATCH ? ORDER BY score",
                (expression,),
            )
        )
    raw.close()
    hits, more = index.search(" ".join(query), first, most, 8, 10)
    ours = [scores[hit.passage_id] for hit in hits]  # not ids: the last digits of ties depend on the words' order
    assert ours == pytest.approx(list(scores.values())[first : first + most], rel=1e-9)
    assert len({hit.passage_id for hit in hits}) == len(hits)
    assert more == (len(scores) > first + most)


@given(st.lists(st.sampled_from(WORDS[:7]), min_size=1, max_size=6, unique=True), st.integers(1, 100))
@settings(max_examples=60)
def test_a_bound_on_the_effort_keeps_what_has_all_words_in_front(index, query, effort):
    bounded = bm25.Index(index.path, 1, effort)
    try:
        hits, _ = bounded.search(" ".join(query), 0, 60, 8, 10)
    finally:
        bounded.close()
    ids = [hit.passage_id for hit in hits]
    assert len(set(ids)) == len(ids)
    stems = {word.removesuffix("s") for word in query}
    common = {word for word in stems if sum(word in p.text.replace("engines", "engine").split() for p in PASSAGES) > 6}
    asked = stems - common or stems
    whole = [asked <= set(PASSAGES[int(name)].text.replace("engines", "engine").split()) for name in ids]
    assert effort > 60 or whole == sorted(whole, reverse=True)


def test_common_words_cost_no_more_than_the_bound(tmp_path):
    path = tmp_path / "index"
    rows = (bm25.Passage(str(n), "", f"the of {'rare' if n % 500 == 0 else 'often'} w{n}") for n in range(4000))
    bm25.build(path, rows, {})
    bounded = bm25.Index(path, 1, 20)
    try:
        hits, more = bounded.search("the rare of", 0, 8, 8, 10)
        assert [hit.passage_id for hit in hits] == [str(n) for n in range(0, 4000, 500)]
        assert not more
        common, more = bounded.search("the of", 0, 15, 8, 10)  # nothing but common words: the first that come
        assert len(common) == 15
        assert more
    finally:
        bounded.close()


# The index ----------------------------------------------------------------------------------------------------------


def test_the_index_is_built_once_and_again_when_the_corpus_changes(tmp_path, corpus):
    assert found("moth", path=corpus) == ["d4"]
    (index,) = tmp_path.glob("*.fts5")
    built = index.stat().st_mtime_ns, index.stat().st_ino
    assert found("moth", path=corpus) == ["d4"]
    os.utime(corpus, (1, 1))  # another time, the same content
    assert found("moth", path=corpus) == ["d4"]
    assert (index.stat().st_mtime_ns, index.stat().st_ino) == built
    write(tmp_path / "corpus.jsonl", [*ROWS, {"id": "e5", "title": "Moths", "text": "moth moth"}])
    assert found("moth", path=corpus) == ["e5", "d4"]
    assert found("moth", path=corpus, title_column="") == ["e5", "d4"]  # an index of its own
    assert sorted(item.suffix for item in tmp_path.iterdir()) == [".fts5", ".fts5", ".jsonl"]


def test_an_index_of_another_corpus_is_built_anew_and_another_file_is_left_alone(tmp_path, corpus):
    other = write(tmp_path / "other.jsonl", [{"id": "x", "title": "", "text": "moth"}])
    index = str(tmp_path / "index")
    assert found("moth", path=corpus, index=index) == ["d4"]
    assert found("moth", path=other, index=index) == ["x"]
    with open(index, "r+b") as file:
        file.truncate(5000)  # cut off, but one of ours
    assert found("moth", path=other, index=index) == ["x"]
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE about (name, value)")
    database.close()
    for taken in (notes, foreign, tmp_path):
        before = taken.read_bytes() if taken.is_file() else b""
        with pytest.raises(protocols.DataError, match=r"is no index of a corpus, so it is not overwritten"):
            found("moth", path=other, index=str(taken))
        assert before == (taken.read_bytes() if taken.is_file() else b"")


def test_an_index_goes_to_the_cache_where_nothing_may_be_written_beside_the_corpus(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert found("moth", path=corpus) == ["d4"]
    assert [item.suffix for item in (tmp_path / "cache" / "libra_jax").iterdir()] == [".fts5"]
    assert not list(tmp_path.glob("*.fts5"))


def test_a_build_that_is_cut_off_leaves_nothing_behind(tmp_path):
    path, stop = tmp_path / "index", threading.Event()

    def passages():
        for number in range(10**9):
            if number == 15_000:
                stop.set()
            yield bm25.Passage(str(number), "", "text")

    with pytest.raises(bm25.BuildStopped):
        bm25.build(path, passages(), {}, stopped=stop.is_set)
    assert list(tmp_path.iterdir()) == []


BUILDING = threading.Event()


def endless():
    for number in itertools.count():
        if number > 10_000:
            BUILDING.set()
        yield {"id": number, "title": "", "text": "text"}


def test_a_run_that_ends_while_the_index_is_built_ends_the_build(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def body():
        tool = search.Search(source=f"{__name__}:endless")
        opening = asyncio.create_task(tool.open())
        await asyncio.to_thread(BUILDING.wait, 20)
        opening.cancel()
        await asyncio.wait_for(tool.close(), 20)  # it waits for the thread

    asyncio.run(body())
    (of_process,) = tmp_path.iterdir()
    assert [path.name for path in of_process.iterdir()] == [scratch.LOCK]


# What goes wrong ----------------------------------------------------------------------------------------------------


def test_a_search_that_takes_too_long_is_a_timeout(tmp_path):
    path = write(tmp_path / "many.jsonl", [{"id": n, "title": "", "text": "engine"} for n in range(5000)])
    (answer,) = ask([{"query": "engine"}], path=path, seconds=1e-9)
    assert (answer.tool, answer.status) == ("search", "timeout")
    assert answer.content.startswith("error: the search took more than 1e-09 s")


def test_an_index_that_breaks_is_infrastructure_and_raises(corpus, monkeypatch):
    def broken(*_):
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(bm25.Index, "search", broken)
    with pytest.raises(protocols.EnvironmentCrashed, match=r"search: the index of .*corpus\.jsonl cannot be read \(da"):
        ask([{"query": "engine"}], path=corpus)


def test_many_searches_at_once_share_the_connections(corpus):
    async def body():
        tool = search.Search(corpus, at_once=2)
        await tool.open()
        try:
            box = toolbox.Toolbox([tool])
            before = threading.active_count()
            waiting = [asyncio.create_task(box.call("search", {"query": "engine"})) for _ in range(50)]
            for _ in range(3):
                await asyncio.sleep(0)
            assert threading.active_count() <= before + 2
            return await asyncio.gather(*waiting)
        finally:
            await tool.close()

    answers = asyncio.run(body())
    assert {answer.status for answer in answers} == {"success"}
    assert len({answer.content for answer in answers}) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, r"config\.tools\.arguments\.search\.path: name a \.jsonl, \.parquet or \.csv file"),
        ({"path": "a", "source": "b:c"}, r"search\.path: name a .* and not both"),
        ({"path": "a", "text_column": ""}, r"search\.text_column: is empty"),
        ({"path": "a", "results": 0}, r"search\.results: must be 1 or more, not 0"),
        ({"path": "a", "effort": -1}, r"search\.effort: must be 0 or more, not -1"),
        ({"path": "a", "snippet_words": 65}, r"search\.snippet_words: must lie in 1\.\.64, not 65"),
        ({"path": "a", "seconds": 0}, r"search\.seconds: must be positive and finite, not 0"),
        ({"path": "a", "template": "{txt}"}, r"search\.template: '\{txt\}' may have \{place\}, .*KeyError: 'txt'"),
        ({"path": "a", "source_arguments": {"n": 1}}, r"search\.source_arguments: are for source; it is empty"),
        ({"source": "json:dumbs"}, r"search\.source: json has no 'dumbs'; did you mean 'dumps'"),
        ({"source": "json:dumps", "source_arguments": {"x": 1}}, r"search\.source_arguments: json:dumps cannot be"),
        ({"source": "json:dumps", "index": "i", "source_arguments": {"obj": 1}}, r"search\.index: is kept for a file"),
        ({"path": "a", "vectors": "v.npy"}, r"search\.vectors: need embed, and embed needs them; name both"),
        ({"path": "a", "embed": "json:dumbs"}, r"search\.embed: json has no 'dumbs'"),
        ({"pth": "a"}, r"config\.tools\.arguments\.search: .*'pth'.*did you mean 'path'"),
    ],
)
def test_an_argument_that_cannot_be_is_named(arguments, sentence):
    with pytest.raises(protocols.ConfigError, match=sentence):
        toolkit.Toolkit(
            config_lib.ToolsConfig(use=("search",), arguments={"search": arguments}), config_lib.SandboxConfig()
        )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"id": 1, "text": "t"}, "line 2: no column 'title'; it has 'id', 'text' (name its columns in config.tools"),
        ({"id": 1, "title": "t", "text": None}, "line 2: title and text of a passage must be texts, not 't' and None"),
        ({"id": [1], "title": "t", "text": "t"}, "line 2: the id of a passage must be a text or a number, not [1]"),
        ([1], "line 2: a JSON object is expected, not list"),
    ],
)
def test_a_bad_row_of_the_corpus_is_named(tmp_path, row, problem):
    path = write(tmp_path / "corpus.jsonl", [ROWS[0], row])
    with pytest.raises(protocols.DataError) as caught:
        found("moth", path=path)
    assert str(tmp_path) in str(caught.value)
    assert problem in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_corpus_that_is_missing_is_offered_its_neighbour(tmp_path, corpus):
    with pytest.raises(
        protocols.DataError, match=r"search\.path: .*no such file of passages; did you mean .*corpus\.jsonl\?"
    ):
        found("moth", path=str(tmp_path / "corpse.jsonl"))


def test_a_corpus_without_passages_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(
        protocols.DataError, match=r"config\.tools\.arguments\.search\.path: .*empty\.jsonl holds no pass"
    ):
        found("moth", path=str(tmp_path / "empty.jsonl"))


def test_a_folder_is_no_corpus(tmp_path):
    with pytest.raises(
        protocols.ConfigError, match=r"config\.tools\.arguments\.search\.path: .* is a folder; name a \.jsonl, \.par"
    ):
        found("moth", path=str(tmp_path))


def test_half_a_character_in_a_corpus_is_replaced(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"id": 1, "title": "", "text": "broken \\ud800 half"}\n')
    (answer,) = ask([{"query": "half"}], path=str(tmp_path / "c.jsonl"), template="{snippet}")
    assert answer.content == "broken ? half"


# Vectors ------------------------------------------------------------------------------------------------------------


def letters(width=26):
    """Embeds a text as how often it has each letter."""
    return lambda texts: numpy.array([[text.lower().count(chr(97 + n)) for n in range(width)] for text in texts])


@pytest.fixture
def vectors(tmp_path):
    path = tmp_path / "vectors.npy"
    numpy.save(path, letters()([row["text"] for row in ROWS]).astype(numpy.float32))
    return {"vectors": str(path), "embed": f"{letters.__module__}:letters"}


def broken():
    raise RuntimeError("no such model")


def test_an_embedding_that_breaks_at_once_is_named(corpus, vectors):
    with pytest.raises(protocols.ConfigError, match=r"search\.embed_arguments: .*:broken raised RuntimeError: no such"):
        found("moth", path=corpus, **{**vectors, "embed": f"{letters.__module__}:broken"})


def test_vectors_rank_by_their_inner_product(corpus, vectors):
    matrix = letters()([row["text"] for row in ROWS])
    for query in ("a brass engine", "xyz", "moth moth moth"):
        order = numpy.argsort(-(matrix @ letters()([query])[0]), kind="stable")
        assert found(query, path=corpus, results=4, **vectors) == [ROWS[row]["id"] for row in order]
    calls = [{"query": "engine", "page": page} for page in (1, 2, 3)]
    pages = ask(calls, path=corpus, results=3, template="{id}: {snippet}", snippet_words=2, **vectors)
    assert [len(page.content.split("\n")) for page in pages] == [4, 1, 1]
    assert pages[2].content == "no results on page 3"
    assert "a1: Ada wrote..." in pages[0].content.split("\n")


def test_many_blocks_of_vectors_rank_as_one(tmp_path, monkeypatch):
    rng = numpy.random.default_rng(0)
    matrix = rng.integers(-3, 4, (1000, 8)).astype(numpy.float16)
    numpy.save(tmp_path / "v.npy", matrix)
    query = rng.integers(-3, 4, 8)
    monkeypatch.setattr(search, "_BLOCK_BYTES", 7 * 32)
    made = search.Vectors(tmp_path / "v.npy", lambda texts: [query], 1000)
    order = numpy.argsort(-(matrix.astype(int) @ query), kind="stable")
    for most in (1, 10, 999, 2000):
        found_scores = matrix.astype(int)[made.best("q", most, time.monotonic() + 60)] @ query
        assert list(found_scores) == list(matrix.astype(int)[order[:most]] @ query)
    with pytest.raises(bm25.SearchOverdue):
        made.best("q", 1, 0.0)


@pytest.mark.parametrize(
    ("shape", "kind", "width", "problem"),
    [
        ((3, 26), "float32", 26, r"shape \(3, 26\) and type float32; one vector for each of the 4 passages"),
        ((4,), "float32", 26, r"shape \(4,\)"),
        ((4, 26), "int64", 26, r"type int64; .* as float32 or float16"),
        ((4, 26), "float32", 25, r"its vectors have 26 numbers, but .* shape \(1, 25\) was made"),
    ],
)
def test_vectors_that_do_not_fit_the_corpus_are_refused(tmp_path, corpus, vectors, shape, kind, width, problem):
    numpy.save(tmp_path / "vectors.npy", numpy.zeros(shape, kind))
    with pytest.raises(protocols.DataError, match=rf"vectors\.npy: .*{problem}"):
        found("moth", path=corpus, embed_arguments={"width": width}, **vectors)
    (tmp_path / "vectors.npy").write_text("none")
    with pytest.raises(protocols.DataError, match=r"vectors\.npy: no vectors can be read"):
        found("moth", path=corpus, **vectors)
