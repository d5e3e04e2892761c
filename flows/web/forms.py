"""The way from a page to a form of Prefect's, filled with an artifact or a recipe's values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from puna.flows.forms import Choices, flow_name, picked, values_of
from puna.flows.program import Flow
from puna.flows.server import Server, Unreachable, read_note
from puna.flows.trace import load_flows, load_stages
from puna.stages.contract import Stage, did_you_mean
from puna.storage import PunaError, Store


def address(store: Store, prefect: str | None, name: str, asked: Mapping[str, str]) -> str:
    """Where the form of the flow or stage `name` is. `asked`: `recipe` and `step` of which it has the values; artifacts by input."""
    what = _named(name)
    note = read_note(store.root)
    if prefect is None or note is None:
        raise PunaError("forms are Prefect's: start `puna up` in place of `puna web`")
    given: dict[str, Any] = {}
    if "recipe" in asked:
        values = asked["recipe"] if isinstance(what, Flow) else values_of(what, asked["recipe"], asked.get("step", what.name))
        if values is None:
            raise PunaError(f"{name}: recipe {asked['recipe']} has no settings of it")
        given["recipe" if isinstance(what, Flow) else "config"] = values
    choices = Choices(store)
    for spec in what.inputs:
        if spec.name in asked:
            shown = next((one for one in choices.of(spec.kind) if picked(one) == asked[spec.name]), asked[spec.name])
            given[spec.name] = [shown] if spec.many else shown
    try:
        asking = {"deployments": {"tags": {"all_": ["puna"]}}, "flows": {"name": {"any_": [name]}}}
        found = Server(str(note["api"]), str(note.get("auth") or "")).ask("POST", "/deployments/filter", asking)
    except Unreachable as error:
        raise PunaError(f"the server does not answer: {error}") from error
    if not found:
        raise PunaError(f"{name}: is not offered yet; in some seconds it is")
    filled = {**found[0]["parameters"], **given} if given else {}
    return f"/v2/deployments/deployment/{found[0]['id']}/run" + (f"?parameters={quote(json.dumps(filled))}" if filled else "")


def _named(name: str) -> Flow | Stage:
    flows = load_flows()
    stages = {flow_name(stage): stage for stage in load_stages().values()}
    found = flows.get(name) or stages.get(name)
    if found is None:
        raise PunaError(f"{name}: no such flow or stage{did_you_mean(name, [*flows, *stages])}")
    return found
