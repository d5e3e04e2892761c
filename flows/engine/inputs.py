"""The inputs of a run, parsed from the command line: artifacts of the store, or files outside it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from puna.flows.engine.declare import Flow, Item, input_kind, name_of
from puna.flows.engine.defaults import ADDRESSES, REFUSED
from puna.stages.contract import External, Stage
from puna.stages.contract.declaration import InputSpec
from puna.stages.contract.external import is_named, public
from puna.storage import Artifact, PunaError, Store
from puna.storage.aliases import ALIAS, LONGEST
from puna.storage.schemas import KINDS

IMPORTED = ("model", "documents", "instructions", "prompts", "preferences")  # kinds of artifacts for which an error suggests `puna import`
ROWS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".gz", ".zst")  # suffixes of files that hold rows, and so are not models
COLUMNS = ("text", "html", "url", "date")  # the fields of a page that `--columns` can assign


@dataclass(frozen=True)
class RunInputs:
    """The parsed inputs of a run. `items`: not yet assigned; `named`: by input name; `sources`: artifact key → new source of its rows."""

    items: list[Item]
    named: dict[str, list[Artifact]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.items or self.named)


def is_artifact(text: str) -> bool:
    """True if a text can name an artifact (`KIND/KEY`, 4 or more digits of KEY, `[PROJECT/]NAME@VERSION`) and is not an existing path."""
    kind, slash, key = text.partition("/")
    digits = key if slash else kind
    is_key = (not slash or kind in KINDS) and len(digits) >= 4 and not set(digits) - set("0123456789abcdef")
    return bool(ALIAS.fullmatch(text) or is_key) and not Path(text).exists()


def alias_of(name: str) -> str:
    alias = f"{name}@latest"
    if "/" in name or not ALIAS.fullmatch(alias) or len(alias.encode()) > LONGEST:
        raise PunaError(f"--as {name}: a name has letters, digits, _, - and . only, and {LONGEST} bytes at most, for example smollm2")
    return alias


def parse_inputs(texts: Sequence[str], specs: Sequence[InputSpec], store: Store, where: str) -> RunInputs:
    """Parse `--input` texts. `NAME=ARTIFACT` assigns to the input NAME, else renames the rows' source. Raise PunaError if no input fits."""
    items: list[Item] = []
    named: dict[str, list[Artifact]] = {}
    sources: dict[str, str] = {}
    by_name = {spec.name: spec for spec in specs if spec.kind != "external"}
    for text in texts:
        name, sign, reference = text.partition("=")
        if is_artifact(text):
            items.append(store.check(store.resolve(text)))
        elif sign and name in by_name:
            if not is_artifact(reference):
                raise PunaError(f"--input {text}: {where}: {name} takes no files, {_remedy(reference, [by_name[name]])}")
            named.setdefault(name, []).append(store.check(store.resolve(reference)))
        elif sign and is_artifact(reference):
            artifact = store.check(store.resolve(reference))
            taker = next((spec for spec in specs if spec.sources and spec.kind == artifact.kind), None)
            if taker is None:
                there = ", ".join(f"{spec.name} ({input_kind(spec)})" for spec in by_name.values()) or "none"
                raise PunaError(f"--input {text}: {where} has no input {name!r} that takes an artifact; its inputs are {there}")
            sources[artifact.key] = name
            items.append(artifact)
        elif any(spec.kind == "external" for spec in specs):
            check_address("input", text)
            items += External.resolve(text)
        else:
            raise PunaError(f"{where}: takes no files, {_remedy(text, specs)}")
    names = [item.name for item in items if isinstance(item, External)]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise PunaError(f"two inputs have the name {twice[0]!r}; give each its own: --input NAME=URI")
    files = sorted((item for item in items if isinstance(item, External)), key=lambda item: item.name)
    return RunInputs([*(item for item in items if not isinstance(item, External)), *files], named, sources)


