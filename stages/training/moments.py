"""The optimizer's state beside a model: what a training that goes on from it begins with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from puna.storage import Artifact

if TYPE_CHECKING:
    from torch import Tensor

FILE = "optimizer/state.safetensors"
"""Side file of a model artifact; in a folder of its own, which exports leave out."""


def keep_moments(state: dict[str, Tensor], folder: Path) -> None:
    """Write an optimizer's state (`Trainer.tensors`, names with `state.`) beside the model in `folder`."""
    from safetensors.torch import save_file

    file = folder / FILE
    file.parent.mkdir(exist_ok=True)
    save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, file)


def moments(model: Artifact) -> dict[str, Tensor] | None:
    """Return the optimizer's state beside a model; None where its training kept none, as with an imported one."""
    from safetensors.torch import load_file

    return load_file(model.path(FILE)) if FILE in model.manifest.files else None
