"""Run rivals of one meaning side by side and write everything seen to one JSON file.

A `Case` names arguments, an oracle in float64 and the `Rival`s that compute it. All
rivals of a case are compiled first and then take turns sample by sample, so that a
busy neighbour slows every one of them. A speed without an error is not a result:
each row carries the rival's largest and mean error against the oracle.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax as px


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "optax")
RIVALS = ("torch",)  # where they are installed
MIB = 2**20


def prepare_interpreter() -> None:
    """Before JAX starts: lets interpreted kernels run that wait for each other.

    They wait in XLA's threads, one a core otherwise, and run computations of their own,
    of which XLA lets 32 be in flight on a device: dispatched asynchronously, what comes
    after a kernel takes these places and waits for it, and it waits for a place.
    """
    os.environ.setdefault("PJRT_NPROC", "16")
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@dataclass(frozen=True)
class Rival:
    """One implementation: a function that can be jitted, and its arguments.

    ``outcome`` picks from its result what the oracle predicts. What takes less time
    than starting a program is run several ``times`` by one, whose memory is then told.
    The last ``donated`` arguments are given up to the call, and its result, a tuple of
    as many, takes their places in the next, as in a training loop.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    outcome: Callable[[Any], Any] = lambda result: result
    times: int = 1
    donated: int = 0


@dataclass(frozen=True)
class Foreign:
    """Another library's implementation, which is prepared and waited for its own way.

    Attributes:
        name: Of the rival.
        start: Starts a call.
        wait: Until all calls are done.
        outcome: Of the result of a call, what the oracle predicts; it is not timed.
    """

    name: str
    start: Callable[[], Any]
    wait: Callable[[], None]
    outcome: Callable[[Any], Any] = lambda result: result


@dataclass(frozen=True)
class Case:
    """One question: sizes for the record, a float64 oracle, and who answers.

    What `foreign` gives is made when it is the case's turn. Where it `is_repeated` each
    row says whether another call gives the same bits.
    """

    name: str
    oracle: Callable[[], Any]
    rivals: tuple[Rival, ...]
    sizes: dict[str, int] = field(default_factory=dict)
    foreign: Callable[[], Iterable[Foreign]] = tuple
    is_repeated: bool = False


# An instruction of the compiled program, or its start where it is asynchronous.
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|collective-permute|collective-broadcast"
    r"|all-to-all|ragged-all-to-all)"
    r"(?:-start)?\("
)