def check_address(what: str, text: str) -> None:
    """Raise PunaError if forms may read only local paths and the text is a remote URL. `what`: the option or field, for the error."""
    uri = text.partition("=")[2] if is_named(text) else text
    scheme, sign, _ = uri.partition("://")
    if os.environ.get(ADDRESSES) == REFUSED and ("::" in uri or (sign and scheme not in ("file", "local"))):
        raise PunaError(f"{what} {public(text)}: forms read only local paths; start `puna up` or `puna web` with --urls to allow others")


def latest(specs: Sequence[InputSpec], store: Store, quiet: bool) -> list[Item]:
    """Return the artifacts of the aliases `INPUT@latest` that exist; print them unless `quiet`. Raise PunaError for an unknown project."""
    aliases = store.aliases()
    artifacts: list[Item] = []
    for spec in specs:
        if f"{spec.name}@latest" in aliases:
            artifacts.append(store.check(store.alias(f"{spec.name}@latest")))
            if not quiet:
                print(f"input {spec.name}: {store.full_name(f'{spec.name}@latest')}, {name_of(artifacts[-1])}")
    if not artifacts and not all(spec.optional for spec in specs):
        store.require_project()
    return artifacts


def given_items(flow: Flow, wanted: RunInputs, store: Store, sample: Callable[[], Sequence[External]], *, quiet: bool) -> list[Item]:
    """Return a run's input items: those in `wanted`, else the sample (if the flow takes files) or the artifacts of `INPUT@latest`."""
    if wanted:
        return wanted.items
    return [*sample()] if flow.takes_files else latest(flow.inputs, store, quiet)


def reads_sample(what: Flow | Stage) -> bool:
    """True if a run without inputs reads the sample: of a flow that takes files first, or of a stage that makes pages of files."""
    return what.takes_files if isinstance(what, Flow) else what.kind == "pages" and any(spec.kind == "external" for spec in what.inputs)


def existing_sample(store: Store) -> list[External]:
    return [item for file in sorted(sample_folder(store.root).glob("*.warc.gz")) for item in External.resolve(str(file))]


def sample_folder(root: Path) -> Path:
    """Return the folder of the sample pages, which a run without inputs reads, in the store at `root`."""
    return root / "sample"


def column_changes(texts: Sequence[str], stage: str) -> list[str]:
    """Convert `--columns` texts (`[INPUT:]WHAT=FIELD[,…]`) into recipe changes for `stage`. Raise PunaError for a malformed text."""
    changes: list[str] = []
    for text in texts:
        name, colon, pairs = text.rpartition(":")
        for pair in pairs.split(","):
            what, sign, column = pair.partition("=")
            if not sign or what not in COLUMNS or not column or "." in name or (colon and not name):
                raise PunaError(f"--columns {text}: write [INPUT:]WHAT=FIELD[,WHAT=FIELD]; WHAT is one of {', '.join(COLUMNS)}")
            field = f"inputs.{name}.{what}" if colon else f"{what}_column"
            changes.append(f"{stage}.{field}={json.dumps(column)}")
    return changes


def _remedy(text: str, specs: Sequence[InputSpec]) -> str:
    """Return advice for an input text that names no artifact: how to import the file, or which artifacts the inputs take."""
    kinds = [spec.kind for spec in specs if spec.kind in IMPORTED]
    if len(kinds) > 1 and Path(text).suffix in ROWS:
        kinds = [kind for kind in kinds if kind != "model"]
    if not kinds:
        accepted = ", ".join(f"{spec.name} ({input_kind(spec)})" for spec in specs) or "nothing"
        return f"so --input {text} must be an artifact: kind/key, or an alias NAME@VERSION; it takes {accepted}"
    name = re.sub(r"\W+", "_", Path(text).stem).strip("_") or "mine"
    commands = " or ".join(f"`puna import {kind} {text} --as {name}`" for kind in dict.fromkeys(kinds))
    return f"so import them first: {commands}, then --input {name}@latest"
