"""Changes of a stage's code that change its version, on a small package written for each test."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from puna.stages.identity import bindings, code, libraries, reach, sources, syntax
from puna.storage import PunaError
from puna.storage.manifest import code_version

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
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "_AT_START", {})
    monkeypatch.setattr(sources, "_FILES", [])
    monkeypatch.setenv("PUNA_CACHE", str(tmp_path / "cache"))
    new_process()
    return tmp_path


def new_process() -> None:
    """Forget this process's cached imports, as a new process would."""
    sources._AT_START.clear()
    sources._FILES[:] = sources._source_files()
    sources.contract.cache_clear()
    sources.listing.cache_clear()
    reach._known.clear()
    code._symbol.cache_clear()


def version() -> str:
    """Return the version as a new process computes it."""
    new_process()
    return code_version(code.reach(("puna.stages.work", "work"), ("puna.stages.work", "Config")))


def edit(tree: Path, name: str, old: str, new: str) -> None:
    file = tree / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    new_process()


def test_reaches_through_imports_classes_constants_and_lazy_imports(tree: Path) -> None:
    assert set(code.reach(("puna.stages.work", "work"))) == {
        "puna.stages.work.work", "puna.stages.work.LIMIT", "puna.stages.helpers.helper", "puna.stages.helpers.WORDS",
        "puna.stages.helpers:words.txt", "puna.stages.helpers.Counter", "puna.stages.helpers.Base", "puna.stages.late.lately",
        "puna.models.tool.measure", "puna.models.tool.RULES", "contract", "meaning",
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
    ("old", "new", "counts"),
    [
        ("""Drop("words", "<")""", """Drop("words", ">")""", True),
        ("""Drop("lines", "<")""", """Drop("lines", ">")""", True),
        ("Field(le=9)", "Field(le=10)", False),
        ("float", "int", False),
    ],
)
def test_what_is_added_to_a_fields_type_counts(tree: Path, old: str, new: str, counts: bool) -> None:
    (tree / "stages/work.py").write_text(
        textwrap.dedent(
            """
            from typing import Annotated

            class Drop:
                def __init__(self, signal, when):
                    self.when = when

            class Config:
                most: Annotated[float, Drop("words", "<"), Field(le=9)] | None = None
                quoted: 'Annotated[int, Drop("lines", "<")]' = 1

            def work(documents, config, run):
                return documents
            """
        )
    )
    before = version()
    edit(tree, "stages/work.py", old, new)
    assert (version() != before) == counts


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
    before = code.reach(("puna.stages.work", "work"))
    edit(tree, name, old, new)
    after = code.reach(("puna.stages.work", "work"))
    assert {s for s in before if before[s] != after.get(s)} == {symbol, "meaning"}
    assert code_version(before) != code_version(after)


def test_code_may_move(tree: Path) -> None:
    before = version()
    (tree / "models/moved.py").write_text((tree / "stages/late.py").read_text())
    edit(tree, "stages/work.py", "from puna.stages.late import lately", "from puna.models.moved import lately")
    assert version() == before
    # An import may be at the top or in the function, and name the module or the symbol.
    edit(tree, "stages/work.py", "    from puna.models.moved import lately\n", "")
    edit(tree, "stages/work.py", "LIMIT = 3", "from puna.models import moved as other_module\nLIMIT = 3")
    edit(tree, "stages/work.py", "[lately()]", "[other_module.lately()]")
    assert version() == before
    # A module may re-export a symbol of another one.
    (tree / "models/passing_on.py").write_text("from puna.models.moved import lately\n")
    edit(tree, "stages/work.py", "from puna.models import moved as", "from puna.models import passing_on as")
    assert version() == before
    edit(tree, "models/moved.py", "return 5", "return 55")
    assert version() != before


@pytest.mark.parametrize(
    ("one", "two", "third"), [("return 2", "return 1", "two"), ("return 1", "return 2", "one"), ("return 1", "return 1", "two")]
)
def test_which_of_two_helpers_of_one_name_is_called_counts(tree: Path, one: str, two: str, third: str) -> None:
    def given(one: str, two: str, third: str) -> str:
        (tree / "models/one.py").write_text(f"def helper():\n    {one}\n")
        (tree / "models/two.py").write_text(f"def helper():\n    {two}\n")
        called = f"one.helper() + 2 * two.helper() + 3 * {third}.helper()"
        (tree / "stages/work.py").write_text(f"from puna.models import one, two\n\ndef work():\n    return {called}\n")
        return version()

    assert given("return 1", "return 2", "two") != given(one, two, third)


