"""Prompts for the questions of a task, and metrics from a model's likelihoods and answers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Literal

from puna.stages.conversations import answer_text, prompt_ids
from puna.stages.evaluation.calibration import confidence
from puna.stages.evaluation.likelihood import Encoder, Likelihood, Request
from puna.stages.evaluation.task_file import Document, Task
from puna.stages.evaluation.task_programs import matching, run_filter
from puna.stages.training.intervals import Interval, mean, ratio, wilson
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.lists import LETTERS
from puna.storage import PunaError, errors_at

if TYPE_CHECKING:
    from puna.models.generation import Completion
    from puna.models.tokens.tokenizer import Tokenizer

PromptFormat = Literal["plain", "chat"]
Options = Literal["cloze", "letters"]
OVERLAP = "overlap"
"""Score name under which `contamination` stores how much of a question occurs in training data."""


@dataclass
class Column:
    """A metric of a task with one value per document. `weights`: numbers of words or bytes, by which perplexities divide the values (nats).
    `given`: the metric itself if documents have no values. `confidences`: probabilities of the chosen options."""

    metric: str
    values: list[float]
    filter: str = "none"
    weights: list[float] = field(default_factory=list)
    given: Interval | None = None
    confidences: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.metric if self.filter == "none" else f"{self.metric},{self.filter}"

    def interval(self) -> Interval:
        """Return the metric with its 95 % interval. The value is exactly that of lm-evaluation-harness."""
        if self.given is not None:
            return self.given
        if not self.weights:
            whole = all(value in (0.0, 1.0) for value in self.values)
            return wilson(int(sum(self.values)), len(self.values)) if whole else mean(self.values)
        nats = ratio(self.values, self.weights)
        if self.metric == "bits_per_byte":
            return Interval(*(end / math.log(2) for end in nats))
        return Interval(*(math.exp(min(end, 700.0)) for end in nats))

    def of(self, chosen: Sequence[bool]) -> Column | None:
        """Return the metric over the chosen documents, without confidences; None if none are chosen or documents have no values."""
        if not any(chosen) or len(chosen) != len(self.values):
            return None
        return Column(self.metric, [*compress(self.values, chosen)], self.filter, [*compress(self.weights, chosen)])


def has_letters(task: Task) -> bool:
    """True if options by letter do not suit a task: its options are letters already, or are beginnings of one ending."""
    letters = set(LETTERS)
    return any(isinstance(one.text, int) or letters.issuperset(one.choices) for one in task.documents)


def with_letters(text: str, choices: Sequence[str]) -> str:
    """Return a question with lettered options, before its last line if that ends in a colon, else before a new last line. Raise PunaError
    for more options than letters."""
    if len(choices) > len(LETTERS):
        raise PunaError(f"a question has {len(choices)} options, but there are only {len(LETTERS)} letters")
    lines = "\n".join(f" {letter}. {choice.strip()}" for letter, choice in zip(LETTERS, choices, strict=False))
    head, _, last = text.rstrip().rpartition("\n")
    return f"{head}\n{lines}\n{last}" if head and last.endswith(":") else f"{text.rstrip()}\n{lines}\nAnswer:"


def contents(task: Task) -> Iterator[tuple[str, str, str]]:
    """Yield each document's id, question and right answer as they would appear in training data; a whole text has an empty answer."""
    for document in task.documents:
        if task.file.output_type == "loglikelihood_rolling":
            yield document.id, str(document.target), ""
        else:
            yield document.id, _question(task, document, "cloze"), _answer(task, document, "cloze")


def _question(task: Task, document: Document, options: Options) -> str:
    if isinstance(document.text, int):
        return document.choices[document.text]
    return with_letters(document.text, document.choices) if options == "letters" else document.text


def _answer(task: Task, document: Document, options: Options) -> str:
    target = document.target[0] if isinstance(document.target, list) and document.target else document.target
    if options == "letters":
        return LETTERS[document.right[0]]
    if isinstance(target, int) and document.choices and not isinstance(document.text, int):
        return document.choices[target]
    return "" if target is None else str(target)


@dataclass(frozen=True)
class Asker:
    """A writer of prompts: plain text, or a conversation in the chat template, with a user and an assistant turn per few-shot example."""

    encoder: Encoder
    prompts: PromptFormat = "plain"
    options: Options = "cloze"

    def _context(self, task: Task, document: Document, question: str) -> tuple[str, str | None]:
        """Return the prompt and, in a chat, `Tokenizer.guard`'s mark, else None. Raise PunaError if no chat template exists or it fails."""
        own, spec = task.file.fewshot_config, task.file
        between = spec.target_delimiter if own.target_delimiter is None else own.target_delimiter
        behind = spec.fewshot_delimiter if own.fewshot_delimiter is None else own.fewshot_delimiter
        shots = [(_question(task, shot, self.options), _answer(task, shot, self.options)) for shot in task.examples(document)]
        if self.prompts == "plain":
            examples = "".join(asked + (f"{between}{answer}{behind}" if answer else "") for asked, answer in shots)
            return f"{document.description}{examples}{question}", None
        turns = [("system", document.description)] if document.description else []
        for prompt, answer in shots:
            turns += [("user", prompt), ("assistant", answer)]
        tokenizer: Tokenizer = self.encoder.tokenizer
        messages, mark = tokenizer.guard([{"role": role, "content": text} for role, text in (*turns, ("user", question))])
        if tokenizer.template is None:
            raise PunaError("the model has no chat template; use plain prompts (prompts=plain), or import the model with one")
        with errors_at(f"{task.where}: the chat template rejects a question", ValueError):
            return tokenizer.template.render(messages, add_generation_prompt=True), mark

    def prompt(self, task: Task, document: Document) -> list[int]:
        if task.prompted and self.prompts == "chat":
            return prompt_ids(self.encoder.tokenizer, document.row)
        text, mark = self._context(task, document, _question(task, document, self.options))
        ids = self.encoder.encode(text) if self.prompts == "plain" else self.encoder.encode_chat(text, mark)
        return ids or [self.encoder.prefix]

    def question_text(self, task: Task, document: Document) -> str:
        return "\n".join(document.choices) if isinstance(document.text, int) else _question(task, document, self.options)

    def requests(self, task: Task, document: Document) -> list[Request]:
        delimiter = "" if self.prompts == "chat" else task.file.target_delimiter
        if isinstance(document.text, int):
            pairs = [(choice, f"{delimiter}{document.target}") for choice in document.choices]
        else:
            question = _question(task, document, self.options)
            pairs = [(question, f"{delimiter}{choice}") for choice in self.choices(document)]
        requests: list[Request] = []
        before: tuple[str, str, str | None] = ("", "", None)
        for question, ending in pairs:
            if not requests or before[0] != question:
                before = (question, *self._context(task, document, question))
            _, text, mark = before
            encode = self.encoder.encode if self.prompts == "plain" else partial(self.encoder.encode_chat, mark=mark)
            requests.append(self.encoder.pair(text, ending, encode))
        return requests

    def choices(self, document: Document) -> Sequence[str]:
        return LETTERS[: len(document.choices)] if self.options == "letters" else document.choices


