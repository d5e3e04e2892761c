"""`anneal_experiment`: a test of small data sets, by annealing a half-trained model on them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, model_validator

from puna.models.config import ModelShape
from puna.models.training.settings import ComputeSettings, OptimizerSettings, ScheduleSettings
from puna.stages.contract import Documents, Facts, Figure, Mixture, Model, SeededConfig, StageRun, Tokenizer, Tokens, stage
from puna.stages.evaluation.multiple_choice import UNSPACED, words
from puna.stages.training import intervals
from puna.stages.training import needs as needs_of
from puna.stages.training.needs import documents_apart
from puna.stages.training.phase import SHAPE, Phase
from puna.stages.training.pools import Group, Mixed, PoolRows, Pools, Sizes, build_pools, grouped_documents
from puna.stages.training.proxy_runs import fresh, one_thread, run_trials, set_aside, train_proxy, trial_row
from puna.stages.training.token_rows import Packed, Reader, mean_loss, pack
from puna.stages.training.train import load_grown
from puna.stages.training.vocabulary import check_tokens, tokenizer_of
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer as Vocabulary

DEFAULT, OWN = "default", "own"
ARMS = ("set", "shuffled")


class AnnealExperimentConfig(SeededConfig):
    sets: tuple[str, ...] = Field((), description="Categories of the mixture to test as data sets; empty: all")
    categories: int = Field(8, ge=1, description="Maximum number of data sets: the mixture's largest categories, and all others as one")
    share: float = Field(0.3, gt=0, le=1, description="Share of rows from the data set during annealing (0 to 1)")
    model: ModelShape = Field(
        SHAPE.replace(
            hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            tie_word_embeddings=False, initializer_range=0.1, zero_residual=True,
        ),
        description="Shape of the model that is first trained on the default tokens, if no model is given",
    )  # fmt: skip
    base: Phase = Field(
        Phase(name="base", steps=250, rows_per_step=8, schedule=ScheduleSettings(learning_rate=0.02, warmup_steps=10, shape="constant")),
        description="Training of the model with the shape `model`, if no model is given",
    )
    phase: Phase = Field(
        Phase(name="anneal", steps=60, rows_per_step=8, schedule=ScheduleSettings(learning_rate=0.02, warmup_steps=5, shape="linear")),
        description="Training settings of the annealing; learning_rate falls linearly to 0",
    )
    optimizer: OptimizerSettings = Field(OptimizerSettings(name="muon", embedding_scale=32), description="The optimizer")
    compute: ComputeSettings = Field(ComputeSettings(), description="Precision and memory")
    repeats: int = Field(3, ge=3, le=100, description="Runs of each arm, paired by the rows they read. Two pairs decide nothing")
    least_gain: float = Field(
        0.02, ge=0, description="Minimum gain over the default mix, and over the set's words shuffled, to accept a set: lower end of each "
        "interval, nats per token of its held-out text"
    )  # fmt: skip
    most_default_rise: float = Field(
        0.1, ge=0, description="Maximum increase of the loss on default text, against annealing on the set's words shuffled: upper end of "
        "the interval above which a set is refused, nats per token"
    )  # fmt: skip
    max_repeats: float = Field(4.0, ge=1, description="Maximum passes over a set's distinct documents; a set that needs more is refused")
    least_different: float = Field(0.5, ge=0, le=1, description="Minimum share of a set's documents that are not duplicates (0 to 1)")
    document_tokens: int = Field(8192, ge=8, description="Tokens read from each document's beginning; fewer tokens cover more documents")
    heldout_tokens: int = Field(
        8_000, ge=100, description="Number of held-out tokens per set and of the default mixture; at most pretrain's validation_tokens"
    )
    validation_share: float = Field(0.01, gt=0, lt=0.5, description="Share of the default documents held out, as in pretrain (0 to 1)")

    @model_validator(mode="after")
    def _rows_are_plain(self) -> AnnealExperimentConfig:
        for phase in (self.base, self.phase):
            phase.check_plain("annealing draws single rows from two sources")
        return self


def needs(config: AnnealExperimentConfig, facts: Facts) -> list[str]:
    """Return messages if the tokenizer has no token to separate documents, or if there is too little memory."""
    return [*documents_apart(facts, "model"), *needs_of.training_memory(facts, "model", config.optimizer)]


@stage(kind="evaluation", needs=needs)
def anneal_experiment(
    tokens: Tokens, tokenizer: Tokenizer | None, model: Model | None, documents: Documents, mixture: Mixture | None,
    config: AnnealExperimentConfig, run: StageRun,
) -> None:  # fmt: skip
    """Measure whether small data sets are worth annealing on (Llama 3, section 3.1.3; Blakeney et al. 2024).

    The sets are the mixture's categories; without a mixture, all documents are one set. The model should be half-trained; by default, a
    small model is trained here on the default tokens. It is annealed in three ways from the same weights, on as many tokens: on
    default rows alone, with a share of the set's rows, and with a share of the set's rows with shuffled words. The gain is the decrease in
    loss on held-out documents of the set. A set is accepted if its gain over both controls exceeds `least_gain`, by the intervals of paired
    runs, and if it raises the loss on default text by at most `most_default_rise` more than its shuffled words do. Duplicate documents
    count once. A set that is mostly duplicates, or that would be read too often, is refused before any training. With a mixture, the table
    `weights` is the annealing mix, for `mix`: accepted sets divide `share` by their bytes; the rest is weighted as in the mixture."""
    source = tokenizer or model
    if source is None:
        raise PunaError("anneal_experiment starts from a model, or trains one with a tokenizer; give exactly one of the two")
    check_tokens(tokens, source)
    row = Packed.read(tokens).row_length
    tokens_needed = math.ceil(config.phase.steps * config.phase.rows_per_step * row * config.share)
    sizes = Sizes(tokens_needed, config.heldout_tokens, row, config.document_tokens)
    # A set of one document comes last and has no pool, since it cannot be both trained on and measured.
    groups = sorted(grouped_documents(documents, mixture, config.categories, sizes, run), key=lambda group: group.amount.documents == 1)
    pooled = sum(group.amount.documents > 1 for group in groups)
    names = [group.name if mixture is not None else "candidate" for group in groups]
    if unknown := sorted(set(config.sets) - set(names)):
        raise PunaError(f"anneal_experiment.sets: {unknown[0]!r} is not among the data sets {', '.join(sorted(names))}")
    pools = build_pools(documents, mixture, groups[: pooled or None], source, sizes, run)
    judged = [number for number, name in enumerate(names) if not config.sets or name in config.sets]
    different = {number: _different(Pools.read(pools), number) for number in judged if number < pooled}
    read = {number: tokens_needed / max(1, different[number][1] if number < pooled else 0) for number in judged}
    small = dict.fromkeys(judged, "it has only one document, but needs one to train on and one to measure the loss on")
    small |= {number: _too_small(read[number], share, config) for number, (_, _, share) in different.items()}
    candidates = [number for number in judged if not small[number]]
    start = _base(tokens, source, model, pools, config, run) if candidates else ""
    runs = [(number, arm, repeat) for number in candidates for arm in ARMS for repeat in range(config.repeats)]
    runs = [(-1, DEFAULT, repeat) for repeat in range(config.repeats)] + runs if candidates else []
    jobs = [(job, number, arm, repeat, run.seed("repeat", repeat)) for job, (number, arm, repeat) in enumerate(runs)]
    trials = list(run_trials(run, _anneal, jobs, tokens, start, pools, names[:pooled])) if candidates else []
    if trials:
        run.write_rows([{k: v for k, v in trial.items() if k != "losses"} for trial in trials], "trials")
    losses = {(number, arm, repeat): trial["losses"] for (number, arm, repeat), trial in zip(runs, trials, strict=True)}
    verdicts = [
        Verdict(names[number], {}, {}, small[number], read[number]) if small[number]
        else _verdict(number, names[number], read[number], losses, config)
        for number in judged
    ]  # fmt: skip
    _report(verdicts, config, run)
    if mixture is not None:
        accepted = {name for verdict in verdicts if not verdict.refusal for name in groups[names.index(verdict.name)].members}
        run.write_rows(_weights(mixture, groups, accepted, config.share), "weights")


def _base(tokens: Artifact, source: Artifact, model: Artifact | None, sets: PoolRows, config: AnnealExperimentConfig, run: StageRun) -> str:
    """Return the folder of the model to anneal: the given one with the tokenizer's vocabulary, or a small one trained on default tokens."""
    from puna.models.formats.checkpoint import save

    vocabulary, seed, folder = tokenizer_of(source), run.seed("base"), run.scratch / "base-model"
    if model is not None and tokenizer_of(model).vocab_size == vocabulary.vocab_size:
        check_tokens(tokens, model)
        return str(model.path())
    if model is not None:
        save(load_grown(model, source), folder, vocabulary)
        return str(folder)
    packed, heldout = set_aside(tokens, config.validation_share, config.heldout_tokens)
    aside = frozenset[str]().union(*Pools.read(sets).heldout_ids)
    reader = Reader(packed, heldout | packed.of(aside), config.base.rows_per_step, seed, vocabulary.begin)
    with one_thread():
        network = fresh(config.model.complete(vocabulary.vocab_size, packed.row_length), seed)
        settings, size = config.base.train_config(config.optimizer, config.compute), config.compute.micro_batch_tokens
        state = run.scratch / "base"
        train_proxy(network, "anneal_experiment, base", lambda step: reader.batches(step, size), reader.lengths, settings, seed, state)
        save(network, folder, vocabulary)
    return str(folder)


