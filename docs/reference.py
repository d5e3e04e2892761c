"""Reference pages on commands, stages, flows, signals and tables, generated from the code when the site is built.

MkDocs calls `on_files` (mkdocs.yml names this file as a hook). `python docs/reference.py FOLDER` writes the pages to a folder.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / ".pkg"))

import pyarrow as pa
import typer

from puna.flows.cli.main import app
from puna.flows.engine.declare import FLOWS
from puna.flows.engine.trace import everything, fields, load_flows, load_stages
from puna.stages.contract import Stage
from puna.stages.contract.declaration import InputSpec
from puna.stages.contract.signals import SIGNALS
from puna.storage.schemas import TABLES
from puna.storage.views import DERIVED, FACTS, MACROS

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines)


def commands() -> str:
    """Return the page of commands with their arguments and options."""
    parts = ["# Commands", "`puna COMMAND --help` shows the same. `--store` or `PUNA_STORE` names a store other than `.puna`."]
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]
        rows = []
        words = []
        for one in command.params:
            if getattr(one, "hidden", False):
                continue
            option = one.param_type_name == "option"
            shown = ", ".join(f"`{word}`" for word in one.opts) if option else f"`{one.metavar or one.name.upper()}`"
            words += [] if option else [one.metavar or one.name.upper()]
            default = one.default if option and one.default not in (None, False, "", [], ()) else ""
            rows.append([shown + (" (several)" if one.multiple else ""), one.help or "", f"`{default}`" if default != "" else ""])
        usage = " ".join(["puna", name, *words, "[OPTIONS]"])
        parts += [f"## {name}", f"`{usage}`", inspect.cleandoc(command.help or "").replace("\n", " ")]
        parts += [table(["option", "meaning", "default"], rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def stages() -> str:
    """Return the page of stages with their inputs, kinds and settings."""
    how = "`puna run STAGE --input … --set FIELD=VALUE`; `puna fields STAGE` gives the settings as JSON schema."
    parts = ["# Stages and their settings", how]
    groups: dict[str, list[Stage]] = {}
    for stage in load_stages().values():
        module = stage.function.__module__.split(".")
        if module[:2] == ["puna", "stages"]:
            groups.setdefault(module[2], []).append(stage)
    for group, members in sorted(groups.items()):
        parts.append(f"## {group}")
        for stage in members:
            parts += [f"### {stage.name}", stage.doc, f"Takes {input_list(stage.inputs)}. Gives `{stage.kind}`."]
            if rows := settings(stage.config.model_json_schema()):
                parts.append(table(["field", "meaning", "values", "default"], rows))
    return "\n\n".join(parts) + "\n"


def input_list(inputs: Iterable[InputSpec]) -> str:
    """Return a phrase that lists the inputs of a stage or flow."""
    inputs_shown = []
    for one in inputs:
        more = ", ".join(word for word, true in (("several", one.many), ("optional", one.optional)) if true)
        inputs_shown.append(f"`{one.name}`: {'files' if one.kind == 'external' else one.kind}{f' ({more})' if more else ''}")
    return ", ".join(inputs_shown) or "nothing"


def settings(schema: dict[str, Any], before: str = "", inside: dict[str, Any] | None = None, seen: tuple[str, ...] = ()) -> list[list[str]]:
    """Return the fields of a JSON schema as rows; fields of a group follow the group's row."""
    definitions = schema.get("$defs", {}) if inside is None else inside
    rows = []
    for name, field in schema.get("properties", {}).items():
        alternatives = [field, *field.get("anyOf", []), *field.get("allOf", [])]
        groups = [ref.rpartition("/")[2] for one in alternatives if (ref := one.get("$ref"))]
        default = json.dumps(field["default"], ensure_ascii=False) if "default" in field else "must be given"
        described = field.get("description") or next((definitions[g].get("description", "") for g in groups if g in definitions), "")
        short = default if len(default) < 60 else "see the fields below" if groups else default[:57] + "…"
        rows.append([f"`{before}{name}`", described, allowed(alternatives), f"`{short}`" if "default" in field else short])
        for group in groups:
            if group in definitions and group not in seen and "properties" in definitions[group]:
                rows += settings(definitions[group], f"{before}{name}.", definitions, (*seen, group))
    return rows


