"""The import stages: every layout in every format, faults reported with file, row, field and reason, ambiguous data refused."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from puna.flows.engine.console import Console
from puna.stages.contract import External, execute, identify
from puna.stages.conversations import messages_of
from puna.stages.io.importing import split_named
from puna.stages.io.imports import ImportPreferencesConfig, import_preferences
from puna.stages.reading.rows import Fault, Row, read_rows
from puna.storage import PunaError, Store
from puna.storage.explain import against
from puna.storage.runs import Made
from tests.stages.io.samples import ASSISTANT, FAULTS, FORMATS, GOOD, HH, LAYOUTS, USER, made, misread, named_fault, written


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_from_every_format(tmp_path: Path, layout: str) -> None:
    kind, row, expected = LAYOUTS[layout]
    digests = set()
    for format in FORMATS:
        artifact = made(tmp_path, kind, written(tmp_path / format, [row], format))
        assert misread(artifact, expected) == [], format
        if kind != "documents":
            digests.add(json.dumps(artifact.read().to_pylist()))
        (example,) = artifact.read("examples").to_pylist()
        assert json.loads(example["detail"])["why"] and example["kind"] == "layout"
    assert len(digests) <= 1  # the same rows have the same ids, whatever their file format


def test_the_subset_of_a_reward_benchmarks_pair_is_its_task(tmp_path: Path) -> None:
    """RewardBench's columns (Lambert et al. 2024); a column `task` takes precedence."""
    row = {"prompt": "How?", "chosen": "So.", "chosen_model": "a", "rejected": "No.", "rejected_model": "b", "subset": "alpacaeval-easy", "id": 1}
    artifact = made(tmp_path, "preferences", written(tmp_path / "pairs", [row, {**row, "prompt": "Why?", "subset": "donotanswer"}], "jsonl"))
    assert sorted(artifact.read()["task"].to_pylist()) == ["alpacaeval-easy", "donotanswer"]
    named = made(tmp_path, "preferences", written(tmp_path / "named", [{**row, "task": "own"}], "jsonl"))
    assert named.read()["task"].to_pylist() == ["own"]


def test_files_of_a_test_split_are_held_out(tmp_path: Path) -> None:
    """A saved DatasetDict, and a folder in the hub's layout with other files beside its rows."""
    import datasets

    datasets.disable_progress_bars()
    rows = {split: [{"prompt": f"{split}{n}", "completion": "x"} for n in range(size)] for split, size in (("train", 3), ("test", 2))}
    datasets.DatasetDict({split: datasets.Dataset.from_list(found) for split, found in rows.items()}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "repo" / "data").mkdir(parents=True)
    for split, found in rows.items():
        written(tmp_path / split, found, "parquet").rename(tmp_path / "repo" / "data" / f"{split}_sft-00000-of-00001.parquet")
    (tmp_path / "repo" / "README.md").write_text("---\nlicense: mit\n---")
    (tmp_path / "repo" / "load.py").write_text("{}")
    for folder in ("saved", "repo"):
        found = made(tmp_path, "instructions", tmp_path / folder)
        assert {(messages_of(row)[0]["content"][:4], row["split"]) for row in found.read().to_pylist()} == {("trai", "train"), ("test", "heldout")}
        assert found.manifest.metrics["heldout"] == 2 and "test" in found.manifest.metrics["files_held_out"]
    assert found.manifest.metrics["files_without_rows"] == "README.md, load.py"
    with pytest.raises(PunaError, match="none of its 2 files contains rows: README.md, load.py"):
        (tmp_path / "repo" / "data").rename(tmp_path / "data")
        made(tmp_path, "instructions", tmp_path / "repo")
    assert made(tmp_path, "prompts", tmp_path / "data" / "test_sft-00000-of-00001.parquet").read()["split"].to_pylist() == ["train"] * 2


@pytest.mark.parametrize(
    ("name", "split"),
    [("train-00000-of-00002.parquet", "train"), ("a/hh_test.jsonl.gz", "test"), ("validation/x.json", "validation"), ("testing.csv", ""),
     ("rows.jsonl", ""), ("train/test.csv", "test")],
)  # fmt: skip
def test_the_split_that_a_name_tells(name: str, split: str) -> None:
    assert split_named(name) == split


