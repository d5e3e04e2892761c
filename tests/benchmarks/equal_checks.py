"""A round of RL beside what as many checks give without RL: finetuning on all distinct checked answers, and a lookup without a model.

    python tests/benchmarks/equal_checks.py --store STORE --json

STORE holds a run of the demo (`--run`). The policy before the round answers the round's questions as often as sampling and RL of the
round did together, the checker judges each answer once, and all distinct right ones are finetuned on, with as many updates as the
other arms have. `lookup`: the checked answer to the nearest training question, repeated.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".pkg"))

from puna.flows.engine.trace import load_stages  # noqa: E402
from puna.flows.report.arms import rounds  # noqa: E402
from puna.flows.report.run import Run, Step  # noqa: E402
from puna.stages.contract import execute  # noqa: E402
from puna.stages.conversations import dump, messages_of  # noqa: E402
from puna.stages.draws import identifier  # noqa: E402
from puna.stages.prompts.lookups import answers_without_model  # noqa: E402
from puna.stages.training.intervals import paired  # noqa: E402
from puna.stages.verifiers.base import is_correct  # noqa: E402
from puna.storage import Artifact, Store  # noqa: E402


def again(run: Run, step: Step, swapped: dict[str, Artifact], **changes: Any) -> Artifact:
    """Run a step's stage again with some inputs swapped, by key, and some settings changed."""
    stage = load_stages()[step.stage]
    known = {name: value for name, value in step.artifact.manifest.config.items() if name in stage.config.model_fields}
    given: dict[str, list[Artifact]] = defaultdict(list)
    for record in step.artifact.manifest.inputs:
        found = run.source(step, record)
        assert found is not None, f"{step.name}: its input {record.kind}/{record.key} is no longer in the store"
        given[re.sub(r"\[\d+\]$", "", record.name)].append(swapped.get(found.key, found))
    many = {spec.name: spec.many for spec in stage.inputs}
    inputs = {name: items if many[name] else items[0] for name, items in given.items()}
    return execute(stage, stage.config.model_validate(known | changes), inputs, run.store)


def checked_answers(answers: Artifact, prompts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an instruction for each distinct finished answer that the checker passes."""
    found = {}
    for row in answers.read(columns=["prompt_id", "text", "finished", "gold"]).to_pylist():
        if row["finished"] and is_correct(row["gold"]):
            text, asked = row["text"].strip(), prompts[row["prompt_id"]]
            messages = dump([*messages_of(asked), {"role": "assistant", "content": text}])
            name = identifier("equal_checks", asked["id"], text)
            found[name] = {"id": name, "prompt_id": asked["id"], "task": asked["task"], "split": "train", "messages": messages, "tools": None,
                           "source": "equal_checks", "score": None, "text": text}  # fmt: skip
    return [found[name] for name in sorted(found)]


def measured(store: Store, name: str, number: int = 1) -> dict[str, Any]:
    """Return the shares of right answers of the round, of finetuning with as many checks, and of the lookup."""
    run = Run.open(store, name)
    run.store = store
    at = {step.name: step for step in run.steps}
    sampled, learned = at[f"sample_{number}"].artifact, at[f"grpo_{number}"].artifact.manifest.config
    prompts = {row["id"]: row for row in at[f"prompts_{number}"].artifact.read().to_pylist()}
    checks = sampled.rows() + learned["rollouts"] * learned["prompts"] * learned["answers"]
    answers = again(run, at[f"sample_{number}"], {}, answers=-(-checks // len(prompts)))
    instructions = checked_answers(answers, prompts)
    own = store.import_table("instructions", pa.Table.from_pylist([{k: v for k, v in row.items() if k != "text"} for row in instructions]))
    arm = made = own
    before = at[f"pick_verifier_{number}"].artifact
    for step in (f"sft_pick_verifier_{number}", f"average_pick_verifier_{number}", f"control_pick_verifier_{number}"):
        arm, made, before = made, again(run, at[step], {before.key: made}), at[step].artifact
    gold = at["prompts"].artifact.read().to_pylist()
    first = {row["prompt_id"]: row["text"] for row in reversed(instructions)}
    known = [{**prompts[asked], "id": asked, "split": "train", "reference": text} for asked, text in first.items()]
    found = {one.number: one for one in rounds((s.name, s.artifact) for s in run.kind("evaluation"))}[number]
    (equal,) = rounds([(f"control_equal_{number}", made)])
    rows = answers_without_model([*gold, *known])
    return {
        "checks": answers.rows(), "checks_of_the_round": checks, "distinct_right_answers": len(instructions), "model": arm.id,
        "right": equal.share("equal", "accuracy").value, "of_the_round": found.share("round", "accuracy").value,
        "round_over_it": list(paired(found.scores["round"]["accuracy"], equal.scores["equal"]["accuracy"])),
        "liked": equal.share("equal", "liked").value, "liked_of_the_round": found.share("round", "liked").value,
        "without_model": {name: sum(right.values()) / len(right) for name, right in rows.items()},
    }  # fmt: skip


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--run", default="latest")
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    figures = measured(Store.open(given.store), given.run, given.round)
    print(json.dumps(figures) if given.json else "\n".join(f"{name:24} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
