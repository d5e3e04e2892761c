"""Prompts computed by a process of their own: the same answers, and nothing lost or leaked when it dies."""

import os
import signal
import time

import numpy as np
import pytest
import torch

from puna.models.config import ModelConfig, Moe
from puna.models.formats.checkpoint import save
from puna.models.generation import Engine, SamplingParams, prefill
from puna.models.generation.prefill import SplitEngine
from puna.models.memory.offload import Source, offloaded
from puna.models.serving import engine_of
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer

CONFIG = ModelConfig(vocab_size=83, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
PARAMS = SamplingParams(n=2, temperature=0.8, max_tokens=12, stop=())
LIMITS = {"sequences": 4, "step_tokens": 64, "memory": 6 << 20}


def fresh():
    return Transformer(CONFIG, generator=torch.Generator().manual_seed(0))


def prompts(lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, CONFIG.vocab_size, length).tolist() for length in lengths]


def run(engine, requests, until=300.0):
    """Step until all have ended; their answers, or why there are none."""
    found, told, end = {id(request): {} for request in requests}, {}, time.monotonic() + until
    while any(id(request) not in told and len(found[id(request)]) < request.params.n for request in requests):
        assert time.monotonic() < end
        for event in engine.step():
            if event.completion is not None and id(event.request) in found:
                found[id(event.request)][event.number] = event.completion
        for request, why in engine.failed():
            told[id(request)] = why
    return [told.get(id(request)) or [found[id(request)][number] for number in range(request.params.n)] for request in requests]


def nothing_is_left(engine):
    pool = engine.scheduler.pool
    return engine.scheduler.idle and not engine.busy and pool.available == len(pool.references)


@pytest.fixture(scope="module")
def shared():
    made = SplitEngine(fresh(), **LIMITS)
    yield made
    made.close()


@pytest.fixture
def engine(shared):
    assert nothing_is_left(shared)
    shared.scheduler.pool.forget()
    return shared


def test_answers_have_the_bits_of_one_process(engine):
    """Short and long prompts, one asked twice, one that goes on from another; and generate, which computes them itself."""
    asked = prompts([20, 700, 300, 5, 512])
    asked += [asked[1], asked[2] + asked[4]]
    wanted = [Engine(fresh(), **LIMITS).generate([prompt], PARAMS)[0] for prompt in asked]
    assert run(engine, [engine.submit(prompt, PARAMS) for prompt in asked]) == wanted
    assert nothing_is_left(engine)
    assert [engine.generate([prompt], PARAMS)[0] for prompt in asked] == wanted


def test_the_other_process_computes_long_prompts(engine, monkeypatch):
    """Of 700 tokens this process computes the last ones: pages are handed over whole."""
    computed = []
    own = prefill.Engine._compute
    monkeypatch.setattr(prefill.Engine, "_compute", lambda self, work: computed.append(sum(answer.count for answer in work)) or own(self, work))
    run(engine, [engine.submit(prompts([700])[0], SamplingParams(max_tokens=1, stop=()))])
    assert sum(computed) == 700 - 699 // prefill.PAGE * prefill.PAGE


def test_answers_go_on_while_a_prompt_is_computed(engine):
    """The process is stopped: the other answer ends meanwhile."""
    os.kill(engine._process.pid, signal.SIGSTOP)
    long, short = (engine.submit(prompt, PARAMS) for prompt in prompts([700, 20]))
    assert len(run(engine, [short])[0]) == 2 and engine.busy
    os.kill(engine._process.pid, signal.SIGCONT)
    assert run(engine, [long]) == Engine(fresh(), **LIMITS).generate(prompts([700, 20])[:1], PARAMS) and nothing_is_left(engine)


def test_a_process_that_dies_costs_its_prompt_alone(engine, caplog):
    asked = prompts([700, 600, 20])
    for _ in range(2):
        os.kill(engine._process.pid, signal.SIGSTOP)
        requests = [engine.submit(prompt, PARAMS) for prompt in asked]
        while engine._job is None:
            engine.step()
        old = engine._process
        os.kill(old.pid, signal.SIGKILL)
        lost, *others = run(engine, requests)
        assert str(lost) == "the process that computed its prompt ended with status -9; ask again"
        assert others == [Engine(fresh(), **LIMITS).generate([prompt], PARAMS)[0] for prompt in asked[1:]]
        assert nothing_is_left(engine) and engine._process.pid != old.pid
        engine.scheduler.pool.forget()
    assert "a prompt was lost" in caplog.text


