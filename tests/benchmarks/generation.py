"""Generation compared with transformers on the same weights, and the engine's claims: shared prompts, exact log-probs.

    OMP_NUM_THREADS=1 python tests/benchmarks/generation.py --json

One thread, fp32, process CPU time; Puna and transformers alternate, and the best of `--rounds` counts. Both draw 128 tokens per answer at
temperature 1 from the whole vocabulary after prompts of 32 tokens; Puna also returns the log-probs. The model: 6 layers, width 256, 8 query
and 4 key-value heads, feed-forward 704, vocabulary 8192. The `greedy` figures take the likeliest tokens instead. `--smollm FILE` compares
the greedy tokens of SmolLM2-135M-Instruct (a GGUF file) for 200 prompts of 64 new tokens each. `--speculate FILE` measures the time saved
by speculation for answers to questions and for repeating a text, one prompt at a time, with n-grams and with a draft model. `--quantized
FILE --text FILE` measures the change of likelihoods and answers with 8-bit weights. `--sinks FILE --text FILE` measures the perplexity of a
text longer than the context under a cache of the last tokens, with and without sinks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from puna.kernels.exact import exact_passes
from puna.models.config import ModelConfig
from puna.models.generation import Engine, SamplingParams
from puna.models.training.objectives.base import Targets
from puna.models.transformer import Transformer

SHAPE = ModelConfig(
    vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    head_dim=32, max_position_embeddings=2048,
)  # fmt: skip
NEW = 128


def model() -> Transformer:
    return Transformer(SHAPE, seed=0)


def twin(ours: Transformer) -> Any:
    """Return transformers' model with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = SHAPE.model_dump()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = {name: raw[name] for name in (*names, "head_dim", "max_position_embeddings")}
    found = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa", bos_token_id=None, eos_token_id=None, pad_token_id=0))
    found.load_state_dict(ours.state_dict())
    return found.eval()


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, SHAPE.vocab_size, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def theirs(network: Any, asked: list[list[int]], n: int, greedy: bool) -> None:
    ids = torch.tensor(asked).repeat_interleave(n, 0)
    how: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "top_k": None, "top_p": None, "temperature": 1.0}
    network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **how)


def ours(network: Transformer, asked: list[list[int]], n: int, greedy: bool, **how: Any) -> None:
    Engine(network, **how).generate(asked, SamplingParams(n=n, temperature=0.0 if greedy else 1.0, max_tokens=NEW, stop=()))


def best(rounds: int, **work: Callable[[], None]) -> dict[str, float]:
    """Return the minimum CPU seconds of each function; the functions alternate."""
    found = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, step in work.items():
            started = time.process_time()
            step()
            found[name] = min(found[name], time.process_time() - started)
    return found


def beside_transformers(rounds: int) -> dict[str, float]:
    network = model()
    other = twin(network)
    ours(network, prompts(2, 32), 1, False)  # compile the loops once
    figures: dict[str, float] = {}
    for name, count, length, n in (("decode1", 1, 32, 1), ("decode16", 16, 32, 1), ("decode64", 64, 32, 1), ("rejection", 1, 512, 16)):
        asked = prompts(count, length)
        for greedy in (False, True):
            kind = f"{name}_greedy" if greedy else name
            took = best(
                rounds,
                ours=lambda asked=asked, n=n, greedy=greedy: ours(network, asked, n, greedy),
                theirs=lambda asked=asked, n=n, greedy=greedy: theirs(other, asked, n, greedy),
            )
            figures[f"{kind}_tok_core_s"] = count * n * NEW / took["ours"]
            figures[f"{kind}_vs_transformers"] = took["theirs"] / took["ours"]
    asked = prompts(1, 512)
    apart = [[*row[:-1], token] for row in asked for token in range(16)]  # 16 prompts that differ already in their first page
    apart = [[token, *row] for token, row in enumerate(apart)]
    took = best(
        rounds, shared=lambda: ours(network, asked, 16, False), unshared=lambda: ours(network, apart, 1, False)
    )
    figures["shared_vs_unshared"] = took["unshared"] / took["shared"]
    return figures


