"""What this installation is and what works in it: ``python -m pliax.info``.

The report is for bug reports, so it never fails: what cannot be found out is shown
with the reason, and the exit status is 0.
"""

import importlib.metadata
import platform
from collections.abc import Callable, Mapping

import jax


# None for "works", or the reason why not.
Probe = Callable[[], str | None]

_PACKAGES = ("pliax", "jax", "jaxlib", "numpy", "optax")


def report(backends: Mapping[str, Probe] | None = None) -> str:
    """Versions, devices and kernel backends as text.

    Args:
        backends: From the name of a kernel backend to a probe, which returns None
            where the backend works here and the reason where it does not. The
            backends of pliax by default.

    Returns:
        The report. A probe that raises counts as not working, its exception being
        the reason.

    Example:
        >>> from pliax.info import report
        >>> text = report({"xla": lambda: None, "mosaic_gpu": lambda: "no GPU"})
        >>> print(text[text.index("kernel backends") :])
        kernel backends
          xla         works
          mosaic_gpu  does not work: no GPU
    """
    probes = _kernel_backends() if backends is None else backends
    sections = {
        "versions": {name: lambda n=name: _version(n) for name in _PACKAGES}
        | {"python": platform.python_version, "platform": platform.platform},
        "devices": {"default": _devices},
        "jax environment": {"": lambda: jax.print_environment_info(return_string=True)},
        "kernel backends": {n: lambda p=p: _status(p) for n, p in probes.items()},
    }
    return "\n\n".join(_section(name, lines) for name, lines in sections.items())


def main() -> None:
    """Prints the report; whatever happens, the process ends with status 0."""
    try:
        print(report())
    except Exception as error:
        print(f"pliax.info could not finish: {_reason(error)}")


def _section(title: str, lines: Mapping[str, Callable[[], object]]) -> str:
    width = max(map(len, lines), default=0)
    rows = [f"{name:{width}}  {_try(value)}".strip() for name, value in lines.items()]
    body = "\n".join(rows or ["none"])
    return "\n".join([title, *(f"  {line}" for line in body.splitlines())])


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
