"""Synthetic training data: problems and answers from a model, kept only if a check confirms the answers.

As in Llama 3, section 4.3, a model writes problems similar to the examples, and answers each problem several times. Code is checked by
tests, maths by agreement among answers, given prompts by verifiers. If no answer is right, the model gets the message and tries again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from puna.stages.align.instructions import answer_message, instruction
from puna.stages.align.sample import replies_of
from puna.stages.contract import Facts, Model, Prompts, SeededConfig, StageRun, stage
from puna.stages.conversations import Message, as_text, asking, dump, messages_of, prompt_ids
from puna.stages.draws import hash_of, identifier
from puna.stages.endpoint import Endpoint, EndpointConfig
from puna.stages.training.bad_rows import BadRows, BadRowsConfig
from puna.stages.training.needs import chat_template
from puna.stages.training.train import context_limit, load_model
from puna.stages.training.turns import TurnsConfig, in_turns, turns_of, with_tools
from puna.stages.verifiers.base import Score, ScoringConfig, is_correct
from puna.stages.verifiers.extraction import final_answer
from puna.stages.verifiers.judges import Tools
from puna.stages.verifiers.python_code import Code, program
from puna.stages.verifiers.registry import to_text
from puna.stages.verifiers.scoring import Scorer, verifiers_named
from puna.stages.verifiers.tools import FAILED
from puna.storage import Artifact, PunaError

if TYPE_CHECKING:
    from puna.models.tokens.tokenizer import Tokenizer
    from puna.models.transformer import Transformer

Row = dict[str, Any]
NEW = "Here are some problems:\n\n{examples}\n\nWrite one more problem of this kind, about something else. Write the problem only."
TESTS = (
    "{problem}\n\nDo not solve this. Write three tests of a solution, each one line that begins with `assert` and calls the function, "
    "in a Python code block."
)
AGAIN = "That is not right: {detail}\nFind the mistake and answer again."
ONE_WRITER = "model: give either --input model=… or an endpoint, not both"
NO_CALL = "Call a tool, and answer by its result."
NO_ANSWER = "The answer must end with a line `The answer is …`."


class SynthesizeConfig(TurnsConfig, BadRowsConfig, SeededConfig):
    problems: Literal["given", "maths", "code"] = Field(
        "given", description="given: training prompts, checked by verifiers; new problems: maths, checked by agreement; code, by tests"
    )
    count: int = Field(100, ge=1, le=1_000_000, description="Number of problems that the model writes; unused with problems=given")
    shots: int = Field(4, ge=1, le=50, description="Number of training prompts shown as examples for each new problem")
    answers: int = Field(8, ge=1, le=1024, description="Number of answers per problem and try")
    retries: int = Field(1, ge=0, le=10, description="Number of retries for a problem without a right answer, with the check's message")
    temperature: float = Field(0.7, ge=0, le=10, description="Sampling temperature of problems, tests and answers")
    max_tokens: int = Field(256, ge=1, description="Maximum tokens of a problem or an answer, including its end token")
    min_agreement: float = Field(0.5, gt=0, le=1, description="With problems=maths: minimum share of answers with the same result (0 to 1)")
    min_tests: int = Field(2, ge=1, le=100, description="With problems=code: minimum number of tests that fail without a solution")
    max_similarity: float = Field(0.6, gt=0, le=1, description="Maximum share of a problem's word trigrams in a prompt or other problem")
    source: str = Field("synthetic", min_length=1, description="Name of the source in the instructions table")
    scoring: ScoringConfig = Field(ScoringConfig(), description="Limits on the checks of answers")
    endpoint: EndpointConfig | None = Field(None, description="Remote model that writes; null: the input model writes")

    @model_validator(mode="after")
    def _turns_answer_given_prompts(self) -> Self:
        if self.turns > 1 and (self.problems != "given" or self.endpoint is not None):
            raise ValueError("turns above 1 need given prompts and an input model; set problems to given, and leave the endpoint out")
        return self


def needs(config: SynthesizeConfig, facts: Facts) -> list[str]:
    """Return messages unless there is a model with a chat template, or an endpoint with its API key."""
    if (config.endpoint is None) == ("model" not in facts.inputs):
        return [ONE_WRITER]
    return chat_template(facts, "model") if config.endpoint is None else config.endpoint.unmet("endpoint")


class Text(NamedTuple):
    """A generated text. `finished`: false if truncated. `before`: the turns and tool results between the prompt and this text."""

    text: str
    finished: bool
    before: Sequence[Message] = ()

    @property
    def has_run_tools(self) -> bool:
        """True if tools were called and no call failed."""
        results = [str(turn["content"]) for turn in self.before if turn["role"] == "tool"]
        return bool(results) and not any(result.startswith(FAILED) for result in results)

    @property
    def parts(self) -> list[str]:
        return [self.text.strip(), *map(dump, self.before)]

    def after(self, row: Row) -> Row:
        """Return the row with the turns before this text added to its messages."""
        return {**row, "messages": dump([*messages_of(row), *self.before])} if self.before else row


@stage(kind="instructions", device=True, needs=needs, named=verifiers_named)
def synthesize(model: Model | None, prompts: Prompts, judges: list[Model] | None, config: SynthesizeConfig, run: StageRun) -> None:
    """Write an instruction for each problem that the model solves: the problem and a right answer; see `problems`.

    Failed tries are left out; the side table `scores` has the share of right answers (`right`) and the number of tries (`tries`). With
    `tools`, an answer is right if the verifier passes its last turn, and if tools were called and no call failed; the calls and their
    results are kept. `dropped` has problems that were truncated (`unfinished`), are `empty`, resemble a prompt or another problem
    (`copied`), have too few tests that fail without a solution (`tests`) or no right answer (`none_right`), and bad rows (see `bad_rows`).
    The metrics `right_after_1`, `right_after_2`, … count the problems solved within that many tries. `judges` are models that verifiers
    refer to. With `endpoint`, a remote model writes; the side table `exchanges` has its requests and replies."""
    rows = prompts.read().to_pylist()
    train = sorted((with_tools(row, config.tools) for row in rows if row["split"] == "train"), key=lambda row: str(row["id"]))
    if not train:
        raise PunaError(f"synthesize: {prompts.id} has no training prompts; give prompts of the split train")
    writer = Writer(model, config, run)
    problems = train if config.problems == "given" else _new_problems(train, rows, writer, config, run)
    run.metric("problems", len(problems))
    check = Check(problems, judges or (), config, run)
    solutions = _answer_problems(problems, writer, check, config, run) if problems else {}
    run.metric("checker_calls", check.calls)
    run.metric("sampled_tokens", writer.tokens)
    _save(problems, solutions, writer.dropped, config, run)
    if writer.endpoint is not None and (config.scoring.endpoint is None or config.problems == "maths"):  # else the scorer has written it
        writer.endpoint.write()


class Kept(NamedTuple):
    """A right answer, the share of right answers in its try, and the number of that try."""

    answer: Text
    right: float
    tries: int


def _answer_problems(problems: Sequence[Row], writer: Writer, check: Check, config: SynthesizeConfig, run: StageRun) -> dict[str, Kept]:
    solutions: dict[str, Kept] = {}
    left = list(problems)
    for number in range(config.retries + 1):
        answers = writer.write(left, config.answers, f"answers {number}")
        again = []
        for row, texts, scores in zip(left, answers, check.scores(left, answers), strict=True):
            right = [text for text, score in zip(texts, scores, strict=True) if text.finished and is_correct(score.value)]
            if right:
                solution = min(right, key=lambda text: hash_of(config.seed, "synthetic", row["id"], *text.parts))
                solutions[row["id"]] = Kept(solution, len(right) / len(texts), number + 1)
            elif texts:
                detail = next((score.detail for score in scores if score.detail), "")
                turns = [answer_message(texts[0].text), {"role": "user", "content": AGAIN.format(detail=detail)}]
                again.append({**row, "messages": dump([*messages_of(texts[0].after(row)), *turns])})
        run.metric(f"right_after_{number + 1}", len(solutions))
        left = again
    check.report()
    return solutions


class Writer:
    """The model that writes problems, tests and answers: stored or remote. The constructor raises PunaError for neither or both."""

    def __init__(self, model: Artifact | None, config: SynthesizeConfig, run: StageRun) -> None:
        if (model is None) == (config.endpoint is None):
            raise PunaError(f"synthesize: {ONE_WRITER}")
        self._config, self._run = config, run
        self.endpoint = None if config.endpoint is None else Endpoint(config.endpoint, run)
        self._own = None if model is None else load_model(model, "lm", frozen=True)
        self.dropped: list[Row] = []
        self.tokens = 0

    def write(self, rows: Sequence[Row], count: int, purpose: str) -> list[list[Text]]:
        """Return `count` sampled texts per row. Refused and too long rows get none and go to `dropped`. `purpose`: part of the seed."""
        config, bad, seed = self._config, BadRows(self._config, "synthesize"), self._run.seed(purpose)
        texts: dict[str, list[Text]] = {}
        if self.endpoint is not None:
            fields = {"temperature": config.temperature, "max_tokens": config.max_tokens}
            for row, replies in replies_of(self.endpoint, rows, bad, count, fields, seed):
                texts[row["id"]] = [Text(reply.final, reply.finished) for reply in replies]
        elif self._own is not None:
            texts = self._sample(*self._own, rows, bad, count, seed, purpose)
        before = {row["id"] for row in self.dropped}
        self.dropped += [row for row in bad.dropped if row["id"] not in before]
        return [texts.get(row["id"], []) for row in rows]

    def _sample(
        self, network: Transformer, tokenizer: Tokenizer, rows: Sequence[Row], bad: BadRows, count: int, seed: int, purpose: str
    ) -> dict[str, list[Text]]:
        """Return row id → texts sampled from `network`. Rejected and too long rows go to `bad` and have no entry."""
        from puna.models.generation import Engine, SamplingParams

        config, within = self._config, context_limit(network.config, self._config.max_tokens)
        requests = bad.examples(rows, lambda row: prompt_ids(tokenizer, row), lambda ids: len(ids) + config.max_tokens, within)
        params = SamplingParams(n=count, temperature=config.temperature, max_tokens=config.max_tokens, stop=tokenizer.stop_ids, seed=seed)
        progress = partial(self._run.progress, note=purpose)
        asked = [ids for _, ids in requests]
        generate = in_turns([row for row, _ in requests], asked, tokenizer, config, Tools(config.scoring, self._run), "synthesize")
        completions = generate(Engine(network, tokenizer), asked, params, progress)
        self.tokens += sum(sum(one.mask) for some in completions for one in some)
        turns = [[(turns_of(one, tokenizer), one.finished) for one in some] for some in completions]
        return {
            row["id"]: [Text(last["content"], finished, before) for (*before, last), finished in some]
            for (row, _), some in zip(requests, turns, strict=True)
        }


class Check:
    """A check of answers: by the problems' verifiers, or by agreement for maths."""

    def __init__(self, problems: Sequence[Row], judges: Sequence[Artifact], config: SynthesizeConfig, run: StageRun) -> None:
        self._config = config
        by_verifier = config.problems != "maths"
        self._scorer = Scorer(problems, config.scoring, run, judges, needed="synthesize") if by_verifier else None
        self.calls = 0

    def scores(self, rows: Sequence[Row], found: Sequence[Sequence[Text]]) -> list[list[Score]]:
        if self._scorer is None:
            return [score_agreement([text.text for text in some], self._config.min_agreement) for some in found]
        self.calls += sum(map(len, found))
        each = iter(self._scorer.scores([(text.after(row), text.text) for row, some in zip(rows, found, strict=True) for text in some]))
        pairs = [[(text, next(each)) for text in some] for some in found]
        return [[score if text.has_run_tools or not self._config.tools else Score(0.0, NO_CALL) for text, score in some] for some in pairs]

    def report(self) -> None:
        """Report the number of answers that verifiers could not score."""
        if self._scorer is not None:
            self._scorer.report()


