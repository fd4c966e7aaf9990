"""How much of two inventories of functions is padded, and that nothing is wrong.

    uv run --group bench benchmarks/coverage.py own [OPTIONS]
    uv run --group bench benchmarks/coverage.py jax --checkout PATH [OPTIONS]
    OPTIONS: --jobs 2 (processes), or --part 0/8 (every eighth program)

Each function is traced once for all sizes and run in a bucket at several of them, with
two kinds of poison in the padding, and compared with plain JAX (by what the test suite
uses, `tests/transforms/padding/outcomes.py`). What is not padded is named with its
line, and called under `px.compile`. Parts of a run at one commit join in one file.
"""

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from benchmarks import harness


sys.path.insert(0, str(harness.ROOT / "tests"))  # the machinery is that of the tests

from transforms.padding.outcomes import MISTAKES, PADDED, examine
from transforms.programs import inventory, jax_inventory, subjects


CACHED = 40  # programs after which compiled ones are forgotten, to bound memory


def own(part: slice) -> list[Any]:
    """The subjects of our inventory, of which none is left out."""
    return [subjects.subject_of(program) for program in inventory()[part]]


def of_jax(part: slice, checkout: Path) -> tuple[list[Any], list[dict[str, str]]]:
    """JAX's inventory: the subjects, and what is left out, with reasons."""
    chosen, excluded = [], []
    for found in jax_inventory.harnesses(checkout)[part]:
        reason = jax_inventory.exclusion(found)
        if reason:
            excluded.append({"name": found.fullname, "reason": reason})
        else:
            chosen.append(jax_inventory.subject_of(found))
    return chosen, excluded


def measure(chosen: Iterable[Any]) -> list[dict[str, Any]]:
    """One row for each subject."""
    rows = []
    for i, subject in enumerate(chosen):
        outcome = examine(subject, serve=True)
        row = {**dataclasses.asdict(outcome), "place": without_text(outcome.place)}
        rows.append(row)
        if outcome.kind != PADDED:
            print(f"{outcome.kind:>12} {outcome.name}: {outcome.reason[:120]!r}")
        if i % CACHED == 0:
            jax.clear_caches()
    return rows


def in_processes(options: argparse.Namespace) -> tuple[list, list]:
    """Rows and exclusions of as many parts of an inventory, each by its own process."""
    jobs = options.jobs
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{i}.json") for i in range(jobs)]
        command = [sys.executable, __file__, options.inventory]
        if options.inventory == "jax":
            command.append(f"--checkout={options.checkout}")
        processes = [
            subprocess.Popen([*command, f"--part={i}/{jobs}", f"--output={output}"])
            for i, output in enumerate(outputs)
        ]
        failed = [p.args for p in processes if p.wait() != 0]
        if failed:
            raise RuntimeError(f"{len(failed)} of {jobs} processes failed: {failed}")
        parts = [json.loads(output.read_text()) for output in outputs]
    rows = [row for part in parts for row in part["rows"]]
    return rows, [row for part in parts for row in part["excluded"]]


def without_text(place: str) -> str:
    """File and line, from the folder that the file is known by; no text of it."""
    line, _, _ = place.partition(" in ")
    for folder in ("/tests/", "/site-packages/"):
        _, found, after = line.rpartition(folder)
        if found:
            return f"{folder[1:]}{after}" if folder == "/tests/" else after
    return line


def record(
    output: Path, part: str, source: dict[str, str], rows: list, excluded: list
) -> dict[str, Any]:
    """What was measured, with other parts that the file has of the same commit."""
    environment = harness.environment_record()
    before = json.loads(output.read_text()) if output.exists() else {}
    same = before.get("commit") == environment["commit"]
    same = same and before.get("source") == source
    parts = {*(before["parts"] if same else ()), part}
    new = {row["name"] for row in (*rows, *excluded)}
    for kept, known in ((rows, "rows"), (excluded, "excluded")):
        kept += [r for r in before[known] if r["name"] not in new] if same else []
    return {
        **environment,
        "source": source,
        "parts": sorted(parts),
        **summary(rows),
        "excluded": sorted(excluded, key=lambda row: row["name"]),
        "rows": sorted(rows, key=lambda row: row["name"]),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many of each kind, and what the bars are about."""
    counts = collections.Counter(row["kind"] for row in rows)
    rest = [row for row in rows if row["kind"] not in (PADDED, *MISTAKES)]
    return {
        "programs": len(rows),
        "counts": dict(counts),
        "padded": counts[PADDED] / max(len(rows), 1),
        "mistakes": sum(counts[kind] for kind in MISTAKES),
        "without_line": [row["name"] for row in rest if not row["place"]],
        "not_served": [row["name"] for row in rest if not row["served"]],
    }


def described(checkout: Path, known: str) -> dict[str, str]:
    """Which file was read: as it is known, or its tag from git, and its digest."""
    path = checkout / "tests" / "shape_poly_test.py"
    asked = ["git", "-C", str(checkout), "describe", "--tags", "--always"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "file": "tests/shape_poly_test.py",
        "pinned": jax_inventory.TAG,
        "found": known or answer.stdout.strip() or "not a git checkout",
        "sha256": digest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inventory", choices=("own", "jax"))
    parser.add_argument("--part", default="0/1", help="I/N: every N-th program, from I")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--checkout", type=Path, default=jax_inventory.checkout())
    parser.add_argument("--known-as", default="", help="what a file without git is")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.jobs > 1 and options.part != "0/1":
        parser.error("--jobs is for a whole inventory, --part for a part of it")
    if options.inventory == "jax" and options.checkout is None:
        parser.error(f"--checkout, or {jax_inventory.VARIABLE}, names a clone of JAX")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    start, step = map(int, options.part.split("/"))
    part = slice(start, None, step)
    if options.inventory == "own":
        source = {"file": "tests/transforms/programs"}
    else:
        source = described(options.checkout, options.known_as)
    default = harness.RESULTS / f"coverage_{options.inventory}.json"
    output = options.output or default
    if options.jobs > 1:
        rows, excluded = in_processes(options)
    elif options.inventory == "own":
        rows, excluded = measure(own(part)), []
    else:
        chosen, excluded = of_jax(part, options.checkout)
        rows = measure(chosen)
    found = record(output, options.part, source, rows, excluded)
    output.write_text(json.dumps(found, indent=1) + "\n")
    print({k: found[k] for k in ("programs", "counts", "padded", "mistakes")})
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
