"""The process that runs an answer's tests and sends calls to the program under test.

The program's process gets the arguments of calls, never the tests or their expected values. Results arrive as plain data, or as a `Remote`,
a proxy for an object of the program. An operator between a Remote and a value of the tests would reveal that value to the program, which
could then fake the result. So `==` gives False, `!=` gives True, and other operators raise TypeError, unless the object's class derives
from a builtin one (see `operand`). A context manager of the program cannot suppress a test's error."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import operator
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from puna.stages.verifiers.sandbox_program import Program
from puna.stages.verifiers.sandbox_wire import PLAIN_CLASSES, Packing, Peer, Theirs, place, standard_name

JUDGING = frozenset({"startswith", "endswith", "issubset", "issuperset", "isdisjoint", "symmetric_difference"})
"""Methods of builtin classes that compare an object with a value that the tests expect."""
COMPARING = JUDGING | {"difference", "union", "intersection", "removeprefix", "removesuffix", "replace"}
"""Methods of builtin classes that a Remote runs in the tests' process, on a copy, so that the program does not see the arguments."""
FUNCTIONS = frozenset(name for name, value in vars(builtins).items() if not (isinstance(value, type) and issubclass(value, BaseException)))
REPORT_CHARACTERS = 6000
STOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
LOOKS: dict[str, type] = {"function": types.FunctionType, "generator": types.GeneratorType, "type": type}


