"""Stages that import rows in common layouts: prompts, preferences, instructions, documents."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from puna.stages.contract import External, StageRun, stage
from puna.stages.io.importing import HELDOUT_SHARE, ImportConfig, PromptRowsConfig, SplitConfig, import_rows

LAYOUT = "Layout of the rows; auto detects it, and stops if several layouts fit"


class ImportPreferencesConfig(SplitConfig):
    layout: Literal["auto", "pairs", "kto", "ranked", "compared"] = Field("auto", description=LAYOUT)
    heldout_fraction: float = Field(0.1, ge=0, lt=1, description=HELDOUT_SHARE)


@stage(kind="preferences")
def import_preferences(inputs: list[External], config: ImportPreferencesConfig, run: StageRun) -> None:
    """Import preferences: chosen and rejected answers, labelled (KTO), scored or ranked answers, or pairs with a preference from -3 to 3.

    Chosen and rejected answers are text, messages, or HH dialogues ("\\n\\nHuman:"). Without a prompt, the messages with which both start
    are the context. Instruction, prompt and input are joined. In a ranking, the best answer is chosen, the worst rejected, the rest
    `others`. `examples` shows how each input was read; `dropped` lists each invalid or repeated row with field and reason. Rows without an
    id get one from their content. By default, a tenth of the prompts is held out if rows name no split."""
    import_rows("preferences", config.layout, inputs, config, run)


class ImportInstructionsConfig(SplitConfig):
    layout: Literal["auto", "messages", "prompt_completion", "instruction_output"] = Field("auto", description=LAYOUT)


@stage(kind="instructions")
def import_instructions(inputs: list[External], config: ImportInstructionsConfig, run: StageRun) -> None:
    """Import conversations to learn from: messages (role and content, or from and value), prompt and completion, or instruction and output.

    `examples` shows how each input was read; `dropped` lists invalid and repeated rows (same id or, without ids, same conversation)."""
    import_rows("instructions", config.layout, inputs, config, run)


class ImportDocumentsConfig(ImportConfig):
    layout: Literal["auto", "text"] = Field("auto", description=LAYOUT)


@stage(kind="documents")
def import_documents(inputs: list[External], config: ImportDocumentsConfig, run: StageRun) -> None:
    """Import documents from rows with a text and, optionally, title, URL and date. For HTML pages and archives, use `ingest`.

    `examples` shows how each input was read; `dropped` lists invalid and repeated rows (same id or, without ids, same URL and text)."""
    import_rows("documents", config.layout, inputs, config, run)


class ImportPromptsConfig(PromptRowsConfig):
    layout: Literal[
        "auto", "messages", "prompt", "instruction", "ifeval", "humaneval", "mbpp", "gsm8k", "math", "arc", "hellaswag", "winogrande",
        "boolq", "piqa", "blimp", "truthfulqa_mc", "mmlu_pro", "mmlu", "needle", "ruler",
    ] = Field("auto", description=LAYOUT)  # fmt: skip
    heldout_fraction: float = Field(0.1, ge=0, le=1, description=HELDOUT_SHARE)


@stage(kind="prompts")
def import_prompts(inputs: list[External], config: ImportPromptsConfig, run: StageRun) -> None:
    """Import prompts to be answered: conversations, questions or instructions, with a reference answer and a verifier, if given.

    If a conversation ends in an answer, that answer is the reference, unless the row has another. Rows of known benchmarks are recognized
    by their columns and get the benchmark's question and verifier (`puna.stages.io.benchmarks`). Verifiers may call only functions from the
    modules of `--module` and of installed plugins. By default, a tenth of the rows without a split is held out. `examples` shows how each
    input was read; `dropped` lists invalid and repeated rows (same id or, without ids, same messages). The metrics `columns_not_taken_*`
    name unused columns; `prompts_without_verifier` counts rows without a verifier."""
    import_rows("prompts", config.layout, inputs, config, run)
