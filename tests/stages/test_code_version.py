"""What counts as a change of a stage's code, on a small package written for each test."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from puna.stages.contract import code

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