def _too_small(read: float, different: float, config: AnnealExperimentConfig) -> str:
    """Return a reason to refuse a data set before any training, or "". `read`: passes over distinct documents; `different`: their share."""
    if read > config.max_repeats:
        return f"its different documents would be read {read:.3g} times, more than max_repeats"
    return "" if different >= config.least_different else f"{different:.0%} of its documents are different, less than least_different"


def _different(pools: Pools, number: int) -> tuple[npt.NDArray[np.bool_], int, float]:
    """Return a mask [P] of a set's pieces that belong to duplicate documents, the number of tokens in the other pieces, and the share of
    documents that are not duplicates."""
    packed, heldout = pools.training[number], np.concatenate(pools.heldout[number])
    begin = heldout[0]  # also the end token, if the tokenizer has no BOS
    windows = {_digest(piece[piece != begin]) for piece in np.split(heldout, np.flatnonzero(heldout == begin)[1:])}
    copies = np.zeros(len(packed.ids), dtype=bool)
    for owner, document in enumerate(_documents(packed)):
        digest = _digest(document[document != begin])
        copies[owner] = digest in windows
        windows.add(digest)
    mask = copies[packed.owners]
    return mask, int(packed.sizes[~mask].sum()), float(1 - copies.mean())


def _documents(packed: Packed) -> list[npt.NDArray[np.int32]]:
    """Return each document's tokens, in the order of `packed.ids`."""
    parts: list[list[npt.NDArray[np.int32]]] = [[] for _ in packed.ids]
    for index, owner in enumerate(packed.owners.tolist()):
        parts[owner].append(packed.piece(index))
    return [np.concatenate(part) for part in parts]


