"""Artifacts, manifests, aliases, and the catalog that DuckDB queries."""

from puna.storage.artifact import Artifact
from puna.storage.errors import PunaError, errors_at
from puna.storage.manifest import InputRecord, Manifest
from puna.storage.parts import Part
from puna.storage.store import Store
from puna.storage.work import Identity, Work

__all__ = ["Artifact", "Identity", "InputRecord", "Manifest", "Part", "PunaError", "Store", "Work", "errors_at"]
