"""Ordinary tests work in another process than their program; tests that cannot are refused with a clear error."""

from __future__ import annotations

import pytest

from puna.stages.verifiers import sandbox
from puna.stages.verifiers.sandbox import Limits, Outcome, run

STACK = """
import collections, dataclasses, enum, random, asyncio
class Empty(IndexError):
    def __init__(self, size):
        super().__init__(f"size {size}")
        self.size = size
class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty(0)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, place): return self.items[place]
    def __setitem__(self, place, item): self.items[place] = item
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __hash__(self): return hash(tuple(self.items))
    def __add__(self, other): return Stack(self.items + other.items)
    def __str__(self): return f"Stack of {len(self)}"
    def __repr__(self): return f"Stack({self.items})"
    def __enter__(self): return self
    def __exit__(self, *a): self.items.clear()
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
Point = collections.namedtuple("Point", "x y")
class Colour(enum.IntEnum):
    RED = 1
class Text(str):
    pass
def give(x): return x
def fail(kind, *args): raise kind(*args)
def count(n):
    for i in range(n): yield i
"""
HONEST = {
    "data": ("", [
        "for x in (None, True, 0, -1, 2**70, -(2**5000), 1.5, float('inf'), -0.0, 'é\\ud800', b'\\x00\\xff', 2j, (1, (2,)), [], [[1], 'a'], {1, 2}, frozenset({3}), {1: 'a', (2, 3): [4], None: {}}, range(3), bytearray(b'a')):\n  y = give(x)\n  assert y == x and type(y) is type(x) and repr(y) == repr(x), (x, y)",
        "import math\nassert math.isnan(give(float('nan')))",
        "from collections import *\nfor x in (deque([1, 2], 3), Counter('aab'), OrderedDict(a=1), {}.keys(), {1: 2}.items()):\n  assert give(x) == x and type(give(x)) is type(x)\nd = defaultdict(list)\ngive(d)[1].append(2)\nassert d == {1: [2]}",
        "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime as t\nfor x in (Decimal('0.1'), Fraction(1, 3), t.date(2024, 2, 29), t.datetime(2024, 1, 1, tzinfo=t.timezone.utc), t.timedelta(1)):\n  assert give(x) == x and type(give(x)) is type(x)",
    ]),
    "mutation": ("def grow(x):\n  x[0].append(x)\n  x[1][2.5] = {1}\n  del x[2:]\ndef swap(a, b): a[:], b[:] = b[:], a[:]\ndef whole(x): x[0] = float(x[0])\n", [
        "x = [[], {}, 3]\na, b = x[0], x[1]\ngrow(x)\nassert x[0] is a and a[0] is x and x[1] is b and b == {2.5: {1}} and len(x) == 2",
        "p, q = [1], [2]\nswap(p, q)\nassert (p, q) == ([2], [1])", "x = [1]\nassert give(x) is x and give([x])[0] is x", "x = [1]\nwhole(x)\nassert str(x) == '[1.0]'",
    ]),
    "classes": (STACK, [
        "s = Stack([1])\ns.push(2).push(3)\nassert len(s) == 3 and list(s) == [1, 2, 3] and s[1] == 2 and s.items == [1, 2, 3] and 2 in s and 9 not in s and s[1:] == [2, 3]",
        "assert Stack([1]) == Stack([1]) != Stack([2]) and len({Stack([1]), Stack([1])}) == 1 and Stack([1]) != [1]",
        "assert str(Stack()) == 'Stack of 0' and repr(Stack([1])) == f'{Stack([1])!r}' == 'Stack([1])' and Stack.limit == 3 and Stack.__name__ == 'Stack'",
        "s = Stack([1])\ns[0] = 5\ns.items = [7]\nassert s.pop() == 7 and not s and isinstance(s, Stack) and isinstance(s, (int, Stack)) and not isinstance(3, Stack)",
        "s = Stack([1]) + Stack([2])\nassert s.items == [1, 2]\nwith s as inside:\n  assert inside is s\nassert s.items == []",
        "a = Node(1, Node(2))\na.next.next = a\nassert a.next.next is a and a.next.value == 2 and not hasattr(a, 'other') and getattr(a, 'other', 3) == 3",
        "p = Point(1, y=2)\nassert p == (1, 2) and p.x == 1 and isinstance(p, tuple) and p < (1, 3) and p + (3,) == (1, 2, 3) and [*p] == [1, 2]",
        "assert Colour.RED == 1 and Colour.RED.name == 'RED' and Colour(1) is Colour.RED and Text('ab').startswith('a') and Text('ab') + 'c' == 'abc'",
    ]),
    "exceptions": (STACK, [
        "try:\n  fail(ValueError, 'bad', 3)\n  assert False\nexcept ValueError as e:\n  assert e.args == ('bad', 3)",
        "try:\n  Stack().pop()\n  assert False\nexcept Empty as e:\n  assert e.size == 0 and str(e) == 'size 0' and isinstance(e, IndexError)",
        "import unittest\nwith unittest.TestCase().assertRaisesRegex(IndexError, 'size'): Stack().pop()", "try: fail(OSError, 2, 'x')\nexcept FileNotFoundError as e: assert e.errno == 2",
        "try: fail(AssertionError)\nexcept AssertionError: pass", "try: fail(SystemExit, 3)\nexcept SystemExit as e: assert e.code == 3",
    ]),
    "callbacks": ("def each(f, xs): return [f(x) for x in xs]\ndef sort(xs, key): xs.sort(key=key)\ndef safe(f):\n  try: return f()\n  except KeyError as e: return e.args[0]\ndef wrap(f):\n  def inner(*a): return f(*a) + 1\n  return inner\ndef total(it): return sum(it)\ndef kinds(xs, t): return [x for x in xs if isinstance(x, t)]\n", [
        "assert each(lambda x: x + 1, [1, 2]) == [2, 3] and each(str.upper, ['a']) == ['A'] and each(len, ['ab']) == [2]",
        "xs = ['ccc', 'a']\nsort(xs, key=lambda x: len(x))\nassert xs == ['a', 'ccc']", "def f(): raise KeyError('k')\nassert safe(f) == 'k'", "assert wrap(wrap(lambda x: x))(3) == 5",
        "assert total(x * x for x in range(4)) == 14 and total(iter([1, 2])) == 3", "assert kinds([1, 'a', 2.0], int) == [1] and kinds([1, 'a'], (str, float)) == ['a']",
        "seen = []\neach(seen.append, [1, 2])\nassert seen == [1, 2]", "def g(x): return each(h, [x])\ndef h(x): return x * 2\nassert each(g, [1]) == [[2]]", "f = lambda: 1\nassert give(f) is f and give(int) is int",
    ]),
    "generators": (STACK, [
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6 and [x for x in count(2)] == [0, 1] and 3 in count(5) and tuple(zip(count(2), 'ab')) == ((0, 'a'), (1, 'b'))",
        "g = count(2)\nassert next(g) == 0 and next(g) == 1 and next(g, None) is None\nimport types\nassert isinstance(g, types.GeneratorType) and isinstance(count, types.FunctionType)",
        "g = count(1)\nnext(g)\ntry:\n  next(g)\n  assert False\nexcept StopIteration: pass", "assert give(map(str, [1])).__next__() == '1'",
    ]),
    "names": ("total = 0\ndef add(n):\n  global total\n  total += n\ndef sorted(x): return 'mine'\nimport asyncio, threading\nasync def later(x): return x\n", [
        "add(2)\nassert total == 2\nadd(3)\nassert total == 5", "assert sorted([2, 1]) == [1, 2]", "class Case:\n  start = total\n  def check(self): return add\nassert Case.start == 5 and Case().check() is add",
        "assert asyncio.run(later(3)) == 3", "async def both(): return await later(1), await later(2)\nimport asyncio\nassert asyncio.run(both()) == (1, 2)", "assert __name__ == '__main__' and string.digits[0] == '0'",
        "assert [add(i) for i in range(2)] == [None, None] and {total for _ in [1]} == {6}", "from threading import Thread\nts = [Thread(target=add, args=(1,)) for _ in range(4)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nassert total == 10",
    ]),
    "builtin of its own": ("def sum(a, b): return a * b\n", ["assert sum(2, 5) == 10", "assert sum(3, 3) == 9"]),
    "input and output": ("def main():\n  print('sum', int(input()) + int(input()))\n", [
        "import io, sys, contextlib\nsys.stdin, out = io.StringIO('2\\n3\\n4\\n5\\n'), io.StringIO()\nwith contextlib.redirect_stdout(out):\n  main()\n  main()\nassert out.getvalue() == 'sum 5\\nsum 9\\n'\nsys.stdin = sys.__stdin__",
    ]),
    "closed input": ("import sys\ndef main():\n  print(sys.stdin.read().strip())\n  sys.stdin.close()\n", [
        "import io, sys, contextlib\nsys.stdin, out = io.StringIO('2\\n'), io.StringIO()\nwith contextlib.redirect_stdout(out):\n  main()\nassert out.getvalue() == '2\\n'\nsys.stdin = sys.__stdin__",
    ]),
}  # fmt: skip
REFUSED = {
    "assert Stack([1]) < 3": "lt of the program's Stack and a value of the tests would reveal that value",
    "assert 2.5 - Stack() < 1": "sub of the program's Stack and a value of the tests would reveal that value",
    "Stack().startswith('a')": "startswith of the program's Stack would reveal a value that the tests expect",
    "class Own: pass\ngive(Own())": "the tests pass an object of their own class Own to the program: define that class in `prefix`",
    "class Mine(Stack): pass": "the tests cannot make a subclass of the program's type",
    "give('x' * (1 << 24))": "values of more than 16 MiB cannot pass between a program and its tests",
    "t = ()\nfor _ in range(200): t = (t,)\ngive(t)": "tuples more than 100 deep cannot pass between a program and its tests",
    "fail(StopIteration)": "the program raised StopIteration",
}


