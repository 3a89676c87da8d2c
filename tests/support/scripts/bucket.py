"""One of two processes of a job that saves into a bucket of an S3 server, in which uploads fail too.

    jaxdist launch -n 2 bucket.py FOLDER ENDPOINT BUCKET

Prints, as JSON, what came of it in this process.
"""

import json
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from obstore.store import from_url

import jaxdist as jd
from jaxdist import checkpoint
from jaxdist.checkpoint import _bucket_run


def equal(left, right):
    """Whether this process's parts of two arrays are equal."""
    if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
        left, right = jax.random.key_data(left), jax.random.key_data(right)
    return all(bool((a.data == b.data).all()) for a, b in zip(left.addressable_shards, right.addressable_shards))


def main():
    jd.initialize(timeout_seconds=60)
    mesh = jd.make_mesh()
    options: Any = {"endpoint": sys.argv[2], "client_options": {"allow_http": True}}
    options |= {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    store = from_url(f"s3://{sys.argv[3]}/run", **options)

    def make(scale):
        state = {"w": jnp.arange(6.0) * scale, "own": jd.PerWorker(jnp.full(5, scale)), "key": jax.random.key(3)}
        return jd.place({**state, "cut": jd.Sharded(jnp.arange(10_001.0) * scale)}, mesh)

    def attempt(function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except Exception as error:
            return [type(error).__name__, str(error)[:300]]

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
    found = checkpoint.resume(store, make(0.0))
    same = jax.tree.map(equal, found.state, make(4.0))
    results["resumed"] = [found.step, found.data, jax.tree.leaves(same)]
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
