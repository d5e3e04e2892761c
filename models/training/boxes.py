"""Reading of parts (boxes) of a checkpoint's tensors from its files. A box is (start, stop) along each dimension of a whole tensor."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TENSORS = "state.safetensors"  # name of the tensor file in a checkpoint written by one process, which holds whole tensors
WHOLE = "rollout."  # prefix of the tensors that every rank reads whole: those of a rollout in progress
Box = tuple[tuple[int, int], ...]
Index = dict[str, dict[str, Any]]  # file → tensor name → its `shape` and `box`


def empty(path: Path, index: Index | None) -> dict[str, Tensor]:
    """Return meta tensors of the shapes and dtypes of a checkpoint's whole tensors, by name. `index`: see `read`."""
    import torch
    from safetensors import safe_open

    out: dict[str, Tensor] = {}
    for file in [TENSORS] if index is None else index:
        with safe_open(path / file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 (no dictionary)
                piece = content.get_slice(name)
                some = piece[:0] if piece.get_shape() else content.get_tensor(name)
                out[name] = torch.empty(_piece(index, file, name, piece.get_shape())[0], dtype=some.dtype, device="meta")
    return out


def whole_boxes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], Box]]:
    """Return the shape of each tensor and the box that covers it, by name."""
    return {name: (tuple(tensor.shape), tuple((0, size) for size in tensor.shape)) for name, tensor in tensors.items()}


def read(
    path: Path, index: Index | None, wanted: Mapping[str, tuple[tuple[int, ...], Box]] | None = None,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the boxes `wanted` of a checkpoint's tensors: name → (shape of the whole tensor, box); None: all tensors, whole. Tensors with
    the prefix `WHOLE` are always returned, whole. `index`: each file's boxes; None: a single file with whole tensors. `into`: tensors to
    overwrite and return, instead of new ones, by name. Raise ValueError if a shape differs or a part is missing."""
    import torch
    from safetensors import safe_open

    out: dict[str, Tensor] = {}
    covered: dict[str, int] = {}
    for file in [TENSORS] if index is None else sorted(index):
        if index is not None and wanted is not None and not any(name in wanted or name.startswith(WHOLE) for name in index[file]):
            continue
        with safe_open(path / file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 (no dictionary)
                if wanted is not None and name not in wanted and not name.startswith(WHOLE):
                    continue
                piece = content.get_slice(name)
                shape, box = _piece(index, file, name, piece.get_shape())
                entire = shape, tuple((0, size) for size in shape)
                own_shape, own = entire if wanted is None or name.startswith(WHOLE) else wanted[name]
                if tuple(own_shape) != shape:
                    raise ValueError(f"the saved training state does not fit: {name} is {shape} there, {tuple(own_shape)} in this model")
                shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, own, strict=True)]
                if any(start >= stop for start, stop in shared):
                    continue
                there = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(shared, box, strict=True))
                values = piece[there] if there else content.get_tensor(name)
                if name not in out:
                    given = (into or {}).get(name)
                    out[name] = torch.empty([stop - start for start, stop in own], dtype=values.dtype) if given is None else given
                here = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(shared, own, strict=True))
                out[name][here] = values
                covered[name] = covered.get(name, 0) + values.numel()
    for name, (_, own) in (wanted or {}).items():
        size = math.prod(stop - start for start, stop in own)
        if size and covered.get(name, 0) != size:
            raise ValueError(f"the saved training state does not fit: it has only {covered.get(name, 0)} of {size} numbers of {name}")
        if not size:
            out[name] = torch.empty([stop - start for start, stop in own])
    return out


def own(weight: Tensor, slices: tuple[slice, ...], device: torch.device) -> Tensor:
    """Return an fp32 copy, on `device`, of the piece `slices` of a weight. Of a mapped file, only the piece's pages are read."""
    import torch

    piece, advise = weight.detach()[slices], getattr(ctypes.CDLL(None), "madvise", None)
    if weight.device.type != "cpu" or not piece.numel() or advise is None or not any(weight.stride()):
        return piece.to(device, torch.float32, copy=True)

    def pages(start: int, size: int, advice: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(first), ctypes.c_size_t(start + size - first), advice)

    runs, step = (1, 0) if piece.is_contiguous() else (len(piece), piece.stride(0) * piece.element_size())
    pages(weight.data_ptr(), weight.nbytes, mmap.MADV_RANDOM)
    for run in range(runs):
        pages(piece.data_ptr() + run * step, piece.nbytes // runs, mmap.MADV_WILLNEED)
    copy = piece.to(device, torch.float32, copy=True)
    pages(weight.data_ptr(), weight.nbytes, mmap.MADV_NORMAL)
    return copy


def _piece(index: Index | None, file: str, name: str, stored: list[int]) -> tuple[tuple[int, ...], Box]:
    if index is None:
        return tuple(stored), tuple((0, size) for size in stored)
    entry = index[file][name]
    return tuple(entry["shape"]), tuple(itertools.starmap(lambda a, b: (a, b), entry["box"]))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a sha256 over the names, dtypes, shapes and bytes of tensors."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        value = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
