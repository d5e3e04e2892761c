"""Questions that two of 24 months share, for all generators: Puna's own and reasoning-gym's.

    PYTHONPATH=.pkg python tests/benchmarks/dated.py --questions 2 --json

Each generator has its default parameters. `dated_shared_questions`: number of questions that occur in two months; the goal is 0.
`dated_refused`: generators that cannot fill every month, with the reason. `dated_answers_wrong`: generators whose own answer to a question
their verifier does not accept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from puna.stages.conversations import messages_of, text_of
from puna.stages.prompts.months import CYCLE, dated_questions, month_number, month_text
from puna.stages.prompts.prompts import Task
from puna.stages.prompts.tasks import GENERATORS
from puna.stages.verifiers.base import Item, attempt, is_correct
from puna.stages.verifiers.registry import from_text
from puna.stages.verifiers.scoring import leaves, question_of
from puna.storage import PunaError


def measure(name: str, questions: int, seconds: float) -> dict[str, Any]:
    """Return the shared questions of a generator's months, or the reason it cannot fill them within `seconds` of CPU time."""
    first, months, wrong, begin = month_number("2026-01"), [], 0, time.process_time()
    for number in range(CYCLE):
        try:
            rows = dated_questions(Task(task=name), month_text(first + number), questions, 5000)
        except PunaError as error:
            return {"refused": str(error)}
        months.append({text_of(messages_of(row)) for row in rows})
        for row in rows:
            scores = [attempt(Item(leaf, question_of(row), row["reference"])).value for leaf in leaves(from_text(row["verifier"]))]
            wrong += not all(map(is_correct, scores))
        if time.process_time() - begin > seconds:
            return {"refused": f"only {number + 1} months in {seconds:g} CPU s"}
    return {"shared": sum(len(one & other) for one, other in combinations(months, 2)), "wrong": wrong}


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=2, help="questions of a generator and month")
    parser.add_argument("--seconds", type=float, default=30, help="longest CPU time of a generator")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = parser.parse_args()
    from reasoning_gym.factory import DATASETS

    found = {}
    for name in [*GENERATORS, *sorted(DATASETS)]:
        with contextlib.redirect_stdout(sys.stderr):  # some generators print
            found[name] = measure(name, given.questions, given.seconds)
        print(name, found[name], file=sys.stderr, flush=True)
    filled = {name: one for name, one in found.items() if "shared" in one}
    result = {
        "dated_tasks": len(filled),
        "dated_shared_questions": sum(one["shared"] for one in filled.values()),
        "dated_answers_wrong": sorted(name for name, one in filled.items() if one["wrong"]),
        "dated_refused": {name: one["refused"] for name, one in found.items() if "refused" in one},
        "cpu_seconds": round(time.process_time(), 1),
    }
    print(json.dumps(result, indent=None if given.json else 1))


if __name__ == "__main__":
    main()
