"""The state of a training on disk: what is read back is what was written, or nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from puna.models.training.state import load_state, save_state


def tensors() -> dict[str, torch.Tensor]:
    return {"weights": torch.arange(60, dtype=torch.float32).reshape(6, 10), "step": torch.tensor(3)}


def test_a_state_is_read_back_and_older_ones_go(tmp_path: Path) -> None:
    save_state(tmp_path, 1, tensors(), {"log": []})
    save_state(tmp_path, 2, tensors(), {"log": [{"loss": 0.5}], "text": "ü"})
    found = load_state(tmp_path)
    assert found is not None and len(list(tmp_path.iterdir())) == 1
    assert found[1] == {"step": 2, "log": [{"loss": 0.5}], "text": "ü"}
    assert found[0].keys() == tensors().keys() and all(torch.equal(found[0][n], t) for n, t in tensors().items())
    assert load_state(tmp_path / "none") is None


@pytest.mark.parametrize("seed", range(2))
def test_no_state_with_a_flipped_bit_or_cut_short_is_loaded(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for trial in range(60):
        folder = tmp_path / str(trial)
        file = sorted(save_state(folder, 5, tensors(), {"log": []}).iterdir())[trial % 2]
        data = bytearray(file.read_bytes())
        if trial % 3:
            data[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
        else:
            del data[int(generator.integers(len(data))) :]
        file.write_bytes(bytes(data))
        with pytest.warns(UserWarning, match="the state of the training is damaged"):
            assert load_state(folder) is None
        assert list(folder.iterdir()) == []