def test_a_cancelled_prompt_gives_its_pages_back(engine):
    """At work and waiting; the next one is computed as ever."""
    first, second = (engine.submit(prompt, PARAMS) for prompt in prompts([2000, 700]))
    while engine._job is None:
        engine.step()
    engine.cancel(second)
    engine.cancel(first)
    engine.cancel(first)
    third = engine.submit(prompts([600], seed=1)[0], PARAMS)
    assert run(engine, [third]) == Engine(fresh(), **LIMITS).generate(prompts([600], seed=1), PARAMS) and nothing_is_left(engine)


def test_answers_that_need_the_pages_have_them(engine, monkeypatch):
    """A prompt at work is given up where a step could run out of pages, and computed again."""
    reserve = [0]
    monkeypatch.setattr(SplitEngine, "_reserve", property(lambda self: reserve[0]))
    os.kill(engine._process.pid, signal.SIGSTOP)
    request = engine.submit(prompts([700])[0], PARAMS)
    while engine._job is None:
        engine.step()
    reserve[0] = len(engine.scheduler.pool.references)
    os.kill(engine._process.pid, signal.SIGCONT)
    engine.step()
    reserve[0] = 0
    assert run(engine, [request]) == Engine(fresh(), **LIMITS).generate(prompts([700]), PARAMS) and nothing_is_left(engine)


def test_a_small_cache_computes_prompts_here():
    small = {"sequences": 4, "step_tokens": 64, "memory": 320 << 10}
    engine = SplitEngine(fresh(), **small)
    os.kill(engine._process.pid, signal.SIGSTOP)  # it is not needed
    asked = prompts([600, 20])
    assert run(engine, [engine.submit(prompt, PARAMS) for prompt in asked]) == Engine(fresh(), **small).generate(asked, PARAMS)
    with pytest.raises(ValueError, match="give the engine more memory"):
        engine.submit(prompts([5000])[0], PARAMS)
    assert nothing_is_left(engine)
    engine.close()


def test_clearing_begins_anew_and_closing_ends_the_process(engine):
    engine.submit(prompts([2000])[0], PARAMS)
    engine.step()
    old = engine._process
    engine.clear()
    assert not old.is_alive() and nothing_is_left(engine)
    assert run(engine, [engine.submit(prompt, PARAMS) for prompt in prompts([700])]) == Engine(fresh(), **LIMITS).generate(prompts([700]), PARAMS)
    last = engine._process
    engine.close()
    assert not last.is_alive()


def test_int8_weights_and_exact_log_probs():
    asked = prompts([500])
    for make in (lambda kind: engine_of(fresh(), None, "int8", **LIMITS, **kind), lambda kind: engine_of(fresh(), None, exact=True, **LIMITS, **kind)):
        engine = make({"prefill_threads": 1})
        assert run(engine, [engine.submit(prompt, PARAMS) for prompt in asked]) == make({}).generate(asked, PARAMS)
        engine.close()


def test_what_cannot_be_shared_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a draft reads the prompts, too"):
        engine_of(fresh(), Tokenizer.train(["to be"], 280), draft=(fresh(), Tokenizer.train(["to be"], 280)), prefill_threads=1)
    save(fresh(), tmp_path)
    model, _ = offloaded(Source(tmp_path, torch.float32), "disk", 1, torch.device("cpu"))
    mixture = CONFIG.replace(model_type="mixtral", moe=Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48))
    save(Transformer(mixture), tmp_path / "mixture")
    streaming, _ = offloaded(Source(tmp_path / "mixture", torch.float32), "disk", 0, torch.device("cpu"), keys=True)
    for network in (model, streaming):
        with pytest.raises(ValueError, match="leave offload or this out"):
            SplitEngine(network)


def test_shared_tensors_stay_the_same_objects_and_pages_begin_as_zeros():
    given = [torch.arange(6.0).view(2, 3).T, torch.tensor([7], dtype=torch.int8)]
    before, kept = [one.clone() for one in given], list(given)
    prefill.share(given)
    assert all(one.is_shared() and torch.equal(one, other) for one, other in zip(given, before, strict=True)) and given[0].stride() == (1, 3)
    torch.full((1 << 20,), float("nan"))  # what is free holds garbage
    pages = torch.full((1 << 10, 4), 3.0)
    prefill.share([pages], empty=True)
    assert pages.is_shared() and not pages.any() and kept == given
