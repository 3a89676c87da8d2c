"""Optimizer state on disk: the step of `offload.nvme` beside a plain sequential read and write of the same bytes.

    sudo python benchmarks/nvme.py --folder /a/folder/on/the/disk --out benchmarks/reports/NAME

Adam with float32 master parameters under bfloat16 ones: 12 bytes read and 12 written for each parameter. The plain copy
reads all chunks in a row into one buffer, then writes as many to another file. It is taken before and after each step,
and a step is compared with the mean of its two neighbors. Pages are dropped from the cache (which needs root) before
each of them. In the end: what tensorstore reaches with chunks of the same size, and where the step's time goes.
"""

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from jaxdist import offload


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; it is deleted")
    parser.add_argument("--gib", type=float, default=4.0, help="state on disk, of one step")
    parser.add_argument("--chunk-mib", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
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
