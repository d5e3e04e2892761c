"""A training state on disk is read back as it was written, or not at all."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from puna.models.training import state
from puna.models.training.state import load_arrays, load_state, save_state


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
        with pytest.warns(UserWarning, match="the saved training state was damaged"):
            assert load_state(folder) is None
        assert list(folder.iterdir()) == []


def killed(folder: Path, step: int, renames: int, number: int) -> bool:
    """Save in a process that is killed after `renames` renames, if it gets that far; the record holds `number`. Return True if it was
    killed."""
    child = os.fork()
    if child == 0:
        calls = iter(range(1000))
        replace = os.replace
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == renames else replace(*paths)
        save_state(folder, step, arrays(number), {"number": number})
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def arrays(number: int) -> dict[str, np.ndarray]:
    return {"weights": np.full(4, number, np.float32)}


def test_a_step_that_is_saved_again_is_found_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    """The old state is moved aside, then the new one gets its name: the writer is killed before either rename, and a second writer after
    it."""
    for renames in itertools.product(range(2), repeat=2):
        folder = tmp_path / "".join(map(str, renames))
        save_state(folder, 5, arrays(0), {"number": 0})
        for number, before in enumerate(renames, 1):
            free = number == 2 and renames[0] == 1  # the name is free: one rename is enough
            assert killed(folder, 5, before, number) == (not free or before == 0)
            found = load_arrays(folder)
            assert found is not None and found[1]["step"] == 5
            assert (found[0]["weights"] == found[1]["number"]).all()
        save_state(folder, 5, arrays(7), {"number": 7})
        found = load_arrays(folder)
        assert found is not None and found[1]["number"] == 7
        assert [path.name for path in folder.iterdir()] == ["step-000000005"]


def test_a_disk_that_does_not_answer_costs_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, 5, arrays(1), {})
    with monkeypatch.context() as patch:
        for read in ("read_bytes", "read_text"):
            patch.setattr(Path, read, Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        for load in (load_arrays, state.load_record):
            with pytest.raises(OSError, match="Stale file handle"):
                load(tmp_path)
    found = load_arrays(tmp_path)
    assert found is not None and found[1] == {"step": 5}
    (tmp_path / "step-000000005" / "state.safetensors").unlink()
    with pytest.warns(UserWarning, match="the saved training state was damaged"):
        assert load_arrays(tmp_path) is None


def test_remains_of_writers_that_were_killed_go_with_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, 1, arrays(1), {})
    for number in (2, 3):
        assert killed(tmp_path, number, 0, number)
    assert len(list(tmp_path.glob(".step-*"))) == 1  # the second writer removed the temporary folder of the first
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(state, "_write", lambda *given: (_ for _ in ()).throw(full))
        with pytest.raises(OSError, match="No space left"):
            save_state(tmp_path, 4, arrays(4), {})
    found = load_arrays(tmp_path)
    assert found is not None and found[1]["step"] == 1
    save_state(tmp_path, 5, arrays(5), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000005"]


def test_of_two_states_of_a_step_the_later_one_is_read(tmp_path: Path) -> None:
    """A writer that is killed after both renames leaves the older state next to the newer one."""
    before = save_state(tmp_path, 5, arrays(0), {"number": 0}).rename(tmp_path / "kept")
    save_state(tmp_path, 5, arrays(1), {"number": 1})
    before.rename(tmp_path / "step-000000005.before")
    found, record = load_arrays(tmp_path), state.load_record(tmp_path)
    assert found is not None and record is not None and found[1]["number"] == record["number"] == 1


def test_two_processes_with_one_pid_write_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ranks of two pods: the second process writes while the first is about to rename its file."""
    file, rename = tmp_path / "value.json", os.replace

    def late(*paths: Path) -> None:
        monkeypatch.setattr(os, "replace", rename)
        assert state.cached_json(file, lambda: 1) == 1
        rename(*paths)

    monkeypatch.setattr(os, "replace", late)
    assert state.cached_json(file, lambda: 1) == 1 and [*tmp_path.iterdir()] == [file]


def test_writers_of_several_machines_that_have_one_pid_write_to_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = list[str]()
    monkeypatch.setattr(state, "publish", lambda temporary, final: names.append(temporary.name))
    for _ in range(2):
        state.write_state(tmp_path, 3, {}, '{"step": 3}')
    assert len(set(names)) == 2 and all(name.startswith(".step-000000003.") for name in names)
