"""Evaluation of a model: bits per byte, multiple choice, and answers scored by verifiers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue, model_validator

from puna.models.memory import Work
from puna.models.serving import ServingSettings, engine_of, quantize_for, vllm_engine
from puna.stages.contract import Documents, Facts, Figure, Mixture, Model, Prompts, SeededConfig, StageConfig, StageRun, stage
from puna.stages.conversations import answer_text, as_text, messages_of, prompt_ids
from puna.stages.evaluation import multiple_choice
from puna.stages.evaluation.multiple_choice import heldout_pages, training_text
from puna.stages.executors import ranks
from puna.stages.search import SearchConfig, Values, search
from puna.stages.training import bits_per_byte, intervals
from puna.stages.training.bad_rows import BadRows, BadRowsConfig, Limit
from puna.stages.training.bits_per_byte import NGrams, dictionary_bits
from puna.stages.training.corpus import Chosen, rank
from puna.stages.training.needs import serving_fits
from puna.stages.training.serving import DealtEngine, load_served
from puna.stages.training.train import heldout_prompts
from puna.stages.training.turns import TurnsConfig, in_turns, to_score, with_tools
from puna.stages.verifiers.base import Score, ScoringConfig, is_correct, score_ending
from puna.stages.verifiers.judges import Tools
from puna.stages.verifiers.registry import from_json
from puna.stages.verifiers.scoring import Scorer, verifiers_named
from puna.storage import Artifact, PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.generation import AnswerEngine
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

ALL = "all"
WORD = re.compile(r"\w+")
RUN = 3  # words per run, see `variety`
STAGED = "pipeline stages can only generate; set serving.layout to data or tensor, or leave documents out"
OWN_BITS = "document_bits_per_byte"
"""Metric of bits per byte with each page's end token, in half-overlapping windows; `benchmark` has the harness's `bits_per_byte`."""


class PagesConfig(StageConfig):
    """Settings of measurements on held-out pages."""

    max_bytes: int = Field(400_000, ge=1000, description="Maximum held-out text to score, bytes; pages are chosen by a hash of their ids")
    max_page_bytes: int = Field(100_000, ge=100, description="Maximum size of a page, in bytes; longer pages are left out")
    questions: int = Field(100, ge=0, description="Maximum number of multiple-choice questions made from the pages; 0: none")
    options: int = Field(4, ge=2, le=26, description="Number of options per question, including the right one")
    prompt_words: int = Field(40, ge=1, description="Number of words of the page that a question shows")
    option_words: int = Field(20, ge=1, description="Number of words per option")
    baseline_tokens: int = Field(2_000_000, ge=0, description="Maximum training tokens of a model to compute baselines for; 0: none")
    ngram_order: int = Field(4, ge=1, le=16, description="Maximum length of the counted n-grams, in tokens")
    continuations: int = Field(3, ge=0, description="Number of pages that the model continues, as examples for a reader")


class AnswersConfig(TurnsConfig):
    """Settings of answers to held-out prompts."""

    prompts_per_task: int = Field(100, ge=1, description="Maximum number of held-out prompts per task")
    temperature: float = Field(0.0, ge=0, le=10, description="Sampling temperature; 0: greedy decoding")
    max_tokens: int = Field(64, ge=1, description="Maximum tokens of an answer, including its end token")
    taste: dict[str, JsonValue] | None = Field(None, description="Verifier, {name: …, …}, of the annotators' taste, for the metric `liked`")
    search: SearchConfig | None = Field(None, description="Search that picks each answer from several; null: one answer, no search")
    examples: int = Field(4, ge=0, description="Number of answers per task to keep as examples for a reader")
    scoring: ScoringConfig = Field(ScoringConfig(), description="Limits on the prompts' verifiers")

    @model_validator(mode="after")
    def _tries_differ(self) -> AnswersConfig:
        if self.search is not None and not self.temperature:
            raise ValueError("search chooses among answers, which are all equal at temperature 0; set a temperature above 0")
        return self


class EvaluateConfig(BadRowsConfig, SeededConfig):
    pages: PagesConfig = Field(PagesConfig(), description="Bits per byte and multiple choice on held-out pages")
    answers: AnswersConfig = Field(AnswersConfig(), description="Answers to held-out prompts")
    context: int | None = Field(None, ge=2, description="Maximum context for pages, in tokens; null: the model's own")
    micro_batch_tokens: int = Field(8192, ge=16, description="Maximum tokens per forward pass")
    serving: ServingSettings = Field(ServingSettings(), description="Settings of the inference engine")

    @model_validator(mode="after")
    def _context_fits(self) -> EvaluateConfig:
        if self.context is not None and self.context > self.micro_batch_tokens:
            raise ValueError(f"context {self.context} does not fit into micro_batch_tokens {self.micro_batch_tokens}")
        if self.answers.turns > 1 and (self.answers.search is not None or self.serving.engine == "vllm"):
            raise ValueError("answers.turns is untested with a search or vLLM; set answers.turns to 1")
        return self

    def reaches(self) -> list[tuple[str, str]]:
        own = (self.answers.taste, None if self.answers.search is None else self.answers.search.verifier)
        return [symbol for given in own if given is not None for symbol in from_json(given).reaches()]


def needs(config: EvaluateConfig, facts: Facts) -> list[str]:
    staged = [STAGED] if config.serving.layout.pipeline > 1 and "documents" in facts.inputs else []
    unmet = config.serving.unmet("serving") + config.answers.scoring.unmet("answers.scoring")
    return [*unmet, *staged, *serving_fits(facts, config.serving.layout, "model")]


@stage(kind="evaluation", ranks=True, needs=needs, named=verifiers_named)
def evaluate(
    model: Model, documents: Documents | None, mixture: Mixture | None, prompts: Prompts | None, judges: list[Model] | None,
    config: EvaluateConfig, run: StageRun,
) -> None:  # fmt: skip
    """Evaluate a model on pages and prompts that it was not trained on, with 95 % intervals.

    Pages are the mixture's held-out split; without a mixture, all documents. Measured on pages: bits per byte, including each page's end
    token; baselines fitted to the model's training tokens (see `baseline_tokens`), namely token n-grams, without and with counts of the
    page's earlier tokens, and zstd with the training text as dictionary; and multiple choice between continuations of several pages.

    Prompts are answered in the chat format and scored by their verifiers. `judges`: models that a verifier may refer to. A prompt is solved
    by an answer with score 1 that was not truncated (`cut_off_right`: number of right but truncated answers). If a verifier fails on an
    answer, the task's metrics leave it out, and `unscored_answers` counts it. Prompts that the chat template rejects, or that fill the
    model's context (without `serving.window`), are in `dropped`; see `bad_rows`. `variety`, low if answers follow one template, is the mean
    share of an answer's three-word runs that no other answer has, without the words of its question. `answer_tokens` includes answers that
    a search did not choose; `sampled_tokens` and `checker_calls` are a search's budget. `scores` has each prompt's `score` and, with a
    taste, `liked` (1 if right and to taste, else 0)."""
    if documents is None and prompts is None:
        raise PunaError("evaluate needs documents or prompts; give at least one of them")
    if mixture is not None and documents is None:
        raise PunaError("evaluate: a mixture needs its documents; give both")
    if documents is not None and config.serving.layout.pipeline > 1:
        raise PunaError(f"evaluate: {STAGED}")
    import torch

    from puna.models.formats.checkpoint import read_config

    longest = read_config(model.path()).max_position_embeddings
    work = Work(min(512, longest), config.answers.max_tokens, longest=min(longest, config.micro_batch_tokens))
    network, tokenizer, limits = load_served(model, config.serving, work, run, config.micro_batch_tokens)
    with errors_at(f"evaluate: {model.id}", ValueError):
        quantize_for(network, config.serving.weights)
    engine: AnswerEngine
    if documents is not None:
        pages = heldout_pages(documents, mixture, config.pages.max_page_bytes, config.pages.max_bytes, run)
        context = config.context or min(network.config.max_position_embeddings, config.micro_batch_tokens)
        most = 0 if ranks.follows() else config.pages.baseline_tokens
        read = training_text(model, documents, mixture, tokenizer, context, most, run)
        _bits(pages, read, network, tokenizer, context, config, run)
        _questions(pages, network, tokenizer, config, run)
        engine = DealtEngine(engine_of(network, tokenizer, **limits), config.serving.layout)
        _continuations(pages, engine, tokenizer, partial(_fits, tokenizer, network.config.max_position_embeddings), config, run)
    if prompts is not None:
        if config.serving.engine == "vllm":
            del network  # frees GPU memory for vLLM
            torch.cuda.empty_cache()
            engine = vllm_engine(model.path(), tokenizer, config.serving)
        else:
            engine = DealtEngine(engine_of(network, tokenizer, config.serving.weights, **limits), config.serving.layout)
        _answers(prompts, judges or (), engine, tokenizer, longest, config, run, alone=documents is None)


def _by_category(pages: Sequence[Any]) -> Iterator[tuple[str, list[int]]]:
    """Yield (task name, indices): first all pages, then each category if there are several."""
    yield "pages", list(range(len(pages)))
    categories = {page.category for page in pages}
    for category in sorted(categories) if len(categories) > 1 else ():
        yield f"pages/{category}", [i for i, page in enumerate(pages) if page.category == category]


def _bits(
    pages: Sequence[Chosen], read: Sequence[list[int]], model: Transformer, tokenizer: Tokenizer, context: int, config: EvaluateConfig,
    run: StageRun,
) -> None:  # fmt: skip
    texts = [page.text for page in pages]
    encoded = [[*tokenizer.lead, *ids, *tokenizer.end] for ids in tokenizer.encode_batch(texts)]
    tracker = partial(run.progress, note="bits per byte")
    size = config.micro_batch_tokens
    layout = config.serving.layout
    nats = ranks.dealt(encoded, lambda own: bits_per_byte.document_nats(model, own, context, size, progress=tracker), layout, tuple)
    if ranks.follows():
        return
    sizes, targets = [float(len(text.encode())) for text in texts], [len(ids) - 1.0 for ids in encoded]
    bits = {OWN_BITS: [bits_per_byte.bits(n) for n in nats]}
    if read:
        ngrams = NGrams(read, config.pages.ngram_order, tokenizer.vocab_size)
        for name, page in (("ngram", False), ("ngram_page", True)):
            bits[f"{name}_bits_per_byte"] = [bits_per_byte.bits(n) for n in ngrams.nats(encoded, page=page)]
        text = "\n".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in read)
        bits["dictionary_bits_per_byte"] = [float(value) for value in dictionary_bits(texts, text.encode())]
        run.metric("baseline_tokens", sum(map(len, read)))
    series: dict[str, list[tuple[Any, float]]] = {}
    for task, members in _by_category(pages):
        shares = {metric: _share(values, sizes, members) for metric, values in bits.items()}
        for metric, interval in shares.items():
            name = "model" if metric == OWN_BITS else metric.removesuffix("_bits_per_byte")
            series.setdefault(name, []).append((task.removeprefix("pages/") if "/" in task else ALL, interval.value))
            if task == "pages":
                run.metric(metric, interval.value)
        shares["nats_per_token"] = _share(nats, targets, members)
        run.write_rows([intervals.evaluation_row(task, metric, interval, len(members)) for metric, interval in shares.items()])
    run.metric("page_bytes", int(sum(sizes)))
    note = "Page by page; less is better."
    run.figure("bits_per_byte", Figure("Held-out pages", "category", "bits per byte", series, kind="bar", note=note))


def _share(values: Sequence[float], weights: Sequence[float], members: Sequence[int]) -> intervals.Interval:
    return intervals.ratio([values[i] for i in members], [weights[i] for i in members])


def _fits(tokenizer: Tokenizer, context: int, text: str) -> bool:
    """True if a text fills at most half of the context, in tokens. A single word, such as encoded data, may fill more."""
    most = context // 2
    return len(text.encode()) <= most or len(tokenizer.encode(text)) <= most  # a token has a byte or more


def _questions(pages: Sequence[Chosen], model: Transformer, tokenizer: Tokenizer, config: EvaluateConfig, run: StageRun) -> None:
    if not (own := config.pages).questions:
        return
    documents = [(page.id, page.category, page.text) for page in pages]
    fits = partial(_fits, tokenizer, model.config.max_position_embeddings)
    items = multiple_choice.build(documents, own.questions, own.options, own.prompt_words, own.option_words, run.seed("questions"), fits)
    run.metric("questions", len(items))
    if not items:
        return
    tracker = partial(run.progress, note="multiple choice")
    size, layout = config.micro_batch_tokens, config.serving.layout
    likelihoods = ranks.dealt(items, lambda own: multiple_choice.likelihoods(model, tokenizer, own, size, progress=tracker), layout)
    if ranks.follows():
        return
    for metric, normalized in (("accuracy", False), ("accuracy_per_byte", True)):
        right = [multiple_choice.likeliest(item, own, normalized) == item.answer for item, own in zip(items, likelihoods, strict=True)]
        run.metric(f"choice_{metric}", sum(right) / len(right))
        for task, members in _by_category(items):
            interval = intervals.wilson(sum(right[i] for i in members), len(members))
            run.write_rows([intervals.evaluation_row("choice" + task.removeprefix("pages"), metric, interval, len(members))])
    run.metric("choice_chance", 1.0 / own.options)


def _continuations(
    pages: Sequence[Chosen], engine: AnswerEngine, tokenizer: Tokenizer, fits: Callable[[str], bool], config: EvaluateConfig, run: StageRun
) -> None:
    from puna.models.generation import SamplingParams

    count = config.pages.prompt_words
    openings = ((page, multiple_choice.words(page.text, count)) for page in pages)
    whole = ((page, "".join(some)) for page, some in openings if len(some) == count)
    beginnings = list(islice(((page, text) for page, text in whole if fits(text)), config.pages.continuations))
    if not beginnings:
        return
    params = SamplingParams(temperature=0.8, max_tokens=64, stop=tuple(tokenizer.end), seed=run.seed("continuations"))
    prompts = [[*tokenizer.lead, *tokenizer.encode(text)] for _, text in beginnings]
    completions = engine.generate(prompts, params)
    for (page, text), (completion,) in zip(beginnings, completions, strict=True):
        detail = json.dumps({"category": page.category, "page": page.text[len(text) :][:300]}, ensure_ascii=False)
        output = answer_text(completion.tokens, tokenizer)
        run.write_rows([{"id": f"page-{page.id}", "kind": "continuation", "prompt": text, "text": output, "detail": detail}], "examples")


def _answers(
    prompts: Artifact, judges: Sequence[Artifact], engine: AnswerEngine, tokenizer: Tokenizer, context: int, config: EvaluateConfig,
    run: StageRun, alone: bool,
) -> None:  # fmt: skip
    """Write answers and scores; none if no prompt fits the context. `alone`: raise PunaError in that case: nothing else is evaluated."""
    from puna.models.generation import SamplingParams

    own = config.answers
    questions = [with_tools(row, own.tools) for row in _heldout_prompts(prompts, own.prompts_per_task, run.seed("prompts"))]
    bad = BadRows(config, "evaluate")
    within = Limit(context, "the model's max_position_embeddings", "the prompt with a token of the answer", "set serving.window")
    size = (lambda ids: len(ids) + 1) if config.serving.window is None else (lambda ids: 0)
    rendered = bad.examples(questions, partial(prompt_ids, tokenizer), size, within)
    if not alone and not rendered and all(row["rule"] == "too_long" for row in bad.dropped):
        return bad.write(run)
    bad.check_left(len(rendered), f"{len(questions)} held-out prompts")
    bad.write(run)
    rows, inputs = [row for row, _ in rendered], [ids for _, ids in rendered]
    scorer = Scorer(rows, config.answers.scoring, run, judges, needed="evaluate")
    params = SamplingParams(
        temperature=config.answers.temperature, max_tokens=config.answers.max_tokens, stop=tokenizer.stop_ids, seed=run.seed("answers"),
        speculate=config.serving.speculate,
    )
    if own.search is None:
        generate = in_turns(rows, inputs, tokenizer, own, Tools(own.scoring, run), "evaluate")
        completions = [row[0] for row in generate(engine, inputs, params, lambda done, total: run.progress(done, total, "answers"))]
        spent = sum(sum(completion.mask) for completion in completions)
    else:
        searches = search(engine, inputs, params, own.search, _chooser(config, rows, judges, run))
        completions, spent = [one.completion for one in searches], sum(one.tokens for one in searches)
        by_checker = own.search.verifier is not None and own.search.verifier["name"] != "reward_model"
        run.metric("sampled_tokens", spent)
        run.metric("checker_calls", own.search.n * len(rows) if by_checker else 0)
    if ranks.follows():
        return
    run.metric("answer_tokens", spent)
    asked = [to_score(row, completion, tokenizer) for row, completion in zip(rows, completions, strict=True)]
    texts = [text for _, text in asked]
    scores = scorer.scores(asked)
    scorer.report()
    liked: Sequence[Score] = [Score(None)] * len(rows)
    if (taste := config.answers.taste) is not None:
        tasted = [{**row, "verifier": json.dumps(taste)} for row in rows]
        liked = Scorer(tasted, config.answers.scoring, run, judges).scores(list(zip(tasted, texts, strict=True)))
    answers = [
        {**row, "text": text, "gold": score_ending(score.value, completion.finished), "liked": like.value, "detail": score.detail,
         "finished": completion.finished}
        for row, text, score, like, completion in zip(rows, texts, scores, liked, completions, strict=True)
    ]  # fmt: skip
    passing = zip(scores, completions, strict=True)
    run.metric("cut_off_right", sum(is_correct(score.value) and not completion.finished for score, completion in passing))
    _judge(answers, config.answers.examples, run)


def _chooser(config: EvaluateConfig, rows: Sequence[dict[str, Any]], judges: Sequence[Artifact], run: StageRun) -> Values | None:
    """Return a function that scores answers with the search's verifier, or None if the search has none."""
    assert config.answers.search is not None
    if (spec := config.answers.search.verifier) is None:
        return None
    questions = [{**row, "verifier": json.dumps(spec)} for row in rows]
    scorer = Scorer(questions, config.answers.scoring, run, judges)
    return lambda answers: [score.value for score in scorer.scores([(questions[number], text) for number, text in answers])]


