"""Eight simulated CPU devices, runtime type checks on the library, and a switch for slow tests."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# With a thread for each device, those that wait in a collective can starve those that they wait for.
os.environ.setdefault("NPROC", "32")

from jaxtyping import install_import_hook

with install_import_hook("jaxdist", "beartype.beartype"):
    import jaxdist as jd

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session")
def mesh():
    """Eight workers."""
    return jd.make_mesh({"data": 8})


@pytest.fixture(scope="session")
def pods():
    """Two pods of four."""
    return jd.make_mesh({"pod": 2, "chip": 4})
