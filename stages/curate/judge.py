"""`judge`: a language model's grades of sampled pages, as labels for `train_encoder_quality` and `train_code_reasoning`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from puna.stages.contract import Documents, External, Facts, Figure, Model, SeededConfig, Signals, StageRun, declare_signal, stage
from puna.stages.contract.signals import signals_of
from puna.stages.curate.classifiers.encoder import Place, place_of
from puna.stages.draws import uniform
from puna.stages.endpoint import Endpoint, EndpointConfig, grade_of
from puna.stages.grading import mean_grades, tokens_apart
from puna.stages.training.proxy_runs import one_thread
from puna.storage import Artifact, PunaError, errors_at
from puna.storage.work import write_array

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

F64 = NDArray[np.float64]
Kind = Literal["scale", "yes_no"]
Grade = Literal["judgement", "code_judgement", "reasoning_judgement"]
TEXT = "{text}"
TOP = 5  # maximum points of the built-in scales

# The quality to grade, and criteria worth one point each. The additive scales follow FineWeb-Edu (arXiv 2406.17557), in Puna's words.
SCALES: dict[Grade, tuple[str, tuple[str, ...]]] = {
    "judgement": ("how much a reader can learn from the web page below", (
        "It has a subject: it is more than menus, offers, notices or a list of links.",
        "It informs about this subject, even if loosely or between advertisements.",
        "Its main part hangs together, and a teacher could point pupils to it.",
        "It explains rather than claims, in good order and good language, as a textbook or an encyclopedia does.",
        "It is excellent: thorough, exact, complete in itself, without anything beside the point.",
    )),
    "code_judgement": ("how much the web page below teaches programming", (
        "Software or computing is its subject.",
        "It shows source code, commands or configuration.",
        "Prose and code belong together: the text says what the code is for.",
        "Someone could learn a language, a library or a technique from it.",
        "It is excellent: the code is complete and correct, and each step is explained.",
    )),
    "reasoning_judgement": ("how much the web page below reasons", (
        "Mathematics, a science or engineering is its subject.",
        "It states facts, quantities or formulas exactly.",
        "It draws conclusions: one statement follows from others.",
        "It works through a deduction, a proof, a calculation or a solved problem.",
        "It is excellent: every step is given and justified, so that a student could follow it alone.",
    )),
}  # fmt: skip

YES_NO: dict[Grade, str] = {
    "judgement": "Does the web page below inform and explain so well that an encyclopedia would cite it, or a teacher hand it out?",
    "code_judgement": "Does the web page below teach programming, with source code and prose that explains it?",
    "reasoning_judgement": "Does the web page below deduce something step by step in mathematics, a science or engineering?",
}


class Question(NamedTuple):
    """A question about a page: the `prompt` with a placeholder for the page, the possible `answers`, and their grades, `values`. `start`:
    the beginning of the model's answer, before a space and one of `answers`. `chat`: use the model's chat format."""

    prompt: str
    answers: tuple[str, ...]
    values: tuple[float, ...]
    start: str
    chat: bool


def built_in(signal: Grade, kind: Kind) -> str:
    page = f"The page:\n<<<\n{TEXT}\n>>>"
    if kind == "yes_no":
        return f"{YES_NO[signal]}\n\n{page}\n\nReply with Yes or No alone."
    subject, points = SCALES[signal]
    listed = "\n".join(f"- {point}" for point in points)
    start = f"Grade {subject}. Begin with 0 and add one point for each line that is true of it:\n{listed}"
    return f"{start}\n\n{page}\n\nReply with the number of points alone, one digit from 0 to {len(points)}."


MARK = "\ufdd0"  # placeholder for the page in a rendered dialogue: a code point that never occurs in valid text
TOKEN_CHARACTERS = 16  # maximum characters per token: pages are cut to this length before they are encoded


class Grader:
    """A grader of pages: a model, and a question as token ids: `head`, the page, `tail`, then `tokens` of one answer."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, question: Question, max_tokens: int) -> None:
        """Encode the question. Raise PunaError if the model has no chat format or too short a context."""
        self.model, self.question, self.max_tokens = model, question, max_tokens
        before, after = _frame(tokenizer, question)
        markup: Callable[[str], list[int]] = lambda text: tokenizer.encode_markup(text)[0]  # noqa: E731
        self.head = [*([] if question.chat else tokenizer.lead), *markup(before)]
        self.tail, self.tokens = tokens_apart([markup(f"{after} {answer}") for answer in question.answers], question.answers)
        self._encode = tokenizer.encode  # encodes special tokens that a page spells out as plain characters
        length, most = len(self.head) + max_tokens + len(self.tail), model.config.max_position_embeddings
        if length > most:
            raise PunaError(f"judge.max_tokens={max_tokens}: with the prompt's {length - max_tokens} tokens this is more than the "
                f"{most} that the model reads; give at most {max(most - length + max_tokens, 0)}")  # fmt: skip

    def pages(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the first tokens of each page, at most `max_tokens`."""
        return [self._encode(text[: TOKEN_CHARACTERS * self.max_tokens])[: self.max_tokens] for text in texts]

    def __call__(self, texts: Sequence[str]) -> tuple[F64, F64]:
        """Return each page's grade and the total probability of the possible answers, both float64[n], from one forward pass: each page
        with the question's tail is a branch of the question's head."""
        import torch

        from puna.models.forest import Forest

        branches = [page + self.tail for page in self.pages(texts)]
        forest = Forest.branch(self.head, branches) if self.head else Forest.pack(branches)
        place = next(self.model.parameters()).device
        last = torch.tensor([len(branch) for branch in branches], device=place).cumsum(0) + len(self.head) - 1
        grades, chances = mean_grades(self.model.logits(self.model.hidden(forest.to(place))[last]), self.tokens, self.question.values)
        return grades.cpu().numpy(), chances.cpu().numpy()


def _frame(tokenizer: Tokenizer, question: Question) -> tuple[str, str]:
    prompt = question.prompt.replace(TEXT, MARK)
    if not question.chat:
        whole = f"{prompt}\n{question.start}"
    elif tokenizer.template is None:
        raise PunaError("judge.chat: the model has no chat format; set chat=false to let it continue the prompt")
    else:
        dialogue = [{"role": "user", "content": prompt}]
        whole = tokenizer.template.render(dialogue, add_generation_prompt=True) + question.start
    before, _, after = whole.partition(MARK)
    return before, after


@lru_cache(maxsize=1)
def grader(place: Place, question: Question, max_tokens: int, device: str) -> Grader:
    from puna.models.formats.checkpoint import CheckpointError, load_with_tokenizer

    with errors_at(f"judge: the model in {place.path} cannot be read", CheckpointError, ValueError, OSError):
        model, tokenizer = load_with_tokenizer(place.path, "lm")
    return Grader(model.eval().to(device), tokenizer, question, max_tokens)


DIGITS = 4  # the last digits of a network's outputs depend on the machine
BINS = 20
for _name, _meaning in (
    ("judgement", "a judge's grade of the document's quality"),
    ("code_judgement", "a judge's grade of the document as a page with code"),
    ("reasoning_judgement", "a judge's grade of the document as a page of deduction in mathematics or science"),
):
    declare_signal(_name, float, "grade", _meaning, optional=True)


class JudgeConfig(SeededConfig):
    signal: Grade = Field("judgement", description="Signal to write, which selects the built-in prompt")
    question: Kind = Field("scale", description="scale: points from 0 to max_grade; yes_no: the probability of Yes rather than No, 0 to 1")
    prompt: str | None = Field(None, description="Your own prompt, with {text} as the placeholder for the page; null: the built-in prompt")
    max_grade: int = Field(TOP, ge=1, le=9, description="Maximum grade in your own prompt, one digit")
    answer_start: str = Field("Answer:", description="Beginning of the model's answer, followed by a space and the grade")
    chat: bool = Field(True, description="Ask in the model's chat format; false: the model continues the prompt")
    sample: int = Field(1000, ge=1, description="Maximum documents to grade per source, or with `language`, per source and language")
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources whose documents are not graded")
    max_tokens: int = Field(512, ge=8, le=32_768, description="Maximum tokens read from each document (endpoint: 4 characters each)")
    batch_documents: int = Field(8, ge=1, le=1024, description="Number of documents per forward pass")
    endpoint: EndpointConfig | None = Field(None, description="Remote model that writes the grades; null: the input model or checkpoint")
    reply_tokens: int = Field(256, ge=1, le=65_536, description="Maximum length of the remote model's reply including reasoning, in tokens")

    @field_validator("prompt")
    @classmethod
    def _place_for_the_page(cls, prompt: str | None) -> str | None:
        if prompt is not None and (times := prompt.count(TEXT)) != 1:
            raise ValueError(f"a prompt contains {TEXT} once, as placeholder for the page; this one contains it {times} times")
        return prompt

    @model_validator(mode="after")
    def _points_of_the_prompt(self) -> JudgeConfig:
        if self.prompt is None and self.max_grade != TOP:
            raise ValueError(f"max_grade={self.max_grade}: the built-in prompts have {TOP} points; give your own prompt, too")
        if self.endpoint is not None and not self.chat:
            raise ValueError("chat=false: endpoints are always asked by chat; leave out chat or the endpoint")
        return self

    def make_question(self) -> Question:
        answers = ("No", "Yes") if self.question == "yes_no" else tuple(map(str, range(self.max_grade + 1)))
        prompt, values = self.prompt or built_in(self.signal, self.question), tuple(map(float, range(len(answers))))
        return Question(prompt, answers, values, self.answer_start, self.chat)


def needs(config: JudgeConfig, facts: Facts) -> list[str]:
    """Return a message if the endpoint's key is missing, and one if a model is given in addition to the endpoint."""
    if config.endpoint is None:
        return []
    both = bool({"model", "checkpoint"} & set(facts.inputs))
    return [*config.endpoint.unmet("endpoint"), *(["endpoint: it replaces the model that grades; leave one of them out"] if both else [])]


@stage(kind="signals", needs=needs)
def judge(
    documents: Documents, model: Model | None, checkpoint: External | None, language: Signals | None, config: JudgeConfig, run: StageRun
) -> None:
    """Grade a sample of documents by a language model's probabilities of the possible grades.

    The grade is the mean of the possible grades, weighted by their probabilities as the next token after question and document (G-Eval, Liu
    et al., arXiv 2303.16634, section 2); no text is generated. Documents outside the sample get null. The sample depends only on ids,
    sources, languages and seed. `train_encoder_quality` and `train_code_reasoning` take the signals as `labels` (Llama 3, section 3.1.3).

    `model` is a model of this pipeline; `checkpoint` is a local Hugging Face folder or a GGUF file. The metric `answer_probability` is the
    mean total probability of the possible answers; if it is low, the model did not understand the question. With `endpoint`, a remote model
    writes the grades, and `answer_probability` is the share of replies that contain a grade."""
    place = None if config.endpoint is not None else place_of("judge", "checkpoint", model, checkpoint, gguf=True)
    ids, sources = documents.read(columns=["id", "source"]).to_pydict().values()
    sample = _sample(ids, sources, language, config)
    grades, chances = np.full(len(ids), np.nan), np.zeros(0)
    if len(sample):
        if place is None:
            grades[sample], chances = _ask(run, documents, sample, config)
        else:
            grades[sample], chances = _grade_documents(run, documents, sample, place, config)
    column = pa.array(np.round(grades, DIGITS), pa.float64(), from_pandas=True)
    run.write(pa.table({"id": pa.array(ids, pa.string()), config.signal: column}))
    run.metric("graded", len(sample))
    if len(sample):
        if len(given := grades[sample][~np.isnan(grades[sample])]):
            run.metric("mean_grade", round(float(np.nanmean(grades[sample])), DIGITS))
        run.metric("answer_probability", round(float(chances.mean()), DIGITS))
        counts, edges = np.histogram(np.round(given, DIGITS), BINS, (0.0, max(config.make_question().values)))
        bars = [(float(edge), float(count)) for edge, count in zip(edges[:-1], counts, strict=True)]
        run.figure("grades", Figure("Grades of the judge", "grade", "documents", {"documents": bars}, kind="bar"))


def _sample(ids: list[str], sources: list[str], language: Artifact | None, config: JudgeConfig) -> NDArray[np.int64]:
    """Return the row numbers of the documents to grade, int64[n], ascending: those with the smallest hashes per source and language."""
    rows = np.flatnonzero(~np.isin(np.array(sources, dtype=object), config.exempt_sources))
    own = [ids[row] for row in rows]
    names = [""] * len(rows)
    if language is not None:
        table = signals_of(language, pa.chunked_array([pa.array(own, pa.string())]), ["language"])
        names = [name or "" for name in table["language"].to_pylist()]
    groups = np.unique([f"{sources[row]}\n{name}" for row, name in zip(rows.tolist(), names, strict=True)], return_inverse=True)[1]
    order = np.lexsort((uniform(own, config.seed, "judge"), groups))
    rank = np.arange(len(rows)) - np.searchsorted(groups[order], groups[order])
    return np.sort(rows[order[rank < config.sample]])


def _grade_documents(run: StageRun, documents: Artifact, chosen: NDArray[np.int64], place: Place, config: JudgeConfig) -> tuple[F64, F64]:
    """Return the grade of each chosen document and the total probability of the answers. This process uses a GPU, workers use CPUs."""
    import torch

    batches = enumerate(_batches(documents, chosen, config.batch_documents))
    total = -(-len(chosen) // config.batch_documents)
    if torch.cuda.is_available():
        results = []
        for batch in batches:
            results.append(_grade(batch, place, config, "cuda", str(run.scratch)))
            run.progress(len(results), total)
    else:
        results = list(run.map(_grade, batches, place, config, "cpu", str(run.scratch), rows=total))
    grader.cache_clear()
    both = np.concatenate(results, axis=1)
    return both[0], both[1]


def _ask(run: StageRun, documents: Artifact, chosen: NDArray[np.int64], config: JudgeConfig) -> tuple[F64, F64]:
    """Return the grades that the endpoint's model writes (NaN for a reply without one), and 1 for each reply with a grade, else 0."""
    assert config.endpoint is not None
    endpoint, question = Endpoint(config.endpoint, run), config.make_question()
    grades: list[float] = []
    for texts in _batches(documents, chosen, 100 * config.endpoint.at_once):
        prompts = [question.prompt.replace(TEXT, text[: 4 * config.max_tokens]) for text in texts]
        bodies = [{"messages": [{"role": "user", "content": one}], "temperature": 0, "max_tokens": config.reply_tokens} for one in prompts]
        grades += [_read_grade(reply.final if reply.finished else "", question) for reply in endpoint.ask(bodies, "grades")]
    endpoint.write()
    return np.array(grades), (~np.isnan(grades)).astype(np.float64)


def _read_grade(text: str, question: Question) -> float:
    """Return a reply's grade: for a yes-no question 1 or 0 by its first word, else its first number; NaN if there is no valid grade."""
    if question.answers == ("No", "Yes"):
        word = text.casefold().lstrip("*\"'")
        return 1.0 if word.startswith("yes") else 0.0 if word.startswith("no") else float("nan")
    grade = grade_of(text, len(question.answers) - 1)
    return float("nan") if grade is None else grade


def _batches(documents: Artifact, chosen: NDArray[np.int64], size: int) -> Iterator[list[str]]:
    """Yield the texts of the chosen rows, `size` at a time. The batches do not depend on how the table is divided into shards."""
    first = 0
    waiting: list[str] = []
    for batch in documents.batches(columns=["text"]):
        low, high = np.searchsorted(chosen, [first, first + batch.num_rows])
        waiting += batch.column(0).take(pa.array(chosen[low:high] - first)).to_pylist()
        first += batch.num_rows
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if waiting:
        yield waiting


def _grade(batch: tuple[int, list[str]], place: Place, config: JudgeConfig, device: str, scratch: str) -> F64:
    """Return each text's grade and total probability of the answers, float64[2, n]. Both are saved in a file for a resumed run."""
    import torch

    number, texts = batch
    file = Path(scratch) / f"grades-{number:09d}.npy"
    if not file.exists():
        with one_thread(), torch.no_grad():
            grades = np.stack(grader(place, config.make_question(), config.max_tokens, device)(texts))
        write_array(file, grades)
    return np.asarray(np.load(file))
