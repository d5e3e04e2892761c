"""pyarrow without pandas until somebody imports pandas.

At the first list that it makes an array of, pyarrow imports pandas where it is installed, to know a Series from a list: .4 s and
59 MB in each process. Here it looks once and finds none; when pandas is imported, pyarrow is told.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pyarrow as pa


def spare_pandas() -> None:
    """Keep pyarrow from importing pandas by itself; where pandas is imported already, nothing changes."""
    if "pandas" in sys.modules:
        return
    hidden, later = _Hidden(), _Later()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([None])
    finally:
        sys.meta_path.remove(hidden)
    sys.meta_path.insert(0, later)


class _Hidden(MetaPathFinder):
    """Finds no pandas."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class _Later(MetaPathFinder):
    """Tells pyarrow of pandas once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "pandas":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Told(spec.loader)
        return spec


class _Told(Loader):
    """The loader of pandas, and word to pyarrow."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        pa.nulls(0, pa.int64()).to_pandas()
