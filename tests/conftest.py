"""Eight simulated CPU devices, runtime type checks on the library, and a switch for slow tests."""

import gc
import os
import sys
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is the compiler's, on programs that run once: the least effort that leaves the collectives as
# they are. `--slow` compiles as users do. The processes of xdist inherit the flags.
if "PYTEST_XDIST_WORKER" not in os.environ:
    little = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    if version("jaxlib").startswith("0.10."):  # later compilers do not know the flag, and stop
        little += "--xla_cpu_use_fusion_emitters=false"
    flags = ["" if "--slow" in sys.argv else little, os.environ.get("XLA_FLAGS", "")]
    os.environ["XLA_FLAGS"] = " ".join([*flags, "--xla_force_host_platform_device_count=8"])

# With a thread for each device, those that wait in a collective can starve those that they wait for.
os.environ.setdefault("NPROC", "32")

from jaxtyping import install_import_hook

with install_import_hook("jaxdist", "beartype.beartype"):
    import jaxdist as jd

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# A trace makes many objects and few cycles: look for them less often.
gc.set_threshold(20_000, 10, 10)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture(scope="session")
def mesh():
    """Eight workers."""
    return jd.make_mesh({"data": 8})


@pytest.fixture(scope="session")
def pods():
    """Two pods of four."""
    return jd.make_mesh({"pod": 2, "chip": 4})
