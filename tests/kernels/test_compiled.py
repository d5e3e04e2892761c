"""Compiled loops and their caches."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from puna.kernels.cpu import numba_cache

FILES = {
    "outer": '''
from inner import inner
from constants import OFFSET, PAIR
import puna.kernels.cpu.numba_cache as c

@c.njit()
def outer(x):
    """What it says."""
    total = 0
    for k in range(3):
        total += inner(x) + OFFSET + PAIR[1]
    return total
''',
    "inner": """
from puna.kernels.cpu.numba_cache import njit

@njit()
def inner(x):
    return deepest(x) * 2

@njit(inline="always")
def deepest(x):
    return x + 1

@njit()
def other(x):
    return x - 1
""",
    "constants": "import numpy as np\nOFFSET = 10\nPAIR = np.array([0, 5])\nUNUSED = 7\n",
}
ASK = "import outer; print(outer.outer(1), sum(outer.outer.stats.cache_hits.values()))"


FORKS = """
import json, os, sys, traceback
import puna.kernels.cpu.numba_cache

for line in sys.stdin:
    code, folder = json.loads(line)
    if os.fork() == 0:
        status = 1
        try:
            os.chdir(folder)
            os.environ["NUMBA_CACHE_DIR"] = os.path.join(folder, "cache")
            exec(code, {})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print("ended", os.wait()[1], flush=True)
"""


@pytest.fixture(scope="module")
def fresh():
    """Return fresh(code, folder): the words that code prints in a process that has loaded no loop; the cache is in the folder.

    The processes are forks of one that has imported numba, because the import takes a second.
    """
    own = os.environ | {"PYTHONPATH": str(numba_cache.ROOT / ".pkg")}
    # -B: otherwise Python overlooks an edit of the same length within the same second.
    command, pipe = [sys.executable, "-B", "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, env=own, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:

        def run(code: str, folder: Path) -> list[str]:
            process.stdin.write(json.dumps([code, str(folder)]) + "\n")
            said = []
            while not (line := process.stdout.readline()).startswith("ended "):
                assert line, "the process is gone"
                said += line.split()
            assert line == "ended 0\n", code
            return said

        yield run


@pytest.fixture
def ask(fresh, tmp_path, monkeypatch):
    """Return ask(): the result of `outer(1)` in a new process, and whether it came from the cache."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(numba_cache.ROOT / ".pkg"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def run() -> tuple[int, bool]:
        value, hits = fresh(ASK, tmp_path)
        return int(value), hits == "1"

    assert run() == (3 * (4 + 15), False)
    assert run() == (3 * (4 + 15), True)
    return run


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / f"{name}.py").read_text()
    assert old in text
    (folder / f"{name}.py").write_text(text.replace(old, new))


def test_a_loop_follows_a_change_of_whatever_it_reaches(ask, tmp_path):
    change(tmp_path, "inner", "x + 1", "x + 3")  # an indirect callee
    assert ask() == (3 * (8 + 15), False)
    change(tmp_path, "constants", "OFFSET = 10", "OFFSET = 20")
    assert ask() == (3 * (8 + 25), False)
    change(tmp_path, "constants", "[0, 5]", "[0, 6]")
    assert ask() == (3 * (8 + 26), False)
    assert ask() == (3 * (8 + 26), True)


def test_a_loop_is_not_compiled_again_for_a_file_that_its_own_does_not_import(ask, tmp_path):
    (tmp_path / "other.py").write_text("import outer\n")
    assert ask() == (3 * (4 + 15), True)
    change(tmp_path, "inner", "@njit()\ndef inner", "# A comment may be part of what is compiled: the file counts whole\n@njit()\ndef inner")
    assert ask() == (3 * (4 + 15), False)


def test_a_loop_is_not_compiled_again_where_another_library_is_loaded(ask, tmp_path):
    change(tmp_path, "constants", "import numpy as np", "import typing\nimport numpy as np\nif typing.TYPE_CHECKING:\n    import fractions")
    assert ask() == (3 * (4 + 15), False)
    done = subprocess.run([sys.executable, "-c", f"import fractions; {ASK}"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(3 * (4 + 15)), "1"]


def test_a_loop_knows_the_values_of_its_factory(fresh, tmp_path):
    text = "from puna.kernels.cpu.numba_cache import njit\n\ndef adder(n):\n    @njit()\n    def add(x):\n        return x + n\n    return add\n"
    (tmp_path / "factory.py").write_text(text)
    for _ in range(2):
        assert fresh("from factory import adder; print(*(adder(n)(1) for n in (2, 3, 2)))", tmp_path) == ["3", "4", "3"]


def test_a_loop_without_a_file_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(numba_cache.ROOT / ".pkg"))
    code = "from puna.kernels.cpu.numba_cache import njit\ndef add(x):\n    return x + {0}\nprint(njit()(add)(1))"
    for n in (1, 2):
        done = subprocess.run([sys.executable, "-c", code.format(n)], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(1 + n)]


