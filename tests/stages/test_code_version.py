"""What counts as a change of a stage's code, on a small package written for each test."""

from __future__ import annotations

import ast
import hashlib
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from puna.stages.contract import code, syntax

FILES = {
    "stages/__init__.py": "",
    "stages/work.py": '''
        """A stage."""
        from puna.stages.helpers import helper, unused
        from puna.models import tool
        LIMIT = 3

        def work(documents, config, run):
            """Docstring."""
            # a comment
            from puna.stages.late import lately
            return [helper(d, LIMIT) for d in documents] + [tool.measure(1)] + [lately()]

        def other():
            return 1
        ''',
    "stages/helpers.py": """
        WORDS = "words.txt"

        class Base:
            limit = 1

        class Counter(Base):
            def count(self):
                return self.limit

        def helper(text, limit):
            return Counter().count() + len(WORDS)

        def unused():
            return 2
        """,
    "stages/words.txt": "one\ntwo\n",
    "stages/late.py": "def lately():\n    return 5\n\ndef later():\n    return 6\n",
    "models/__init__.py": "",
    "models/tool.py": "RULES = {}\n\ndef measure(x):\n    return RULES\n\ndef extra():\n    return 3\n\nRULES['a'] = 1\n",
    "storage/manifest.py": "FORMAT = 1\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.setattr(code, "ROOT", tmp_path)
    return tmp_path


def version() -> str:
    return code.version(code.reached("puna.stages.work", "work"))


def edit(tree: Path, name: str, old: str, new: str) -> None:
    file = tree / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new) + "\n" * len(new))


def test_reaches_through_imports_classes_constants_and_lazy_imports(tree: Path) -> None:
    assert set(code.reached("puna.stages.work", "work")) == {
        "puna.stages.work.work", "puna.stages.work.LIMIT", "puna.stages.helpers.helper", "puna.stages.helpers.WORDS",
        "puna.stages.helpers:words.txt", "puna.stages.helpers.Counter", "puna.stages.helpers.Base", "puna.stages.late.lately",
        "puna.models.tool.measure", "puna.models.tool.RULES",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("stages/work.py", "# a comment", "# another"),
        ("stages/work.py", '"""Docstring."""', '"""Another."""'),
        ("stages/work.py", "return 1", "return 11"),
        ("stages/helpers.py", "return 2", "return 22"),
        ("stages/late.py", "return 6", "return 66"),
        ("models/tool.py", "return 3", "return 33"),
    ],
)
def test_comments_docstrings_and_unrelated_code_do_not_count(tree: Path, name: str, old: str, new: str) -> None:
    before = version()
    edit(tree, name, old, new)
    assert version() == before


@pytest.mark.parametrize(
    ("name", "old", "new", "symbol"),
    [
        ("stages/work.py", "LIMIT = 3", "LIMIT = 4", "puna.stages.work.LIMIT"),
        ("stages/helpers.py", "return Counter()", "return 1 + Counter()", "puna.stages.helpers.helper"),
        ("stages/helpers.py", "limit = 1", "limit = 2", "puna.stages.helpers.Base"),
        ("stages/words.txt", "two", "three", "puna.stages.helpers:words.txt"),
        ("stages/late.py", "return 5", "return 55", "puna.stages.late.lately"),
        ("models/tool.py", "return RULES", "return dict(RULES)", "puna.models.tool.measure"),
        ("models/tool.py", "RULES['a'] = 1", "RULES['a'] = 2", "puna.models.tool.RULES"),
    ],
)
def test_an_edit_of_reached_code_counts_and_is_named(tree: Path, name: str, old: str, new: str, symbol: str) -> None:
    before = code.reached("puna.stages.work", "work")
    edit(tree, name, old, new)
    after = code.reached("puna.stages.work", "work")
    assert {s for s in before if before[s] != after.get(s)} == {symbol}
    assert code.version(before) != code.version(after)


def test_descriptions_of_fields_do_not_count(tree: Path) -> None:
    (tree / "stages/work.py").write_text("def work():\n    return Field(1, ge=0, description='a')\n")
    first = version()
    (tree / "stages/work.py").write_text("def work():\n    return Field(1, ge=0, description='another')\n")
    assert version() == first
    (tree / "stages/work.py").write_text("def work():\n    return Field(1, ge=-1, description='another')\n")
    assert version() != first