def exactness(rounds: int) -> dict[str, Any]:
    """Return the share of drawn tokens whose log-probs equal the packed training pass's bit by bit, and the cost of exact passes."""
    network = model()
    asked = [row[: 20 + 9 * i] for i, row in enumerate(prompts(12, 160))]
    equal, plain_equal, total = 0, 0, 0
    ways: tuple[dict[str, Any], ...] = ({}, {"sequences": 5}, {"step_tokens": 50}, {"memory": 6 << 20})
    for seed, way in enumerate(ways):
        for exact in (True, False):
            params = SamplingParams(n=4, temperature=0.8, max_tokens=40, stop=tuple(range(100)), seed=seed)
            answers = Engine(network, exact=exact, **way).generate(asked, params)
            targets = Targets.from_answers(asked, [[a.tokens for a in row] for row in answers])
            with torch.no_grad(), exact_passes(torch.float32, torch.device("cpu"), exact):
                logprobs = network.token_logprobs(targets.forest, targets.positions, targets.tokens, 0.8)[0]
            same = int((logprobs == torch.tensor([p for row in answers for a in row for p in a.logprobs])).sum())
            equal, plain_equal = equal + exact * same, plain_equal + (not exact) * same
            total += exact * len(logprobs)
    figures: dict[str, Any] = {"logprobs_bitwise": equal / total, "logprobs_bitwise_without_exact": plain_equal / total}
    for count in (1, 16, 64):
        rows = prompts(count, 32)
        took = best(
            rounds,
            exact=lambda rows=rows: ours(network, rows, 1, False, exact=True),
            plain=lambda rows=rows: ours(network, rows, 1, False),
        )
        figures[f"exact_cost_batch_{count}"] = took["exact"] / took["plain"]
    return figures


def smollm(file: Path) -> dict[str, float]:
    """Compare greedy tokens with transformers' for 200 prompts."""
    from transformers import AutoModelForCausalLM

    from puna.models.formats.checkpoint import load_with_tokenizer, save

    network, tokenizer = load_with_tokenizer(file)
    asks = ("Tell me about", "Describe", "Explain how to think of", "Write a short story on", "List three facts about")
    things = ("rain", "bread", "wolves", "music", "iron", "old maps", "winter", "sugar", "letters", "the moon")
    texts = [f"{ask} {one} and {other}." for ask in asks for one in things for other in things if one < other][:200]
    asked = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    started = time.process_time()
    answers = Engine(network, tokenizer).generate(asked, SamplingParams(temperature=0, max_tokens=64, stop=()))
    took = time.process_time() - started
    with tempfile.TemporaryDirectory() as folder:
        save(network, folder, tokenizer)
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    same = 0
    how: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for length in sorted(set(map(len, asked))):  # without padding: prompts of equal length are batched together
        alike = [(prompt, row[0].tokens) for prompt, row in zip(asked, answers, strict=True) if len(prompt) == length]
        ids = torch.tensor([prompt for prompt, _ in alike])
        found = other.generate(ids, attention_mask=torch.ones_like(ids), **how)[:, length:].tolist()
        same += sum(theirs == tokens for theirs, (_, tokens) in zip(found, alike, strict=True))
    return {"smollm_prompts": len(asked), "smollm_same_tokens": same, "smollm_tok_core_s": 64 * len(asked) / took}


TEXTS = (
    "The kettle on the stove began to sing. Anna took two cups from the shelf, put a spoon of sugar into each, and called her brother.",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return area(width, height) * depth",
    "Monday: bread, milk, eggs. Tuesday: rice, beans, onions. Wednesday: fish, lemon, potatoes. Thursday: pasta, tomatoes, cheese.",
)
ASKS = {
    "repeat": [f"Repeat this text word for word:\n\n{text}" for text in TEXTS],
    "answer": ["Why is the sky blue?", "List three uses of iron.", "Write a short story about a lighthouse."],
}


def speculation(file: Path, rounds: int, draft: Path | None = None, most: int = 6) -> dict[str, Any]:
    """Return CPU seconds without speculation over those with at most `most` guesses, from earlier text with one or three answers, and from
    a draft (None: the model itself in 8 bits); tokens per model step; and the share of answers that stay the same."""
    from puna.models.formats.checkpoint import load_with_tokenizer
    from puna.models.formats.quantized import quantize
    from puna.models.generation.draft import DraftedEngine

    network, tokenizer = load_with_tokenizer(file)
    smaller = load_with_tokenizer(draft)[0] if draft else quantize(load_with_tokenizer(file)[0], "int8")
    figures: dict[str, Any] = {}
    for kind, asked in ASKS.items():
        for temperature in (0.0, 1.0):
            ids = [tokenizer.chat([{"role": "user", "content": text}]) for text in asked]
            found: dict[str, list[list[int]]] = {}
            steps: dict[str, int] = {}

            def answers(
                way: str, ids: list[list[int]] = ids, temperature: float = temperature, found: dict[str, list[list[int]]] = found,
                steps: dict[str, int] = steps,
            ) -> None:  # fmt: skip
                params = SamplingParams(temperature=temperature, max_tokens=64, speculate=0 if way == "plain" else most)
                found[way], steps[way] = [], 0
                for prompt in ids:
                    engine = DraftedEngine(network, smaller, tokenizer) if way == "draft" else Engine(network, tokenizer)
                    request, tokens = engine.submit(prompt, params), []
                    while not engine.scheduler.idle:
                        tokens += [event.token for event in engine.step() if event.request is request]
                        steps[way] += 1
                    found[way].append(tokens)

            took = best(rounds, **{way: lambda answers=answers, way=way: answers(way) for way in ("plain", "ngram", "draft")})
            for way in ("ngram", "draft"):
                name = f"speculative_speedup_{way}_{kind}_temperature_{temperature:g}"
                figures[name] = took["plain"] / took[way]
                figures[f"{name}_tokens_a_step"] = sum(map(len, found[way])) / steps[way]
                figures[f"{name}_same"] = sum(a == b for a, b in zip(found["plain"], found[way], strict=True)) / len(asked)
    return figures


