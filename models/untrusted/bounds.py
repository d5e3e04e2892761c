"""Checks of the sizes and patterns in a model's files, and of schemas in requests, before these take memory and time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from puna.models.untrusted import bounded_process
from puna.models.untrusted.bounded_process import LimitError, Process

LAYERS = 1 << 14  # maximum layers of a model
JSON_BYTES = 1 << 26  # maximum bytes of a configuration or an index
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "moe_intermediate_size",
    "num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "num_hidden_layers",
)  # fmt: skip
"""Fields of a configuration that are a dimension of some tensor, or the number of layers."""
ADAPTER_BYTES = 1 << 20  # maximum bytes of an adapter's configuration
ADAPTERS = ("LORA", "LOHA", "LOKR", "IA3", "ADALORA", "HRA", "MISS", "LN_TUNING")  # adapter types whose parameters are all in their file
STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # initializations of LoRA that do not change the model's own weights
PATTERNS = 1 << 11  # maximum number of module patterns in an adapter's configuration
_process = Process(__name__)


def read_object(path: Path, limit: int = JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ValueError if the file is too large, not JSON, nested too deeply, or not an object."""
    if (size := path.stat().st_size) > limit:
        raise ValueError(f"{path} has {size:,} bytes: at most {limit:,} are read")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def check_numbers(raw: Mapping[str, Any]) -> None:
    """Raise ValueError for a size in a configuration that is not a whole number, or for more than `LAYERS` layers."""
    for name in SIZES:
        value = raw.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{name} = {value!r} is not a whole number")
    if (layers := raw.get("num_hidden_layers") or 0) > LAYERS:
        raise ValueError(f"num_hidden_layers = {layers:,} exceeds the maximum, {LAYERS:,}")


def check_sizes(raw: Mapping[str, Any], tensors: int, size: int) -> None:
    """Raise ValueError if weight files of `size` bytes with `tensors` tensors cannot hold a model of a configuration's sizes. Each size is
    a tensor's dimension, a number takes at least half a byte, and each layer has at least one tensor."""
    check_numbers(raw)
    if (layers := raw.get("num_hidden_layers") or 0) > tensors:
        raise ValueError(f"num_hidden_layers = {layers:,}, but the weights are {tensors:,} tensors: the files hold fewer layers")
    for name in SIZES:
        if (value := raw.get(name) or 0) > 2 * size:
            raise ValueError(f"{name} = {value:,} is more than the {size:,} bytes of weights can hold")


def weight_names(index: Path) -> Sequence[str]:
    """Return the sorted names of the weight files in an index; raise ValueError unless each is a safetensors file of the index's folder."""
    content = read_object(index).get("weight_map")
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{index} lists no weight files (weight_map)")
    for tensor, name in content.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0.][^/\\\0]*\.safetensors", name):
            raise ValueError(f"{index}: {tensor} lies in {name!r}, not a safetensors file of this folder: give names without a path")
    return sorted(set(content.values()))


def check_adapter(raw: Mapping[str, Any], modules: Sequence[str]) -> None:
    """Raise ValueError if an adapter cannot be merged, changes base weights, repeats layers, or has invalid, slow or too many patterns.
    `raw`: the adapter's configuration; `modules`: names of the model's modules, against which the patterns are matched."""
    if (kind := raw.get("peft_type")) not in ADAPTERS:
        raise ValueError(f"peft_type = {kind!r} cannot be merged (only {', '.join(ADAPTERS)})")
    if (start := raw.get("init_lora_weights")) not in STARTS:
        raise ValueError(f"init_lora_weights = {start!r} changes the model's own weights: have PEFT convert the adapters to plain LoRA")
    if unsupported := [name for name in ("layer_replication", "megatron_config") if raw.get(name)]:
        raise ValueError(f"{unsupported[0]} is not supported: have PEFT merge the adapter")
    # PEFT may read each of these texts as a regular expression.
    values = [value for name, value in raw.items() if name.endswith(("_pattern", "_modules", "_to_save"))]
    patterns = [str(text) for value in values for text in ([value] if isinstance(value, str) else value or ())]
    if len(patterns) > PATTERNS:
        raise ValueError(f"{len(patterns):,} module patterns: at most {PATTERNS:,} are read")
    try:
        answer = _process.ask((patterns, list(modules)), b"", None, seconds=0.5)
    except LimitError as error:
        raise ValueError(f"its module patterns ({', '.join(patterns)!r:.200}) exceed a limit: {error}") from error
    if "error" in answer:
        raise ValueError(f"its module patterns: {answer['error']}")


def check_grammar(grammar: str) -> None:
    """Raise ValueError if llguidance cannot compile and enforce the grammar of a JSON schema within 1 CPU second and 256 MB."""
    try:
        answer = _process.ask(grammar, b"", None)
    except LimitError as error:
        raise ValueError(f"the JSON schema is too costly: {error}") from error
    if "error" in answer:
        raise ValueError(f"the JSON schema cannot be enforced: {answer['error']}")


def _compile(grammar: str) -> dict[str, Any]:
    """Return a message under `error` if a grammar does not compile. Single bytes are the vocabulary: a larger one costs little more."""
    from llguidance import LLMatcher, LLTokenizer

    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokens := LLTokenizer("byte"))
    if wrong or messages:
        return {"error": " ".join(messages)}
    matcher = LLMatcher(tokens, grammar)
    matcher.compute_bitmask()
    return {"error": matcher.get_error().partition("\n")[0]} if matcher.is_error() else {}


def serve() -> None:
    """Match patterns against module names as PEFT does, or compile a grammar, within limits; answer with the first error, if any."""

    def answer(key: bytes, context: Any, request: Any) -> dict[str, Any]:
        if isinstance(request, str):
            return _compile(request)
        patterns, modules = request
        try:
            for pattern in patterns:
                for form in (rf"(.*\.)?({pattern})$", rf"(^|.*\.){pattern}($|\..*)", rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", pattern):
                    compiled = re.compile(form)
                    for name in modules:
                        compiled.match(name)
                        compiled.fullmatch(name)
        except (re.error, RecursionError, OverflowError) as error:
            return {"error": f"{pattern!r:.200} is not a regular expression: {error}"}
        return {}

    bounded_process.serve(answer)
