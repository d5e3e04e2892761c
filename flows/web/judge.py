"""The page on which people judge answers, of every artifact of answers that is asked for: `puna annotate` inside these pages."""

from __future__ import annotations

from fastapi.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from puna.flows.web.annotate import Desk, application, prompts_of
from puna.storage import Store

KEPT = 8
"""Desks whose pairs are held in memory."""


class Judging:
    """Answers `/[PROJECT~]KEY/…` with the desk of the answers of that key, whose judgements are the project's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._desks: dict[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on to its desk; PunaError where there are no such answers, or nothing in them to compare."""
        key, slash, _ = scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/").partition("/")
        if not slash:
            return await RedirectResponse(f"{scope['path']}/")(scope, receive, send)
        if key not in self._desks:
            self._desks[key] = await run_in_threadpool(self._opened, key)
            while len(self._desks) > KEPT:
                del self._desks[next(iter(self._desks))]
        await self._desks[key]({**scope, "root_path": f"{scope.get('root_path', '')}/{key}"}, receive, send)

    def _opened(self, name: str) -> ASGIApp:
        project, _, key = name.rpartition("~")
        store = self._store.within(project)
        answers = store.checked(store.resolve(f"answers/{key}"))
        # Who may ask, and from which page, is the outer application's to say.
        return application(Desk(store, answers, prompts_of(store, answers)))
