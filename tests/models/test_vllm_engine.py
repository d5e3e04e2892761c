"""vLLM as an engine: the calls that it gets, checked with a stub with the signatures of vLLM 0.11 that answers with Puna's own engine; and
vLLM itself if it is installed."""

import dataclasses
import importlib.util
import math
import sys
import types
from dataclasses import dataclass

import pytest
import torch

from puna.models.config import ModelConfig
from puna.models.formats.checkpoint import load, save
from puna.models.generation import Engine, SamplingParams
from puna.models.serving import ServingSettings, vllm_engine
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer

TOKENIZER = Tokenizer.train(["to be or not to be, that is the question"], 280)
SHAPE = ModelConfig(vocab_size=TOKENIZER.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save(Transformer(SHAPE, seed=0), path, TOKENIZER)
    return path


@dataclass
class Asked:
    """A stub of vllm.SamplingParams: the fields that it is given, and its defaults."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None


class Model:
    """A stub of vllm.LLM over Puna's engine: outputs come with their index, in any order, and log-probs by token. Its weights differ from
    the folder's by noise of deviation `noise`, as other kernels and fewer bits would cause."""

    made = []
    noise = 0.0

    def __init__(self, model, *, tokenizer=None, quantization=None, seed=None, gpu_memory_utilization=0.9, logprobs_mode="raw_logprobs"):
        self.folder, self.tokenizer, self.mode = model, Tokenizer.load(tokenizer), logprobs_mode
        self.collective_rpc("reload_weights")
        self.reset_prefix_cache()
        self.asked, self.quantization, self.share = [], quantization, gpu_memory_utilization
        Model.made.append(self)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert method == "reload_weights" and not args
        self.weights, self.engine = load(self.folder), None  # the previous weights' pages must be dropped first
        generator = torch.Generator().manual_seed(0)
        for parameter in self.weights.parameters():
            parameter.data += self.noise * torch.randn(parameter.shape, generator=generator)

    def reset_prefix_cache(self):
        self.engine = Engine(self.weights, self.tokenizer, exact=True)

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        assert not use_tqdm and len(prompts) == len(sampling_params)
        return [self._answers(prompt["prompt_token_ids"], params) for prompt, params in zip(prompts, sampling_params, strict=True)]

    def _answers(self, ids, params):
        self.asked.append(params)
        assert params.ignore_eos and params.logprobs == 0 and params.detokenize == bool(params.stop)
        stop = (*params.stop_token_ids, *(params.stop or ()))
        names = ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty")
        how = SamplingParams(**{name: getattr(params, name) for name in names}, stop=stop, logit_bias=params.logit_bias or {})
        (row,) = self.engine.generate([ids], how)
        outputs = [
            types.SimpleNamespace(
                index=index, token_ids=tuple(one.tokens), finish_reason="stop" if one.finished else "length",
                logprobs=[{token: types.SimpleNamespace(logprob=p)} for token, p in zip(one.tokens, one.logprobs, strict=True)],
            )
            for index, one in enumerate(row)
        ]
        return types.SimpleNamespace(outputs=outputs[::-1])


@pytest.fixture
def stand_in(monkeypatch):
    Model.made.clear()
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=Model, SamplingParams=Asked))


def test_answers_come_back_as_the_engines(folder, stand_in):
    engine = vllm_engine(folder, TOKENIZER, ServingSettings(engine="vllm", weights="fp8", gpu_memory=0.5))
    params = SamplingParams(n=3, max_tokens=12, top_p=0.9, stop=(*TOKENIZER.stop_ids, "e"), logit_bias={5: 1.0}, presence_penalty=0.5, seed=3)
    told = []
    rows = engine.generate(["to be", [7, 8, 9], "to be"], params, lambda *now: told.append(now))
    (model,) = Model.made
    assert (model.quantization, model.share, model.mode) == ("fp8", 0.5, "raw_logprobs") and told == [(9, 9)]
    assert len({asked.seed for asked in model.asked}) == 3  # also for equal prompts
    for row, asked, prompt in zip(rows, model.asked, ([*TOKENIZER.lead, *TOKENIZER.encode("to be")], [7, 8, 9], "to be"), strict=True):
        assert (asked.top_p, asked.logit_bias, asked.stop, asked.stop_token_ids) == (0.9, {5: 1.0}, ["e"], sorted(TOKENIZER.stop_ids))
        assert row == model.engine.generate([prompt], dataclasses.replace(params, seed=asked.seed))[0]
    assert engine.generate(["to be", [7, 8, 9], "to be"], params) == rows and len(Model.made) == 1
    assert engine.generate([[7, 8, 9]], params) == [rows[1]]  # for any other prompts in the call


def test_logprobs_are_at_the_temperature_or_refused(folder, stand_in):
    warm = SamplingParams(temperature=0.7, max_tokens=4, stop=())
    engine = vllm_engine(folder, TOKENIZER, ServingSettings(engine="vllm"))
    engine.generate([[1, 2]], warm)
    assert Model.made[0].mode == "processed_logprobs" and Model.made[0].quantization is None
    with pytest.raises(ValueError, match=r"at temperature 0.7 with penalties, top_k, top_p or min_p: set the temperature to 1"):
        engine.generate([[1, 2]], dataclasses.replace(warm, top_k=3))
    with pytest.raises(ValueError, match="loaded for other parameters"):
        engine.generate([[1, 2]], dataclasses.replace(warm, temperature=0.0))
    with pytest.raises(ValueError, match="neither masks nor speculation"):
        engine.generate([[1, 2]], dataclasses.replace(warm, speculate=3))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate([[1, 2], []], warm)
    assert engine.generate([], warm) == []


def test_what_cannot_be_is_told_before(monkeypatch):
    with pytest.raises(ValueError, match="speculate must be 0, weights same or fp8"):
        ServingSettings(engine="vllm", weights="int8")
    with pytest.raises(ValueError, match="memory 4: vLLM takes the share gpu_memory of the GPU's memory; leave memory out"):
        ServingSettings(engine="vllm", memory=4)
    monkeypatch.setattr("puna.models.serving.find_spec", lambda name: None)
    assert ServingSettings(engine="vllm").unmet("serving") == ["serving.engine: vLLM is not installed; pip install 'puna[vllm]', or set engine to puna"]
    assert ServingSettings().unmet("serving") == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: it needs a GPU")
def test_vllm_itself_draws_what_the_engine_does(folder):
    params = SamplingParams(temperature=0, max_tokens=8, stop=())
    (found,), (own,) = (one.generate([[7, 8, 9]], params)[0] for one in (vllm_engine(folder, TOKENIZER, ServingSettings(engine="vllm", gpu_memory=0.3)), Engine(load(folder), TOKENIZER)))
    assert found.tokens == own.tokens and all(math.isclose(a, b, abs_tol=0.05) for a, b in zip(found.logprobs, own.logprobs, strict=True))