def score_agreement(texts: Sequence[str], share: float) -> list[Score]:
    """Return a score per text: 1 if its final answer is the single most frequent one and at least `share` of the texts have it, else 0."""
    finals = [None if (result := final_answer(text)) is None else " ".join(result.casefold().split()) for text in texts]
    counts = Counter(final for final in finals if final).most_common(2)
    alone = bool(counts) and (len(counts) == 1 or counts[0][1] > counts[1][1])
    if not alone or counts[0][1] < share * len(texts):
        return [Score(0.0, NO_ANSWER if final is None else "other tries have other results") for final in finals]
    return [Score(float(final == counts[0][0]), "" if final else NO_ANSWER) for final in finals]


def _new_problems(train: Sequence[Row], known: Sequence[Row], writer: Writer, config: SynthesizeConfig, run: StageRun) -> list[Row]:
    """Return new problems that the model writes from examples, without copies of known problems. With problems=code, add tests."""
    requests = []
    for number in range(config.count):
        generator = run.generator("problem", number)
        shots = generator.permutation(len(train))[: config.shots]
        examples = "\n\n".join(f"{place}. {as_text(messages_of(train[i]))}" for place, i in enumerate(shots, 1))
        name = identifier(config.source, config.seed, number)
        requests.append({"id": name, "messages": asking(NEW.format(examples=examples)), "tools": None})
    having: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(known):
        _note(number, trigrams(as_text(messages_of(row))), having)
    problems: list[Row] = []
    for row, texts in zip(requests, writer.write(requests, 1, "problems"), strict=True):
        if not texts:
            continue
        text, limit = texts[0].text.strip(), config.max_similarity
        runs = trigrams(text)
        shared = Counter(number for one in runs for number in having.get(one, ()))
        likest = max(shared.values(), default=0) / max(len(runs), 1)
        if not texts[0].finished or not runs:
            writer.dropped.append(_drop(row, "empty" if not runs else "unfinished", None, None, text))
        elif likest > limit:
            writer.dropped.append(_drop(row, "copied", likest, limit, text))
        else:
            _note(len(known) + len(problems), runs, having)
            task = f"{config.source}_{config.problems}"
            problems.append({"id": row["id"], "task": task, "messages": asking(text), "tools": None, "reference": None, "verifier": None})
    return _with_tests(problems, writer, config, run) if config.problems == "code" else problems


