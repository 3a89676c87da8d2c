"""The launcher, with scripts that do not start JAX."""

import io
import os
import pathlib
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import termios
import threading
import time

import pytest
from launched import SCRIPT, gone, wait_for

from jaxdist.processes.launch import ProcessFailedError, job, launch, worker

# Without the package around it, whose import starts JAX: the launcher needs the standard library alone.
ALONE = """
import sys, types
package = sys.modules["jaxdist"] = types.ModuleType("jaxdist")
package.__path__ = [sys.argv.pop(1)]
from jaxdist.processes.launch.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def start(tmp_path):
    """Starts the launcher on a script with these lines."""
    started = []

    def run(
        body: str, *options: str, arguments: tuple[str, ...] = (), shell: str = "", out: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(SCRIPT + body)
        command = ["sh", "-c", f'{shell} exec "$@"', "sh"] if shell else []
        command += [sys.executable, "-c", ALONE, str(pathlib.Path(job.__file__).parents[2])]
        command += [*options, "script.py", *arguments]
        pipes = {"stdout": out, "stderr": out, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, **pipes))
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.communicate()


def test_output_is_numbered_and_kept(start, tmp_path):
    body = 'print(sys.argv[1:], os.environ["JAX_NUM_PROCESSES"]); sys.stderr.write("no end")'
    job = start(body, "-n", "2", "--logs", "here", arguments=("-x", "--logs"))
    out, err = job.communicate()
    assert job.returncode == 0
    assert sorted(out.splitlines()) == [f"[{number}] ['-x', '--logs'] 2" for number in range(2)]
    assert sorted(err.splitlines()) == ["[0] no end", "[1] no end"]
    assert sorted((tmp_path / "here/1.log").read_text().splitlines()) == ["['-x', '--logs'] 2", "no end"]


def test_the_first_failure_ends_the_rest_and_is_shown(start):
    """Process 0 takes no notice of SIGTERM, process 2 fails only because of it."""
    body = """
if me == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready", "w").close()
if me == 1:
    until("ready")
    print("the cause")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    job = start(body, "-n", "3")
    _, err = job.communicate()
    assert job.returncode == 128 + signal.SIGKILL
    report = "ProcessFailedError: process 1 was killed by SIGKILL; runs/launch/1.log ends with\n  the cause\n"
    assert err == f"jaxdist launch: {report}"