def draft_ceiling(rounds: int) -> dict[str, float]:
    """Return the largest possible saving from a draft with a tenth of the layers, one prompt at a time: in a model of 20 layers of width
    768, all but the first two add nothing, so a draft of these two is always right; and the saving from a draft with other weights."""
    from puna.models.generation.draft import DraftedEngine

    shape = SHAPE.replace(hidden_size=768, intermediate_size=2048, num_hidden_layers=20, num_attention_heads=12, head_dim=64)
    network = Transformer(shape, seed=0)
    right, other = (Transformer(shape.replace(num_hidden_layers=2), seed=seed) for seed in (0, 1))
    with torch.no_grad():
        for block in network.model.layers[2:]:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    right.load_state_dict({name: weight for name, weight in network.state_dict().items() if name in right.state_dict()})
    figures: dict[str, float] = {}
    engines = {"plain": Engine(network), "right": DraftedEngine(network, right), "other": DraftedEngine(network, other)}

    def answer(name: str, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=NEW, stop=(), speculate=0 if name == "plain" else 4)
        engines[name].generate(prompts(1, 32), params)

    for temperature in (0.0, 1.0):
        took = best(rounds, **{name: partial(answer, name, temperature) for name in engines})
        for name in ("right", "other"):
            figures[f"speculative_speedup_draft_{name}_temperature_{temperature:g}"] = took["plain"] / took[name]
    return figures


def quantized(file: Path, text: Path, tokens: int) -> dict[str, Any]:
    """Compare weights in bf16, INT8, FP8 and four bits with fp32. Four bits are rounded to nearest (int4), or by AWQ, calibrated on 8,192
    tokens of the text's end. Return the KL divergence of next-token distributions from fp32 in nats, the share of positions with the same
    likeliest token, the text's mean log-prob, and the number of right sums of 200, after four examples."""
    from puna.models.forest import Forest
    from puna.models.formats.awq_search import pack_layers
    from puna.models.formats.checkpoint import load_with_tokenizer
    from puna.models.formats.quantized import quantize

    network, tokenizer = load_with_tokenizer(file)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]
    rows = [ids[at : at + 256] for at in range(0, len(ids), 256)]
    pairs = [(a, b) for a in range(3, 23) for b in range(2, 32, 3)]
    asked = [[*tokenizer.lead, *tokenizer.encode(f"3 + 4 = 7\n12 + 5 = 17\n20 + 16 = 36\n8 + 9 = 17\n{a} + {b} =")] for a, b in pairs]
    figures: dict[str, Any] = {}
    kept: list[torch.Tensor] = []
    whole_text = tokenizer.encode(text.read_text(encoding="utf-8"))
    read = [whole_text[at : at + 512] for at in range(len(whole_text) - 8192, len(whole_text), 512)]
    for kind in ("fp32", "bf16", "int8", "fp8", "int4", "awq"):
        if kind == "bf16":
            network = load_with_tokenizer(file, dtype=torch.bfloat16)[0]
        elif kind in ("int4", "awq"):
            network = load_with_tokenizer(file)[0]
            figures[f"{kind}_seconds"] = best(1, packed=lambda network=network, kind=kind: pack_layers(network, read, kind == "awq"))["packed"]
        elif kind != "fp32":
            network = quantize(load_with_tokenizer(file)[0], kind)
        kl = same = likelihood = count = 0.0
        for number, row in enumerate(rows):
            with torch.no_grad():
                logprobs = network.logits(network.hidden(Forest.pack([row]))).float().log_softmax(-1)
            if kind == "fp32":
                kept.append(logprobs)
            whole = kept[number]
            kl += float((whole.exp() * (whole - logprobs)).sum())
            same += float((whole.argmax(-1) == logprobs.argmax(-1)).sum())
            likelihood += float(logprobs[:-1].gather(1, torch.tensor(row[1:])[:, None]).sum())
            count += len(row)
        figures[f"{kind}_kl"], figures[f"{kind}_same_likeliest"] = kl / count, same / count
        figures[f"{kind}_mean_logprob"] = likelihood / (count - len(rows))
        started = time.process_time()
        answers = Engine(network, tokenizer).generate(asked, SamplingParams(temperature=0, max_tokens=8))
        figures[f"{kind}_seconds_of_200_answers"] = time.process_time() - started
        texts = [tokenizer.decode(row[0].tokens, skip_special_tokens=True) for row in answers]
        figures[f"{kind}_right_sums"] = sum(re.findall(r"\d+", said)[:1] == [str(a + b)] for (a, b), said in zip(pairs, texts, strict=True)) / len(pairs)
        figures[f"{kind}_megabytes"] = sum(p.nbytes for p in network.parameters()) / 1e6
    return figures


