"""Conversion of rows in a known layout to rows of Puna's tables. An invalid row raises `Refused` with the field and the reason."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from puna.stages.conversations import LEVELS, Message, dump
from puna.stages.io import turns
from puna.stages.io.benchmarks import BENCHMARKS, Fields, Values
from puna.stages.io.layouts import EMPTY, IGNORE, SCORES, Plan
from puna.stages.io.turns import Refused
from puna.stages.reading.dates import moment

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
RANKS = {"rank", "ranks", "ranking", "rankings"}  # words in the name of a column of ranks; other columns contain scores
HELDOUT = ("heldout", "test", "validation", "valid", "val", "dev", "eval")


def instructions(plan: Plan, row: Fields) -> Values:
    if plan.layout == "messages":
        messages = turns.messages(plan.get(row, "messages"), plan.name("messages"))
    else:
        answer = "completion" if plan.layout == "prompt_completion" else "output"
        messages = [*_context(plan, row), *_answer(plan.get(row, answer), plan.name(answer))]
    if not any(message["role"] == "assistant" for message in messages):
        raise Refused(plan.name("messages"), "no_answer", "has no assistant message to learn from")
    return {"messages": dump(_with_system(plan, row, messages)), "tools": _tools(plan, row)}


def prompts(plan: Plan, row: Fields) -> Values:
    if plan.layout in BENCHMARKS:
        values = BENCHMARKS[plan.layout].build(plan, row)
        return values | {"messages": dump(_with_system(plan, row, json.loads(values["messages"])))}
    reference = plan.get(row, "reference")
    if plan.layout == "messages":
        messages = turns.messages(plan.get(row, "messages"), plan.name("messages"))
        if messages[-1]["role"] == "assistant":
            last = messages.pop()
            reference = reference if reference is not None else last["content"] or None
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise Refused(plan.name("messages"), "no_question", "has no user message before the answer")
    else:
        messages = _context(plan, row)
    if reference is not None and not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False)
    verifier = plan.get(row, "verifier")
    if verifier is not None:
        value = turns.parse(verifier, plan.name("verifier")) if isinstance(verifier, str) else verifier
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise Refused(plan.name("verifier"), "wrong_type", "is not a verifier, which is an object with a name and parameters")
        verifier = dump(value)
    return {"messages": dump(_with_system(plan, row, messages)), "tools": _tools(plan, row), "reference": reference, "verifier": verifier}


def preferences(plan: Plan, row: Fields) -> Values:
    context, values = {"pairs": _pair, "kto": _labelled_row, "ranked": _ranked_row, "compared": _compared_row}[plan.layout](plan, row)
    if not context:
        raise Refused(plan.name("prompt"), "no_prompt", "has no message before the answers")
    columns = dict.fromkeys(("edited", "others", "level", "margin", "chosen_model", "rejected_model")) | values
    texts = {name: dump(value) if isinstance(value, dict | list) else value for name, value in columns.items()}
    return {"messages": dump(_with_system(plan, row, context)), "tools": _tools(plan, row), **texts}


def documents(plan: Plan, row: Fields) -> Values:
    """Return the row's columns `text`, `title`, `url` and `fetched_at` of the documents table; a missing date becomes 1970-01-01."""
    text = plan.text(row, "text")
    title, url, date = (plan.get(row, field) for field in ("title", "url", "date"))
    for value, field in ((title, "title"), (url, "url")):
        if value is not None and not isinstance(value, str):
            raise Refused(plan.name(field), "wrong_type", f"contains {turns.kind_of(value)}, not text")
    fetched = moment(date)
    if fetched is None:
        raise Refused(plan.name("date"), "wrong_type", f"contains {str(date)[:40]!r}, not a date")
    return {"text": text, "title": title or None, "url": url or None, "fetched_at": fetched}


CONVERT: dict[str, Callable[[Plan, Fields], Values]] = {
    "instructions": instructions, "prompts": prompts, "preferences": preferences, "documents": documents,
}  # fmt: skip


def split_of(plan: Plan, row: Fields) -> str | None:
    """Return the row's split, train or heldout; None if the row names none. Raise Refused for an unknown name."""
    value = plan.get(row, "split")
    if value is None:
        return None
    name = value.strip().lower() if isinstance(value, str) else value
    if name in HELDOUT:
        return "heldout"
    if name != "train":
        known = f"the known splits are train, {', '.join(HELDOUT)}"
        raise Refused(plan.name("split"), "unknown_split", f"contains {str(value)[:40]!r}; {known}")
    return "train"


