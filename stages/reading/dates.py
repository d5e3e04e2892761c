"""Dates of records as microseconds since 1970."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds(at: datetime) -> int:
    """Microseconds since 1970; a time without a zone is UTC."""
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return (at - EPOCH) // timedelta(microseconds=1)


def moment(value: Any) -> int | None:
    """A date, a time, ISO text or seconds or milliseconds since 1970 as microseconds; nothing counts as 1970; None: not a date."""
    if value is None or value == "":
        return 0
    if isinstance(value, datetime):
        return microseconds(value)
    if isinstance(value, date):
        return microseconds(datetime(value.year, value.month, value.day))
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e11:
        return round(value * 1_000_000)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e14:
        return round(value * 1_000)
    if isinstance(value, str):
        try:
            return microseconds(datetime.fromisoformat(value.strip()))
        except ValueError:
            return None
    return None
