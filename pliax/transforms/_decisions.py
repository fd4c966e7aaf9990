"""What earlier runs found to change, in a file: a new process traces once, not twice.

The file is JSON, in a stable order, to be read and compared by people:

    {"format": "pliax decisions", "version": 1,
     "functions": {"model.step": {
       "calls": {"x: float32[_,_], n: int": {
         "n": {"size": "s0", "seen": {"3": 40, "4": 2}},
         "x.shape[0]": {"size": "s1", "seen": {"8": 42}}}},
       "sizes": {"t": {"128": 42}}}}}

Below a function stand the kinds of its calls; below each, the sizes and Python integers
that changed. Those of one `size` were equal in all calls. `seen` tells how many calls
had each size; `sizes` tells the same of sizes that the user named. Files are merged by
a join (a size is dynamic if either says so, two are equal if both say so, counts are
the larger ones), so that saving twice changes nothing and no order matters.
"""

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from ._arguments import Leaf


_FORMAT, _VERSION = "pliax decisions", 1
_LONGEST = 400  # characters of the name of a kind of call
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Learned:
    """What calls have shown of one size that changes.

    Attributes:
        label: positions of one label had equal sizes in all calls.
        seen: the sizes, and how many calls had each.
        why: how logs speak of it, "read from decisions.json".
    """

    label: str
    seen: Mapping[int, int]
    why: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What is known of one function.

    Attributes:
        calls: by the kind of call and the name of the size.
        sizes: for each named size how many calls had which value.
        path: the file they were read from, or are to be saved to.
    """

    calls: Mapping[str, Mapping[str, Learned]] = _NOTHING
    sizes: Mapping[str, Mapping[int, int]] = _NOTHING
    path: Path | None = None

    def of(self, kind: str) -> Mapping[str, Learned]:
        """What changed in calls of one kind, by the name of the size."""
        why = f"it changed in an earlier run, says {self.path}"
        found = self.calls.get(kind, {})
        return {n: dataclasses.replace(x, why=why) for n, x in found.items()}


def read_decisions(path: Any, function: str, owner: str) -> Decisions:
    """The decisions about a function in a file, or none where there is no file yet.

    Raises:
        TypeError: where the path is not one.
        ValueError: where the file is not a file of decisions, or has another version.
    """
    if path is None:
        return Decisions()
    path = as_path(path, f"{owner}: decisions")
    found = _read(path, owner).get(function, Decisions())
    return dataclasses.replace(found, path=path)


def as_path(path: Any, what: str) -> Path:
    """The path of a file.

    Raises:
        TypeError: where it is none; the message begins by what was given.
    """
    try:
        return Path(path)
    except TypeError:
        raise TypeError(
            f"{what} is {path!r} of type {type(path).__name__}.\n"
            "Pass the path of a file that save_decisions wrote, or will write."
        ) from None


def write_decisions(path: Path, function: str, new: Decisions, owner: str) -> None:
    """Merges decisions about a function into a file.

    The file is replaced at once: a reader finds the old one or the new one, whole.
    """
    functions = _read(path, owner)
    functions[function] = merged(functions.get(function, Decisions()), new)
    text = json.dumps(_as_json(functions), indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# --- merging --------------------------------------------------------------------------


def merged(a: Decisions, b: Decisions) -> Decisions:
    """What both know together."""
    calls = {
        kind: _merged_calls(a.calls.get(kind, {}), b.calls.get(kind, {}))
        for kind in sorted(a.calls.keys() | b.calls.keys())
    }
    sizes = {
        name: _larger(a.sizes.get(name, {}), b.sizes.get(name, {}))
        for name in sorted(a.sizes.keys() | b.sizes.keys())
    }
    return Decisions(calls, sizes)


def _merged_calls(
    a: Mapping[str, Learned], b: Mapping[str, Learned]
) -> dict[str, Learned]:
    """Sizes stay together where each side that knows them says so."""
    labels: dict[Any, str] = {}
    found: dict[str, Learned] = {}
    for name in sorted(a.keys() | b.keys()):
        both = [side.get(name) for side in (a, b)]
        key = tuple(x and x.label for x in both)
        label = labels.setdefault(key, f"s{len(labels)}")
        found[name] = Learned(label, _larger(*(x.seen if x else {} for x in both)))
    return found


def _larger(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    """The larger count of each size, in ascending order of sizes."""
    return {n: max(a.get(n, 0), b.get(n, 0)) for n in sorted(a.keys() | b.keys())}


# --- the file -------------------------------------------------------------------------


def _as_json(functions: Mapping[str, Decisions]) -> dict[str, Any]:
    written = {
        name: {
            "calls": {
                kind: {
                    size: {"size": x.label, "seen": _as_text(x.seen)}
                    for size, x in learned.items()
                }
                for kind, learned in found.calls.items()
            },
            "sizes": {size: _as_text(seen) for size, seen in found.sizes.items()},
        }
        for name, found in sorted(functions.items())
    }
    return {"format": _FORMAT, "version": _VERSION, "functions": written}


def _as_text(seen: Mapping[int, int]) -> dict[str, int]:
    return {str(size): count for size, count in seen.items()}


def _read(path: Path, owner: str) -> dict[str, Decisions]:
    """All functions in a file; none where there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(
            f"{owner}: decisions cannot be read from {path}: {error.strerror}.\n"
            "Name a file that may be read and written."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(_refusal(owner, path, f"it is not JSON ({error})")) from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(_refusal(owner, path, "it is not a file of decisions"))
    if found.get("version") != _VERSION:
        why = f"its version is {found.get('version')!r}, and {_VERSION} is read here"
        raise ValueError(_refusal(owner, path, why))
    try:
        return {name: _function(x) for name, x in found["functions"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"an entry is malformed ({type(error).__name__}: {error})"
        raise ValueError(_refusal(owner, path, why)) from None


def _refusal(owner: str, path: Path, why: str) -> str:
    return (
        f"{owner}: decisions cannot be read from {path}: {why}.\n"
        "Delete the file, which is then written anew, or name another one."
    )


def _function(found: Mapping[str, Any]) -> Decisions:
    calls = {
        kind: {
            n: Learned(_label(x["size"]), _seen(x["seen"])) for n, x in sizes.items()
        }
        for kind, sizes in found["calls"].items()
    }
    return Decisions(calls, {name: _seen(x) for name, x in found["sizes"].items()})


def _label(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"size is {text!r}")
    return text


def _seen(counts: Mapping[str, Any]) -> dict[int, int]:
    for count in counts.values():
        if type(count) is not int or count < 0:
            raise ValueError(f"a count is {count!r}")
    return {int(size): count for size, count in counts.items()}


# --- names ----------------------------------------------------------------------------


def function_name(f: Any) -> str:
    """The name of a function in a file, "model.step"."""
    return f"{f.__module__}.{f.__qualname__}"


def kind_text(leaves: Iterable[Leaf], statics: Mapping[str, Any]) -> str:
    """The kind of a call in words: the types of its arguments without their sizes."""
    parts = [f"{leaf.name}: {_type_text(leaf.value)}" for leaf in leaves]
    parts += [f"{name}={_static_text(x.value)}" for name, x in sorted(statics.items())]
    text = ", ".join(parts)
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{text[:_LONGEST]}… ({len(parts)} arguments, {digest})"


def _type_text(value: Any) -> str:
    if isinstance(value, bool | int | float | complex):
        return type(value).__name__
    aval: Any = jax.typeof(value)
    if not hasattr(aval, "shape"):
        return str(aval)
    axes = ",".join("_" * len(aval.shape))
    return f"{'weak ' if aval.weak_type else ''}{aval.dtype}[{axes}]"


def _static_text(value: Any) -> str:
    """A static value as it prints, without addresses that differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
