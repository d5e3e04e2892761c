"""The process of the program under test, which answers calls from the tests' process."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from puna.stages.verifiers.sandbox_wire import BASES, PLAIN_CLASSES, Ended, Packing, Peer, Theirs, class_name, place, standard


class Program(Peer):
    """The program's end of the connection to its tests, which runs the functions that the tests call."""

    NAMES, START, CAPTURED, CONTENT, COMPLETE = range(5)

    def __init__(self, read: int, write: int) -> None:
        super().__init__(read, write)
        self.names: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
        self.own, self.depth = os.getpid(), 0
        self.theirs: dict[Any, int] = {}
        for value in (self.names, self._start, self._capture, self._content, self._complete):
            self.export(value)

    def run(self) -> None:
        """Answer the tests' calls until the connection ends."""
        with contextlib.suppress(Ended):
            while True:
                self.serve(self.receive())

    def refer(self, value: Any, packing: Packing) -> list[Any]:
        """Return a reference: a builtin class's name, an exception class with its bases, or the number of an object of either end."""
        if isinstance(value, type):
            if PLAIN_CLASSES.get(class_name(value)) is value or (value.__module__ == "builtins" and issubclass(value, BaseException)):
                return ["n", class_name(value)]
            if issubclass(value, BaseException):
                bases = [packing.encode(base) for base in value.__bases__ if issubclass(base, BaseException)]
                return ["e", self.export(value), value.__name__, bases]
        elif type(value).__name__ in ("function", "generator") and value in self.theirs:
            return ["o", self.theirs[value]]
        base = next((class_name(kind) for kind in type(value).__mro__ if kind in BASES), None)
        return ["h", self.export(value), type(value).__name__, base]

    def resolve(self, reference: list[Any], objects: list[Any]) -> Any:
        """Return the referenced object of this process or the standard library, or a proxy for a function or iterator of the tests."""
        kind, what, *more = reference
        if kind != "h":
            return self.exported[what] if kind == "o" else standard(what)

        def function(*args: Any, **kwargs: Any) -> Any:
            if not self.depth:
                raise RuntimeError("the tests accept calls only while they wait for one of their own")
            return self.call(Theirs(what), args, kwargs)

        def iterator() -> Iterator[Any]:
            with contextlib.suppress(StopIteration):
                while True:
                    yield function()

        result = iterator() if more[0] else function
        self.theirs[result] = what
        return result

    def invoke(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function. If the function forks, end the child process as soon as the call returns or raises there."""
        self.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self.depth -= 1
            if os.getpid() != self.own:
                os._exit(0)

    def describe(self, error: BaseException, packing: Packing) -> list[Any]:
        try:
            text = str(error)[:2000]
        except Exception:  # noqa: BLE001  the program's own method
            text = ""
        own = type(error).__module__ != "builtins"
        return [packing.encode(type(error)), packing.encode(error.args), text, place(error), packing.encode(error) if own else None]

    def rebuild(self, described: list[Any], objects: list[Any], function: Any) -> BaseException:
        error: BaseException = self.decode(described[0], objects)(*self.decode(described[1], objects))
        return error

    def _start(self, source: str) -> None:
        exec(compile(source, "answer.py", "exec"), self.names)

    def _capture(self, given: str, function: Any, args: Any, kwargs: Any) -> tuple[Any, str, int]:
        """Call a function with `given` as standard input; return its result, its printed text, and the number of characters read."""
        own = io.StringIO(given)  # the program may close it, or replace it
        before, sys.stdin = sys.stdin, own
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                return function(*args, **kwargs), printed.getvalue(), len(given) if own.closed else own.tell()
        finally:
            sys.stdin = before

    def _content(self, value: Any) -> Any:
        return next(BASES[kind](value) for kind in type(value).__mro__ if kind in BASES)

    def _complete(self, coroutine: Any) -> Any:
        return importlib.import_module("asyncio").run(coroutine)
