"""The records that all readers yield: pages, and rejected records with a reason."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Page(NamedTuple):
    """A record with a page. `fetched_at`: microseconds since 1970, UTC; `where`: the file, and the record's position in it."""

    url: str
    fetched_at: int
    content_type: str
    charset: str | None
    body: bytes
    where: str


class Rejected(NamedTuple):
    """A rejected record: the rule, its file and position, a message, and for a limit the value and the threshold."""

    rule: str
    where: str
    detail: str
    value: float | None = None
    threshold: float | None = None


UNREADABLE = "unreadable_file"  # rule for a file, or the rest of a file, that cannot be read
NO_PAGE = ("not_a_page", "not_a_response", "content_type", UNREADABLE)  # rules for records that are not pages; they are counted separately


def page_id(source: str, page: Page) -> str:
    """Return a hash of the source and all fields of a page except `where`, as 32 hex digits."""
    head = f"{source}\0{page.url}\0{page.fetched_at}\0{page.content_type}\0{page.charset or ''}\0"
    state = hashlib.blake2b(head.encode("utf-8", "surrogatepass"), digest_size=16)
    state.update(page.body)
    return state.hexdigest()


def rejected_id(source: str, rejected: Rejected) -> str:
    """Return a hash of the source and the rejected record's `where`, as 32 hex digits."""
    text = f"rejected\0{source}\0{rejected.where}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def repetitions(ids: list[str]) -> tuple[NDArray[np.bool_], dict[int, str]]:
    """Return a mask bool[n] of first occurrences in a sorted list of ids, and index → new id (in the same shard) for each repetition."""
    first = np.array([at == 0 or ids[at] != ids[at - 1] for at in range(len(ids))], bool)
    others, number = {}, 0
    for at in np.flatnonzero(~first).tolist():
        number = 1 if first[at - 1] else number + 1
        others[at] = ids[at][:8] + hashlib.blake2b(f"repeated\0{ids[at]}\0{number}".encode(), digest_size=12).hexdigest()
    return first, others
