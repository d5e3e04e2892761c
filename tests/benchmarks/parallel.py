"""Training in several processes compared with one: equality, speed, and the cost of a killed rank.

    python tests/benchmarks/parallel.py --json [--kills 20] [--part equality …]

Ranks are gloo processes of this machine. `combinations_proved` of `combinations_tried` counts layouts x objectives, layouts x models, and
rows of tests/parallel (`rows_proved` of `rows_tried`), bf16 among them, that equal one process as those tests ask;
`worst_relative_difference` is of gradients and log in fp32. `cp_imbalance` is the largest load over the mean of 32,768 rows in documents of
about 1,024 tokens over 16 ranks; `load_state_peak_ratio` is the bytes that a rank reads from disk to resume in the same layout over the
bytes that it keeps; `load_weights_ratio` is the same for a model's weights, and `load_weights_memory_ratio` the memory that a rank takes
for them over the bytes that it keeps; `two_process_speedup` compares tokens per second of a model of 3.2 million parameters on two cores,
which should be idle. `plan_error_published` is the median error of `puna plan` over published runs, see published_plans.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg")]

from puna.models.forest import Forest  # noqa: E402
from puna.models.training.parallel.context import deal  # noqa: E402
from puna.models.training.parallel.layout import AXES, PROVED, Layout  # noqa: E402
from puna.stages.executors import ranks as processes  # noqa: E402
from tests.benchmarks import published_plans  # noqa: E402
from tests.parallel.cases import MODELS, OBJECTIVES  # noqa: E402
from tests.parallel.pool import Pool  # noqa: E402
from tests.parallel.rows import ROWS, Row  # noqa: E402

VARIANTS = {
    "shard": ("tied", "biases", "window", "parallel_block", "moe", "mla"), "tensor": ("tied", "biases", "window", "parallel_block"),
    "pipeline": ("tied", "biases", "window", "parallel_block", "mla"), "context": ("tied", "biases", "window", "parallel_block", "mla"),
    "data": tuple(name for name in MODELS if name not in ("plain", "deep", "dropout")),
}  # fmt: skip
INTERLEAVED = {"pipeline": 2, "virtual_stages": 2}
INTERLEAVED_WITH = ((), ("data",), ("shard",), ("tensor",), ("context",), ("shard", "tensor"))
STATES: tuple[dict[str, int], ...] = (
    {}, {"data": 2}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}, INTERLEAVED, {"context": 2}, {"shard": 2, "tensor": 2},
    {"shard": 2, "tensor": 2, **INTERLEAVED},
)  # fmt: skip


def size(layout: dict[str, int]) -> int:
    return Layout(**layout).processes


def combinations() -> list[Row]:
    """Return each layout with each objective, and the models of one axis."""
    layouts = [*(dict.fromkeys(sorted(axes), 2) for axes in PROVED), *(dict.fromkeys(some, 2) | INTERLEAVED for some in INTERLEAVED_WITH)]
    plain = [Row(layout, objective, "moe" if "expert" in layout else "plain") for layout in layouts for objective in OBJECTIVES]
    return [*plain, *(Row({axis: 2}, "sft", variant) for axis, variants in VARIANTS.items() for variant in variants)]


def table() -> str:
    """Return a digest of all that `equality` compares."""
    return hashlib.sha256("\n".join(sorted(map(str, [*combinations(), *ROWS]))).encode()).hexdigest()[:16]


def equality(pool: Pool) -> dict[str, Any]:
    """Compare all combinations, and the rows of the tests, with one process; the differences are those in fp32."""
    differences, proved = list[float](), dict[str, list[bool]](combinations=[], rows=[])
    for kind, rows in (("combinations", combinations()), ("rows", ROWS)):
        for row in rows:
            result = pool.run("compare", size(row.layout), **row.arguments)[0]
            proved[kind].append(row.is_equal(result))
            if row.more.get("precision") != "bf16":
                differences.append(max(result["gradients"], result["rows"]))
            if not proved[kind][-1]:
                print(f"differs: {row}: {result}", file=sys.stderr, flush=True)
    counts = {"rows_proved": sum(proved["rows"]), "rows_tried": len(ROWS), "table": table()}
    every = proved["rows"] + proved["combinations"]
    return {**counts, "combinations_proved": sum(every), "combinations_tried": len(every), "worst_relative_difference": max(differences)}


def reshard(pool: Pool) -> float:
    """Return the share of pairs of layouts in which the second layout reads the first one's state bit for bit."""
    same = []
    with tempfile.TemporaryDirectory() as root:
        for number, writer in enumerate(STATES):
            folder = str(Path(root, str(number)))
            pool.run("trained", size(writer), layout=writer, folder=folder, steps=3)
            one = pool.run("restored", 1, layout={}, folder=folder)[0]
            same += [all(a == one for a in pool.run("restored", size(reader), layout=reader, folder=folder)) for reader in STATES]
    return sum(same) / len(same)


