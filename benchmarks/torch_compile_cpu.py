"""torch.compile(dynamic=True) of the GPT in `compile_workloads`, on a CPU.

A worker of `torch_worker`: one JSON line in, one out.

    {"do": "train", "layers": 6, …, "lengths": [16, 700, …]}
        ->  {"seconds": 81.2, "first_s": 40.1, "steps_ms": [...], "compilations": 3}

    python torch_compile_cpu.py FOLDER THREADS
"""

import json
import sys
import time
from typing import Any

import numpy as np


VOCABULARY = 256


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]  # the worker alone has it

    torch.set_num_threads(int(sys.argv[2]))
    for line in sys.stdin:
        question = json.loads(line)
        match question.pop("do"):
            case "versions":
                answer = {"torch": torch.__version__, "numpy": np.__version__}
            case "train":
                answer = _train(torch, **question)
            case unknown:
                raise ValueError(f"torch_compile_cpu: no such question: {unknown!r}")
        print(json.dumps(answer), flush=True)


def _train(
    torch: Any, layers: int, width: int, heads: int, batch: int, lengths: list[int]
) -> dict[str, Any]:
    """Steps of AdamW on batches of these lengths, the first of which compile."""
    model = _model(torch, layers, width, heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)

    @torch.compile(dynamic=True)
    def loss(tokens: Any, targets: Any) -> Any:
        logits = model(tokens).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten())

    steps = []
    rng = np.random.default_rng(0)
    for n in lengths:
        text = torch.from_numpy(rng.integers(0, VOCABULARY, (batch, n + 1)))
        start = time.perf_counter()
        loss(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {
        "seconds": sum(steps),
        "steps_ms": [1e3 * s for s in steps],
        "compilations": graphs,
    }


def _model(torch: Any, layers: int, width: int, heads: int) -> Any:
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-6) for _ in range(2)])
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
            shape = (batch, length, heads, width // heads)
            q, k, v = (y.reshape(shape).transpose(1, 2) for y in parts)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            inside = functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
            return x + self.down(inside)

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, width)
            self.place = nn.Embedding(2048, width)
            self.blocks = nn.ModuleList([Block() for _ in range(layers)])
            self.norm = nn.RMSNorm(width, eps=1e-6)
            self.head = nn.Linear(width, VOCABULARY, bias=False)

        def forward(self, tokens: Any) -> Any:
            places = torch.arange(tokens.shape[1])
            x = self.embed(tokens) + self.place(places)[None]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return GPT()


if __name__ == "__main__":
    main()
