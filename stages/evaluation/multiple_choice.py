"""Multiple choice from held-out pages: which of several continuations is the page's own.

Scored like HellaSwag and its kind: the option with the highest log-likelihood, as it stands or divided by
the option's length in bytes (the usual `acc` and `acc_norm`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from puna.stages.draws import place
from puna.stages.training.bits_per_byte import batched

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

WORD = re.compile(r"\s*\S+")


@dataclass(frozen=True)
class Item:
    """A question: the beginning of a page and options for how it goes on; `answer` is the index of its own."""

    id: str
    category: str
    prompt: str
    options: tuple[str, ...]
    answer: int


def build(
    documents: Sequence[tuple[str, str, str]], items: int, options: int, prompt_words: int, option_words: int, seed: int
) -> list[Item]:
    """At most `items` questions from documents (id, category, text), whatever their order.

    A page gives a question when it has prompt_words + option_words words. The wrong options are the same
    stretch of other pages, of its own category where that has enough of them, so that neither length nor
    place gives the answer away, and topic alone seldom does.
    """
    stretches = []
    for id_, category, text in documents:
        found = [match.group() for match, _ in zip(WORD.finditer(text), range(prompt_words + option_words), strict=False)]
        if len(found) == prompt_words + option_words:
            stretches.append((id_, category, "".join(found[:prompt_words]), "".join(found[prompt_words:])))
    stretches.sort(key=lambda row: place(seed, row[0]))
    questions: list[Item] = []
    for id_, category, prompt, own in stretches:
        if len(questions) == items:
            break
        ranked = sorted(stretches, key=lambda row: (row[1] != category, place(seed, id_, row[0])))
        wrong: list[str] = []
        for other in ranked:
            if other[0] != id_ and other[3] != own and other[3] not in wrong:
                wrong.append(other[3])
            if len(wrong) == options - 1:
                break
        if len(wrong) < options - 1:
            continue
        chosen = sorted([own, *wrong], key=lambda text: place(seed, id_, "place", text))
        questions.append(Item(id_, category, prompt, tuple(chosen), chosen.index(own)))
    return questions


def likelihoods(
    model: Transformer,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    micro_batch_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[float]]:
    """log p(option | prompt) in nats, for every option of every item; a prompt is computed once."""
    import torch

    from puna.models.training.objectives.base import Targets, target_logprobs

    device = next(model.parameters()).device
    encoded = []
    for item in items:
        encoded.append(([*tokenizer.lead, *tokenizer.encode(item.prompt)], [tokenizer.encode(option) for option in item.options]))
    found: list[list[float]] = []
    for batch in batched(encoded, lambda pair: len(pair[0]) + sum(map(len, pair[1])), micro_batch_tokens):
        targets = Targets.from_answers([prompt for prompt, _ in batch], [options for _, options in batch]).to(device)
        with torch.no_grad():
            sums = targets.sum_by_answer(target_logprobs(model, targets)).tolist()
        for _, options in batch:
            found.append(sums[: len(options)])
            sums = sums[len(options) :]
        if progress:
            progress(len(found), len(items))
    return found


def chosen(item: Item, likelihood: Sequence[float], normalised: bool) -> int:
    """Index of the likeliest option, with `normalised` by its likelihood per byte; the first of equals."""
    values = [value / len(option.encode()) if normalised else value for value, option in zip(likelihood, item.options, strict=True)]
    return values.index(max(values))

