"""Calls and plain data between two processes over a pair of pipes: a program under test, and its tests.

Either side calls functions of the other and waits. Values of builtin types, and of some standard library types, are copied with exactly
these types. Any other object stays in its process, and the other side gets a number for it. A message is a length and a JSON text. Mutable
containers are in a separate list, and values refer to them by position, so that containers may share parts and contain themselves. Changes
that a function makes to its arguments return with its result."""

from __future__ import annotations

import _thread
import contextlib
import importlib
import json
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

MESSAGE_BYTES = 1 << 24
DEPTH = 100  # maximum nesting of tuples
ATOMS = frozenset({type(None), bool, int, float, str})


def _flat(value: dict[Any, Any]) -> list[Any]:
    return list(chain.from_iterable(value.items()))


def _refill(value: Any, parts: Iterable[Any]) -> None:
    value.clear()
    value.extend(parts) if isinstance(value, list | deque | bytearray) else value.update(parts)


def _refill_pairs(value: dict[Any, Any], parts: list[Any]) -> None:
    value.clear()
    dict.update(value, zip(parts[::2], parts[1::2], strict=True))


def _refill_default(value: defaultdict[Any, Any], parts: list[Any]) -> None:
    value.default_factory = parts[0]
    _refill_pairs(value, parts[1:])


CONTAINERS: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], list[Any]], Callable[[Any, list[Any]], None]]] = {
    "builtins.list": (lambda parts: [], list, _refill),
    "builtins.set": (lambda parts: set(), list, _refill),
    "builtins.dict": (lambda parts: {}, _flat, _refill_pairs),
    "builtins.bytearray": (lambda parts: bytearray(), list, _refill),
    "collections.deque": (lambda parts: deque(maxlen=parts[0]), lambda v: [v.maxlen, *v], lambda v, parts: _refill(v, parts[1:])),
    "collections.Counter": (lambda parts: Counter(), _flat, _refill_pairs),
    "collections.OrderedDict": (lambda parts: OrderedDict(), _flat, _refill_pairs),
    "collections.defaultdict": (lambda parts: defaultdict(), lambda v: [v.default_factory, *_flat(v)], _refill_default),
}
"""Mutable containers by class name: functions that make an empty container, return its parts, and replace its parts."""

_DAY = ("year", "month", "day")
_TIME = ("hour", "minute", "second", "microsecond", "tzinfo")


def _fields(*names: str) -> Callable[[Any], list[Any]]:
    return lambda value: [getattr(value, name) for name in names]


VALUES: dict[str, tuple[Callable[[Any], list[Any]], Callable[..., Any] | None]] = {
    "builtins.tuple": (list, lambda *parts: parts),
    "builtins.frozenset": (list, lambda *parts: frozenset(parts)),
    "builtins.bytes": (lambda v: [v.decode("latin-1")], lambda text: str.encode(text, "latin-1")),
    "builtins.complex": (_fields("real", "imag"), complex),
    "builtins.range": (_fields("start", "stop", "step"), range),
    "builtins.slice": (_fields("start", "stop", "step"), slice),
    "builtins.dict_keys": (list, lambda *parts: dict.fromkeys(parts).keys()),
    "builtins.dict_values": (list, lambda *parts: dict(enumerate(parts)).values()),
    "builtins.dict_items": (list, lambda *parts: dict(parts).items()),
    "decimal.Decimal": (lambda v: [str(v)], None),
    "fractions.Fraction": (_fields("numerator", "denominator"), None),
    "datetime.date": (_fields(*_DAY), None),
    "datetime.time": (_fields(*_TIME), None),
    "datetime.datetime": (_fields(*_DAY, *_TIME), None),
    "datetime.timedelta": (_fields("days", "seconds", "microseconds"), None),
    "datetime.timezone": (lambda v: [v.utcoffset(None)], None),
}
"""Immutable values by class name: a function that returns a value's parts, and one that makes a value from parts (None: the class)."""


class Ended(BaseException):
    """An error: the other process has ended or sent an invalid message."""


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def standard(name: str) -> Any:
    """Return the object with this full name in the standard library."""
    module, _, path = name.partition(".")
    library = importlib.import_module(module)
    for part in path.split("."):
        library = getattr(library, part)
    return library


def standard_name(value: Any) -> str | None:
    """Return the full name of a function or class in a top-level module of the standard library; None for any other value."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(path, str) and module.split(".")[0] in sys.stdlib_module_names):
        return None
    name = f"{module.lstrip('_')}.{path}"
    with contextlib.suppress(AttributeError, ImportError):
        return name if "." not in module and module != "__main__" and standard(name) is value else None
    return None


class Theirs(NamedTuple):
    """A reference to a function of the other end, by its number in that end's `exported`."""

    number: int


