"""Repositories as files by path: read from the host, given to a sandbox, taken back from it, and put together again.

The policy wrote the files that come back from a sandbox. Regular files are taken, within limits. Files that would
decide how hidden tests are found, configured or run are not.
"""

from __future__ import annotations

import collections
import fnmatch
import functools
import io
import os
import pathlib
import posixpath
import tarfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from libra_jax import protocols
from libra_jax.tools.sandbox import limits

TEST_FOLDERS = ("test", "tests", "testing", "r2e_tests")
"""Folders whose files belong to the suite, anywhere in the repository. The policy's files in them are left out."""

OWNED = (
    "test_*.py", "*_test.py", "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini",
    "setup.cfg", "pyproject.toml", "noxfile.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.pyo",
    ".coveragerc", ".env",
)  # fmt: skip
"""Names of files that decide how tests are found and run. They keep the snapshot's content, if it has them."""

_CODE = (".py", ".so")
_LONGEST_PATH = 1000
_LONGEST_HEADER = 2**16
_HEADERS_BYTES = 2**24
_EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Kinds of tar members that describe other members. `tarfile` reads each of them whole, at any size."""

LONG_BYTES = 2**20
"""Size in bytes above which the lines of a file are only counted."""


@dataclass(frozen=True)
class File:
    """A file's content, and whether it is executable."""

    content: bytes
    executable: bool = False


@dataclass(frozen=True)
class RepositorySnapshot:
    """A repository.

    Attributes:
      files: Files by path, with "/" between folders.
      links: Targets of symbolic links by path.
    """

    files: Mapping[str, File]
    links: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> RepositorySnapshot:
        """Returns a snapshot of text files."""
        return cls({path: File(text.encode()) for path, text in texts.items()})

    @classmethod
    def read(cls, path: pathlib.Path, most_bytes: int) -> RepositorySnapshot:
        """Reads a directory or a tar, compressed or not.

        If a single folder of the tar holds everything else, that folder is removed from the paths.

        Raises:
          DataError: The path is neither, or it takes more than `most_bytes`.
        """
        if path.is_dir():
            read, links, remaining_bytes = {}, {}, most_bytes
            for folder, folders, names in os.walk(path):
                # The history may hold the fix.
                folders[:] = [name for name in sorted(folders) if name not in (".git", "__pycache__")]
                for item in (pathlib.Path(folder, name) for name in (*folders, *sorted(names))):
                    short = item.relative_to(path).as_posix()
                    if item.is_symlink():
                        links[short] = os.readlink(item)
                    elif item.is_file():
                        remaining_bytes -= item.stat().st_size
                        if remaining_bytes < 0:
                            raise protocols.DataError(f"{path}: takes more than {most_bytes} bytes")
                        read[short] = File(item.read_bytes(), os.access(item, os.X_OK))
            return cls(read, links)
        if not path.is_file():
            raise protocols.DataError(f"{path}: no such directory or tar")
        try:
            with tarfile.open(path, tarinfo=_bounded_member()) as archive:
                snapshot = _members(archive, most_bytes, f"{path}")
        except (tarfile.TarError, OSError, EOFError, ValueError, RecursionError) as error:
            raise protocols.DataError(f"{path}: no directory, and not readable as a tar ({error})") from error
        roots = {name.split("/", 1)[0] if "/" in name else "" for name in (*snapshot.files, *snapshot.links)}
        if len(roots) != 1 or "" in roots:
            return snapshot
        cut = len(roots.pop()) + 1
        files = {name[cut:]: file for name, file in snapshot.files.items()}
        return cls(files, {name[cut:]: target for name, target in snapshot.links.items()})

    def pack(self) -> bytes:
        """Returns the snapshot as an archive that a sandbox unpacks."""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path, file in self.files.items():
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(file.content), 0o755 if file.executable else 0o644
                archive.addfile(member, io.BytesIO(file.content))
            for path, target in self.links.items():
                member = tarfile.TarInfo(path)
                member.type, member.linkname = tarfile.SYMTYPE, target
                archive.addfile(member)
        return content.getvalue()


