"""Which runs of characters are web or mail addresses to spaCy's tokeniser: those stay one word."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.kernels.text.characters import ALPHANUMERIC, DECIMAL
from puna.kernels.text.english_tables import LOWER

DOT, PLUS, MINUS, COLON, SLASH, AT, QUESTION, NUMBER_SIGN, UNDERSCORE = (ord(c) for c in ".+-:/@?#_")
MAX_LABEL, MAX_TOP_LABEL = 64, 63


@njit(cache=True)
def _host_character(code: int) -> bool:
    return 0x30 <= code <= 0x39 or 0x41 <= code <= 0x5A or 0x61 <= code <= 0x7A or 0xA1 <= code <= 0xFFFF


@njit(cache=True)
def _tail(codes: NDArray[np.uint32], flags: NDArray[np.uint16], at: int, b: int) -> bool:
    """Whether at..b is the end of an address: a port of 2 to 5 digits, then a path, both optional."""
    if at < b and codes[at] == COLON:
        digits = 0
        while at + 1 + digits < b and digits < 6 and flags[codes[at + 1 + digits]] & DECIMAL:
            digits += 1
        if digits < 2 or digits > 5:
            return False
        at += 1 + digits
    return at == b or codes[at] == SLASH or codes[at] == QUESTION or codes[at] == NUMBER_SIGN


@njit(cache=True)
def _name(codes: NDArray[np.uint32], flags: NDArray[np.uint16], classes: NDArray[np.uint16], a: int, b: int) -> bool:
    """Whether a..b is a host name with a top label of letters, and an address's end."""
    at, labels = a, 0
    while True:
        start = at
        while at < b and (_host_character(codes[at]) or codes[at] == UNDERSCORE or codes[at] == MINUS):
            at += 1
        if at >= b or codes[at] != DOT:
            break
        inner = _host_character(codes[start]) and _host_character(codes[at - 1])
        if at == start or at - start > MAX_LABEL or not inner:
            return False
        labels += 1
        at += 1
    end = start
    while end < b and classes[codes[end]] & LOWER:
        end += 1
    return labels > 0 and 2 <= end - start <= MAX_TOP_LABEL and _tail(codes, flags, end, b)


@njit(cache=True)
def _number(codes: NDArray[np.uint32], flags: NDArray[np.uint16], a: int, b: int) -> bool:
    """Whether a..b is a public IPv4 address and an address's end."""
    value = np.zeros(4, np.int64)
    at = a
    for octet in range(4):
        start = at
        while at < b and at - start < 4 and 0x30 <= codes[at] <= 0x39:
            value[octet] = value[octet] * 10 + codes[at] - 0x30
            at += 1
        size = at - start
        if size == 0 or size > 3 or (octet in (0, 3) and codes[start] == 0x30) or value[octet] > 255:
            return False
        if size == 3 and codes[start] == 0x30:
            return False
        if octet < 3:
            if at >= b or codes[at] != DOT:
                return False
            at += 1
    private = value[0] == 10 or value[0] == 127 or (value[0] == 169 and value[1] == 254) or (value[0] == 192 and value[1] == 168)
    private = private or (value[0] == 172 and 16 <= value[1] <= 31)
    return not private and value[0] <= 223 and value[3] <= 254 and _tail(codes, flags, at, b)


@njit(cache=True)
def is_address(codes: NDArray[np.uint32], flags: NDArray[np.uint16], classes: NDArray[np.uint16], a: int, b: int) -> bool:
    """Whether a..b is a web or mail address: scheme, user, host, port, path; all but the host optional."""
    if _name(codes, flags, classes, a, b) or _number(codes, flags, a, b):
        return True
    scheme = a
    while scheme < b and (flags[codes[scheme]] & ALPHANUMERIC or codes[scheme] in (UNDERSCORE, PLUS, MINUS, DOT)):
        scheme += 1
    host = scheme + 3 if scheme + 3 < b and codes[scheme] == COLON and codes[scheme + 1] == SLASH and codes[scheme + 2] == SLASH else b
    if scheme - a >= 2 and host < b and (_name(codes, flags, classes, host, b) or _number(codes, flags, host, b)):
        return True
    for at in range(a + 1, b):  # noqa: SIM110 - numba compiles no generator here
        if codes[at] == AT and (_name(codes, flags, classes, at + 1, b) or _number(codes, flags, at + 1, b)):
            return True
    return False
