"""Prompts with a rule in the system message, and a verifier that tells whether an answer obeys the rule."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from puna.stages.contract import Prompts, SeededConfig, StageConfig, StageRun, stage
from puna.stages.conversations import Message, content_of, dump, messages_of
from puna.stages.draws import hash_of, identifier
from puna.stages.verifiers.registry import from_json
from puna.storage import PunaError

TRAINED, NEW = "trained_rules", "new_rules"
"""Tasks of the prompts, by their rule: rules of training prompts, and rules that only held-out prompts have."""


class Rule(StageConfig):
    """A rule for answers, and the verifier of its observance."""

    text: str = Field(min_length=1, description="The rule, as the system message states it")
    verifier: dict[str, JsonValue] = Field(description="Verifier, {name: …, …}, that scores 1 for an answer that obeys the rule")
    heldout: bool = Field(False, description="Give the rule to held-out prompts only, to measure rules that were never trained on")

    @field_validator("verifier")
    @classmethod
    def _check_verifier(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            from_json(value)
        except PunaError as error:
            raise ValueError(str(error)) from error
        return value


class SystemPromptsConfig(SeededConfig):
    """The rules, and the place where prompts state them."""

    rules: tuple[Rule, ...] = Field(min_length=1, description="Rules, one of which each prompt gets")
    place: Literal["system", "user", "none"] = Field(
        "system", description="Place of the rule: the system message, the end of the last user message, or none, to see who obeys by chance"
    )

    @model_validator(mode="after")
    def _has_trained_rules(self) -> SystemPromptsConfig:
        if all(rule.heldout for rule in self.rules):
            raise ValueError("all rules are held out: set heldout to false for those to train on")
        if len({rule.text for rule in self.rules}) < len(self.rules):
            raise ValueError("two rules have the same text")
        return self


@stage(kind="prompts")
def system_prompts(prompts: Prompts, config: SystemPromptsConfig, run: StageRun) -> None:
    """Give each prompt a rule about its answer in the system message (steerability: Llama 3, section 4.3.7), with the rule's verifier.

    A hash of seed and prompt chooses the rule; training prompts get no held-out rule. The rule joins the prompt's own system
    message. The tasks are `trained_rules` and `new_rules`. References and verifiers of the prompts are left out. Ids do not
    depend on `place`, so that answers to prompts with one place can train or score another.
    """
    rows = prompts.read().to_pylist()
    if not rows:
        raise PunaError(f"system_prompts: {prompts.id} has no prompts")
    made = []
    for row in rows:
        rules = [rule for rule in config.rules if row["split"] == "heldout" or not rule.heldout]
        rule = min(rules, key=lambda one: hash_of("system_prompts", config.seed, row["id"], one.text))
        made.append({
            **row, "id": identifier("system_prompts", row["id"], rule.text), "task": NEW if rule.heldout else TRAINED,
            "messages": dump(add_rule(messages_of(row), rule.text, config.place)), "reference": None,
            "verifier": dump(rule.verifier),
        })  # fmt: skip
    run.write_rows(made)
    for task in (TRAINED, NEW):
        run.metric(task, sum(row["task"] == task for row in made))


def add_rule(messages: list[Message], rule: str, place: str) -> list[Message]:
    """Return the messages with a rule at the end of the system message, or of the last user message; a missing message is added."""
    if place == "none":
        return messages
    at = next((number for number, one in reversed([*enumerate(messages)]) if one.get("role") == place), None)
    if at is None:
        one: Message = {"role": place, "content": rule}
        return [one, *messages] if place == "system" else [*messages, one]
    gap = "\n" if place == "system" else " "
    joined: dict[str, Any] = {**messages[at], "content": f"{content_of(messages[at]).rstrip()}{gap}{rule}"}
    return [*messages[:at], joined, *messages[at + 1 :]]
