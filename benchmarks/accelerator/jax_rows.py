"""What `gpu.py` measures of jaxdist and JAX."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd
from jaxdist import analysis, offload
from jaxdist import compressors as jc
from jaxdist._cli import planning
from jaxdist._cli.models.base import TrainingMethod
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import train
from jaxdist.analysis import cost
from jaxdist.compressors.one_pass import run_in_kernel

from .rows import Rows, Sizes

# What calls a kernel of Pallas in a program for NVIDIA GPUs.
KERNEL = "__gpu$xla.gpu.triton"


def time_jax(run: Callable[[], Any], sizes: Sizes) -> float:
    """Seconds of a call: the median of turns, each of several calls in a row, which hide the time to dispatch."""
    # Twice: a first state is not committed to its device, and the program is compiled again for one that is.
    for _ in range(2):
        jax.block_until_ready(run())
    turns = []
    for _ in range(sizes.turns):
        start = time.perf_counter()
        for _ in range(sizes.calls):
            out = run()
        jax.block_until_ready(out)
        turns.append((time.perf_counter() - start) / sizes.calls)
    return statistics.median(turns)


def stateful(update: Callable[[Any], Any], state: Any) -> Callable[[], Any]:
    """A call without arguments of a function that donates its state and returns the next one."""

    def run() -> Any:
        nonlocal state
        state = update(state)
        return state

    return run


def array(size: int | tuple[int, ...]) -> Any:
    return jax.random.normal(jax.random.key(0), (size,) if isinstance(size, int) else size)


def copy_rows(rows: Rows, sizes: Sizes) -> None:
    run = stateful(jax.jit(lambda x: -x, donate_argnums=0), array(sizes.entries))
    rows.measure("copy", "-x in place", lambda: {"seconds": time_jax(run, sizes), "bytes": 8 * sizes.entries})


def rate_rows(rows: Rows, sizes: Sizes) -> None:
    """What the cost model of `jaxdist plan` takes as known: products of square matrices, and launches of kernels."""
    for dtype in (jnp.float32, jnp.bfloat16):
        for n in sizes.products:
            name = f"product of {n} x {n}, {jnp.dtype(dtype).name}"
            rows.measure("rates", name, functools.partial(time_product, n, dtype, sizes))
    rows.measure("rates", "a small kernel of a program", functools.partial(time_kernels, sizes))


def time_product(n: int, dtype: Any, sizes: Sizes) -> dict[str, Any]:
    x, y = array((n, n)).astype(dtype), array((n, n)).astype(dtype) * n**-0.5
    # Several in a program, each of the last one's result: what a program costs beside its products hardly counts.
    step = jax.jit(lambda x, y: functools.reduce(lambda x, _: x @ y, range(10), x))
    return {"seconds": time_jax(lambda: step(x, y), sizes) / 10, "flops": 2 * n**3}


def time_kernels(sizes: Sizes) -> dict[str, Any]:
    """Seconds of one of many kernels that do next to nothing and wait for each other."""

    def step(x: Any) -> Any:
        for _ in range(sizes.kernels):
            # A rotation in one kernel; the barrier keeps it apart from the next one.
            x = jax.lax.optimization_barrier(jnp.roll(x, 1) + 1)
        return x

    x, compiled = array(1024), jax.jit(step)
    return {"seconds": time_jax(lambda: compiled(x), sizes._replace(calls=1)) / sizes.kernels}


def code_rows(rows: Rows, sizes: Sizes) -> None:
    """Compressing and decompressing."""
    entries = {"cast(bfloat16)": jc.cast(jnp.bfloat16), "sign()": jc.sign()}
    blocks = {
        "scaled_sign(bucket=1024)": jc.scaled_sign(bucket=1024),
        "int8()": jc.int8(),
        "int4()": jc.int4(),
        "fp8()": jc.fp8(),
        "mxfp4()": jc.mxfp4(),
        "dynamic_fp8()": jc.dynamic_fp8(),
        "qsgd(4)": jc.qsgd(4),
    }
    x, key = array(sizes.entries), jax.random.key(1)
    for name, code in (entries | blocks).items():
        rows.measure("codes", name, functools.partial(time_code, code, x, key, sizes, in_kernel=name in blocks))


def time_code(code: Any, x: Any, key: Any, sizes: Sizes, *, in_kernel: bool) -> dict[str, Any]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    compress, decompress = jax.jit(code.compress), jax.jit(lambda payload: code.decompress(payload, like))
    payload = compress(x, key)
    there = time_jax(lambda: compress(x, key), sizes)
    back = time_jax(lambda: decompress(payload), sizes)
    # At least the array is read, and its code is written; or the reverse.
    moved = x.nbytes + sum(p.nbytes for p in jax.tree.leaves(payload))
    found = {"seconds": there, "decompress_seconds": back, "bytes": moved}
    if in_kernel and jax.default_backend() == "gpu":
        found["one_pass"] = KERNEL in compress.lower(x, key).compile().as_text()
    return found


def warp_rows(rows: Rows, sizes: Sizes) -> None:
    """Compressing in one pass, by the entries of a tile and the warps that work on it; a CPU interprets the kernel."""
    x, key = array(sizes.entries), jax.random.key(1)
    for name, code, block in (
        ("qsgd(4)", jc.qsgd(4), 512),
        ("dynamic_fp8()", jc.dynamic_fp8(), 32),
        ("int8()", jc.int8(), 256),
    ):
        for tile in sizes.tiles:
            for warps in sizes.warps:
                run = functools.partial(time_kernel, code, block, tile, warps, x, key, sizes)
                rows.measure("warps", f"{name}, tiles of {tile}, {warps} warps", run)


def time_kernel(code: Any, block: int, tile: int, warps: int, x: Any, key: Any, sizes: Sizes) -> dict[str, Any]:
    from jax.experimental.pallas import triton

    options = {"parameters": triton.CompilerParams(num_warps=warps), "interpret": jax.default_backend() == "cpu"}
    compress = jax.jit(functools.partial(run_in_kernel, code.compress, tile, block, **options))
    moved = x.nbytes + sum(p.nbytes for p in jax.tree.leaves(compress(x, key)))
    return {"seconds": time_jax(lambda: compress(x, key), sizes), "bytes": moved}


def selection_rows(rows: Rows, sizes: Sizes) -> None:
    x, key, kept = array(sizes.entries), jax.random.key(1), sizes.entries // 100
    runs: dict[str, Callable[[Any], Any]] = {
        "top_k(0.01)": lambda x: jc.top_k(0.01).compress(x, key),
        'top_k(0.01, method="exact")': lambda x: jc.top_k(0.01, method="exact").compress(x, key),
        "block_top_k(64 / 4096)": lambda x: jc.block_top_k(64 / 4096).compress(x, key),
        "lax.top_k": lambda x: jax.lax.top_k(jnp.abs(x), kept),
    }
    for name, run in runs.items():
        compiled = jax.jit(run)
        rows.measure(
            "selection", name, lambda run=compiled: {"seconds": time_jax(lambda: run(x), sizes), "bytes": x.nbytes}
        )


def power_sgd_rows(rows: Rows, sizes: Sizes) -> None:
    """Compression, decompression and feedback of one matrix, as `power_sgd.py` does it on a CPU."""
    for shape in sizes.matrices:
        for rank in sizes.ranks:
            for own in ("local", "paper"):
                name = f"{shape[0]}x{shape[1]}, rank {rank}{', own=paper' if own == 'paper' else ''}"
                rows.measure("power_sgd", name, functools.partial(time_power_sgd, shape, rank, own, sizes))


def time_power_sgd(shape: tuple[int, int], rank: int, own: Any, sizes: Sizes) -> dict[str, Any]:
    x = array(shape)
    reducer = jd.error_feedback(jd.power_sgd(rank, min_compression_rate=0, own=own))
    # Otherwise the compiler merges what differs between several workers.
    comm = jd.comm.alone()._replace(mean=lambda tree: jax.lax.optimization_barrier(tree))

    def reduce(state: Any, x: Any) -> tuple:
        reduced, state = reducer.reduce(x, state, comm)
        return state, reduced.mean

    step = jax.jit(reduce, donate_argnums=0)
    # The mean is dropped, but computed: it is a result of the program.
    run = stateful(lambda state: step(state, x)[0], reducer.init(x))
    return {"seconds": time_jax(run, sizes)}


def state_rows(rows: Rows, sizes: Sizes) -> None:
    """AdamW with its moments in float32, in 8 bits and in bfloat16."""
    adam = optax.adamw(1e-3)
    bfloat16 = jd.compressors.cast(jnp.bfloat16, rounding="stochastic")
    kinds = {
        "optax.adamw": adam,
        "quantized_state(adamw), 8 bits": jd.transforms.quantized_state(adam),
        "quantized_state(adamw), bfloat16": jd.transforms.quantized_state(adam, bfloat16),
    }
    for name, tx in kinds.items():
        rows.measure("states", name, functools.partial(time_optimizer, tx, sizes))


def time_optimizer(tx: Any, sizes: Sizes) -> dict[str, Any]:
    params = array(sizes.params)
    gradient = 0.01 * params

    def update(carry: tuple, gradient: Any) -> tuple:
        updates, state = tx.update(gradient, carry[1], carry[0])
        return optax.apply_updates(carry[0], updates), state

    # The gradient is an argument: a constant of this size would be a part of the program.
    step = jax.jit(update, donate_argnums=0)
    state = tx.init(params)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if hasattr(leaf, "nbytes"))
    seconds = time_jax(stateful(lambda carry: step(carry, gradient), (params, state)), sizes)
    # Parameters and state are read and written, gradients read.
    return {"seconds": seconds, "entries": sizes.params, "state_bytes": held, "bytes": 12 * sizes.params + 2 * held}


def overhead_rows(rows: Rows, sizes: Sizes) -> None:
    """`all_reduce(exact())` under `distribute` on one device against a plain jitted step."""
    rows.measure("overhead", "all_reduce(exact()) on one device", functools.partial(time_overhead, sizes))


def time_overhead(sizes: Sizes) -> dict[str, Any]:
    width = max(64, round((sizes.params / 16) ** 0.5) // 64 * 64)
    params = {f"layer_{i}": array((width, width)) * width**-0.5 for i in range(8)}

    def loss(params: Any, x: Any) -> Any:
        for weight in params.values():
            x = jax.nn.relu(x @ weight)
        return jnp.mean(jnp.square(x))

    mesh = jd.make_mesh({"data": 1}, devices=jax.devices()[:1])
    tx, plain, x = optax.chain(jd.all_reduce(jd.exact()), optax.adam(1e-3)), optax.adam(1e-3), array((256, width))

    def step(state: Any, x: Any) -> Any:
        gradients = jd.local_value_and_grad(loss)(state[0], x)[1]
        updates, opt = tx.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), ()

    @functools.partial(jax.jit, donate_argnums=0)
    def by_hand(state: Any, x: Any) -> Any:
        updates, opt = plain.update(jax.grad(loss)(state[0], x), state[1], state[0])
        return optax.apply_updates(state[0], updates), opt

    distributed, batch = jd.distribute(step, mesh), jd.global_batch(x, mesh)
    state = jd.init_state(lambda: (params, tx.init(params)), mesh)
    ours = time_jax(stateful(lambda state: distributed(state, batch)[0], state), sizes)
    mine = jax.jit(lambda: (jax.tree.map(jnp.copy, params), plain.init(params)))()
    hand = time_jax(stateful(lambda state: by_hand(state, x), mine), sizes)
    return {"seconds": ours, "by_hand_seconds": hand, "ratio": ours / hand}


def offload_rows(rows: Rows, sizes: Sizes) -> None:
    """Optimizer state in pinned memory, beside transfers of the same array alone."""
    x = array(sizes.params)
    host = jax.memory.Space.Host
    there = jax.jit(lambda x: jax.device_put(x, host))
    back = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device))
    few = sizes._replace(calls=min(3, sizes.calls))
    held = there(x)
    rows.measure("offload", "to host", lambda: {"seconds": time_jax(lambda: there(x), few), "bytes": x.nbytes})
    rows.measure("offload", "to device", lambda: {"seconds": time_jax(lambda: back(held), few), "bytes": x.nbytes})
    for compute in ("device", "host"):
        tx = offload.host(optax.adamw(1e-3), compute=compute)
        rows.measure("offload", f'adamw, compute="{compute}"', functools.partial(time_optimizer, tx, few))
    for name, place in PLACES.items():
        rows.measure("offload", f"a step of {LAYERS} layers, {name}", functools.partial(time_layers, place, few))


LAYERS = 8
STACK = offload.LayerStack(
    embed=lambda p, batch: batch,
    layer=lambda p, x: x + jnp.tanh(x @ p["in"]) @ p["out"],
    head=lambda p, x, batch: jnp.mean((x - batch) ** 2),
)


def start_whole(tx: optax.GradientTransformation, layers: list[Any]) -> tuple[Callable[..., Any], Any]:
    """A step of all layers in one program, and its first state."""

    def loss(params: Any, batch: Any) -> Any:
        return STACK.head({}, functools.reduce(lambda x, p: STACK.layer(p, x), params, batch), batch)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jax.tree.map(jnp.asarray, layers)
    return jax.jit(step, donate_argnums=0), (params, tx.init(params))


def start_streamed(tx: optax.GradientTransformation, layers: list[Any]) -> tuple[Callable[..., Any], Any]:
    """The same with all of it in host memory."""
    run = offload.host_layers(STACK, tx)
    return run.step, run.init(layers.__getitem__, len(layers), embed={}, head={})


PLACES: dict[str, Callable[[list[Any]], tuple[Callable[..., Any], Any]]] = {
    "on the device": functools.partial(start_whole, optax.adamw(1e-3)),
    "offload.host": functools.partial(start_whole, offload.host(optax.adamw(1e-3), compute="device")),
    "offload.host_layers": functools.partial(start_streamed, optax.adamw(1e-3)),
}


def time_layers(place: Callable[[list[Any]], tuple[Callable[..., Any], Any]], sizes: Sizes) -> dict[str, Any]:
    """A step of AdamW, with twice as many rows as a layer is wide."""
    width = math.isqrt(sizes.params // (2 * LAYERS))
    draw = np.random.default_rng(0).standard_normal
    made = [{name: draw((width, width), np.float32) / width for name in ("in", "out")} for _ in range(LAYERS)]
    step, state = place(made)
    batch = array((2 * width, width))

    def run() -> Any:
        nonlocal state
        state, loss = step(state, batch)
        return state, loss

    return {"seconds": time_jax(run, sizes), "entries": 2 * LAYERS * width**2}


def plan_rows(rows: Rows, sizes: Sizes) -> None:
    for model in sizes.models:
        rows.measure("plan", model, functools.partial(compare_plan, model, rows.path, sizes))


def chip_of(device: Any, bandwidth: float) -> tuple[cost.Chip, bool]:
    """The chip of `jaxdist plan` for a device, and whether it is one of its targets."""
    kind = device.device_kind.lower()
    for name in ("h100", "h200"):
        if name in kind:
            return cost.CHIPS[name], True
    # Unknown: its bandwidth is that of the copy, and products are taken to be free.
    return cost.Chip(kind, {"other": 1e15}, 1e12, bandwidth, bandwidth), False


def compare_plan(model: str, path: Path, sizes: Sizes) -> dict[str, Any]:
    """Predicted step time and memory against those of a real run, one example a step, on the first device.

    `predicted_*` is what `jaxdist plan` says, where the device is one of its targets; `read_*` comes from the program
    that was compiled for the device itself, by the same cost model.
    """
    device, optimizer = jax.devices()[0], optax.adamw(1e-3)
    copy = Rows(path).known().get(("copy", "-x in place"), {"bytes": 1, "seconds": 1e-10})
    chip, known = chip_of(device, copy["bytes"] / copy["seconds"])
    workload, found = parse.parse_workload("text", model), {}
    if known:
        planned = planning.plan(f"{chip.name}:1x1", workload, TrainingMethod(jd.exact(), optimizer), batch_size=1)
        found |= {"predicted_seconds": planned.seconds, "predicted_peak": planned.peak}
    mesh = jd.make_mesh({"data": 1}, devices=[device])
    run = train.prepare(workload, jd.exact(), optimizer, mesh=mesh, batch_size=1)
    cluster = cost.of_mesh(chip.name, mesh) if known else cost.cluster(chip, [(cost.NVLINK, 1)])
    found |= {"read_seconds": analysis.overlap(run.program.compiled, cluster).seconds}
    found |= {"read_peak": analysis.memory(run.program.compiled).peak}
    seconds = [record.seconds for record, _ in train.steps(run, sizes.steps + 1)][1:]
    found |= {"seconds": statistics.median(seconds), "parameters": run.parameters, "chip": chip.name, "target": known}
    # A CPU counts none.
    stats = device.memory_stats() or {}
    return found | ({"peak": stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {})


def describe_device() -> dict[str, Any]:
    device = jax.devices()[0]
    software = device.client.platform_version.splitlines()[-1]
    return {"kind": device.device_kind, "platform": device.platform, "jax": jax.__version__, "software": software}


SECTIONS: dict[str, Callable[[Rows, Sizes], None]] = {
    "copy": copy_rows,
    "rates": rate_rows,
    "codes": code_rows,
    "warps": warp_rows,
    "selection": selection_rows,
    "power_sgd": power_sgd_rows,
    "states": state_rows,
    "overhead": overhead_rows,
    "offload": offload_rows,
    "plan": plan_rows,
}
