"""A model larger than memory: Puna's planned offloading compared with a memory map, and with transformers and accelerate, on the same
files.

    OMP_NUM_THREADS=1 python tests/benchmarks/offload.py --folder /path/with/room --layers 36 --memory 4 --json

A Llama of width 4096 (708 MB per layer in fp32) with random weights is written to the folder once. Each method runs in a separate process:
`puna` with `--memory` GB; `mapped`, Puna without a planner, whose weights are memory-mapped files read through the system's page cache;
`accelerate`, transformers with `device_map="auto"`, `--memory` GB for weights, and the rest on disk. Each answers `--prompts` prompts of
`--prompt` tokens with `--answer` greedy tokens, all at once. `seconds` is the total, `pass_seconds` one decoding step; `hidden` is the
share of reading that overlaps with other work, `expected` the planner's prediction. For the last two methods the page cache is as large as
the machine's free memory, so smaller files are read from disk only once. `--drop` drops the files from the cache before each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WAYS = ("puna", "mapped", "accelerate")


def write(folder: Path, layers: int, width: int, groups: int, dtype: torch.dtype) -> None:
    """Write a checkpoint with one file per layer; its random weights are small enough for finite results."""
    from safetensors.torch import save_file

    inner, keys, vocabulary = width * 43 // 16, 128 * groups, 32000
    shapes = {
        "input_layernorm": (width,), "post_attention_layernorm": (width,), "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype) if len(shape) == 1 else (torch.rand(shape, generator=generator) * 0.04 - 0.02).to(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    index = {}
    for number in range(layers + 1):
        if number < layers:
            tensors = {f"model.layers.{number}.{name}.weight": drawn(shape) for name, shape in shapes.items()}
        else:
            tensors = {"model.embed_tokens.weight": drawn((vocabulary, width)), "model.norm.weight": drawn((width,))}
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": width // 128, "num_key_value_heads": groups,
        "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "hidden_act": "silu", "torch_dtype": str(dtype).removeprefix("torch."), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def prompts(count: int, length: int, vocabulary: int = 32000) -> list[list[int]]:
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def peak() -> float:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1e6


def warm_up() -> None:
    """Load the compiled loops, as a server does once."""
    from puna.models.config import ModelConfig
    from puna.models.generation import Engine, SamplingParams
    from puna.models.transformer import Transformer

    shape = ModelConfig(vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    model = Transformer(shape, seed=0)
    for exact in (False, True):
        Engine(model, exact=exact).generate(prompts(2, 100, 512), SamplingParams(max_tokens=3, temperature=0, stop=()))


def by_puna(args: argparse.Namespace, mapped: bool = False) -> dict[str, Any]:
    from puna.models.formats.checkpoint import load
    from puna.models.generation import Engine, SamplingParams
    from puna.models.memory import Work
    from puna.models.memory.offload import Disk
    from puna.models.serving import offloaded_model

    told: dict[str, Any] = {}
    shelf = None
    warm_up()
    if mapped:
        engine = Engine(load(args.folder))
    else:
        found = offloaded_model(args.folder, (torch.device("cpu"), torch.float32), "disk", args.memory, Work(args.prompt, args.answer, args.prompts))
        told, engine, shelf = {"plan": found.plan}, Engine(found.model, **found.limits), found.shelf
    params, steps = SamplingParams(max_tokens=args.answer, temperature=0, stop=()), []
    whole = [engine.submit(prompt, params) for prompt in prompts(args.prompts, args.prompt)]
    begun, tokens = time.perf_counter(), {id(request): [] for request in whole}
    while not engine.scheduler.idle:
        before = time.perf_counter()
        events = engine.step()
        steps.append((len(events), time.perf_counter() - before))
        for event in events:
            tokens[id(event.request)].append(event.token)
    seconds = time.perf_counter() - begun
    if isinstance(shelf, Disk):
        counts = shelf.counts
        told |= {"hidden": 1.0 - min(counts.waiting / counts.reading, 1.0), "read_gb": counts.bytes / 1e9, "disk_gb_s": counts.bytes / 1e9 / counts.reading}
    most = max(count for count, _ in steps)
    decode = [spent for count, spent in steps[1:] if count == most]
    return told | {"seconds": seconds, "pass_seconds": min(decode), "answers": [tokens[id(request)] for request in whole]}


def by_accelerate(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    limit = {"cpu": int(args.memory * 1e9)}
    model = AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, device_map="auto", max_memory=limit, offload_folder=args.folder / "offload", attn_implementation="sdpa"
    )
    places = [str(place) for place in model.hf_device_map.values()]
    ids, times = torch.tensor(prompts(args.prompts, args.prompt)), []
    begun = time.perf_counter()
    with torch.inference_mode():
        cache, given, answers = None, ids, []
        for _ in range(args.answer):
            before = time.perf_counter()
            found = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, given = found.past_key_values, found.logits[:, -1].argmax(-1, keepdim=True)
            answers.append(given[:, 0])
            times.append(time.perf_counter() - before)
    places_told = f"{sum(place == 'disk' for place in places)} of {len(places)} parts on disk"
    return {"plan": places_told, "seconds": time.perf_counter() - begun, "pass_seconds": min(times[1:]), "answers": torch.stack(answers, 1).tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--groups", type=int, help="key-value heads of width 128 (default: a quarter of the query heads)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the files; all compute in fp32")
    parser.add_argument("--memory", type=float, default=4.0)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=6)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--drop", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "puna": lambda: by_puna(args), "mapped": lambda: by_puna(args, mapped=True),
            "accelerate": lambda: by_accelerate(args),
        }  # fmt: skip
        begun = time.perf_counter()
        found = ways[args.one]()
        print(json.dumps(found | {"all_seconds": time.perf_counter() - begun, "peak_gb": peak()}))
        return
    if not (args.folder / "config.json").exists():
        write(args.folder, args.layers, args.width, args.groups or args.width // 512, getattr(torch, args.dtype))
    told = {}
    for way in args.ways:
        if args.drop:
            for file in args.folder.rglob("*.safetensors"):
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        ran = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", way], capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"{way}: {ran.stderr[-3000:]}")
        told[way] = json.loads(ran.stdout.splitlines()[-1])
        told[way]["tokens_per_second"] = args.prompts * args.answer / told[way]["seconds"]
        print(way, {name: value for name, value in told[way].items() if name != "answers"}, file=sys.stderr, flush=True)
    alike = {way: told[way]["answers"] == told[args.ways[0]]["answers"] for way in args.ways}
    summary = {way: {name: value for name, value in one.items() if name != "answers"} | {"alike": alike[way]} for way, one in told.items()}
    print(json.dumps(summary, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
