"""Optimizer state on disk: the step of `offload.nvme` beside a plain sequential read and write of the same bytes.

    sudo python benchmarks/nvme.py --folder /a/folder/on/the/disk --out benchmarks/reports/NAME
    sudo python benchmarks/nvme.py --layers 96 --folder /a/folder/on/the/disk --out benchmarks/reports/NAME

Adam with float32 master parameters under bfloat16 ones: 12 bytes read and 12 written for each parameter. The plain copy
reads all chunks in a row into one buffer, then writes as many to another file. It is taken before and after each step,
and a step is compared with the mean of its two neighbors. Pages are dropped from the cache (which needs root) before
each of them. In the end: what tensorstore reaches with chunks of the same size, and where the step's time goes.

With `--layers` the parameters are on disk too, `offload.nvme_layers`: two steps of a model whose parameters alone are
larger than the memory of the process, which a control group limits (page cache and interpreter included), with its
memory over time; the same model in memory under the same limit; and step times by prefetch on a third of the layers.
"""

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from jaxdist import offload
from jaxdist.analysis import cost


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def plain(source: Path, target: Path, size: int, chunk: int, direct: bool, sync: bool) -> tuple[float, float]:
    """Seconds to read all of one file, and to write as much to another."""
    buffer = mmap.mmap(-1, chunk)
    flags = os.O_DIRECT if direct else 0
    times = []
    for path, mode, job in (
        (source, os.O_RDONLY, lambda file, view, at: os.preadv(file, [view], at)),
        (target, os.O_RDWR | os.O_CREAT, lambda file, view, at: os.pwritev(file, [view], at)),
    ):
        file = os.open(path, mode | flags, 0o644)
        if mode != os.O_RDONLY:
            os.posix_fallocate(file, 0, size)
        started = time.perf_counter()
        for at in range(0, size, chunk):
            view = memoryview(buffer)[: min(chunk, size - at)]
            assert job(file, view, at) == len(view)
            if sync and not direct and mode != os.O_RDONLY:
                os.fdatasync(file)
        if sync and mode != os.O_RDONLY:
            os.fdatasync(file)
        times.append(time.perf_counter() - started)
        os.close(file)
    return times[0], times[1]