@pytest.mark.parametrize("format", ["csv", "tsv", "jsonl", "parquet"])
def test_empty_cells_are_missing_fields(tmp_path: Path, format: str) -> None:
    """A table has a cell for every field: what a row does not have is empty, and the row is not dropped for it. Text that was converted
    from such a table is empty, too."""
    verifier = '{"name": "exact"}'
    rows = [
        {"prompt": "how?", "answer": "1", "verifier": verifier, "split": "test", "task": "sums", "system": "Be brief.", "key": "a"},
        {"prompt": "why?", "answer": "2", "verifier": "", "split": "", "task": "", "system": "", "key": ""},
        {"prompt": "when?", "answer": "", "verifier": "", "split": "", "task": "", "system": "", "key": ""},
    ]
    found = made(tmp_path, "prompts", written(tmp_path / "in", rows, format), columns={"id": "key"}, heldout_fraction=0)
    kept = {messages_of(row)[-1]["content"]: row for row in found.read().to_pylist()}
    assert {name: [row[c] or None for c in ("reference", "verifier", "split", "task")] for name, row in kept.items()} == {
        "how?": ["1", verifier, "heldout", "sums"], "why?": ["2", None, "train", "data"], "when?": [None, None, "train", "data"]
    }  # fmt: skip
    assert found.read("dropped").num_rows == 0 and [len(messages_of(kept[name])) for name in ("how?", "why?")] == [2, 1]
    pairs = [
        {"prompt": "q", "chosen": "a", "rejected": "b", "chosen_score": "3", "rejected_score": "1", "level": "better", "edited": "c"},
        {"prompt": "r", "chosen": "a", "rejected": "b", "chosen_score": "", "rejected_score": "", "level": "", "edited": ""},
    ]
    read = made(tmp_path, "preferences", written(tmp_path / "pairs", pairs, format))
    assert sorted((row["margin"] or 0, row["level"] or "") for row in read.read().to_pylist()) == [(0, ""), (2.0, "better")]
    twice = [{"instruction": "q", "completion": "", "output": "a"}, {"instruction": "r", "completion": "", "output": "b"}]
    if format in ("csv", "tsv"):
        assert made(tmp_path, "instructions", written(tmp_path / "twice", twice, format)).rows() == 2


def test_whole_numbers_may_be_saved_as_floats(tmp_path: Path) -> None:
    """pandas saves a column of integers with a missing value as floats."""
    rows = [{"question": f"q{n}", "answer": float(n), "key": float(n)} for n in (1, 2)] + [{"question": "q3", "answer": 0.5, "key": None}]
    found = made(tmp_path, "prompts", written(tmp_path / "in", rows, "parquet"), columns={"id": "key"})
    plain = made(tmp_path, "prompts", written(tmp_path / "plain", [rows[0] | {"answer": 1, "key": 1}], "jsonl"), columns={"id": "key"})
    kept = {row["id"]: row["reference"] for row in found.read().to_pylist()}
    assert sorted(kept.values()) == ["0.5", "1", "2"] and kept[plain.read()["id"][0].as_py()] == "1"
    choices = [{"question": f"q{n}", "choices": ["x", "y", "z"], "answer": float(n)} for n in range(3)]
    asked = made(tmp_path, "prompts", written(tmp_path / "choices", choices, "parquet")).read()
    assert sorted(asked["reference"].to_pylist()) == ["A", "B", "C"]


def test_answers_with_keys_of_their_own(tmp_path: Path) -> None:
    """UltraFeedback's layout, and one in which --columns names a key of every answer."""
    answers = [{"response": "good", "overall_score": 4.0, "worth": 1}, {"response": "bad", "overall_score": 1.0, "worth": 9}]
    row = {"instruction": "q", "completions": answers}
    found = made(tmp_path, "preferences", written(tmp_path / "one", [row], "jsonl")).read().to_pylist()[0]
    assert (json.loads(found["chosen"])["content"], found["margin"]) == ("good", 3.0) and messages_of(found) == [{"role": "user", "content": "q"}]
    columns = {"scores": "completions.*.worth", "answers": "completions.*.response"}
    found = made(tmp_path, "preferences", written(tmp_path / "two", [row], "jsonl"), columns=columns).read().to_pylist()[0]
    assert (json.loads(found["chosen"])["content"], found["margin"]) == ("bad", 8.0)


