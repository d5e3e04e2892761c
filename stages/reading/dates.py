"""Conversion of records' dates to microseconds since 1970."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
YEARS = range(1678, 2262)  # years whose times fit into 64-bit nanoseconds, which some table readers use
STAMP = re.compile(r"(?:19|20)\d{6}(?:\d{6})?")  # a date, or a date and time, in digits alone, as in crawl indexes: 20240131120000
LOW, HIGH = ((datetime(year, 1, 1, tzinfo=UTC) - EPOCH) // timedelta(microseconds=1) for year in (YEARS.start, YEARS.stop))


def microseconds(at: datetime) -> int:
    """Return `at` in microseconds since 1970; a time without a zone is UTC. Raise ValueError for a year outside `YEARS`."""
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    count = (at - EPOCH) // timedelta(microseconds=1)
    if not LOW <= count < HIGH:
        raise ValueError(f"the year {at.year} is not in the range {YEARS.start} to {YEARS.stop - 1}")
    return count


def moment(value: Any) -> int | None:
    """Return a time, ISO text, YYYYMMDD[hhmmss] or (milli)seconds since 1970 in microseconds; 0 for None or ""; None for other values."""
    try:
        time = _moment(value)
    except (ValueError, OverflowError):
        return None
    return time if time is not None and LOW <= time < HIGH else None


def _moment(value: Any) -> int | None:
    if value is None or value == "":
        return 0
    if isinstance(value, datetime):
        return microseconds(value)
    if isinstance(value, date):
        return microseconds(datetime(value.year, value.month, value.day))
    if isinstance(value, int | str) and STAMP.fullmatch(digits := str(value).strip()):
        return microseconds(datetime.strptime(digits.ljust(14, "0"), "%Y%m%d%H%M%S"))
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e14:
        return round(value * (1_000_000 if abs(value) < 1e11 else 1_000))
    return microseconds(datetime.fromisoformat(value.strip())) if isinstance(value, str) else None