def test_a_loop_that_hashes_texts_is_loaded_in_a_process_that_compiled_none(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(numba_cache.ROOT / ".pkg"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    text = "from puna.kernels.cpu.numba_cache import njit\n\n@njit()\ndef hashed(text):\n    return hash(text)\n"
    (tmp_path / "texts.py").write_text(text)
    ask = "from texts import hashed; print(hashed('llama') == hash('llama'), sum(hashed.stats.cache_hits.values()))"
    for hits in "01":
        done = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["True", hits]


def flipped(whole):
    at = len(whole) * 2 // 3
    return whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]


DAMAGE = {
    "cut off": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "zeros": lambda whole: bytes(len(whole)),
    "no pickle": lambda whole: b"\x8c\x04\xff\xff\xff\xff.",
    "a bit of machine code": flipped,
    "something behind it": lambda whole: whole + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_compiled_loop_that_is_damaged_on_disk_is_compiled_anew(ask, tmp_path, damage):
    files = list((tmp_path / "cache").rglob("*.nbc"))
    assert files
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    assert ask() == (3 * (4 + 15), False)
    assert ask() == (3 * (4 + 15), True)


@pytest.mark.parametrize("strange", [lambda file: file.chmod(0o664), lambda file: file.chmod(0o646), lambda file: os.chown(file, 12345, -1)])
def test_a_compiled_loop_that_others_may_have_written_is_compiled_anew(ask, tmp_path, strange):
    for file in (tmp_path / "cache").rglob("*.nbc"):
        try:
            strange(file)
        except PermissionError:
            pytest.skip("only root gives files away")
    assert ask() == (3 * (4 + 15), False)
    assert ask() == (3 * (4 + 15), True)


def test_options_count(ask, tmp_path):
    change(tmp_path, "inner", '@njit(inline="always")', '@njit(error_model="numpy")')
    assert ask() == (3 * (4 + 15), False)


def test_options_of_the_loop_itself_count(ask, tmp_path):
    change(tmp_path, "outer", "@c.njit()", "@c.njit(boundscheck=True)")
    assert ask() == (3 * (4 + 15), False)
    assert ask() == (3 * (4 + 15), True)


def test_code_that_comes_back_is_not_compiled_again(ask, tmp_path):
    change(tmp_path, "inner", "x + 1", "x + 3")
    assert ask() == (3 * (8 + 15), False)
    change(tmp_path, "inner", "x + 3", "x + 1")
    assert ask() == (3 * (4 + 15), True)


def test_a_profiler_changes_nothing(ask, tmp_path):
    """Numba changes the flags of a loop's code object when it runs under a profiler."""
    under = f"import cProfile\ndef work():\n    import outer\n    outer.outer(1); outer.outer(1)\n    {ASK.replace('import outer; ', '')}\ncProfile.Profile().runcall(work)"
    again = "import numpy as np, cProfile, outer\ncProfile.Profile().runcall(outer.outer, 1)\nprint(outer.outer(np.float64(1)), 0)"
    for words, hits in ((under, "1"), (again, "0")):
        done = subprocess.run([sys.executable, "-c", words], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.split()[1] == hits
    assert ask() == (3 * (4 + 15), True)
    # The loop compiled under the profiler is found without it.
    found = "import outer, numpy as np; print(outer.outer(np.float64(1)), sum(outer.outer.stats.cache_hits.values()))"
    done = subprocess.run([sys.executable, "-c", found], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["57.0", "1"]


def test_signatures_that_two_processes_compile_at_once_are_both_kept(ask, tmp_path):
    words = "import outer; outer.outer({0}); print(0)"
    kinds = ("1.0", "True", "2j")
    begun = [subprocess.Popen([sys.executable, "-c", words.format(kind)], cwd=tmp_path, stdout=subprocess.DEVNULL) for kind in kinds]
    assert [one.wait() for one in begun] == [0, 0, 0]
    said = f"import outer; [outer.outer(x) for x in (1, {', '.join(kinds)})]; s = outer.outer.stats; print(sum(s.cache_hits.values()), sum(s.cache_misses.values()))"
    done = subprocess.run([sys.executable, "-c", said], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "0"]


def test_the_fields_of_a_tuple_count(fresh, tmp_path):
    (tmp_path / "loop.py").write_text("from puna.kernels.cpu.numba_cache import njit\n\n@njit()\ndef first(pair):\n    return pair.x\n")
    said = []
    for fields in ("x: int\n    y: int", "y: int\n    x: int"):
        (tmp_path / "shapes.py").write_text(f"from typing import NamedTuple\n\nclass Pair(NamedTuple):\n    {fields}\n")
        said.append(fresh("import loop, shapes; print(loop.first(shapes.Pair(3, 4)))", tmp_path))
    assert said == [["3"], ["4"]]


STAGES = """
import gc, sys, tempfile
from compile import pages
from puna.stages.contract.execute import execute
from puna.stages.curate.extract import ExtractConfig, extract
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.language import LanguageConfig, language
from puna.storage import Store
from numba.core.dispatcher import Dispatcher

def work():
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(folder)
        made = execute(extract, ExtractConfig(), {"pages": store.import_table("pages", pages())}, store)
        found = execute(language, LanguageConfig(), {"documents": made}, store)
        execute(heuristics, HeuristicsConfig(), {"documents": made, "language": found}, store)

if sys.argv[1] == "profile":
    import cProfile
    cProfile.Profile().runcall(work)
else:
    work()
loops = [one for one in gc.get_objects() if isinstance(one, Dispatcher)]
print(sum(sum(one.stats.cache_hits.values()) for one in loops), sum(sum(one.stats.cache_misses.values()) for one in loops))
"""


def test_stages_that_ran_before_compile_nothing(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(numba_cache.ROOT / ".pkg"))
    said = []
    for way in ("plain", "profile", "plain"):
        done = subprocess.run([sys.executable, "-c", STAGES, way], cwd=numba_cache.ROOT / "deploy", capture_output=True, text=True, check=True)
        said.append([int(word) for word in done.stdout.split()[-2:]])
    loaded = said[1][0]  # a loop's callees are loaded with it
    assert loaded > 10
    assert said[1:] == [[loaded, 0], [loaded, 0]]


OPERATIONS = """
import hashlib, sys, torch
from puna.kernels.rms_norm import add_rms_norm, rms_norm
from puna.kernels.rope import rope, rope_table
from puna.kernels.swiglu import swiglu

torch.manual_seed(5)
torch.set_num_threads(1)
x, z, w, heads = torch.randn(70, 96), torch.randn(70, 96), torch.randn(96), torch.randn(70, 4, 32)
calls = {
    "rms_norm": lambda: rms_norm(x, w, 1e-5),
    "add_rms_norm": lambda: add_rms_norm(x, z, w, 1e-5)[0],
    "rope": lambda: rope(heads, *rope_table(torch.arange(70), 32, 1e4, torch.float32)),
    "swiglu": lambda: swiglu(x, z),
}
for name in sorted(calls, reverse=sys.argv[1] == "reversed"):
    made = calls[name]()
    tensors = made if isinstance(made, tuple) else (made,)
    print(name, hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest())
"""


def test_a_process_that_compiles_computes_the_bits_of_those_that_load(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(numba_cache.ROOT / ".pkg"))
    bits = []
    for order in ("sorted", "sorted", "reversed"):  # loops contained in several objects come from the one loaded first
        done = subprocess.run([sys.executable, "-c", OPERATIONS, order], capture_output=True, text=True, check=True)
        bits.append(sorted(done.stdout.splitlines()))
    assert len(bits[0]) == 4
    assert bits[0] == bits[1] == bits[2]


def test_loops_that_other_loops_call_keep_their_order_or_become_part_of_them():
    kinds: dict[str, str] = {}
    called: set[str] = set()
    for file in sorted((numba_cache.ROOT / "kernels").rglob("*.py")):
        module = ".".join(("puna", *file.relative_to(numba_cache.ROOT).with_suffix("").parts))
        body = ast.parse(file.read_text()).body
        names = {alias.name: f"{one.module}.{alias.name}" for one in body if isinstance(one, ast.ImportFrom) for alias in one.names}
        for loop in (one for one in body if isinstance(one, ast.FunctionDef)):
            for kind in {ast.unparse(one) for one in loop.decorator_list} & {"numba_jit", "strict_jit", "inline_jit"}:
                kinds[f"{module}.{loop.name}"] = kind
                words = {one.func.id for one in ast.walk(loop) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
                called |= {names.get(word, f"{module}.{word}") for word in words}
    assert len(called & kinds.keys()) > 20
    assert [loop for loop in sorted(called & kinds.keys()) if kinds[loop] == "numba_jit"] == []


def test_every_loop_is_compiled_by_it():
    rooms = [numba_cache.ROOT / room for room in ("kernels", "stages", "models")]
    direct = [file for room in rooms for file in room.rglob("*.py") if "from numba import" in file.read_text()]
    assert direct == []


def test_a_loop_that_borrows_its_arrays_makes_none():
    def last(arrays, place):
        return arrays[1][place] + arrays[0][0]

    def made(arrays, place):
        return np.zeros(place)

    arrays = (np.array([1.0]), np.array([2.0, 3.0]))
    before = [sys.getrefcount(one) for one in arrays]
    assert numba_cache.njit(cache=False, borrows=True)(last)(arrays, 1) == 4.0
    assert [sys.getrefcount(one) for one in arrays] == before
    with pytest.raises(numba.core.errors.NumbaError, match="returning of array"):
        numba_cache.njit(cache=False, borrows=True)(made)(arrays, 1)


def test_a_loop_compiled_for_a_class_that_is_gone_is_compiled_anew(fresh, tmp_path):
    (tmp_path / "loop.py").write_text("from puna.kernels.cpu.numba_cache import njit\n\n@njit()\ndef first(pair):\n    return pair.x\n")
    ask = "import loop, shapes; print(loop.first(shapes.{0}(3, 4)), sum(loop.first.stats.cache_hits.values()))"
    said = []
    for name in ("Pair", "Pair", "Couple", "Couple"):
        (tmp_path / "shapes.py").write_text(f"from typing import NamedTuple\n\nclass {name}(NamedTuple):\n    x: int\n    y: int\n")
        said.append(fresh(ask.format(name), tmp_path))
    assert said == [["3", "0"], ["3", "1"], ["3", "0"], ["3", "1"]]


ARITHMETIC = """
import numpy as np
from puna.kernels.cpu.numba_cache import njit

def mixed(x):
    total, bits = 0.0, np.uint64(7)
    for i in range(len(x)):
        total = total * 0.75 + x[i] * x[i] / 3.0
        bits = (bits ^ np.uint64(i)) * np.uint64(0x9E3779B97F4A7C15)
    return total, bits

def answer(**options):
    loop = njit(**options)(mixed)
    total, bits = loop(np.linspace(-1, 2, 1001))
    return f"{float(total).hex()} {int(bits):x}", sum(loop.stats.cache_hits.values())
"""
COMPILE = "from puna.kernels.cpu import numba_cache as c; from pathlib import Path; c.ROOT = Path.cwd(); import sums; print(*sums.answer())"


def test_loops_that_come_compiled_serve_processors_that_have_their_instructions(tmp_path, monkeypatch):
    """Whichever loop is used, the bits are those of Python's own floats and of integers modulo 2^64."""
    target = numba_cache.target()
    if target is None:
        pytest.skip("no loops come compiled for this processor")
    (tmp_path / "sums.py").write_text(ARITHMETIC)
    own = {"NUMBA_CPU_NAME": target, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path / "shipped" / target)}
    path = {"PYTHONPATH": str(numba_cache.ROOT / ".pkg")}
    done = subprocess.run([sys.executable, "-B", "-c", COMPILE], cwd=tmp_path, env=os.environ | path | own, capture_output=True, text=True, check=True)
    monkeypatch.setattr(numba_cache, "ROOT", tmp_path)
    monkeypatch.setattr(numba_cache, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.syspath_prepend(tmp_path)
    numba_cache.shipped_folder.cache_clear()
    import sums

    total, bits = 0.0, 7
    for i, value in enumerate(np.linspace(-1, 2, 1001).tolist()):
        total, bits = total * 0.75 + value * value / 3.0, (bits ^ i) * 0x9E3779B97F4A7C15 % 2**64
    right = f"{total.hex()} {bits:x}"
    try:
        assert done.stdout.split() == [*right.split(), "0"]
        assert sums.answer() == (right, 1)
        assert not list((tmp_path / "own").rglob("*.nbc"))
        assert sums.answer(fastmath=True)[1] == 0  # sums in any order: never from a shipped loop
        shutil.rmtree(tmp_path / "own")
        monkeypatch.setattr(numba_cache, "get_host_cpu_features", lambda: {"sse4.2": True})
        numba_cache.shipped_folder.cache_clear()
        assert sums.answer() == (right, 0)
    finally:
        numba_cache.shipped_folder.cache_clear()
        sys.modules.pop("sums")


@pytest.mark.parametrize("lacks", ["", "avx2", "fma"])
def test_a_target_needs_each_of_its_instructions(monkeypatch, lacks):
    name, needs = numba_cache.TARGETS["x86_64"]
    monkeypatch.setattr(numba_cache.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(numba_cache, "get_host_cpu_features", lambda: {one: one != lacks for one in needs.split()})
    assert numba_cache.target() == (None if lacks else name)
