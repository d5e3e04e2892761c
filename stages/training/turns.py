"""Multi-turn answers as conversations: the model's turns, and the replies of tools and environments between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import Field, model_validator

from puna.stages.contract import StageConfig
from puna.stages.conversations import Message, answer_text, dump, messages_of, rendering, tools_of
from puna.stages.executors.subprocess_worker import Apart
from puna.stages.verifiers import sandbox, tools
from puna.stages.verifiers.base import DETAIL, BoundedVerifier, Question, Score, ScoringConfig, Verifier, to_json
from puna.stages.verifiers.judges import Tools, chunks
from puna.stages.verifiers.python_code import AT_ONCE
from puna.stages.verifiers.registry import from_json, from_text
from puna.stages.verifiers.scoring import leaves, question_of
from puna.stages.verifiers.tools import TOOLS, ToolName
from puna.storage import PunaError

if TYPE_CHECKING:
    from puna.models.generation import Completion
    from puna.models.tokens.tokenizer import Tokenizer


class TurnsConfig(StageConfig):
    """Settings of multi-turn answers, and of the tools that reply between turns."""

    turns: int = Field(
        1, ge=1, le=64, description="Maximum turns of the model per answer; max_tokens covers all turns and the replies between them"
    )
    tools: tuple[ToolName, ...] = Field(
        (), description="Tools that the model may call between its turns: calculator, and python in the sandbox; a call is written as "
        '<tool_call>{"name": …, "arguments": …}</tool_call>'
    )  # fmt: skip

    @model_validator(mode="after")
    def _tools_answer_between_turns(self) -> Self:
        if self.tools and self.turns == 1:
            raise ValueError("tools reply between turns: set turns above 1")
        return self


def with_tools(row: dict[str, Any], names: Sequence[ToolName]) -> dict[str, Any]:
    """Return a prompt's row with the definitions of the tools `names` added to the row's own tools."""
    return {**row, "tools": dump([*(tools_of(row) or ()), *(TOOLS[name].definition(name) for name in names)])} if names else row


def in_turns(
    rows: Sequence[dict[str, Any]], asked: Sequence[list[int]], tokenizer: Tokenizer, config: TurnsConfig, means: Tools, where: str
) -> Callable[..., list[list[Completion]]]:
    """Return a function that answers the prompts `rows` (token ids: `asked`) in up to `config.turns` turns. Raise PunaError if neither
    tools nor verifiers reply between the turns, or if programs cannot be isolated."""
    from puna.models.generation.turns import converse

    turns = config.turns
    if turns > 1 and not config.tools and all(environment_of(row) is None for row in rows):
        raise PunaError(f"{where}: turns={turns}, but no prompt's verifier replies and there are no tools; set turns=1, or name tools")
    if "python" in config.tools:
        sandbox.mode()
    by_ids = {tuple(ids): row for ids, row in zip(asked, rows, strict=True)}
    return partial(converse, turns=turns, respond=Replies(by_ids, tokenizer, config.tools, means))


def turns_of(answer: Completion, tokenizer: Tokenizer) -> list[Message]:
    """Return an answer as messages: the model's turns, and the replies between them."""
    messages, start = list[Message](), 0
    for begin, end, replies in answer.replies:
        messages += [{"role": "assistant", "content": answer_text(answer.tokens[start:begin], tokenizer)}, *replies]
        start = end
    return [*messages, {"role": "assistant", "content": answer_text(answer.tokens[start:], tokenizer)}]


def to_score(row: dict[str, Any], answer: Completion, tokenizer: Tokenizer) -> tuple[dict[str, Any], str]:
    """Return the row and the text to score: `row` extended by all but the answer's last turn, and the last turn's text."""
    *before, last = turns_of(answer, tokenizer)
    return (row | {"messages": dump([*messages_of(row), *before])} if before else row), last["content"]