CONDITIONS = """
import os
from math import floor as rounding

if os.name == "posix":
    LIMIT = 1
elif os.name == "nt":
    LIMIT = 2
else:
    LIMIT = 3

try:
    from puna.stages.late import lately as chosen
except ImportError:
    from puna.stages.late import later as chosen

for name in ("a", "b"):
    LAST = name

with open(os.devnull) as handle:
    HEAD = handle.read()

match os.name:
    case "posix":
        CASE = 1
    case _:
        CASE = 2

if (size := 4) > 3:
    pass

def work(documents, config, run):
    return rounding(LIMIT), chosen(), LAST, HEAD, handle, CASE, size

def other():
    return 1
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('if os.name == "posix"', 'if os.name == "other"'),
        ('elif os.name == "nt"', 'elif os.name == "java"'),
        ("LIMIT = 2", "LIMIT = 22"),
        ("except ImportError", "except OSError"),
        ("import lately as", "import later as"),
        ("import later as", "import lately as"),
        ('("a", "b")', '("a", "c")'),
        ("os.devnull", "os.devzero"),
        ('case "posix"', 'case "other"'),
        ("size := 4", "size := 5"),
        ("from math import floor as", "from math import ceil as"),
    ],
)
def test_conditions_around_what_is_reached_count(tree: Path, old: str, new: str) -> None:
    (tree / "stages/work.py").write_text(CONDITIONS)
    before = version()
    edit(tree, "stages/work.py", old, new)
    assert version() != before
    assert {"puna.stages.late.lately", "puna.stages.late.later"} & set(code.reached("puna.stages.work", "work"))


def test_both_branches_of_an_import_are_reached(tree: Path) -> None:
    (tree / "stages/work.py").write_text(CONDITIONS)
    assert {"puna.stages.late.lately", "puna.stages.late.later"} < set(code.reached("puna.stages.work", "work"))
    before = version()
    edit(tree, "stages/work.py", "return 1", "return 2")
    assert version() == before


def test_imports_for_type_checkers_are_not_reached(tree: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from puna.stages.late import lately\ndef work(x: lately):\n    return x\n"
    (tree / "stages/work.py").write_text(text)
    assert set(code.reached("puna.stages.work", "work")) == {"puna.stages.work.work"}


# Whatever minor versions of Python write differently: empty fields, added fields, quotes, f-strings, Unicode tables, docstrings.
EVERYTHING = r'''
class A(B, metaclass=C):
    """Docstring."""
    x: int = Field(1, description="not counted", ge=0)
    def f(self, a, /, b=1, *c, d, e=None, **g) -> None: "only a docstring"
    async def h(self): return [i async for i in self if await i]
def k():
    try: pass
    except* ValueError as e: raise TypeError from e
    return f"{a!r:>{width}} {'x' 'y'}" "tail" f"{b=} {{c}} \N{SNOWMAN}" + u"\U0001fae8" + b"\xff" * 2, {**p, 1: None}, lambda: ..., 1e400, 1_000, -0.0
match q:
    case [1, *rest] if rest: R = None
    case {"a": None, **others} | A(x=True): R = 1j
if q: pass
else: S: "int"
del S
'''
TEXT_SHA256 = "4c7bf06da80a0ac26834a9d30623eda36000749ff1f08ebef8e956e6cfacdcf5"


def digest_of_everything() -> str:
    bindings = syntax.statements(ast.parse(EVERYTHING).body)
    return hashlib.sha256("\n".join(b.text() for b in bindings).encode()).hexdigest()


def test_a_tree_has_one_text_under_every_python() -> None:
    assert digest_of_everything() == TEXT_SHA256


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_other_pythons_of_this_machine_agree(minor: int) -> None:
    python = shutil.which(f"python3.{minor}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"no Python 3.{minor} here")
    script = (
        "import ast, hashlib, runpy, sys\n"
        "s = runpy.run_path(sys.argv[1], run_name='syntax')\n"
        "print(hashlib.sha256('\\n'.join(b.text() for b in s['statements'](ast.parse(sys.stdin.read()).body)).encode()).hexdigest())"
    )
    command = [python, "-W", "ignore", "-c", script, str(syntax.__file__)]
    assert subprocess.run(command, input=EVERYTHING, capture_output=True, text=True, check=True).stdout.strip() == TEXT_SHA256
