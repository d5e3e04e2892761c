"""Random numbers and names by part of a table, checked by their definition."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from puna.stages.draws import fraction, hash_of, identifier, place


@given(st.integers(), st.text())
def test_parts_are_joined_by_zero_bytes_and_hashed(seed: int, text: str) -> None:
    whole = f"{seed}\0{text}".encode()
    digest = hashlib.sha256(whole).hexdigest()
    assert (identifier(seed, text), hash_of(seed, text)) == (digest[:32], int(digest[:16], 16))
    assert fraction(seed, text) == int(digest[:16], 16) / 2**64
    assert place(seed, text) == int(hashlib.blake2b(whole, digest_size=8).hexdigest(), 16)