def _note(number: int, runs: set[tuple[str, ...]], having: dict[tuple[str, ...], list[int]]) -> None:
    for one in runs:
        having.setdefault(one, []).append(number)


def _with_tests(problems: Sequence[Row], writer: Writer, config: SynthesizeConfig, run: StageRun) -> list[Row]:
    """Add tests written by the model to the problems. Drop tests that pass without a solution, then problems with too few tests."""
    requests = [{**row, "messages": asking(TESTS.format(problem=as_text(messages_of(row))))} for row in problems]
    written = zip(problems, writer.write(requests, 1, "tests"), strict=True)
    lines = [(row, assertions(texts[0].text)) for row, texts in written if texts]  # the writer drops a row without a text
    alone = [{**row, "verifier": to_text(Code.name, tests=[line])} for row, some in lines for line in some]
    scores = iter(Scorer(alone, config.scoring, run).scores([(row, "pass") for row in alone]) if alone else ())
    results = []
    for row, some in lines:
        telling = [line for line in some if next(scores).value == 0]
        if len(telling) >= config.min_tests:
            results.append({**row, "verifier": to_text(Code.name, tests=telling)})
        else:
            writer.dropped.append(_drop(row, "tests", float(len(telling)), float(config.min_tests), as_text(messages_of(row))))
    return results


