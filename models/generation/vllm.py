"""vLLM as the second engine of generation: the same prompts, parameters and completions, computed by vLLM's `LLM`.

vLLM's tokens are another draw from the same distribution. `Completion` defines the log-probs: of the whole vocabulary, at the request's
temperature. vLLM returns log-probs raw (at temperature 1) or processed (at the temperature, after penalties, biases, top-k, top-p, min-p).
So a temperature other than 0 or 1 together with any of these settings raises ValueError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from puna.models.formats.checkpoint import save
from puna.models.generation.engine import Completion, Prompt, request_of
from puna.models.generation.sampling_params import SamplingParams
from puna.models.tokens.tokenizer import Tokenizer
from puna.models.transformer import Transformer


class VllmEngine:
    """A vLLM engine for the model in a folder of Hugging Face's layout.

    weights: `same`, or `fp8`: vLLM quantizes the weights while loading. memory: the share (0 to 1) of the GPU's memory that vLLM takes.
    The constructor raises ImportError if the package vllm is not installed, and ValueError for other `weights`."""

    def __init__(self, folder: Path | str, tokenizer: Tokenizer, weights: str = "same", memory: float = 0.9) -> None:
        import vllm

        if weights not in ("same", "fp8"):
            raise ValueError(f"vLLM does not quantize a model to {weights} while loading: choose fp8 or same")
        self.tokenizer, self._vllm = tokenizer, vllm
        self._settings: dict[str, Any] = {
            "model": str(folder), "tokenizer": str(folder), "quantization": None if weights == "same" else weights, "seed": 0,
            "gpu_memory_utilization": memory,
        }  # fmt: skip
        self._mode, self._llm = "", None

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, progress: Callable[[int, int], None] | None = None
    ) -> list[list[Completion]]:
        """Return answers as `Engine.generate` does; raise ValueError for a mask or speculation. Answers depend only on the seed, the prompt
        and the number of equal prompts before it, up to rounding that varies with vLLM's batches. `progress` is called once, at the end."""
        if not prompts:
            return []
        repeats: Counter[tuple[int, ...]] = Counter()
        requests, how = [], []
        for index, prompt in enumerate(prompts):
            request = request_of(self.tokenizer, prompt, params, index)
            seed = np.random.SeedSequence([params.seed, repeats[request.words], *request.words]).generate_state(1)
            repeats[request.words] += params.n
            requests.append({"prompt_token_ids": request.prompt})
            how.append(self._params(params, sorted(request.stop_ids), request.stop_texts, int(seed[0])))
        completions = [self._completions(one.outputs) for one in self._load(params).generate(requests, how, use_tqdm=False)]
        if progress is not None:
            progress(len(completions) * params.n, len(completions) * params.n)
        return completions

    def holding(self, model: Transformer) -> VllmEngine:
        """Return this engine with the weights of a model in training, which are saved to the engine's folder and reloaded from there."""
        save(model, self._settings["model"], self.tokenizer)
        if self._llm is not None:
            self._llm.collective_rpc("reload_weights")
            self._llm.reset_prefix_cache()
        return self

    def _load(self, params: SamplingParams) -> Any:
        """Return vLLM's model, loaded with the log-prob mode that these parameters need; raise ValueError if that is impossible."""
        if params.temperature in (0.0, 1.0):
            mode = "raw_logprobs"
        elif params.cuts or params.shifts:
            raise ValueError(
                f"vLLM does not give log-probs of the whole vocabulary at temperature {params.temperature} with penalties, top_k, top_p or "
                "min_p: set the temperature to 1, or leave the others out"
            )
        else:
            mode = "processed_logprobs"
        if self._llm is not None and mode != self._mode:
            raise ValueError("vLLM was loaded for other parameters: use a separate engine for each way of sampling")
        if self._llm is None:
            self._mode, self._llm = mode, self._vllm.LLM(**self._settings, logprobs_mode=mode)
        return self._llm

    def _params(self, params: SamplingParams, stop_ids: list[int], stop_texts: Sequence[str], seed: int) -> Any:
        if params.mask is not None or params.speculate:
            raise ValueError("vLLM supports neither masks nor speculation here: leave mask and speculate out")
        return self._vllm.SamplingParams(
            n=params.n, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p,
            max_tokens=params.max_tokens, seed=seed, repetition_penalty=params.repetition_penalty, presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty, logit_bias=dict(params.logit_bias) or None, stop_token_ids=stop_ids,
            stop=list(stop_texts) or None, ignore_eos=True, logprobs=0, detokenize=bool(stop_texts),
        )  # fmt: skip

    @staticmethod
    def _completions(outputs: Sequence[Any]) -> list[Completion]:
        completions = []
        for output in sorted(outputs, key=lambda output: output.index):
            tokens = [int(token) for token in output.token_ids]
            logprobs = [float(step[token].logprob) for token, step in zip(tokens, output.logprobs, strict=True)]
            completions.append(Completion(tokens, logprobs, output.finish_reason == "stop"))
        return completions
