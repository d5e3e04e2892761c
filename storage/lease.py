"""Leases on an object store: locks between processes on any machines, without comparing clocks.

A lease is an object that names its holder and changes by compare-and-swap. A waiter takes over the lease if the object has not changed for
two terms on the waiter's own clock; the old holder's next renewal then fails. On the same machine, a dead holder is detected at once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from puna.storage.errors import PunaError

if TYPE_CHECKING:
    from puna.storage.s3 import S3Files as Place

TERM = 20.0  # seconds per term: a lease is renewed four times per term, and may be taken over after two terms without a renewal
FIRST_POLL, POLL = 0.05, 1.0  # seconds between polls of a lease that another process holds: initially, and at most


class State(NamedTuple):
    """The content of a lease object, and its version. `owner`: the process that holds the lease; empty if none does."""

    owner: str
    version: str | None


class Held:
    """A lease that this process holds, and that a thread renews."""

    def __init__(self, place: Place, name: str, version: str, term: float, since: float) -> None:
        self._place, self._name, self._version, self._term = place, name, version, term
        self._owner = _myself()
        self._renewed = since
        self._taken = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease {name}", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """True if another process may hold the lease, because this process did not renew it in time."""
        return self._taken or _now() - self._renewed > 1.5 * self._term

    def _renew(self) -> None:
        while not self._ended.wait(self._term / 4):
            since = _now()
            try:
                version = self._place.swap_version(self._name, _content(self._owner), self._version)
            except PunaError:  # the store does not respond; if that lasts, `is_lost` reports it
                continue
            if version is None:
                self._taken = True
                return
            self._version, self._renewed = version, since

    def release(self) -> None:
        self._ended.set()
        self._thread.join()
        if not self._taken:
            # If the store does not respond, others take over the lease after two terms.
            with contextlib.suppress(PunaError):
                self._place.swap_version(self._name, _content(""), self._version)


_held: dict[tuple[Place, str], Held] = {}  # the leases of this process
_threads: defaultdict[tuple[Place, str], threading.Lock] = defaultdict(threading.Lock)  # one thread at a time per name


@contextlib.contextmanager
def lease(place: Place, name: str, term: float, *, wait: bool) -> Iterator[bool]:
    """Hold a name and yield True. Without `wait`, yield False, after at most two terms, if another process or thread holds it."""
    mine = None
    with contextlib.ExitStack() as stack:
        if _threads[place, name].acquire(blocking=wait):
            stack.callback(_threads[place, name].release)
            pause = FIRST_POLL
            while (mine := _take(place, name, term)) is None and wait:
                time.sleep(pause)
                pause = min(POLL, 2 * pause)
        if mine is not None:
            _held[place, name] = mine
            stack.callback(mine.release)
            stack.callback(_held.pop, (place, name))
        yield mine is not None


def check(place: Place, name: str) -> None:
    """Raise PunaError if this process holds the name but may have lost it."""
    mine = _held.get((place, name))
    if mine is not None and mine.is_lost:
        raise PunaError(f"{name}: this process was suspended for so long that another one may have continued its work; run again")


def is_held(place: Place, name: str, term: float) -> bool:
    """True if a process holds the name. If the holder is on another machine and does not renew the lease, the call takes two terms."""
    return (place, name) in _held or _takeable(place, name, term) is None


def _take(place: Place, name: str, term: float) -> Held | None:
    state = _takeable(place, name, term)
    if state is None:
        return None
    since = _now()
    version = place.swap_version(name, _content(_myself()), state.version)
    return None if version is None else Held(place, name, version, term, since)


def _takeable(place: Place, name: str, term: float) -> State | None:
    """Return the lease's state if no process holds it, waiting up to two terms. Return None if its holder is alive on this machine, or
    renewed it while this call waited."""
    first = _state(place, name)
    start, pause = _now(), min(POLL, term / 8)
    while first.owner:
        machine, pid, ticks = first.owner.rsplit("/", 2)
        if machine == _machine():
            # This process never asks for a lease that it holds, so if it is the owner, an earlier release got no response.
            return first if first.owner == _myself() or _start_ticks(int(pid)) != ticks else None
        if _now() - start > 2 * term:
            return first
        time.sleep(pause)
        now = _state(place, name)
        if now.version != first.version:
            return None if now.owner else now
    return first


def _state(place: Place, name: str) -> State:
    content = place.read_version(name)
    if content is None:
        return State("", None)
    data, version = content
    try:
        owner = str(json.loads(data)["owner"])
        if owner and not re.fullmatch(r".+/\d+/\d*", owner):
            raise ValueError(f"owner {owner}")
        return State(owner, version)
    except (ValueError, KeyError, TypeError) as error:
        raise PunaError(f"{name}: is not a lease ({error}); remove it when no process works on this store") from error


def _content(owner: str) -> bytes:
    # Equal bytes have equal versions, so a nonce makes each write different.
    return json.dumps({"owner": owner, "nonce": uuid.uuid4().hex}).encode()


def _now() -> float:
    """Return the seconds of a clock that also runs while the machine sleeps, if there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return a name for this boot and process-id namespace, or a random name if these are unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return uuid.uuid4().hex


def _start_ticks(pid: int) -> str:
    """Return the start time of a process on this machine in clock ticks since boot; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _myself() -> str:
    return f"{_machine()}/{os.getpid()}/{_start_ticks(os.getpid())}"
