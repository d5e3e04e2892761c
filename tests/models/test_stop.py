"""Training runs of every objective that a signal stops: the step ends, the state is saved, and the resumed run ends with the same bits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puna.models.training import objectives as o
from puna.models.training import rollouts, state
from puna.models.training.loop import TrainConfig, train, weights_digest
from puna.models.training.ppo import train_grpo, train_ppo
from puna.models.training.rl_settings import GrpoSettings, PpoSettings
from puna.models.training.state import Stop
from puna.models.training.trainer import TIMED, Trainer, between_layers

from .test_objectives import CASES, examples, model, targets

STEPS = 5


def kto_batch(some: list, reference: Any) -> o.KtoBatch:
    own, others = targets(some), targets([(prompt, some[i - 1][1]) for i, (prompt, _) in enumerate(some)])
    good = torch.arange(own.answers) % 2 == 0
    return o.KtoBatch(own, good, o.reference_logprobs(reference, own), others, o.reference_logprobs(reference, others))


OBJECTIVES = CASES | {
    "kto": ("lm", 2, o.Kto(loss="kto"), kto_batch),
    "language_modeling": ("lm", 1, o.LanguageModeling(), lambda some, _: targets(some)),
}


def batches(name: str) -> Callable[[int], list]:
    _, answers, _, collate = OBJECTIVES[name]
    reference = model("lm", 1)
    return lambda step: [collate(examples(3, answers, step), reference)]


def stopping(number: int, sent: int) -> Callable[[dict], None]:
    """Send this process a signal in the middle of a step."""

    def on_step(row: dict) -> None:
        if row["step"] == number:
            os.kill(os.getpid(), sent)

    return on_step


def timeless(log: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name not in TIMED} for row in log]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_stopped_training_saves_its_step_and_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    head, _, objective, _ = OBJECTIVES[name]
    config = TrainConfig(steps=STEPS, schedule={"learning_rate": 1e-3, "ema": 0.5})
    stop = int(np.random.default_rng(sum(name.encode())).integers(1, STEPS))
    whole, resumed = model(head), model(head)
    expected = train(whole, objective, batches(name), config, 3)
    with pytest.raises(KeyboardInterrupt):
        train(model(head), objective, batches(name), config, 3, tmp_path, on_step=stopping(stop, signal.SIGINT))
    record = state.load_record(tmp_path)
    assert record is not None and record["step"] == record["done"] == stop and record["of"] == STEPS
    log = train(resumed, objective, batches(name), config, 3, tmp_path)
    assert weights_digest(resumed) == weights_digest(whole)
    assert timeless(log) == timeless(expected)


def test_a_signal_waits_for_the_step_and_a_second_one_acts_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_requested
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second Ctrl-C did not act")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_came_after_the_last_step_is_not_lost() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), Stop():
        os.kill(os.getpid(), signal.SIGINT)
        done = True
    assert done


def test_a_state_is_saved_by_time_and_seldom_where_writing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    now, writes = [100.0], []
    monkeypatch.setattr(state.time, "monotonic", lambda: now[0])

    def write() -> None:
        writes.append(round(now[0], 1))
        now[0] += 3.0

    with state.Saver(10.0, write) as saver:
        for seconds in (9.9, 0.2, 149.0, 2.0):
            now[0] += seconds
            saver.save_if_due()
    # First due after 10 s; once a write takes 3 s, after 150 s, so that writing takes 2 % of the time.
    assert writes == [110.1, 264.1]


def test_a_training_goes_on_while_its_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of step 2 reaches the disk after step 4; the write of step 4's state must wait for it."""
    going_on, flush, complete = threading.Event(), state.flush, dict[float, list[str]]()

    def slow(path: Path) -> None:
        assert going_on.wait(30)
        flush(path)

    def on_step(row: dict[str, float]) -> None:
        complete[row["step"]] = [path.name for path in tmp_path.glob("step-*")]
        if row["step"] == 4:
            going_on.set()

    monkeypatch.setattr(state, "flush", slow)
    log = train(model(), OBJECTIVES["language_modeling"][2], batches("language_modeling"), TrainConfig(steps=5), 3, tmp_path, 2, on_step)
    assert complete == {1: [], 2: [], 3: [], 4: [], 5: complete[5]} and len(log) == 5
    record = state.load_record(tmp_path)
    assert record is not None and record["step"] == 5 and len(list(tmp_path.iterdir())) == 1