def of_task(task: protocols.Task, field: str, most_bytes: int) -> RepositorySnapshot:
    """Returns the files that a field of a task's payload holds.

    Args:
      task: The task.
      field: Name of the field. Its value has texts by path, or is the path of a directory or tar. Empty: no files.
      most_bytes: Most bytes of all files.
    """
    value = task.payload.get(field) if field else {}
    if isinstance(value, str):
        return _read(pathlib.Path(value), most_bytes)
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise protocols.DataError(f"task {task.prompt_id}: its field {field!r} holds neither texts by path nor a path")
    return RepositorySnapshot.of_texts(value)


_read = functools.lru_cache(maxsize=64)(RepositorySnapshot.read)
"""Cached, because the rollouts of a group run in sequence on the same repository."""


def taken_over(saved: limits.SandboxOutcome, most_bytes: int) -> tuple[dict[str, File], str]:
    """Returns the regular files that came from a sandbox, and why there are none: unreadable, or more than may be.

    Raises:
      WorkerLost: The sandbox died.
    """
    if saved.broken:
        raise protocols.WorkerLost(f"the rollout's sandbox died when its files were taken over: {saved.text}")
    if saved.status != "success":
        return {}, saved.text
    if not saved.archive:
        return {}, ""
    try:
        with tarfile.open(fileobj=io.BytesIO(saved.archive), mode="r:", tarinfo=_bounded_member()) as archive:
            return dict(_members(archive, most_bytes, "the workspace").files), ""
    except (tarfile.TarError, protocols.DataError, OSError, EOFError, ValueError, RecursionError) as error:
        return {}, str(error)


def _bounded_member() -> type[tarfile.TarInfo]:
    """Returns a class for the members of one archive that bounds the memory of names and descriptions.

    A compressed megabyte may hold a name of a gigabyte.
    """
    remaining_bytes = _HEADERS_BYTES

    class Member(tarfile.TarInfo):
        def _proc_member(self, archive: tarfile.TarFile) -> Any:
            nonlocal remaining_bytes
            if self.type in _EXTENSIONS:
                remaining_bytes -= max(self.size, tarfile.BLOCKSIZE)
                if self.size > _LONGEST_HEADER or remaining_bytes < 0:
                    raise tarfile.ReadError("names and descriptions of its members take too many bytes")
            if self.type == tarfile.GNUTYPE_SPARSE:
                self._refuse_sparse()
            return super()._proc_member(archive)  # type: ignore[misc]

        def _refuse_sparse(self, *_: object) -> None:
            raise tarfile.ReadError(
                "it has files with holes, whose maps may be of any length; make it without --sparse"
            )

        _proc_gnusparse_10 = _refuse_sparse

    return Member


def _members(archive: tarfile.TarFile, most_bytes: int, where: str) -> RepositorySnapshot:
    files: dict[str, File] = {}
    links, remaining_bytes = {}, most_bytes
    for member in archive:
        path = posixpath.normpath(member.name)
        # Headers count, too: otherwise empty files and links would have no bound.
        remaining_bytes -= tarfile.BLOCKSIZE
        if remaining_bytes < 0:
            break
        vars(archive)["members"].clear()  # otherwise the archive keeps every member in memory
        if member.isreg() and not member.issparse() and is_inside(path):
            remaining_bytes -= member.size
            if remaining_bytes < 0:
                break
            source = archive.extractfile(member)
            assert source is not None
            files[path] = File(source.read(), bool(member.mode & 0o100))
        elif member.issym() and is_inside(path):
            links[path] = member.linkname
    if remaining_bytes < 0:
        raise protocols.DataError(f"{where}: takes more than {most_bytes} bytes")
    return RepositorySnapshot(files, links)


def is_inside(path: str) -> bool:
    """Returns whether a normalised path stays inside the folder that it starts from."""
    steps = path.split("/")
    good = path not in ("", ".") and not path.startswith("/") and ".." not in steps and "\0" not in path
    return good and len(path) <= _LONGEST_PATH


