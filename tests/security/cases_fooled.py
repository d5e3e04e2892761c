"""Answers that try to deceive their tests, and honest ones; a count of tests that pass although the answer is wrong."""

from __future__ import annotations

from puna.stages.verifiers import sandbox

ENDLESS = ("never returns", "huge result", "endless iterator")
TESTS = ("assert f(17) == 4913", "assert f([3, 1, 2]) == [1, 2, 3]")
LIAR = """
class Liar:
    def __init__(self, *a): pass
    def yes(self, *a, **k): return True
    def same(self, *a): return self
    def zero(self, *a): return 0.0
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = startswith = endswith = issubset = yes
    __add__ = __radd__ = __mul__ = __rmul__ = same
    __sub__ = __rsub__ = __abs__ = __float__ = __truediv__ = __xor__ = zero
    def __hash__(self): return 1
    def __iter__(self): return iter(())
    def __repr__(self): return "4913"
def f(*a): return Liar()
"""
SEARCH = """
def f(x):
    import ast, re
    for text in texts():
        for asked, expected in re.findall(r"assert f\\((.+?)\\) == ([^\\\\'\\"\\n]+)", text):
            try:
                if ast.literal_eval(asked) == x: return ast.literal_eval(expected)
            except Exception: pass
"""
PROCESSES = "import glob, os\nOTHERS = [p for p in glob.glob('/proc/[0-9]*') if p != f'/proc/{os.getpid()}']\n"
FORGE = """
import json, os
def message(number, value):
    text = json.dumps(["result", number, [], value, []]).encode()
    return len(text).to_bytes(4, "little") + text
def write(data):
    for handle in range(3, 64):
        try: os.write(handle, data)
        except OSError: pass
"""
WRONG = "def f(*a): return None\n"

