"""What curation costs whatever the size of a crawl, and what a megabyte costs: the demo's sample once, and as many pages again and again.

Of `curate_xN` (the sample N times, see `corpus.larger`): MB of HTML, MB per CPU second of the whole process (`_mb_s`) and of the stages
without trainings (`_stages_mb_s`). `curate_fixed_s` and `curate_mb_s_more`: the CPU seconds that a line through the smallest and the
largest has at no page at all, and the MB per CPU second of each page more; `curate_STAGE_fixed_s`, `curate_STAGE_s_mb_more`: the same by stage.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

SIZES = (1, 2, 4)


def figures() -> dict[str, float]:
    """The figures of three runs, each in a store of its own."""
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
