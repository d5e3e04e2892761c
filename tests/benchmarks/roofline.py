"""Each kernel compared with the machine's ceiling and with other implementations (peers): one table.

    PYTHONPATH=.pkg python tests/benchmarks/roofline.py [--device cpu|cuda] [--only NAME …] [--json] [--small]

Without --device: the GPU if there is one. First each operator is checked on small shapes against its fp64 definition in the precision that
is timed, then both are timed on the same inputs, taking turns.

    floor      the larger of bytes / copy bandwidth and FLOPs / matrix-product rate, both measured here first
    ceiling    floor / time: 1 is the most that the machine can do
    peer       the fastest of the peers that are installed: torch's operators, torch.compile, Liger-Kernel

On a GPU: bf16, the shapes of a Llama 3 8B layer over 16384 tokens. On CPU: fp32, one thread, process CPU time,
a small model's shapes. With TRITON_INTERPRET=1, `--device cpu --small` runs the Triton versions.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain

import torch
from roofline_cases import Case, Function, Machine, cases
from roofline_checks import checks, more_checks
from torch import Tensor

FLUSHES = 16  # of 256 MiB: about a millisecond


@dataclass
class Line:
    op: str
    gigabytes: float
    gigaflops: float
    milliseconds: float
    ceiling: float
    peer: str
    peer_milliseconds: float
    ratio: float
    peak_gigabytes: float


# --- measuring -------------------------------------------------------------------------------------------


def milliseconds(functions: dict[str, Function], device: torch.device, budget: float) -> dict[str, float]:
    """Return the median of GPU times, or the minimum of CPU times; the functions alternate.

    On a GPU, the cache is flushed before each call, for as long as the host needs to queue the function's kernels, so that no launch is
    timed.
    """
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if device.type == "cuda" else None
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    started = time.perf_counter()
    while not all(len(taken) >= 3 for taken in times.values()) or (
        time.perf_counter() - started < budget and len(next(iter(times.values()))) < 50
    ):
        for name, function in functions.items():
            if flush is None:
                begun = time.process_time()
                function()
                times[name].append(1e3 * (time.process_time() - begun))
            else:
                for _ in range(FLUSHES):
                    flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                function()
                end.record()
                torch.cuda.synchronize()
                times[name].append(begin.elapsed_time(end))
    return {name: min(taken) if flush is None else statistics.median(taken) for name, taken in times.items()}


def ceilings(machine: Machine) -> tuple[float, float]:
    """Return the measured (copy bandwidth in bytes/s, matrix-product rate in FLOP/s) of this machine."""
    gpu = machine.device.type == "cuda"
    source = torch.empty((1 << 30) if gpu else (64 << 20), dtype=torch.int8, device=machine.device)
    target = torch.empty_like(source)
    size = 8192 if gpu else 1536
    a, b = (machine.normal(size, size).detach() for _ in range(2))
    taken = milliseconds({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, machine.device, 2.0)
    return 2e3 * len(source) / taken["copy"], 2e3 * size**3 / taken["product"]


def measure(case: Case, machine: Machine, bandwidth: float, rate: float, budget: float) -> Iterator[Line]:
    """Yield the lines of one case. A peer that cannot run here is left out and reported."""
    functions = {"ours": case.function}
    for name, peer in case.peers.items():
        try:
            peer(*case.inputs)
            functions[name] = peer
        except Exception as error:  # noqa: BLE001  a peer's failure, of whatever kind, is not ours to mend
            print(f"# {case.name}: {name} does not run here: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    wanted = [x for x in case.inputs if isinstance(x, Tensor) and x.requires_grad]

    def forward(function: Function) -> Function:
        def run() -> None:
            with torch.no_grad():
                function(*case.inputs)

        return run

    def backward(function: Function) -> Function:
        outputs = function(*case.inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [torch.randn_like(out) for out in outputs]
        return lambda: torch.autograd.grad(outputs, wanted, upstream, retain_graph=True)

    for phase, (wrap, size, flops) in enumerate(zip((forward, backward), case.bytes, case.flops, strict=True)):
        if phase and not wanted:
            return
        ready = {name: wrap(function) for name, function in functions.items()}
        peak = _peak(ready["ours"], machine.device)
        taken = milliseconds(ready, machine.device, budget)
        ours = taken.pop("ours")
        peer = min(taken, key=taken.__getitem__) if taken else ""
        floor = 1e3 * max(size / bandwidth, flops / rate)
        theirs = taken.get(peer, math.nan)
        name = f"{case.name} {'backward' if phase else 'forward'}"
        yield Line(name, size / 1e9, flops / 1e9, ours, floor / ours, peer, theirs, theirs / ours, peak)


def _peak(function: Function, device: torch.device) -> float:
    """Return the maximum GB that one call allocates; NaN on CPU."""
    if device.type != "cuda":
        return math.nan
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def table(machine: Machine, seconds: float, only: list[str], as_json: bool = False, until: float = math.inf) -> list[Line]:
    """Print one line per operator and direction, and return them. Operators whose turn comes after `until`, a time of `time.perf_counter`,
    are reported and left out."""
    lines: list[Line] = []
    bandwidth, rate = ceilings(machine)
    print(f"# copy {bandwidth / 1e9:.1f} GB/s, {machine.dtype} product {rate / 1e12:.3g} TFLOP/s, torch {torch.__version__}", flush=True)
    header = f"{'op':38} {'GB':>8} {'GFLOP':>9} {'ms':>9} {'ceiling':>8} {'peer':>18} {'ms':>9} {'ratio':>6} {'peak GB':>8}"
    print(header if not as_json else "", flush=True)
    for case in cases(machine):
        if only and not any(part.lower() in case.name.lower() for part in only):
            continue
        if time.perf_counter() > until:
            print(f"# {case.name}: left out, no time", flush=True)
            continue
        for line in measure(case, machine, bandwidth, rate, seconds):
            lines.append(line)
            if as_json:
                print(json.dumps(asdict(line)), flush=True)
                continue
            print(
                f"{line.op:38} {line.gigabytes:8.3f} {line.gigaflops:9.1f} {line.milliseconds:9.3f} {line.ceiling:8.2f}"
                f" {line.peer:>18} {line.peer_milliseconds:9.3f} {line.ratio:6.2f} {line.peak_gigabytes:8.2f}",
                flush=True,
            )
    return lines


def verified(machine: Machine, small: bool = False) -> bool:
    """Print a verdict on every operator; return True if all are right."""
    right = True
    for verdict in chain(() if small else checks(machine), more_checks(machine, small)):
        right &= "WRONG" not in verdict
        print(f"# {verdict}", flush=True)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=[], help="operators whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each line")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for Triton's interpreter")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device == "cpu":
        torch.set_num_threads(1)
    machine = Machine.of(options.device, options.small)
    right = verified(machine, options.small)
    table(machine, options.seconds, options.only, options.json)
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