@pytest.mark.slow
def test_the_killed_one_is_the_cause_though_others_ended_meanwhile(start, tmp_path):
    body = """
note(str(me), str(os.getpid()))
until("stopped")
sys.exit(1) if me == 0 else os.kill(os.getpid(), signal.SIGKILL)
"""
    job = start(body, "-n", "2")
    for name in "01":
        wait_for(tmp_path / name)
    job.send_signal(signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    until = time.monotonic() + 60
    while not all(gone(int((tmp_path / name).read_text())) for name in "01"):
        assert time.monotonic() < until
        time.sleep(0.01)
    job.send_signal(signal.SIGCONT)
    _, err = job.communicate()
    assert job.returncode == 128 + signal.SIGKILL
    assert "process 1 was killed" in err


@pytest.mark.slow
def test_restarts_until_it_works(start, tmp_path):
    body = 'print("attempt", attempt); sys.exit(0 if attempt == 2 else 3 + attempt)'
    job = start(body, "--restarts", "2")
    out, err = job.communicate()
    assert (job.returncode, out) == (0, "[0] attempt 0\n[0] attempt 1\n[0] attempt 2\n")
    assert [line for line in err.splitlines() if "restart" in line] == [
        f"jaxdist launch: restart {number} of 2" for number in (1, 2)
    ]
    assert (tmp_path / "runs/launch/attempt-2/0.log").read_text() == "attempt 2\n"
    job = start(body, "--restarts", "1")
    assert (job.wait(), "exited with code 4" in job.stderr.read()) == (4, True)


@pytest.mark.slow
def test_the_logs_of_an_earlier_launch_are_kept(start, tmp_path):
    logs = tmp_path / "runs/launch"
    for text, options in (("first", ["--restarts", "1"]), ("second", ["-n", "2"]), ("third", [])):
        start(f"print({text!r}); sys.exit(3 if me == 0 else 0)", *options).communicate()
    assert (logs / "0.log").read_text() == "third\n"
    assert (logs / "earlier-1/attempt-1/0.log").read_text() == "first\n"
    assert [(logs / f"earlier-{number}/0.log").read_text() for number in (1, 2)] == ["first\n", "second\n"]
    assert sorted(path.name for path in logs.iterdir()) == ["0.log", "earlier-1", "earlier-2"]


@pytest.mark.slow
def test_a_signal_between_two_attempts_ends_all(start):
    """The pause before the third is two seconds."""
    job = start("sys.exit(3)", "--restarts", "9")
    while "restart 3" not in (line := job.stderr.readline()):
        assert line
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate()
    assert (job.returncode, "restart" in err) == (3, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "passed_on"),
    [(number, number) for number in (signal.SIGTERM, signal.SIGINT)] + [(signal.SIGUSR1, signal.SIGTERM)],
)
def test_signals_are_passed_on_and_nothing_is_restarted(start, tmp_path, number, passed_on):
    body = f"signal.signal({int(passed_on)}, saved); pathlib.Path(str(me)).touch(); time.sleep(60)"
    job = start(body, "-n", "2", "--restarts", "3")
    for name in "01":
        wait_for(tmp_path / name)
    job.send_signal(number)
    out, err = job.communicate()
    assert (job.returncode, sorted(out.splitlines()), err) == (0, ["[0] saved", "[1] saved"], "")


def test_what_begins_ends_by_a_signal_without_a_stack_of_the_launcher(tmp_path):
    """Until its program runs, it runs a script of the launcher, which imports modules."""
    with worker.printers(tmp_path) as outputs:
        for number in range(12):
            begun = worker.start(["sleep", "60"], number, os.environ, tmp_path / f"{number}.log", outputs)
            time.sleep(0.005 * number)
            begun.process.send_signal(signal.SIGINT)
            assert begun.process.wait() == -signal.SIGINT
            worker.finish(begun)
            begun.reader.join()
    assert {path.read_text() for path in tmp_path.iterdir()} == {""}


@pytest.mark.slow
def test_sigterm_after_a_warning_is_the_first_one(start, tmp_path):
    """Slurm sends SIGUSR1 some time before SIGTERM, which must not end at once what still saves."""
    body = """
def warned(*_):
    signal.signal(signal.SIGTERM, saved)
    note("warned")
signal.signal(signal.SIGTERM, warned)
note("ready")
time.sleep(60)
time.sleep(60)
"""
    job = start(body)
    for name, number in (("ready", signal.SIGUSR1), ("warned", signal.SIGTERM)):
        wait_for(tmp_path / name)
        job.send_signal(number)
    out, err = job.communicate()
    assert (job.returncode, out, err) == (0, "[0] saved\n", "")


@pytest.mark.slow
def test_nohup(start, tmp_path):
    """The terminal goes; who then asks to stop is heard."""
    job = start('pathlib.Path("0").touch(); time.sleep(60)', shell="trap '' HUP;")
    wait_for(tmp_path / "0")
    for number in (signal.SIGHUP, signal.SIGTERM):
        job.send_signal(number)
    assert job.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_who_does_not_end_after_a_signal_is_killed(start, tmp_path):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path(str(me)).touch(); time.sleep(60)"
    job = start(body, "--grace", "0.1", "--restarts", "3")
    wait_for(tmp_path / "0")
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate()
    assert job.returncode == 128 + signal.SIGKILL
    assert "restart" not in err