@dataclass(frozen=True)
class _Entry:
    """A compiled rival, with what compiling it cost."""

    rival: Rival
    arguments: list[Any]  # those donated are replaced by results
    compiled: Any
    trace_s: float
    compile_s: float

    def call(self) -> Any:
        """Its result, which may be what the next call is given."""
        result = self.compiled(*self.arguments)
        if self.rival.donated:
            self.arguments[-self.rival.donated :] = result
        return result

    def sample(self, calls: int = 1) -> float:
        """Milliseconds of one call, of several that are queued."""
        start = time.perf_counter()
        for _ in range(calls):
            result = self.call()
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start) / calls / self.rival.times

    def outcome(self) -> Any:
        """What the oracle predicts of the first call."""
        result = self.call()
        picked = self.rival.outcome(result[0] if self.rival.times > 1 else result)
        return jax.device_get(picked)  # before it is donated

    def record(self) -> dict[str, Any]:
        """What the compiler says of the program."""
        memory, program = self.compiled.memory_analysis(), self.compiled.as_text()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        peak = held + memory.temp_size_in_bytes - memory.alias_size_in_bytes
        return {
            "peak_memory_mib": peak / MIB,
            "temporary_memory_mib": memory.temp_size_in_bytes / MIB,
            "trace_s": self.trace_s,
            "compile_s": self.compile_s,
            "hlo_instructions": program.count(" = "),
            "hlo_bytes": len(program),
            "collectives": dict(Counter(_COLLECTIVE.findall(program))),
            **self.kernels(),
        }

    def kernels(self) -> dict[str, Any]:
        """What a run is made of on a GPU: launches and milliseconds by kernel."""
        if jax.default_backend() != "gpu" or self.rival.donated:
            return {}
        from jax.experimental.mosaic.gpu import profiler

        measured = profiler.measure(self.compiled, aggregate=False)
        try:
            runs = [measured(*self.arguments)[1] or [] for _ in range(_PROFILED)]
        except RuntimeError as error:  # CUPTI serves one user at a time
            return {"kernels": f"not measured: {error}"}
        runs.sort(key=lambda timings: sum(ms for _, ms in timings))
        return kernel_summary(runs[_PROFILED // 2], self.rival.times)


@dataclass(frozen=True)
class _ForeignEntry:
    """Another library's implementation, beside compiled ones."""

    rival: Foreign

    def sample(self, calls: int = 1) -> float:
        """Milliseconds of one call, of several that are queued."""
        start = time.perf_counter()
        for _ in range(calls):
            self.rival.start()
        self.rival.wait()
        return 1e3 * (time.perf_counter() - start) / calls

    def outcome(self) -> Any:
        """What the oracle predicts of the first call."""
        return self.rival.outcome(self.rival.start())

    def record(self) -> dict[str, Any]:
        """Nothing: no compiler is asked."""
        return {}


def run(
    cases: Iterable[Case],
    *,
    samples: int,
    output: Path,
    calls: int = 1,
    key: Callable[[dict[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Measure every case, write the record to ``output`` and return it.

    Args:
        cases: What is measured; one whose arrays are large is made when it is its turn.
        samples: Of each rival, which take turns; of slow ones fewer, in 20 s.
        output: The JSON file.
        calls: Of a sample at most, queued one after another: several on a GPU, which a
            training loop keeps busy while Python starts the next.
        key: What a row is about, if a run may be a part of what the file has: `merged`.
    """
    rows: list[dict[str, Any]] = []
    started = environment_record()
    record = {**started, "is_complete": False, "rows": rows}
    for case in cases:
        rows += _measure(case, samples, calls)
        if key is not None:
            record |= merged(output, started, rows, key)
        write(record, output)
    record["is_complete"] = True
    write(record, output)
    print(f"wrote {output}")
    return record


def write(record: dict[str, Any], output: Path) -> None:
    """As JSON; a stop in between leaves the older file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = output.with_suffix(".tmp")
    fresh.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(fresh, output)


def _measure(case: Case, samples: int, calls: int) -> list[dict[str, Any]]:
    golden = case.oracle()
    entries: list[Any] = [compile_rival(rival) for rival in case.rivals]
    entries += [_ForeignEntry(rival) for rival in case.foreign()]
    errors = [entry_errors(entry, golden) for entry in entries]  # and a warm-up
    notes = [same_bits(x) if case.is_repeated else {} for x in entries]
    queues = [_queue(entry, calls) for entry in entries]
    times: list[list[float]] = [[] for _ in entries]
    for _ in range(samples):
        for entry, n, mine in zip(entries, queues, times, strict=True):
            if sum(mine) * n * getattr(entry.rival, "times", 1) < _MOST_OF_A_RIVAL_MS:
                mine.append(entry.sample(n))
    rows = [
        table_row(case, entry, error, mine) | note
        for entry, error, mine, note in zip(entries, errors, times, notes, strict=True)
    ]
    for row in rows:
        _report(row)
    return rows


_PROFILED = 5  # runs, of which the median counts: one alone was 5 percent off


def kernel_summary(timings: list[tuple[str, float]], times: int) -> dict[str, Any]:
    """Launches and milliseconds of one of so many calls, longest first.

    Names are without the numbers that tell a program's fusions apart. Copies that are
    no kernels are not among them.
    """
    found: dict[str, list[float]] = {}
    for kernel, ms in timings:
        entry = found.setdefault(kernel.rstrip("0123456789_"), [0.0, 0.0])
        entry[0] += 1 / times
        entry[1] += ms / times
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    total = sum(ms for _, ms in timings) / times
    return {"kernels_ms": total, "kernels": dict(ordered)}


_LONG_ENOUGH_MS = 400  # for a sample: a queue of slow calls gains nothing
_MOST_OF_A_RIVAL_MS = 20_000  # of all samples: one rival kept a GPU for 26 minutes


def _queue(entry: Any, calls: int) -> int:
    """How many calls a sample has."""
    if calls == 1:
        return 1
    return min(calls, max(1, round(_LONG_ENOUGH_MS / entry.sample())))


def compile_rival(rival: Rival) -> _Entry:
    """Trace and compile, timed apart."""
    start = time.perf_counter()
    function, arguments = _repeated(rival)
    kept = len(arguments) - rival.donated
    arguments = [*arguments[:kept], *jax.tree.map(jnp.copy, arguments[kept:])]
    donated = tuple(range(kept, len(arguments)))
    lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile()
    seconds = traced - start, time.perf_counter() - traced
    return _Entry(rival, arguments, compiled, *seconds)


COPIES = 8  # of arguments, or XLA would compute once what is asked for several times


def _repeated(rival: Rival) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The rival's function so many times, one after another, and its arguments."""
    if rival.times == 1:
        return rival.function, rival.arguments
    turns, rest = divmod(rival.times, COPIES)
    if rest:
        raise ValueError(f"times must be a multiple of {COPIES}, found {rival.times}")

    def turn(copies: Any) -> Any:
        results = []
        for arguments in copies:
            one = rival.function(*arguments)
            copies, one = jax.lax.optimization_barrier((copies, one))
            results.append(one)
        return copies, results

    def many(*copies: Any) -> Any:
        _, shapes = jax.eval_shape(turn, copies)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        carry = copies, blank
        _, results = jax.lax.fori_loop(0, turns, lambda _, x: turn(x[0]), carry)
        return results  # all of them, or XLA would not compute the others

    copies = [jax.tree.map(jnp.copy, rival.arguments) for _ in range(COPIES)]
    return many, tuple(copies)


def entry_errors(entry: _Entry | _ForeignEntry, golden: Any) -> tuple[float, float]:
    """The largest and the mean absolute error over all leaves."""
    pairs = zip(jax.tree.leaves(entry.outcome()), jax.tree.leaves(golden), strict=True)
    gaps = [np.abs(np.asarray(a, np.float64) - b).ravel() for a, b in pairs]
    return float(max(g.max() for g in gaps)), float(np.concatenate(gaps).mean())


def same_bits(entry: _Entry | _ForeignEntry) -> dict[str, bool]:
    """Whether two calls give the same."""
    first, second = (jax.tree.leaves(entry.outcome()) for _ in range(2))
    pairs = zip(first, second, strict=True)
    return {"same_bits": all(np.array_equal(*x, equal_nan=True) for x in pairs)}


def table_row(
    case: Case,
    entry: _Entry | _ForeignEntry,
    errors: tuple[float, float],
    times: Sequence[float],
) -> dict[str, Any]:
    """One rival of one case, as the JSON holds it."""
    return {
        "case": case.name,
        **case.sizes,
        "rival": entry.rival.name,
        "median_ms": float(np.median(times)),
        "samples_ms": list(times),
        "max_error": errors[0],
        "mean_error": errors[1],
        **entry.record(),
    }


def _report(row: dict[str, Any]) -> None:
    parts = {
        "temporary_memory_mib": "temporary {:7.1f} MiB",
        "compile_s": "compile {:5.2f} s",
        "hlo_instructions": "{} HLO",
        "kernels_ms": "kernels {:.3f} ms",
        "same_bits": "same bits {}",
    }
    print(
        f"{row['case']:>24} {row['rival']:<30} {row['median_ms']:9.3f} ms  "
        f"error {row['max_error']:.1e}",
        *(text.format(row[name]) for name, text in parts.items() if name in row),
        sep="  ",
        flush=True,
    )


def environment_record() -> dict[str, Any]:
    """Where the numbers come from."""
    device = jax.devices()[0]
    return {
        "commit": _git("rev-parse", "HEAD") or "none",
        "dirty": bool(_git("status", "--porcelain", *_BUT_RESULTS)),
        "tree": _tree(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "pliax": px.__version__,
            **{name: version(name) for name in PACKAGES},
            **{name: version(name) for name in RIVALS if find_spec(name)},
        },
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpu": _cpu(),
        },
        "settings": {k: v for k, v in os.environ.items() if k.startswith(_SETTINGS)},
    }


_SETTINGS = ("JAX_", "XLA_")
_BUT_RESULTS = "--", ".", ":(exclude)benchmarks/results"  # which a run writes itself


def _tree() -> str:
    """Git's name of the files as they are, also in a copy whose commit is older.

    With the results of that commit, whatever a run has written there.
    """
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": f"{folder}/index"}
        _git("read-tree", "HEAD", **index)
        _git("add", "--all", *_BUT_RESULTS, **index)
        return _git("write-tree", **index) or "none"


def merged(
    output: Path,
    record: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    key: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    """The record of a run, with what a file has of the same tree and device.

    Args:
        output: The file, which need not be there.
        record: Where the rows come from; `parts` will name all runs that have some.
        rows: In the place of those that `key` cannot tell from them.
        key: What a row is about.
    """
    part = {name: record[name] for name in ("command", "date", "settings")}
    old = json.loads(output.read_text()) if output.exists() else {}
    if any(old.get(name) != record[name] for name in ("tree", "device")):
        return {**record, "parts": [part], "rows": list(rows)}
    new = {key(row) for row in rows}
    kept = [row for row in old["rows"] if key(row) not in new]
    parts = [x for x in old.get("parts", []) if x != part]
    return {**record, "parts": [*parts, part], "rows": [*kept, *rows]}


def _git(*arguments: str, **variables: str) -> str:
    """Git's answer, or nothing where there is no git, repository or commit."""
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=ROOT,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu() -> str:
    """The processor's name and how many of its cores this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"
