"""Every Triton kernel compiled for sm_80, sm_90 and sm_100, without a GPU: registers, shared memory, instructions.

The configurations are those that the launchers use for a model of width 4096 with heads of width 128 in bf16.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from puna.kernels import (  # noqa: E402
    adamw,
    advantages,
    attention_triton,
    configurations,
    grouped_linear,
    kv_append,
    linear_cross_entropy,
    linear_token_logprobs,
    moe,
    output_layer,
    paged_attention_triton,
    quantized_linear,
    rms_norm,
    rope,
    swiglu,
)
from puna.kernels.configurations import configuration  # noqa: E402

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # maximum shared memory of one block
# Instructions of matrix products: with 16 rows, as in decoding, those of single warps; with 64 rows or more, the newer units.
TENSOR_CORES = {
    "narrow": dict.fromkeys((80, 90, 100), r"mma\.sync"),
    "wide": {80: r"mma\.sync", 86: r"mma\.sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma", 120: r"mma\.sync"},
    "integers": {80: r"mma\.sync.*\.s8", 90: r"wgmma\.mma_async.*\.s8", 100: r"mma\.sync.*\.s8"},
}


@dataclass(frozen=True)
class Case:
    """One kernel: its arguments' types in order, each a letter of `TYPES` or written out; its constants, warps and stages."""

    kernel: object
    arguments: str | list[str]
    constants: dict[str, object]
    warps: int = 4
    stages: int = 3
    product: str = ""  # a key of TENSOR_CORES


TYPES = {
    "p": "*bf16",
    "f": "*fp32",
    "i": "*i32",
    "l": "*i64",
    "n": "i32",
    "x": "fp32",
    "b": "*i8",
    "h": "*fp16",
    "e": "*fp8e4nv",
    "u": "*u8",
}

CHUNKS = {"CHUNK": adamw.CHUNK, "BLOCK": adamw.BLOCK, "ALIGN": 16}
NORMS = {width: dict(zip(("M", "BLOCK"), rms_norm.block(width), strict=False)) for width in (128, 4096)}
WARPS = {width: rms_norm.block(width)[2] for width in NORMS}
CASES = {
    "adamw_norm": Case(adamw._norm_kernel, "lllf", {**CHUNKS, "GRADIENT": triton.language.bfloat16}, 8),
    "adamw_update": Case(
        adamw._update_kernel,
        "lllf" + "x" * 6,
        {**CHUNKS, "PARAMETER": triton.language.float32, "GRADIENT": triton.language.bfloat16, "CLIP": True},
        8,
    ),
    "rms_norm_forward": Case(rms_norm._forward_kernel, "pppppfnnx", {"ADD": True, **NORMS[4096]}, WARPS[4096]),
    "rms_norm_backward": Case(rms_norm._backward_kernel, "ppppfpfnn", {"ADD": True, **NORMS[4096]}, WARPS[4096]),
    "rms_norm_forward_of_heads": Case(rms_norm._forward_kernel, "pppppfnnx", {"ADD": False, **NORMS[128]}, WARPS[128]),
    "rms_norm_backward_of_heads": Case(rms_norm._backward_kernel, "ppppfpfnn", {"ADD": False, **NORMS[128]}, WARPS[128]),
    "swiglu_forward": Case(swiglu._forward_kernel, "pppnnn", {"BLOCK": swiglu.BLOCK}, 8),
    "swiglu_backward": Case(swiglu._backward_kernel, "pppppnnn", {"BLOCK": swiglu.BLOCK}, 8),
    "cross_entropy": Case(
        linear_cross_entropy._cross_entropy_kernel, "plffn", {"GRADIENT": True, "LOWEST": -3e38, "BLOCK": output_layer.BLOCK}, 16
    ),
    "logprobs": Case(linear_token_logprobs._logprob_kernel, "plfffnx", {"LOWEST": -3e38, "BLOCK": output_layer.BLOCK}, 16),
    "logprobs_gradient": Case(
        linear_token_logprobs._logprob_gradient_kernel, "plffffnx", {"ENTROPY": True, "BLOCK": output_layer.BLOCK}, 16
    ),
    "paged_pieces": Case(
        paged_attention_triton._piece_kernel,
        "pppiiiffx" + "n" * 10,
        {"S": 16, "H": 32, "R": 4, "K": 128, "V": 128, "BLOCK": 128, "BLOCK_V": 128, "TAIL": 0, "M": paged_attention_triton.ROWS, "N": paged_attention_triton.TOKENS, "PRECISION": "tf32"},
        product="narrow",
    ),
    "paged_latents": Case(  # of DeepSeek-V3: 128 heads, latents of 512 and 64 rotated numbers
        paged_attention_triton._piece_kernel,
        "pppiiiffx" + "n" * 10,
        {"S": 16, "H": 128, "R": 128, "K": 576, "V": 512, "BLOCK": 512, "BLOCK_V": 512, "TAIL": 64, "M": paged_attention_triton.ROWS, "N": paged_attention_triton.tokens(512, 2), "PRECISION": "tf32"},
        warps=8,
        stages=2,
        product="narrow",
    ),
    "paged_merge": Case(paged_attention_triton.merge_kernel, "ffipn", {"H": 32, "K": 128, "BLOCK": 128}, 1),
    "kv_append": Case(kv_append._append_kernel, "ppppl" + "nnnnn", {"BLOCK": kv_append.BLOCK}),
    "quantize_rows": Case(
        quantized_linear._quantize_kernel,
        "pbfnn",
        {"TOP": 127.0, "LEAST": quantized_linear.LEAST, "ROUND": True, "BLOCK": quantized_linear.BLOCK},
        8,
    ),
    "routing": Case(moe._route_kernel, "pffln", {"K": 8, "BLOCK": 128, "NORMALIZE": True}, 1),
    "combine": Case(moe._sum_kernel, "pflpn", {"K": 8, "WEIGHTED": True, "BLOCK": moe.BLOCK}),
    "combine_gradients": Case(moe._combine_gradients_kernel, "ppflpfn", {"K": 8, "BLOCK": moe.BLOCK}),
    "advantages": Case(advantages._advantages_kernel, "fffflffxxx", {"BLOCK": advantages.BLOCK}),
    "rope": Case(rope._rotate_kernel, "pppp" + "nnn", {"BACK": False, "HALF": 64, "HEADS": rope.HEADS, "BLOCK": 64}, 2),
}


