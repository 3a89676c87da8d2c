"""One of two processes of a job that saves into a bucket of an S3 server, in which uploads fail too.

    jaxdist launch -n 2 bucket.py FOLDER ENDPOINT BUCKET

Prints, as JSON, what came of it in this process.
"""

import json
import os
import sys
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from obstore.store import from_url

import jaxdist as jd
from jaxdist import checkpoint
from jaxdist._stores import bucket
from jaxdist._stores.bucket import _Bucket
from jaxdist.checkpoint import _bucket_run


def equal(left, right):
    """Whether this process's parts of two arrays are equal."""
    if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
        left, right = jax.random.key_data(left), jax.random.key_data(right)
    return all(bool((a.data == b.data).all()) for a, b in zip(left.addressable_shards, right.addressable_shards))


def attempt(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except Exception as error:
        return [type(error).__name__, str(error)[:300]]


def read(store, make):
    """Reads the last checkpoint: whether processes see each other's folders, and if process 1 gets other bytes."""
    results = {}
    tempfile.tempdir = f"{sys.argv[1]}/{jax.process_index()}"
    os.mkdir(tempfile.tempdir)
    whole, received = _Bucket.read, []

    def count(self, name, start, end):
        body = whole(self, name, start, end)
        received.append(len(body or b""))
        return body

    for name, sees in (
        ("together", _bucket_run._sees),
        ("apart", lambda folder: folder.is_relative_to(tempfile.tempdir)),
    ):
        received.clear()
        with (
            mock.patch.object(bucket, "PIECE", 1000),
            mock.patch.object(_Bucket, "read", count),
            mock.patch.object(_bucket_run, "_sees", sees),
        ):
            found = checkpoint.resume(store, make(0.0))
        same = jax.tree.map(equal, found.state, make(4.0))
        results[f"resumed {name}"] = [found.step, found.data, jax.tree.leaves(same)]
        results[f"received {name}"] = sum(received)

    def refuse(*_):
        raise PermissionError("no rights to read")

    # What process 1 does not get, or other bytes than were written, which process 0 may have to check.
    write = _bucket_run._write_at
    for name, broken in (
        ("refused", mock.patch.object(_Bucket, "read", refuse)),
        ("short", mock.patch.object(_bucket_run, "_write_at", lambda file, start, body: write(file, start, body[:-1]))),
    ):
        with broken if jax.process_index() == 1 else mock.MagicMock():
            results[name] = attempt(checkpoint.restore, store, make(0.0))
    results["left"] = os.listdir(tempfile.tempdir)
    return results


def main():
    jd.initialize(timeout_seconds=60)
    mesh = jd.make_mesh()
    options: Any = {"endpoint": sys.argv[2], "client_options": {"allow_http": True}}
    options |= {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    store = from_url(f"s3://{sys.argv[3]}/run", **options)

    def make(scale):
        state = {"w": jnp.arange(6.0) * scale, "own": jd.PerWorker(jnp.full(5, scale)), "key": jax.random.key(3)}
        return jd.place({**state, "cut": jd.Sharded(jnp.arange(10_001.0) * scale)}, mesh)

    results = {}
    checkpoint.save(store, make(1.0), 1)
    with checkpoint.writing(store, keep=2) as writer:
        for step in (2, 3):
            writer.save(make(float(step)), step, data=step)
    results["name"] = str(checkpoint.save(store, make(4.0), 4, keep=2)).rpartition("/")[2][:4]
    for process in (0, 1):

        def fail(*_):
            raise OSError(5, "Input/output error")

        broken = mock.patch.object(_bucket_run.BucketRun, "upload", fail)
        with broken if jax.process_index() == process else mock.MagicMock():
            results[f"upload of {process}"] = attempt(checkpoint.save, store, make(9.0), 9)
    results["latest"] = checkpoint.latest(store)
    results |= read(store, make)
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