def read_ratio(pool: Pool) -> float:
    """Return the bytes that a rank reads from disk for its state, over the bytes of its pieces, for the worst layout that splits
    weights."""
    ratios = []
    with tempfile.TemporaryDirectory() as root:
        for number, layout in enumerate(STATES[1:5] + STATES[7:]):
            ratios += pool.run("read_ratio", size(layout), layout=layout, folder=str(Path(root, str(number))))
    return max(ratios)


LARGE = {
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
"""A model of 670 MB, large enough that the disk's read-ahead hardly counts."""


def weights_ratios() -> dict[str, float]:
    """Return the bytes that a rank reads from disk for its pieces of a model's weights, and the memory that it takes, over the bytes of
    these pieces, for the worst rank of the layouts that split weights. Each layout has a new pool, so that no earlier memory is reused."""
    worst = {"read": 0.0, "taken": 0.0}
    for layout in ({"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"shard": 2, "tensor": 2}, {"shard": 2, "pipeline": 2}):
        pool = Pool(4)
        try:
            with tempfile.TemporaryDirectory() as folder:
                for one in pool.run("weights_read", size(layout), layout=layout, folder=folder, **LARGE):
                    worst = {name: max(worst[name], one[name]) for name in worst}
        finally:
            pool.close()
    return {"load_weights_ratio": worst["read"], "load_weights_memory_ratio": worst["taken"]}


def kills(pool: Pool, count: int) -> float:
    """Return the share of killed trainings that end with the weights of an undisturbed one. The axes take turns, and either rank is killed,
    after each step."""
    same, wholes = list[bool](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as root:
        for number in range(count):
            axis = AXES[number % len(AXES)]
            given = {"layout": {axis: 2}, "variant": "moe" if axis == "expert" else "deep"}
            wholes[axis] = wholes.get(axis) or pool.run("trained", 2, folder=f"{root}/{axis}", steps=4, **given)[0]
            folder = Path(root, str(number))
            folder.mkdir()
            death = [number // len(AXES) % 2, "step", 1 + number % 4]
            command = [sys.executable, "-m", "tests.parallel.killed", str(folder), json.dumps(given), json.dumps([death])]
            status = processes.start(command, 2)
            same.append(status == 0 and json.loads((folder / "result.json").read_text()) == wholes[axis])
            print(f"killed: {axis} 2, rank {death[0]}, after step {death[2]}: {'recovered' if same[-1] else 'FAILED'}", file=sys.stderr, flush=True)
    return sum(same) / len(same)


def rollouts(pool: Pool) -> float:
    """Return the share of ranks and rollouts whose answers' log-probs equal those of one process and its trainer bit by bit, for layouts
    whose ranks share a rollout, and for ranks that train on other ranks' answers."""
    one = pool.run("sampled", 1, layout={})[0]
    same = [one["equal"] == 1.0]
    one.pop("reference")
    for layout in ({"data": 2}, {"data": 4}, {"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"data": 2, "shard": 2}, {"data": 2, "pipeline": 2}):
        same += [own | {"reference": 0} == one | {"reference": 0} for own in pool.run("sampled", size(layout), layout=layout)]
    alone = (({}, 1), ({}, 2), ({"data": 2}, 2), *(({axis: 2}, 1) for axis in ("data", "shard", "tensor", "pipeline", "context")))
    for layout, generate in (*alone, ({"pipeline": 2}, 0)):
        for own in pool.run("rolled", size(layout) + generate, layout=layout, generate=generate, epochs=2):
            same += [equal == 1.0 for equal in own["equal"]]
    return sum(same) / len(same)


GROUPS = {"tensor": ("plain", "tied", "biases", "window", "parallel_block"), "pipeline": ("plain", "tied", "biases", "window", "parallel_block", "mla")}


def same_answers(pool: Pool) -> dict[str, float]:
    """Return the number of layouts x models, with loops and with operators, whose groups generate the tokens of one process; the number
    tried; and the largest difference of a token's log-prob in nats."""
    same, differences = [], [0.0]
    for axis, variants in GROUPS.items():
        for variant, by_loops in ((variant, by_loops) for variant in variants for by_loops in (True, False)):
            if by_loops and variant in ("parallel_block", "mla"):
                continue
            one = pool.run("answered", 1, layout={}, variant=variant, by_loops=by_loops)[0]["answers"]
            for layout in ({axis: 2}, {"data": 2, axis: 2}):
                for own in pool.run("answered", size(layout), layout=layout, variant=variant, by_loops=by_loops):
                    pairs = [(a, b) for some, other in zip(own["answers"], one, strict=True) for a, b in zip(some, other, strict=True)]
                    same.append(all(a[0] == b[0] for a, b in pairs))
                    differences += [abs(p - q) for a, b in pairs if a[0] == b[0] for p, q in zip(a[1], b[1], strict=True)]
    return {"answering_ranks_same": sum(same), "answering_ranks": len(same), "worst_answer_difference": max(differences)}


def answering(pool: Pool) -> dict[str, float]:
    """Return tokens per second, milliseconds per token of one answer, and CPU milliseconds per token over all processes, for a model of 32
    million parameters on one and two processes: `answers_LAYOUT_ROWS`, `answer_ms_LAYOUT_ROWS` and `answer_cpu_ms_LAYOUT_ROWS`."""
    figures = {}
    for rows in (1, 8, 64):
        for name, layout in (("one", {}), ("data", {"data": 2}), ("tensor", {"tensor": 2}), ("pipeline", {"pipeline": 2})):
            walls, spent = zip(*pool.run("answer_seconds", size(layout), layout=layout, rows=rows), strict=True)
            figures |= {f"answers_{name}_{rows}": rows * 32 / max(walls), f"answer_ms_{name}_{rows}": 1000 * max(walls) / 32}
            figures[f"answer_cpu_ms_{name}_{rows}"] = 1000 * sum(spent) / (32 * rows)
    return figures


def imbalance(rows: int = 32_768, tokens: int = 1024, ranks: int = 16) -> float:
    """Return the largest load over the mean, for rows dealt by cost."""
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < rows:
        lengths.append(int(min(max(1, generator.normal(tokens, tokens / 3)), rows - sum(lengths))))
    depths = Forest.pack([[0] * n for n in lengths]).mask.depths
    loads = [float((depths[deal(depths, ranks).rows(rank)] + 1).sum()) for rank in range(ranks)]
    return max(loads) / (sum(loads) / ranks)


def speedup(pool: Pool) -> float:
    """Return the time of a step in one process over that in two which have half of its rows each."""
    one, two = (min(pool.run("seconds", n, layout={"data": n})) for n in (1, 2))
    return one / two


PARTS: dict[str, Callable[[Pool, int], dict[str, Any]]] = {
    "equality": lambda pool, count: equality(pool),
    "states": lambda pool, count: {"reshard_bitwise": reshard(pool), "load_state_peak_ratio": read_ratio(pool), **weights_ratios()},
    "kills": lambda pool, count: {"kills": count, "kills_recovered": kills(pool, count)},
    "answers": lambda pool, count: {"rollout_logprobs_bitwise": rollouts(pool), **same_answers(pool), **answering(pool)},
    "plans": lambda pool, count: {"cp_imbalance": imbalance(), **published_plans.compare()},
    "speed": lambda pool, count: {"two_process_speedup": speedup(pool)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--kills", type=int, default=20, help="trainings of which a rank is killed")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    given, figures, pool = parser.parse_args(), dict[str, Any](), Pool()
    try:
        for part in given.part:
            figures |= PARTS[part](pool, given.kills)
    finally:
        pool.close()
    print(json.dumps(figures) if given.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
