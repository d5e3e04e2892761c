"""An HTTP client of a Prefect server that does not import Prefect; and the file in a store that names the server of `puna up`."""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from puna.storage import PunaError, Store

NOTE = "serve.json"
BUSY = (429, 503)  # HTTP statuses of an overloaded Prefect server on SQLite


class Unreachable(Exception):
    """An error: a server does not answer or is busy. A later attempt may succeed."""


def loopback(host: str) -> bool:
    """True if the host is `localhost` or a loopback address, which only this machine can reach."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def opener(url: str) -> urllib.request.OpenerDirector:
    """Return an opener for a URL. It uses the environment's proxies unless the server is on this machine."""
    here = loopback(urllib.parse.urlsplit(url).hostname or "")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if here else []))


@dataclass(frozen=True)
class Server:
    """A Prefect server. `url`: URL of its API; `auth`: USER:PASSWORD, if required; `key`: API key of a hosted server."""

    url: str
    auth: str = ""
    key: str = ""

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 10.0) -> Any:
        """Return the server's answer. Raise `Unreachable` if it is busy or does not answer, PunaError if it refuses the request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, {"content-type": "application/json"}, method=method)
        if self.auth:
            request.add_header("authorization", "Basic " + base64.b64encode(self.auth.encode()).decode())
        elif self.key:
            request.add_header("authorization", f"Bearer {self.key}")
        try:
            with opener(self.url).open(request, timeout=timeout) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code in BUSY:
                raise Unreachable(str(error)) from error
            body_text = error.read(2000).decode("utf-8", "replace")
            raise PunaError(f"{self.url}: {method} {path} was refused ({error.code}): {body_text}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # no answer, an incomplete answer, or not HTTP
            raise Unreachable(str(error)) from error

    def insist(self, method: str, path: str, body: Any = None) -> Any:
        """Return the server's answer; try up to six times while it is busy or does not answer. Raise PunaError after that, or at once if it
        refuses the request. `body` needs an idempotency key if the request must not be repeated."""
        for wait in (0.2, 0.5, 1.0, 2.0, 4.0, None):
            try:
                return self.ask(method, path, body, timeout=60.0)
            except Unreachable as error:
                if wait is None:
                    raise PunaError(f"{self.url} does not answer: {error}") from error
                time.sleep(wait)

    def trouble(self, timeout: float = 5.0) -> str | None:
        """Return the reason why the server cannot be used; None if it can."""
        try:
            self.ask("GET", "/health", timeout=timeout)
        except (Unreachable, PunaError) as error:
            return str(error)
        return None

    def wait_until_ready(self, seconds: float) -> str | None:
        """Wait until the server answers, and return None; after `seconds`, return the reason why it does not answer."""
        deadline = time.monotonic() + seconds
        while (trouble := self.trouble()) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        return trouble

    def environment(self) -> dict[str, str]:
        """Return the environment variables that tell a process which Prefect server to use; the API key is left out."""
        return {"PREFECT_API_URL": self.url, **({"PREFECT_API_AUTH_STRING": self.auth} if self.auth else {})}


def from_environment() -> Server | None:
    """Return the server that PREFECT_API_URL names, whether it answers or not; None if the variable is not set."""
    url = os.environ.get("PREFECT_API_URL")
    return Server(url, os.environ.get("PREFECT_API_AUTH_STRING", ""), os.environ.get("PREFECT_API_KEY", "")) if url else None


def named_server() -> Server | None:
    """Return the server that PREFECT_API_URL names, None if the variable is not set. Raise PunaError if the server does not answer."""
    server = from_environment()
    if server is not None and (trouble := server.trouble()) is not None:
        raise PunaError(f"PREFECT_API_URL={server.url}: no Prefect server answers there ({trouble}); start one, or unset the variable")
    return server


def server_of(store: Store) -> Server | None:
    """Return the server at PREFECT_API_URL (PunaError if it does not answer), else the server of a running `puna up`, else None."""
    server = named_server()
    if server is not None:
        return server
    noted = read_note(store.root)
    if noted is None:
        return None
    remembered = Server(str(noted["api"]), str(noted.get("auth") or ""))
    return remembered if remembered.trouble(1.0) is None else None


def read_note(root: Path) -> dict[str, Any] | None:
    """Return the note that `puna up` wrote into the store's folder: `url`, `api`, `auth`, `pid`; None without a valid note."""
    try:
        note = json.loads((root / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and "api" in note else None


def write_note(root: Path, note: dict[str, Any]) -> None:
    """Write the note into the store's folder, readable only by the file's owner."""
    temporary = root / f".{NOTE}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(note, file)
    os.replace(temporary, root / NOTE)


def remove_note(root: Path) -> None:
    with contextlib.suppress(OSError):
        (root / NOTE).unlink()


def end_with(parent: IO[bytes]) -> None:
    """Send this process SIGTERM when the parent process, which holds the other end of the pipe `parent`, is gone."""

    def wait() -> None:
        while os.read(parent.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
