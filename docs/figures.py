"""README's figures and its picture, from the run that made them.

    make demo
    python docs/figures.py --store .puna

Writes docs/figures.json from the store, README's passage between its two markers from docs/figures.json, and
docs/pictures/report.png: the first screen of the run's report, by a browser without a window. Without `--store`: the passage alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / ".pkg"))

from puna.flows.report import arms, write  # noqa: E402
from puna.flows.report.run import Run, Step  # noqa: E402
from puna.stages.prompts.lookups import EDITS, NUMBERS, REPLACED, WORDS, answers_without_model  # noqa: E402
from puna.stages.training.intervals import wilson  # noqa: E402
from puna.storage import PunaError, Store  # noqa: E402

FIGURES, README, PICTURE = ROOT / "docs/figures.json", ROOT / "README.md", ROOT / "docs/pictures/report.png"
BEGIN, END = "<!-- by docs/figures.py -->", "<!-- end -->"
SCREEN = "1200,470"
"""Width and height of the picture, pixels."""


def measured(run: Run) -> dict[str, Any]:
    """Return the figures of a whole run of the pipeline with control arms. Raise PunaError if a part is missing."""
    rounds = arms.rounds([(step.name, step.artifact) for step in run.steps], run.log.made)
    if run.log.state != "finished" or run.log.opened is None or run.log.closed is None or not rounds:
        raise PunaError(f"run {run.log.name}: is no finished run with rounds and their control arms; `make demo` makes one")
    spent = {step.artifact.key: {"seconds": 0.0, "cpu_seconds": 0.0, **step.artifact.manifest.timings} for step in run.steps}
    return {
        "run": run.log.name,
        "day": run.log.opened.date().isoformat(),
        "commit": run.log.about.get("commit"),
        "versions": run.log.about.get("versions"),
        "minutes": round(sum(taken["seconds"] for taken in spent.values()) / 60, 1),
        "cpu_minutes": round(sum(taken["cpu_seconds"] for taken in spent.values()) / 60, 1),
        "heldout": len(rounds[0].scores["round"]["accuracy"]),
        "rounds": [_round(one) for one in rounds],
        **({"equal_budget": _equal_budget(run, rounds[0])} if "rl" in rounds[0].scores else {}),
        "gates": [_gate(step) for step in run.steps if step.stage == "gate"],
    }


def _equal_budget(run: Run, one: arms.Arms) -> dict[str, Any]:
    """Return the first round's control arms with as large a budget, and the answers without a model."""
    rows = answers_without_model(run.kind("prompts")[0].artifact.read().to_pylist())
    right, asked = max((int(sum(rows[name].values())), len(rows[name])) for name in (NUMBERS, WORDS, EDITS))
    ratios = {name: one.ratio(name, "round") or 0.0 for name in ("ranked", "rl")}
    return {
        "arms": {name: _shares(one, name) | _round_over(one, name) for name, ratio in ratios.items() if ratio >= 1},
        "budget_ratio": round(min(ratios.values()), 3),
        "lookup": [round(value, 3) for value in wilson(right, asked)],
        "replaced": round(sum(rows[REPLACED].values()) / len(rows[REPLACED]), 3),
    }


def _round_over(one: arms.Arms, arm: str) -> dict[str, Any]:
    return {f"round_over_it_{metric}": [round(value, 3) for value in one.gain("round", arm, metric)] for metric in one.metrics}


def _gate(step: Step) -> dict[str, Any]:
    """Return a gate's verdict and gain over the policy before."""
    gain = {name.removeprefix("gain_"): round(float(step.metrics[name]), 3) for name in ("gain", "gain_low", "gain_high")}
    return {"round": step.round, "verdict": step.metrics["verdict"], "metric": step.artifact.manifest.config["metric"], **gain}


def _shares(one: arms.Arms, arm: str) -> dict[str, float]:
    return {metric: round(one.share(arm, metric).value, 3) for metric in one.metrics}


def _round(one: arms.Arms) -> dict[str, Any]:
    claims = [claim for claim in one.claims() if claim.name == next(iter(arms.CLAIMS))]
    return {
        "number": one.number,
        "before": _shares(one, "before"),
        "after": _shares(one, "round"),
        "over_strongest_control": {
            one.metric: {"control": arms.NAMES[one.control], "gain": [round(value, 3) for value in one.gain], "verdict": one.verdict}
            for one in claims
        },
    }