def test_nothing_is_left_behind(start, tmp_path):
    """Of a process and of what it started and forgot: when it ends well, and when the launcher is killed."""
    forgotten = """
child = subprocess.Popen(["sleep", "60"])
note(sys.argv[1] + str(me), f"{os.getpid()} {child.pid}")
"""
    job = start(forgotten, arguments=("well",))
    job.communicate()
    assert job.returncode == 0
    killed = start(forgotten + "time.sleep(60)", "-n", "2", arguments=("killed",))
    names = ("well0", "killed0", "killed1")
    for name in names:
        wait_for(tmp_path / name)
    killed.kill()
    until = time.monotonic() + 60
    while not all(gone(int(number)) for name in names for number in (tmp_path / name).read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_who_fled_and_goes_on_writing_is_not_waited_for(start):
    body = 'subprocess.Popen([sys.executable, "-c", "while True: print(1)"], start_new_session=True)'
    job = start(body, shell="exec >/dev/null 2>&1;")
    assert job.wait(100) == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", [">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_the_launcher_goes_on_without_an_output(start, where):
    job = start('print("words"); sys.exit(0 if attempt else 3)', "--restarts", "1", shell=f"exec {where};")
    assert job.wait() == 0


@pytest.fixture(params=["pipe", "terminal"])
def unread(request):
    """An output that nothing reads: a pipe, and a terminal after Ctrl-S. The end to write to, and the other one."""
    reading, writing = os.pipe() if request.param == "pipe" else pty.openpty()
    if request.param == "terminal":
        termios.tcflow(writing, termios.TCOOFF)
    yield writing
    os.close(reading)
    os.close(writing)


FLOOD = """
def flood():
    while True:
        print("x" * 99)
"""


@pytest.mark.slow
def test_a_failure_is_noticed_though_nothing_reads_the_output(start, unread):
    body = """
if me == 0:
    flood()
while not (os.path.exists("runs/launch/0.log") and os.stat("runs/launch/0.log").st_size > 100000):
    time.sleep(0.01)
sys.exit(3)
"""
    assert start(FLOOD + body, "-n", "2", out=unread).wait(60) == 3


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_signals_are_passed_on_though_nothing_reads_the_output(start, unread, tmp_path, times):
    body = """
def stop(*_):
    note("saved")
    if sys.argv[1] == "1":
        os._exit(0)
signal.signal(signal.SIGTERM, stop)
flood()
"""
    job = start(FLOOD + body, arguments=(str(times),), out=unread)
    wait_for(tmp_path / "runs/launch/0.log", 100_000)
    job.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "saved")
    if times == 2:
        job.send_signal(signal.SIGTERM)
    assert job.wait(60) == (0 if times == 1 else 128 + signal.SIGKILL)


def test_a_line_that_comes_in_two_parts_stays_one(tmp_path):
    """A launcher that has not read for a while finds more than it reads at once, which ends inside a line."""
    ours, theirs = os.pipe()
    shown, text = [], b"".join(b"%05d %s\n" % (number, b"x" * 58) for number in range(1100))
    with open(ours, "rb") as file, open(tmp_path / "0.log", "wb") as log:
        # Without a process and a terminal.
        printer, reader = object.__new__(worker.Printer), object.__new__(worker.Worker)
        printer.show = shown.append
        reader.number, reader.log, reader.last = 0, log, []
        pipe = worker.Pipe(file, printer)
        for part in (text[:40], text[40:65_576], text[65_576:]):
            os.write(theirs, part)
            worker._read(reader, pipe)
        os.close(theirs)
        while worker._read(reader, pipe):
            continue
    assert (tmp_path / "0.log").read_bytes() == text
    assert b"".join(shown) == b"".join(b"[0] %s\n" % line for line in text.splitlines())