def steps_of(score: Score, answer: Completion, tokenizer: Tokenizer) -> list[tuple[int, float]]:
    """Return (end, reward) of each step of an answer's last turn; `end` counts tokens from the start of the answer."""
    start = answer.replies[-1][1] if answer.replies else 0
    places = range(start, len(answer.tokens))

    def characters(place: int) -> int:
        return len(answer_text(answer.tokens[start:place], tokenizer))

    return [(start + bisect_left(places, end, key=characters), reward) for end, reward in score.steps]


def environment_of(row: dict[str, Any]) -> Verifier | None:
    """Return the first part of a prompt's verifier that replies between turns; None if there is none."""
    parts = [] if row["verifier"] is None else leaves(from_text(row["verifier"]))
    return next((part for part in parts if type(part).reply is not Verifier.reply), None)


class Job(NamedTuple):
    """A conversation to reply to: its question, its turns, the verifier that replies if no tool does, and the tools that may be called."""

    question: Question
    turns: list[Message]
    verifier: Verifier | None
    tools: Sequence[str]

    def reply(self, config: ScoringConfig) -> list[Message]:
        """Return the results of the last turn's tool calls, else the verifier's reply; [] if the answer is complete or nothing replies."""
        if self.tools and (messages := tools.results(self.turns[-1]["content"], self.tools, config)):
            return messages
        if self.verifier is None:
            return []
        job = {"verifier": to_json(self.verifier), "question": tuple(self.question), "turns": self.turns}
        reply = environment_reply(job) if isinstance(self.verifier, BoundedVerifier) else _child().ask(job, config.seconds)
        text = f"{self.verifier.name}: {reply}" if isinstance(reply, str) else reply["reply"]
        return [] if text is None else [{"role": "user", "content": str(text)[:DETAIL].encode("utf-8", "replace").decode()}]


def environment_reply(job: dict[str, Any]) -> dict[str, Any]:
    """Return {"reply": r}; r is the verifier's reply to a conversation, None if the answer is complete, or the text of an error."""
    verifier = from_json(job["verifier"])
    try:
        return {"reply": verifier.reply(Question(*job["question"]), job["turns"])}
    except Exception as error:  # noqa: BLE001  an environment may be anybody's code: its failure is a reply
        return {"reply": f"{verifier.name} failed: {type(error).__name__}: {error}"}


@lru_cache(maxsize=1)
def _child() -> Apart:
    return Apart(environment_reply)


def _reply_chunk(jobs: list[Job], config: ScoringConfig) -> list[list[Message]]:
    return [job.reply(config) for job in jobs]


@dataclass(frozen=True)
class Replies:
    """A function that replies to answers (`Respond`). `rows`: token ids → prompt; `names`: available tools; `means`: resources."""

    rows: dict[tuple[int, ...], dict[str, Any]]
    tokenizer: Tokenizer
    names: Sequence[str]
    means: Tools

    def __call__(self, answers: Sequence[tuple[list[int], Completion]]) -> list[tuple[list[int], list[Message]] | None]:
        jobs = []
        for prompt, answer in answers:
            row = self.rows[tuple(prompt)]
            jobs.append(Job(question_of(row), turns_of(answer, self.tokenizer), environment_of(row), self.names))
        some, config = chunks(jobs, AT_ONCE), self.means.config
        # Programs, and environments from other packages, do not run in this process.
        here = "python" not in self.names and all(isinstance(job.verifier, BoundedVerifier | None) for job in jobs)
        done = map(_reply_chunk, some, repeat(config)) if here else self.means.run.map(_reply_chunk, some, config)
        return [self._tokens(*pair, messages) if messages else None for pair, messages in zip(answers, chain(*done), strict=True)]

    def _tokens(self, prompt: list[int], answer: Completion, messages: list[Message]) -> tuple[list[int], list[Message]] | None:
        """Return a reply's token ids and messages; None if the answer lacks the token that ends a turn, and so was truncated."""
        row = self.rows[tuple(prompt)]
        with rendering(row):
            stop, ids = self.tokenizer.reply(messages, tools_of(row))
        return (ids, messages) if answer.tokens[-1] == stop else None