@pytest.mark.parametrize("name", HONEST)
def test_ordinary_tests_pass(name: str, mode: sandbox.Mode) -> None:
    """They also pass in the program's own process, except where a name is missing there or has another meaning."""
    program, tests = "def give(x): return x\n" + HONEST[name][0], HONEST[name][1]
    if name != "names":
        names: dict[str, object] = {"__name__": "__main__"}
        for source in (program, *tests):
            exec(source, names)
    outcome = run(program, tests, Limits(), mode)
    assert outcome.results == [None] * len(tests), outcome


def test_what_cannot_cross_is_refused_by_name(mode: sandbox.Mode) -> None:
    outcome = run(STACK, list(REFUSED), Limits(), mode)
    assert outcome.results is not None
    assert [fault.partition(": ")[2].partition(" (")[0] for fault in outcome.results if fault] == list(REFUSED.values())


def test_a_prefix_gives_its_whole_definitions_to_the_tests(mode: sandbox.Mode) -> None:
    """HumanEval's tests use helpers and imports of the prompt; its last definition and its classes belong to the program."""
    prefix = "import math\nfrom typing import List\nSCALE = 2\nclass Node:\n    value = 1\n\ndef twice(x):\n    return SCALE * x * Node.value\n\n@staticmethod\ndef f(x):\n    \"\"\"Double.\"\"\"\n"
    tests = ["assert twice(f(3)) == 12", "assert math.isclose(f(2), twice(2)) and List", "assert Node.value == 1", "assert f.__name__ == 'f'"]
    right = run("    return 2 * x", tests, Limits(), mode, prefix)
    assert right.results == [None] * 4, right
    wrong = run("    return 0\ntwice = lambda x: 12\nmath.isclose = lambda *a: True", tests[:2], Limits(), mode, prefix)
    assert wrong.results is not None and None not in wrong.results, wrong


def test_what_a_program_prints_and_how_it_ends_is_reported(mode: sandbox.Mode) -> None:
    outcome: Outcome = run("print('out')\nimport sys\nsys.stdout.write('rest')", ["pass"], Limits(), mode)
    assert (outcome.results, outcome.output, outcome.ended) == ([None], "out\nrest", "")
    assert run("import os\ndef f(): os._exit(3)", ["f()"], Limits(), mode).ended in ("exit status 3", "the program left early")
    assert run("f = 1 +", ["f"], Limits(), mode).results == ["SyntaxError: invalid syntax (answer.py, line 1)"]
