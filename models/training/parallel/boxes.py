"""A training run's state in pieces: one safetensors file per rank, and a JSON index of each file's boxes.

A piece is a box: (start, stop) along each dimension of the whole tensor. Each rank reads the boxes that overlap its own, so any layout can
load, bit for bit, the state of any other. Torch's own checkpoints would contain a pickle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from puna.models.training.boxes import empty, read
from puna.models.training.state import DAMAGE, RECORD, checksum, file_checksum, flush, newest_first, publish, raise_if_disk, read_record

if TYPE_CHECKING:
    from torch import Tensor

    from puna.models.training.parallel.base import Piece
    from puna.models.training.parallel.mesh import Mesh


def save(mesh: Mesh, pieces: Mapping[str, Piece], folder: Path, step: int, tensors: Mapping[str, Tensor], text: str) -> None:
    """Write the checkpoint of `step` under `folder` as `state.save_state` does; all ranks must call this. `tensors`: this rank's boxes;
    `text`: rank 0's JSON record. Raise an error on all ranks if one fails to write."""
    from safetensors.torch import save_file

    final, temporary = folder / f"step-{step:09d}", folder / f".step-{step:09d}.ranks"
    with mesh.saving.together():
        if mesh.index == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    with mesh.saving.together():
        file = f"rank-{mesh.index}.safetensors"
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary / file)
        flush(temporary / file)
        boxes = {name: {"shape": pieces[name].shape, "box": pieces[name].box} for name in tensors}
        note = json.dumps({"file": file, "checksum": file_checksum(temporary / file), "boxes": boxes})
    notes = [json.loads(one) for one in mesh.saving.gather_texts(note)]  # of a shared folder, this rank's view may be outdated
    with mesh.saving.together():
        if mesh.index == 0:
            text = f'{text[:-1]}, "index": {json.dumps({one["file"]: one["boxes"] for one in notes})}}}'  # parsing the record takes time
            sums = {one["file"]: one["checksum"] for one in notes} | {RECORD: checksum(text.encode())}
            (temporary / RECORD).write_text(json.dumps({"record": text, "checksums": sums}), encoding="utf-8")
            flush(temporary / RECORD)
            publish(temporary, final)


def load(
    folder: Path, pieces: Mapping[str, Piece], optional: Mapping[str, Piece], mesh: Mesh, into: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return this rank's pieces of the newest checkpoint under `folder`, and its record; None without a checkpoint. `into`: see `read`.

    Each rank verifies a share of the files and reads boxes from any. Raise an error on all ranks if one finds a file damaged or missing."""
    paths = newest_first(folder)
    if (name := mesh.gather_texts(paths[0].name if paths else "-")[0]) == "-":  # a rank's view of a shared folder may be outdated
        return None
    path = folder / name
    damage = f"{path}: the saved training state is damaged; remove the folder to begin anew"
    try:
        text, checksums = read_record(path)
        record = json.loads(text)
    except DAMAGE as error:
        raise_if_disk(error)
        raise ValueError(damage) from error
    files = sorted(checksums.keys() - {RECORD}, key=lambda name: (len(name), name))  # in the same layout, a rank checks what it reads
    with mesh.together():
        own = [(path / file, checksums[file]) for file in files[mesh.index :: mesh.layout.processes]]
        damaged = any(not file.exists() or file_checksum(file) != given for file, given in own)
    if mesh.agree(damaged):
        raise ValueError(damage)
    index = record.pop("index", None)
    there = set(empty(path, None)) if index is None else {name for boxes in index.values() for name in boxes}
    own_pieces = {**pieces, **{name: piece for name, piece in optional.items() if name in there}}
    with mesh.together():
        tensors = read(path, index, {name: (piece.shape, piece.box) for name, piece in own_pieces.items()}, into)
    return tensors, record
