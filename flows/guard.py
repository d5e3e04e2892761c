"""Who may ask: programs, and the pages of this site; not the pages of other sites that somebody has open."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

READS = ("GET", "HEAD", "OPTIONS")


class OwnSite:
    """An application that refuses what other sites' pages send, and, where no password protects it, names of other machines.

    A browser tells which site's page sends a form. A name that another site has made to mean this machine (DNS rebinding) would
    make its pages this site's own.
    """

    def __init__(self, app: ASGIApp, *, protected: bool) -> None:
        self._app, self._protected = app, protected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse with 403."""
        if scope["type"] in ("http", "websocket"):
            said = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            # A socket's answers are not kept from pages of other sites as those of a GET are.
            trouble = self._trouble(said, scope.get("method", "SOCKET"))
            if trouble and scope["type"] == "http":
                await PlainTextResponse(trouble, 403)(scope, receive, send)
                return
            if trouble:
                await send({"type": "websocket.close", "code": 1008})
                return
        await self._app(scope, receive, send)

    def _trouble(self, said: dict[str, str], method: str) -> str | None:
        host = said.get("host", "")
        if not self._protected and not _here(urlsplit(f"//{host}").hostname or ""):
            return f"{host}: use the address that was printed, or set --auth USER:PASSWORD to be reached by names"
        if method in READS:
            return None
        origin = said.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc != host
        return "sent by the page of another site" if foreign or said.get("sec-fetch-site") in ("cross-site", "same-site") else None


def _here(name: str) -> bool:
    """Whether a host's name can only mean this machine, or is an address, which nobody can make to mean another one."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