def allowed(alternatives: list[dict[str, Any]]) -> str:
    """Return the types and bounds of a field, from its alternatives in a JSON schema."""
    phrases = []
    for one in alternatives:
        if "enum" in one:
            phrases.append(", ".join(str(value) for value in one["enum"]))
        elif "const" in one:
            phrases.append(str(one["const"]))
        elif "type" in one:
            bounds = [f"{sign} {one[word]}" for word, sign in BOUNDS.items() if word in one]
            phrases.append(" ".join([str(one["type"]).replace("null", "none"), *bounds]))
    return "; ".join(dict.fromkeys(phrases))


def flows() -> str:
    """Return the page of flows with their inputs, steps and settings."""
    load_flows()
    how = "`puna run FLOW --recipe NAME`; `puna fields FLOW` is the schema of its recipes, whose fields are the steps."
    parts = ["# Flows and their steps", how]
    for name, flow in FLOWS.items():
        if flow.function.__module__.startswith("puna.flows"):
            parts += [f"## {name}", inspect.cleandoc(flow.doc), f"Takes {input_list(flow.inputs)}."]
            own_steps = ((field, step.stage) for field, step in fields(flow).items())
            steps = [[f"`{field}`", f"[{stage.name}](stages.md#{stage.name})", stage.kind] for field, stage in own_steps]
            parts.append(table(["field", "stage", "gives"], steps))
            own = [[f"`{s.name}`", s.description, f"`{s.default}`"] for s in everything(flow).settings.values()]
            parts += [table(["setting of the flow", "meaning", "default"], own)] if own else []
    return "\n\n".join(parts) + "\n"


def signals() -> str:
    """Return the page of signals with unit and meaning."""
    load_stages()
    rows = [[f"`{name}`", str(one.meaning), str(one.unit)] for name, one in sorted(SIGNALS.items())]
    lead = "Numbers and words about a document, columns of the tables `signals`; rules compare them with thresholds."
    return f"# Signals\n\n{lead}\n\n{table(['signal', 'meaning', 'unit'], rows)}\n"


def tables() -> str:
    """Return the page of tables with their columns, and of SQL views and macros."""
    parts = ["# Tables", "Each has the column `artifact`, the key of the artifact that holds the row, in [SQL](../questions.md)."]
    for name, schema in (*((n, t.schema) for n, t in TABLES.items()), *FACTS.items()):
        more = "" if name not in TABLES or not TABLES[name].open else " It takes further columns."
        parts += [f"## {name}", f"Sorted by `{', '.join(TABLES[name].key)}`.{more}" if name in TABLES else "Of the catalog."]
        parts.append(table(["column", "type", "meaning", "unit"], [_column(field) for field in schema]))
    parts += ["## Views", table(["view", "shows"], [[f"`{name}`", meaning] for name, (_, _, meaning) in DERIVED.items()])]
    parts += ["## Macros", table(["macro", "gives"], [[f"`{d.partition(' as ')[0]}`", meaning] for _, d, meaning in MACROS.values()])]
    return "\n\n".join(parts) + "\n"


def _column(field: pa.Field) -> list[str]:
    meta = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    return [f"`{field.name}`", f"{field.type}{', may be null' if field.nullable else ''}", meta.get("meaning", ""), meta.get("unit", "")]


PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands, "reference/flows.md": flows, "reference/stages.md": stages, "reference/signals.md": signals,
    "reference/tables.md": tables,
}  # fmt: skip


def escaped(text: str) -> str:
    """Return the text with `<` escaped wherever Markdown would read a tag."""
    return re.sub(r"<(?=[a-zA-Z/!])", "&lt;", text)


def on_files(files: Any, config: Any) -> Any:
    """Add the reference pages to the site's files."""
    from mkdocs.structure.files import File

    for name, write in PAGES.items():
        files.append(File.generated(config, name, content=escaped(write())))
    return files


if __name__ == "__main__":
    for name, write in PAGES.items():
        target = Path(sys.argv[1], name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(escaped(write()), encoding="utf-8")