def choice_columns(task: Task, asker: Asker, scored: Sequence[Sequence[Likelihood]]) -> list[Column]:
    """Return multiple-choice metrics. `acc_norm` divides log-likelihoods by characters, `acc_bytes` by bytes; `exact_match`: greedy."""
    lengths: dict[str, Callable[[str], int]] = {"acc": lambda _: 1, "acc_norm": len, "acc_bytes": lambda text: len(text.encode())}
    columns = [Column(one.metric, []) for one in task.file.metrics]
    for document, likelihoods in zip(task.documents, scored, strict=True):
        answers = document.right
        for column in columns:
            if column.metric == "acc":
                column.confidences.append(confidence([one.sum for one in likelihoods]))
            if column.metric == "exact_match":
                column.values.append(float(any(likelihoods[index].greedy for index in answers)))
                continue
            sums = [one.sum / lengths[column.metric](choice) for one, choice in zip(likelihoods, asker.choices(document), strict=True)]
            column.values.append(float(sums.index(max(sums)) in answers))
    return columns


def document_columns(task: Task, texts: Sequence[str], nats: Iterable[float]) -> list[Column]:
    """Return one column per metric: each text's nats, weighted by its number of words (split at white space) or bytes."""
    sizes = {"word_perplexity": [float(len(re.split(r"\s+", text))) for text in texts]}
    size_bytes = [float(len(text.encode())) for text in texts]
    values = list(nats)
    return [Column(one.metric, values, weights=sizes.get(one.metric, size_bytes)) for one in task.file.metrics]


def answer_columns(task: Task, answers: Sequence[Sequence[str]]) -> list[Column]:
    """Return one column per filter and metric: 1 if the first filtered answer to a question matches a right text, else 0."""
    columns = []
    for one in task.file.filters:
        texts = [several[0] for several in run_filter(answers, one.filter, f"{task.where}: filter {one.name}")]
        for metric in task.file.metrics:
            pairs, owners = [], []
            for number, (document, text) in enumerate(zip(task.documents, texts, strict=True)):
                expected = _right_texts(document)
                pairs += [(text, wanted) for wanted in expected]
                owners += [number] * len(expected)
            values = [0.0] * len(texts)
            for owner, equal in zip(owners, matching(pairs, metric.matching, f"{task.where}: {metric.metric}"), strict=True):
                values[owner] = max(values[owner], float(equal))
            columns.append(Column(metric.metric, values, one.name))
    return columns


def _right_texts(document: Document) -> list[str]:
    if document.choices and isinstance(document.target, int):
        return [document.choices[document.target]]
    return [str(one) for one in document.target] if isinstance(document.target, list) else [str(document.target)]


def verified_columns(scores: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]) -> list[Column]:
    """Return columns of a verifier's scores: the mean and, for n > 1 answers, pass@k (k = 2, 4, …, n) and the majority's score.

    pass@k is the probability that one of k answers is right (score 1; Chen et al. 2021): 1 - C(n - c, k) / C(n, k) with c of n right."""
    n = len(scores[0])
    columns = [Column("verified", [sum(several) / n for several in scores])]
    for k in [*(2**power for power in range(1, n.bit_length()) if 2**power < n), *([n] if n > 1 else [])]:
        wrong = [sum(score < 1 - 1e-6 for score in several) for several in scores]
        columns.append(Column(f"pass@{k}", [1 - math.comb(count, k) / math.comb(n, k) for count in wrong]))
    if n > 1:
        columns.append(Column(f"majority@{n}", [_majority(*pair) for pair in zip(scores, answers, strict=True)]))
    return columns


def _majority(scores: Sequence[float], answers: Sequence[str]) -> float:
    finals = [final_answer(text) or text.strip() for text in answers]
    return scores[finals.index(Counter(finals).most_common(1)[0][0])]


def cut(completion: Completion, tokenizer: Tokenizer, until: Sequence[str]) -> str:
    """Return an answer's text up to the first stop text in it."""
    text = answer_text(completion.tokens, tokenizer)
    for stop in until:
        text = text.split(stop)[0] if stop else text
    return text
