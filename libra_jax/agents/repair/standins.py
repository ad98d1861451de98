"""What stands, in the tests' process, for the repository's modules and objects, which live in another.

Handed to a sandbox as text, after `server.py`: standard library only. Plain values cross by value and exact type, all
else is a handle whose every use is a request. What comes from the other side is believed to be data, and no more: no
object of the repository's own equals plain data, comes before or after it, or turns into it by arithmetic with it:
what such an object makes with plain data is mixed, and a mixed one has no truth, length, number or order. Attributes,
items, text and calls stay the repository's word, as they are of any object.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import socket
import subprocess
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from libra_jax.agents.repair import server

_MOST_ITEMS = 1_000_000
_ORDERS = ("__lt__", "__le__", "__gt__", "__ge__")
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_UNARY = ("__int__", "__float__", "__abs__", "__neg__")
_TOLD = ("__next__", "__str__", "__repr__", "__enter__", "__exit__", "__getitem__", "__setitem__", "__delitem__")


class Remote:
    """Stands for an object of the repository's process.

    Args:
      link: the way there.
      handle: the object's.
      mixed: it came of an operation with plain data. No property of the object, which may return itself.
    """

    def __init__(self, link: Link, handle: int, mixed: bool = False) -> None:
        object.__setattr__(self, "_libra", (link, handle, mixed))

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._libra[0].ask("call", (self, *arguments), named)

    def __bool__(self) -> bool:
        _check_own(self, "__bool__")
        return _exactly(bool, _ask(self, "__bool__"))

    def __len__(self) -> int:
        _check_own(self, "__len__")
        return _exactly(int, _ask(self, "__len__"))

    def __iter__(self) -> Any:
        found = _ask(self, "__iter__")
        while True:
            try:
                item = _ask(found, "__next__")
            except StopIteration:
                return
            yield item

    def __contains__(self, value: Any) -> bool:
        """Whether it comes by when the object is iterated over, which is not told what is sought.

        An object may give a million guesses, and no more than a plain list of the repository's may.
        """
        for count, item in enumerate(self):
            if item is value or item == value:
                return True
            if count > _MOST_ITEMS:
                break
        return False

    def __hash__(self) -> int:
        return hash(self._libra[1])

    def __eq__(self, other: object) -> bool:
        """By the repository's own word among its own objects; none of them equals plain data."""
        if self is other:
            return True
        return isinstance(other, Remote) and _ask(self, "__eq__", other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _exactly(bool, _ask(value, "isinstance", self))


def _ask(target: Any, verb: str, *arguments: Any) -> Any:
    link: Link = object.__getattribute__(target, "_libra")[0]
    return link.ask(verb, (target, *arguments), {})


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"the repository's object gave {type(value).__name__} where {kind.__name__} is due")
    return value


def _is_mixed(value: Any) -> bool:
    """Whether the value is plain data, or came of an operation with it."""
    return not isinstance(value, Remote) or bool(object.__getattribute__(value, "_libra")[2])


def _no_plain_data(name: str) -> TypeError:
    return TypeError(f"{name}: the repository's own object makes no plain data with plain data here")


def _check_own(value: Remote, name: str) -> None:
    if _is_mixed(value):
        raise _no_plain_data(name)


def _told(name: str) -> Any:
    """What the repository's process says, whatever that is."""

    def method(self: Remote, *arguments: Any) -> Any:
        return _ask(self, name, *arguments)

    return method


def _operator(name: str) -> Any:
    """With plain data it never makes plain data, nor an order: else any object could claim any value."""

    def method(self: Remote, *arguments: Any) -> Any:
        value = _ask(self, name, *arguments)
        if not any(_is_mixed(one) for one in (self, *arguments)) or (value is NotImplemented and arguments):
            return value
        if isinstance(value, Remote):  # perhaps itself: so it is marked here, and not where handles are known
            link, handle, _ = object.__getattribute__(value, "_libra")
            return Remote(link, handle, mixed=True)
        raise _no_plain_data(name)

    return method


for _verb in _TOLD:
    setattr(Remote, _verb, _told(_verb))
for _verb in (*_UNARY, *_ORDERS, *(f"__{side}{one}__" for one in _OPERATORS for side in ("", "r"))):
    setattr(Remote, _verb, _operator(_verb))