def _digest(document: npt.NDArray[Any]) -> bytes:
    return hashlib.sha256(document.astype(np.int32).tobytes()).digest()


def shuffle_words(packed: Packed, vocabulary: Vocabulary, seed: int, row: int) -> Packed:
    """Return the documents in rows of `row` tokens, with each document's words in random order, without spaces where a script has none."""
    texts = [vocabulary.decode(document.tolist(), skip_special_tokens=True) for document in _documents(packed)]
    mixed = []
    for number, text in enumerate(texts):
        own = [word.strip() for word in words(text)]
        order = np.random.default_rng([seed, number]).permutation(len(own))
        mixed.append(re.sub(f"(?<=[{UNSPACED}]) (?=[{UNSPACED}])", "", " ".join(own[at] for at in order)))
    ids = [[vocabulary.begin, *own, *vocabulary.end] for own in vocabulary.encode_batch(mixed)]
    return Packed.read(pa.table(pack(pa.array(ids, pa.list_(pa.int32())), list(packed.ids), row)))


def _anneal(
    job: int, number: int, arm: str, repeat: int, seed: int, tokens: Artifact, model: str, pools: PoolRows, names: Sequence[str],
    config: AnnealExperimentConfig, state: Path,
) -> dict[str, Any]:  # fmt: skip
    """Anneal the model on set `number` (-1: none) as `arm`; return a trial with held-out losses on the set (-1: all) and default tokens."""
    from puna.models.formats.checkpoint import load
    from puna.models.tokens.tokenizer import Tokenizer

    packed, heldout = set_aside(tokens, config.validation_share, config.heldout_tokens)
    sets, vocabulary = Pools.read(pools), Tokenizer.load(model)
    # A document may be both in a set and in the default tokens. If either holds it out, it is trained on in neither.
    aside = {packed.ids[owner] for owner in np.unique(packed.owners[heldout])}
    readers, shares = [Reader(packed, heldout | packed.of(frozenset().union(*sets.heldout_ids)), 1, seed, vocabulary.begin)], [1.0]
    if arm != DEFAULT:
        new, out = sets.training[number], _different(sets, number)[0] | sets.training[number].of(aside)
        if arm == "shuffled":
            left = {new.ids[owner] for owner in np.unique(new.owners[~out])}
            new = shuffle_words(new, vocabulary, seed, packed.row_length)
            out = ~new.of(left)
        readers.append(Reader(new, out, 1, seed, vocabulary.begin))
        shares = [1.0 - config.share, config.share]
    mixed = Mixed(readers, np.array(shares), config.phase.rows_per_step)
    size, settings = config.compute.micro_batch_tokens, config.phase.train_config(config.optimizer, config.compute)
    name = DEFAULT if arm == DEFAULT else f"{names[number]} {arm}" if arm != "set" else names[number]
    title = f"anneal_experiment, run {name} {repeat}"
    proxy = train_proxy(load(Path(model)), title, lambda step: mixed.batches(step, size), mixed.lengths, settings, seed, state)
    own = range(len(names)) if arm == DEFAULT else [number]
    losses = {
        **{f"set {each}": mean_loss(proxy.model, sets.heldout[each], size) for each in own},
        DEFAULT: mean_loss(proxy.model, packed.validation_pieces(heldout), size),
    }
    parameters = {"share": config.share if arm != DEFAULT else 0.0, "repeat": repeat, "losses": losses}
    return {**trial_row(job, name, parameters, losses[DEFAULT], proxy), "losses": losses}


