"""The web application that shows a store: access checks, the pages that this package's modules register, and error pages."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response

from puna.flows.server.guard import Bounded, Password
from puna.flows.web.bounded import Asker
from puna.flows.web.frame import REGISTRY, Site, health, invalid, problem, style
from puna.storage import PunaError, Store

HERE = Path(__file__).parent
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'self'; base-uri 'none'"
Next = Callable[[Request], Awaitable[Response]]


def application(store: Store, *, prefect: str | None, auth: str, urls: bool = False) -> FastAPI:
    """Return a store's web application. `prefect`: Prefect's URL, if any; `auth`: USER:PASSWORD or empty; `urls`: forms may name URLs."""
    store = store.reading()
    app = FastAPI(openapi_url=None)
    site = app.state.site = Site(store, prefect, Asker(store, urls=urls))

    @app.middleware("http")
    async def guard_page(request: Request, further: Next) -> Response:
        """Add headers that restrict what a page may load, unless the page sets its own."""
        answer = await further(request)
        answer.headers.setdefault("content-security-policy", POLICY)
        answer.headers.setdefault("x-content-type-options", "nosniff")
        return answer

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_middleware(Bounded)
    app.add_middleware(Password, auth=auth)
    app.add_api_route("/health", health)
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for entry in REGISTRY:
        app.include_router(entry.router)

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in ("style.css", "web.js"):
            raise PunaError(f"{name}: no such file")
        kind, content = ("text/css", style()) if name == "style.css" else ("text/javascript", (HERE / name).read_text(encoding="utf-8"))
        return Response(content, media_type=kind, headers={"cache-control": "max-age=60"})

    @app.exception_handler(PunaError)
    def on_error(request: Request, error: PunaError) -> Response:
        return HTMLResponse(site.page("This did not work", problem(str(error))), status_code=404)

    @app.exception_handler(404)
    def missing(request: Request, error: Exception) -> Response:
        return on_error(request, PunaError(f"{request.url.path}: there is no such page"))

    @app.exception_handler(Exception)
    def on_failure(request: Request, error: Exception) -> Response:
        message = f"{type(error).__name__}: {error}. This is an error in Puna; the server printed a traceback. Go back and try again."
        return HTMLResponse(site.page("This did not work", problem(message)), status_code=500)

    return app