def _context(plan: Plan, row: Fields) -> list[Message]:
    """Return the messages before the answer, from the first of prompt, instruction and messages, joined with the row's other texts."""
    main = next((name for name in ("prompt", "instruction", "messages") if name in plan.columns), "")
    value, field = plan.get(row, main), plan.name(main)
    if main == "prompt" and turns.is_dialogue(value):
        # An HH-RLHF prompt may end in the header of the answer.
        context = turns.dialogue(value.rstrip().removesuffix("\n\nAssistant:"), field)
    elif main == "messages" or (main == "prompt" and isinstance(value, list | dict)):
        context = turns.messages(value, field)
    else:
        context = [{"role": "user", "content": turns.text(value, field)}] if main else []
    for name in ("instruction", "input"):
        text = None if name == main else plan.get(row, name)
        if text is None or (isinstance(text, str) and not text.strip()):
            continue
        text, content = turns.text(text, plan.name(name)), context[0]["content"] if context else ""
        if [message["role"] for message in context] != ["user"]:
            raise Refused(plan.name(name), "two_contexts", f"joins only a user's turn; leave it out: {IGNORE.format(plan.name(name))}")
        if main == "instruction" or f"\n{text.strip()}\n" not in f"\n{content}\n":  # a prompt made from a template repeats the texts
            context = [{**context[0], "content": f"{text}\n\n{content}" if name == "instruction" else f"{content}\n\n{text}"}]
    other = None if main == "messages" else plan.get(row, "messages")
    whole = [] if other in EMPTY else turns.messages(other, plan.name("messages"))
    if whole[-len(context) :] == context:
        return whole
    if whole and (whole[: len(context)] != context or [message["role"] for message in whole[len(context) :]] != ["assistant"]):
        problem = f"contains messages that {field} lacks; put the whole context into one column, or leave this one out"
        raise Refused(plan.name("messages"), "two_contexts", f"{problem}: {IGNORE.format(plan.name('messages'))}")
    return context


def _answer(value: Any, field: str) -> list[Message]:
    if isinstance(value, list | dict):
        return turns.messages(value, field)
    return [{"role": "assistant", "content": turns.text(value, field)}]


def _one_answer(messages: Sequence[Message], field: str) -> Message:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages) or "nothing"
        raise Refused(field, "not_one_answer", f"continues the context with {roles}, not with one assistant message")
    return messages[0]


def _with_system(plan: Plan, row: Fields, messages: list[Message]) -> list[Message]:
    system = plan.get(row, "system")
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages
    if messages[0]["role"] == "system":
        raise Refused(plan.name("system"), "two_systems", "is a system message, but the messages begin with another one")
    return [{"role": "system", "content": plan.text(row, "system")}, *messages]


def _tools(plan: Plan, row: Fields) -> str | None:
    value = plan.get(row, "tools")
    if isinstance(value, str):
        value = turns.parse(value, plan.name("tools")) if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Refused(plan.name("tools"), "wrong_type", f"contains {turns.kind_of(value)}, not a list of tools")
    return dump(value)


