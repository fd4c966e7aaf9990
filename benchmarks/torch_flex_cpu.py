"""torch.compile(flex_attention) on a CPU: the worker of `torch_worker`.

Run as a script by a Python that has torch, it answers one JSON line with another:

    {"do": "prepare", "program": "causal"}  ->  {"compile_s": 9.1, "output": "out.npy"}
    {"do": "sample"}                        ->  {"ms": 41.7}

The arrays lie as .npy files in one folder: q, k, v in torch's own layout (B, H, S, D),
the document ids and the slopes of ALiBi.

    python torch_flex_cpu.py FOLDER THREADS
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


CAP = 20.0


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]  # the worker alone has it

    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    call = None
    for line in sys.stdin:
        question = json.loads(line)
        match question.pop("do"):
            case "versions":
                answer = {"torch": torch.__version__, "numpy": np.__version__}
            case "prepare":
                call, answer = _prepare(torch, folder, **question)
            case "sample":
                answer = {"ms": 1e3 * _time(call)}
            case unknown:
                raise ValueError(f"torch_flex_cpu: no such question: {unknown!r}")
        print(json.dumps(answer), flush=True)


def _prepare(torch: Any, folder: Path, program: str) -> Any:
    """Compile one program for the arrays in the folder, warm it up, save its output."""
    from torch.nn.attention import (  # pyright: ignore[reportMissingImports]
        flex_attention as flex,
    )

    torch._dynamo.reset()
    names = ("q", "k", "v", "ids", "slopes")
    q, k, v, ids, slopes = (
        torch.from_numpy(np.load(folder / f"{name}.npy")) for name in names
    )
    score_mod, mask_mod = _mods(torch, ids, slopes)[program]
    block_mask = None
    if mask_mod is not None:
        length = q.shape[2]
        block_mask = flex.create_block_mask(
            mask_mod, None, None, length, length, device="cpu"
        )
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def call() -> Any:
        return compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)

    first, second = _time(call), _time(call)
    np.save(folder / "out.npy", call().numpy())
    return call, {"compile_s": first - second, "output": "out.npy"}


def _mods(torch: Any, ids: Any, slopes: Any) -> dict[str, tuple[Any, Any]]:
    """score_mod and mask_mod of every program, under the benchmark's names."""

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (ids[q] == ids[k]) & (q >= k)

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (k - q)

    def soft_cap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    return {
        "dense": (None, None),
        "causal": (None, causal),
        "documents": (None, documents),
        "alibi": (alibi, causal),
        "soft cap": (soft_cap, causal),
    }


def _time(call: Any) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
