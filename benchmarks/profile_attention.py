"""flex_attention on a Hopper GPU: what the profiler says of rows that could be faster.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/profile_attention.py

needs a Hopper GPU, a Python with jax's CUDA plugin and Nsight Compute (`ncu`). Kernels
of a call are timed by CUPTI, one call after another, and counted by ncu in a process of
their own, where a call runs again and again, each kernel with empty caches and clocks
as they are: their times there are longer. Stall reasons are shares of the time of all
warps that a multiprocessor holds, also of those that only load. `--cases` takes numbers
of the list that `--list` prints; parts of the same tree and device are merged.
"""

import argparse
import csv
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import (
    bench_attention_decoding as decoding,
    bench_attention_gpu as attention,
    harness,
)


OUTPUT = harness.RESULTS / "attention_profile_gpu.json"
BOTH = [(S, D) for S in (4096, 16384) for D in (64, 128)]
CASES = [
    *(("forward", name, S, 128) for name in ("dense", "causal") for S in (4096, 16384)),
    *(("backward", name, *x) for name in ("soft cap", "documents") for x in BOTH),
    *(("decoding", name, decoding.KEYS, 128) for name in decoding.PROGRAMS),
]
QUERIES = 16  # of decoding, of one sequence
RUNS = 5  # of which the median counts
LIMIT_S = 90  # of ncu; once it had not ended after 400 (documents of 16,384 tokens)
# What is kept of ncu's metrics, in its base units, and as what.
METRICS = {
    "gpu__time_duration.sum": ("us", 1e-3),
    "launch__grid_size": ("thread_blocks", 1),
    "launch__block_size": ("threads", 1),
    "launch__registers_per_thread": ("registers", 1),
    "launch__shared_mem_per_block_dynamic": ("shared_kib", 2**-10),
    "launch__occupancy_limit_registers": ("thread_blocks_by_registers", 1),
    "launch__occupancy_limit_shared_mem": ("thread_blocks_by_shared_memory", 1),
    "sass__inst_executed_register_spilling": ("spills_of_warps", 1),
    "inst_executed": ("instructions_of_warps", 1),
    "dram__bytes.sum.per_second": ("memory_tb_per_s", 1e-12),
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": ("l2_percent", 1),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": (
        "tensor_cores_percent",
        1,
    ),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed": (
        "special_functions_percent",
        1,
    ),
    "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed": ("alu_percent", 1),
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed": ("fma_percent", 1),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue_percent", 1),
    "gpc__cycles_elapsed.avg.per_second": ("clock_ghz", 1e-9),
}
STALL, PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
SECTIONS = (
    *("SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats"),
    *("ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "InstructionStats"),
)


def case_of(number: int) -> Any:
    """A case of the benchmark that times it."""
    direction, program, S, D = CASES[number]
    if direction == "decoding":
        return decoding.Case(program, QUERIES, B=1, S=S, D=D)
    return attention.Case(program, S, D, B=max(2, 16384 // S))


def call_of(number: int) -> tuple[Any, tuple[Any, ...]]:
    """The compiled program and its arguments."""
    direction, case = CASES[number][0], case_of(number)
    if direction == "decoding":
        return _decoding(case)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in case.arrays()]
    attend = attention.attention(case, None)
    call: Any = attention.pass_in_jax("pliax", direction, attend, arrays).call
    return call.func, call.args


def _decoding(case: decoding.Case) -> tuple[Any, tuple[Any, ...]]:
    # Made on the host: ncu crashes at what XLA runs to make page tables.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = decoding.inputs(case)
    gpu = jax.local_devices(backend="gpu")[0]
    given = jax.device_put((made.query, made.stores[0], made.data), gpu)
    attend = jax.jit(partial(decoding.attend, case, "mosaic_gpu"))
    return attend.lower(*given).compile(), given


def timed(number: int) -> list[tuple[str, float]]:
    """Kernels and their microseconds, of the median call."""
    from jax.experimental.mosaic.gpu import profiler

    compiled, arguments = call_of(number)
    measured = profiler.measure(compiled, aggregate=False)
    runs: list[Any] = [measured(*arguments)[1] for _ in range(RUNS)]
    runs.sort(key=lambda timings: sum(ms for _, ms in timings))
    return [(name, 1e3 * ms) for name, ms in runs[RUNS // 2]]


def be_counted(number: int) -> None:
    """One call between marks that ncu looks for."""
    compiled, arguments = call_of(number)
    jax.block_until_ready(compiled(*arguments))
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuProfilerStart()
    jax.block_until_ready(compiled(*arguments))
    cuda.cuProfilerStop()


def counted(number: int) -> list[dict[str, Any]]:
    """What ncu says of each kernel of a call."""
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--clock-control", "none", "--profile-from-start", "off"]
    command += [word for x in SECTIONS for word in ("--section", x)]
    command += ["--metrics", ",".join(METRICS)]
    command += [sys.executable, __file__, "--be-counted", str(number)]
    # In a CUDA graph kernels are one thing, which ncu cannot tell apart.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    environment = {**os.environ, "XLA_FLAGS": flags}
    return [*parsed(told_within(LIMIT_S, command, environment).splitlines())]


def told_within(
    limit_s: float, command: Sequence[str], environment: Mapping[str, str]
) -> str:
    """What a program prints; it and those it started end when the time is over.

    Raises:
        RuntimeError: If it fails, or does not end.
    """
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipe |= {"text": True, "env": environment, "start_new_session": True}
    name = command[0]
    with subprocess.Popen(command, **pipe) as running:
        try:
            told, complaint = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(running.pid, signal.SIGKILL)
            raise RuntimeError(f"{name} did not end within {limit_s:g} s") from error
    if running.returncode:
        print(complaint[-2000:], told[-500:], file=sys.stderr)
        raise RuntimeError(
            f"{name} ended with {running.returncode}: {complaint[-200:]}"
        )
    return told


def parsed(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Kernels of ncu's table, behind what the program and ncu print."""
    first = next(n for n, line in enumerate(lines) if line.startswith('"ID"'))
    names, _, *rows = csv.reader(lines[first:])
    for row in rows:
        values = dict(zip(names, row, strict=True))
        stalls = {
            name.removeprefix(STALL).removesuffix(PER_ISSUE): _number(value) or 0.0
            for name, value in values.items()
            if name.startswith(STALL) and name.endswith(PER_ISSUE)
        }
        total = sum(stalls.values())
        shares = sorted(stalls.items(), key=lambda item: -item[1])
        kept = {
            ours: scaled(_number(values.get(name, "")), scale)
            for name, (ours, scale) in METRICS.items()
        }
        yield {
            "kernel": values["Kernel Name"],
            **kept,
            "stalls_percent": {k: 100 * x / total for k, x in shares if x},
        }


def scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _number(text: str) -> float | None:
    """Of a cell, which may say that there is no data."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def row_of(number: int) -> dict[str, Any]:
    """A case, with times and counts of its kernels."""
    row: dict[str, Any] = {**asdict(case_of(number)), "direction": CASES[number][0]}
    print(f"{number}: " + " ".join(map(str, CASES[number])), flush=True)
    row["kernels_us"] = timed(number)
    for name, us in row["kernels_us"]:
        print(f"   {us:9.1f} us {name}", flush=True)
    try:
        row["profile"] = counted(number)
    except RuntimeError as error:
        row["profile"], row["not_counted"] = [], str(error)
    for kernel in row["profile"]:
        print(f"   {summary(kernel)}", flush=True)
    return row


def summary(kernel: dict[str, Any]) -> str:
    stalls = [*kernel["stalls_percent"].items()][:6]
    reasons = ", ".join(f"{name} {share:.0f}" for name, share in stalls)
    return (
        f"{kernel['us']:9.1f} us {kernel['kernel']}: {kernel['registers']} registers, "
        f"{kernel['spills_of_warps']} spills, tensor cores "
        f"{kernel['tensor_cores_percent']:.0f}, issue {kernel['issue_percent']:.0f}, "
        f"memory {kernel['memory_tb_per_s']:.2f} TB/s; {reasons}"
    )


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(x) for x in ("direction", "program", "S", "D", "T", "B"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--be-counted", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{n}: {x}" for n, x in enumerate(CASES)))
        return
    if options.be_counted is not None:
        be_counted(options.be_counted)
        return
    record, rows = harness.environment_record(), []
    for number in options.cases:
        rows.append(row_of(number))
        harness.write(
            harness.merged(options.output, record, rows, _key), options.output
        )


if __name__ == "__main__":
    main()
