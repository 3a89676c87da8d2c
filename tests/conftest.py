"""Eight simulated CPU devices, runtime type checks on the library, and a switch for slow tests."""

import contextlib
import ctypes
import gc
import itertools
import os
import sys
import threading
import zlib
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is the compiler's, on programs that run once: the least effort that leaves the collectives as
# they are takes a third of it. `--full-effort` compiles as users do. The processes of xdist inherit the flags.
if "PYTEST_XDIST_WORKER" not in os.environ:
    little = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    little += "--xla_cpu_parallel_codegen_split_count=1 "  # small programs are not worth several threads
    if version("jaxlib").startswith("0.10."):  # later compilers do not know the flag, and stop
        little += "--xla_cpu_use_fusion_emitters=false"
    flags = ["" if "--full-effort" in sys.argv else little, os.environ.get("XLA_FLAGS", "")]
    os.environ["XLA_FLAGS"] = " ".join([*flags, "--xla_force_host_platform_device_count=8"])

# With a thread for each device, those that wait in a collective can starve those that they wait for.
os.environ.setdefault("NPROC", "32")

import jax
import pytest
from hypothesis import HealthCheck, settings
from jax._src.interpreters import mlir
from type_checks import install_import_hook

# Test modules import the library. Under xdist the first process collects none of them, and is spared the import.
install_import_hook("jaxdist")

jax.config.update("jax_numpy_rank_promotion", "raise")
# No test reads from which line of which caller an operation comes; writing it down took a twelfth of the suite's time.
jax.config.update("jax_traceback_in_locations_limit", 0)

# JAX computes the key of each program in a cache on disk even where there is none.
jax.config.update("jax_enable_compilation_cache", False)

# A trace makes many objects and few cycles: look for them less often.
gc.set_threshold(100_000, 10, 10)

# An example may take any time, and drawing it too: a machine can be busy, and the first one may compile.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

MANY_BYTES = 2e9
TESTS_DONE = itertools.count(1)
PROGRAMS_OF_A_CONTEXT = 100


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
    parser.addoption("--full-effort", action="store_true", help="compile as users do, thrice as long")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            # `item.keywords` would contain the folders' names too.
            if item.get_closest_marker("slow") or not _in_sample(item):
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


def _in_sample(item):
    """Whether a case runs by default: of `@pytest.mark.sampled(n)` the first, and one in n by its parameters' names.

    The names alone decide, so that tests with equal parameters run the same cases, and share what they compile.
    """
    markers = list(item.iter_markers("sampled"))
    if not markers or not any(item.callspec.indices.values()):
        return True
    (marker,) = markers  # of two, one would be without effect
    return zlib.crc32(item.callspec.id.encode()) % marker.args[0] == 0


def pytest_collectstart():
    gc.disable()  # what is made until the first test stays


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    gc.freeze()  # pytest looks through all that is left five times


class MemoryLimit:
    """Programs of one file are of little use to the next; all of them together took 5 GB a process."""

    def pytest_runtest_teardown(self, item, nextitem):
        if (nextitem is None or nextitem.path != item.path) and resident_bytes() > MANY_BYTES:
            jax.clear_caches()
            gc.collect()
            give_back_freed_memory()
        elif next(TESTS_DONE) % 20 == 0:
            give_back_freed_memory()


def resident_bytes():
    with contextlib.suppress(OSError):  # Linux alone has this
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return float("inf")


def give_back_freed_memory():
    """The threads of the compiler free gigabytes that the C library keeps: here it returns them to the system."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has this
        ctypes.CDLL(None).malloc_trim(0)


def share_contexts():
    """A new context of MLIR takes a tenth of the time that a small program takes: here many programs share one.

    Those of one thread: with a context that two threads use at once, a lowering may find none.
    """
    make, of_thread = mlir.make_ir_context, threading.local()

    def give_context():
        count = getattr(of_thread, "programs", 0)
        # A context keeps all constants of its programs.
        if count % PROGRAMS_OF_A_CONTEXT == 0:
            of_thread.shared = make()
        of_thread.programs = count + 1
        return of_thread.shared

    mlir.make_ir_context = give_context


def pytest_configure(config):
    if not config.getoption("--full-effort"):
        share_contexts()
    # As a plugin it also sees the doctests of the package, which do not lie below this folder.
    config.pluginmanager.register(MemoryLimit())


@pytest.fixture(scope="session")
def mesh():
    """Eight workers."""
    import jaxdist as jd

    return jd.make_mesh({"data": 8})


@pytest.fixture(scope="session")
def pods():
    """Two pods of four."""
    import jaxdist as jd

    return jd.make_mesh({"pod": 2, "chip": 4})


@pytest.fixture
def float64():
    """Computes in float64, as the references do."""
    with jax.enable_x64(True):
        yield