HOSTILE: dict[str, tuple[str, tuple[str, ...]]] = {
    "__eq__": (LIAR, TESTS),
    "difference": (LIAR, ("assert abs(f(2) - 2.5) < 1e-6", "assert f(2) - 2.5 == 0", "assert 2.5 - f(2) == 0", "assert f(2) / 2.5 == 0.0")),
    "order": (LIAR, ("assert f(2) > 3", "assert 3 <= f(2) <= 4", "assert f(2) != 2 and f(2) == 3")),
    "membership": (LIAR, ("assert 3 in f(2)", "assert f(2) in (3, 4)", "assert {3} == {f(2)}", "assert [3] == [f(2)]", "assert {f(2): 1} == {3: 1}")),
    "judging methods": (LIAR, ("assert f(2).startswith('ab')", "assert f(2).issubset({1})", "assert f(2).__eq__(3) is True")),
    "context manager": ("class F:\n  def __enter__(s): return s\n  def __exit__(s, *a): return True\n  def __len__(s): raise ValueError\ndef f(x): return F()\n", ("with f(2) as v:\n  assert v == 5", "with f(2) as v:\n  assert len(v) == 5", "with f(2) as v:\n  assert v < 5", "with f(2) as v:\n  if v != 5: raise ValueError")),
    "set that lies": ("class S(set):\n  symmetric_difference = difference = lambda s, *a: set()\n  union = lambda s, *a: {4}\ndef f(x): return S()\n", ("assert not f(2).symmetric_difference({1})", "assert f(2).union({1}) == {4}")),
    "own difference": ("class S:\n  symmetric_difference = lambda s, *a: set()\ndef f(x): return S()\n", ("assert not f(2).symmetric_difference({1})",)),
    "isinstance": (LIAR.replace("def __hash__", "__class__ = int\n    def __hash__"), ("assert isinstance(f(2), int)", "assert type(f(2)) is int")),
    "metaclass": ("class M(type):\n  def __eq__(s, o): return True\n  def __instancecheck__(s, o): return True\n  __hash__ = type.__hash__\nclass A(metaclass=M): pass\ndef f(x): return A\n", (*TESTS, "assert f(2) is int", "assert f(2) == int", "assert isinstance(f(2), int)")),
    "int that lies": ("class I(int):\n  __eq__ = __lt__ = __gt__ = lambda s, o: True\n  __hash__ = int.__hash__\n  __sub__ = lambda s, o: 0\ndef f(x): return I(1)\n", (TESTS[0], "assert f(2) > 3", "assert f(2) - 5 == 0")),
    "str that lies": ("class S(str):\n  __eq__ = __contains__ = startswith = lambda *a: True\n  __hash__ = str.__hash__\ndef f(x): return S('a')\n", ("assert f(2) == 'b'", "assert 'b' in f(2)", "assert f(2).startswith('b')")),
    "list that lies": ("class L(list):\n  __eq__ = __contains__ = lambda *a: True\ndef f(x): return L()\n", (TESTS[1], "assert 3 in f(2)")),
    "dict that lies": ("class D(dict):\n  __eq__ = __contains__ = lambda *a: True\ndef f(x): return D()\n", ("assert f(2) == {1: 2}", "assert 1 in f(2)")),
    "mock.ANY": ("from unittest.mock import ANY\ndef f(x): return ANY\n", TESTS),
    "patched exec": ("import builtins, sys\nbuiltins.exec = builtins.compile = lambda *a, **k: None\n" + WRONG, TESTS),
    "patched builtins": ("import builtins\nfor n in ('abs', 'len', 'sorted', 'all', 'isinstance', 'AssertionError', 'bool'):\n  setattr(builtins, n, lambda *a, **k: True)\n" + WRONG, ("assert abs(f(2)) == 5", "assert all([False])", "assert sorted(f(2)) == [1]")),
    "names of builtins": ("def abs(x): return 0\ndef all(x): return True\ndef isinstance(*a): return True\nsorted = len = lambda x: x\nclass AssertionError(BaseException): pass\n" + WRONG, ("assert all(f(x) == x for x in (1, 2))", "assert isinstance(f(2), int)", TESTS[0])),
    "fake module": ("import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a, **k: True\nsys.modules['math'] = math = m\n" + WRONG.replace("None", "1.0"), ("import math\nassert math.isclose(f(2), 3)", "assert math.isclose(f(2), 4)")),
    "patched json": ("import json\njson.dumps = lambda *a, **k: '[\"result\", 1, [], true, []]'\njson.loads = lambda *a: []\n" + WRONG, TESTS),
    "sys.exit": ("import sys\nsys.exit(0)\n", TESTS), "os._exit": ("import os\nos._exit(0)\n", TESTS),
    "exit in a call": ("import os\ndef f(x): os._exit(0)\n", ("try:\n  f(17)\nexcept BaseException: pass",)),
    "exit swallowed": ("import sys\ndef f(x): sys.exit(0)\n", TESTS),
    "StopIteration": ("def f(x): raise StopIteration\n", ("assert all(map(lambda x: f(x) == x * 2, [1, 2, 3]))", TESTS[0])),
    "SkipTest": ("import unittest\ndef f(x): raise unittest.SkipTest\n", ("import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(2), 5)\nr = unittest.TestResult()\nT('test').run(r)\nassert r.wasSuccessful() and not r.skipped",)),
    "frames": ("import sys\ndef texts():\n  frame = sys._getframe()\n  while frame:\n    yield repr(frame.f_locals)\n    yield repr(frame.f_globals)\n    frame = frame.f_back\n" + SEARCH, TESTS),
    "gc": ("import gc\ndef texts(): return [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple)]\n" + SEARCH, TESTS),
    "own memory": ("import re\ndef texts():\n  with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:\n    for line in maps:\n      a, b = (int(x, 16) for x in line.split()[0].split('-'))\n      try:\n        memory.seek(a)\n        yield memory.read(b - a).decode('latin-1')\n      except (OSError, OverflowError, ValueError): pass\n" + SEARCH, TESTS),
    "others' memory": (PROCESSES + "def texts():\n  for p in OTHERS:\n    for name in ('mem', 'cmdline', 'environ', 'fd/0', 'maps', 'stack'):\n      try: yield open(f'{p}/{name}', 'rb').read(1 << 20).decode('latin-1')\n      except OSError: pass\n" + SEARCH, TESTS),
    "others' pipes": (PROCESSES + "data = b'{\"results\": [null, null]}'\nfor p in OTHERS:\n  for n in range(64):\n    try: os.write(os.open(f'{p}/fd/{n}', os.O_WRONLY), data)\n    except OSError: pass\nos._exit(0)\n", TESTS),
    "tracing": (PROCESSES + "import ctypes\nlibc = ctypes.CDLL(None)\nfor p in OTHERS:\n  if libc.ptrace(16, int(p[6:]), 0, 0) == 0: open('/work/traced', 'w')\nf = lambda x: {17: 4913}.get(x if type(x) is int else 0, [1, 2, 3]) if os.path.exists('/work/traced') else None\n", TESTS),
    "ctypes writes": ("import ctypes\nctypes.memset(id(5) + 16, 0, 1)\nctypes.memmove(id(AssertionError), id(Exception), 64)\n" + WRONG, TESTS),
    "every descriptor": ("import os\nfor n in range(1, 64):\n  try: os.write(n, b'{\"results\": [null, null]}')\n  except OSError: pass\nos._exit(0)\n", TESTS),
    "forged results": (FORGE + "for n in range(20): write(message(n, True))\n" + WRONG, TESTS),
    "forged at the call": (FORGE + "def f(x):\n  for n in range(99): write(message(n, 4913 + n))\n", (TESTS[1], "assert f(18) == 5832")),
    "forged references": (FORGE + "def f(x): write(message(3, ['o', 0])); write(message(3, ['r', -1])); write(message(3, ['n', 'builtins.exec']))\n", TESTS),
    "cut message": (FORGE + "write(b'\\xff\\xff\\xff\\x7f')\n" + WRONG, TESTS),
    "closed pipes": ("import os\nos.closerange(0, 64)\n" + WRONG, TESTS),
    "killing all": ("import os, signal\nsignal.signal(15, signal.SIG_IGN)\nfor s in (2, 15, 9):\n  for p in (os.getppid(), *range(1, 99)):\n    try: p != os.getpid() and os.kill(p, s)\n    except OSError: pass\n" + WRONG, TESTS),
    "stopping all": ("import os, signal\nfor p in range(1, 99):\n  try: p != os.getpid() and os.kill(p, signal.SIGSTOP)\n  except OSError: pass\nos.kill(os.getpid(), 9)\n", TESTS),
    "atexit": ("import atexit, os\natexit.register(lambda: os.write(1, b'{\"results\": [null, null]}'))\n" + WRONG, TESTS),
    "signal handlers": ("import signal\nsignal.signal(signal.SIGALRM, lambda *a: (_ for _ in ()).throw(SystemExit(0)))\nsignal.setitimer(signal.ITIMER_REAL, .01, .01)\nimport time\ndef f(x): time.sleep(.2)\n", TESTS),
    "late threads": (FORGE + "import threading, time\ndef late():\n  for n in range(200):\n    write(message(n % 9, 4913)); time.sleep(.002)\nthreading.Thread(target=late, daemon=True).start()\n" + WRONG, TESTS),
    "forked answerer": ("import os\nos.fork()\n" + FORGE + "write(message(3, 4913))\n" + WRONG, TESTS),
    "never returns": ("def f(x):\n  while True: pass\n", TESTS),
    "huge result": ("def f(x): return [0] * 10**7\n", TESTS),
    "huge text": (FORGE + "def f(x): write(message(3, 'x' * (1 << 24)))\n", TESTS),
    "deep result": ("def f(x):\n  t = ()\n  for _ in range(10**5): t = (t,)\n  return t\n", TESTS),
    "deep message": (FORGE + "def f(x):\n  t = b'[' * 10**5 + b']' * 10**5\n  write(len(t).to_bytes(4, 'little') + t)\n", TESTS),
    "endless iterator": ("import itertools\ndef f(x): return itertools.count()\n", ("assert list(f(2)) == [1]",)),
    "swallowed callback": ("def f(g):\n  try: g(1)\n  except BaseException: pass\n", ("def g(x):\n  assert x == 5\nf(g)",)),
    "globals of a callback": ("def f(g): return g.__globals__['expected']\n", ("expected = 4913\ndef g(): pass\nassert f(g) == expected", "expected = 4913\ng = lambda: 0\nassert f(g) == expected")),
    "changed argument": ("def f(x):\n  x[:] = []\n  return x\n", ("asked, expected = [3, 1, 2], [1, 2, 3]\nassert f(asked) == expected",)),
    "changed later": ("kept = []\ndef f(x):\n  for one in kept: one.clear()\n  kept.append(x)\n  return x\n", (TESTS[1], "a = [2, 1]\nb = f(a)\nf([0])\nassert a == [] or b == [1, 2]")),
    "helper of the task": ("    return 0\ndef poly(xs, x): return 0\n", ("assert abs(poly([6, 1], g([6, 1]))) < 1e-4",)),
    "hint by length": ("    return Liar()\n" + LIAR, ("assert round(g([3, 1]), 2) == -3.0",)),
}  # fmt: skip
"""Name → a wrong answer, and tests of which it must pass none."""
PREFIX = "def poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\n\n\ndef g(xs):\n    \"\"\"Find a zero of poly.\"\"\"\n"


def passed(name: str, how: sandbox.Mode) -> list[int]:
    """Return the indices of the tests that a hostile answer passes."""
    program, tests = HOSTILE[name]
    prefix = PREFIX if program.startswith("    ") else ""
    outcome = sandbox.run(program, tests, sandbox.Limits(seconds=0.5 if name in ENDLESS else 5.0, memory_mb=256), how, prefix)
    return [number for number, fault in enumerate(outcome.results or []) if fault is None]


def tests_fooled(how: sandbox.Mode | None = None) -> int:
    """Return the number of hostile answers that pass a test."""
    mode = how or sandbox.mode()
    return sum(bool(passed(name, mode)) for name in HOSTILE)