def _pair(plan: Plan, row: Fields) -> tuple[list[Message], Values]:
    fields = plan.name("chosen"), plan.name("rejected")
    if plan.get(row, "chosen") is None and plan.get(row, "rejected") is None:
        raise Refused(fields[0], "missing", "is missing or null")
    context = _context(plan, row)
    chosen, rejected = (_side(plan.get(row, side), plan.name(side)) for side in ("chosen", "rejected"))
    if context:
        answers = [_behind(context, side, field) for side, field in zip((chosen, rejected), fields, strict=True)]
    else:
        if chosen == rejected:
            raise Refused(fields[1], "identical", f"is the same as {fields[0]}")
        context = [turn for turn, other in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
        answers = [chosen[len(context) :], rejected[len(context) :]]
    better, worse = (_one_answer(messages, field) for messages, field in zip(answers, fields, strict=True))
    if better == worse:
        raise Refused(fields[1], "identical", f"is the same as {fields[0]}")
    values: Values = {"chosen": better, "rejected": worse} | _margin(plan, row)
    if plan.get(row, "edited") is not None:
        values["edited"] = _one_answer(_side(plan.get(row, "edited"), plan.name("edited")), plan.name("edited"))
    if plan.get(row, "others") is not None:
        values["others"] = _others(plan.get(row, "others"), plan.name("others"))
    return context, values


def _others(value: Any, field: str) -> list[Message]:
    messages = turns.messages(value, field)
    for number, one in enumerate(messages):
        _one_answer([one], f"{field}.{number}")
        if not isinstance(one.get("rank"), int) or one["rank"] < -1:
            ranks = "a rank is 0 (as good as chosen), 1, 2, … (between) or -1 (as bad as rejected)"
            raise Refused(f"{field}.{number}.rank", "wrong_type", f"is not a rank; {ranks}")
    return messages


def _side(value: Any, field: str) -> list[Message]:
    """Return one side of a pair as messages. `value`: messages, their JSON text, an HH dialogue, or the answer's text."""
    if isinstance(value, str) and turns.is_dialogue(value):
        return turns.dialogue(value, field)
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):
        with contextlib.suppress(Refused):  # JSON that is not messages is an answer's text
            return turns.messages(value, field)
    return _answer(value, field)


def _behind(context: list[Message], messages: list[Message], field: str) -> list[Message]:
    """Return one side's messages after the context. Raise Refused if there are several and they do not start with the context."""
    if messages[: len(context)] == context:
        return messages[len(context) :]
    if len(messages) > 1:
        raise Refused(field, "prompt_differs", "begins with messages other than the prompt")
    return messages


def _margin(plan: Plan, row: Fields) -> Values:
    level = plan.get(row, "level")
    if level is not None and level not in LEVELS:
        raise Refused(plan.name("level"), "unknown_level", f"contains {str(level)[:40]!r}; the known levels are {', '.join(LEVELS)}")
    values: Values = {"level": level}
    if plan.get(row, "margin") is not None:
        values["margin"] = turns.number(plan.get(row, "margin"), plan.name("margin"))
    elif plan.get(row, "chosen_score") is not None and plan.get(row, "rejected_score") is not None:
        better, worse = (turns.number(plan.get(row, f"{side}_score"), plan.name(f"{side}_score")) for side in ("chosen", "rejected"))
        values["margin"] = better - worse
    return values


def _labelled_row(plan: Plan, row: Fields) -> tuple[list[Message], Values]:
    """Return a labelled row's context and columns: the answer is `chosen` if the label is true, else `rejected`; the other one is None."""
    good = turns.truth(plan.get(row, "label"), plan.name("label"), numbers=plan.declared)
    messages = _context(plan, row)
    if "completion" in plan.columns:
        field = plan.name("completion")
        answer = _one_answer(_answer(plan.get(row, "completion"), field), field)
    else:
        field = plan.name("messages")
        answer = _one_answer(messages[-1:], field)
        messages = messages[:-1]
    return messages, {"chosen": answer if good else None, "rejected": None if good else answer}


def _ranked_row(plan: Plan, row: Fields) -> tuple[list[Message], Values]:
    """Return a ranked row's context and columns: one best answer is `chosen`, one worst is `rejected`, the rest are `others` with ranks."""
    field = plan.name("answers")
    answers = plan.value(row, "answers")
    if not isinstance(answers, list):
        raise Refused(field, "missing" if answers is None else "wrong_type", f"contains {turns.kind_of(answers)}, not a list of answers")
    if len(answers) < 2:
        raise Refused(field, "one_answer", f"has {len(answers)} answers, but a ranking needs at least two")
    worth, by_rank = _worth(plan, row, answers)
    messages = [(value, _candidate(answer, f"{field}.{i}")) for i, (value, answer) in enumerate(zip(worth, answers, strict=True))]
    tiers = [[message for value, message in messages if value == tier] for tier in sorted(set(worth), reverse=True)]
    if len(tiers) == 1:
        raise Refused(field, "all_equal", "are all equally good, so there is nothing to prefer")
    ranks = [0, *range(1, len(tiers) - 1), -1]
    (chosen, *best), (*worst, rejected) = tiers[0], tiers[-1]
    others = [{**m, "rank": rank} for rank, tier in zip(ranks, (best, *tiers[1:-1], worst), strict=True) for m in tier]
    values: Values = {"chosen": chosen, "rejected": rejected, "others": others or None}
    if not by_rank:
        values["margin"] = max(worth) - min(worth)
    edited = _edit(plan, row, answers, worth)
    return _context(plan, row), values | ({"edited": edited} if edited else {})


