"""A Python that has torch, as a rival's process: the benchmark's end of a pipe.

A worker is a script that answers one JSON line with another and shares a folder with
the benchmark. It is asked for one thing at a time, so that rivals take turns; times are
taken beside the call and hold no part of the pipe.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


TORCH = "2.13.0"


@dataclass(frozen=True)
class Torch:
    """A running worker and the folder that it shares with the benchmark."""

    process: Any
    folder: Path

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send one question and wait for its answer."""
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"torch: asked for {question}, found that its process ended with "
                f"status {self.process.wait()}.\nIts last words stand above."
            )
        return json.loads(answer)

    def save(self, **arrays: np.ndarray) -> None:
        """Lay arrays into the folder, for the next `prepare`."""
        for name, array in arrays.items():
            np.save(self.folder / f"{name}.npy", array)

    def close(self) -> None:
        """End of input ends the worker."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def start(python: Path, script: Any, folder: Path) -> Torch:
    """Start a worker on all cores; compiled code stays in `folder`, none is reused."""
    command = [python, script, folder, os.cpu_count()]
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
    )
    return Torch(process, folder)


def install() -> Path:
    """A Python with this torch, made once in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    environment = cache / "pliax" / f"torch-{TORCH}"
    python, done = environment / "bin" / "python", environment / "complete"
    if done.exists():
        return python
    if shutil.which("python3.11") is None:
        raise RuntimeError(
            f"torch {TORCH}: its CPU build was asked for, found no python3.11 to "
            "install it on.\nInstall one, name another with --torch-python PATH, or "
            "leave this rival out with --without-torch."
        )
    subprocess.run(["python3.11", "-m", "venv", str(environment)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={TORCH}", "numpy"], check=True)
    done.touch()
    return python


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which Python has torch, or none."""
    parser.add_argument("--torch-python", type=Path, help="a Python that has torch")
    parser.add_argument("--without-torch", action="store_true")


def command() -> str:
    """The command, without where this machine keeps its torch."""
    words = [Path(sys.executable).name, *sys.argv]
    for i, word in enumerate(words):
        if word == "--torch-python":
            words[i + 1] = "PATH"
        elif word.startswith("--torch-python="):
            words[i] = "--torch-python=PATH"
    return " ".join(words)


@contextlib.contextmanager
def running(options: argparse.Namespace, script: Any) -> Iterator[Torch | None]:
    """A torch that waits for questions, or None."""
    if options.without_torch:
        yield None
        return
    python = options.torch_python or install()
    with tempfile.TemporaryDirectory() as folder:
        worker = start(python, script, Path(folder))
        try:
            yield worker
        finally:
            worker.close()
