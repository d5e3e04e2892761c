"""Conversations as token ids with a loss mask, rendered by the model's own chat template.

Each answer is rendered as in serving. P is the conversation before the answer, with the generation prompt; F is the conversation up to and
including the answer. F must begin with P. The text of F after P, up to the first stop token, is the answer; only the answer and this token
are trained. An answer that cannot be separated in this way raises ChatError with its turn and the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from puna.models.tokens.template import REASONING, Message, Template, TemplateError, TemplateLimitError, Tools
from puna.models.tokens.vocabulary import Vocabulary

PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Turquoise."},
    {"role": "user", "content": "Another one."},
)
"""A conversation that every chat template should render."""
MODES: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""Sets of template variables, tried in turn until the rendered conversation begins with the rendered prompt."""


class ChatError(ValueError):
    """An error: a turn is invalid, the template cannot render it, or no answer can be separated from its prompt. `turn`: 0-based."""

    def __init__(self, turn: int, reason: str) -> None:
        super().__init__(f"turn {turn}: {reason}")
        self.turn, self.reason = turn, reason


@dataclass
class Row:
    """A training row: token ids, and a flag per token, True for tokens of an answer and for the stop token that ends it."""

    ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    def extend(self, ids: Sequence[int], trained: bool) -> None:
        self.ids += ids
        self.trained += [trained] * len(ids)


@dataclass(frozen=True)
class _Answer:
    """A rendered answer. `prompt`: the text before it; `stop`: its stop token's id; `content`: (start, stop) of the message in `body`."""

    prompt: str
    body: str
    stop: int
    content: tuple[int, int]