def share(value: float) -> str:
    """Return a share as RESULTS.md writes it: .87 and 1.0."""
    return f"{value:.3f}".removeprefix("0") if value >= 0 else f"-{share(-value)}"


def passage(figures: dict[str, Any]) -> str:
    """Return the passage of README: shares of right answers after each round and of its arms, and the gains with their intervals."""
    rounds, equal = figures["rounds"], figures["equal_budget"]
    first, *later = [row(f"round {one['number']}", one["after"]) for one in rounds]
    metrics = list(rounds[0]["after"])
    lines = [
        f"| of {figures['heldout']} held-out questions | right | right and liked |",
        "|---|---|---|",
        row("before the rounds", rounds[0]["before"]),
        first,
        *(row(f"{ALONE[name]} alone", arm) for name, arm in equal["arms"].items()),
        *later,
        f"| no model: gold answer to the nearest training question | {share(equal['lookup'][0])} | |",
        f"| the same, its differing words replaced | {share(equal['replaced'])} | |",
        "",
        f"| gain (95 % interval) | {' | '.join(arms.METRICS[metric] for metric in metrics)} |",
        f"|{'---|' * (1 + len(metrics))}",
    ]
    for name, arm in equal["arms"].items():
        lines.append(gains(f"round 1 over {ALONE[name]} alone", [arm[f"round_over_it_{metric}"] for metric in metrics]))
    for one in rounds[1:]:
        claims = one["over_strongest_control"]
        lines.append(gains(f"round {one['number']} over its strongest control", [claims[metric]["gain"] for metric in metrics]))
    for gate in figures["gates"]:
        name = f"round {gate['round']} over round {gate['round'] - 1}" + ("" if gate["verdict"] == "passed" else ", refused by its gate")
        gain = [gate["gain"], gate["low"], gate["high"]]
        lines.append(gains(name, [gain if metric == gate["metric"] else None for metric in metrics]))
    return "\n".join(lines)


ALONE = {"ranked": "finetuning", "rl": "RL"}


def row(name: str, shares: dict[str, float]) -> str:
    """Return a line of the table: shares of right answers, and of those that are liked, too."""
    return f"| {name} | {share(shares['accuracy'])} | {share(shares['liked']) if 'liked' in shares else ''} |"


def gains(name: str, values: Iterable[Sequence[float] | None]) -> str:
    """Return a line of the table of gains: each with its interval; empty where there is none."""
    cells = (f"{share(one[0])} ({share(one[1])} to {share(one[2])})" if one else "" for one in values)
    return f"| {name} | {' | '.join(cells)} |"


def written(text: str, figures: dict[str, Any]) -> str:
    """Return README's text with the passage between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PunaError(f"README.md: lacks the markers {BEGIN} and {END}, between which its figures stand")
    return f"{before}{begin}\n{passage(figures)}\n{end}{after}"


def photographed(page: Path, chromium: str, picture: Path) -> None:
    """Write the first screen of a page as a picture, by a browser that has no profile and asks no other host."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
        made = Path(folder, "picture.png")
        words = [chromium, *flags, f"--user-data-dir={folder}/profile", f"--window-size={SCREEN}", f"--screenshot={made}", page.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        if not made.exists():
            raise PunaError(f"{chromium}: made no picture of {page}: {done.stderr.strip()[-300:]}")
        os.replace(made, picture) if made.stat().st_dev == picture.parent.stat().st_dev else picture.write_bytes(made.read_bytes())


def digest(picture: Path) -> str:
    """Return the SHA-256 of a picture, which docs/figures.json names."""
    return hashlib.sha256(picture.read_bytes()).hexdigest()


def main() -> None:
    """Write figures, passage and picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="store of a whole run of the recipe demo")
    parser.add_argument("--run", default="latest", help="the run, where it is not the newest")
    parser.add_argument("--chromium", default="chromium", help="the browser that takes the picture")
    given = parser.parse_args()
    if given.store:
        store = Store.open(given.store)
        photographed(write(store, given.run, None).absolute(), given.chromium, PICTURE)
        figures = {**measured(Run.open(store, given.run)), "picture": digest(PICTURE)}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    README.write_text(written(README.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    main()
