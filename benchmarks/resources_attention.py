"""flex_attention on a Hopper GPU: what the compiler makes of it, without a GPU.

    python benchmarks/resources_attention.py

needs a C compiler, jax's CUDA plugin, `ptxas` and `nvdisasm`: `benchmarks/README.md`
has the command. Kernels of each case of `bench_attention_gpu.py` are lowered,
translated by the plugin, which thinks that a Hopper GPU is there, and by `ptxas`, and
taken apart: registers, bytes that spill, and of each innermost loop with products on
the tensor cores, which is a visit, how many instructions it has, and of which kinds. A
loop that is for what is rare counts, too. `--programs`, `--lengths` and `--channels`
run a part, `--options` asks for `kernel_options`; parts of the same tree are merged.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import bench_attention_gpu as attention, harness
from pliax.kernels.attention import mosaic_gpu_limits


OUTPUT = harness.RESULTS / "attention_resources.json"
TARGET = "sm_90a"
# What a visit is made of: products, special functions, accesses that spill, arithmetic.
KINDS = {
    "products": ("HGMMA",),
    "special_functions": ("MUFU",),
    "spills": ("LDL", "STL"),
    "arithmetic": ("FMUL", "FFMA", "FADD", "FMNMX", "FSEL", "FSETP"),
}
# A driver that answers what the plugin asks before it compiles, with a Hopper GPU's
# numbers: attributes 75 and 76 are the major and minor compute capability.
_DRIVER = r"""
typedef int Result;
Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuDeviceGet(int *device, int n) { *device = 0; return 0; }
Result cuDeviceGetCount(int *count) { *count = 1; return 0; }
Result cuCtxGetDevice(int *device) { *device = 0; return 0; }
Result cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : 0;
  return 0;
}
Result cuGetErrorName(Result error, const char **text) { *text = "?"; return 0; }
Result cuGetErrorString(Result error, const char **text) { *text = "?"; return 0; }
Result cuModuleLoadData(void **module, const void *image) {
  *module = (void *)1;
  return 0;
}
Result cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)1;
  return 0;
}
Result cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
Result cuModuleUnload(void *module) { return 0; }
"""


class Translator:
    """Mosaic's compiler, from a kernel's module to PTX."""

    def __init__(self, folder: Path) -> None:
        source, driver = folder / "driver.c", folder / "libcuda.so.1"
        source.write_text(_DRIVER)
        options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *options, "-o", driver, source], check=True)
        ctypes.CDLL(str(driver), ctypes.RTLD_GLOBAL)  # whoever asks for it has it
        self.folder = folder / "ptx"
        self.folder.mkdir()
        if wheels := find_spec("nvidia"):  # CUDA's tools, before those of the system
            folders = [f"{x}/cu13/bin" for x in wheels.submodule_search_locations or ()]
            os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(self.folder)
        os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
        plugin = import_module("jax_plugins.xla_cuda13")
        self.compile = ctypes.CDLL(plugin._get_library_path()).MosaicGpuCompile
        self.compile.argtypes = [ctypes.c_char_p, ctypes.c_int]
        self.compile.restype = ctypes.c_void_p

    def ptx(self, module: bytes) -> Path:
        """The file of a kernel."""
        before = set(self.folder.glob("*.ptx"))
        if not self.compile(module, len(module)):
            raise RuntimeError("Mosaic could not compile a kernel")
        (found,) = set(self.folder.glob("*.ptx")) - before
        return found


def modules(case: attention.Case, direction: str, options: Any) -> list[bytes]:
    """What Mosaic is given of each kernel of a pass."""
    from jax.experimental.mosaic.gpu import core

    shape = case.B, case.S, case.H, case.D
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    attend, given = attention.attention(case, options), (x, x, x)

    def backward(*args: Any) -> Any:
        return jax.vjp(attend, *args[:3])[1](args[3])

    is_forward = direction == "forward"
    run, given = (attend, given) if is_forward else (backward, (*given, x))
    core.KNOWN_KERNELS.clear()
    jax.clear_caches()  # a kernel that was lowered before is no news
    jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",))
    return [*core.KNOWN_KERNELS.values()][0 if is_forward else 1 :]


def names(direction: str, count: int) -> Sequence[str]:
    """Of the kernels of a pass."""
    if direction == "forward":
        return ("forward",)
    return ("backward",) if count == 1 else ("dq", "dk and dv")


def report(ptx: Path) -> dict[str, Any]:
    """What `ptxas` and `nvdisasm` say of a kernel."""
    binary = ptx.with_suffix(".cubin")
    command = ["ptxas", "-v", f"-arch={TARGET}", "-O3", ptx, "-o", binary]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    taken_apart = subprocess.run(
        ["nvdisasm", "-c", binary], check=True, capture_output=True, text=True
    ).stdout
    return {**resources(told), "visits": [*visits(taken_apart.splitlines())]}


def resources(told: str) -> dict[str, int]:
    """Registers of a thread at its start, and bytes that it spills."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "spill_store_bytes": r"(\d+) bytes spill stores",
        "spill_load_bytes": r"(\d+) bytes spill loads",
    }
    return {name: int(re.findall(x, told)[-1]) for name, x in patterns.items()}


