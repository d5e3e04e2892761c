"""What a person means by an input: an artifact of the store, or files outside it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from puna.flows.program import Item, described, name_of
from puna.stages.contract import External
from puna.stages.contract.declaration import InputSpec
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import KINDS

ALIAS = re.compile(r"[\w-][\w.-]*@[\w-][\w.-]*")
IMPORTED = ("model", "documents", "instructions", "prompts", "preferences")
"""Kinds that `puna import` makes of files."""
ROWS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".gz", ".zst")
"""Endings of files that hold rows, never a model."""
COLUMNS = ("text", "html", "url", "date")
"""What a field of a row may hold."""


def is_artifact(text: str) -> bool:
    """Whether an input means an artifact (`kind/key`, a key, an alias `NAME@VERSION`) rather than files."""
    kind, slash, key = text.partition("/")
    digits = key if slash else kind
    if ALIAS.fullmatch(text):
        return not Path(text).exists()
    return (not slash or kind in KINDS) and len(digits) >= 4 and not set(digits) - set("0123456789abcdef")


def alias_of(name: str) -> str:
    """The alias that `--as NAME` sets; PunaError where that is no name."""
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise PunaError(f"--as {name}: a name has letters, digits, _, - and . only, for example smollm2")
    return f"{name}@latest"


def named_items(texts: Sequence[str], specs: Sequence[InputSpec], store: Store, where: str) -> list[Item]:
    """The artifacts and files that texts mean; PunaError where files are given and none are taken."""
    takes_files = any(spec.kind == "external" for spec in specs)
    found: list[Item] = []
    for text in texts:
        if is_artifact(text):
            found.append(store.checked(store.resolve(text)))
        elif takes_files:
            found += External.resolve(text)
        else:
            raise PunaError(f"{where}: takes no files, {_remedy(text, specs)}")
    names = [item.name for item in found if isinstance(item, External)]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise PunaError(f"two inputs have the name {twice[0]!r}; name them: --input NAME=URI")
    files = sorted((item for item in found if isinstance(item, External)), key=lambda item: item.name)
    return [*(item for item in found if not isinstance(item, External)), *files]


def by_name(texts: Sequence[str], specs: Sequence[InputSpec], store: Store, where: str) -> tuple[list[str], dict[str, list[Artifact]]]:
    """The texts that name no input, and the artifacts of those that do, `NAME=ARTIFACT`, by input; PunaError where none is named so."""
    free: list[str] = []
    found: dict[str, list[Artifact]] = {}
    kinds = {spec.name: spec.kind for spec in specs}
    for text in texts:
        name, sign, reference = text.partition("=")
        takes_artifact = kinds.get(name, "external") != "external"
        if not sign or not (takes_artifact or is_artifact(reference)):
            free.append(text)
        elif not takes_artifact:
            there = ", ".join(f"{spec.name} ({described(spec)})" for spec in specs if spec.kind != "external") or "none"
            raise PunaError(f"--input {text}: {where} has no input {name!r} that takes an artifact; there are {there}")
        elif not is_artifact(reference):
            raise PunaError(f"--input {text}: {where}: {name} takes no files, {_remedy(reference, [s for s in specs if s.name == name])}")
        else:
            found.setdefault(name, []).append(store.checked(store.resolve(reference)))
    return free, found


def latest(specs: Sequence[InputSpec], store: Store, quiet: bool) -> list[Item]:
    """What the aliases `NAME@latest` of the inputs point to."""
    aliases = store.aliases()
    found: list[Item] = []
    for spec in specs:
        if f"{spec.name}@latest" in aliases:
            found.append(store.checked(store.alias(f"{spec.name}@latest")))
            if not quiet:
                print(f"input {spec.name}: {spec.name}@latest, {name_of(found[-1])}")
    return found


def sample_folder(root: Path) -> Path:
    """Where the sample lies that a run without inputs reads, in the store at `root`."""
    return root / "sample"


def column_changes(texts: Sequence[str], stage: str) -> list[str]:
    """`[INPUT:]WHAT=FIELD[,…]` of `--columns` as changes of a recipe: which fields of the rows hold text, html, url, date."""
    changes: list[str] = []
    for text in texts:
        name, colon, pairs = text.rpartition(":")
        for pair in pairs.split(","):
            what, sign, column = pair.partition("=")
            if not sign or what not in COLUMNS or not column or "." in name:
                raise PunaError(f"--columns {text}: write [INPUT:]WHAT=FIELD[,WHAT=FIELD]; WHAT is one of {', '.join(COLUMNS)}")
            field = f"inputs.{name}.{what}" if colon else f"{what}_column"
            changes.append(f"{stage}.{field}={json.dumps(column)}")
    return changes


def _remedy(text: str, specs: Sequence[InputSpec]) -> str:
    """How the files at `text` become an artifact that is taken."""
    kinds = [spec.kind for spec in specs if spec.kind in IMPORTED]
    if len(kinds) > 1 and Path(text).suffix in ROWS:
        kinds = [kind for kind in kinds if kind != "model"]
    if not kinds:
        wanted = ", ".join(f"{spec.name} ({described(spec)})" for spec in specs) or "nothing"
        return f"so --input {text} must be an artifact: kind/key, or an alias NAME@VERSION; it takes {wanted}"
    name = re.sub(r"\W+", "_", Path(text).stem).strip("_") or "mine"
    commands = " or ".join(f"`puna import {kind} {text} --as {name}`" for kind in dict.fromkeys(kinds))
    return f"so import them first: {commands}, then --input {name}@latest"
