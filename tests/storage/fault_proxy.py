"""An HTTP proxy that fails like object stores and networks do, at random or for chosen requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

FAULTS = ("429", "500", "503", "reset", "lost", "cut", "flip")
"""Refusals; the connection ends before the request is processed (reset), after it was processed (lost), or within the body (cut); a flipped
bit in the body."""


@dataclass
class FaultProxy:
    """A proxy to a server on loopback. `rate`: share of the requests that meet one of `faults`."""

    upstream: int
    rate: float = 0.0
    faults: tuple[str, ...] = FAULTS
    chosen: Callable[[str, str], str | None] = lambda method, target: None
    """The fault of a request, by method and target; None: at random."""
    seed: int = 0
    met: Counter[str] = field(default_factory=Counter)
    """Number of requests that met each fault; `requests`: all requests."""
    seen: list[bytes] = field(default_factory=list)
    """The heads of all requests."""

    def __enter__(self) -> FaultProxy:
        self._random = random.Random(self.seed)
        # The threaded server may let two simultaneous conditional puts both succeed, which no object store does.
        self._putting = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        served = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result()
        self.port = int(served.sockets[0].getsockname()[1])
        return self

    def __exit__(self, *error: object) -> None:
        async def ended() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Handle one request; return False if the connection ends with it."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length(head))
        method, target = head.decode("latin-1").split(" ", 2)[:2]
        fault = self._fault(method, target)
        self.seen.append(head)
        self.met.update(["requests", *([fault] if fault else [])])
        if fault in ("429", "500", "503", "403"):
            said = b"<Error><Code>SlowDown</Code><Message>fault</Message></Error>"
            writer.write(b"HTTP/1.1 %s fault\r\nContent-Length: %d\r\n\r\n%s" % (fault.encode(), len(said), said))
            await writer.drain()
            return True
        if fault == "reset":
            return False
        async with self._putting if method == "PUT" else contextlib.nullcontext():
            answer, content = await self._passed(head, body)
        if fault == "lost":
            return False
        if fault == "flip" and content:
            at = self._random.randrange(len(content))
            content = content[:at] + bytes([content[at] ^ 1 << self._random.randrange(8)]) + content[at + 1 :]
        writer.write(answer + (content[: len(content) // 2] if fault == "cut" else content))
        await writer.drain()
        return fault != "cut" and b"connection: close" not in answer.lower()

    def _fault(self, method: str, target: str) -> str | None:
        fault = self.chosen(method, target)
        if fault is None and self._random.random() < self.rate:
            fault = self._random.choice(self.faults)
        # Listings and receipts carry no checksum on a plain connection.
        bare = method != "GET" or "list-type" in target
        return None if fault == "flip" and bare else fault

    async def _passed(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Return the server's answer: head and body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        lines = [line for line in head.split(b"\r\n")[:-2] if not line.lower().startswith(b"connection:")]
        writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
        whole = await reader.read(-1)
        writer.close()
        answer, _, content = whole.partition(b"\r\n\r\n")
        kept = [line for line in answer.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        return b"\r\n".join(kept) + b"\r\n\r\n", content


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