def test_one_write_at_a_time_whose_error_the_next_save_or_the_end_raises() -> None:
    calls: list[str] = []

    def job(name: str, error: str) -> Callable[[], object]:
        def write() -> None:
            calls.append(f"{name} begins")
            time.sleep(0.05)
            calls.append(f"{name} ends")
            if error:
                raise OSError(error)

        return write

    jobs = iter([job("first", ""), job("second", "no space"), job("third", "no space")])
    with state.Saver(10.0, lambda: next(jobs)) as saver:
        saver.save_if_due(now=True)
        saver.save_if_due(now=True)
        with pytest.raises(OSError, match="no space"):
            saver.save_if_due(now=True)
    assert calls == ["first begins", "first ends", "second begins", "second ends"]
    with pytest.raises(OSError, match="no space"), state.Saver(10.0, lambda: next(jobs)) as saver:
        saver.save_if_due(now=True)


def test_a_signal_waits_for_the_write_and_a_second_one_does_not() -> None:
    """No thread is left that would free tensors while the interpreter exits, because C++ would then abort."""
    finish, ended, before = threading.Event(), [], set(threading.enumerate())

    def write() -> None:
        finish.wait(30)
        ended.append(True)

    for second in (False, True):
        finish.clear()
        ended.clear()
        act = (lambda: os.kill(os.getpid(), signal.SIGINT)) if second else finish.set
        with pytest.raises(KeyboardInterrupt), state.Saver(10.0, lambda: write) as saver:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Timer(0.05, act).start()
            saver.end_if_asked()
        assert ended == ([] if second else [True])
        assert second or not [one for one in threading.enumerate() if one not in before and not isinstance(one, threading.Timer)]
    finish.set()


def test_how_often_a_state_is_saved_is_in_no_key() -> None:
    often, seldom = (TrainConfig(steps=2, compute={"save_seconds": seconds}) for seconds in (1.0, 100.0))
    assert often != seldom and often.identity() == seldom.identity() == TrainConfig(steps=2).identity()


@pytest.mark.parametrize("critic", [True, False])
@pytest.mark.parametrize("stopped_in", ["a wave", "the first update", "the third update"])
def test_a_stopped_rollout_goes_on_and_ends_with_the_same_bits(
    critic: bool, stopped_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"rollouts": 2, "prompts": 4, "answers": 2, "max_tokens": 3, "kl_coefficient": 0.1, "compute": {"micro_batch_tokens": 64}}
    monkeypatch.setattr(rollouts, "WAVE_FLOPS", 0.0)  # one wave per prompt
    signals = {"a wave": 6, "the first update": 1, "the third update": 3}
    sent, scored = [], []

    def run(policy: Any, value: Any, folder: Path | None, stop: bool) -> list[dict[str, float]]:
        def score(prompts: Any, completions: Any) -> list[list[float]]:
            scored.append(len(prompts))
            if stop and stopped_in == "a wave" and len(scored) == signals[stopped_in]:
                os.kill(os.getpid(), signal.SIGINT)
            return [[sum(t == 9 for t in c.tokens) / len(c.tokens) for c in row] for row in completions]

        config = (PpoSettings if critic else GrpoSettings)(**settings, epochs=2, minibatches=2)
        asked = rollouts.Rollouts(policy, model(seed=1), score, [[1, 2], [3], [4, 5, 6], [7, 8]], [0], config, 0)
        return train_ppo(asked, value, folder) if critic else train_grpo(asked, folder)

    whole, whole_value = model(), model("scalar", 2)
    expected = run(whole, whole_value, None, stop=False)
    assert scored == [1] * 8
    scored.clear()
    step = Trainer.step

    def counted(self: Trainer, number: int, *more: Any, **named: Any) -> dict[str, float]:
        row = step(self, number, *more, **named)
        if not sent and stopped_in != "a wave" and number == signals[stopped_in]:
            sent.append(number)
            os.kill(os.getpid(), signal.SIGINT)
        return row

    monkeypatch.setattr(Trainer, "step", counted)
    with pytest.raises(KeyboardInterrupt):
        run(model(), model("scalar", 2), tmp_path, stop=True)
    stopped = len(scored)
    resumed, value = model(), model("scalar", 2)
    log = run(resumed, value, tmp_path, stop=False)
    assert stopped == (6 if stopped_in == "a wave" else 4) and len(scored) == 8  # no answer is sampled twice
    assert weights_digest(resumed) == weights_digest(whole) and weights_digest(value) == weights_digest(whole_value)
    assert timeless(log) == timeless(expected)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("rollout-")]


