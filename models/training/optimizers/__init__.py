"""Optimisers by name: a class in a file of this folder, or of another package (`puna.optimizers`)."""

import importlib
import pkgutil

from puna.models.training.optimizers.base import OPTIMIZERS, Group, Optimizer, Updated

__all__ = ["OPTIMIZERS", "Group", "Optimizer", "Updated"]

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_file.name)