def _heldout_prompts(prompts: Artifact, per_task: int, seed: int) -> list[dict[str, Any]]:
    """Return the held-out prompts with the smallest hashes, at most `per_task` per task."""
    tasks = heldout_prompts(prompts)
    return [row for task in sorted(tasks) for row in sorted(tasks[task], key=lambda row: (rank(seed, row["id"]), row["id"]))[:per_task]]


def _judge(found: Sequence[dict[str, Any]], examples: int, run: StageRun) -> None:
    bars: list[tuple[Any, float]] = []
    for task in [ALL, *sorted({row["task"] for row in found} - {ALL})]:
        members = [row for row in found if task in (ALL, row["task"])]
        values: dict[str, tuple[intervals.Interval, int]] = {}
        if scored := [row["gold"] for row in members if row["gold"] is not None]:
            values["accuracy"] = intervals.wilson(sum(map(is_correct, scored)), len(scored)), len(scored)
            values["score"] = intervals.mean(scored), len(scored)
            bars.append((task, values["accuracy"][0].value))
        if tasted := [_is_liked(row) for row in members if row["gold"] is not None and row["liked"] is not None]:
            values["liked"] = intervals.wilson(sum(tasted), len(tasted)), len(tasted)
        values["finished"] = intervals.wilson(sum(row["finished"] for row in members), len(members)), len(members)
        different = variety([(as_text(messages_of(row)), row["text"]) for row in members])
        values["variety"] = intervals.mean(different), len(members)
        run.write_rows([intervals.evaluation_row(task, metric, *value) for metric, value in values.items()])
        if task != ALL:
            run.write_rows([_example(row) for row in members[:examples]], "examples")
    judged = [row for row in found if row["gold"] is not None]
    scores = [{"id": row["id"], "name": "score", "value": row["gold"]} for row in judged]
    scores += [{"id": row["id"], "name": "liked", "value": float(_is_liked(row))} for row in judged if row["liked"] is not None]
    run.write_rows(scores, "scores")
    if not bars:
        raise PunaError(f"evaluate: no answer could be scored; the first: {found[0]['detail']}")
    run.metric("accuracy", bars[0][1])
    run.metric("prompts", len(found))
    run.figure("accuracy", Figure(title="Held-out tasks solved", x="task", y="accuracy", kind="bar", series={"accuracy": bars}))


