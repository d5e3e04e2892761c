"""The whole curation flow on the demo's sample, with the demo's recipe, in one process on one thread.

`curate_mb_s`: MB of HTML per CPU second of the process, including training, imports and the report; `curate_stages_mb_s`: only the stages,
without training. `curate_STAGE_s_mb`: CPU seconds of a stage per MB of HTML.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

TRAINED = ("train_classifier", "train_code_reasoning", "train_domains")


def figures() -> dict[str, float]:
    """Return the figures of one run in a new store."""
    import corpus

    size, every, seconds = costs(corpus.sample())
    work = sum(spent for name, spent in seconds.items() if name not in TRAINED)
    found = {"curate_mb": size, "curate_mb_s": size / every, "curate_stages_mb_s": size / work}
    return found | {f"curate_{name}_s_mb": spent / size for name, spent in sorted(seconds.items())}


def costs(files: list[Path]) -> tuple[float, float, dict[str, float]]:
    """Return the MB of HTML in these archives, and the CPU seconds of their curation as a whole and of each stage."""
    import store as stores

    from puna.storage import Store

    given = [word for file in files for word in ("--input", str(file.absolute()))]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        made, cost = stores.puna(root, "curate", "--recipe", "demo", *given, "--workers", "1", **stores.ONE_THREAD)
        size = next(one for one in made if one["kind"] == "pages")["metrics"]["body_bytes"] / 1e6
        seconds: dict[str, float] = {}
        for artifact in Store.open(root).artifacts():
            name = artifact.manifest.stage
            seconds[name] = seconds.get(name, 0.0) + artifact.manifest.timings["cpu_seconds"]
    return size, stores.cpu(cost), seconds
