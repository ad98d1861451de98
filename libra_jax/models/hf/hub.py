"""Finds models and datasets that a config names by Hugging Face id: in the local cache, else on the hub.

An id is `namespace/name`, with an optional folder (datasets only) and an optional revision: `Qwen/Qwen3-0.6B`,
`openai/gsm8k/main`, `Qwen/Qwen3-0.6B@main`. A name that exists on this machine is a path. A whole snapshot in the cache
(HF_HOME) is used without asking the hub, so that a resumed run reads the same files. HF_HUB_OFFLINE is respected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from libra_jax import config as config_lib
from libra_jax import protocols
from libra_jax.utils import machine

Kind = Literal["model", "dataset"]

ASK_SECONDS = 10.0
"""Seconds before a question to the hub fails, name resolution included."""

WATCH_SECONDS = 60.0
"""Seconds between progress messages of a download. A download has no deadline: models are large, networks differ."""

_ID = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?P<folder>(?:/[\w.-]+)*)(?:@(?P<revision>[\w./-]+))?"
)
_FILES = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt", ".safetensors", ".xlsx")
"""File endings. A text with one of these endings is a path."""

_SMALL = ["*.json", "*.txt", "*.jinja", "*.model", "tokenizer*", "vocab*"]
_PATTERNS: dict[Kind, list[str]] = {"model": [*_SMALL, "*.safetensors"], "dataset": ["*.parquet", "*.jsonl"]}


@dataclass(frozen=True)
class LocalConfig:
    """A config whose ids are replaced by folders on this machine.

    Attributes:
      config: the config. An id without a folder on this machine stays unchanged.
      notes: sentences that name the folder or download of each id.
      problems: sentences about ids that are neither in the cache nor on the hub.
      fields: names of the fields that hold an id, found or not.
    """

    config: config_lib.RunConfig
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset()


def resolved(config: config_lib.RunConfig, *, download: bool) -> LocalConfig:
    """Replaces the ids of `model.path`, `task.tokenizer` and `task.path` by folders of the Hugging Face cache.

    Args:
      download: fetch the files that the cache lacks. If False, fetch only a model's small files, which hold its shape.
    """
    notes: list[str] = []
    problems: list[str] = []
    ids = set()
    fields: tuple[tuple[str, str, Kind], ...] = (
        ("model", "path", "model"),
        ("task", "tokenizer", "model"),
        ("task", "path", "dataset"),
    )
    for group, field, kind in fields:
        text = getattr(getattr(config, group), field)
        matched = parse(text, kind)
        if matched is None:
            continue
        ids.add(f"{group}.{field}")
        weights = field != "tokenizer"
        try:
            folder, note = _locate(matched, kind, weights=weights, download=download)
            if folder is not None and kind == "dataset":
                folder = _tables(folder, text, str(config.task.arguments.get("split", "train")))
        except protocols.DataError as error:
            problems.append(f"config.{group}.{field}: {error}")
            continue
        notes.append(note)
        if folder is not None:
            changed = dataclasses.replace(getattr(config, group), **{field: str(folder)})
            config = dataclasses.replace(config, **{group: changed})
    return LocalConfig(config, tuple(notes), tuple(problems), frozenset(ids))


def with_model(config: config_lib.RunConfig) -> config_lib.RunConfig:
    """Replaces the id of `model.path` by a folder with the model's config.json, perhaps without its weights.

    Raises:
      DataError: the id is neither in the cache nor on the hub.
    """
    matched = parse(config.model.path, "model")
    if matched is None:
        return config
    try:
        folder, _ = _locate(matched, "model", weights=False, download=False)
    except protocols.DataError as error:
        raise protocols.DataError(f"config.model.path: {error}") from error
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))


def parse(text: str, kind: Kind) -> re.Match[str] | None:
    """Returns the parts of a text that can only be an id, or None.

    A text is a path if it exists on this machine, or if its first folder does.
    """
    matched = _ID.fullmatch(text)
    if matched is None or text.endswith(_FILES) or Path(text).exists() or (matched["folder"] and kind == "model"):
        return None
    return None if Path(text).parts and Path(Path(text).parts[0]).is_dir() else matched


def _locate(matched: re.Match[str], kind: Kind, *, weights: bool, download: bool) -> tuple[Path | None, str]:
    """Returns the folder of an id, or None if it is not fetched, and a sentence about it."""
    import huggingface_hub  # imported here, because most configs name paths, and the import is slow

    name, revision, inside = matched["name"], matched["revision"], matched["folder"].strip("/")
    patterns = _PATTERNS[kind] if weights else _SMALL
    if inside:
        patterns = [f"{inside}/{pattern}" for pattern in patterns]
    get = _Snapshot(name, kind, {"repo_type": kind, "revision": revision})
    cached = get.cached(patterns)
    if cached is not None and (not weights or _is_whole(cached / inside, kind)):
        return cached / inside, f"{kind} {name}: snapshot {cached.name[:8]} of the Hugging Face cache"
    here = f"{matched[0]} is no {'folder' if kind == 'model' else 'file or folder'} here"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise protocols.DataError(
            f"{here}; as a Hugging Face id it needs the network, because the cache does not hold all of it and "
            "HF_HUB_OFFLINE is set"
        )
    info = _ask(
        lambda: huggingface_hub.HfApi().repo_info(name, **get.where, timeout=ASK_SECONDS, files_metadata=True), here
    )
    names = [file.rfilename for file in info.siblings]
    file_names = list(huggingface_hub.utils.filter_repo_objects(names, allow_patterns=patterns))
    size = machine.bytes_text(sum(file.size or 0 for file in info.siblings if file.rfilename in file_names))
    if not file_names:
        raise protocols.DataError(f"{matched[0]}: the {kind} on the hub holds no {', '.join(patterns)}")
    summary = f"{kind} {name}: {len(file_names)} file{'s' * (len(file_names) > 1)}, {size} from the Hugging Face hub"
    if download:
        print(f"Fetching {summary} ...")
        return get.fetched(patterns) / inside, summary
    if kind == "model":
        return get.fetched(_SMALL), f"{summary}, which a run will fetch; only its config and tokenizer were fetched now"
    return None, f"{summary}, which a run will fetch"


@dataclass(frozen=True)
class _Snapshot:
    """One revision of a repository.

    Attributes:
      name: namespace and name.
      where: arguments by which huggingface_hub finds the revision.
    """

    name: str
    kind: Kind
    where: Mapping[str, str | None]

    def cached(self, patterns: Sequence[str]) -> Path | None:
        """Returns the folder in the cache, complete or not; None if the cache has no such folder."""
        import huggingface_hub
        from huggingface_hub import errors

        try:
            arguments = {**self.where, "allow_patterns": list(patterns), "local_files_only": True}
            return Path(huggingface_hub.snapshot_download(self.name, **arguments))
        except (errors.LocalEntryNotFoundError, errors.HFValidationError, OSError):
            return None

    def fetched(self, patterns: Sequence[str]) -> Path:
        """Downloads the missing files and returns the folder in the cache."""
        import huggingface_hub

        try:
            with _watched(f"{self.kind} {self.name}"):
                return Path(huggingface_hub.snapshot_download(self.name, **self.where, allow_patterns=list(patterns)))
        except Exception as error:  # errors of the network, the disk and the hub have many library types
            raise protocols.DataError(
                f"{self.name} could not be fetched from the Hugging Face hub ({_short(error)}); the same command goes "
                "on with the files that are left"
            ) from error


@contextlib.contextmanager
def _watched(what: str) -> Iterator[None]:
    """Reports every WATCH_SECONDS that a download is still running."""
    done, start = threading.Event(), time.monotonic()

    def watch() -> None:
        while not done.wait(WATCH_SECONDS):
            print(
                f"Still fetching {what} from the Hugging Face hub after {time.monotonic() - start:.0f} s; where that "
                "is too long, Ctrl-C ends it, and the same command goes on with the files that are left.",
                file=sys.stderr,
                flush=True,
            )

    thread = threading.Thread(target=watch, name="libra-hub-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _ask(question: Callable[[], Any], here: str) -> Any:
    """Returns the hub's answer. Runs on a thread, because name resolution can exceed the request's own timeout."""
    from huggingface_hub import errors

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=ask, name="libra-hub", daemon=True)
    thread.start()
    # Not joined to its end: a thread that name resolution holds is left behind, and dies with the process.
    thread.join(ASK_SECONDS)
    answer = answers[0] if answers else TimeoutError(f"no answer within {ASK_SECONDS:g} s")
    if isinstance(answer, errors.RevisionNotFoundError):
        raise protocols.DataError(f"{here}, and the Hugging Face hub has no such revision of it") from answer
    if isinstance(answer, errors.RepositoryNotFoundError | errors.GatedRepoError | errors.HFValidationError):
        raise protocols.DataError(
            f"{here}, and the Hugging Face hub shows nothing of that name; what is private or gated needs HF_TOKEN"
        ) from answer
    if isinstance(answer, Exception):
        raise protocols.DataError(
            f"{here}, and the Hugging Face hub cannot be asked ({_short(answer)}); without a network, fetch it "
            "elsewhere and give its folder, or bring the cache along (HF_HOME)"
        ) from answer
    return answer


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def _is_whole(folder: Path, kind: Kind) -> bool:
    """Returns True if a snapshot holds all files that its index or names promise; a cache may hold only a part."""
    if kind == "model":
        index = folder / "model.safetensors.index.json"
        if not (folder / "config.json").is_file():
            return False
        if not index.is_file():
            return any(folder.glob("*.safetensors"))
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            return False
        return all((folder / shard).is_file() for shard in shards)
    counts: dict[tuple[str, int], int] = {}
    files = [*folder.rglob("*.parquet"), *folder.rglob("*.jsonl")]
    for file in files:
        # Split tables are named like train-00000-of-00003, so a part that is missing shows in the names.
        numbered = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})", file.stem)
        if numbered:
            key = f"{file.parent}/{numbered[1]}", int(numbered[2])
            counts[key] = counts.get(key, 0) + 1
    return bool(files) and all(count == of for (_, of), count in counts.items())


def _tables(folder: Path, text: str, split: str) -> Path:
    """Returns the folder or file in a dataset's snapshot that a task source reads."""
    if any(folder.glob("*.parquet")) or any((folder / "data").glob("*.parquet")):
        return folder
    lines = sorted([*folder.glob("*.jsonl"), *(folder / "data").glob("*.jsonl")])
    named = [file for file in lines if file.stem == split] or (lines if len(lines) == 1 else [])
    if named:
        return named[0]
    parts = sorted({file.parent for file in folder.rglob("*.parquet")})
    if len(parts) == 1:
        return parts[0]
    names = ", ".join(str(part.relative_to(folder)) for part in parts)
    if names:
        first = parts[0].relative_to(folder)
        raise protocols.DataError(f"{text} has several configurations: {names}; give one, such as {text}/{first}")
    raise protocols.DataError(f"{text}: its snapshot {folder} holds no table of the split {split!r}")
