"""Training of a byte-level BPE tokenizer on a sample of the training documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import Field

from puna.models.training.state import Stop, cached_json, interruptible
from puna.stages.contract import Documents, Facts, Figure, Mixture, Model, SeededConfig, StageRun, stage
from puna.stages.training.corpus import Chosen, Ranked, candidates, check_mixture, chosen_of, rank, smallest
from puna.stages.training.vocabulary import FILES, load
from puna.storage import Artifact, Part, PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer


class TokenizerConfig(SeededConfig):
    """The vocabulary size, and the size of the training sample. `new_tokens` extends the tokenizer of an input model."""

    vocab_size: int = Field(4096, ge=262, le=1_000_000, description="Number of tokens, including the 256 bytes and the special tokens")
    new_tokens: int = Field(0, ge=0, le=1_000_000, description="Tokens to add to the input model's tokenizer; pretraining adds embeddings")
    max_bytes: int = Field(8_000_000, ge=1000, description="Maximum bytes of the training sample; a hash of the id chooses documents")


def needs(config: TokenizerConfig, facts: Facts) -> list[str]:
    """Return an error message if `vocab_size` is set together with an input model, or `new_tokens` without an input model."""
    if not facts.inputs.get("model"):
        return ["new_tokens are added to an input model's tokenizer, but no model is given: set vocab_size"] if config.new_tokens else []
    if config.vocab_size == TokenizerConfig().vocab_size:
        return []
    return ["vocab_size is for a newly trained tokenizer, but the input model has one: leave vocab_size out, or set new_tokens"]


@stage(kind="tokenizer", needs=needs)
def tokenizer(documents: Documents, mixture: Mixture | None, model: Model | None, config: TokenizerConfig, run: StageRun) -> None:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016; Radford et al. 2019) with Llama 3's special tokens.

    With a mixture, only its training documents are used. The sample is the documents with the smallest hashes, up to a total of `max_bytes`
    (at least one document). One library call learns all merges, so Ctrl-C and Stop wait for its end (4 s by default, 71 s for 240 MB and
    128,000 tokens on two cores); after a kill it starts again. A tokenizer trained from scratch must decode the tokens of every sampled
    text to the same text. With a model, its tokenizer is reused; `new_tokens` of the sample are learned and added."""
    from puna.models.tokens.growth import grown_tokenizer
    from puna.models.tokens.tokenizer import Tokenizer, TokenizerError

    check_mixture(run, documents, mixture)
    parts = run.parts(documents, columns=["id", "text"])
    seed = run.seed("sample")
    sample = smallest(run.map(_sizes, parts, mixture, seed, config.max_bytes), config.max_bytes)
    if not sample:
        raise PunaError(f"{documents.id} has no training documents with text to learn a vocabulary from")
    size, last = sum(row[2] for row in sample), sample[-1][:2]
    texts = (row.text for part in parts for row in _sample(part, mixture, seed, last))
    if model is None:
        _learn(lambda: Tokenizer.train(texts, config.vocab_size), config.vocab_size, size, run)
    elif config.new_tokens:
        own = load(str(model.path()))
        with errors_at(f"tokenizer.new_tokens: {model.id}", TokenizerError):
            _learn(lambda: grown_tokenizer(own, texts, config.new_tokens), own.vocab_size + config.new_tokens, size, run)
    else:
        for name in model.manifest.files:
            if name in FILES or name.endswith(".jinja"):
                run.folder.joinpath(name).write_bytes(model.path(name).read_bytes())
    run.metric("vocab_size", load(str(run.folder)).vocab_size)
    run.metric("sample_documents", len(sample))
    run.metric("sample_bytes", size)
    # An imported tokenizer may normalize texts; only a tokenizer trained here must decode to the original text.
    _measure(list(run.map(_lengths, parts, mixture, seed, last, str(run.folder), model is None, rows=len(parts))), run)


def _learn(learn: Callable[[], Tokenizer], tokens: int, size: int, run: StageRun) -> None:
    """Write the tokenizer that `learn` returns. Raise PunaError if it has fewer than `tokens` tokens. `size`: bytes of the sample."""

    def learn_files() -> dict[str, str]:
        interruptible(learn).save(run.folder)
        return {name: (run.folder / name).read_text(encoding="utf-8") for name in FILES}

    with Stop():  # a stop waits for the result of the library call, which the next attempt reuses
        for name, text in cached_json(run.scratch / "fit-merges.json", learn_files).items():
            (run.folder / name).write_text(text, encoding="utf-8")
    if (count := load(str(run.folder)).vocab_size) < tokens:
        raise PunaError(f"the sample of {size} bytes gives only {count} tokens, not {tokens}; "
            "give more documents, raise max_bytes or ask for fewer tokens")  # fmt: skip


def _sizes(part: Part, mixture: Artifact | None, seed: int, max_bytes: int) -> list[Ranked]:
    """Return (hash, id, bytes, None) of a part's training documents that may be in the sample."""
    rows = chosen_of(part, mixture, "train")
    return candidates(((rank(seed, row.id), row.id, len(row.text.encode()), None) for row in rows if row.text), max_bytes)


def _sample(part: Part, mixture: Artifact | None, seed: int, last: tuple[int, str]) -> list[Chosen]:
    """Return a part's sampled documents: those with text and with (hash, id) up to `last`, the last (hash, id) of the sample."""
    return [row for row in chosen_of(part, mixture, "train") if row.text and (rank(seed, row.id), row.id) <= last]


def _lengths(
    part: Part, mixture: Artifact | None, seed: int, last: tuple[int, str], folder: str, exact: bool
) -> tuple[Counter[str], Counter[str]]:
    """Return category → bytes and category → tokens of a part's sample. `exact`: raise PunaError if decoding does not restore a text."""
    rows, tokenizer = _sample(part, mixture, seed, last), load(folder)
    sizes, tokens = Counter[str](), Counter[str]()
    for row, ids in zip(rows, tokenizer.encode_batch([row.text for row in rows]), strict=True):
        if exact and tokenizer.decode(ids) != row.text:
            raise PunaError(f"document {row.id}: decoding its tokens does not restore its text")
        sizes[row.category] += len(row.text.encode())
        tokens[row.category] += len(ids)
    return sizes, tokens


def _measure(parts: list[tuple[Counter[str], Counter[str]]], run: StageRun) -> None:
    sizes, tokens = (sum(counts, Counter[str]()) for counts in zip(*parts, strict=True))
    overall = sizes.total() / tokens.total()
    run.metric("bytes_per_token", overall)
    figure = Figure(
        title="Text per token", x="category", y="bytes per token", kind="bar", lines={"all": overall},
        series={"sample": [(category, size / tokens[category]) for category, size in sorted(sizes.items())]},
        note="On a sample of the training documents.",
    )  # fmt: skip
    run.figure("bytes_per_token", figure)
