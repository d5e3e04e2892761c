"""Prompts with verifiers: rules for answers in the system messages of other prompts, and questions about long texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, JsonValue, model_validator

from puna.stages.contract import Documents, Prompts, SeededConfig, StageConfig, StageRun, stage
from puna.stages.conversations import Message, asking, content_of, dump, messages_of
from puna.stages.draws import hash_of, identifier
from puna.stages.evaluation.multiple_choice import heldout_pages
from puna.stages.evaluation.needle import THINGS
from puna.stages.verifiers.registry import from_json, to_text
from puna.storage import PunaError

TRAINED, NEW = "trained_rules", "new_rules"  # task names: rules that are trained on; rules of held-out prompts only


class Rule(StageConfig):
    """A rule for answers, and the verifier that checks whether an answer obeys it."""

    text: str = Field(min_length=1, description="The rule, as the system message states it")
    verifier: dict[str, JsonValue] = Field(description="Verifier as {name: …, …}; it scores 1 for an answer that obeys the rule")
    heldout: bool = Field(False, description="Give the rule to held-out prompts only, to measure rules that were never trained on")

    @model_validator(mode="after")
    def _check_verifier(self) -> Rule:
        try:
            from_json(self.verifier)
        except PunaError as error:
            raise ValueError(str(error)) from error
        return self


class SystemPromptsConfig(SeededConfig):
    rules: tuple[Rule, ...] = Field(min_length=1, description="Rules; each prompt gets one of them")
    place: Literal["system", "user", "none"] = Field(
        "system", description="Place of the rule: system message, end of the last user message, or none (obedience by chance)"
    )

    @model_validator(mode="after")
    def _has_trained_rules(self) -> SystemPromptsConfig:
        if all(rule.heldout for rule in self.rules):
            raise ValueError("all rules are held out; set heldout to false for the rules to train on")
        if len({rule.text for rule in self.rules}) < len(self.rules):
            raise ValueError("two rules have the same text")
        return self


@stage(kind="prompts")
def system_prompts(prompts: Prompts, config: SystemPromptsConfig, run: StageRun) -> None:
    """Give each prompt a rule for its answer in the system message (steerability: Llama 3, section 4.3.7), with the rule's verifier.

    A hash of seed and prompt chooses the rule; training prompts get no held-out rule. The rule is appended to the prompt's own system
    message. The tasks are `trained_rules` and `new_rules`. The prompts' own references and verifiers are dropped. Ids do not depend on
    `place`, so answers to prompts with one `place` can serve to train or score prompts with another."""
    made = []
    for row in prompts.read().to_pylist():
        rules = [rule for rule in config.rules if row["split"] == "heldout" or not rule.heldout]
        rule = min(rules, key=lambda one: hash_of("system_prompts", config.seed, row["id"], one.text))
        made.append({
            **row, "id": identifier("system_prompts", row["id"], rule.text), "task": NEW if rule.heldout else TRAINED,
            "messages": dump(add_rule(messages_of(row), rule.text, config.place)), "reference": None,
            "verifier": dump(rule.verifier),
        })  # fmt: skip
    if not made:
        raise PunaError(f"system_prompts: {prompts.id} has no prompts; give an artifact with prompts")
    run.write_rows(made)
    for task in (TRAINED, NEW):
        run.metric(task, sum(row["task"] == task for row in made))


def add_rule(messages: list[Message], rule: str, place: str) -> list[Message]:
    """Return the messages with a rule appended to the system message or the last user message. A missing message is added."""
    if place == "none":
        return messages
    at = next((number for number, one in reversed([*enumerate(messages)]) if one.get("role") == place), None)
    if at is None:
        one: Message = {"role": place, "content": rule}
        return [one, *messages] if place == "system" else [*messages, one]
    gap = "\n" if place == "system" else " "
    joined: dict[str, Any] = {**messages[at], "content": f"{content_of(messages[at]).rstrip()}{gap}{rule}"}
    return [*messages[:at], joined, *messages[at + 1 :]]


class LongPromptsConfig(SeededConfig):
    train: int = Field(200, ge=0, description="Training prompts")
    heldout: int = Field(64, ge=0, description="Number of held-out prompts, made from other documents and other keys")
    characters: int = Field(6000, ge=100, le=10_000_000, description="Length of the text around the passages, in characters")
    passages: int = Field(3, ge=1, le=100, description="Number of passages in each text; the question asks for one of them")
    passage: str = Field("The number of the {key} is {value}.", description="Template of a passage, which gets its own line")
    question: str = Field("What is the number of the {key}? Answer with the number alone.", description="Template of the question")
    keys: tuple[str, ...] = Field(THINGS, description="Words for {key}; a third of them, at least `passages`, serve only held-out prompts")
    heldout_fraction: float = Field(0.2, gt=0, lt=1, description="Share of the documents whose text is used only in held-out prompts")

    @model_validator(mode="after")
    def _passages_can_be_asked_for(self) -> LongPromptsConfig:
        for name, fields in (("passage", ("{key}", "{value}")), ("question", ("{key}",))):
            if missing := [one for one in fields if one not in getattr(self, name)]:
                raise ValueError(f"{name} has no {missing[0]}")
        if len(set(self.keys)) < len(self.keys) or len(self.keys) < 2 * self.passages:
            raise ValueError(f"keys: {self.passages} passages need {2 * self.passages} different keys")
        if self.train + self.heldout == 0:
            raise ValueError("train and heldout are both 0; set at least one of them above 0")
        return self


@stage(kind="prompts")
def long_prompts(documents: Documents, config: LongPromptsConfig, run: StageRun) -> None:
    """Make prompts whose long text hides passages with numbers. The question asks for one number, which is both reference and verifier.

    This is a minimal form of the long-context question answering of Llama 3 (section 4.3.4), for training and evaluation; see also
    `needle`. Held-out prompts use other documents and keys than training prompts. Documents that contain a key's passage are left out.
    Raise PunaError if a split has no documents."""
    size = (config.train + config.heldout) * config.characters
    begins = [config.passage.partition("{value}")[0].replace("{key}", key).strip() for key in config.keys]
    texts: dict[str, list[str]] = {"train": [], "heldout": []}
    for page in heldout_pages(documents, None, size, size, run):
        if not any(begin in page.text for begin in begins):
            share = hash_of("long_prompts", config.seed, page.id) / 2**64
            texts["heldout" if share < config.heldout_fraction else "train"].append(page.text)
    ordered = sorted(config.keys, key=lambda key: hash_of("long_prompts", config.seed, key))
    away = max(config.passages, len(ordered) // 3)
    for split, count, keys in (("heldout", config.heldout, ordered[:away]), ("train", config.train, ordered[away:])):
        if count and not texts[split]:
            raise PunaError(f"long_prompts: {documents.id} has no document for {split} prompts; give more documents, or change the seed")
        rows = [_prompt(texts[split], keys, split, config, run.generator(split, number)) for number in range(count)]
        run.write_rows(rows)
        run.metric(f"{split}_prompts", count)


def _prompt(texts: Sequence[str], keys: Sequence[str], split: str, config: LongPromptsConfig, draw: np.random.Generator) -> dict[str, Any]:
    """Return one row of the prompts table. Its text starts at a random line of a random text and continues with the next texts; passages
    are inserted between lines."""
    at = int(draw.integers(len(texts)))
    text = texts[at].strip()
    text = text[text.rfind("\n", 0, int(draw.integers(max(0, len(text) - config.characters) + 1))) + 1 :]
    while len(text) < config.characters:
        at += 1
        text += "\n\n" + texts[at % len(texts)].strip()[: config.characters]
    lines = text[: config.characters].rstrip().split("\n")
    asked = draw.choice(np.asarray(keys, object), config.passages, replace=False).tolist()
    values = (100 + draw.choice(900, config.passages, replace=False)).tolist()
    for key, value in zip(asked, values, strict=True):
        lines.insert(int(draw.integers(len(lines) + 1)), config.passage.replace("{key}", key).replace("{value}", str(value)))
    question = "\n".join(lines) + "\n\n" + config.question.replace("{key}", asked[0])
    return {
        "id": identifier(question), "task": "long_context", "split": split, "messages": asking(question), "tools": None,
        "reference": str(values[0]), "verifier": to_text("regex", pattern=rf"\D*{values[0]}\D*", match="whole"),
    }  # fmt: skip
