"""The command line: a dataclass, the range of each option, one-line errors."""

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .errors import UserError


def option(default: Any, text: str, low: Any = None, high: Any = None) -> Any:
    """A field of Options: its default, its help, and the range it must lie in."""
    return field(default=default, metadata={"help": text, "range": (low, high)})


@dataclass(frozen=True)
class Options:
    """What the command line sets."""

    data: Path | None = option(None, "folder of text files (default: Python's library)")
    glob: str = option("*.py", "which files of the folder")
    out: Path = option(Path("out"), "where results go")
    resume: bool = option(False, "continue from the newest checkpoint in --out")
    steps: int = option(220, "training steps; they set the schedule", 1, 10**7)
    seed: int = option(0, "seed of everything random", 0, 2**63 - 1)
    devices: int = option(0, "how many (0: all local; simulated on a CPU)", 0, 1024)
    rows: int = option(8, "rows of a batch, a multiple of the devices", 1, 4096)
    layers: int = option(4, "transformer blocks", 1, 256)
    width: int = option(128, "channels of the residual stream", 2, 16384)
    heads: int = option(4, "query heads", 1, 1024)
    kv_heads: int = option(2, "key and value heads", 1, 1024)
    dropout: float = option(0.02, "share dropped after a block", 0.0, 0.99)
    dtype: str = option("float32", "of the layers' arithmetic; or bfloat16")
    learning_rate: float = option(0.01, "peak, of Muon and AdamW", 0.0, 10.0)
    warmup: int = option(20, "steps until the peak", 0, 10**7)
    clip: float = option(1.0, "largest global norm of the gradients", 1e-6, 1e6)
    evaluate_every: int = option(50, "steps between validations", 1, 10**7)
    checkpoint_every: int = option(50, "steps between checkpoints", 1, 10**7)
    held_out_bytes: int = option(300_000, "bytes of the final validation", 1, 10**9)
    sample_bytes: int = option(300, "bytes of generated text", 0, 10**6)
    temperature: float = option(0.8, "of the generated text", 1e-3, 1e3)

    @property
    def decisive(self) -> dict[str, Any]:
        """The options a resumed run must share: those that change its numbers."""
        values = dataclasses.asdict(self)
        return {name: v for name, v in values.items() if name not in _FREE}


# Where files lie and what is done after training; the documents themselves and the
# devices in use are compared by what they are.
_FREE = frozenset(
    {
        "data", "glob", "out", "resume", "devices",
        "sample_bytes", "temperature", "checkpoint_every",
    }
)  # fmt: skip


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage block before an error."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing."""
        raise UserError(f"{message}; see --help")


def parse(arguments: Sequence[str] | None, description: str | None) -> Options:
    """Options from the command line.

    Raises:
        UserError: On an unknown option or a value out of range.
    """
    parser = OneLineParser(
        prog="train_lm",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for item in dataclasses.fields(Options):
        text = f"{item.metadata['help']} [{item.default}]"
        if item.type is bool:
            parser.add_argument(_flag(item.name), action="store_true", help=text)
        else:
            kind = Path if item.name in ("data", "out") else type(item.default)
            parser.add_argument(
                _flag(item.name), type=kind, default=item.default, help=text
            )
    options = Options(**vars(parser.parse_args(arguments)))
    _check(options)
    return options


def _check(options: Options) -> None:
    """Refuse values that cannot work, naming the option and its range."""
    for item in dataclasses.fields(Options):
        value, (low, high) = getattr(options, item.name), item.metadata["range"]
        inside = low is None or (math.isfinite(value) and low <= value <= high)
        if not inside:
            raise UserError(f"{_flag(item.name)} {value} must be in [{low}, {high}]")
    if options.dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {options.dtype} must be float32 or bfloat16")
    if options.width % (2 * options.heads):
        raise UserError(
            f"--width {options.width} must be a multiple of 2 x --heads {options.heads}"
        )
    if options.heads % options.kv_heads:
        raise UserError(
            f"--heads {options.heads} must be a multiple of --kv-heads"
            f" {options.kv_heads}"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
