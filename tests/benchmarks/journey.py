"""The README's five commands run on a real chat model and preference pairs, each timed, and the quality of the result.

    python tests/benchmarks/journey.py --model SmolLM2-135M-Instruct.Q4_1.gguf --pairs pairs.jsonl --rows 150 --json

The reward model's accuracy on held-out pairs is compared with two baselines without a model: the longer answer, and the shorter answer. At
the end transformers loads `out/` and answers with its chat template; so does the original model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg")]

from tests.flows.test_journey import journey  # noqa: E402

QUESTION = "Name one thing that llamas are kept for, in one sentence."


def controls(pairs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the shares of pairs whose chosen answer is the longer or the shorter one in characters; ties count one half."""
    sizes = [[len(json.loads(pair[side])["content"]) for side in ("chosen", "rejected")] for pair in pairs]
    longer = sum((chosen > rejected) + 0.5 * (chosen == rejected) for chosen, rejected in sizes) / len(sizes)
    return {"always_longer": longer, "always_shorter": 1 - longer}


def answered(folder: Path) -> str:
    """Return transformers' answer with the model and the template in `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    made = model.generate(**asked, max_new_tokens=40, do_sample=False)
    return str(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def walked(folder: Path, model: Path, pairs: Path, rows: int, heldout: float | None) -> dict[str, Any]:
    """Return the figures of one run in an empty folder."""
    with pairs.open(encoding="utf-8") as lines:
        (folder / "pairs.jsonl").write_text("".join(itertools.islice(lines, rows)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg")}
    seconds: dict[str, float] = {}
    for _, *words in journey():
        given = [str(model) if word.endswith(".gguf") else word for word in words]
        if words[:2] == ["import", "preferences"] and heldout is not None:
            given += ["--set", f"heldout_fraction={heldout}"]
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "puna.flows.cli.main", *given], cwd=folder, env=environment, stdout=sys.stderr, check=True)
        seconds[" ".join(words[:2])] = round(time.monotonic() - started, 1)
    from puna.storage import Store

    store = Store.open(folder / ".puna")
    kept = [row for row in store.alias("pairs@latest").read().to_pylist() if row["split"] == "heldout"]
    reward = next(artifact for artifact in store.artifacts() if artifact.manifest.stage == "reward_model").manifest.metrics
    tuned = store.alias("tuned@latest").manifest.metrics
    return {
        "seconds": seconds,
        "heldout_pairs": reward["heldout_pairs"],
        "reward_accuracy": reward["heldout_accuracy"],
        "standard_error": math.sqrt(0.25 / len(kept)),
        **controls(kept),
        "dpo": {name: tuned[name] for name in ("steps", "final_loss", "heldout_accuracy", "heldout_margin")},
        "before": answered(store.alias("smollm2@latest").path()),
        "after": answered(folder / "out"),
        "load_average": os.getloadavg()[1],
    }


def main() -> None:
    """Print the figures, as lines or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file, or folder in Hugging Face's layout")
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines with chosen and rejected")
    parser.add_argument("--rows", type=int, default=150, help="rows of the pairs that are taken")
    parser.add_argument("--heldout", type=float, help="share of prompts held out (default: the stage's own)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = walked(Path(folder), given.model.absolute(), given.pairs.absolute(), given.rows, given.heldout)
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:18} {value}")


if __name__ == "__main__":
    main()