def test_equal_and_impossible_comparisons_are_set_aside(tmp_path: Path) -> None:
    rows = [{"context": [USER], "response1": "2", "response2": str(i), "overall_preference": p} for i, p in enumerate((0, 4, 0.5, "x", 1), 3)]
    artifact = made(tmp_path, "preferences", written(tmp_path / "in", rows, "jsonl"))
    (row,) = artifact.read().to_pylist()
    assert (json.loads(row["chosen"])["content"], json.loads(row["rejected"])["content"], row["level"]) == ("7", "2", "slightly_better")
    assert sorted(one["rule"] for one in artifact.read("dropped").to_pylist()) == ["all_equal", "wrong_type", "wrong_type", "wrong_type"]


def test_an_import_of_another_file_is_no_change_of_the_one_before(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")

    def told(name: str, answer: str, make: bool = False) -> list[str] | None:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": answer}) + "\n")
        given = {"inputs": External.resolve(str(tmp_path / f"{name}.jsonl"))}
        if make:
            artifact = execute(import_preferences, ImportPreferencesConfig(), given, store)
            store.record("run", Made("import_preferences", "import_preferences", artifact.kind, artifact.key, False, 1.0).event())
        why = against(store, identify(import_preferences, ImportPreferencesConfig(), given), "import_preferences")
        return None if why is None else [change.name for change in why]

    told("one", "c", make=True)
    assert told("two", "c") is None and told("one", "d") == ["inputs:one"]
    before = Console()
    with before._terminal.capture() as shown:
        before.say("input inputs:one: new")
    assert shown.get() == "input inputs:one: new\n"  # not an image of the digit


@pytest.mark.parametrize("name, best", [("reranker_score", "right"), ("scores", "right"), ("answer_rank", "wrong"), ("answerRanks", "wrong")])
def test_a_column_holds_ranks_only_if_a_word_of_its_name_says_so(tmp_path: Path, name: str, best: str) -> None:
    row = {"prompt": "1 + 1?", "answers": ["right", "wrong"], name: [5, 1]}
    (found,) = made(tmp_path, "preferences", written(tmp_path / "in", [row], "jsonl"), columns={"scores": name}).read().to_pylist()
    assert best in str(found["chosen"])


def test_nested_fields_and_mapped_columns(tmp_path: Path) -> None:
    rows = [{"instruction": f"say {i}", "instances": [{"input": "", "output": f"{i}"}], "meta": {"part": "train"}} for i in range(3)]
    columns = {"output": "instances.0.output", "input": "instances.0.input", "split": "meta.part"}
    artifact = made(tmp_path, "instructions", written(tmp_path / "in", rows, "jsonl"), columns=columns)
    assert sorted(messages_of(row)[1]["content"] for row in artifact.read().to_pylist()) == ["0", "1", "2"]
    with pytest.raises(PunaError, match=r"no row has the column 'nothing' \(columns.prompt\); the columns are instruction, instances, meta"):
        made(tmp_path, "instructions", written(tmp_path / "in", rows, "jsonl"), columns={"prompt": "nothing"})
    with pytest.raises(PunaError, match="columns: 'html' is not a field of instructions; the fields are completion"):
        made(tmp_path, "instructions", written(tmp_path / "in", rows, "jsonl"), columns={"html": "x"})


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("instructions", {"prompt": "a", "completion": "b", "instruction": "c", "output": "d"}, "fit several layouts"),
        ("instructions", {"prompt": "a", "completion": "b", "messages": [USER]}, "fit several layouts of instructions: messages .*Declare one"),
        ("instructions", {"foo": "a", "bar": "b"}, r"columns \(foo, bar\) fit no layout of instructions. messages needs messages; prompt_"),
        ("instructions", {"question": "a", "response": "b", "answer": "c"}, "completion may be response or answer; choose one, for example --columns completion=response"),
        ("preferences", {"chosen": "a", "rejected": "b"}, "are plain text, and no column is the prompt: name it, for example --columns prompt=COLUMN"),
        ("preferences", {"prompt": "a", "completion": "b", "label": 1}, "label contains 1, not true or false.*declare it: --set layout=kto"),
        ("preferences", {"prompt": "a", "messages": [USER], "label": True}, "the context may be prompt or messages"),
        ("preferences", {"prompt": "a", "completions": ["b", "c"]}, "fit no layout of preferences"),
    ],
)
def test_what_is_not_clear_stops_with_the_candidates(tmp_path: Path, kind: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(PunaError, match=message):
        made(tmp_path, kind, written(tmp_path / "in", [row], "jsonl"))


HISTORY = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
PAIR, RANKING = {"chosen": "good", "rejected": "bad"}, {"answers": [{"text": "good", "score": 2}, {"text": "bad", "score": 1}]}


@pytest.mark.parametrize(
    ("context", "contents"),
    [
        ({"prompt": "Sum up.", "context": "A text"} | PAIR, ["Sum up.\n\nA text"]),
        ({"prompt": "Sum up.", "input": "A text"} | PAIR, ["Sum up.\n\nA text"]),
        ({"prompt": "Sum up.", "input": " "} | PAIR, ["Sum up."]),
        ({"prompt": "Sum up.", "input": "A text"} | RANKING, ["Sum up.\n\nA text"]),
        ({"prompt": "Sum up.", "input": "A text", "completion": "good", "label": True}, ["Sum up.\n\nA text"]),
        ({"instruction": "Translate.", "question": "hallo"} | PAIR, ["Translate.\n\nhallo"]),
        ({"instruction": "Add.", "input": "1, 2", "prompt": "Task:\nAdd.\nInput:\n1, 2\nAnswer:"} | PAIR, ["Task:\nAdd.\nInput:\n1, 2\nAnswer:"]),
        ({"prompt": [{"role": "user", "content": "Sum up."}], "context": "A text"} | PAIR, ["Sum up.\n\nA text"]),
        ({"prompt": "1 + 1?", "messages": [*HISTORY, USER]} | PAIR, ["Hello", "Yes?", "1 + 1?"]),
        ({"prompt": "1 + 1?", "messages": [USER, ASSISTANT]} | PAIR, ["1 + 1?"]),  # HuggingFaceH4's UltraFeedback
    ],
)  # fmt: skip
def test_every_part_of_a_preferences_context_is_taken(tmp_path: Path, context: dict[str, Any], contents: list[str]) -> None:
    (row,) = made(tmp_path, "preferences", written(tmp_path / "in", [context], "jsonl")).read().to_pylist()
    assert [turn["content"] for turn in messages_of(row)] == contents


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "1 + 1?", "messages": HISTORY} | PAIR, "messages"),
        ({"prompt": "1 + 1?", "messages": [USER, *HISTORY]} | PAIR, "messages"),
        ({"messages": [*HISTORY, USER], "context": "A text"} | PAIR, "context"),
        ({"chosen": HH.format("2"), "rejected": HH.format("3"), "context": "A text"}, "context"),
    ],
)
def test_a_context_that_cannot_be_joined_is_refused(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    file = written(tmp_path / "in", [row], "jsonl")
    with pytest.raises(PunaError, match=rf"1 two_contexts. The first: .*row 1, field {field}: "):
        made(tmp_path, "preferences", file)
    assert made(tmp_path, "preferences", file, ignored_columns=[field]).rows() == 1


UNREAD: list[tuple[str, dict[str, Any], str]] = [
    ("instructions", {"question": "Who?", "context": "A text", "answer": "She"}, "context"),
    ("instructions", {"question": "Which?", "choices": ["a", "b"], "answer": "a"}, "choices"),
    ("instructions", {"prompt": "Describe it", "image": "a.png", "completion": "A cat"}, "image"),
    ("instructions", {"instruction": "And now?", "history": [["Hello", "Yes?"]], "output": "No"}, "history"),
    ("instructions", {"messages": [USER, ASSISTANT], "images": ["a.png"]}, "images"),
    ("instructions", {"instruction": "Sum up.", "input": "One", "context": "Two", "output": "x"}, "context"),
    ("prompts", {"instruction": "Who is it?", "passage": "A text", "answer": "She"}, "passage"),
    ("prompts", {"question": "Who?", "image": "x.png", "answer": "She"}, "image"),
    ("prompts", {"question": "Who?", "document": "A text", "answer": "She"}, "document"),
    ("prompts", {"question": "Which?", "choice_a": "x", "choice_b": "y", "answer": "A"}, "choice_a"),
    ("prompts", {"question": "Write it", "starter_code": "def f(", "answer": "x"}, "starter_code"),
    ("prompts", {"question": "Write it", "input_output": "{1}", "answer": "x"}, "input_output"),
    ("prompts", {"question": "Who?", "context": "A text", "verifier": {"name": "exact", "answer": "x"}}, "context"),
    ("prompts", {"question": "How many?", "answer": "#### 5", "context": "A text"}, "context"),
    ("preferences", {"prompt": "Which?", "choices": ["a", "b"], "chosen": "a", "rejected": "b"}, "choices"),
    ("preferences", {"prompt": "What is it?", "image": "x.png", "chosen": "a", "rejected": "b"}, "image"),
]
METADATA = {"source": "web", "category": "a", "difficulty": 3, "url": "https://a.example", "language": "en", "images": [], "history": "[]"}


@pytest.mark.parametrize(("kind", "row", "column"), UNREAD)
def test_a_column_with_a_meaning_is_refused_in_the_first_rows_and_dropped_later(tmp_path: Path, kind: str, row: dict[str, Any], column: str) -> None:
    with pytest.raises(PunaError, match=rf"column '{column}' contains .*leave it out \(--set 'ignored_columns=\[\"{column}\"\]'\)"):
        made(tmp_path, kind, written(tmp_path / "first", [row], "jsonl"))
    good = {name: value for name, value in row.items() if name not in (column, "choice_b")} | METADATA
    rows: list[dict[str, Any]] = [good | {"id": number} for number in range(200)] + [good | {column: row[column]}]
    file = written(tmp_path / "late", rows, "jsonl")
    artifact = made(tmp_path, kind, file, columns={"id": "id"})
    (dropped,) = artifact.read("dropped").to_pylist()
    assert dropped["rule"] == "unread_column" and f"row 201, field {column}: contains " in dropped["detail"] and artifact.rows() == 200
    artifact = made(tmp_path, kind, file, columns={"id": "id"}, ignored_columns=[column])
    assert artifact.rows() == 201 and column in artifact.manifest.metrics["columns_not_taken_data"]


def test_a_picture_without_content_is_no_picture(tmp_path: Path) -> None:
    """Parquet fills a missing structure with nulls."""
    rows = [{"prompt": "a", "completion": "b", "image": {"bytes": None, "path": None}}, {"prompt": "a", "completion": "c", "image": None}]
    table = pa.Table.from_pylist(rows, pa.schema({"prompt": pa.string(), "completion": pa.string(), "image": pa.struct({"bytes": pa.string(), "path": pa.string()})}))
    pq.write_table(table, tmp_path / "rows.parquet")
    assert made(tmp_path, "instructions", tmp_path / "rows.parquet").rows() == 2


def test_a_declared_layout_is_taken_as_declared(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": 1}, {"prompt": "a", "completion": "c", "label": 0}]
    found = made(tmp_path, "preferences", written(tmp_path / "in", rows, "csv"), layout="kto").read().to_pylist()
    assert {(row["chosen"] is None, row["rejected"] is None) for row in found} == {(False, True), (True, False)}
    assert len({row["prompt_id"] for row in found}) == 1
    both = [{"prompt": "a", "completion": "b", "messages": [USER, ASSISTANT]}]
    artifact = made(tmp_path, "instructions", written(tmp_path / "both", both, "jsonl"), layout="prompt_completion")
    assert [m["content"] for m in messages_of(artifact.read().to_pylist()[0])] == ["a", "b"]


@pytest.mark.parametrize("kind", GOOD)
def test_wrong_rows_are_named_with_file_row_field_and_reason(tmp_path: Path, kind: str) -> None:
    faults = [fault for fault in FAULTS if fault[0] == kind]
    lines: list[bytes] = [json.dumps(GOOD[kind]).encode()]
    wanted = {}
    for _, line, rule, field, reason in faults:
        lines.append(line if isinstance(line, bytes) else json.dumps(line).encode())
        wanted[len(lines)] = (rule, field, reason)
    lines.append(lines[0])
    wanted[len(lines)] = ("duplicate", "id", "an earlier row has the same id")
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    if kind == "preferences":  # HH dialogues and plain pairs do not occur in one file
        wanted = {n: w for n, w in wanted.items() if b"Human" not in lines[n - 1]}
        lines = [line if n in wanted or n == 1 else b"" for n, line in enumerate(lines, 1)]
        file.write_bytes(b"\n".join(lines) + b"\n")
    artifact = made(tmp_path, kind, file)
    dropped = {}
    for row in artifact.read("dropped").to_pylist():
        where, number, field, said = named_fault(row["detail"])
        assert where == f"file://{file}"
        dropped[number] = (row["rule"], field, said)
    assert set(dropped) == set(wanted)
    for number, (rule, field, reason) in wanted.items():
        assert dropped[number][:2] == (rule, field) and reason in dropped[number][2], number
    metrics = artifact.manifest.metrics
    assert metrics["rows"] == artifact.rows() + len(dropped) == sum(1 for line in lines if line.strip())
    first = min(wanted)
    with pytest.raises(PunaError, match=f"row {first}, field .*Set bad_rows=drop to drop such rows"):
        made(tmp_path, kind, file, bad_rows="refuse")


def test_a_damaged_file_of_a_folder_is_dropped_by_name(tmp_path: Path) -> None:
    folder = written(tmp_path / "in", [{"prompt": "a", "chosen": "b", "rejected": "c"}], "parquet").parent
    whole = next(folder.glob("*.parquet")).read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    artifact = made(tmp_path, "preferences", folder)
    (dropped,) = artifact.read("dropped").to_pylist()
    assert artifact.rows() == 1 and dropped["rule"] == "unreadable_file"
    assert "cut.parquet: not a readable Parquet file" in dropped["detail"] and dropped["detail"].endswith("write the file again, or leave it out")
    with pytest.raises(PunaError, match=r"none of its first records is a valid row; .*cut\.parquet: not a readable Parquet file"):
        made(tmp_path, "preferences", folder / "cut.parquet")


def test_faults_of_hh_dialogues(tmp_path: Path) -> None:
    faults = [line for kind, line, *_ in FAULTS if kind == "preferences" and "Human" in str(line.get("chosen"))]
    rows = [{"chosen": HH.format("2"), "rejected": HH.format("3")}, *faults]
    artifact = made(tmp_path, "preferences", written(tmp_path / "in", rows, "jsonl"))
    assert {row["rule"] for row in artifact.read("dropped").to_pylist()} == {"empty", "not_one_answer"} and artifact.rows() == 1


def test_a_broken_array_is_named_and_read_on_at_the_next_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    good = '{"prompt": "a", "completion": "b"}'
    file.write_text(f'[{good}, {{"prompt": "c" "completion"}}, {good.replace("a", "x")},\n{good.replace("a", "d")}]')
    artifact = made(tmp_path, "instructions", file)
    (row,) = artifact.read("dropped").to_pylist()
    assert artifact.rows() == 2 and "row 2: is not JSON: Expecting ',' delimiter, at line 1, column 53" in row["detail"]
    file.write_text(f"[{good}, ")
    (row,) = made(tmp_path, "instructions", file).read("dropped").to_pylist()
    assert row["rule"] == "truncated_file" and "row 2: the array does not end" in row["detail"]


def test_arrays_are_read_whatever_the_size_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the json module on the whole text."""
    from puna.stages.reading import rows as module

    draw = random.Random(1)
    for size in (1, 2, 7, 64):
        monkeypatch.setattr(module, "CHUNK_CHARACTERS", size)
        expected = [{"a": draw.choice(["x", "é\u2028", '"]', "\\", 1.5, None, [1, {"b": "]"}]]), "n": i} for i in range(30)]
        for indent in (None, 2):
            file = tmp_path / "rows.json"
            file.write_text("\ufeff " + json.dumps(expected, indent=indent, ensure_ascii=bool(size % 2)) + "\n")
            with file.open("rb") as handle:
                found = list(module.read_rows(handle, "rows.json", "json", 1 << 20))
            assert found == [module.Row(n, fields) for n, fields in enumerate(expected, 1)]


def test_an_array_of_any_length_is_read_in_a_few_megabytes() -> None:
    """The array is generated while it is read; a row that is too long is never in memory as a whole."""
    size = 5_000

    class Endless(io.RawIOBase):
        pieces = itertools.chain([b"["], (b'{"n":%d},\n' % n for n in range(size)), [b'{"a": "'], [b"x" * 10_000] * 3000, [b'"},\n{"n": 1}]'])
        left = b""

        def readable(self) -> bool:
            return True

        def readinto(self, room: Any) -> int:
            self.left = self.left or next(self.pieces, b"")
            data, self.left = self.left[: len(room)], self.left[len(room) :]
            room[: len(data)] = data
            return len(data)

    rows = faults = 0
    tracemalloc.start()
    for one in read_rows(Endless(), "rows.json", "json", 1 << 20):  # type: ignore[arg-type]
        rows, faults = rows + isinstance(one, Row), faults + isinstance(one, Fault)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (rows, faults) == (size + 1, 1) and peak < 16 << 20


def test_a_packed_file_that_ends_inside_a_long_row_is_told_with_its_row() -> None:
    letters = "".join(random.Random(0).choices("0123456789abcdef", k=1 << 20))
    packed = gzip.compress(f'{{"a": 1}}\n{{"a": "{letters}"}}\n'.encode())
    assert [type(one) for one in read_rows(io.BytesIO(packed), "rows.jsonl.gz", "json", 1000)] == [Row, Fault]
    first, fault = read_rows(io.BytesIO(packed[:-1000]), "rows.jsonl.gz", "json", 1000)
    assert first == Row(1, {"a": 1}) and isinstance(fault, Fault) and (fault.number, fault.rule) == (2, "truncated_file")


def test_a_row_of_parquet_is_bounded_as_one_of_json() -> None:
    """A file of 16 KB may contain a text of 500 MB; a shared dictionary does not count as part of a row."""
    words = pa.array(["a" * 3000, "b" * 200_000, "c"])
    table = pa.table({"prompt": words, "kind": pa.DictionaryArray.from_arrays(pa.array([0, 0, 1]), pa.array(["d" * 2000, "e"]))})
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    rows = list(read_rows(io.BytesIO(file.getvalue()), "x.parquet", "parquet", 10_000))
    assert [(row.number, row.rule) for row in rows if isinstance(row, Fault)] == [(2, "row_too_large")]
    assert [(row.number, len(row.fields["prompt"])) for row in rows if isinstance(row, Row)] == [(1, 3000), (3, 1)]


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_the_size_of_a_row_is_counted_in_bytes(kind: str) -> None:
    """Rows of up to 1,024 bytes of UTF-8 pass, whatever the number of their characters; longer ones become faults, and reading goes on."""
    texts = ["é" * 500, "é" * 1000, "山" * 400, "e" * 1000, "short"]
    lines = texts if kind == "csv" else [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    content = "\n".join(["text", *lines] if kind == "csv" else lines) + "\n"
    rows = list(read_rows(io.BytesIO(content.encode()), f"rows.{kind}", kind, 1024))
    assert [row.fields["text"] for row in rows if isinstance(row, Row)] == [texts[0], *texts[3:]]
    faults = [row for row in rows if isinstance(row, Fault)]
    assert [row.number for row in faults] == [2, 3] and all("is longer than 1024 bytes" in row.reason for row in faults)


def test_names_that_occur_twice_are_refused(tmp_path: Path) -> None:
    """A row has one value per name, and it is unknown which of two columns is meant."""
    twice = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], ["prompt", "completion", "prompt"])
    inside = pa.table({"prompt": ["a"], "completion": ["b"], "info": pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["same", "same"])})
    for name, table, said in (("twice", twice, "'prompt'"), ("inside", inside, "'same'")):
        pq.write_table(table, tmp_path / f"{name}.parquet")
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        for ending in ("parquet", "arrow"):
            with pytest.raises(PunaError, match=rf"{name}\.{ending}.*: several columns have the name {said}"):
                made(tmp_path, "instructions", tmp_path / f"{name}.{ending}")
    (tmp_path / "twice.csv").write_text("prompt,completion,prompt\na,b,c\n")
    with pytest.raises(PunaError, match=r"twice\.csv: its header line must name every column, each once"):
        made(tmp_path, "instructions", tmp_path / "twice.csv")
    rows = ['{"prompt": "a", "completion": "b"}', '{"prompt": "a", "completion": "b", "prompt": "c"}', '{"prompt": "d", "completion": "e", "info": [{"k": 1, "k": 1}]}']
    for name, text in (("lines.jsonl", "\n".join(rows)), ("array.json", f"[{', '.join(rows)}]")):
        (tmp_path / name).write_text(text)
        artifact = made(tmp_path, "instructions", tmp_path / name)
        dropped = artifact.read("dropped").to_pylist()
        assert artifact.rows() == 1 and [row["rule"] for row in dropped] == ["repeated_name"] * 2
        assert sorted(row["detail"].rpartition("row ")[2] for row in dropped) == [
            "2, field prompt: occurs more than once", "3, field k: occurs more than once"]  # fmt: skip


def test_nothing_to_import_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(PunaError, match="there are no rows"):
        made(tmp_path, "prompts", tmp_path / "empty.jsonl")
    with pytest.raises(PunaError, match=r"no row of data is valid: 2 empty. The first: file://.*row 1, field prompt: is blank"):
        made(tmp_path, "prompts", written(tmp_path / "in", [{"prompt": " "}, {"prompt": ""}], "jsonl"))


def test_a_split_is_that_of_the_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i // 2}", "chosen": f"{i}", "rejected": "no"} for i in range(400)]
    file = written(tmp_path / "in", rows, "jsonl")
    artifact = made(tmp_path, "preferences", file)
    found = artifact.read().to_pylist()
    sides: dict[str, set[str]] = {}
    for row in found:
        sides.setdefault(row["prompt_id"], set()).add(row["split"])
    assert len(sides) == 200 and all(len(side) == 1 for side in sides.values())
    held = sum(side == {"heldout"} for side in sides.values())
    # 200 draws at one tenth: 4 standard deviations are 17.
    assert 3 < held < 37
    assert artifact.manifest.metrics["heldout"] == sum(row["split"] == "heldout" for row in found)
    whole = made(tmp_path, "preferences", file, heldout_fraction=0.0)
    assert whole.manifest.metrics["heldout"] == 0 and set(whole.read()["split"].to_pylist()) == {"train"}
    own = [{"prompt": f"q{i}", "split": "test" if i % 2 else "train"} for i in range(10)]
    named = made(tmp_path, "prompts", written(tmp_path / "own", own, "jsonl"), heldout_fraction=0.5).read().to_pylist()
    assert {(messages_of(r)[0]["content"], r["split"]) for r in named} == {(f"q{i}", "heldout" if i % 2 else "train") for i in range(10)}


def test_imports_of_one_seed_hold_out_the_same_prompts(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows: dict[str, list[dict[str, Any]]] = {"prompts": [], "instructions": [], "preferences": []}
    for i in range(60):
        asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"q{i}"}]
        rows["prompts"].append({"id": f"own {i}", "messages": asked, "tools": tools})
        rows["instructions"].append({"messages": [*asked, {"role": "assistant", "content": "a"}, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "b"}], "tools": tools})
        rows["preferences"].append({"prompt": asked, "chosen": "a", "rejected": "b", "tools": tools})
    held = []
    for kind, some in rows.items():
        found = made(tmp_path, kind, written(tmp_path / kind, some, "jsonl"), heldout_fraction=0.5).read().to_pylist()
        held.append({messages_of(row)[1]["content"] for row in found if row["split"] == "heldout"})
    assert held[0] == held[1] == held[2] and 5 < len(held[0]) < 55
