"""Multiple-choice questions from held-out pages: several continuations, one of which is the page's own.

The model's answer is the option with the highest log-likelihood, either total or divided by the option's length in bytes. The metrics equal
`acc` and `acc_bytes` of lm-evaluation-harness, whose `acc_norm` divides by characters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from puna.stages.contract import StageRun
from puna.stages.draws import place
from puna.stages.evaluation.likelihood import Encoder
from puna.stages.evaluation.likelihood import likelihoods as scores
from puna.stages.training.corpus import Chosen, Ranked, candidates, check_mixture, chosen_of, rank, smallest
from puna.storage import Artifact, Part, PunaError

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer


def heldout_pages(documents: Artifact, mixture: Artifact | None, max_page_bytes: int, max_bytes: int, run: StageRun) -> list[Chosen]:
    """Return held-out pages (without a mixture: any) of at most `max_page_bytes`, in hash order, up to `max_bytes` in total. Raise
    PunaError if there are none."""
    check_mixture(run, documents, mixture)
    parts = run.parts(documents, columns=["id", "text"])
    rows = run.map(_rank, parts, mixture, "heldout", run.seed("pages"), max_page_bytes, max_bytes)
    pages = [row[3] for row in smallest(rows, max_bytes)]
    if not pages:
        raise PunaError(f"{documents.id} has no held-out page of at most {max_page_bytes} bytes")
    return pages


def training_text(
    model: Artifact, documents: Artifact, mixture: Artifact | None, tokenizer: Tokenizer, context: int, most_tokens: int, run: StageRun
) -> list[list[int]]:
    """Return the tokens of training documents, up to the number that the model was trained on; [] without a mixture, or if this number is
    unknown or above `most_tokens`. A larger corpus is sampled in pieces of `context` tokens in hash order: whole pages would cover
    fewer of its n-grams."""
    trained = model.manifest.metrics.get("trained_tokens")
    if mixture is None or not isinstance(trained, int) or trained > most_tokens:
        return []
    parts, most, seed = run.parts(documents, columns=["id", "text"]), 16 * trained, run.seed("training text")
    pages = [row[3] for row in smallest(run.map(_rank, parts, mixture, "train", seed, most, most), most)]
    whole = [[*tokenizer.lead, *ids, *tokenizer.end] for ids in tokenizer.encode_batch([row.text for row in pages])]
    if sum(map(len, whole)) <= trained:
        return whole
    places = [(rank(seed, f"{row.id} {at}"), page, at) for page, row in enumerate(pages) for at in range(0, len(whole[page]), context)]
    read, left = [], trained
    for _, page, at in sorted(places):
        read.append(whole[page][at : at + min(context, left)])
        left -= len(read[-1])
        if left <= 0:
            break
    return read


def _rank(part: Part, mixture: Artifact | None, split: str, seed: int, max_page_bytes: int, max_bytes: int) -> list[Ranked]:
    sized = [(len(row.text.encode()), row) for row in chosen_of(part, mixture, split)]
    return candidates(((rank(seed, row.id), row.id, size, row) for size, row in sized if 0 < size <= max_page_bytes), max_bytes)


HAN_AND_KANA, SOUTH_EAST_ASIAN = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af", "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
UNSPACED = HAN_AND_KANA + SOUTH_EAST_ASIAN  # letters of scripts without spaces: Han and kana; Thai, Lao, Burmese and Khmer
WORD = re.compile(rf"\s*(?:[{HAN_AND_KANA}]{{1,2}}|[{SOUTH_EAST_ASIAN}]{{1,4}}|[^\s{UNSPACED}]+)")


def words(text: str, most: int | None = None) -> list[str]:
    """Return the first `most` words, each with the white space before it. In scripts without spaces, a word is a few letters."""
    # Without this, the search would take quadratic time in white space that no word follows.
    return [match.group() for match in islice(WORD.finditer(text.rstrip()), most)]


@dataclass(frozen=True)
class Item:
    """A question: the beginning of a page and possible continuations. `answer`: the index of the page's own continuation."""

    id: str
    category: str
    prompt: str
    options: tuple[str, ...]
    answer: int


def build(
    documents: Sequence[tuple[str, str, str]], items: int, options: int, prompt_words: int, option_words: int, seed: int,
    fits: Callable[[str], bool],
) -> list[Item]:  # fmt: skip
    """Return at most `items` questions from documents (id, category, text). The order of the documents does not matter.

    A page gives a question if it has prompt_words + option_words words, its continuation `fits` the context, and other pages give enough
    distinct wrong options. Wrong options are the same range of words in other pages, preferably of the page's category, so length and
    position do not reveal the answer, and topic seldom does."""
    stretches = []
    for id_, category, text in documents:
        stretch = words(text, prompt_words + option_words)
        option = "".join(stretch[prompt_words:])
        if len(stretch) == prompt_words + option_words and fits(option):
            stretches.append((id_, category, "".join(stretch[:prompt_words]), option))
    stretches.sort(key=lambda row: place(seed, row[0]))
    questions: list[Item] = []
    for id_, category, prompt, own in stretches:
        if len(questions) == items:
            break
        ranked = sorted(stretches, key=lambda row: (row[1] != category, place(seed, id_, row[0])))
        wrong = list(dict.fromkeys(other[3] for other in ranked if other[0] != id_ and other[3] != own))[: options - 1]
        if len(wrong) < options - 1:
            continue
        choices = sorted([own, *wrong], key=lambda text: place(seed, id_, "place", text))
        questions.append(Item(id_, category, prompt, tuple(choices), choices.index(own)))
    return questions


def likelihoods(
    model: Transformer, tokenizer: Tokenizer, items: Sequence[Item], size: int, progress: Callable[[int, int], None] | None = None
) -> list[list[float]]:
    """Return log p(option | prompt) in nats for every option, by the conventions of `likelihood.py`. `size`: maximum tokens per pass."""
    encoder = Encoder(tokenizer)
    requests = [encoder.pair(item.prompt, option) for item in items for option in item.options]
    scored = iter(scores(model, requests, model.config.max_position_embeddings, size, progress))
    return [[next(scored).sum for _ in item.options] for item in items]


def likeliest(item: Item, likelihood: Sequence[float], normalized: bool) -> int:
    """Return the index of the likeliest option; ties go to the first. `normalized`: compare log-likelihoods per byte."""
    values = [value / len(option.encode()) if normalized else value for value, option in zip(likelihood, item.options, strict=True)]
    return values.index(max(values))
