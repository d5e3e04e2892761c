"""The n-gram model compared with its definition, computed token by token with dictionaries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from random import Random

import pytest

from puna.stages.training.bits_per_byte import NGrams, dictionary_bits


class Plain:
    """The definition: counts by context, as tuples."""

    def __init__(self) -> None:
        self.follow: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def add(self, before: list[int], token: int, order: int) -> None:
        for length in range(min(order, len(before) + 1)):
            self.follow[tuple(before[len(before) - length :])][token] += 1

    def share(self, before: list[int], token: int, order: int, lowest: float) -> float:
        share = lowest
        for length in range(min(order, len(before) + 1)):
            seen = self.follow.get(tuple(before[len(before) - length :]))
            if seen:
                share = (seen[token] + len(seen) * share) / (seen.total() + len(seen))
        return share


@pytest.mark.parametrize("order", [1, 2, 4])
def test_shares_are_those_of_the_definition(order: int) -> None:
    random = Random(order)
    draw = [[random.choice((0, 1, 1, 2, 5)) for _ in range(random.randint(1, 30))] for _ in range(12)]
    training, asked = draw[:8], [*draw[8:], [3, 3, 3, 4, 3, 3, 4]]
    plain = Plain()
    for document in training:
        for i, token in enumerate(document):
            plain.add(document[:i], token, order)
    model = NGrams(training, order, 6)
    for page in (False, True):
        expected = []
        for document in asked:
            own, nats = Plain(), 0.0
            for i, token in enumerate(document):
                share = plain.share(document[:i], token, order, 1 / 6)
                if page:
                    share = own.share(document[:i], token, order, share)
                    own.add(document[:i], token, order)
                nats -= math.log(share) if i else 0.0
            expected.append(nats)
        assert model.nats(asked, page=page) == pytest.approx(expected, rel=1e-12)


def test_shares_of_all_tokens_add_up_to_one() -> None:
    model = NGrams([[0, 1, 2, 1, 2, 3], [4, 1, 2]], 3, 6)
    for context in ([1], [2, 1], [5, 5], [0, 1, 2]):
        for page in (False, True):
            before = model.nats([context], page=page)[0]
            assert sum(math.exp(before - model.nats([[*context, token]], page=page)[0]) for token in range(6)) == pytest.approx(1)


def test_a_dictionary_helps_with_what_it_holds() -> None:
    random = Random(0)
    words = ["".join(random.choices("abcdefghij", k=9)) for _ in range(400)]
    known, new = " ".join(words[:200]), " ".join(words[200:])
    with_it, without = dictionary_bits([known, new], known.encode())
    assert with_it < 0.1 * without < 8 * len(new)