@pytest.mark.slow
def test_what_was_not_read_is_counted_and_in_the_log(start, tmp_path):
    job = start("for number in range(30000): print(number, 'x' * 99)")
    assert job.wait(60) == 0
    out, err = job.communicate()
    log = (tmp_path / "runs/launch/0.log").read_text().splitlines()
    assert [int(line.split()[0]) for line in log] == list(range(30000))
    told = re.fullmatch(
        r"jaxdist launch: (\d+) lines of the output were not read and dropped; runs/launch has.*\n", err
    )
    assert out.count("\n") + int(told[1]) == 30000


def test_lines_are_missing_only_where_it_is_said(monkeypatch):
    """Read again after a while: what was dropped meanwhile is counted where it was."""
    reading, writing = os.pipe()
    with open(reading) as lines, open(writing, "w") as out:
        monkeypatch.setattr(worker, "PATIENCE", 0.0)
        printing = worker.Printer(out)
        for number in range(30000):
            printing.show(b"%d %s\n" % (number, b"x" * 99))
        monkeypatch.setattr(worker, "PATIENCE", 60.0)
        found = []
        reader = threading.Thread(target=lambda: found.extend(lines))
        reader.start()
        printing.show(b"30000\n")  # once there is room
        dropped = printing.close()
        out.close()
        reader.join()
    # Lines may be dropped twice: before the pipe is full, if the thread that fills it starts late, and after.
    number, missing = 0, 0
    for line in found:
        if line.startswith("jaxdist launch: "):
            count = int(line.split()[2])
            assert line == f"jaxdist launch: {count} lines are missing here: the output was not read\n"
            number, missing = number + count, missing + count
        else:
            assert int(line.split()[0]) == number
            number += 1
    assert number == 30001
    assert 0 < missing == dropped < 30000


def test_an_output_that_is_read_slowly_loses_nothing(monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE", 60.0)
    monkeypatch.setattr(worker, "MOST_WAITING", 1000)
    reading, writing = os.pipe()
    with open(reading, "rb") as lines, open(writing, "w") as out:
        found = []
        reader = threading.Thread(target=lambda: found.extend(lines))
        printing = worker.Printer(out)
        threading.Timer(0.1, reader.start).start()
        for number in range(3000):
            printing.show(b"%d %s\n" % (number, b"x" * 99))
        assert printing.close() == 0
        out.close()
        reader.join()
    assert [int(line.split()[0]) for line in found] == list(range(3000))


def test_a_log_on_a_disk_that_hangs_holds_up_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "READ_SECONDS", 0.1)
    os.mkfifo(tmp_path / "0.log")
    reading = os.open(tmp_path / "0.log", os.O_RDONLY | os.O_NONBLOCK)
    body = "import os, sys, time\nif os.environ['JAX_PROCESS_ID'] == '1': sys.exit(3)\nwhile True: print('x' * 99)"
    try:
        with pytest.raises(ProcessFailedError, match="process 1 exited with code 3"):
            launch([sys.executable, "-c", body], 2, logs=tmp_path)
    finally:
        os.close(reading)


def test_a_bar_of_progress_is_seen_while_it_grows(start, tmp_path):
    job = start('print("10%", end="\\r"); time.sleep(20); open("ended", "w").close()')
    assert job.stdout.readline() == "[0] 10%\n"
    assert not (tmp_path / "ended").exists()