def for_tests(
    snapshot: RepositorySnapshot, workspace: Mapping[str, File], tests: Mapping[str, File]
) -> RepositorySnapshot:
    """Returns the files for the hidden tests: the policy's files without those of the suite, and the suite.

    Args:
      snapshot: The original repository.
      workspace: Files that the policy left, by path.
      tests: Hidden tests by path.
    """
    # The folder src is searched before the root, so a new module there would replace a test, a helper or a package.
    rooted = {_module(path) for path in (*snapshot.files, *tests) if not path.startswith("src/")}
    rooted -= {_module(path.removeprefix("src/")) for path in snapshot.files if path.startswith("src/")}
    files = {
        path: file
        for path, file in workspace.items()
        if not _is_the_suites(path)
        and (path in snapshot.files or not path.startswith("."))  # HOME is the root, so programs read settings there
        and not (path.startswith("src/") and _module(path.removeprefix("src/")) in rooted)
    }
    files |= {path: file for path, file in snapshot.files.items() if _is_the_suites(path)}
    above = {parent for path in tests for parent in _parents(path)}
    # A policy's file must not take the place of a test's folder, nor the other way round.
    files = {path: file for path, file in files.items() if path not in above and not tests.keys() & _parents(path)}
    files |= tests
    folders = {parent for path in files for parent in _parents(path)}
    links = {
        path: target
        for path, target in snapshot.links.items()  # links that the policy made are left out
        if path not in files and path not in folders and not files.keys() & _parents(path)
    }
    return RepositorySnapshot(files, links)


def _is_the_suites(path: str) -> bool:
    """Returns whether a file belongs to the suite and not to the policy."""
    *folders, name = path.split("/")
    described = (".dist-info", ".egg-info")  # these name plugins, in any case
    for folder in folders:
        if folder in (*TEST_FOLDERS, "__pycache__", ".git") or folder.lower().endswith(described):
            return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in OWNED)


def new_modules(
    snapshot: RepositorySnapshot, tests: Mapping[str, File], files: Collection[str]
) -> dict[str, list[str]]:
    """Returns files of modules that neither the repository nor the suite has, by the name that imports them.

    Python searches the root, src, and for each file of the suite the first folder above that is no package (pytest).

    Args:
      snapshot: The original repository.
      tests: Hidden tests by path.
      files: Paths of the files for the tests.
    """
    code = {path for path in (*snapshot.files, *tests) if path.endswith(_CODE)}
    folders = {parent for path in snapshot.files for parent in _parents(path)}

    def is_package(folder: str) -> bool:
        init, above = (f"{place}/__init__.py" for place in (folder, folder.rpartition("/")[0]))
        # A new folder in a package may be a new package.
        return init in files and (init in code or (folder not in folders and above in code))

    modules, searched = set(), {"", "src/"}
    for path in code:
        folder, _, name = path.rpartition("/")
        modules.add(f"{folder}/{_module(name)}".removeprefix("/").removesuffix("/__init__"))
        if path in tests or _is_the_suites(path):
            while is_package(folder):
                folder = folder.rpartition("/")[0]
            searched.add(f"{folder}/".removeprefix("/"))
    added = collections.defaultdict(set)
    for path in {path for path in files if path.endswith(_CODE)} - code:
        for folder in searched:
            name = _module(path.removeprefix(folder))
            if path.startswith(folder) and folder + name not in modules:
                added[name].add(path)
    return {name: sorted(paths) for name, paths in added.items()}


def _module(path: str) -> str:
    """Returns the top-level module or package that a file belongs to."""
    return path.split("/", 1)[0].partition(".")[0]


def _parents(path: str) -> set[str]:
    steps = path.split("/")
    return {"/".join(steps[:count]) for count in range(1, len(steps))}


def changed_lines(before: Mapping[str, File], after: Mapping[str, File]) -> int:
    """Returns the number of added and removed lines over all files. A moved line counts as neither.

    For a file above `LONG_BYTES`, only the numbers of lines are compared, because a list of its lines could take
    gigabytes.
    """
    count = 0
    for path in before.keys() | after.keys():
        old, new = (side[path].content if path in side else b"" for side in (before, after))
        if old != new and max(len(old), len(new)) > LONG_BYTES:
            count += abs(old.count(b"\n") - new.count(b"\n"))
        elif old != new:
            lines = collections.Counter(new.splitlines())
            lines.subtract(collections.Counter(old.splitlines()))
            count += sum(map(abs, lines.values()))
    return count