class Link(Peer):
    """The tests' end of the connection to the program under test; the tests' process has one."""

    def __init__(self, read: int, write: int) -> None:
        super().__init__(read, write)
        self.remotes: dict[int, Any] = {}
        self.errors: dict[int, type[BaseException]] = {}
        self.failed: AssertionError | None = None

    def refer(self, value: Any, packing: Packing) -> list[Any]:
        """Return a reference by number (a program's object, a function or iterator of the tests) or standard name, or raise TypeError."""
        if type(value) is Remote:
            return ["o", value.puna_number]
        if isinstance(value, type) and issubclass(value, BaseException) and hasattr(value, "puna_number"):
            return ["o", value.puna_number]
        if name := standard_name(value):
            return ["n", name]
        if callable(value) or hasattr(type(value), "__next__"):
            return ["h", self.export(value), hasattr(type(value), "__next__")]
        raise TypeError(f"the tests pass an object of their own class {type(value).__name__} to the program: define that class in `prefix`")

    def resolve(self, reference: list[Any], objects: list[Any]) -> Any:
        """Return the referenced object: a Remote, a coroutine, a builtin or stand-in class, or a function or iterator of the tests."""
        kind, what, *more = reference
        if kind == "h":
            if what not in self.remotes:
                self.remotes[what] = Remote(self, int(what), str(more[0])[:100], PLAIN_CLASSES[more[1]] if more[1] else None)
            return drive(self.remotes[what]) if more[0] == "coroutine" else self.remotes[what]
        if kind == "o":
            return self.exported[what]
        if kind == "e":
            if what not in self.errors:
                self.errors[what] = stand_in(int(what), str(more[0])[:100], [self.decode(base, objects) for base in more[1]])
            return self.errors[what]
        return PLAIN_CLASSES.get(what) or builtin_error(what)

    def invoke(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of the tests, or advance an iterator of theirs. Raise TypeError if the tests never passed it to the program."""
        if id(function) not in self.numbers:
            raise TypeError("the tests never passed that object to the program")
        return next(function) if hasattr(type(function), "__next__") else function(*args, **kwargs)

    def describe(self, error: BaseException, packing: Packing) -> list[Any]:
        """Return an error that a function of the tests raised, as JSON. An AssertionError fails the test even if the program catches it."""
        if isinstance(error, AssertionError):
            self.failed = error
        kinds = (kind for kind in type(error).__mro__ if kind.__module__ == "builtins" or hasattr(kind, "puna_number"))
        return [packing.encode(next(kinds)), packing.encode([str(part) for part in error.args]), "", "", None]

    def rebuild(self, described: list[Any], objects: list[Any], function: Any) -> BaseException:
        """Return the exception that the program raised: a RuntimeError instead of one of `STOPS`, unless `function` is `next`; an Exception
        if its class cannot be built."""
        kind, args, text, where, itself = [self.decode(part, objects) for part in described]
        if not issubclass(kind, BaseException):
            raise TypeError("no error")
        if issubclass(kind, STOPS) and function is not next:
            kind, args = RuntimeError, (f"the program raised {kind.__name__}",)
        try:
            error: BaseException = kind(*args)
        except Exception:  # noqa: BLE001  some exceptions take other arguments
            error = Exception(f"{kind.__name__}: {text}")
        error.__dict__.update(puna_where=str(where)[:100], puna_text=str(text), puna_itself=itself)
        return error


def builtin_error(name: str) -> type[BaseException]:
    kind = getattr(builtins, name.removeprefix("builtins."))
    if not issubclass(kind, BaseException):
        raise TypeError("no exception")
    error_type: type[BaseException] = kind
    return error_type


def stand_in(number: int, name: str, bases: list[type[BaseException]]) -> type[BaseException]:
    """Return a class that stands in for one of the program's exceptions. Instances have the raised error's attributes and text."""

    def text(self: Any) -> str:
        return str(self.__dict__.get("puna_text", Exception.__str__(self)))

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__.get("puna_itself"), name)

    return type(name, tuple(bases), {"puna_number": number, "__str__": text, "__getattr__": attribute})


async def drive(coroutine: Remote) -> Any:
    """Return the result of a program's coroutine, which runs to completion in the program's process."""
    return coroutine.puna_link.call(Theirs(Program.COMPLETE), (coroutine,))


def ask(function: Callable[..., Any], remote: Any, *args: Any) -> Any:
    """Return `function(remote, *args)`, computed in the program's process."""
    return remote.puna_link.call(function, (remote, *args))


def operand(value: Any) -> Any:
    """Return a builtin copy of a Remote whose class derives from a builtin class (a list for a subclass of list); else the value itself."""
    return ask(Theirs(Program.CONTENT), value) if type(value) is Remote and value.puna_base else value  # type: ignore[arg-type]


def apply(function: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Apply an operator: to data in this process, to two Remotes in the program's. A Remote never equals data; for these two, operators
    other than == and != raise TypeError."""
    one, other = operand(one), operand(other)
    there = [type(value) is Remote for value in (one, other)]
    if not any(there):
        return function(one, other)
    if all(there):
        return ask(function, one, other)
    if function in (operator.eq, operator.ne):
        return function is operator.ne
    remote = one if there[0] else other
    raise TypeError(f"{function.__name__} of the program's {remote.puna_name} and a value of the tests would reveal that value")


class Remote:
    """A proxy for an object of the program; its operations run in the program's process and return data or another Remote."""

    __slots__ = ("puna_base", "puna_link", "puna_name", "puna_number")
    puna_link: Link
    puna_number: int
    puna_name: str
    puna_base: type | None

    def __init__(self, link: Link, number: int, name: str, base: type | None) -> None:
        for slot, value in (("puna_link", link), ("puna_number", number), ("puna_name", name), ("puna_base", base)):
            object.__setattr__(self, slot, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the type that `isinstance` sees."""
        return self.puna_base or LOOKS.get(self.puna_name, Remote)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if sys.stdout is sys.__stdout__ and sys.stdin is sys.__stdin__:
            return self.puna_link.call(self, args, kwargs)
        begin = sys.stdin.tell() if sys.stdin is not sys.__stdin__ else 0
        text = sys.stdin.read() if sys.stdin is not sys.__stdin__ else ""
        result, printed, count = self.puna_link.call(Theirs(Program.CAPTURED), (text, self, args, kwargs))
        if sys.stdin is not sys.__stdin__:
            sys.stdin.seek(begin + count)
        sys.stdout.write(printed)
        return result

    def __getattr__(self, name: str) -> Any:
        if name in COMPARING and hasattr(self.puna_base, name):
            return getattr(operand(self), name)
        if name in JUDGING:
            raise TypeError(f"{name} of the program's {self.puna_name} would reveal a value that the tests expect")
        return ask(getattr, self, name)

    def __contains__(self, item: Any) -> bool:
        return any(one is item or one == item for one in self)

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = ask(iter, self)
        return items

    def __instancecheck__(self, other: Any) -> bool:
        return type(other) is Remote and ask(isinstance, other, self) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return type(other) is Remote and ask(issubclass, other, self) is True

    def __enter__(self) -> Any:
        return ask(getattr, self, "__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        ask(getattr, self, "__exit__")(kind, None, None)

    def __mro_entries__(self, bases: Any) -> Any:
        raise TypeError(f"the tests cannot make a subclass of the program's {self.puna_name}")

    def __deepcopy__(self, memo: Any) -> Any:
        return ask(importlib.import_module("copy").deepcopy, self)


def _forward(name: str, function: Callable[..., Any]) -> None:
    def method(self: Remote, *args: Any) -> Any:
        return ask(function, self, *args)

    setattr(Remote, name, method)


def _operator(name: str, function: Callable[[Any, Any], Any]) -> None:
    setattr(Remote, f"__{name}__", lambda self, other: apply(function, self, other))
    if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Remote, f"__r{name}__", lambda self, other: apply(function, other, self))


for _name in (
    "len", "hash", "next", "repr", "str", "int", "float", "complex", "abs", "round", "format", "reversed", "dir", "setattr", "delattr",
):  # fmt: skip
    _forward(f"__{_name}__", getattr(builtins, _name))
for _name in ("index", "neg", "pos", "invert", "getitem", "setitem", "delitem"):
    _forward(f"__{_name}__", getattr(operator, _name))
_forward("__bool__", operator.truth)
for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "xor",
):  # fmt: skip
    _operator(_name, getattr(operator, _name))
_operator("and", operator.and_)
_operator("or", operator.or_)


class Uses:
    """The names in syntax trees by use: read, bound (assigned, defined, imported), called, or followed by a dot."""

    def __init__(self, trees: Iterable[Any]) -> None:
        self.read: set[str] = set()
        self.bound: set[str] = set()
        self.called: set[str] = set()
        self.dotted: set[str] = set()
        todo = list(trees)
        while todo:
            node = todo.pop()
            self._note(node)
            for field in node._fields:
                value = getattr(node, field, None)
                todo += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]

    def _note(self, node: Any) -> None:
        if isinstance(node, ast.Name):
            (self.read if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.bound.add(node.name)
        elif isinstance(node, ast.arg):
            self.bound.add(node.arg)
        elif isinstance(node, ast.alias):
            self.bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            self.called.add(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            self.dotted.add(node.value.id)


def parse(source: str) -> Any:
    """Return the syntax tree of source code, or an empty tree if the code does not parse."""
    try:
        return compile(source, "test.py", "exec", ast.PyCF_ONLY_AST)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def whole_statements(prefix: str) -> Any:
    """Return a prefix's syntax tree without classes, up to its last top-level function or class, which the answer may continue."""
    last = max((match.start() for match in re.finditer(r"^(@.*\n)*(async def|def|class)\b", prefix, re.MULTILINE)), default=len(prefix))
    tree = parse(prefix[:last])
    tree.body = [statement for statement in tree.body if not isinstance(statement, ast.ClassDef)]
    return tree


class Names(dict[str, Any]):
    """A namespace for names that the tests do not define: builtins, then the prefix's, then standard modules, then the program's.

    If the tests call exactly one builtin function and no other name is the program's, that function is the program's (`sum` in MBPP). A
    standard module's name followed by a dot means the module, even if the program uses the name."""

    def __init__(self, link: Link, prefix: str, tests: list[str], names: dict[str, Any]) -> None:
        super().__init__(vars(builtins))
        self.link, self.names, uses = link, names, Uses(map(parse, tests))
        self.given = whole_statements(prefix)
        self.promised = Uses([self.given]).bound
        self.program = Remote(link, Program.NAMES, "dict", None)
        self.modules = uses.dotted & sys.stdlib_module_names
        functions = {name for name in uses.called & set(self) if name in FUNCTIONS}
        self.shadowed: dict[str, Any] = {}
        if len(functions) == 1 and not uses.read - uses.bound - self.promised - set(self):
            self.shadowed = {name: self.pop(name) for name in functions}

    def __missing__(self, name: str) -> Any:
        if name in self.promised:
            self.promised = set()
            exec(compile(self.given, "prefix.py", "exec"), self.names)
            if name in self.names:
                return self.names[name]
        if name in self.modules:
            return importlib.import_module(name)
        try:
            return self.link.call(operator.getitem, (self.program, name))
        except KeyError:
            if name in self.shadowed:
                return self.shadowed[name]
            raise


def attempt(link: Link, work: Callable[[], object]) -> str | None:
    """Call `work`; return None if it succeeds, else the error message."""
    link.failed = None
    try:
        work()
        if link.failed is not None:
            raise link.failed
    except BaseException as error:  # noqa: BLE001  a program may raise anything, even SystemExit and KeyboardInterrupt
        try:
            text = str(error)[:300]
        except BaseException:  # noqa: BLE001
            text = ""
        return f"{type(error).__name__}: {text}{getattr(error, 'puna_where', '') or place(error)}"
    return None


def run_tests(read: int, write: int, verdict: int) -> None:
    """Run the program and each test from standard input; write the results, or the reason for an early end, to `verdict` as JSON."""
    with open(0, "rb") as stdin:
        job = json.load(stdin)
    os.open(os.devnull, os.O_RDONLY)  # takes the descriptor 0, which is free now
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    link, names = Link(read, write), cast(dict[str, Any], {"__name__": "__main__"})
    names["__builtins__"] = Names(link, job["prefix"], job["tests"], names)
    results: list[str | None] = []
    fault = attempt(link, lambda: link.call(Theirs(Program.START), (job["program"],)))
    for number, test in enumerate(job["tests"]):
        failure = fault or attempt(link, lambda: exec(compile(test, f"test_{number}.py", "exec"), names))  # noqa: B023  called at once
        room = sum(map(len, filter(None, results))) < REPORT_CHARACTERS
        results.append(failure if failure is None or room else "failed")
    attempt(link, lambda: print(end="", flush=True))
    attempt(link, lambda: link.call(print, (), {"end": "", "flush": True}))
    outcome = {"ended": link.over} if link.over else {"results": results}
    os.write(verdict, json.dumps(outcome, ensure_ascii=False).encode("utf-8", "replace"))