@dataclass
class Usage:
    registers: int
    stack: int
    shared: int
    local: int
    ptx: str = field(repr=False)


def compiled(case: Case, capability: int, tmp_path: Path) -> Usage:
    """Compile to a cubin and return its resources."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = case.kernel.compiled_function() if hasattr(case.kernel, "compiled_function") else case.kernel
    names = [name for name in function.arg_names if name not in case.constants]
    assert len(names) == len(case.arguments), f"{function.__name__}: {names}"
    signature = {name: TYPES.get(kind, kind) for name, kind in zip(names, case.arguments, strict=True)}
    signature |= dict.fromkeys(case.constants, "constexpr")
    aligned = {
        (function.arg_names.index(n),): [["tt.divisibility", 16]]
        for n, kind in zip(names, case.arguments, strict=True)
        if kind != "x" and not kind.startswith("tensordesc")
    }
    source = ASTSource(
        fn=function, signature=signature, constexprs={(function.arg_names.index(n),): v for n, v in case.constants.items()}, attrs=aligned
    )
    options = {"num_warps": case.warps, "num_stages": case.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", cubin], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    return Usage(found["REG"], found["STACK"], kernel.metadata.shared, found["LOCAL"], kernel.asm["ptx"])


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(name, capability, tmp_path):
    case = CASES[name]
    usage = compiled(case, capability, tmp_path)
    assert usage.stack == 0 and usage.local == 0, usage
    assert usage.shared <= SHARED_BYTES[capability], usage
    if case.product:
        assert re.search(TENSOR_CORES[case.product][capability], usage.ptx), f"{name}: no tensor-core instruction on sm_{capability}"


@pytest.mark.parametrize("name", ["adamw_norm", "adamw_update"])
def test_16_bytes_are_loaded_at_once_where_no_element_need_be_asked_about(name, tmp_path):
    case = CASES[name]
    aligned, any_address = (compiled(replace(case, constants=case.constants | {"ALIGN": align}), 90, tmp_path).ptx for align in (16, 1))
    assert "ld.global.v4" in aligned and "ld.global.v4" not in any_address


ATTENTION = {
    "attention_forward": attention_triton._forward_kernel,
    "attention_query_gradient": attention_triton._query_gradient_kernel,
    "attention_key_gradient": attention_triton._key_gradient_kernel,
}


def attention_case(name, tuned, width, dtype="bf16", window=False):
    """Return an attention kernel's case as its launcher calls it for heads of `width`, in groups of four."""

    def tile(rows):
        return f"tensordesc<{dtype}[{rows},{width}]>" if tuned.descriptors else f"*{dtype}"

    M, N = tuned.rows, tuned.columns
    constants = {
        "R": 4, "K": width, "V": width, "BLOCK_K": width, "BLOCK_V": width, "M": M, "N": N, "WINDOW": window,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32", "DESCRIPTORS": tuned.descriptors,
    }  # fmt: skip
    read = [tile(M), tile(N), tile(N)]
    if name == "attention_forward":
        arguments, constants = [*read, *"iiii", f"*{dtype}", *"fnxnn", *"nnnnnnn"], constants | {"SPECIALIZE": False}
    else:
        arguments = [*read, tile(M), f"*{dtype}", f"*{dtype}", *"iiiiffnxxnn", *"nnnnnnnnnn"]
    return Case(ATTENTION[name], arguments, constants, tuned.warps, tuned.stages)


