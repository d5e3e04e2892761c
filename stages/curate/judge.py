"""`judge`: a language model grades a sample of pages; `encoder_quality` and `code_reasoning` learn from its grades."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from puna.stages.contract import Documents, External, Figure, Model, SeededConfig, Signals, StageRun, declare_signal, stage
from puna.stages.curate.classifiers.device import Place, place_of, reading
from puna.stages.curate.classifiers.questions import TOP, Grade, Kind, Question, answers_of, built_in, check_prompt
from puna.stages.curate.select import signals_of
from puna.stages.draws import uniform
from puna.storage import Artifact
from puna.storage.work import write_array

DIGITS = 4  # the last digits of a network's numbers depend on the machine
BINS = 20
for _name, _meaning in (
    ("judgement", "a judge's grade of the document's quality"),
    ("code_judgement", "a judge's grade of the document as a page with code"),
    ("reasoning_judgement", "a judge's grade of the document as a page of deduction in mathematics or science"),
):
    declare_signal(_name, float, "grade", _meaning, optional=True)


class JudgeConfig(SeededConfig):
    """What the model is asked, and about which documents."""

    signal: Grade = Field("judgement", description="Signal that is written; it chooses the built-in prompt: quality, code or reasoning")
    question: Kind = Field(
        "scale", description="scale: points from 0 to max_grade; yes_no: the grade is the probability of Yes against No, from 0 to 1"
    )
    prompt: str | None = Field(None, description="What is asked, with the mark {text} where the page goes; null: the built-in prompt")
    max_grade: int = Field(TOP, ge=1, le=9, description="Maximum grade that a prompt of your own gives, one digit")
    answer_start: str = Field("Answer:", description="How the model's answer begins, before a space and the grade")
    chat: bool = Field(True, description="Ask in the model's chat format; false: the model continues the prompt, as one without chat does")
    sample: int = Field(
        1000, ge=1, description="Documents graded of each source, and of each language in it where signals `language` are given"
    )
    exempt_sources: tuple[str, ...] = Field(("code",), description="Sources of which no document is graded")
    max_tokens: int = Field(512, ge=8, le=32_768, description="Tokens of each document that the model reads, from its beginning")
    batch_documents: int = Field(8, ge=1, le=1024, description="Documents in one forward pass")

    @field_validator("prompt")
    @classmethod
    def _place_for_the_page(cls, prompt: str | None) -> str | None:
        return None if prompt is None else check_prompt(prompt)

    @model_validator(mode="after")
    def _points_of_the_prompt(self) -> JudgeConfig:
        if self.prompt is None and self.max_grade != TOP:
            raise ValueError(f"max_grade={self.max_grade}: the built-in prompts give {TOP} points; give a prompt too")
        return self

    def asked(self) -> Question:
        """The question."""
        answers, values = answers_of(self.question, self.max_grade)
        return Question(self.prompt or built_in(self.signal, self.question), answers, values, self.answer_start, self.chat)


@stage(kind="signals")
def judge(
    documents: Documents, model: Model | None, checkpoint: External | None, language: Signals | None, config: JudgeConfig, run: StageRun
) -> None:
    """Grade a sample of documents by a language model's own probabilities of the grades.

    The grade is the mean of all grades, each weighted by the probability that the model gives it as the next token after the
    question and the document, as G-Eval does (Liu et al., arXiv 2303.16634, section 2): one forward pass, nothing generated
    or drawn, and finer steps than the digits have. Null: not graded. The sample depends on ids and the seed alone. Llama 3
    (arXiv 2407.21783, section 3.1.3) distils such judgements into small classifiers, which `encoder_quality` and
    `code_reasoning` do with the signals written here as their `labels`: `code_judgement` and `reasoning_judgement` come from
    the same stage by `signal`.

    `model` is a model of this pipeline, or `checkpoint` a local folder in Hugging Face's layout or a GGUF file, of the families
    that `puna.models` computes. The metric `answer_probability` is the mean probability of all possible answers together: a
    low one says that the model does not understand the question, and that its grades are worth little.
    """
    place = place_of("judge", "checkpoint", model, checkpoint, gguf=True)
    head = documents.read(columns=["id", "source"]).to_pydict()
    ids = head["id"]
    chosen = _sample(ids, head["source"], language, config)
    grades, said = np.full(len(ids), np.nan), np.zeros(0)
    if len(chosen):
        grades[chosen], said = _graded(run, documents, chosen, place, config)
    column = pa.array(np.round(grades, DIGITS), pa.float64(), from_pandas=True)
    run.write(pa.table({"id": pa.array(ids, pa.string()), config.signal: column}))
    run.metric("graded", len(chosen))
    if len(chosen):
        run.metric("mean_grade", round(float(grades[chosen].mean()), DIGITS))
        run.metric("answer_probability", round(float(said.mean()), DIGITS))
        counts, edges = np.histogram(np.round(grades[chosen], DIGITS), BINS, (0.0, max(config.asked().values)))
        bars = [(float(edge), float(count)) for edge, count in zip(edges[:-1], counts, strict=True)]
        run.figure("grades", Figure("Grades of the judge", "grade", "documents", {"documents": bars}, kind="bar"))


def _sample(ids: list[str], sources: list[str], language: Artifact | None, config: JudgeConfig) -> NDArray[np.int64]:
    """Rows of the documents to grade, int64[n], ascending: of each group those with the smallest hashes."""
    rows = np.flatnonzero(~np.isin(np.array(sources, dtype=object), config.exempt_sources))
    own = [ids[row] for row in rows]
    names = [""] * len(rows)
    if language is not None:
        table = signals_of(language, pa.chunked_array([pa.array(own, pa.string())]), ["language"])
        names = [name or "" for name in table["language"].to_pylist()]
    found = sorted({(sources[row], name) for row, name in zip(rows.tolist(), names, strict=True)})
    number = {group: at for at, group in enumerate(found)}
    groups = np.array([number[sources[row], name] for row, name in zip(rows.tolist(), names, strict=True)], np.int64)
    order = np.lexsort((uniform(own, config.seed, "judge"), groups))
    rank = np.arange(len(rows)) - np.searchsorted(groups[order], groups[order])
    return np.sort(rows[order[rank < config.sample]])


def _graded(
    run: StageRun, documents: Artifact, chosen: NDArray[np.int64], place: Place, config: JudgeConfig
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Grade of each chosen document and probability of a proper answer. A GPU is driven by this process, CPUs by the workers."""
    import torch

    from puna.stages.curate.classifiers.grader import grader

    batches = enumerate(_batches(documents, chosen, config.batch_documents))
    total = -(-len(chosen) // config.batch_documents)
    if torch.cuda.is_available():
        found = []
        for batch in batches:
            found.append(_grade(batch, place, config, "cuda", str(run.scratch)))
            run.progress(len(found), total)
    else:
        found = list(run.map(_grade, batches, place, config, "cpu", str(run.scratch), rows=total))
    grader.cache_clear()
    both = np.concatenate(found, axis=1)
    return both[0], both[1]


def _batches(documents: Artifact, chosen: NDArray[np.int64], size: int) -> Iterator[list[str]]:
    """The texts of the chosen rows, `size` at a time: the same together however the table is cut."""
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


def _grade(batch: tuple[int, list[str]], place: Place, config: JudgeConfig, device: str, scratch: str) -> NDArray[np.float64]:
    """In a worker: grade and probability of a proper answer of each text, float64[2, n]; kept in a file should the run end early."""
    from puna.stages.curate.classifiers.grader import grader

    number, texts = batch
    file = Path(scratch) / f"grades-{number:09d}.npy"
    if not file.exists():
        with reading():
            made = np.stack(grader(place, config.asked(), config.max_tokens, device)(texts))
        write_array(file, made)
    return np.asarray(np.load(file))
