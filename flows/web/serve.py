"""The servers behind `puna up`, `puna web` and `puna annotate`: Prefect's API and UI, Puna's own pages, and the worker."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from puna.flows.engine.defaults import ADDRESSES, ALLOWED, REFUSED, SERVED, prepare
from puna.flows.server import guard
from puna.flows.server.client import Server, read_note, remove_note, write_note
from puna.flows.server.guard import Bounded, OwnSite, Password, check_auth
from puna.flows.web import application
from puna.flows.web.bounded import end_children
from puna.storage import PunaError, Store
from puna.storage.store import explain_write_errors

if TYPE_CHECKING:
    from puna.flows.web.annotate import Desk

STOP_SECONDS = 30.0  # seconds that runs in progress have to end and to report their end
BODY_BYTES = 32 << 20  # maximum bytes of a request's body to Prefect's API, which takes whole artifacts and batches of logs
LINE = 200  # maximum length of a log line of Prefect's services
STEADY_SECONDS = 60.0  # minimum lifetime of a worker, in seconds, after which it restarts in 1 s; after shorter lives the wait doubles


def up(uri: str, host: str, port: int, limit: int, auth: str, urls: bool = False) -> None:
    """Serve a store's pages, Prefect and the worker until stopped; create a missing store. If another `puna up` serves the store, print its
    address and return. `limit`: maximum number of runs at once. `urls`: forms may name inputs by URL. Raise PunaError if the port is taken,
    or if other machines could reach the server and `auth` is empty; no store is created then."""
    began = time.perf_counter()
    check_auth(host, auth)
    try:
        store = Store.existing(uri)
    except PunaError:
        guard.listening(host, port).close()
        store = Store.open(uri)
    with explain_write_errors(store.uri), _alone(store.root) as alone:
        if not alone:
            note = read_note(store.root)
            where = f"at {note['url']}" if note else "and has no address yet"
            print(f"puna is up already for {store.uri}, {where}")
            return
        with guard.listening(host, port) as listening:
            url = guard.address(host, listening)
            server = Server(f"{url}/api", auth)
            _configure(store, url, server)
            # For the worker, which starts the runs that forms request.
            os.environ |= {ADDRESSES: ALLOWED if urls else REFUSED, SERVED: store.uri}
            worker = Worker(store, server, limit)
            # Start now: the worker imports its modules while the server does, and then waits for the server.
            worker.start()
            try:
                app = _application(store, url, auth, urls)
                served = _Served(_config(app, auth, BODY_BYTES), worker)
                served.ready = lambda: _ready(store, url, server, began)
                # After the server has ended, uvicorn raises the signal again.
                with contextlib.suppress(KeyboardInterrupt):
                    asyncio.run(served.serve(sockets=[listening]))
            finally:
                end_children()
                remove_note(store.root)
                worker.stop()
        print("puna is down", flush=True)


def _ready(store: Store, url: str, server: Server, began: float) -> None:
    write_note(store.root, {"url": url, "api": server.url, "auth": server.auth, "pid": os.getpid()})
    print(f"puna is up after {time.perf_counter() - began:.1f} s, for {store.uri}; Ctrl-C ends it")
    print(f"  {url}/puna   runs, artifacts, questions\n  {url}/       Prefect: forms, schedules, run records", flush=True)


def pages(store: Store, host: str, port: int, auth: str, urls: bool = False) -> None:
    """Serve only Puna's own pages, until stopped. `urls`: plans may read inputs that are not local paths. Raise PunaError as `up` does."""
    check_auth(host, auth)
    with guard.listening(host, port) as listening:
        url = guard.address(host, listening)
        app = FastAPI(openapi_url=None)
        app.mount("/puna", application(store, prefect=None, auth=auth, urls=urls))
        app.router.routes.insert(0, Route("/", lambda _: RedirectResponse("/puna/")))
        print(f"{url}/puna   runs, artifacts and questions of {store.uri}; Ctrl-C ends", flush=True)
        try:
            asyncio.run(uvicorn.Server(_config(app, auth)).serve(sockets=[listening]))
        finally:
            end_children()


def judging(desk: Desk, host: str, port: int, auth: str) -> None:
    from puna.flows.web.annotate import LINKED, desk_application

    with guard.listening(host, port) as listening:
        print(f"{len(desk.order):,} pairs of {desk.answers.id}: {guard.address(host, listening)}; Ctrl-C ends and saves", flush=True)
        door = OwnSite(Password(Bounded(desk_application(desk)), auth), protected=bool(auth), pages=LINKED, asking=None)
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again, before the judgements are saved
            uvicorn.Server(guard.configuration(door)).run(sockets=[listening])


