"""A step of Muon on all GPUs of a machine against one of them.

    python benchmarks/bench_muon_devices.py [--quick] [--output FILE]

The matrices are the hidden ones of a 0.5B model, as in `bench_muon.py`: sharded by
their first axis over all devices, or whole on each. Each matrix is orthogonalised by
one device. The step of one device is timed in a process that sees no other, as a
program for several is compiled differently. `efficiency` is its time over that of all
devices, by their number.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import pliax as px
from benchmarks import bench_muon, harness
from benchmarks.bench_muon import DECAY, ON_GPU, RATE, Decoder


ONE = "one device"


def one_device(decoder: Decoder) -> harness.Case:
    return case(decoder, {ONE: (px.optim.muon(RATE, DECAY), None)})


def all_devices(decoder: Decoder) -> harness.Case:
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    tx = px.optim.muon(RATE, DECAY, mesh=mesh)
    places = {"sharded": P("fsdp"), "replicated": P()}
    return case(
        decoder,
        {name: (tx, NamedSharding(mesh, spec)) for name, spec in places.items()},
    )


def case(decoder: Decoder, rivals: dict[str, Any]) -> harness.Case:
    trees = [decoder.tree(seed) for seed in (0, 1)]
    made = []
    for name, (tx, sharding) in rivals.items():
        placed = trees if sharding is None else jax.device_put(trees, sharding)
        made.append(bench_muon.step_rival(name, tx, *placed))
    oracle = bench_muon.first_layer_stepped(bench_muon.oracle, *trees)
    sizes = {"width": decoder.width, "layers": decoder.layers}
    return harness.Case(decoder.name, oracle, tuple(made), sizes)


def in_process_of_one_device(arguments: list[str]) -> list[dict[str, Any]]:
    """The rows of this benchmark where one device is seen."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "one.json"
        subprocess.run(
            [sys.executable, __file__, "--one", *arguments, "--output", str(output)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": first},
            check=True,
        )
        return json.loads(output.read_text())["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, for a test")
    parser.add_argument("--one", action="store_true", help="one device alone")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument(
        "--output", type=Path, default=harness.RESULTS / "muon_devices_gpu.json"
    )
    options = parser.parse_args()
    passed = ["--samples", str(options.samples)]
    passed += ["--quick"] if options.quick else []
    alone = [] if options.one else in_process_of_one_device(passed)
    decoder = Decoder("d=16", 1, 16, 16, 64) if options.quick else ON_GPU[0]
    cases = [(one_device if options.one else all_devices)(decoder)]
    samples, calls = (3, 1) if options.quick else (options.samples, 20)
    record = harness.run(cases, samples=samples, output=options.output, calls=calls)
    for row in record["rows"] if alone else ():
        share = alone[0]["median_ms"] / jax.device_count()
        row["efficiency"] = share / row["median_ms"]
        print(f"{row['rival']:<12} efficiency {row['efficiency']:.2f}")
    record["rows"][:0] = alone
    harness.write(record, options.output)


if __name__ == "__main__":
    main()