class Reader(Engine):
    """An engine for a single request that keeps the log-probs of the prompt's tokens as it computes them."""

    def _compute(self, work: Any) -> torch.Tensor:
        hidden_ND = super()._compute(work)
        (answer,) = work
        following = torch.tensor(answer.request.prompt[answer.computed + 1 : answer.computed + answer.count + 1])
        logits_NV = self.model.logits(hidden_ND[: len(following)]).float()
        self.logprobs = [*getattr(self, "logprobs", []), logits_NV.log_softmax(-1).gather(1, following[:, None])[:, 0]]
        return hidden_ND


def sinks(file: Path, text: Path, tokens: int, window: int = 512) -> dict[str, Any]:
    """Return the perplexity of a text of `tokens` tokens, also by stretches of 2,048, read in one pass: with a cache of the last `window`
    to 1.25 `window` tokens, with 16 sinks in addition, and with all earlier tokens; and the memory of keys and values. The context is the
    model's own."""
    from puna.models.formats.checkpoint import load_with_tokenizer

    network, tokenizer = load_with_tokenizer(file)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"))[: tokens + 1]
    figures: dict[str, Any] = {"context": network.config.max_position_embeddings, "tokens": len(ids) - 1}
    ways: dict[str, dict[str, Any]] = {"last": {"window": window}, "sinks": {"window": window, "sinks": 16}, "all": {}}
    for name, way in ways.items():
        engine = Reader(network, step_tokens=256, **way)
        started = time.process_time()
        engine.generate([ids], SamplingParams(temperature=0, max_tokens=1, stop=()))
        figures[f"{name}_seconds"] = time.process_time() - started
        found = torch.cat(engine.logprobs)
        figures[f"{name}_perplexity"] = float((-found.mean()).exp())
        for at in range(0, len(found), 2048):
            figures[f"{name}_perplexity_from_{at}"] = float((-found[at : at + 2048].mean()).exp())
        pool = engine.scheduler.pool
        figures[f"{name}_megabytes"] = pool.peak * engine.caches[0].bytes / len(pool.references) / 1e6
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each; the best counts")
    parser.add_argument("--only", choices=["speed", "exact", "draft"], help="measure one part")
    parser.add_argument("--smollm", type=Path, metavar="FILE", help="SmolLM2-135M-Instruct as a GGUF file; nothing else is measured")
    parser.add_argument("--speculate", type=Path, metavar="FILE", help="the same model; what guessing ahead saves, and nothing else")
    parser.add_argument("--quantized", type=Path, metavar="FILE", help="the same model; what 8-bit weights change, and nothing else")
    parser.add_argument("--sinks", type=Path, metavar="FILE", help="the same model; perplexity beyond its context, and nothing else")
    parser.add_argument("--text", type=Path, metavar="FILE", help="with --quantized or --sinks: the text that is read")
    parser.add_argument("--tokens", type=int, default=4096, help="with --quantized or --sinks: tokens of it")
    parser.add_argument("--draft", type=Path, metavar="PATH", help="with --speculate: a smaller model that guesses (default: the model in INT8)")
    parser.add_argument("--most", type=int, default=6, help="with --speculate: tokens guessed at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    if options.smollm:
        figures |= smollm(options.smollm)
    elif options.sinks:
        figures |= sinks(options.sinks, options.text, options.tokens)
    elif options.quantized:
        figures |= quantized(options.quantized, options.text, options.tokens)
    elif options.speculate:
        figures |= speculation(options.speculate, options.rounds, options.draft, options.most)
    else:
        parts = {"speed": beside_transformers, "exact": exactness, "draft": draft_ceiling}
        for name, measure in parts.items():
            figures |= measure(options.rounds) if options.only in (None, name) else {}
    figures["load"] = os.getloadavg()[0]
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:36s} {value if isinstance(value, str) else format(value, '.4g')}")


if __name__ == "__main__":
    main()
