"""Every command of the README and the pages that this machine can run is run, in a folder with what its page shows.

The tests are slow, a case for each command. By default there is one: each command is run, or is not for a reason.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest
from buckets import request as send_request
from buckets import s3_server
from namespaces import inside, two_namespaces
from page_commands import commands, scripts
from paths import REPOSITORY
from readers_modules import readers_environment

# What shortens a command. Of an option that is given twice the last one counts.
# Models that compile in a second.
TEXT, DIGITS = "--model gpt:tiny,layers=1", "--model convnet:1"
STEPS = "--steps 3"
TINY, SMALL = f"{STEPS} {TEXT}", f"{STEPS} {DIGITS}"
# Without the warm-up of its own optimizer, which takes 100 steps.
LOCAL = f"--steps 10 --periods 4 --optimizer adamw:4e-3 {TEXT}"
REPLAY = "--seconds 0.3 --evaluations 4"
RATES = f"{REPLAY} --rates 0.05 --seeds 2"
RAY = "--seconds 5"
RUN = {
    "advise --link 100mbit,20ms --losses runs/compare/log.jsonl": "",
    "advise --link 100mbit,20ms --reducers exact my_reducers:diana:qsgd:2,rate=0.1": TEXT,
    "advise --link 10gbit,50us --workers 32 --compute 180": TEXT,
    "advise --model my_model:make:256 --link 100mbit,20ms --workers 8": "",
    "advise --step my_step:make --axes dcn=4,fsdp=1 --link 1gbit,1ms": "",
    "advise --step my_step:make --axes dcn=4,fsdp=8 --link 10gbit,50us --compute 180": "",
    "compare": TINY,
    "compare --link 100mbit,20ms 1gbit,1ms --target 2.4": TINY,
    "compare --link 10gbit,50us --compute 40 --table race.csv": TINY,
    "compare --link measured": TINY,
    "compare --model my_model:make --batch 64 --reducers exact ef:power_sgd:4": STEPS,
    "compare --reducers exact ef:my_compressors:power_of_two ef:two_shot:my_compressors:power_of_two "
    "--workload digits --steps 100 --optimizer sgd:0.05": SMALL,
    "compare --reducers exact ef:power_sgd:4 diloco:H=20,warmup_steps=40 --link 1gbit": f"--steps 42 {TEXT}",
    "compare --reducers exact ef:top_k:0.01 ef:power_sgd:4 --optimizer adamw:1e-3 --out runs/rate-1e-3": TINY,
    "compare --reducers exact f16 ef:top_k:0.01 --workload digits": SMALL,
    "compare --reducers exact f16 two_shot:qsgd:4 ef:power_sgd:4 diloco:H=20,warmup_steps=40 "
    "--link 100mbit,20ms 1gbit,1ms --target 2.4": f"--steps 42 {TEXT}",
    "compare --reducers exact my_reducers:diana:qsgd:2,rate=0.1 --seeds 3": TINY,
    "compare --reducers exact qsgd:2 my_reducers:diana:qsgd:2,rate=0.1 --seeds 3 --table diana.tex": TINY,
    "compare --suite compression --workload digits --seeds 3 --steps 120 --batch 64 "
    "--optimizer sgd:0.05,momentum=0.9": SMALL,
    "compare --suite compression --workload digits --seeds 3 --steps 120 --batch 64 "
    "--optimizer sgd:0.05,momentum=0.9 --table all.csv": SMALL,
    "compare --suite local --start 0 --periods 1 8 32 128 --model gpt:tiny,layers=1,width=64,context=32,heads=4 "
    "--steps 512 --batch 32 --workers 8 --optimizer adamw:4e-3": "--steps 4 --periods 1 2",
    "compare --suite local --workers 4 8 --out runs/local": LOCAL,
    "compare --suite local --workers 4 8 --seeds 2": LOCAL,
    "compare --workload digits --devices 4 --optimizer sgd:0.1 --steps 150 --reducers exact qsgd:8 ef:top_k:0.1 "
    "ef:my_idea:larger_of_two --seeds 3 --label exact=All-reduce 'qsgd:8=QSGD, 8 bits' "
    "'ef:top_k:0.1=Top-k, 10 %' ef:my_idea:larger_of_two=Ours --figure idea.pdf --table idea.tex": SMALL,
    "doctor": "",
    "doctor --devices 2": "",
    "goodput --chips 1228800 --slice 256 --mtbf 1y --repair 80min --detect 5s --restart 1min --resize 7s --reload 0s "
    "--save 0s --period 24 --fragments 24 --overlap 2 --islands 2 8 16": "",
    "goodput --chips 16384 --slice 8 --mtbf 5.8y --repair 1h": "",
    "goodput --chips 512 --slice 64 --islands 2 --period 100 --message 4GB --link 2gbit --tokens 2e6 --price 0.6 "
    "--egress 0.08": "",
    "goodput --chips 512 --slice 64 --preemption 12h --outage 30min --tokens 2e6 --price 0.6": "",
    "launch -n 2 -m jaxdist._cli doctor": "",
    "launch -n 2 -m my_package.train": "",
    "launch -n 2 train.py": "",
    "launch -n 4 --restarts 10 train.py": "",
    "launch -n 4 train.py --my-option 3": "",
    "plan --memory 32GB --flops 210e12 --bandwidth 1.8TB/s --model gpt:1b": "",
    "plan --memory 32GB --flops 210e12 --bandwidth 1.8TB/s --model gpt:3b": "",
    "plan --model my_model:make:4096 --target rtx4090:1x1 --batch 512": "",
    "plan --target h100:1x1 --model gpt:1b": "",
    "plan --target h100:1x1 --model gpt:7b --offload host": "",
    "plan --target h100:1x1 --model gpt:7b --offload host_layers": "",
    "plan --target h100:1x1 --model gpt:7b --offload layers": "",
    "plan --target h100:1x1 --model gpt:7b --offload nvme": "",
    "plan --target h100:2x8 --step my_step:make:4096 --axes dcn=2,fsdp=8 --reducer qsgd:2": "",
    "plan --target h100:4x8 --model gpt:1b --reducer ef:power_sgd:4": "",
    "plan --target h100:4x8 --model gpt:7b --zero 3 --offload host --batch 64": "",
    "plan --target h200:2x8 --model gpt:7b --zero 3 --xla xla_gpu_all_gather_combine_threshold_bytes=268435456": "",
    "plan --target rtx4090:1x1 --model gpt:7b --offload host_layers": "",
    "plan --target rtx4090:1x1 --model my_model:make:4096 --batch 512": "",
    "plan --target rtx4090:1x1 --model my_model:make:4096 --batch 512 --offload host": "",
    "plan --target rtx4090:1x1 --model my_stack:make:4096,depth=40 --batch 512 --offload host_layers": "",
    "plan --target v5e:16x16 --model gpt:1b --zero 3": "",
    "plan --target v5e:2x4 --step my_step:make --axes dcn=2,fsdp=4": "",
    "plan --target v5e:4x4 --model gpt:7b --zero 1": "",
    "plan --target v5e:4x4 --model gpt:7b --zero 3 --offload host": "",
    "plan --target v5p:4x4x4 --slices 2 --model gpt:1b --sync diloco:H=50": "",
    "reducers qsgd+ef:top_k --bibtex": "",
    "replay --rule asgd --gradient ef:top_k:0.01 --link 100mbit,20ms --failures 100,5": REPLAY,
    "replay --rule asgd --workers 16 --slow 6x --optimizer sgd:0.025": REPLAY,
    "replay --rule asgd ringleader dude --skew 0.1 --law shifted_exponential:0.5,0.5 --target 0.5": REPLAY,
    "replay --rule asgd ringleader dude --workers 8 --slow 6x --skew 0.1 --law lognormal:0.005,0.2 --seconds 2": REPLAY,
    "replay --rule bsp asgd ringmaster:16 --workers 16 --recorded seconds.json --timing-only": "",
    "replay --rule bsp asgd ringmaster:16 --workers 16 --slow 6x --target 0.3 --seconds 60 --evaluations 240 "
    "--seeds 5 --rates 0.4 0.2 0.1 0.05 0.025 0.0125 --table stragglers.tex --figure stragglers.pdf": RATES,
    "replay --rule bsp asgd ringmaster:16 ad_psgd:hypercube prague:4 hop:hypercube,tokens=8,backup=1,skip=8 dude "
    "backup_workers:1 ssp:4 d_psgd:hypercube --workers 16 --batch 16 --law lognormal:0.005,0.2 --slow 6x "
    "--link 10gbit,10us --nic --target 0.2 --seconds 6 --evaluations 600 --seeds 5 "
    "--rates 1.6 0.8 0.4 0.2 0.1 0.05 0.025 0.0125 0.00625 --table slow.md": RATES,
    "replay --rule bsp asgd ringmaster:3 --workers 64 --slow 4x --seed 3 --events log.jsonl": REPLAY,
    "replay --rule bsp asgd ringmaster:8 --gradient ef:my_idea:larger_of_two --law lognormal:0.1,0.2 --slow 6x "
    "--link 100mbit,1ms --seconds 60 --target 0.5 --evaluations 600 --seeds 3 --rates 0.4 0.2 0.1 0.05 0.025 "
    "--figure uneven.pdf --table uneven.tex": RATES,
    "replay --rule bsp backup_workers:1 asgd ringmaster:16 ad_psgd:hypercube --workers 16 --slow 6x "
    "--law lognormal:0.005,0.2 --link 10gbit,10us --seconds 1 --optimizer sgd:0.05 --target 0.3": REPLAY,
    "replay --rule bsp pipe_sgd lasgd task_allocation:64 --slow 4x --link 100mbit,20ms": REPLAY,
    "replay --rule bsp ssp:4 asgd prague:4 --workers 16 --random-slow 6x,0.0625 --law lognormal:0.005,0.2 "
    "--seconds 1": REPLAY,
    "topology one-peer-exponential --workers 16 --png": "",
    "topology ring --workers 16 --png": "",
    "train --engine ray --rule ad_psgd --workers 3": RAY,
    "train --engine ray --rule asgd --workers 3 --slow 5x --seconds 60 --optimizer sgd:0.05": RAY,
    "train --engine ray --rule bsp --workers 3 --slow 5x --seconds 60 --optimizer sgd:0.2": RAY,
    "train --engine ray --rule ssp:3 --workers 3 --slow 5x --seconds 60 --workload digits --optimizer sgd:0.05": RAY,
    "train --model gpt:small --zero 3 --offload nvme:/scratch/run": f"{TINY} --offload nvme:scratch",
    "train --optimizer adamw:4e-3,schedule=cosine,warmup_steps=100 --steps 2000": f"--steps 102 {TEXT}",
    "train --reducer ef:power_sgd:4 --optimizer adamw:2e-3 --steps 500": TINY,
    "train --reducer qsgd:4,bucket=256 --text my-notes/": TINY,
    "train --steps 1000 --save-every 50 --resume --no-baseline": "--steps 3 --save-every 2",
    "train --sync diloco:H=20,warmup_steps=40 --reducer my_reducers:diana:qsgd:2,rate=0.1": f"--steps 42 {TEXT}",
    "train --sync diloco:H=50,warmup_steps=100 --optimizer adamw:2e-3 --steps 500": f"--steps 102 {TEXT}",
    "train --sync diloco:H=50,warmup_steps=100 --reducer ef:qsgd:4 --optimizer adamw:2e-3 --steps 500": (
        f"--steps 102 {TEXT}"
    ),
    "train --zero 1": TINY,
    "train --zero 2 --offload host": TINY,
    "train --zero 3 --offload nvme:/scratch/run --steps 1000": f"{TINY} --offload nvme:scratch",
    "train --zero 3 --reducer two_shot:int8": TINY,
    "tune --model gpt:demo --workers 4 --measured": "--steps 3 --evaluations 3",
    "tune --model gpt:medium,layers=11 --workers 8 --bandwidth 10gbit --latency 20us --flops 3e12": "--evaluations 3",
    "tune --workers 4 --measured --steps 20": "--steps 3 --evaluations 3",
    "benchmarks/compiled.py codes --targets v5e:2x4 v6e:2x4 tpu7x:2x2x1 --out benchmarks/reports/NAME": "--out codes",
    "benchmarks/compiled.py wires --targets cpu v5e:2x4 v6e:2x4 tpu7x:2x2x1": "",
    "benchmarks/islands cost fragments --parameters 2000000 --rate-mbit 10 --rounds 2 --train 8 --repeat 1": (
        "--parameters 20000 --train 1"
    ),
    "benchmarks/islands grace": "--seconds 8",
    "benchmarks/local warm_start --steps 1024 --warm 0 256 --seeds 0 --workers 8 --methods synchronous "
    "diloco:32,0.7,0.5 diloco_rda:32,0.7,0.5 diloco_late:32,0.7,0.5 diloco_eager:32,0.7,0.5": "--steps 256 --warm 0 32",
}
RUN |= {
    # Under `srun`, for which our launcher stands.
    "advise --losses runs/compare/log.jsonl": "",
    "examples/train_gpt.py /shared/run --size 125m --data text.txt --steps 20000": "--size tiny --steps 4",
    "examples/train_gpt.py /shared/run --size 125m --data text.txt --steps 20000 --method diloco --pods 2 "
    "--sync-period 50": "--size tiny --steps 4 --sync-period 2",
    # With a server of this machine.
    "islands s3://islands/run-7 --store endpoint=http://10.0.0.7:9000,region=us-east-1,profile=lab": (
        "--store endpoint=ENDPOINT,region=us-east-1,allow_http=true"
    ),
    "publish s3://bucket/policy": "",
    "publish s3://bucket/policy --last 100 --verify": "",
    "publish s3://bucket/policy --keep 1000 --older 7": "",
    "train --sync diloco:H=100 --islands s3://bucket/run-7 --name eu-1": f"--sync diloco:H=2 --steps 4 {TEXT}",
    "train --sync diloco:H=50 --reducer ef:qsgd:4 --islands s3://bucket/run-7 --name eu-1 --begin-with 2": (
        f"--sync diloco:H=2 --steps 4 {TEXT} --begin-with 1"
    ),
}
EXAMPLE, RESULT = "runs in tests/project/test_examples.py", "adds a row to the files of the repository"
MACHINES = "runs in two network namespaces below"
ELSEWHERE = {
    "launch --nodes 2 --node 0 --address 10.0.0.1:29400 --restarts 10 train.py": MACHINES,
    "launch --nodes 2 --node 0 --address 10.0.0.1:29400 train.py": MACHINES,
    "launch --nodes 2 --node 1 --address 10.0.0.1:29400 --restarts 10 train.py": MACHINES,
    "benchmarks/race board my_method:make --title 'My method' --by 'A. Person'": RESULT,
    "examples/follow_weights.py": EXAMPLE,
    "examples/fsdp_between_slices.py": EXAMPLE,
    "examples/lora.py": EXAMPLE,
    "examples/tensor_parallel.py": EXAMPLE,
    "examples/train_gpt.py": EXAMPLE,
    "examples/train_gpt.py --size 125m --plan": EXAMPLE,
    "examples/train_gpt.py runs/a --method islands --store /tmp/run --name a": EXAMPLE,
    "examples/train_gpt.py runs/b --method islands --store /tmp/run --name b": EXAMPLE,
}
# The processes of a scheduler.
LAUNCH = "launch -n 2 "
UNDER = {
    "advise --losses runs/compare/log.jsonl": f"{LAUNCH}-m jaxdist._cli ",
    **{command: LAUNCH for command in RUN if command.startswith("examples/train_gpt.py /shared/run")},
}
# What a command needs that not everyone installs, by a pattern of the command.
NEEDS = {
    r"(plan|benchmarks/compiled.py) .*\b(v5e|v5p|v6e|tpu7x):": "libtpu",
    r"plan .*(h100:|h200:|rtx4090:|--memory)": "jax_plugins.xla_cuda13",
    r"tune ": "optuna",
    r"train --engine ray": "ray",
    r".*s3://": "moto.server",
    r"examples/train_gpt.py": "grain",
}
# The command of the same page whose files another one reads, and those that end with 1, for what does not fit.
COMPARED = "compare --reducers exact ef:power_sgd:4 diloco:H=20,warmup_steps=40 --link 1gbit"
AFTER = {
    "advise --link 100mbit,20ms --losses runs/compare/log.jsonl": COMPARED,
    "advise --losses runs/compare/log.jsonl": COMPARED,
}
# A run and weights that are in the buckets of the pages, for the commands that show them.
IN_BUCKETS = """
import jax.numpy as jnp
import optax
import jaxdist as jd

