"""Attacks by untrusted parties (hostile data, model files, templates and requests), and counts of those that do harm.

    PYTHONPATH=.pkg python tests/benchmarks/attacks.py --json [--requests 1000]

`code_from_data`: functions that a prompt's verifier can name although nobody allowed them. `strangers_harmed`: hostile requests to Puna's
pages that fail, are answered to another site, change the store, fetch an address or end the server; `cross_site_effects`: those of these
requests that another site's page sends. `answers_ended`: requests to a model that end other users' answers. `model_files_accepted`,
`adapters_merged`, `texts_encoded` and `templates_rendered`: hostile files, adapters, texts for hostile tokenizers, and chat templates that
are not refused within 2 s of CPU time. `rot_committed_wrong`: flipped bits of committed files from which a stage commits a wrong result;
`rot_raw_errors`: flipped bits that end in an error that does not name the artifact. `sandbox_over_limit`: programs that hold memory that
their limit does not count. `tests_fooled`: hostile answers that pass a test.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import RedirectResponse
from starlette.routing import Route

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from puna.flows.server.guard import PAGES, Bounded, OwnSite  # noqa: E402
from puna.flows.web import application  # noqa: E402
from puna.stages import plugins  # noqa: E402
from puna.stages.contract import execute  # noqa: E402
from puna.stages.prompts.prompts import PromptsConfig, prompts  # noqa: E402
from puna.storage import Store  # noqa: E402
from tests.reliability.cases_rot import rot_cases  # noqa: E402
from tests.security import cases_code, cases_doors, cases_fooled, cases_models, cases_verify  # noqa: E402

LIMIT = 2.0
"""CPU seconds within which a hostile file or template must be refused."""


def code_from_data(folder: Path) -> dict[str, int]:
    cases_code.write_modules(folder)
    sys.path.insert(0, str(folder))
    plugins.add("kind_module")
    return {"code_from_data": len(set(cases_code.accepted(folder))), "code_cases": len(cases_code.FUNCTIONS)}


def requests(folder: Path, count: int) -> dict[str, int]:
    store = Store.open(folder)
    execute(prompts, PromptsConfig(tasks=[{"task": "chain_sum"}], train=5, heldout=2), {}, store)

    def files() -> list[str]:
        return sorted(str(path) for path in store.root.rglob("*") if path.name != "index.jsonl" and ".lock" not in path.name)

    app = FastAPI(openapi_url=None)
    app.mount("/puna", application(store, prefect=None, auth=""))
    app.router.routes.insert(0, Route("/", lambda _: RedirectResponse("/puna/")))
    with cases_doors.serving(OwnSite(Bounded(app), protected=False)) as port, cases_doors.trapped() as (trap, fetched):
        harm = cases_doors.harm_done(
            port, cases_doors.hostile_requests(1, count, port, trap=trap), health="/puna/health", effects=lambda: (files(), len(fetched)),
            linked=lambda path: PAGES.fullmatch(path.partition("?")[0]) is not None,
        )  # fmt: skip
    for example in harm.examples:
        print(example, file=sys.stderr)
    return {"requests": harm.requests, "strangers_harmed": harm.total, "cross_site_effects": harm.crossed + harm.effects}


def models(folder: Path) -> dict[str, int]:
    return {
        "answers_ended": cases_models.answers_ended(),
        "model_files_accepted": cases_models.model_files_accepted(folder, LIMIT),
        "adapters_merged": cases_models.adapters_merged(folder, LIMIT),
        "texts_encoded": cases_models.texts_encoded(folder, LIMIT),
        "templates_rendered": cases_models.templates_rendered(LIMIT),
    }


def rot(folder: Path, flips: int) -> dict[str, int]:
    wrong, raw = rot_cases(folder, flips)
    return {"rot_flips": flips, "rot_committed_wrong": wrong, "rot_raw_errors": raw}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the attacks that do harm.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--requests", type=int, default=1000, help="hostile requests")
    parser.add_argument("--flips", type=int, default=200, help="flipped bits")
    options = parser.parse_args()
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / name for name in ("code", "store", "models", "rot")]
        for place in places:
            place.mkdir()
        # This runs before the requests, whose child processes add their CPU time when they end.
        found |= models(places[2])
        found |= code_from_data(places[0]) | requests(places[1], options.requests)
        found |= rot(places[3], options.flips) | {"sandbox_over_limit": cases_verify.sandbox_over_limit()}
        found |= {"tests_fooled": cases_fooled.tests_fooled(), "hostile_answers": len(cases_fooled.HOSTILE)}
    print(json.dumps(found) if options.json else "\n".join(f"{name:24s}{value:8d}" for name, value in found.items()))


if __name__ == "__main__":
    main()