def _compared_row(plan: Plan, row: Fields) -> tuple[list[Message], Values]:
    """Return a compared row's context and columns. Preference: -3 (first answer significantly better) to 3 (second); 0 raises Refused."""
    worth, field = turns.number(plan.get(row, "preference"), plan.name("preference")), plan.name("preference")
    if worth not in (-3, -2, -1, 1, 2, 3):
        rule, reason = ("wrong_type", "not a whole number from -3 to 3") if worth else ("all_equal", "neither answer is better")
        raise Refused(field, rule, f"contains {worth:g}: {reason}")
    sides = [_one_answer(_answer(plan.get(row, side), plan.name(side)), plan.name(side)) for side in ("first", "second")]
    better, worse = sides if worth < 0 else reversed(sides)
    value, field = plan.get(row, "history"), plan.name("history")
    one_turn = isinstance(value, str) and not value.lstrip().startswith("[{")
    context = [{"role": "user", "content": turns.text(value, field)}] if one_turn else turns.messages(value, field)
    return context, {"chosen": better, "rejected": worse, "level": LEVELS[3 - int(abs(worth))], "margin": abs(worth)}


def _candidate(answer: Any, field: str) -> Message:
    if not isinstance(answer, dict):
        return _one_answer(_answer(answer, field), field)
    usual = ("content", "value", "text") if {"role", "from"} & set(answer) else ("text", "content", "answer", "completion", "response")
    name = next((name for name in usual if answer.get(name) is not None), None)
    if name is None:
        raise Refused(field, "missing", f"has no text; it has {', '.join(answer) or 'nothing'}")
    return {"role": "assistant", "content": turns.text(answer[name], f"{field}.{name}")}


def _worth(plan: Plan, row: Fields, answers: Sequence[Any]) -> tuple[list[float], bool]:
    """Return a number per answer, larger for better answers, and True if the numbers are negated ranks, not scores."""
    if "scores" in plan.columns:
        field = plan.name("scores")
        values = plan.value(row, "scores")
        if not isinstance(values, list) or len(values) != len(answers):
            amount = f"{len(values)} numbers" if isinstance(values, list) else turns.kind_of(values)
            raise Refused(field, "wrong_number", f"contains {amount} for {len(answers)} answers")
        numbers = [turns.number(value, f"{field}.{i}") for i, value in enumerate(values)]
        return ([-value for value in numbers], True) if RANKS & {word.lower() for word in WORD.findall(field)} else (numbers, False)
    field = plan.name("answers")
    fields = {name for answer in answers if isinstance(answer, dict) for name in SCORES if answer.get(name) is not None}
    if len(fields) != 1:
        raise Refused(field, "no_score", f"have {' and '.join(sorted(fields)) or 'neither score, rating nor rank'}; give one of these")
    (name,) = fields
    for i, answer in enumerate(answers):
        if not isinstance(answer, dict):
            raise Refused(f"{field}.{i}", "wrong_type", f"is {turns.kind_of(answer)}, not an answer with a {name}")
    numbers = [turns.number(answer.get(name), f"{field}.{i}.{name}") for i, answer in enumerate(answers)]
    return ([-value for value in numbers], True) if name == "rank" else (numbers, False)


def _edit(plan: Plan, row: Fields, answers: Sequence[Any], worth: Sequence[float]) -> Message | None:
    """Return the best answer's edit, from its field or the column `edited`, or None. Raise Refused for two edits, or another answer's."""
    first = max(range(len(worth)), key=lambda i: (worth[i], -i))
    edits = [(i, a["edited"]) for i, a in enumerate(answers) if isinstance(a, dict) and a.get("edited") is not None]
    if plan.get(row, "edited") is not None:
        edits.append((first, plan.get(row, "edited")))
    if not edits:
        return None
    if len(edits) > 1 or edits[0][0] != first:
        raise Refused(f"{plan.name('answers')}.{edits[0][0]}.edited", "edit_of_another", "is an edit of an answer that is not the best one")
    field = f"{plan.name('answers')}.{first}.edited"
    return _one_answer(_answer(edits[0][1], field), field)