def assertions(text: str) -> list[str]:
    """Return the distinct lines that begin with `assert` in a text's program."""
    return list(dict.fromkeys(line.strip() for line in program(text).splitlines() if re.match(r"\s*assert\b", line)))


def trigrams(text: str) -> set[tuple[str, ...]]:
    """Return the set of word trigrams; a text of fewer than three words gives one tuple of all its words."""
    words = re.findall(r"\w+", text.casefold())
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))} if words else set()


def _drop(row: Row, rule: str, value: float | None, threshold: float | None, text: str) -> Row:
    return {"id": row["id"], "rule": rule, "value": value, "threshold": threshold, "detail": text[:200]}


def _save(problems: Sequence[Row], kept: dict[str, Kept], dropped: list[Row], config: SynthesizeConfig, run: StageRun) -> None:
    rows, scores, dropped_ids = [], [], {row["id"] for row in dropped}
    for row in problems:
        if row["id"] in kept:
            answer, right, tries = kept[row["id"]]
            name = identifier(config.source, row["id"], *answer.parts)
            rows.append(instruction(name, row["id"], answer.after(row), answer_message(answer.parts[0]), config.source))
            scores += [{"id": name, "name": "right", "value": right}, {"id": name, "name": "tries", "value": float(tries)}]
        elif row["id"] not in dropped_ids:
            dropped.append(_drop(row, "none_right", None, None, as_text(messages_of(row))))
    run.count_input(len(rows) + len(dropped))
    run.write_rows(rows)
    run.write_rows(scores, "scores")
    run.write_rows(dropped, "dropped")
    run.metric("kept", len(rows))
    for rule, count in sorted(Counter(row["rule"] for row in dropped).items()):
        run.metric(f"dropped_{rule}", count)
