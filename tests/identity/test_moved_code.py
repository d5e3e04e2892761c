"""Keys depend on the meaning of code: files may move and be renamed, and an edit counts wherever the file is."""

from __future__ import annotations

from pathlib import Path

from puna.flows.engine.trace import load_stages
from puna.stages.identity import code
from puna.storage.manifest import code_version
from tests.identity.moving import copied, move_rooms, versions


def test_of_moved_and_edited_code_only_the_edit_counts(tmp_path: Path) -> None:
    place = copied(tmp_path)
    reached = {name: code.symbols(stage) for name, stage in load_stages().items()}  # the copy has this process's source
    move_rooms(place)
    file = place / "kernels/moved_minhash.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("TOP32 = np.uint32(", "TOP32 = np.uint32(0 + ", 1), encoding="utf-8")
    for name, old, new in (("rms_norm", "PROGRAMS = 264", "PROGRAMS = 132"), ("swiglu", "BLOCK = 2048", "BLOCK = 1024")):
        file = place / f"kernels/moved_{name}.py"
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")  # launch constants: they are in no key
    after = versions(place)
    before = {name: (code_version(reached[name]), reached[name]) for name in after}
    changed = {name for name, (version, _) in after.items() if version != before[name][0]}
    assert changed == {name for name, (_, symbols) in before.items() if "puna.kernels.minhash.TOP32" in symbols}
    assert "minhash_dedup" in changed and len(before) - len(changed) > 50