def visits(lines: Sequence[str]) -> Iterator[dict[str, int]]:
    """Innermost loops with products, by their instructions of each kind."""
    instructions, places = list[str](), dict[str, int]()
    for line in lines:
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*)", line):
            instructions.append(found[1])
    loops = list[tuple[int, int]]()
    for end, text in enumerate(instructions):
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        start = places.get(jump[1], end + 1) if jump else end + 1
        body = " ".join(instructions[start:end])
        if "HGMMA" in body and "EXIT" not in body:  # who waits does so behind the end
            loops.append((start, end))
    for start, end in sorted(loops):
        if not any(
            start <= a and b <= end and (a, b) != (start, end) for a, b in loops
        ):
            yield {"instructions": end - start, **kinds(instructions[start:end])}


def kinds(instructions: Sequence[str]) -> dict[str, int]:
    """How many there are of each of `KINDS`."""
    words = Counter(
        word.split(".")[0] for text in instructions for word in text.split()[:2]
    )
    return {kind: sum(words[x] for x in known) for kind, known in KINDS.items()}


def rows_of(
    case: attention.Case, direction: str, options: Any, translator: Translator
) -> Iterator[dict[str, Any]]:
    """A row for each kernel of a pass."""
    found = modules(case, direction, options)
    for name, module in zip(names(direction, len(found)), found, strict=True):
        row = {**asdict(case), "direction": direction, "kernel": name}
        row |= {"options": options, **report(translator.ptx(module))}
        print(
            f"{case.program:>10} S={case.S:<6} D={case.D:<4} {name:<10}"
            f"{row['registers']:4} registers, {row['spill_store_bytes']:4} bytes spill"
        )
        for visit in row["visits"]:
            print(f"{'':14}" + ", ".join(f"{n} {x}" for x, n in visit.items()))
        yield row


def versions() -> dict[str, str]:
    """Of `ptxas`."""
    told = subprocess.run(["ptxas", "--version"], capture_output=True, text=True)
    return {"ptxas": re.findall(r"V([\d.]+)", told.stdout)[-1]}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    sizes = (row[x] for x in ("program", "S", "D", "direction", "kernel"))
    return (*sizes, json.dumps(row["options"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = [*attention.PROGRAMS]
    parser.add_argument("--programs", nargs="+", choices=known, default=known)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096])
    parser.add_argument("--channels", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--options", type=json.loads, help="kernel_options, as JSON")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    mosaic_gpu_limits.refused_device = lambda: None  # the kernels are not to run
    with tempfile.TemporaryDirectory() as folder:
        translator, rows = Translator(Path(folder)), list[dict[str, Any]]()
        record = harness.environment_record()
        record["versions"] |= versions()
        for S, D, program in product(
            options.lengths, options.channels, options.programs
        ):
            case = attention.Case(program, S, D, max(2, 16384 // S))
            for direction in ("forward", "backward"):
                rows += rows_of(case, direction, options.options, translator)
                whole = harness.merged(options.output, record, rows, _key)
                harness.write(whole, options.output)


if __name__ == "__main__":
    main()