@pytest.mark.parametrize("critic", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward", "reference"])
def test_a_signal_leaves_an_update_in_the_middle_and_loses_none(critic: bool, where: str, tmp_path: Path) -> None:
    """A signal arrives in a layer of the second update's pass, or of the reference's pass in the second rollout: the next layer is not
    computed."""
    settings = {"rollouts": 2, "prompts": 4, "answers": 2, "max_tokens": 3, "kl_coefficient": 0.1, "compute": {"micro_batch_tokens": 64}}
    config = (PpoSettings if critic else GrpoSettings)(**settings, epochs=2, minibatches=2)
    scored: list[int] = []

    def score(prompts: Any, completions: Any) -> list[list[float]]:
        scored.append(len(prompts))
        return [[sum(t == 9 for t in c.tokens) / len(c.tokens) for c in row] for row in completions]

    def run(policy: Any, value: Any, reference: Any, folder: Path | None) -> list[dict[str, float]]:
        asked = rollouts.Rollouts(policy, reference, score, [[1, 2], [3], [4, 5, 6], [7, 8]], [0], config, 0)
        return train_ppo(asked, value, folder) if critic else train_grpo(asked, folder)

    whole, whole_value = model(), model("scalar", 2)
    expected = run(whole, whole_value, model(seed=1), None)
    scored.clear()
    policy, reference, passes, after = model(), model(seed=1), [0], list[str]()
    network = reference if where == "reference" else policy
    first, last = network.model.layers[0], network.model.layers[-1]

    def begin(*_: Any) -> None:
        passes[0] += torch.is_grad_enabled() or where == "reference"
        if passes[0] == 2 and where != "backward":
            os.kill(os.getpid(), signal.SIGINT)

    def end(_: Any, __: Any, output: Any) -> None:
        if passes[0] == 2:
            after.append("the last layer")
            if where == "backward":
                output[0].register_hook(lambda _: os.kill(os.getpid(), signal.SIGINT))

    first.register_forward_hook(begin)
    last.register_forward_hook(end)
    policy.model.embed_tokens.weight.register_hook(lambda _: after.append("the embeddings"))
    with pytest.raises(KeyboardInterrupt):
        run(policy, model("scalar", 2), reference, tmp_path)
    assert "the last layer" not in after or where == "backward"
    assert after.count("the embeddings") == (1 if where != "reference" else 4) and all(p.grad is None for p in policy.parameters())
    resumed, value = model(), model("scalar", 2)
    log = run(resumed, value, model(seed=1), tmp_path)
    assert len(scored) == 2  # no answer is sampled twice
    assert weights_digest(resumed) == weights_digest(whole) and weights_digest(value) == weights_digest(whole_value)
    assert timeless(log) == timeless(expected)


def test_a_pass_that_was_left_leaves_no_hook() -> None:
    made, calls = model(), []

    def act() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    forest = targets(examples(1, 2)).forest
    with pytest.raises(KeyboardInterrupt), between_layers([made], act):
        made.hidden(forest)
    made.hidden(forest)
    assert len(calls) == 2
