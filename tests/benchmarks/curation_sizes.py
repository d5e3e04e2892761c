"""Fixed and marginal cost of curation: the demo's sample once, and several times over.

For `curate_xN` (the sample N times, see `corpus.larger`): MB of HTML, and MB per CPU second of the whole process (`_mb_s`) and of the
stages without training (`_stages_mb_s`). A line through the smallest and the largest size gives `curate_fixed_s`, the CPU seconds at 0 MB,
and `curate_mb_s_more`, the MB per additional CPU second; `curate_STAGE_fixed_s`, `curate_STAGE_s_mb_more`: the same by stage.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

SIZES = (1, 2, 4)


def figures() -> dict[str, float]:
    """Return the figures of three runs, each in a new store."""
    import corpus
    from curation_flow import TRAINED, costs

    found, lines = {}, []
    for times in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            size, every, seconds = costs(corpus.larger(Path(folder), times))
        work = sum(spent for name, spent in seconds.items() if name not in TRAINED)
        name = f"curate_x{times}"
        found |= {f"{name}_mb": size, f"{name}_mb_s": size / every, f"{name}_stages_mb_s": size / work}
        lines.append((size, {"": every, "between_stages": every - sum(seconds.values()), "stages": work, **seconds}))
    (small, first), (large, last) = lines[0], lines[-1]
    for name in sorted(first):
        each = (last[name] - first[name]) / (large - small)
        prefix = f"curate_{name}_" if name else "curate_"
        found[f"{prefix}fixed_s"] = first[name] - each * small
        found |= {f"{prefix}s_mb_more": each} if name else {"curate_mb_s_more": 1 / each}
    return found
