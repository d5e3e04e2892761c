"""Averages of models' weights, for models in memory and for model folders on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

WEIGHTS = "model.safetensors"


def linear(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the fp64 sum of `tensors` times `shares`; terms are added in ascending order, so the order of the models does not matter."""
    terms = torch.stack([tensor.double() * share for tensor, share in zip(tensors, shares, strict=True)])
    return terms.sort(0).values.sum(0)


def average(states: Sequence[Mapping[str, Tensor] | nn.Module], weights: Sequence[float] | None = None) -> dict[str, Tensor]:
    """Return the average of models or state dicts; raise ValueError if tensor names or shapes differ. `weights`: at least 0, not all 0;
    None: all equal. The fp64 mean does not depend on the order of the states. Each tensor has the widest of its dtypes."""
    tables = [_table(state) for state in states]
    shares = _shares(len(tables), weights)
    for number, table in enumerate(tables[1:], 2):
        _same_names(set(tables[0]), set(table), f"model {number}")
    return {name: _merge([table[name] for table in tables], shares, name) for name in tables[0]}


def average_checkpoints(folders: Sequence[Path], target: Path, weights: Sequence[float] | None = None) -> None:
    """Write the `average` of Hugging Face model folders, one `model.safetensors` each, to `target`, with the first folder's configuration
    and tokenizer. Raise ValueError if configurations (apart from their dtype), or tensor names or shapes, differ."""
    shares = _shares(len(folders), weights)
    shapes = [json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")) for folder in folders]
    formats = {str(shape.pop("dtype", shape.pop("torch_dtype", None))) for shape in shapes}  # newer files name it dtype
    first, target = Path(folders[0]), Path(target)
    for folder, shape in zip(folders, shapes, strict=True):
        if shape != shapes[0]:
            raise ValueError(f"{folder}/config.json differs from {folders[0]}/config.json: models must have one configuration")
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(Path(f) / WEIGHTS, framework="pt")) for f in folders]
        names = list(files[0].keys())
        for where, file in zip(folders[1:], files[1:], strict=True):
            _same_names(set(names), set(file.keys()), str(where))
        result = {name: _merge([file.get_tensor(name) for file in files], shares, name) for name in names}
        metadata = files[0].metadata()
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(first.iterdir()):
        if path.suffix in (".json", ".jinja", ".model") and path.name != "manifest.json":
            shutil.copyfile(path, target / path.name)
    if len(formats) > 1:
        dtype = str(_widest(list(result.values()))).removeprefix("torch.")
        text = json.dumps({**shapes[0], "torch_dtype": dtype}, indent=2, sort_keys=True)
        (target / "config.json").write_text(text + "\n", encoding="utf-8")
    save_file(result, target / WEIGHTS, metadata=metadata)


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    if not count:
        raise ValueError("an average needs at least one model")
    if weights is None:
        return [1.0 / count] * count
    if len(weights) != count or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"{count} models need {count} weights, none negative, not all 0: {list(weights)}")
    total = sum(sorted(weights))
    return [weight / total for weight in weights]


def _same_names(expected: set[str], found: set[str], where: str) -> None:
    if expected != found:
        raise ValueError(f"{where} has other tensors than the first model: {sorted(expected ^ found)}")


def _merge(tensors: Sequence[Tensor], shares: Sequence[float], name: str) -> Tensor:
    shapes: set[Any] = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"{name} has different shapes: {sorted(shapes)}")
    return linear(tensors, shares).to(_widest(tensors))


def _table(state: Mapping[str, Tensor] | nn.Module) -> dict[str, Tensor]:
    return dict(state.state_dict()) if isinstance(state, nn.Module) else dict(state)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