class ChatFormat(Vocabulary):
    """A vocabulary with a chat template, if any. `_stops`: ids of `eos_token` and of the stop tokens that the model's files name."""

    template: Template | None
    _stops: tuple[int, ...]

    @property
    def _program(self) -> Template:
        if self.template is None:
            raise TemplateError("the tokenizer has no chat template: import the model with one (chat_template of import_model)")
        return self.template

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer: the model's own (`_stops`) and, if the template writes none of them after
        an answer, the first special token that the template writes there."""
        if self.template is None:
            return self._stops
        for dialogue in (PROBE[:2], PROBE):
            try:
                text = self.template.render(dialogue, add_generation_prompt=False)
            except TemplateError:
                return self._stops
            behind = text.partition(PROBE[1]["content"])[2]
            if self.find_special(behind, self._stops):
                return self._stops
        special = self.find_special(behind, self.special)
        return self._stops if special is None else (*self._stops, special[2])

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Tools = None) -> list[int]:
        """Return the ids of a conversation, as transformers' `apply_chat_template` does, but with special tokens in messages read as text.

        A message is a mapping with `role` and `content`. `add_generation_prompt`: end where the model's answer begins. Raise ChatError if
        the template refuses the conversation, TemplateError without a template."""
        (plain, guarded), mark = self.guard(([dict(message) for message in messages], tools))
        return self.encode_markup(self._render(plain, add_generation_prompt, guarded, {}), mark)[0]

    def render_pair(
        self, prompt: str | Sequence[Message], answer: str | Message, finished: bool = True, tools: Tools = None
    ) -> tuple[list[int], list[int], list[bool]]:
        """Return the prompt ids (up to where the answer begins), the answer ids, and a mask of the template's tokens in the answer.

        A string as `prompt` is one user message; as `answer`, the assistant's. Special tokens that a message writes out are read as text.
        The answer ends in its stop token unless it was truncated (`finished=False`). The mask has one flag per *answer* token, True for
        tokens that only the template writes: headers, the stop token. Raise ChatError if the template refuses or no answer is separable."""
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        turn = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        (plain, guarded), mark = self.guard(([dict(message) for message in [*turns, turn]], tools))
        last = self._answer(plain, len(plain) - 1, guarded)
        begin, end = last.content
        body, stop = (last.body, self.token(last.stop)) if finished else (last.body[:end], "")
        prompt_ids, ids, spans = self._encode_turn(last.prompt, body + stop, mark, len(plain) - 1)
        return prompt_ids, ids, [i in self.special or b <= begin or a >= end for i, (a, b) in zip(ids, spans, strict=True)]

    def reply(self, messages: Sequence[Message], tools: Tools = None) -> tuple[int, list[int]]:
        """Return the id of an answer's stop token, and the ids of `messages` after it, up to where the next answer begins. Special tokens
        in messages are read as text. Raise ChatError if the template refuses messages after an answer, or writes no stop token."""
        (turns, guarded), mark = self.guard(([*PROBE[:2], *(dict(message) for message in messages)], tools))
        behind = self._render(turns, True, guarded, {}).partition(PROBE[1]["content"])[2]
        stop = self.find_special(behind, self.stop_ids)
        if stop is None:
            raise ChatError(1, "the template writes no stop token after the answer")
        return stop[2], self.encode_behind(behind[stop[1] :], stop[2], mark)[0]

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[Row]:
        """Return rows that train every answer of a conversation once: ids and loss mask, rendered together.

        There are several rows if later turns change how the template renders earlier turns. Raise ChatError with the turn and the reason
        if there is no answer or one cannot be separated, or if a turn is invalid (it writes out a special token, for instance)."""
        self._check(messages, tools)
        rows: list[Row] = []
        text, last = "", -1
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            answer = self._answer(messages, turn, tools)
            stop = self.token(answer.stop)
            prompt, ids, _ = self._encode_turn(answer.prompt, answer.body + stop, None, turn)
            if not (rows and self._continue(rows[-1], prompt, text, answer.prompt, last)):
                rows.append(Row())
                rows[-1].extend(prompt, False)
            rows[-1].extend(ids, True)
            text, last = answer.prompt + answer.body + stop, answer.stop
        if not rows:
            raise ChatError(max(len(messages) - 1, 0), "no turn has the role assistant: there is nothing to train on")
        return rows

    def _continue(self, row: Row, prompt: list[int], text: str, next_prompt: str, stop: int) -> bool:
        """Append the rest of the next prompt to the row and return True; return False if this prompt does not begin with the row.

        The beginnings are compared as ids (`prompt`), then as text (`text` and `next_prompt`), if the row's last id `stop` is special."""
        if prompt[: len(row.ids)] == row.ids:
            row.extend(prompt[len(row.ids) :], False)
        elif stop in self.special and next_prompt.startswith(text):
            row.extend(self.encode_behind(next_prompt[len(text) :], stop)[0], False)
        else:
            return False
        return True

    def _encode_turn(self, prompt: str, answer: str, mark: str | None, turn: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Return the ids of prompt and answer, and the character spans of the answer's ids. If a token would span both, the answer is
        encoded separately; raise ChatError if this changes the text."""
        prompt_ids, _ = self.encode_markup(prompt, mark)
        ids, spans = self.encode_markup(prompt + answer, mark)
        if ids[: len(prompt_ids)] == prompt_ids:
            size = len(prompt)
            return prompt_ids, ids[len(prompt_ids) :], [(a - size, b - size) for a, b in spans[len(prompt_ids) :]]
        answer_ids, spans = self.encode_behind(answer, mark=mark)
        if self.decode(prompt_ids + answer_ids) != self.decode(ids):
            raise ChatError(turn, "a token spans prompt and answer, and encoded separately they give another text")
        return prompt_ids, answer_ids, spans

    def _answer(self, messages: Sequence[Message], turn: int, tools: Any) -> _Answer:
        """Return the rendered answer of turn number `turn`. Raise ChatError if it is incomplete or not separable from its prompt."""
        for mode in MODES:
            prompt = self._render(messages[:turn], True, tools, mode)
            whole = self._render(messages[: turn + 1], False, tools, mode)
            if whole.startswith(prompt):
                break
        else:
            raise ChatError(turn, "the conversation with the answer does not begin with the prompt that serving would give")
        behind = whole[len(prompt) :]
        span = self.find_special(behind, self.stop_ids)
        if span is None:
            span = self._stop_of_next(messages, turn, whole, tools, mode, len(behind))
        start, stop, id_ = span
        if rest := self._special_pattern.sub("", behind[stop:]).strip():
            raise ChatError(turn, f"the template writes {rest[:40]!r} after the end of the answer")
        body = behind[:start]
        self._check_shown(messages, turn, prompt, body)
        return _Answer(prompt, body, id_, _content(messages[turn], body))

    def _stop_of_next(
        self, messages: Sequence[Message], turn: int, whole: str, tools: Any, mode: dict[str, bool], size: int
    ) -> tuple[int, int, int]:
        """Return (`size`, `size`, id) if the template puts the stop token of a turn at the start of the next. Raise ChatError otherwise."""
        following = messages[turn + 1 : turn + 2] or PROBE[2:]
        try:
            longer = self._program.render([*messages[: turn + 1], *following], add_generation_prompt=False, tools=tools, **mode)
        except TemplateError:
            longer = ""
        behind = longer[len(whole) :] if longer.startswith(whole) else ""
        stop = self.find_special(behind, self.stop_ids)
        if stop is None or behind[: stop[0]].strip():
            raise ChatError(turn, "the template writes no stop token after the answer")
        return size, size, stop[2]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Any, mode: dict[str, bool]) -> str:
        """Return the text of the conversation; raise ChatError with the first turn that the template refuses."""
        program = self._program
        try:
            return program.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **mode)
        except TemplateLimitError as error:  # trying shorter conversations would take as long again
            raise ChatError(max(len(messages) - 1, 0), str(error)) from error
        except TemplateError as error:
            for count in range(1, len(messages)):
                try:
                    program.render(messages[:count], add_generation_prompt=add_generation_prompt, tools=tools, **mode)
                except TemplateError as earlier:
                    if str(earlier) == str(error):
                        raise ChatError(count - 1, f"the chat template refuses it: {error}") from error
            raise ChatError(max(len(messages) - 1, 0), f"the chat template refuses it: {error}") from error

    def _check(self, messages: Sequence[Message], tools: Any) -> None:
        """Raise ChatError for a turn without a role, content that is not text, or a special token written out in turns or tools."""
        for turn, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise ChatError(turn, "it names no role")
            content = message.get("content")
            if content is not None and not isinstance(content, str):
                raise ChatError(turn, f"its content is a {type(content).__name__}, not text")
            if token := self.special_in(dict(message)):
                raise ChatError(turn, f"it writes out the control token {token}")
        if token := self.special_in(tools):
            raise ChatError(0, f"the tools write out the control token {token}")

    def _check_shown(self, messages: Sequence[Message], turn: int, prompt: str, body: str) -> None:
        """Raise ChatError if the template leaves out a part of the answer, or a turn since the previous answer."""
        squeezed = _without_spaces(body)
        for name, part in _parts(messages[turn]):
            if _without_spaces(part) not in squeezed:
                raise ChatError(turn, f"the template does not write its {name}, or writes it differently")
        before = _without_spaces(prompt)
        for earlier in range(turn - 1, -1, -1):
            if messages[earlier].get("role") == "assistant":
                break
            content = messages[earlier].get("content")
            if not isinstance(content, str):
                continue
            # A template may write a turn's text itself, or in a JSON string.
            spellings = [content, *(json.dumps(content, ensure_ascii=ascii_)[1:-1] for ascii_ in (False, True))]
            if not any(_without_spaces(text) in before for text in spellings):
                raise ChatError(earlier, f"the template does not write this turn of the role {messages[earlier].get('role')!r}")


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each part of an answer that the template must write: reasoning, content, names of called functions."""
    reasoning = next((message[key] for key in REASONING if message.get(key)), None)
    if isinstance(reasoning, str):
        yield "reasoning", reasoning
    if isinstance(message.get("content"), str):
        yield "content", message["content"]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        yield "tool call", str(function.get("name", ""))


def _content(message: Message, body: str) -> tuple[int, int]:
    """Return [start, stop) of the body's characters that come from the message; tool calls extend this range to the body's end."""
    spans = []
    for name, part in _parts(message):
        # Most templates trim the content.
        text = part if part in body else part.strip()
        if name != "tool call" and text and text in body:
            spans.append((body.rindex(text), body.rindex(text) + len(text)))
    if message.get("tool_calls"):
        spans.append((spans[0][0] if spans else 0, len(body.rstrip())))
    if not spans:
        return (0 if any(part.strip() for _, part in _parts(message)) else len(body.rstrip())), len(body.rstrip())
    return min(a for a, _ in spans), max(b for _, b in spans)


def _without_spaces(text: str) -> str:
    return "".join(text.split())