def run(folder: Path, entries: int, chunk: int, depth: int, direct: bool, steps: int) -> dict:
    shutil.rmtree(folder, ignore_errors=True)
    store = offload.Store(folder, chunk_bytes=chunk, host_bytes=depth * chunk, direct=direct)
    opt = offload.nvme(optax.adamw(1e-3), store, master_dtype=jnp.float32)
    params = {"w": np.zeros(entries, ml_dtypes.bfloat16)}
    gradients = {"w": np.full(entries, 0.5, ml_dtypes.bfloat16)}
    opt.init(params)
    opt.apply(params, gradients, donate=True)  # compiles, and touches both slots
    size = opt.stats().state_bytes
    files, spare = folder / "worker-00000-of-00001", folder / "spare"

    def copy():
        drop_caches()
        return plain(files / "state.0", spare, size, chunk, direct, True)

    copy()  # the first write of a file also takes its room
    copies, seconds = [copy()], []
    for _ in range(steps):
        drop_caches()
        started = time.perf_counter()
        opt.apply(params, gradients, donate=True)
        seconds.append(time.perf_counter() - started)
        copies.append(copy())
    opt.close()
    shutil.rmtree(folder)
    ratios = [(sum(a) + sum(b)) / 2 / s for a, b, s in zip(copies, copies[1:], seconds, strict=False)]
    return {
        "access": "direct" if direct else "cached, synced",
        "buffers": depth,
        "chunk_mib": chunk / 2**20,
        "state_gib": size / 2**30,
        "step_s": seconds,
        "read_s": [a for a, _ in copies],
        "write_s": [b for _, b in copies],
        "step_gb_s": 2 * size / statistics.median(seconds) / 1e9,
        "copy_gb_s": 2 * size / statistics.median(a + b for a, b in copies) / 1e9,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "buffer_mib": opt_buffers(depth, chunk, size),
        "max_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def opt_buffers(depth: int, chunk: int, size: int) -> float:
    return min(depth * chunk, size) / 2**20


def tensorstore_rate(folder: Path, size: int, chunk: int, driver: str) -> dict | None:
    """Writes, then reads, an array in chunks, two in flight; the best of what its drivers offer here."""
    try:
        import tensorstore as ts
    except ImportError:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    count = size // chunk
    metadata = {
        "zarr": {"compressor": None, "dtype": "|u1", "shape": [count * chunk], "chunks": [chunk]},
        "n5": {
            "compression": {"type": "raw"},
            "dataType": "uint8",
            "dimensions": [count * chunk],
            "blockSize": [chunk],
        },
    }[driver]
    context = {"cache_pool": {"total_bytes_limit": 0}, "file_io_sync": True, "data_copy_concurrency": {"limit": 2}}
    spec = {"driver": driver, "metadata": metadata, "kvstore": {"driver": "file", "path": str(folder) + "/"}}
    array = ts.open({**spec, "context": context, "create": True}).result()
    data = np.random.default_rng(0).integers(0, 255, chunk, np.uint8)

    def all_of(start):
        begun, waiting = time.perf_counter(), []
        for number in range(count):
            if len(waiting) > 1:
                waiting.pop(0).result()
            waiting.append(start(array[number * chunk : (number + 1) * chunk]))
        for one in waiting:
            one.result()
        return count * chunk / (time.perf_counter() - begun) / 1e9

    write = all_of(lambda part: part.write(data, can_reference_source_data_indefinitely=True))
    drop_caches()
    read = all_of(lambda part: part.read())
    drop_caches()
    into = np.empty(chunk, np.uint8)
    whole = all_of(lambda part: ts.array(into).write(part[ts.d[0].translate_to[0]]))
    shutil.rmtree(folder)
    return {"driver": driver, "write_gb_s": write, "read_gb_s": read, "read_into_gb_s": whole}


def residual_mlp(width: int) -> offload.LayerStack:
    return offload.LayerStack(
        embed=lambda p, batch: batch,
        layer=lambda p, x: x + jnp.tanh(x @ p["in"]) @ p["out"],
        head=lambda p, x, batch: jnp.mean((x @ p["w"]) ** 2),
    )


def make_layer(width: int, i: int) -> dict:
    rng = np.random.default_rng(i)
    shape, scale = (width, width), np.float32(0.3 / np.sqrt(width))
    return {name: rng.standard_normal(shape, np.float32) * scale for name in ("in", "out")}


def open_layers(config: dict, prefetch: int, progress=None) -> offload.StreamedLayers:
    width = config["width"]
    store = offload.Store(config["folder"], durable=False, progress=progress)
    tx = optax.adam(1e-6)
    run = offload.nvme_layers(residual_mlp(width), tx, store, prefetch=prefetch, clip_norm=config.get("clip"))
    head = {"w": np.full((width, 8), 0.01, np.float32)}
    run.init(lambda i: make_layer(width, i), config["layers"], embed={}, head=head)
    return run


def note(event: str, **more) -> None:
    # The clock is that of the machine: the parent's samples have the same.
    print(json.dumps({"at": time.monotonic(), "event": event, **more}), flush=True)


def child(config: dict) -> None:
    """In a process of its own, under the limit."""
    width, layers = config["width"], config["layers"]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((config["tokens"], width), np.float32))
    note("ready")
    if config["what"] == "in memory":
        stack, tx = residual_mlp(width), optax.adam(1e-4)
        params = [jax.tree.map(jnp.asarray, make_layer(width, i)) for i in range(layers)]

        @jax.jit
        def step(params, state):
            def loss(params):
                y = x
                for p in params:
                    y = jax.checkpoint(stack.layer)(p, y)
                return jnp.mean(y**2)

            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        jax.block_until_ready(step(params, tx.init(params)))
        note("step")
    elif config["what"] == "memory":

        def progress(done, count):
            # `init` visits each part once, a step twice except for the head.
            if done == layers + 1 and count > layers + 2:
                note("forward ends")

        run = open_layers(config, 2, progress)
        note("created")
        for _ in range(2):
            note("step begins")
            note("step ends", loss=float(run.step(x)))
        note("stats", **run.stats()._asdict())
    else:
        time_layers(config, x)