def _example(row: dict[str, Any]) -> dict[str, Any]:
    about = {"task": row["task"], "reference": row["reference"], "score": row["gold"], "verifier": row["detail"]}
    prompt, detail = as_text(messages_of(row)), json.dumps(about, ensure_ascii=False)
    return {"id": f"prompt-{row['id']}", "kind": "answer", "prompt": prompt, "text": row["text"], "detail": detail}


def _is_liked(row: dict[str, Any]) -> bool:
    return is_correct(row["gold"]) and is_correct(row["liked"])


def variety(asked: Sequence[tuple[str, str]]) -> list[float]:
    """Return, for each (question, answer), the share of the answer's three-word runs that no other answer has, 0 to 1.

    The words of an answer's own question are ignored, so that a template in which only these words change gives 0 (cf. distinct-n, Li et
    al. 2016). An answer's beginning and end count as words. Shares are comparable only between equal numbers of answers."""
    runs = [_runs(question, answer) for question, answer in asked]
    having = Counter(run for one in runs for run in one)
    return [sum(having[run] == 1 for run in one) / len(one) for one in runs]


def _runs(question: str, answer: str) -> set[tuple[str, ...]]:
    terms = set(WORD.findall(question.lower()))
    words = ["", *(word for word in WORD.findall(answer.lower()) if word not in terms), ""]
    return {tuple(words[start : start + RUN]) for start in range(max(1, len(words) - RUN + 1))}