class Link:
    """The way to the repository's process, which it starts."""

    def __init__(self, source: str, path: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        command = f"{source}\nmain({theirs.fileno()}, {list(path)!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._channel = ours
        self._known: dict[int, Any] = {}
        self._values = server.Values(self._give, self._take)

    def ask(self, verb: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Has the repository's process do something.

        Raises:
          Whatever is raised there: one of Python's own exceptions as it is, others as a class that stands for theirs.
        """
        request = {
            "verb": verb,
            "arguments": [self._values.write(one) for one in arguments],
            "named": {name: self._values.write(one) for name, one in named.items()},
        }
        server.send(self._channel, request)
        answer = server.receive(self._channel)
        if "raised" in answer:
            raise self._error(answer["raised"])
        for given, changed in zip(arguments[1:], answer.get("changed", ()), strict=False):
            _take_over(given, self._values.read(changed))
        return self._values.read(answer["value"])

    def _give(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"handle": [object.__getattribute__(value, "_libra")[1], None]}
        for handle, known in self._known.items():
            if known is value:
                return {"handle": [handle, None]}
        raise TypeError(f"the tests hand a {type(value).__name__} to the repository, which only plain data reaches")

    def _take(self, written: Any) -> Any:
        if "not" in written:
            return NotImplemented
        handle, lineage = written["handle"]
        if lineage:
            return self._exception(lineage)
        if handle not in self._known:
            self._known[handle] = Remote(self, _exactly(int, handle))
        return self._known[handle]

    def _exception(self, lineage: Sequence[Sequence[Any]]) -> type[BaseException]:
        """The class of an exception: Python's own, or one that stands for the repository's."""
        (name, handle), *bases = lineage
        if not bases or not handle:
            found = getattr(sys.modules["builtins"], name, None)
            good = isinstance(found, type) and (issubclass(found, Exception) or found is SystemExit)
            return found if good else RuntimeError  # type: ignore[return-value]
        if handle not in self._known:
            self._known[handle] = type(str(name), (self._exception(bases),), {})
        found = self._known[handle]
        return found if isinstance(found, type) else RuntimeError

    def _error(self, raised: Mapping[str, Any]) -> BaseException:
        kind = self._exception(raised["lineage"])
        try:
            return kind(*(self._values.read(one) for one in raised["arguments"]))
        except Exception:
            return RuntimeError(f"{kind.__name__}: {raised['text']}")

    def close(self) -> None:
        """Ends the process."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


def _take_over(given: Any, changed: Any) -> None:
    """What the repository's function did to a container that it was given."""
    if type(given) is not type(changed):
        return
    if type(given) in (list, bytearray):
        given[:] = changed
    elif type(given) in (dict, set):
        given.clear()
        given.update(changed)


class RemoteModule(types.ModuleType):
    """Stands for a module of the repository."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        return _ask(self.__dict__["_libra_module"], "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, types.ModuleType) or "_libra_module" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            _ask(self.__dict__["_libra_module"], "setattr", name, value)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the tests' modules in memory, and the repository's in their own process.

    Args:
      tests: the hidden modules' sources, by dotted name.
      roots: the repository's modules and packages at the top; those of Python's own names are not among them.
      link: the way to them.
    """

    def __init__(self, tests: Mapping[str, tuple[str, str]], roots: Iterable[str], link: Link) -> None:
        self._tests, self._link = tests, link
        self._packages = {name.rsplit(".", count)[0] for name in tests for count in range(1, name.count(".") + 1)}
        self._roots = set(roots) - set(sys.stdlib_module_names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """See `importlib`."""
        own = name in self._tests or (name in self._packages and name not in self._roots)
        if own or name.split(".")[0] in self._roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=not own or name in self._packages)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """See `importlib`."""
        own = spec.name in self._tests or (spec.name in self._packages and spec.name not in self._roots)
        if own:
            return None
        module = RemoteModule(spec.name)
        module.__dict__["_libra_module"] = self._link.ask("import", [spec.name], {})
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """See `importlib`."""
        name = module.__name__
        if name in self._tests and not isinstance(module, RemoteModule):
            path, source = self._tests[name]
            module.__file__ = path
            exec(compile(source, path, "exec"), module.__dict__)
