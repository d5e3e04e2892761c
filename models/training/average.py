"""Averages of weights, linear, spherical (SLERP) or of differences from a base (TIES): of models, and of checkpoints on disk."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from puna.models.training.settings import AverageMethod

WEIGHTS = "model.safetensors"
Merge = Callable[[Sequence[Tensor], Sequence[float]], Tensor]
"""One fp64 tensor of several of its shape and their shares, which add up to 1."""


def linear(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the weighted mean. The terms are added in the order of their values, so that the order of the models does not matter."""
    terms = torch.stack([tensor.double() * share for tensor, share in zip(tensors, shares, strict=True)])
    return terms.sort(0).values.sum(0)


def slerp(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the mean of two tensors along the arc between their directions (Shoemake 1985): the mean if these are the same or opposite.

    With angle A between them and shares s, t: (sin(sA) x + sin(tA) y) / sin(A).
    """
    first, second = (tensor.double() for tensor in tensors)
    lengths = float(first.norm() * second.norm())
    cosine = float((first * second).sum()) / lengths if lengths else 1.0
    if abs(cosine) > 1 - 1e-9:
        return linear(tensors, shares)
    angle = math.acos(cosine)
    one, other = (math.sin(share * angle) / math.sin(angle) for share in shares)
    return first * one + second * other


def ties(tensors: Sequence[Tensor], shares: Sequence[float], base: Tensor, density: float) -> Tensor:
    """Return the base plus the models' differences from it, trimmed and of one sign (Yadav et al. 2023), tensor by tensor.

    Of each difference the share `density` of largest magnitude is kept; an element's sign is that of the weighted sum, and its
    value the weighted mean of the differences that have this sign. (The paper trims over all tensors at once.)
    """
    origin = base.double()
    trimmed = torch.stack([_trimmed(tensor.double() - origin, density) for tensor in tensors])
    weights = torch.tensor(list(shares), dtype=torch.float64).reshape(-1, *[1] * origin.dim())
    terms = trimmed * weights
    sign = terms.sort(0).values.sum(0).sign()
    agrees = (trimmed.sign() == sign) & (sign != 0)
    total = (terms * agrees).sort(0).values.sum(0)
    weight = (weights * agrees).sort(0).values.sum(0)
    return origin + torch.where(weight > 0, total / weight.clamp_min(1e-300), torch.zeros_like(total))


def _trimmed(difference: Tensor, density: float) -> Tensor:
    """Return the elements of largest magnitude, the others 0; equals at the border are all kept."""
    count = math.ceil(density * difference.numel())
    if count >= difference.numel():
        return difference
    border = difference.abs().flatten().kthvalue(difference.numel() - count + 1).values
    return torch.where(difference.abs() >= border, difference, torch.zeros_like(difference))


def average(
    states: Sequence[Mapping[str, Tensor] | nn.Module], weights: Sequence[float] | None = None, method: AverageMethod = "linear", *,
    base: Mapping[str, Tensor] | nn.Module | None = None, density: float = 0.2,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the average of models or state dictionaries with the same names and shapes.

    `weights` need not add up to 1; None weighs all the same. `base` and `density`: see `ties`. It is computed in fp64 and does
    not depend on the order of the states; each tensor has the widest of its dtypes.
    """
    tables = [_table(state) for state in states]
    shares = _shares(len(tables), weights)
    _check(method, len(tables), base is not None)
    origin = None if base is None else _table(base)
    for where, table in [*((f"model {n}", t) for n, t in enumerate(tables[1:], 2)), *([("the base", origin)] if origin else [])]:
        _same_names(set(tables[0]), set(table), where)
    merges = {name: _merge(method, origin[name] if origin else None, density) for name in tables[0]}
    return {name: _merged([table[name] for table in tables], shares, name, merge) for name, merge in merges.items()}


def average_checkpoints(
    folders: Sequence[Path], target: Path, weights: Sequence[float] | None = None, method: AverageMethod = "linear", *,
    base: Path | None = None, density: float = 0.2,
) -> None:  # fmt: skip
    """Write the average of Hugging Face model folders, as `average` has it, to `target`, one tensor in memory at a time
    per checkpoint; configuration and tokenizer are copied from the first folder. Each tensor has the widest of its dtypes.

    ValueError when the folders' config.json or tensors differ in shape or name.
    """
    shares = _shares(len(folders), weights)
    _check(method, len(folders), base is not None)
    shapes = [json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")) for folder in folders]
    formats = {str(shape.pop("torch_dtype", None)) for shape in shapes}
    first, target = Path(folders[0]), Path(target)
    for folder, shape in zip(folders, shapes, strict=True):
        if shape != shapes[0]:
            raise ValueError(f"{folder}/config.json differs from {folders[0]}/config.json: models of one shape only")
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(Path(f) / WEIGHTS, framework="pt")) for f in folders]
        names = list(files[0].keys())
        origin = None if base is None else stack.enter_context(safe_open(Path(base) / WEIGHTS, framework="pt"))
        for where, file in [*zip(folders[1:], files[1:], strict=True), *([(base, origin)] if origin else [])]:
            _same_names(set(names), set(file.keys()), str(where))
        result = {
            name: _merged(
                [file.get_tensor(name) for file in files], shares, name, _merge(method, origin and origin.get_tensor(name), density)
            )
            for name in names
        }
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


def _merged(tensors: Sequence[Tensor], shares: Sequence[float], name: str, merge: Merge) -> Tensor:
    shapes: set[Any] = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError(f"{name} has different shapes: {sorted(shapes)}")
    return merge(tensors, shares).to(_widest(tensors))


def _merge(method: AverageMethod, base: Tensor | None, density: float) -> Merge:
    if base is not None:
        return partial(ties, base=base, density=density)
    return slerp if method == "slerp" else linear


def _check(method: AverageMethod, count: int, based: bool) -> None:
    if method == "slerp" and count != 2:
        raise ValueError(f"slerp averages two models, not {count}")
    if based != (method == "ties"):
        raise ValueError("ties needs the base that the models started from" if method == "ties" else f"{method} takes no base")


def _table(state: Mapping[str, Tensor] | nn.Module) -> dict[str, Tensor]:
    return dict(state.state_dict()) if isinstance(state, nn.Module) else dict(state)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