with jd.publish.open("s3://bucket/policy") as publisher:
    publisher.put({"w": jnp.ones(64)}, step=1)
tx = jd.local_sgd.diloco(optax.sgd(0.1), sync_period=1, axis=None)
with jd.islands.join("s3://islands/run-7", tx, name="eu-1") as island:
    island.enter({"params": jnp.ones(64), "opt_state": tx.init(jnp.ones(64))})
"""
DOES_NOT_FIT = {
    "plan --memory 32GB --flops 210e12 --bandwidth 1.8TB/s --model gpt:3b",
    "plan --target h100:1x1 --model gpt:7b --offload host",
    "plan --target h100:1x1 --model gpt:7b --offload nvme",
    "plan --target v5e:4x4 --model gpt:7b --zero 1",
}
# The first block of a page, or the one that begins with its name, as the file that the page says to write.
FILES = {
    "my_compressors.py": "how-to/write-your-own-compressor.md",
    "my_idea.py": "how-to/from-an-idea-to-a-figure.md",
    "my_model.py": "reference/cli_runs.md",
    "my_reducers.py": "how-to/add-a-reducer.md",
    "my_stack.py": "how-to/before-you-rent-a-pod.md",
    "my_step.py": "how-to/before-you-rent-a-pod.md",
    "my_package/train.py": "how-to/run-on-many-processes.md",
    "train.py": "how-to/run-on-many-processes.md",
}


def test_each_command_is_run_or_is_not_for_a_reason():
    shown = {shlex.join(words) for words in (*commands(), *scripts())}
    assert not RUN.keys() & ELSEWHERE.keys()
    assert shown - RUN.keys() - ELSEWHERE.keys() == set(), "give them a line in RUN, or in ELSEWHERE with the reason"
    assert (RUN.keys() | ELSEWHERE.keys()) - shown == set(), "no page shows them any more"
    assert {*AFTER, *AFTER.values(), *DOES_NOT_FIT} <= RUN.keys()


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that pages tell the reader to write."""
    for name, page in FILES.items():
        blocks = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "docs" / page).read_text(), re.M | re.S)
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(next((block for block in blocks if block.startswith(f"# {name}\n")), blocks[0]))
    (tmp_path / "seconds.json").write_text(json.dumps([[0.1, 0.2, 0.15]] * 16))
    (tmp_path / "my-notes").mkdir()
    for name in ("my-notes/notes.txt", "text.txt"):
        (tmp_path / name).write_text((REPOSITORY / "docs/faq.md").read_text())
    return tmp_path


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """That of a reader who has installed the library; commands share what they compile."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs"))}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    return readers_environment() | {"PYTHONPATH": path} | cache


@pytest.fixture
def buckets(folder, environment):
    """The environment of a reader whose buckets, those of the pages, are on a server of this machine."""
    with s3_server() as url:
        send_request(f"{url}/bucket", "PUT")
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        found = environment | keys | {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        subprocess.run([sys.executable, "-c", IN_BUCKETS], check=True, cwd=folder, env=found, timeout=600)
        yield found


def words_of(command):
    """The words of a command of the library, after `python`."""
    words = shlex.split(f"{UNDER.get(command, '')}{command} {RUN.get(command, '')}")
    # A folder that all machines see.
    words = [word.removeprefix("/") if word == "/shared/run" else word for word in words]
    words = [str(REPOSITORY / word) if re.match(r"(examples|benchmarks)/", word) else word for word in words]
    return words if words[0].startswith(str(REPOSITORY)) else ["-m", "jaxdist._cli", *words]


def run(command, folder, environment):
    """Runs a command, shortened; returns its exit code and output."""
    words = [word.replace("ENDPOINT", environment.get("AWS_ENDPOINT_URL", "")) for word in words_of(command)]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 1200}
    done = subprocess.run([sys.executable, *words], check=False, **options)
    return done.returncode, done.stdout + done.stderr


def is_installed(module):
    try:
        return find_spec(module) is not None
    # The package around it is missing.
    except ModuleNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN, ids=list(RUN))
def test_a_command_of_a_page_runs(command, folder, environment, request):
    for module in (module for pattern, module in NEEDS.items() if re.match(pattern, command)):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    environment = request.getfixturevalue("buckets") if "s3://" in command else environment
    for part in (AFTER[command], command) if command in AFTER else (command,):
        code, printed = run(part, folder, environment)
        assert code == (part in DOES_NOT_FIT), printed[-3000:]
        assert "Traceback" not in printed


@pytest.fixture
def machines():
    """Two machines, of which the first has the address of the pages."""
    with two_namespaces("10.0.0") as names:
        yield names


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [name for name, reason in ELSEWHERE.items() if reason == MACHINES and "--node 0" in name]
)
def test_a_command_for_two_machines_runs_on_both(command, folder, environment, machines):
    started = []
    for node, name in enumerate(machines):
        there = [*inside(name), sys.executable, *words_of(command.replace("--node 0", f"--node {node}"))]
        options = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(there, text=True, **options))
    try:
        printed = [one.communicate(timeout=600)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0, 0], printed
    assert "[0] step 2: loss" in printed[0]