class Packing:
    """An encoder of one message's values as JSON. `objects`: the message's mutable containers; `table` returns their contents."""

    def __init__(self, peer: Peer, objects: Iterable[Any] = ()) -> None:
        self.peer = peer
        self.objects = list(objects)
        self.places = {id(value): place for place, value in enumerate(self.objects)}

    def encode(self, value: Any, depth: int = 0) -> Any:
        if type(value) in ATOMS:
            return value
        name = class_name(type(value))
        if name in CONTAINERS:
            if id(value) not in self.places:
                self.places[id(value)] = len(self.objects)
                self.objects.append(value)
            return ["r", self.places[id(value)]]
        if name not in VALUES:
            return self.peer.refer(value, self)
        if depth == DEPTH:
            raise ValueError(f"tuples more than {DEPTH} deep cannot pass between a program and its tests")
        return [name, *[v if type(v) in ATOMS else self.encode(v, depth + 1) for v in VALUES[name][0](value)]]

    def contents(self, value: Any) -> list[Any]:
        """Return the name of a container's class and its parts as JSON."""
        name = class_name(type(value))
        return [name, *[v if type(v) in ATOMS else self.encode(v) for v in CONTAINERS[name][1](value)]]

    def table(self, begin: int) -> list[list[Any]]:
        """Return the contents of `objects[begin:]`, including containers that are found in these contents."""
        rows: list[list[Any]] = []
        while begin + len(rows) < len(self.objects):
            rows.append(self.contents(self.objects[begin + len(rows)]))
        return rows