class Verdict(NamedTuple):
    """The verdict on a set: gains on held-out text over the default mix and over shuffled words; the reason of a refusal, or ""; passes."""

    name: str
    gains: dict[str, intervals.Interval]
    over_shuffled: dict[str, intervals.Interval]
    refusal: str
    read: float


def _verdict(
    number: int, name: str, read: float, losses: dict[tuple[int, str, int], dict[str, float]], config: AnnealExperimentConfig
) -> Verdict:
    def gain(text: str, control: tuple[int, str]) -> intervals.Interval:
        pairs = [(losses[*control, repeat][text], losses[number, "set", repeat][text]) for repeat in range(config.repeats)]
        return intervals.mean([without - with_ for without, with_ in pairs])

    own, default = f"set {number}", (-1, DEFAULT)
    gains = {text: gain(held, default) for text, held in ((OWN, own), (DEFAULT, DEFAULT))}
    over = {text: gain(held, (number, "shuffled")) for text, held in ((OWN, own), (DEFAULT, DEFAULT))}
    refusal = ""
    if gains[OWN].low <= config.least_gain:
        refusal = f"its gain over the default mix may be as low as {gains[OWN].low:.3f}"
    elif over[OWN].low <= config.least_gain:
        refusal = f"its gain over its own words shuffled may be as low as {over[OWN].low:.3f}"
    elif -over[DEFAULT].low > config.most_default_rise:
        refusal = f"the loss on default text may rise by {-over[DEFAULT].low:.3f} more than with its words shuffled"
    return Verdict(name, gains, over, refusal, read)


def _weights(mixture: Artifact, groups: Sequence[Group], accepted: set[str], share: float) -> list[dict[str, Any]]:
    """Return each category's weight in the annealing mix: the mixture's times 1 - `share`, plus an accepted set's part of `share`."""
    table = mixture.read(columns=["category", "weight"]).group_by("category").aggregate([("weight", "max")])
    natural = dict(zip(table["category"].to_pylist(), table["weight_max"].to_pylist(), strict=True))
    size = {name: amount.bytes for group in groups for name, amount in group.members.items()}
    part, divisor = share if accepted else 0.0, sum(size[name] for name in accepted) or 1
    return [
        {"category": name, "weight": (1 - part) * weight / sum(natural.values()) + part * size.get(name, 0) / divisor * (name in accepted)}
        for name, weight in sorted(natural.items())
    ]


def _report(verdicts: Sequence[Verdict], config: AnnealExperimentConfig, run: StageRun) -> None:
    rows, bars = [], dict[str, list[tuple[Any, float]]]()
    for verdict in verdicts:
        for metric, over, interval in (
            ("gain", "the default mix", verdict.gains), ("gain_over_shuffled", "its words shuffled", verdict.over_shuffled)
        ):  # fmt: skip
            for text, value in interval.items():
                task = verdict.name if text == OWN else f"{verdict.name}/{text}"
                rows.append(intervals.evaluation_row(task, metric, value, config.repeats))
                bars.setdefault(f"over {over}", []).append((task, value.value))
        rows.append(intervals.evaluation_row(verdict.name, "readings", verdict.read, 1))
        rows.append(intervals.evaluation_row(verdict.name, "accepted", float(not verdict.refusal), 1))
        run.metric(f"verdict_{verdict.name}", f"refused: {verdict.refusal}" if verdict.refusal else "accepted")
    run.metric("accepted_sets", sum(not verdict.refusal for verdict in verdicts))
    run.write_rows(rows)
    title, y = "What the data sets are worth in annealing", "decrease of the loss, nats per token"
    if bars:
        run.figure("gain", Figure(title, x="held-out text", y=y, kind="bar", series=bars))