def test_in_a_notebook(tmp_path, monkeypatch):
    """Its output takes text alone, and it may have many files open."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    files = [os.dup(0) for _ in range(1024)]
    try:
        launch([sys.executable, "-c", "print('é')"], 1, logs=tmp_path)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sys.stdout.getvalue() == "[0] é\n"


def test_none_is_left_where_a_log_cannot_be_written(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kw: started.append(popen(*args, **kw)) or started[-1])
    (tmp_path / "1.log").mkdir()
    with pytest.raises(IsADirectoryError):
        launch(["sleep", "60"], 2, logs=tmp_path)
    assert all(one.poll() is not None for one in started)


def test_a_held_port_is_for_process_0_alone():
    with job.hold_port() as held:
        port = job.port_of(held)
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ValueError, match=rf"port {port} is not available .* in use"),
        ):
            job.hold_port(port)
        with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
            pass


def test_gpus_are_dealt_out(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    name = job.CHOSEN
    assert job.assign_gpus(2, {}, tmp_path) == [{name: "0,1"}, {name: "2,3"}]
    assert job.assign_gpus(2, {"CUDA_VISIBLE_DEVICES": "5,7"}, tmp_path) == [{name: "0"}, {name: "1"}]
    assert job.assign_gpus(2, {"JAX_PLATFORMS": "cuda,cpu"}, tmp_path) == [{name: "0,1"}, {name: "2,3"}]
    for variables in ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": "-1"}, {name: "0"}):
        assert job.assign_gpus(3, variables, tmp_path) == [{}, {}, {}]
    with pytest.raises(ValueError, match="4 GPUs do not divide among 3 processes"):
        job.assign_gpus(3, {}, tmp_path)


def test_processes_on_the_cpu_keep_their_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "is_glibc", lambda: True)
    kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
    for variables in ({}, {"JAX_PLATFORMS": "cpu"}, {"GLIBC_TUNABLES": "glibc.rtld.nns=4"}, {"LD_PRELOAD": "x.so"}):
        assert job.allocator_settings(variables, tmp_path) == kept
    for name, value in [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")]:
        assert job.allocator_settings({name: value}, tmp_path) == {}
    assert job.allocator_settings({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, tmp_path) == {}
    assert job.allocator_settings({"JAX_PLATFORMS": "tpu,cpu"}, tmp_path) == {}
    monkeypatch.setattr(job, "is_glibc", lambda: False)
    assert job.allocator_settings({}, tmp_path) == {}


@pytest.mark.parametrize("device", ["nvidia0", "kfd", "accel0", "vfio/0"])
def test_processes_on_accelerators_have_the_allocator_as_it_is(tmp_path, device):
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    assert not job.on_cpu({}, tmp_path)
    assert job.on_cpu({"JAX_PLATFORMS": "cpu"}, tmp_path)
    assert job.on_cpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == (device == "nvidia0")


def test_launch_sets_what_keeps_memory_and_respects_what_is_set(tmp_path, capfd):
    body = "import os; print(sorted(name for name in os.environ if name.startswith('MALLOC_')))"
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    for given in ({"JAX_PLATFORMS": "cpu"}, {"JAX_PLATFORMS": "cpu", "MALLOC_TOP_PAD_": "0"}):
        launch([sys.executable, "-c", body], 1, logs=tmp_path, environment=environment | given)
    first = sorted(job.KEEPING) if job.is_glibc() else []
    assert capfd.readouterr().out == f"[0] {first}\n[0] ['MALLOC_TOP_PAD_']\n"


@pytest.mark.skipif(not job.is_glibc(), reason="for glibc")
def test_a_large_block_is_mapped_once(tmp_path, capfd):
    """In a thread, as XLA takes memory: pages that are cleared anew for a block of 80 MiB, which has 20,480."""
    body = """
import ctypes, resource, threading
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(80 << 20)
    ctypes.memset(block, 1, 80 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
thread = threading.Thread(target=lambda: print(faults() and max(faults(), faults()) < 100))
thread.start()
"""
    own = job.user_allocator(os.environ)
    environment = {name: value for name, value in os.environ.items() if name not in own}
    launch([sys.executable, "-c", body], 1, logs=tmp_path, environment=environment | {"JAX_PLATFORMS": "cpu"})
    assert capfd.readouterr().out == "[0] True\n"


@pytest.mark.slow
def test_wrong_arguments(start):
    with pytest.raises(ValueError, match=r"at least 1 process.*got 0"):
        launch([sys.executable], 0)
    for options in (["--port", "1", "-n", "0"], ["--port", "70000"], ["--grace", "inf"]):
        job = start("", *options)
        _, err = job.communicate()
        assert (job.returncode, err.count("\n")) == (2, 1)
