"""llama.cpp as the oracle for GGUF: its own server, from the package xllamacpp, on loopback."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

HARD = [
    "Hello world", "  two  blanks ", "\n\n\nlines\n \n x", "don't I'LL we've 'S", "3.14159 and 12345 ½ ² ٣", "ünïcödé e\u0301 naïve", "量子コンピュータ",
    "🙂🙂‍🔥 mixed", "tabs\t\tand\r\nreturns\r", "<b>html</b> {json: [1,2]} $x^2$", " leading", "trailing ", "a\u00a0b\u2003c\u3000d", "", "____ ---- ==== !!!???",
]  # fmt: skip


class LlamaCpp:
    """A model served by llama.cpp."""

    def __init__(self, file: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp", reason="the package xllamacpp, which carries llama.cpp, is not installed")
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
        parameters.cpuparams.n_threads, parameters.port = 1, 0
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(parameters)

    def ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.server.listening_address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def ids(self, text: str, special: bool = False) -> list[int]:
        return self.ask("/tokenize", content=text, add_special=False, parse_special=special)["tokens"]

    def rendered(self, messages: list[dict[str, Any]]) -> str:
        return self.ask("/apply-template", messages=messages)["prompt"]

    def next(self, ids: list[int]) -> tuple[int, dict[int, float]]:
        """Return the likeliest next token, and the ten likeliest with their log-probabilities (none if it is half a character)."""
        found = self.ask("/completion", prompt=ids, n_predict=1, temperature=0, n_probs=10, samplers=["temperature"],
                         cache_prompt=False, ignore_eos=False, return_tokens=True)  # fmt: skip
        steps = found.get("completion_probabilities") or [{"top_logprobs": []}]
        return found["tokens"][0], {top["id"]: top["logprob"] for top in steps[0]["top_logprobs"]}
