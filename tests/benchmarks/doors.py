"""Input and output: how often Puna's rendering of conversations differs from transformers', which data layouts are read from which formats,
whether planted faults are reported, and how long a command takes to check all needs before its first stage.

    python tests/benchmarks/doors.py --json
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / ".pkg")]

from tests.models.dialogues import conversation, families, made  # noqa: E402
from tests.stages.io import samples  # noqa: E402

TEMPLATES = ("llama2", "mistral", "llama3_1", "qwen2_5", "qwen3", "gemma")
CONVERSATIONS = 200
PLANTED = 1000
RECIPES = {"demo": "pipeline", "clean": "curate"}
CHECK = """
import sys
from puna.flows.engine import launch
from puna.flows.engine.defaults import prepare
from puna.flows.engine.trace import flow_named, load, load_stages
from puna.storage import Store

flow, recipe, place, *inputs = sys.argv[1:]
store = Store.open(place)
prepare(store.root)
load_stages()
launch.checked_inputs(flow_named(flow), load(recipe, [], flow), inputs, store, quiet=True)
"""


def template_mismatches(names: tuple[str, ...] = TEMPLATES, count: int = CONVERSATIONS) -> dict[str, int]:
    """Return the number of conversations per template whose ids differ from `apply_chat_template`'s, with or without generation prompt."""
    from transformers import AutoTokenizer

    found = {}
    for name in names:
        own, rng = made(name), random.Random(name)
        with tempfile.TemporaryDirectory() as folder:
            own.save(folder)
            twin = AutoTokenizer.from_pretrained(folder)
        wrong = 0
        for _ in range(count):
            messages = conversation(rng, families()[name].system)
            cases = ((messages[:-1], True), (messages, False))
            wrong += any(
                own.chat(given, add_generation_prompt=asked)
                != twin.apply_chat_template(given, add_generation_prompt=asked, return_dict=False, date_string="26 Jul 2024")
                for given, asked in cases
            )
        found[name] = wrong
    return found


def formats_read() -> tuple[list[str], int]:
    """Return the pairs of format and layout that are read correctly, and the number of pairs tried."""
    right = []
    with tempfile.TemporaryDirectory() as folder:
        for format in samples.FORMATS:
            for number, (layout, (kind, row, expected)) in enumerate(samples.LAYOUTS.items()):
                place = Path(folder) / f"{format}-{number}"
                if not samples.misread(samples.made(place, kind, samples.written(place / "in", [row], format)), expected):
                    right.append(f"{format} x {layout}")
    return right, len(samples.FORMATS) * len(samples.LAYOUTS)


def bad_rows_named(count: int = PLANTED) -> float:
    """Return the share of planted faults that `dropped` reports with file, row, field and reason; good rows lie between the faults."""
    draw, named = random.Random(0), 0
    dialogues = [fault for fault in samples.FAULTS if b"Human" in samples.line(fault[1])]
    plain = [fault for fault in samples.FAULTS if fault not in dialogues]
    groups = [(kind, samples.GOOD[kind], [f for f in plain if f[0] == kind]) for kind in samples.GOOD]
    groups.append(("preferences", {"chosen": samples.HH.format("2"), "rejected": samples.HH.format("3")}, dialogues))
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, good, faults) in enumerate(groups):
            share = count // len(groups) + (number < count % len(groups))
            lines, wanted = [samples.line(good)], {}
            for fault in draw.choices(faults, k=share):
                if draw.random() < 0.3:
                    lines.append(b"")
                lines.append(samples.line(fault[1]))
                wanted[len(lines)] = fault
            place = Path(folder) / str(number)
            place.mkdir()
            file = place / "rows.jsonl"
            file.write_bytes(b"\n".join(lines) + b"\n")
            artifact = samples.made(place, kind, file)
            found = {named: (where, field, said, row["rule"]) for row in artifact.read("dropped").to_pylist()
                     for where, named, field, said in [samples.named_fault(row["detail"])]}  # fmt: skip
            for at, (_, _, rule, field, reason) in wanted.items():
                where, said_field, said, said_rule = found.get(at, ("", "", "", ""))
                named += where == f"file://{file}" and (said_rule, said_field) == (rule, field) and reason in said
    return named / count


def pages(folder: Path, count: int = 2000) -> list[str]:
    """Write two inputs of `count` pages each, about two topics, as in WARC files, as the demo's recipe needs; return their paths."""
    from puna.stages.curate.domains import SEEDS

    draw = random.Random(0)
    lines = [line.partition(" en:")[2].split() for line in SEEDS.read_text(encoding="utf-8").splitlines() if " en:" in line]
    found = []
    for name in ("wikipedia", "web"):
        file = folder / f"{name}.warc.gz"
        with file.open("wb") as out:
            for number in range(count):
                words = lines[number % 2]
                text = " ".join(draw.choice(words) if draw.random() < 0.1 else "the llamas of the high plain" for _ in range(200))
                body = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><body><nav>Home</nav><main><p>{text}</p></main></body>".encode()
                head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: https://{name}.example/{number}\r\n"
                more = f"WARC-Date: 2024-05-01T00:00:00Z\r\nContent-Type: application/http\r\nContent-Length: {len(body)}\r\n\r\n"
                out.write(gzip.compress(f"{head}{more}".encode() + body + b"\r\n\r\n"))
        found.append(f"{name}={file}")
    return found


def preflight_seconds() -> dict[str, dict[str, float]]:
    """Return wall and CPU seconds from a process's start until all needs of a recipe's steps are checked, on pages that meet these
    needs."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        inputs = pages(Path(folder))
        for recipe, flow in RECIPES.items():
            command = [sys.executable, "-c", CHECK, flow, recipe, str(Path(folder) / "store"), *inputs]
            started, spent = time.monotonic(), cpu_of_children()
            subprocess.run(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / ".pkg")}, check=True)
            seconds[recipe] = {"clock": time.monotonic() - started, "cpu": cpu_of_children() - spent}
    return seconds


def cpu_of_children() -> float:
    """Return the CPU seconds of the processes started here."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the figures, as lines or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    found = template_mismatches()
    right, tried = formats_read()
    checks = preflight_seconds()
    figures = {
        "template_mismatches": sum(found.values()), "templates": len(found), "conversations": CONVERSATIONS * len(found),
        "formats_read": len(right), "formats_tried": tried, "bad_rows_named": bad_rows_named(), "bad_rows": PLANTED,
        "preflight_seconds": max(taken["clock"] for taken in checks.values()), "load_average": os.getloadavg()[0],
    }  # fmt: skip
    if arguments.json:
        print(json.dumps({**figures, "formats_read": right, "preflight": checks}))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")
    for name, taken in checks.items():
        print(f"  preflight of {name:9} {taken['clock']:.1f} s, {taken['cpu']:.1f} s of CPU")
    for name, wrong in found.items():
        print(f"  {name:22} {wrong} of {CONVERSATIONS}")


if __name__ == "__main__":
    main()