class Peer:
    """One end of the connection between program and tests. `exported`: the objects that the other end may use, by number."""

    def __init__(self, read: int, write: int) -> None:
        self.reader, self.writer = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self.exported: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.count = 0
        self.over = ""
        self.lock = _thread.RLock()
        sys.set_int_max_str_digits(0)

    def refer(self, value: Any, packing: Packing) -> list[Any]:
        """Return a JSON reference to a value that cannot be sent by its content, such as a function or a class."""
        raise NotImplementedError

    def resolve(self, reference: list[Any], objects: list[Any]) -> Any:
        """Return the object that the other end's reference stands for."""
        raise NotImplementedError

    def invoke(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function for the other end."""
        raise NotImplementedError

    def describe(self, error: BaseException, packing: Packing) -> list[Any]:
        """Return an error that a call raised, as JSON: its class, arguments, text, location, and a reference to the error or None."""
        raise NotImplementedError

    def rebuild(self, described: list[Any], objects: list[Any], function: Any) -> BaseException:
        """Return the error that a call of `function` raised at the other end."""
        raise NotImplementedError

    def export(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.exported)
            self.exported.append(value)
        return self.numbers[id(value)]

    def call(self, function: Any, args: Iterable[Any], kwargs: dict[str, Any] | None = None) -> Any:
        """Call a function at the other end, serving its calls meanwhile. Return its result or raise its error (Ended: no valid answer)."""
        with self.lock:
            if self.over:
                raise Ended(self.over)
            packing = Packing(self)
            callee = ["o", function.number] if isinstance(function, Theirs) else packing.encode(function)
            request = [callee, [packing.encode(v) for v in args], {k: packing.encode(v) for k, v in (kwargs or {}).items()}]
            self.count += 1
            number = self.count
            self.send(["call", number, packing.table(0), *request])
            while (message := self.receive())[0] == "call":
                self.serve(message)
            try:
                kind, answered, table, value, changes = message
                if answered != number or kind not in ("result", "error"):
                    raise ValueError(f"{kind} {answered} after call {number}")
                objects, size = packing.objects, len(packing.objects)
                self.unpack(table, objects)
                for place, (name, *parts) in changes:
                    if not 0 <= place < size or class_name(type(objects[place])) != name:
                        raise ValueError("a change to something that is not an argument")
                    CONTAINERS[name][2](objects[place], [self.decode(part, objects) for part in parts])
                result = self.rebuild(value, objects, function) if kind == "error" else self.decode(value, objects)
            except Exception as error:  # noqa: BLE001  whatever is wrong with a message, no test must go on with it
                raise self.end(f"the program sent an invalid result: {type(error).__name__}: {error}") from None
        if kind == "error":
            raise result
        return result

    def serve(self, message: list[Any]) -> None:
        objects: list[Any] = []
        try:
            _, number, table, function, args, kwargs = message
            self.unpack(table, objects)
            callee, arguments = self.decode(function, objects), [self.decode(v, objects) for v in args]
            keywords = {name: self.decode(v, objects) for name, v in kwargs.items()}
        except Exception as fault:  # noqa: BLE001  as in `call`
            raise self.end(f"the program sent an invalid call: {type(fault).__name__}: {fault}") from None
        size = len(objects)
        error: BaseException | None = None
        try:
            result = self.invoke(callee, arguments, keywords)
        except Ended:
            raise
        except BaseException as raised:  # noqa: BLE001  a program may raise anything, even SystemExit and KeyboardInterrupt
            error = raised
        try:
            self.send(self._reply(number, objects[:size], table, result if error is None else None, error))
        except Ended:
            raise
        except BaseException as unfit:  # noqa: BLE001  a result that cannot be sent is the call's error
            self.send(self._reply(number, [], [], None, unfit))

    def _reply(self, number: int, objects: list[Any], before: list[Any], result: Any, error: BaseException | None) -> list[Any]:
        packing = Packing(self, objects)
        value = packing.encode(result) if error is None else self.describe(error, packing)
        after = [packing.contents(one) for one in objects]
        changes = [[place, now] for place, now in enumerate(after) if json.dumps(now) != json.dumps(before[place])]
        return ["result" if error is None else "error", number, packing.table(len(objects)), value, changes]

    def unpack(self, table: list[list[Any]], objects: list[Any]) -> None:
        """Append a message's containers, decoded from `table`, to `objects`."""
        begin = len(objects)
        objects.extend(CONTAINERS[name][0](parts) for name, *parts in table)
        for value, (name, *parts) in zip(objects[begin:], table, strict=True):
            CONTAINERS[name][2](value, [self.decode(part, objects) for part in parts])

    def decode(self, value: Any, objects: list[Any]) -> Any:
        """Return the value that a JSON value encodes. `objects`: the message's containers."""
        if type(value) in ATOMS:
            return value
        name, *parts = value
        if name == "r":
            return objects[parts[0]]
        if name not in VALUES:
            return self.resolve(value, objects)
        return (VALUES[name][1] or standard(name))(*[self.decode(part, objects) for part in parts])

    def end(self, why: str) -> Ended:
        """Return the Ended error that this and every later call raises; its reason is the first one given."""
        self.over = self.over or why
        return Ended(self.over)

    def send(self, message: list[Any]) -> None:
        """Write a message; raise ValueError if it exceeds `MESSAGE_BYTES`, Ended if the other end is closed."""
        text = json.dumps(message).encode()
        if len(text) > MESSAGE_BYTES:
            raise ValueError(f"values of more than {MESSAGE_BYTES >> 20} MiB cannot pass between a program and its tests")
        try:
            self.writer.write(len(text).to_bytes(4, "little") + text)
            self.writer.flush()
        except OSError:
            raise self.end("the program left early") from None

    def receive(self) -> list[Any]:
        size = int.from_bytes(head := self.reader.read(4), "little")
        if len(head) < 4 or size > MESSAGE_BYTES or len(text := self.reader.read(size)) < size:
            raise self.end("the program left early" if len(head) < 4 else "the program sent a message that is truncated or too long")
        try:
            message = json.loads(text)
            if message[0] not in ("call", "result", "error"):
                raise ValueError("no message")
        except Exception as error:  # noqa: BLE001  RecursionError, ValueError, TypeError
            raise self.end(f"the program sent an invalid message: {type(error).__name__}") from None
        parts: list[Any] = message
        return parts


BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__, float: float.__float__, dict: dict.copy, set: lambda v: set(set.__iter__(v)),
    frozenset: lambda v: frozenset(frozenset.__iter__(v)),
    str: lambda v: str.__getitem__(v, slice(None)), bytes: lambda v: bytes.__getitem__(v, slice(None)),
    tuple: lambda v: tuple.__getitem__(v, slice(None)), list: lambda v: list.__getitem__(v, slice(None)),
}  # fmt: skip
"""Class → function that copies an instance of a subclass into an instance of the class itself."""
PLAIN_CLASSES = {class_name(kind): kind for kind in (*BASES, bool, complex, bytearray, range, object, type)}


def place(error: BaseException) -> str:
    """Return the innermost file and line of the program or its tests in an error's traceback; empty if there is none."""
    position, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.endswith(".py") and "/" not in name:
            position = f" ({name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return position