@pytest.mark.parametrize(("capability", "width", "window"), [
    (80, 128, False), (86, 128, False), (90, 64, False), (90, 128, False), (90, 128, True), (100, 128, False), (120, 128, False),
])  # fmt: skip
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, capability, width, window, tmp_path):
    """Blocks are loaded by TMA if the table says so, and registers spill only if a GPU measurement showed that it pays."""
    place = configurations.place_of(name, capability, width, window)
    tuned, machine = configurations.table()[place]
    usage = compiled(attention_case(name, tuned, width, window=window), capability, tmp_path)
    assert usage.stack <= (128 if machine else 0) and usage.local == 0, usage
    assert usage.shared <= SHARED_BYTES[capability], usage
    assert re.search(TENSOR_CORES["wide"][capability], usage.ptx)
    assert tuned.descriptors == ("cp.async.bulk.tensor.2d.shared" in usage.ptx)


@pytest.mark.parametrize("capability", [86, 90])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_full_fp32(name, capability, tmp_path):
    """Without tensor cores, each thread multiplies by itself: larger tiles spilled kilobytes and were ten times slower on an H200."""
    tuned = configuration(name, capability, 128, fp32=True)
    usage = compiled(attention_case(name, tuned, 128, "fp32"), capability, tmp_path)
    assert usage.shared <= SHARED_BYTES[capability] and usage.stack < 1024, usage


INT32, FP32 = triton.language.int32, triton.language.float32
SWEEP = {"GROUP": 8, "EVEN": True}
TF32 = {"PRECISION": "tf32"}
PRODUCTS = {
    "int8": (quantized_linear._product_kernel, "bbffpnnn", "scaled_product", SWEEP | {"SUM": INT32}, "integers"),
    "fp8": (quantized_linear._product_kernel, "eeffpnnn", "scaled_product", SWEEP | {"SUM": FP32}, "wide"),
    "grouped": (grouped_linear._grouped_kernel, "pplllpnnnnn", "grouped_linear", {"EVEN": True, "w_d": 1} | TF32, "wide"),
    "grouped_input_gradient": (grouped_linear._grouped_kernel, "pplllpnnnnn", "grouped_linear", {"EVEN": True, "w_f": 1} | TF32, "wide"),
    "grouped_weights": (grouped_linear._grouped_weights_kernel, "pplpnnnn", "grouped_weights", TF32, "wide"),
}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_matrices(name, capability, tmp_path):
    kernel, arguments, table, constants, product = PRODUCTS[name]
    if capability == 80 and "e" in arguments:
        pytest.skip("this generation has no FP8")
    tile = configuration(table, capability)
    constants = constants | {"M": tile.rows, "C": tile.columns, "K": tile.depth}
    usage = compiled(Case(kernel, arguments, constants, tile.warps, tile.stages), capability, tmp_path)
    assert usage.stack == 0 and usage.local == 0, usage
    assert usage.shared <= SHARED_BYTES[capability], usage
    assert re.search(TENSOR_CORES[product][capability], usage.ptx)
