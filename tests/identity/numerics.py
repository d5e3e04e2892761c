"""The numerics versions of tensor operations: a record of their code, and a comparison of their bits with another commit's.

    PYTHONPATH=.pkg python -m tests.identity.numerics [COMMIT]    # default: HEAD

An artifact's key holds an operation's reference and the version in its file's `NUMERICS`, not the loops that compute it. So a change of the
loops needs a check that the numbers stay the same. This script runs all operations at the commit and in the working tree, on this machine.
If an operation's bits differ, its version must be higher in the working tree. The script then writes the record that the test compares.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("numerics.json")


def files() -> list[Path]:
    """Return the files of tensor operations and the files that these share."""
    return sorted(file for folder in ("kernels", "kernels/cpu") for file in (ROOT / folder).glob("*.py") if file.name != "__init__.py")


def declared() -> dict[str, dict[str, int]]:
    """Return the `NUMERICS` of each file that declares one, by the file's name."""
    versions = {}
    for file in files():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "NUMERICS":
                versions[file.stem] = ast.literal_eval(node.value)
    return versions


def code() -> dict[str, str]:
    """Return a digest of each file's code; comments, docstrings and names of local variables do not affect it."""
    from puna.stages.identity.syntax import canonical, text

    def digest(file: Path) -> str:
        body = ast.parse(file.read_text(encoding="utf-8")).body
        shown = [text(canonical(node)[0]) for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
        return hashlib.sha256("\n".join(shown).encode()).hexdigest()[:16]

    return {str(file.relative_to(ROOT)): digest(file) for file in files()}


def cases() -> dict[str, Callable[[], Any]]:
    """Return calls of every declared operation on fixed numbers, by `file.operation`; the results hold arrays or tensors."""
    import torch

    from puna.kernels import adamw, attention, grouped_linear, kv_append, linear, moe, paged_attention, quantized_linear, swiglu
    from puna.kernels.advantages import advantages
    from puna.kernels.forest_mask import ForestMask
    from puna.kernels.linear_cross_entropy import linear_cross_entropy
    from puna.kernels.linear_token_logprobs import linear_token_logprobs
    from puna.kernels.rms_norm import add_rms_norm, rms_norm
    from puna.kernels.rope import rope, rope_table
    from puna.kernels.token_draw import token_draw

    T, D, V = 70, 96, 1_100
    bf16 = torch.bfloat16

    def numbers(seed: int, *shape: int) -> Any:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def trained(function: Callable[..., Any], *inputs: Any) -> Any:
        """Return the outputs in fp32 and bf16, and the gradients of the floating-point inputs."""
        outputs: list[Any] = []
        for dtype in (torch.float32, bf16):
            given = [one.to(dtype, copy=True).requires_grad_() if torch.is_tensor(one) and one.is_floating_point() else one for one in inputs]
            with torch.enable_grad():
                found = function(*given)
                found = found if isinstance(found, tuple) else (found,)
                sum((one.float() * torch.arange(one.numel()).view(one.shape).remainder(7)).sum() for one in found).backward()
            outputs += [*found, *(one.grad for one in given if torch.is_tensor(one) and one.requires_grad)]
        return outputs

    x, w, targets = numbers(0, T, D), numbers(1, V, D), torch.arange(T) * 13 % V
    mask = ForestMask.from_end(torch.tensor([T] * 20 + [45] * 25 + [T] * 25, dtype=torch.int32))
    heads = [numbers(seed, T, n, 32) for seed, n in ((2, 4), (3, 2), (4, 2))]
    order, place, _ = moe.sort_by_expert(torch.arange(T * 2).view(T, 2) % 5, 5)

    def stepped() -> Any:
        weights, moments = [numbers(5, 300, 40), numbers(6, 50)], [[torch.zeros(300, 40), torch.zeros(50)] for _ in range(2)]
        for step in (1, 2, 3):
            adamw.adamw_(weights, [numbers(step, 300, 40), numbers(step, 50)], *moments, step=step, lr=0.01, weight_decay=0.1)
        return weights, moments

    def paged() -> Any:
        k, v = pages()
        plan = paged_attention.PagedPlan(*(torch.tensor(one, dtype=torch.int32) for one in ([[0, 1, 2]], [0, 0], [20, 40])))
        return paged_attention.paged_attention(numbers(7, 2, 4, 32), k, v, plan)

    def pages() -> Any:
        size = paged_attention.PAGE
        k, v = (torch.zeros(3, size, 2, 32) for _ in range(2))
        kv_append.kv_append_(k, v, numbers(8, 45, 2, 32), numbers(9, 45, 2, 32), torch.arange(45))
        return k, v

    def generated() -> Any:
        from puna.models.config import ModelConfig
        from puna.models.generation import Engine, SamplingParams
        from puna.models.transformer import Transformer

        torch.manual_seed(0)
        model = Transformer(
            ModelConfig(
                vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                head_dim=16, max_position_embeddings=128,
            )
        ).eval()  # fmt: skip
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(numbers(number, *parameter.shape) * 0.1)
        done = Engine(model).generate([[1, 2, 3], [5] * 40], SamplingParams(max_tokens=12, temperature=0.8, seed=3, stop=()))
        return [[torch.tensor(one.tokens), torch.tensor(one.logprobs)] for answers in done for one in answers]

    quantized = quantized_linear.quantize_rows(w, "int8")
    return {
        "adamw.gradient_norm": lambda: adamw.gradient_norm([x, w]),
        "adamw.adamw_": stepped,
        "advantages.advantages": lambda: advantages(*(numbers(s, T) for s in (1, 2, 3)), numbers(4, 3), torch.tensor([20, 0, 50]), 0.1, 0.99, 0.95),
        "attention.attention": lambda: trained(lambda q, k, v: attention.attention(q, k, v, mask), *heads),
        "attention.prepare": lambda: attention.prepare(mask, 32, 32),
        "grouped_linear.grouped_linear": lambda: trained(
            lambda x, w: grouped_linear.grouped_linear(x, w, torch.tensor([0, 10, 10, T])), x, numbers(1, 3, 48, D)
        ),
        "kv_append.kv_append_": pages,
        "linear.product": lambda: linear.product(x, w),
        "linear.linear": lambda: trained(linear.linear, x, w),
        "linear_cross_entropy.linear_cross_entropy": lambda: trained(
            lambda x, w: linear_cross_entropy(x, w, targets, torch.full((T,), 1 / T)), x, w
        ),
        "linear_token_logprobs.linear_token_logprobs": lambda: trained(lambda x, w: linear_token_logprobs(x, w, targets, 0.7), x, w),
        "moe.top_k_routing": lambda: trained(lambda logits: moe.top_k_routing(logits, 2, True)[:2], numbers(2, T, 5)),
        "moe.dispatch": lambda: trained(lambda x: moe.dispatch(x, order, place), x),
        "moe.combine": lambda: trained(lambda y, weights: moe.combine(y, weights, order, place), numbers(3, 2 * T, D), numbers(4, T, 2).softmax(1)),
        "paged_attention.paged_attention": paged,
        "paged_attention.PAGE": paged,
        "paged_attention.PagedPlan": paged,
        "paged_attention.new_pages": generated,
        "quantized_linear.quantize_rows": lambda: [quantized_linear.quantize_rows(x, kind) for kind in ("int8", "fp8")],
        "quantized_linear.quantized_linear": lambda: quantized_linear.quantized_linear(x, *quantized),
        "rms_norm.rms_norm": lambda: trained(lambda x, w: rms_norm(x, w, 1e-5), x, numbers(2, D)),
        "rms_norm.add_rms_norm": lambda: trained(lambda x, r, w: add_rms_norm(x, r, w, 1e-5), x, numbers(3, T, D), numbers(2, D)),
        "rope.rope": lambda: trained(lambda q: rope(q, *rope_table(torch.arange(T), 32, 1e4, q.dtype)), heads[0]),
        "swiglu.swiglu": lambda: trained(swiglu.swiglu, x, numbers(3, T, D)),
        "token_draw.token_draw": lambda: token_draw(numbers(2, 9, V), torch.full((9,), 0.8), torch.arange(9) / 9),
        "dense_layers.DenseLayer": generated,
        "dense_layers.DenseLayers": generated,
        "output_layer.CHUNK_BYTES": lambda: trained(lambda x, w: linear_token_logprobs(x, w, targets), x, w),
        "output_layer.CHUNK_BYTES_GPU": lambda: (),
    }


def bits() -> dict[str, str]:
    """Return a digest of the bits that each operation computes here."""
    import torch

    def arrays(value: Any) -> list[bytes]:
        if torch.is_tensor(value):
            return [value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()]
        return [one for item in value or () for one in arrays(item)]

    torch.set_num_threads(1)
    with torch.no_grad():
        return {name: hashlib.sha256(b"".join(arrays(call()))).hexdigest()[:16] for name, call in cases().items()}


def bits_of(commit: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Return the bits of another commit's operations, computed by this file's cases, and the versions that it declares."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(f"git archive {commit} | tar -x -C {folder}", shell=True, check=True, cwd=ROOT)
        place = Path(folder, "tests/identity/numerics.py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
        return in_process(Path(folder), commit)


def in_process(folder: Path, name: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Return the bits and versions of a checkout, from a process that finds all loops compiled: a process that compiles them may give other
    bits."""
    words = "import json; from tests.identity import numerics as n; print(json.dumps([n.bits(), n.declared()]))"
    environment = os.environ | {"PYTHONPATH": f"{folder}/.pkg:{folder}"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", words], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the operations of {name} do not run with these cases:\n{done.stderr[-2000:]}")
    before, versions = json.loads(done.stdout.splitlines()[-1])
    return before, versions


def main(commit: str = "HEAD") -> None:
    """Compare with a commit and write the record; exit with 1 if bits differ under the same version."""
    before, old = bits_of(commit)
    now, new = in_process(ROOT, "this checkout")
    silent = []
    for name in sorted(now):
        file, _, operation = name.partition(".")
        if name in before and before[name] != now[name]:
            raised = new[file][operation] > old.get(file, {}).get(operation, 0)
            print(f"{name}: other bits{', version raised' if raised else ''}")
            silent += [] if raised else [name]
    if silent:
        raise SystemExit(f"raise the NUMERICS of {', '.join(silent)}, or keep the bits")
    RECORD.write_text(json.dumps(code(), indent=1) + "\n", encoding="utf-8")
    print(f"{len(now)} operations compared with {commit}; {RECORD.name} is written")


if __name__ == "__main__":
    main(*sys.argv[1:])