def test_helpers_that_call_each_other_are_told_apart_by_what_they_call(tree: Path) -> None:
    def given(last: str) -> str:
        for name, other in (("one", "two"), ("two", "three"), ("three", last)):
            body = f"from puna.models import {other}\n\ndef helper(n):\n    return n and {other}.helper(n - 1)\n"
            (tree / f"models/{name}.py").write_text(body if other else "def helper(n):\n    return n\n")
        (tree / "stages/work.py").write_text("from puna.models import one\n\ndef work():\n    return one.helper(3)\n")
        return version()

    endless = given("one")
    assert given("") != endless
    assert given("two") == endless == given("one")  # both call themselves without end, through equal helpers


def test_a_data_file_counts_by_name_and_content_wherever_it_lies(tree: Path) -> None:
    before = version()
    (tree / "models/helpers.py").write_text((tree / "stages/helpers.py").read_text())
    (tree / "stages/words.txt").rename(tree / "models/words.txt")
    edit(tree, "stages/work.py", "from puna.stages.helpers", "from puna.models.helpers")
    assert version() == before
    edit(tree, "models/words.txt", "two", "three")
    assert version() != before


SAME = """
class Config(Base):
    '''A docstring.'''
    limit: int = Field(3, ge=0, description="a")
    name: str = Field("x")

def work(documents: list[str], config: Config, run) -> None:
    best = 0
    for document in documents:
        length = len(document)
        if length > config.limit and (longest := max(best, length)):
            best = longest
        shown = [y for y in document if (latest := max(best, y)) > 1], latest
        try:
            value = {key: [y for y in key] for key, other in documents}
        except ValueError as error:
            raise KeyError(f"{error}: no text") from error
    def nested(a):
        nonlocal best
        best += a + length
        return [best for best in a]
    with open("x") as handle:
        match handle.read():
            case [first, *rest] if first:
                assert rest, "nothing left"
    return nested(best), value, lambda inner: inner + best
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('ge=0, description="a"', 'ge=-1, description="another"'),
        ("limit: int", "limit: float"),
        ('Field("x")', 'Field("x", max_length=10)'),
        ("documents: list[str]", "documents: tuple[bytes, ...]"),
        (") -> None:", "):"),
        ("best", "largest"),
        ("length", "size"),
        ("longest", "winner"),
        ("latest", "last"),
        ("document ", "item "),
        ("as error:\n            raise KeyError(f\"{error}: no text\") from error", "as wrong:\n            raise KeyError('empty') from wrong"),
        ('rest, "nothing left"', "rest"),
        ("handle", "file"),
        ("first", "head"),
        ("[y for y in key]", "[z for z in key]"),
        ("key", "name_of_it"),
        ("    best = 0", "    best: int = 0"),
        ("A docstring.", "Another."),
    ],
)
def test_what_changes_nothing_does_not_count(tree: Path, old: str, new: str) -> None:
    (tree / "stages/work.py").write_text(SAME)
    before = version()
    text = SAME.replace(old, new).replace("item in documents:\n        length = len(document)", "item in documents:\n        length = len(item)")
    if old == "document ":
        assert "len(item)" in text
    ast.parse(text)
    assert text != SAME
    (tree / "stages/work.py").write_text(text)
    assert version() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Field(3", "Field(4"),
        ("config.limit", "config.name"),
        ("max(best, length)", "max(length, best)"),
        ("best = longest", "best = length"),
        ("raise KeyError", "raise ValueError"),
        ("[y for y in key]", "[key for y in key]"),
        ("nonlocal best", "best = 0"),
        ("[best for best in a]", "[best for other in a]"),
        ("assert rest", "assert first"),
        ("def work(documents", "def work(pages"),
        ("except ValueError", "except TypeError"),
        ("inner + best", "inner + inner"),
    ],
)
def test_what_changes_something_counts(tree: Path, old: str, new: str) -> None:
    (tree / "stages/work.py").write_text(SAME)
    before = version()
    edit(tree, "stages/work.py", old, new)
    assert version() != before


@pytest.mark.parametrize(("decorator", "counts"), [("@signal(unit='')", True), ("@contract.signal(unit='')", True), ("@wraps(print)", False)])
def test_the_type_of_a_signal_counts(tree: Path, decorator: str, counts: bool) -> None:
    """The return annotation is the type of a column; other annotations of functions change no output."""
    (tree / "stages/work.py").write_text(f"{decorator}\ndef work(text: str) -> float:\n    return len(text)\n\nclass Config:\n    pass\n")
    before = version()
    edit(tree, "stages/work.py", "text: str", "text: Text")
    assert version() == before
    edit(tree, "stages/work.py", "-> float", "-> int")
    assert (version() != before) == counts


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
    assert {"puna.stages.late.lately", "puna.stages.late.later"} & set(code.reach(("puna.stages.work", "work")))


def test_both_branches_of_an_import_are_reached(tree: Path) -> None:
    (tree / "stages/work.py").write_text(CONDITIONS)
    assert {"puna.stages.late.lately", "puna.stages.late.later"} < set(code.reach(("puna.stages.work", "work")))
    before = version()
    edit(tree, "stages/work.py", "return 1", "return 2")
    assert version() == before


def test_imports_for_type_checkers_are_not_reached(tree: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from puna.stages.late import lately\ndef work(x: lately):\n    return x\n"
    (tree / "stages/work.py").write_text(text)
    assert set(code.reach(("puna.stages.work", "work"))) == {"puna.stages.work.work", "contract", "meaning"}


# Differences between minor versions of Python: empty fields, added fields, quotes, f-strings, Unicode tables, docstrings.
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
TEXT_SHA256 = "0febcce6a7d9317fc43457cc4f06affb954a986c4d4c7b95745917a46758e731"


SCRIPT = """
import ast, hashlib, runpy, sys
s = runpy.run_path(sys.argv[1], run_name=sys.argv[1])
nodes = s['statements'](ast.parse(sys.stdin.read()).body)
print(hashlib.sha256('\\n'.join(s['text'](s['canonical'](n)[0]) for n in nodes).encode()).hexdigest())
"""


def digest_under(python: str) -> str:
    command = [python, "-W", "ignore", "-c", SCRIPT, str(syntax.__file__)]
    return subprocess.run(command, input=EVERYTHING, capture_output=True, text=True, check=True).stdout.strip()


def test_a_tree_has_one_text_under_every_python() -> None:
    assert digest_under(sys.executable) == TEXT_SHA256


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_other_pythons_of_this_machine_agree(minor: int) -> None:
    python = shutil.which(f"python3.{minor}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"no Python 3.{minor} here")
    assert digest_under(python) == TEXT_SHA256


def test_data_files_are_found_through_path_expressions(tree: Path) -> None:
    (tree / "stages/work.py").write_text(textwrap.dedent("""
        import os
        from pathlib import Path
        from puna.stages.places import DATA

        HERE = Path(__file__).parent
        ONE = HERE / "tables" / "one.txt"

        def work(documents, config, run):
            second = (Path(__file__).resolve().parents[1] / "data" / "two.txt").read_text()
            named(config.name, "three.txt")
            third = [f for f in (DATA / "folder").iterdir()]
            return ONE.read_text(), second, third, open(os.path.join(os.path.dirname(__file__), "five.txt"))

        def named(name, other):
            return (DATA / other).read_text(), (DATA / f"{name}.json").read_text()
        """))
    (tree / "stages/places.py").write_text("from pathlib import Path\nDATA = Path(__file__).parents[1].joinpath('data')\n")
    for name in ("stages/tables/one.txt", "data/two.txt", "data/three.txt", "data/folder/four.bin", "stages/five.txt", "data/x.json", "stages/no.txt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    found = {name for name in code.reach(("puna.stages.work", "work")) if ":" in name}
    # One of the names is unknown: everything in its folder counts.
    assert {name.partition(":")[2] for name in found} == {
        "tables/one.txt", "../data/two.txt", "../data/three.txt", "../data/folder/four.bin", "five.txt", "../data/x.json"
    }  # fmt: skip
    before = version()
    edit(tree, "data/two.txt", "two", "2")
    assert version() != before


def test_a_module_is_brought_by_the_distributions_that_importlib_names() -> None:
    named = importlib.metadata.packages_distributions()
    # Each text is read once; of the modules named like their distribution, every eighth is checked.
    installed = {one.metadata["Name"]: SimpleNamespace(read_text=functools.cache(one.read_text)) for one in importlib.metadata.distributions()}
    plain = [module for module, names in named.items() if names == [module]]
    for module in named.keys() - plain | set(sorted(plain)[::8]):
        assert {name for name, one in installed.items() if libraries._brings(one, module)} == set(named[module]), module
    assert not any(libraries._brings(one, "no_such_module") for one in installed.values())


def test_versions_of_libraries_that_decide_content_count(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "stages/work.py").write_text(
        "import numpy as np\nimport regex\nimport resiliparse.parse.html as html\nimport pyarrow as pa\n\n"
        "def work():\n    import tokenizers\n    return np.ones(3), pa, html.parse, tokenizers\n\ndef other():\n    return regex\n"
    )
    found = {name: value for name, value in code.reach(("puna.stages.work", "work")).items() if name.startswith("library:")}
    assert set(found) == {"library:numpy", "library:resiliparse", "library:tokenizers"}
    before = version()

    def changed(**versions: str) -> str:
        libraries.version_in_key.cache_clear()
        monkeypatch.setattr(libraries, "_version", lambda name: versions.get(name, found.get(f"library:{name}", "1.2")))
        try:
            return version()
        finally:
            monkeypatch.undo()
            libraries.version_in_key.cache_clear()
            monkeypatch.setattr(sources, "ROOT", tree)

    assert changed(resiliparse="9.9") != before and changed(tokenizers="9.9") != before
    assert changed(regex="9.9", pyarrow="9.9", prefect="9.9") == before
    minor = found["library:numpy"]
    assert changed(numpy=f"{minor}.77") == before and changed(numpy="9.9.0") != before


def test_an_edited_source_file_is_refused_while_the_process_runs(tree: Path) -> None:
    before = code.reach(("puna.stages.work", "work"))
    file = tree / "stages/helpers.py"
    file.write_text(file.read_text() + "\nX = 1\n")
    with pytest.raises(PunaError, match=r"stages/helpers.py was edited while this process runs"):
        code.reach(("puna.stages.work", "work"))
    new_process()
    assert code.reach(("puna.stages.work", "work")) == before


def test_helper_modules_of_a_user_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "users_stage.py").write_text(
        "import json\nimport users_helper\nfrom users_package.inner import inner\n\n"
        "def work():\n    from users_late import late\n    return users_helper.helper(), inner(), late(), json.dumps(1)\n"
    )
    (tmp_path / "users_helper.py").write_text("def helper():\n    return 1\n\ndef unused():\n    return 2\n")
    (tmp_path / "users_late.py").write_text("def late():\n    return 1\n")
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package/__init__.py").write_text("")
    (tmp_path / "users_package/inner.py").write_text("from .deeper import deeper\n\ndef inner():\n    return deeper()\n")
    (tmp_path / "users_package/deeper.py").write_text("def deeper():\n    return 1\n")
    assert set(code.reach(("users_stage", "work"))) == {
        "contract", "meaning", "users_stage.work", "users_helper.helper", "users_late.late", "users_package.inner.inner", "users_package.deeper.deeper"
    }  # fmt: skip


def test_the_cells_of_a_notebook_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    cells = ["", "LIMIT = 3", "def helper(x):\n    return x + LIMIT", "def work():\n    return helper(1)", "unused = 5"]
    monkeypatch.setattr(main, "In", cells, raising=False)
    first = code.reach(("__main__", "work"))
    assert set(first) == {"contract", "meaning", "__main__.work", "__main__.helper", "__main__.LIMIT"}
    cells.append("def work():\n    return helper(1)")  # the same cell once more
    assert code.reach(("__main__", "work")) == first
    cells.append("def helper(x):\n    return x - LIMIT")
    assert code.reach(("__main__", "work"))["__main__.helper"] != first["__main__.helper"]


def test_a_stage_whose_source_is_kept_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(PunaError, match="its source is not available; declare the stage in a file, or give it version="):
        code.reach(("__main__", "work"))


WORK = ("puna.stages.work", "work")


def test_what_is_reached_is_followed_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code.reach(WORK)
    new_process()
    with monkeypatch.context() as nothing:
        nothing.setattr(code, "_follow", lambda *roots: pytest.fail("followed again"))
        assert code.reach(WORK) == before
    edit(tree, "stages/words.txt", "two", "three")  # data files are read each time
    assert {name for name, hash in code.reach(WORK).items() if hash != before[name]} == {"puna.stages.helpers:words.txt", "meaning"}


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: b"[]", lambda d: d[:-9], lambda d: d.replace(b"models.tool", b"models.tol_")])
def test_a_damaged_record_of_what_is_reached_counts_for_nothing(tree: Path, damage: Callable[[bytes], bytes]) -> None:
    before = code.reach(WORK)
    (file,) = (tree / "cache/code").iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    new_process()
    assert code.reach(WORK) == before
    assert file.read_bytes() == good  # and is written again


def test_a_file_that_appears_where_code_looks_for_it_counts(tree: Path) -> None:
    edit(tree, "stages/helpers.py", '"words.txt"', '"later.txt"')
    assert "puna.stages.helpers:later.txt" not in code.reach(WORK)
    (tree / "stages/later.txt").write_text("x")
    new_process()
    assert "puna.stages.helpers:later.txt" in code.reach(WORK)


def test_sources_are_parsed_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 needs this; a server's pages plan and start runs in several threads."""
    parse, inside, most = ast.parse, [], []

    def watched(content: str) -> ast.Module:
        inside.append(content)
        most.append(len(inside))
        time.sleep(0.01)
        inside.remove(content)
        return parse(content)

    threads = [threading.Thread(target=bindings._parse, args=("puna.x", Path(f"{n}.py"), f"x = {n}")) for n in range(4)]
    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", watched)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1, 1, 1, 1]
