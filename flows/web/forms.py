"""The way from a page to a form of Prefect's, filled with an artifact or a recipe's values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from puna.flows.engine.declare import Flow
from puna.flows.prefect.forms import Choices, picked, values_of
from puna.flows.web.start import deployment, offered, server_beside
from puna.storage import PunaError, Store


def address(store: Store, prefect: str | None, name: str, asked: Mapping[str, str]) -> str:
    """Return the address of a form. `asked`: `recipe` and `step` that fill it; artifacts by input."""
    what = offered(name).what
    if prefect is None:
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
    found = deployment(server_beside(store), name)
    filled = {**found["parameters"], **given} if given else {}
    return f"/v2/deployments/deployment/{found['id']}/run" + (f"?parameters={quote(json.dumps(filled))}" if filled else "")
