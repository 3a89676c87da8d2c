"""What `gpu.py` measures of PyTorch, torchao and bitsandbytes, by a Python that has them."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from .rows import Rows, Sizes


def time_torch(run: Callable[[], Any], sizes: Sizes) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    run()
    turns = []
    for _ in range(sizes.turns):
        wait()
        start = time.perf_counter()
        for _ in range(sizes.calls):
            run()
        wait()
        turns.append((time.perf_counter() - start) / sizes.calls)
    return statistics.median(turns)


def torch_rows(rows: Rows, sizes: Sizes) -> None:
    """The same operations as a user of PyTorch writes them, eager and compiled."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(sizes.entries, device=place)
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=place)

    def sign(x):
        return ((x >= 0).view(-1, 8) * powers).sum(1, dtype=torch.uint8)

    def int8(x):
        blocks = x.view(-1, 256)
        scales = blocks.abs().amax(1, keepdim=True) / 127
        return torch.round(blocks / scales).to(torch.int8), scales

    def fp8(x):
        blocks = x.view(-1, 128)
        scales = blocks.abs().amax(1, keepdim=True) / 448
        return (blocks / scales).to(torch.float8_e4m3fn), scales

    def measure(name, run, entry_bytes):
        moved = int(entry_bytes * sizes.entries)
        rows.measure("torch", name, lambda: {"seconds": time_torch(lambda: run(x), sizes), "bytes": moved})

    # With the bytes that each must move for an entry.
    plain = {"copy": (lambda x: x.neg_(), 8), "cast(bfloat16)": (lambda x: x.bfloat16(), 6)}
    plain |= {"sign()": (sign, 4 + 1 / 8), "int8()": (int8, 5 + 4 / 256), "fp8()": (fp8, 5 + 4 / 128)}
    plain |= {"topk of 1 %": (lambda x: torch.topk(x.abs(), sizes.entries // 100), 4)}
    for name, (run, entry_bytes) in plain.items():
        measure(name, run, entry_bytes)
    if place == "cuda":  # on a CPU it would start a C++ compiler
        for name in ("sign()", "int8()", "fp8()"):
            run, entry_bytes = plain[name]
            measure(f"{name}, compiled", torch.compile(run), entry_bytes)
    for shape in sizes.matrices:
        for rank in sizes.ranks:
            name = f"PowerSGD {shape[0]}x{shape[1]}, rank {rank}"
            rows.measure("torch", name, functools.partial(time_torch_power_sgd, shape, rank, place, sizes))
    make = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    rows.measure("torch", "AdamW, fused", functools.partial(time_torch_optimizer, make, 28, place, sizes))


def time_torch_power_sgd(shape: tuple[int, int], rank: int, place: str, sizes: Sizes) -> dict[str, Any]:
    given, error = torch.randn(shape, device=place), torch.zeros(shape, device=place)
    q = torch.randn(shape[1], rank, device=place)

    def step() -> None:
        # As the communication hook does it for one bucket.
        matrix = given + error
        p = torch.linalg.qr(matrix @ torch.linalg.qr(q)[0])[0]
        torch.matmul(matrix.t(), p, out=q)
        torch.sub(matrix, p @ q.t(), out=error)

    return {"seconds": time_torch(step, sizes)}


def time_torch_optimizer(make: Callable[[list], Any], entry_bytes: int, place: str, sizes: Sizes) -> dict[str, Any]:
    params = torch.nn.Parameter(torch.randn(sizes.params, device=place))
    params.grad = 0.01 * params.detach()
    optimizer = make([params])
    return {"seconds": time_torch(optimizer.step, sizes), "bytes": entry_bytes * sizes.params}


def torchao_rows(rows: Rows, sizes: Sizes) -> None:
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    place = "cuda" if torch.cuda.is_available() else "cpu"
    make = functools.partial(AdamW8bit, lr=1e-3)
    rows.measure("torchao", "AdamW8bit", functools.partial(time_torch_optimizer, make, 16, place, sizes))


def bitsandbytes_rows(rows: Rows, sizes: Sizes) -> None:
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

    place = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(sizes.entries, device=place)
    quantize = functools.partial(bnb.functional.quantize_blockwise, x)
    moved = 5 * sizes.entries
    rows.measure("bitsandbytes", "quantize_blockwise", lambda: {"seconds": time_torch(quantize, sizes), "bytes": moved})
    make = functools.partial(bnb.optim.AdamW8bit, lr=1e-3)
    rows.measure("bitsandbytes", "AdamW8bit", functools.partial(time_torch_optimizer, make, 16, place, sizes))


SECTIONS: dict[str, Callable[[Rows, Sizes], None]] = {
    "torch": torch_rows,
    "torchao": torchao_rows,
    "bitsandbytes": bitsandbytes_rows,
}
