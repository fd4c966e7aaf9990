"""What this installation is and what works in it: ``python -m pliax.info``.

The report is for bug reports, so it never fails: what cannot be found out is shown
with the reason, and the exit status is 0. A wrong ``XLA_FLAGS`` or a driver may end the
whole process, so the report is made in a child process. An installation whose JAX
cannot be imported (``JAX_ENABLE_X64=garbage``) fails before the report can begin.
"""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


# None for "works", or the reason why not.
Probe = Callable[[], str | None]

_PACKAGES = ("pliax", "jax", "jaxlib", "numpy", "optax")

_UNFINISHED = "pliax.info could not finish"

# Section by section, so that what XLA cuts short has shown its versions.
_CHILD = "from pliax.info import _sections; [print(s, flush=True) for s in _sections()]"


def report(backends: Mapping[str, Probe] | None = None) -> str:
    """Versions, devices and kernel backends as text.

    Args:
        backends: From the name of a kernel backend to a probe, which returns None
            where the backend works here and the reason where it does not. The
            backends of pliax by default.

    Returns:
        The report. A probe that raises counts as not working, its exception being
        the reason.

    Examples:
        >>> from pliax.info import report
        >>> text = report({"xla": lambda: None, "mosaic_gpu": lambda: "no GPU"})
        >>> print(text[text.index("kernel backends") :])
        kernel backends
          xla         works
          mosaic_gpu  does not work: no GPU
    """
    return "\n".join(_sections(backends)).rstrip("\n")


def main() -> None:
    """Prints the report of a child; whatever happens, the exit status is 0."""
    try:
        text, complaints = _run_child()
    except Exception as error:
        text, complaints = f"{_UNFINISHED}: {_reason(error)}\n", ""
    _write(complaints, sys.stderr)
    _write(text, sys.stdout)


def _run_child() -> tuple[str, str]:
    """The report and what the child wrote to stderr; a reason where it died."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD],
        env=os.environ | {"PYTHONIOENCODING": "utf-8:backslashreplace"},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode == 0:
        return done.stdout, done.stderr
    last = ["no message", *filter(str.strip, done.stderr.splitlines())][-1].strip()
    reason = f"{_UNFINISHED} (exit status {done.returncode}): {last}\n"
    return done.stdout + reason, done.stderr


def _write(text: str, stream: Any) -> None:
    """Prints; a reader that went away, or a full disk, is no failure of the report."""
    if stream is None:  # closed before Python began
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        # The rest of the buffer must go somewhere, or Python exits with status 120.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _sections(backends: Mapping[str, Probe] | None = None) -> Iterator[str]:
    """The report in parts, each closed by an end of line."""
    versions = {name: lambda n=name: _version(n) for name in _PACKAGES}
    python = {"python": platform.python_version, "platform": platform.platform}
    yield _section("versions", versions | python)
    yield _section("devices", {"default": _devices})
    environment = {"": lambda: jax.print_environment_info(return_string=True)}
    yield _section("jax environment", environment)
    probes = _kernel_backends() if backends is None else backends
    statuses = {n: lambda p=p: _status(p) for n, p in probes.items()}
    yield _section("kernel backends", statuses)


def _section(title: str, lines: Mapping[str, Callable[[], object]]) -> str:
    width = max(map(len, lines), default=0)
    rows = [f"{name:{width}}  {_try(value)}".strip() for name, value in lines.items()]
    body = "\n".join(rows or ["none"])
    return "\n".join([title, *(f"  {line}" for line in body.splitlines()), ""])


def _try(value: Callable[[], object]) -> str:
    try:
        return str(value())
    except Exception as error:  # a broken probe is a reason, not a crash
        return f"unavailable: {_reason(error)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    kinds: dict[str, int] = {}
    for device in jax.devices():
        kind = f"{device.platform} ({device.device_kind})"
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _status(probe: Probe) -> str:
    try:
        reason = probe()
    except Exception as error:
        reason = _reason(error)
    return "works" if reason is None else f"does not work: {reason}"


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _kernel_backends() -> Mapping[str, Probe]:
    from pliax.kernels.attention.probing import probes

    return probes()


if __name__ == "__main__":
    main()