def time_layers(config: dict, x: jax.Array) -> None:
    """Step times by prefetch, in turns, beside plain reads and writes of the same bytes and the computation alone."""
    width, layers = config["width"], config["layers"]
    stack, params = residual_mlp(width), jax.tree.map(jnp.asarray, make_layer(width, 0))
    forward = jax.jit(stack.layer)
    backward = jax.jit(lambda p, x, g: jax.vjp(stack.layer, p, x)[1](g))
    found: dict[str, list[float]] = {}
    open_layers(config, 0).close()

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for _ in range(config["turns"]):
        for prefetch in (0, 1, 2):
            run = open_layers(config, prefetch)
            run.step(x)  # compiles
            before, started = run.stats(), time.perf_counter()
            run.step(x)
            add(f"prefetch {prefetch}", time.perf_counter() - started)
            after = run.stats()
            read, written = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
            run.close()
        path = Path(config["folder"]) / "worker-00000-of-00001" / "state.0"
        spare = Path(config["folder"]) / "spare"
        seconds = plain(path, spare, after.state_bytes, 8 << 20, True, False)
        # The forward pass reads the parameters once more.
        add("plain", seconds[0] * read / after.state_bytes + seconds[1])
        jax.block_until_ready(backward(params, forward(params, x), x))
        started = time.perf_counter()
        for _ in range(layers):
            jax.block_until_ready(forward(params, x))
            jax.block_until_ready(backward(params, x, x))
        add("computation", time.perf_counter() - started)
    note("times", seconds=found, read=read, written=written, parameters=2 * width**2 * layers, state=after.state_bytes)