def _config(app: FastAPI, auth: str, body: int = guard.BODY_BYTES) -> uvicorn.Config:
    return guard.configuration(OwnSite(Password(Bounded(app, body), auth, bodies=True), protected=bool(auth)))


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[bool]:
    """Yield True if this is the only `puna up` of the store, and keep others out within the context; else yield False."""
    with (root / "serve.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _configure(store: Store, url: str, server: Server) -> None:
    """Set Prefect's settings for this process and its worker, before Prefect is imported."""
    prepare(store.root, terminal="ERROR")
    home = Path(os.environ["PREFECT_HOME"])
    os.environ.update(server.environment())
    os.environ.update(
        # A relative URL, so that the browser asks the page's own host under any name. CORS keeps other sites' pages out.
        PREFECT_UI_API_URL="/api",
        PREFECT_UI_URL=f"{url}/v2",
        PREFECT_SERVER_CORS_ALLOWED_ORIGINS=url,
        PREFECT_UI_STATIC_DIRECTORY=str(home / "ui"),
    )
    os.environ.setdefault("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", "prefect.server.concurrency.lease_storage.filesystem")
    if server.auth:
        os.environ["PREFECT_SERVER_API_AUTH_STRING"] = server.auth


def _application(store: Store, url: str, auth: str, urls: bool) -> FastAPI:
    """Return Prefect's application with Puna's pages mounted at `/puna`."""
    from prefect.server.api.server import create_app

    app = create_app(final=True)
    for route in app.router.routes:
        if isinstance(route, Mount) and isinstance(route.app, FastAPI):
            route.app.add_exception_handler(RequestValidationError, _invalid)
    # Before the UI, which answers all other paths.
    app.router.routes.insert(0, Mount("/puna", application(store, prefect=url, auth=auth, urls=urls)))
    app.router.routes.insert(0, Route("/puna", lambda _: RedirectResponse("/puna/")))
    return app


async def _invalid(request: Request, error: Exception) -> Response:
    """Answer an invalid request as Prefect does, without repeating a body that JSON cannot represent."""
    from prefect.server.api.server import validation_exception_handler

    assert isinstance(error, RequestValidationError)
    try:
        return await validation_exception_handler(request, error)
    except ValueError:  # half a surrogate pair, or an infinite number
        return JSONResponse({"exception_message": "Invalid request received: the body is not plain JSON."}, 422)


def _brief(record: logging.LogRecord) -> bool:
    """Cut a log record of Prefect's services to one line, and return True. These services retry, so their tracebacks do not help."""
    if record.name.startswith("prefect.server"):
        why = f": {record.exc_info[1]}" if record.exc_info and record.exc_info[1] else ""
        record.msg, record.args = f"{record.getMessage()}{why}".partition("\n")[0][:LINE], ()
        record.exc_info = record.exc_text = None
    return True


class _Served(uvicorn.Server):
    """A web server that stops the worker before itself, so that runs can still report their end to the server."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker
        self._ending = False
        self.ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, shorten Prefect's log records, and call `ready` if it started."""
        await super().startup(sockets)
        for handler in logging.getLogger().handlers:  # Prefect has set up its own by now
            handler.addFilter(_brief)
        if self.started and not self._ending:
            self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the worker, then the server, at the first signal; stop the server at once at the second."""
        if self._ending:
            super().handle_exit(sig, frame)
            return
        self._ending = True
        print("\nstopping: runs in progress end first; finished steps are kept", flush=True)

        def end() -> None:
            self._worker.stop()
            uvicorn.Server.handle_exit(self, sig, frame)

        threading.Thread(target=end, daemon=True).start()


class Worker:
    """The child process that publishes the forms of flows and stages and starts runs; restarted if it ends by itself."""

    def __init__(self, store: Store, server: Server, limit: int) -> None:
        # The worker runs in a session of its own: Ctrl-C reaches only this process, which ends the worker in order.
        self._command = [sys.executable, "-m", "puna.flows.cli.main", "serve", "--store", store.uri, "--limit", str(limit), "--supervised"]
        self._environment = {**os.environ, **server.environment()}
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        self._begin()
        threading.Thread(target=self._watch, daemon=True).start()

    def _begin(self) -> subprocess.Popen[bytes]:
        # The worker ends when its standard input closes, which happens even if this process is killed.
        self._process = subprocess.Popen(self._command, env=self._environment, stdin=subprocess.PIPE, start_new_session=True)
        return self._process

    def _watch(self) -> None:
        wait, process = 1.0, self._process
        assert process is not None
        while True:
            began = time.monotonic()
            code = process.wait()
            if self._stopping.is_set():
                return
            wait = 1.0 if time.monotonic() - began > STEADY_SECONDS else min(2 * wait, 60.0)
            status = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            print(f"the worker that starts runs ended ({status}); it restarts in {wait:.0f} s", file=sys.stderr, flush=True)
            if self._stopping.wait(wait):
                return
            with self._lock:
                if self._stopping.is_set():
                    return
                process = self._begin()

    def stop(self) -> None:
        """Ask the worker to end itself and its runs; after `STOP_SECONDS`, kill the worker's process group."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
