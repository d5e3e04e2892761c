"""Optimizers by name: classes in this folder's files, and in other packages (entry points `puna.optimizers`)."""

import importlib
import pkgutil

from puna.models.training.optimizers.base import OPTIMIZERS, Group, Optimizer, Updated

__all__ = ["OPTIMIZERS", "Group", "Optimizer", "Updated"]

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_file.name)
