"""Synchronization of a Prefect server's deployments with Puna's flows, stages and store. Schedules that users set are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect import Flow as PrefectFlow

from puna.flows.engine.rounds import due, load_trigger
from puna.flows.prefect.forms import Choices, Offer, defaults, description, schema
from puna.flows.server.client import Server
from puna.storage import Store

TAG = "puna"
PAGE = 200
UNFINISHED = ["RUNNING", "PENDING", "CANCELLING"]
STOPPED = "stopped; finished steps are kept"
OUTCOMES = {"finished": ("COMPLETED", None), "failed": ("FAILED", None), "crashed": ("CRASHED", None), "stopped": ("CANCELLED", STOPPED)}
"""Outcome of a run in the store's log → Prefect's state and message for the run."""
SETTLED_AFTER = 8  # deployments to publish (slow on a busy server) between the first and second check for lost runs
SCHEDULE = "puna-serve"  # the slug of the schedule that `--cron` sets


class DeploymentSync:
    """The synchronization of a server's deployments with a store. `ids`: form's title → deployment's id. `linked`: `puna up` runs it."""

    def __init__(self, store: Store, server: Server, offered: Sequence[tuple[Offer, PrefectFlow[Any, Any]]], *, linked: bool) -> None:
        self.ids: dict[str, UUID] = {}
        self._store, self._server, self._linked = store, server, linked
        self._offered = offered
        self._plain = {offer.title: flow.parameters.model_dump(exclude_unset=True) for offer, flow in offered}
        self._lasting = {
            offer.title: {
                "description": description(offer, linked=linked), "tags": [TAG, offer.group],
                "parameters": {**defaults(offer), "store": store.uri}, "entrypoint": _entrypoint(offer), "enforce_parameter_schema": True,
            }
            for offer, _ in offered
        }
        self._versions: dict[str, str] = {}
        self._seen: object = None
        self._lost: dict[str, int] = {}

    def publish(self, crons: Mapping[str, str], served: Callable[[str, UUID], object]) -> None:
        """Create or update all deployments, and end runs whose process died. `crons`: cron expressions by `[PROJECT/]NAME`, which replace
        those of an earlier `puna serve`; schedules that users set are kept. `served` is called with each deployment's title and id as soon
        as the server has the deployment."""
        self._settle(starting=True)
        there = self._all("deployments", {"deployments": {"tags": {"all_": [TAG]}}})
        choices = Choices(self._store, everywhere=True)
        self._seen = self._state()
        for number, (offer, _) in enumerate(self._offered):
            if number == SETTLED_AFTER:
                self._settle(starting=True)
            same = [one for one in there if one["entrypoint"] == _entrypoint(offer)]
            existing = next((one for one in same if one["name"] == offer.title), None)
            if existing is None:
                existing = self._create(offer, choices, [schedule for one in same for schedule in one["schedules"]])
                for one in same:
                    self._server.insist("DELETE", f"/deployments/{one['id']}")
            self.ids[offer.title] = UUID(existing["id"])
            self._versions[offer.title] = str(existing["version"])
            self._bring(offer, choices)
            own = {name.rpartition("/")[0]: cron for name, cron in crons.items() if name.rpartition("/")[2] == offer.flow}
            if own or not self._linked:
                self._schedule(existing, own)
            served(offer.title, self.ids[offer.title])

    def refresh(self) -> None:
        """Set the final state of runs whose process died. After a change of the store, start due rounds and update the deployments."""
        self._settle()
        now = self._state()
        if now == self._seen:
            return
        self._begin_round()
        choices = Choices(self._store, everywhere=True)
        for offer, _ in self._offered:
            self._bring(offer, choices)
        self._seen = now

    def _state(self) -> object:
        """Return the state that forms and automatic rounds depend on: the number of artifacts, the aliases, and each project's trigger."""
        waits = [load_trigger(self._store.within(project)) for project in self._store.projects()]
        return len(self._store.committed_artifacts()), tuple(sorted(self._store.aliases().items())), waits

    def _begin_round(self) -> None:
        """Start the flow `round` in each project with enough new preferences, once for each set of preferences."""
        for project in self._store.projects():
            if (round_due := due(self._store.within(project))) is None:
                continue
            once, trigger = round_due
            offer = next(offer for offer, _ in self._offered if offer.flow == "round")
            parameters = {**defaults(offer), "store": self._store.uri, "recipe": trigger.recipe, "project": project}
            body = {"parameters": parameters, "state": {"type": "SCHEDULED"}, "idempotency_key": once, "tags": [TAG, "new preferences"]}
            self._server.insist("POST", f"/deployments/{self.ids[offer.title]}/create_flow_run", body)

    def _all(self, kind: str, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all of the server's objects of a kind that a filter accepts, page by page."""
        found: list[dict[str, Any]] = []
        while True:
            page = self._server.insist("POST", f"/{kind}/filter", {**wanted, "limit": PAGE, "offset": len(found)})
            found += page
            if len(page) < PAGE:
                return found

    def _content(self, offer: Offer, choices: Choices) -> dict[str, Any]:
        form = schema(self._plain[offer.title], offer.what.inputs, choices)
        content = {**self._lasting[offer.title], "parameter_openapi_schema": form}
        return {**content, "version": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]}

    def _create(self, offer: Offer, choices: Choices, schedules: list[dict[str, Any]]) -> dict[str, Any]:
        flow = self._server.insist("POST", "/flows/", {"name": offer.flow})["id"]
        fields = ("schedule", "active", "max_scheduled_runs", "parameters", "slug")
        moved = [{name: one[name] for name in fields if one.get(name) is not None} for one in schedules]
        body = {"name": offer.title, "flow_id": flow, "schedules": moved}
        deployment: dict[str, Any] = self._server.insist("POST", "/deployments/", {**body, **self._content(offer, choices)})
        return deployment

    def _bring(self, offer: Offer, choices: Choices) -> None:
        """Update a deployment if its content has changed. Prefect then removes the deployment's scheduled runs for some seconds."""
        content = self._content(offer, choices)
        if content["version"] != self._versions.get(offer.title):
            self._server.insist("PATCH", f"/deployments/{self.ids[offer.title]}", content)
            self._versions[offer.title] = content["version"]

    def _schedule(self, deployment: dict[str, Any], crons: Mapping[str, str]) -> None:
        """Replace all schedules that `--cron` has set on a deployment. `crons`: cron expressions by project (empty: no project)."""
        path = f"/deployments/{deployment['id']}/schedules"
        for one in deployment["schedules"]:
            if one.get("slug") == SCHEDULE or str(one.get("slug")).startswith(f"{SCHEDULE}-"):
                self._server.insist("DELETE", f"{path}/{one['id']}")
        for project, cron in crons.items():
            schedule: dict[str, Any] = {"schedule": {"cron": cron, "timezone": "UTC"}, "active": True}
            own = {"slug": f"{SCHEDULE}-{project}", "parameters": {"project": project}} if project else {"slug": SCHEDULE}
            self._server.insist("POST", path, [schedule | own])

    def _settle(self, *, starting: bool = False) -> None:
        """Set the final state of Prefect runs and task runs whose process ended without reporting it, at the second check in a row: after
        the first, the process may still report. `starting`: if `linked`, also schedule pending runs again."""
        lost: dict[str, int] = {}
        for run in self._all("flow_runs", {"flow_runs": {"state": {"type": {"any_": UNFINISHED}}}}):
            name = (run.get("labels") or {}).get("puna.run")
            if not isinstance(name, str) or name not in self._store.runs():
                if starting and self._linked and run["state_type"] == "PENDING" and TAG in run["tags"] and self._twice(run["id"], lost):
                    self._end(f"/flow_runs/{run['id']}", "SCHEDULED", "its process ended before the run began; the run is scheduled again")
                continue
            log = self._store.log(name)
            if log.state != "at work" and self._twice(run["id"], lost):
                state, message = OUTCOMES["stopped" if run["state_type"] == "CANCELLING" else log.state]
                self._end(f"/flow_runs/{run['id']}", state, message or log.error or f"run {name} {log.state}")
        open_steps = {
            "flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}, "tags": {"all_": [TAG]}},
            "task_runs": {"state": {"type": {"any_": UNFINISHED}}},
        }  # fmt: skip
        for step in self._all("task_runs", open_steps):
            if self._twice(step["id"], lost):
                self._end(f"/task_runs/{step['id']}", "CRASHED", "its run has ended")
        self._lost = lost

    def _twice(self, name: str, lost: dict[str, int]) -> bool:
        lost[name] = self._lost.get(name, 0) + 1
        return lost[name] > 1

    def _end(self, path: str, state: str, message: str) -> None:
        self._server.insist("POST", f"{path}/set_state", {"state": {"type": state, "message": message}, "force": True})


def _entrypoint(offer: Offer) -> str:
    return f"puna.flows.prefect.deployments.flow_{offer.flow}"