def memory_group(limit: int) -> tuple[Path, str]:
    """A control group with this limit, of version 2 or 1, and the name of the file with its memory."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup", *([] if unified else ["memory"]), f"jaxdist-nvme-{os.getpid()}")
    group.mkdir()
    (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limit))
    return group, "memory.current" if unified else "memory.usage_in_bytes"


def run_limited(config: dict, limit: int) -> dict:
    """Runs `child` under the limit, and samples its memory."""
    group, usage = memory_group(limit)
    join = 'echo $$ > "$0"; exec "$@"'
    command = ["sh", "-c", join, str(group / "cgroup.procs"), sys.executable, __file__, "--child", json.dumps(config)]
    samples, events = [], Path(config["folder"] + ".events")
    events.parent.mkdir(parents=True, exist_ok=True)
    with open(events, "w") as out, subprocess.Popen(command, stdout=out) as process:
        while process.poll() is None:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            anonymous = int(stat.get("anon", stat.get("rss", 0)))
            samples.append((time.monotonic(), int((group / usage).read_text()), anonymous))
            time.sleep(0.02)
    group.rmdir()
    found = [json.loads(line) for line in events.read_text().splitlines()]
    return {"code": process.returncode, "limit": limit, "samples": samples, "events": found, **config}


def draw_memory(record: dict, path: Path) -> None:
    import matplotlib.pyplot as plt

    samples, events, mib = np.array(record["samples"]), record["events"], 2**20
    at = {name: [e["at"] for e in events if e["event"] == name] for name in ("ready", "created", "step begins")}
    begin = at["ready"][0]
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axes.plot(samples[:, 0] - begin, samples[:, 1] / mib, label="all memory of the process", color="tab:blue")
    axes.plot(samples[:, 0] - begin, samples[:, 2] / mib, label="without page cache", color="tab:orange", lw=1)
    for name, value, style in (
        ("limit", record["limit"], "-"),
        ("parameters", record["parameters"], "--"),
        ("parameters and state", 3 * record["parameters"], ":"),
    ):
        axes.axhline(value / mib, color="black", ls=style, lw=1, label=f"{name}, {value / mib:,.0f} MiB")
    for event in events:
        if event["event"] in ("step begins", "forward ends"):
            axes.axvline(event["at"] - begin, color="gray", lw=0.6)
            axes.text(event["at"] - begin, 20, event["event"], rotation=90, fontsize=7, va="bottom", ha="right")
    axes.set(xlabel="seconds", ylabel="MiB", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=7, loc="center left")
    figure.savefig(path, dpi=120)


def layers_report(given: argparse.Namespace) -> None:
    folder, width, tokens = given.folder / "layers", 1024, given.tokens
    config = {"folder": str(folder), "width": width, "tokens": tokens, "layers": given.layers}
    config["parameters"] = 4 * (2 * width**2 * given.layers + 8 * width)
    limit, records = given.limit_mib << 20, {}
    fewer = {"layers": max(given.layers // 3, 1), "turns": given.steps}
    for what, changes in (("memory", {}), ("in memory", {}), ("times", fewer)):
        if what != "times" or given.steps:
            shutil.rmtree(folder, ignore_errors=True)
            records[what] = run_limited({**config, "what": what, **changes}, limit)
            del records[what]["folder"]
            print(what, records[what]["code"], *records[what]["events"][-2:], sep="\n  ")
    run, control = records["memory"], records["in memory"]
    summary = {
        "limit_mib": given.limit_mib,
        "parameters_mib": config["parameters"] / 2**20,
        "most_mib": max(x for _, x, _ in run["samples"]) / 2**20,
        "most_anonymous_mib": max(x for _, _, x in run["samples"]) / 2**20,
        "exit_code_in_memory": control["code"],
    }
    times = summarize_times(records["times"]) if given.steps else None
    print(json.dumps([summary, times], indent=1))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        draw_memory(run, given.out / "layers.png")
        # The picture has all samples, the record every tenth.
        run["samples"] = run["samples"][::10]
        (given.out / "layers.json").write_text(json.dumps({"summary": summary, "run": run}) + "\n")
        if times:
            (given.out / "layers_times.json").write_text(json.dumps(times, indent=1) + "\n")


def summarize_times(record: dict) -> dict:
    """Medians over turns of each turn's own ratios, beside ZeRO-Infinity's model."""
    times, tokens = record["events"][-1], record["tokens"]
    seconds, moved = times["seconds"], times["read"] + times["written"]

    def ratio(above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))

    computation, copy = statistics.median(seconds["computation"]), statistics.median(seconds["plain"])
    # The paper's model counts 8 bytes a parameter; here Adam's state in float32 moves in the same pass.
    bandwidth = 8 * times["parameters"] / copy
    flops = 8 * tokens * times["parameters"] / computation
    prefetches = [name for name in seconds if name.startswith("prefetch")]
    return {
        **times,
        "layers": record["layers"],
        "tokens": tokens,
        "share_of_disk": {name: ratio("plain", name) for name in prefetches},
        "share_computing": {name: ratio("computation", name) for name in prefetches},
        "gain": {name: ratio(prefetches[0], name) for name in prefetches},
        "offload_efficiency": cost.offload_efficiency("parameters", tokens=tokens, bandwidth=bandwidth, flops=flops),
        "disk_gb_s": moved / copy / 1e9,
        "gflops": flops / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; it is deleted")
    parser.add_argument("--layers", type=int, help="measure `nvme_layers` instead, with this number of layers")
    parser.add_argument("--tokens", type=int, default=256, help="of a batch, with --layers")
    parser.add_argument("--limit-mib", type=int, default=512, help="the memory of the process, with --layers")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=4.0, help="state on disk, of one step")
    parser.add_argument("--chunk-mib", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    if not given.folder:
        parser.error("--folder is missing")
    if given.layers:
        layers_report(given)
        shutil.rmtree(given.folder, ignore_errors=True)
        return
    chunk = given.chunk_mib << 20
    entries = int(given.gib * 2**30) // 12 // 4096 * 4096
    rows = []
    for direct, depth in ((True, 3), (True, 2), (True, 1), (False, 3)):
        rows.append(run(given.folder / "state", entries, chunk, depth, direct, given.steps))
        print({key: rows[-1][key] for key in ("access", "buffers", "step_gb_s", "copy_gb_s", "ratio", "max_rss_gib")})
    size = min(int(given.gib * 2**30), 1 << 30)
    others = [tensorstore_rate(given.folder / driver, size, min(chunk, size), driver) for driver in ("zarr", "n5")]
    print(*others, sep="\n")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        record = {"caches_dropped": drop_caches(), "parameters": entries, "runs": rows, "tensorstore": others}
        (given.out / "nvme.json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(given.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
