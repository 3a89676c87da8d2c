"""`jaxdist plan`: the step of `jaxdist train`, weighed for machines that are not here."""

import re
from importlib import resources

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist as jd
from jaxdist._cli import planning, planning_disk, running
from jaxdist._cli.commands import plan as plans
from jaxdist._cli.main import main
from jaxdist._cli.models import base as layering
from jaxdist._cli.models import gpt
from jaxdist._cli.models.base import PLAIN, Workload, parameters_of
from jaxdist._cli.models.text import text_layers
from jaxdist._cli.spellings import parse
from jaxdist._cli.training import one_worker, train
from jaxdist.analysis import Span, base, cost

MODEL = "gpt:tiny"


def loss(params, batch, layers=PLAIN):
    return jnp.mean(layers.one(lambda params, x: (x @ params["w"]) ** 2)(params, batch))


@pytest.fixture(scope="module")
def workload():
    """A single matrix: it compiles in no time."""
    rows = lambda seed, step, size: np.ones((size, 64), np.float32)  # noqa: E731
    init = lambda key: {"w": jax.random.normal(key, (64, 32))}  # noqa: E731
    metrics = lambda params, batch, layers=PLAIN: {"loss": loss(params, batch, layers)}  # noqa: E731
    return Workload("matrix", init, loss, metrics, rows, lambda size: [rows(0, 0, size)], "rows", 1)


@pytest.fixture
def four(monkeypatch):
    """Four CPU devices in the place of chips of an own kind, two nodes of two."""
    mesh = jd.make_mesh({"data": 4}, devices=jax.devices()[:4])
    chip = cost.CHIPS["h100"]._replace(name="own")
    places = cost.cluster(chip, [(cost.NETWORK, 2), (cost.NVLINK, 2)])

    def become(**changed):
        monkeypatch.setattr(planning, "mesh_of", lambda target, num_slices=1: (chip._replace(**changed), mesh))
        monkeypatch.setattr(cost, "of_mesh", lambda name, mesh: places)
        return mesh

    become()
    return become


@pytest.mark.slow
def test_a_gpt(four):
    test_it_is_the_step_that_train_runs(four, parse.parse_workload("text", MODEL), "zero:3")


@pytest.mark.slow
@pytest.mark.parametrize("spelled", ["ef:power_sgd:2", "zero:3"])
def test_it_is_the_step_that_train_runs(four, workload, spelled):
    mesh, method = four(), parse.parse_method(spelled, "adam:1e-3")
    found = planning.plan("own", workload, method, batch_size=8)
    run = train.prepare(workload, **method._asdict(), mesh=mesh, batch_size=8)
    assert found.wire_bytes == run.wire_bytes > 0
    assert found.parameters == run.parameters
    held = {"parameters": run.state.params, "optimizer state": run.state.opt_state}
    for name, tree in held.items():
        arrays = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        here = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        assert here <= found.device_bytes[name] <= here + 64  # keys are counted too
    assert found.fits
    assert {link.link for link in found.links} == {"network", "NVLink"}
    assert found.compute_seconds + found.exposed_seconds == pytest.approx(found.seconds)
    assert found.exposed_seconds == pytest.approx(
        sum(kind.seconds for kind in found.collectives)
    )  # nothing hides on CPU


def test_rounds_are_spread_over_their_steps(four, workload):
    method = parse.parse_method("diloco:H=50", "adam:1e-3")
    found = planning.plan("own", workload, method, batch_size=4)
    in_round = sum(kind.wire_bytes for kind in found.collectives)
    assert in_round / 50 <= found.wire_bytes < in_round / 40
    # Between rounds only the mean of the loss is sent.
    loss = base.make_collective("all-reduce", [("float32", 4)], groups=((0, 1, 2, 3),), devices=4, where="")
    always = cost.seconds(cost.crossings(loss, cost.of_mesh("own", jd.make_mesh({"data": 1}))))
    round_ = sum(kind.seconds for kind in found.collectives)
    assert found.exposed_seconds == pytest.approx(always + (round_ - always) / 50)


def test_the_step_that_sends_most_is_not_of_the_warm_up(four, workload):
    parsed = (
        parse.parse_method(name, "adam:1e-3", warm_up=False) for name in ("diloco:H=50,warmup_steps=100", "diloco:H=50")
    )
    warm, plain = (planning.plan("own", workload, method, batch_size=4) for method in parsed)
    assert (warm.wire_bytes, warm.exposed_seconds) == (plain.wire_bytes, plain.exposed_seconds)
    with pytest.raises(ValueError, match="warmup_steps"):
        parse.parse_method("diloco:H=50,warmup_steps=-1", "adam:1e-3", warm_up=False)


def test_the_host_holds_what_was_offloaded(four, workload):
    method = parse.parse_method("exact", "adam:1e-3")
    found = planning.plan("own", workload, method, batch_size=4, offload=one_worker.parse_offload("host"))
    assert found.host_bytes["optimizer state"] == pytest.approx(2 * 4 * found.parameters, rel=0.01)
    assert found.device_bytes["parameters"] == 4 * found.parameters


def test_a_target_without_host_memory_counts_the_state_there_by_its_mark(four, workload, monkeypatch, capsys, tmp_path):
    """GPUs that are not attached: JAX forgets that an array is on the host, and XLA does not compile its donation."""
    method, offload = parse.parse_method("exact", "adam:1e-3"), one_worker.parse_offload("host")
    plain = planning.plan("own", workload, method, batch_size=4)
    monkeypatch.setattr(planning, "_has_host_memory", lambda mesh: False)
    found = planning.plan("own", workload, method, batch_size=4, offload=offload)
    state = found.host_bytes["optimizer state"]
    assert state == pytest.approx(2 * 4 * found.parameters, rel=0.01)
    assert found.peak == plain.peak - state
    assert "optimizer state" not in found.device_bytes
    # Gradients to the host and updates back, at the speed of its link.
    crossing = 2 * 4 * found.parameters / found.chip.host_bandwidth
    assert found.seconds == pytest.approx(plain.seconds + crossing, rel=1e-3)
    monkeypatch.setattr(parse, "parse_workload", lambda *names: workload)
    assert main(["plan", "--target", "h100:1x1", "--model", MODEL, "--offload", "host", "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the compiler of h100:1x1 does not take --offload host ahead of time" in said


def test_what_the_compiler_raises_is_one_line(four, workload, monkeypatch, capsys, tmp_path):
    def fail(self, **options):
        raise RuntimeError("INTERNAL: the async shape\n" + "f32[768,768] " * 3000)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    monkeypatch.setattr(parse, "parse_workload", lambda *names: workload)
    assert main(["plan", "--target", "h100:1x1", "--model", MODEL, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxdist: error: the compiler of h100:1x1 failed: INTERNAL: the async shape f32[768,768]")
    assert "try another --reducer" in said
    assert said.count("\n") == 1
    assert len(said) < 700


def test_an_optimizer_on_a_disk_is_counted(four, workload):
    method = parse.parse_method("exact", "adam:1e-3")
    found = planning_disk.plan_nvme("own", workload, method, batch_size=4)
    n = found.parameters
    # Two moments and the master parameters, read and written; twice that is allocated.
    assert (found.disk_bytes, found.disk_traffic) == (24 * n, (12 * n, 12 * n))
    assert found.device_bytes["gradients"] == pytest.approx(4 * n, abs=64)
    assert "optimizer state" not in found.device_bytes
    with pytest.raises(ValueError, match="needs a reducer, or --zero 3"):
        planning_disk.plan_nvme("own", workload, parse.parse_method("zero:1", "adam:1e-3"))


@pytest.mark.slow
def test_the_command_plans_layers_on_a_disk(four, capsys, tmp_path):
    arguments = ["plan", "--target", "h100:1x1", "--model", f"{MODEL},layers=40", "--offload", "layers"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "a step reads" in capsys.readouterr().out
    four(memory=1e4)
    assert main([*arguments, "--out", str(tmp_path)]) == 1
    assert "offload.tiled_dense" in capsys.readouterr().out


def test_layers_on_a_disk_leave_a_few_on_the_device(four, monkeypatch, capsys):
    config, method = gpt.SIZES["tiny"], parse.parse_method("exact", "adam:1e-3")
    whole = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))))
    layer = gpt.TransformerBlock(config)
    block = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, config.context, config.width)))
    each = sum(x.size for x in jax.tree.leaves(block))

    def compiled(target, workload, method, **options):
        sizes = {
            "target": target,
            "devices": 4,
            "chip": cost.CHIPS["h100"],
            "fits": True,
            "host_bytes": {},
            "peak": 0.0,
        }
        n = parameters_of(workload)
        seconds = {"seconds": n, "compute_seconds": n, "exposed_seconds": 0.0, "flops": n, "wire_bytes": n}
        held = {"temporaries": 1000.0, "batch": 8.0}
        return planning.Planned(**sizes, parameters=n, device_bytes=held, advice=(), compile_seconds=1.0, **seconds)

    monkeypatch.setattr(planning, "plan", compiled)
    found = planning_disk.plan_layers("own", text_layers(config._replace(layers=8)), method)
    assert found.parameters == found.wire_bytes == whole + 7 * each
    assert found.compute_seconds == pytest.approx(4 / 3 * found.parameters)  # each layer once more
    # Parameters and two moments twice; the parameters are read in both passes.
    assert found.disk_bytes == 24 * found.parameters
    assert found.disk_traffic == (16 * found.parameters, 12 * found.parameters)
    largest = max(each, whole - each)
    assert found.device_bytes == {"parameters": 12 * largest, "gradients": 4 * largest, "temporaries": 1000, "batch": 8}
    assert found.host_bytes["buffers"] == 3 * 12 * largest
    assert found.host_bytes["inputs of layers"] == 4 * 8 * 4 * config.context * config.width
    for refused in (["--zero", "3"], ["--sync", "diloco:H=4"]):
        assert main(["plan", "--target", "h100:1x1", "--model", MODEL, "--offload", "layers", *refused]) == 2
        assert "leave --sync and --zero out" in capsys.readouterr().err


@pytest.mark.parametrize(("devices", "network"), [(1, ""), (4, ", waiting for the network 2.0 ms (4%)")])
def test_one_device_does_not_wait_for_a_network(devices, network, capsys):
    counted = {"parameters": 8, "fits": True, "device_bytes": {}, "host_bytes": {}, "peak": 0.0, "advice": ()}
    times = {"seconds": 0.05, "compute_seconds": 0.008, "exposed_seconds": 0.002 * (devices > 1), "flops": 1e12}
    found = planning.Planned("own", devices, cost.CHIPS["rtx4090"], **counted, compile_seconds=1.0, **times)
    plans._print_times(running.new_console(), found)
    host = "40.0 ms (80%)" if devices > 1 else "42.0 ms (84%)"
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        f"step at best 50.0 ms: computation 8.0 ms{network}, waiting for the host {host}; 20 TFLOP/s"
    )


@pytest.mark.parametrize(
    ("examples", "devices", "times", "batch"),
    [(8, 1, 8.6, 68), (8, 4, 8.6, 68), (100, 1, 1.2, None), (4, 1, 333.3, 1300)],
)
def test_a_step_that_waits_for_the_host_is_told_how_many_examples_hide_it(examples, devices, times, batch):
    advice = planning_disk._advise_examples(examples, devices, times)
    assert [int(line.split()[1].rstrip(":")) for line in advice] == ([batch] if batch else [])


def test_layers_on_the_host_leave_three_on_the_device(four, workload, monkeypatch, capsys):
    config, method = gpt.SIZES["tiny"]._replace(layers=8), parse.parse_method("exact", "adam:1e-3")
    plan = planning.plan

    def without_compiler(target, workload, method, **options):
        return plan(target, matrix, method, **options)._replace(parameters=parameters_of(workload))

    matrix = workload
    four(host_bandwidth=1e6)
    monkeypatch.setattr(planning, "plan", without_compiler)
    disk, host = (
        planning_disk.plan_layers("own", text_layers(config), method, place=place) for place in ("disk", "host")
    )
    n = host.parameters
    assert (host.disk_bytes, host.disk_traffic) == (0.0, (0.0, 0.0))
    assert host.host_bytes["parameters"] + host.host_bytes["optimizer state"] == 12 * n
    # The moments of three layers, which from a disk are updated on the host.
    assert host.peak - disk.peak == host.device_bytes["optimizer state"] == 2 * host.device_bytes["parameters"]
    assert host.seconds >= 16 * n / host.chip.host_bandwidth
    assert "the link to the host decides" in host.advice[0]
    assert disk.advice == ()
    assert any("offload.host_layers" in line for line in host.warnings)
    assert main(["plan", "--target", "h100:1x1", "--model", MODEL, "--offload", "host_layers", "--zero", "3"]) == 2
    assert "--offload host_layers averages" in capsys.readouterr().err


def test_without_the_compiler_the_chip_is_that_of_the_command(monkeypatch, capsys):
    """And not the one whose compiler stands in for it."""
    monkeypatch.setattr(planning.pods, "find_spec", lambda name: None)
    chip = ["--memory", "24GB", "--flops", "165e12", "--bandwidth", "1TB/s"]
    for target, spelled in (
        ([], "gpu:1x1"),
        (["--target", "gpu:1x4"], "gpu:1x4"),
        (["--target", "l40s:1x2"], "l40s:1x2"),
    ):
        assert main(["plan", *chip, *target, "--model", MODEL]) == 2
        said = "".join(capsys.readouterr())
        assert f"compiling for {spelled} needs xla_cuda13: pip install '.[gpu-plan]'" in said
        assert "h100" not in said


def test_any_chip(monkeypatch, workload):
    """Its figures decide what fits, how long a step takes and what is advised; the compiler is that of a named one."""
    mesh = jd.make_mesh({"data": 1}, devices=jax.devices()[:1])
    asked = []
    monkeypatch.setattr(planning.pods, "gpu", lambda target, axes: asked.append(target) or mesh)
    method = parse.parse_method("exact", "adam:1e-3")
    chip = planning.describe_chip("gpu:1x1", memory=24e9, flops=165e12, bandwidth=1e12)
    found = planning.plan("gpu:1x1", workload, method, chip=chip)
    assert asked == ["h100:1x1"]
    assert (found.chip, found.devices, found.fits) == (chip, 1, True)
    assert not chip.is_measured
    assert "compiled as for an h100" in found.warnings[-1]
    slower = planning.describe_chip("gpu:1x1", memory=1e4, flops=165e12, bandwidth=1e11)
    slow = planning.plan("gpu:1x1", workload, method, chip=slower)
    assert slow.compute_seconds == pytest.approx(10 * found.compute_seconds)
    assert not slow.fits
    assert [line.split(" ")[1] for line in slow.advice[:2]] == ["host", "host_layers"]
    # Other memory in a chip with a name leaves the rest.
    larger = planning.describe_chip("a100:1x1", memory=40e9)
    assert larger == cost.CHIPS["a100"]._replace(memory=40e9)
    assert planning.describe_chip("a100:1x1") is None
    assert not planning.describe_chip("h100:1x1", flops=1e12).is_measured


@pytest.mark.parametrize("name", planning.pods.GPUS)
def test_a_gpu_has_the_figures_of_its_description(name):
    """Of two sources; what a program gets of the memory may be less than what is soldered."""
    text = (resources.files("jaxdist.analysis") / "targets" / f"{name}.txtpb").read_text()
    chip, known = cost.CHIPS[name], dict(re.findall(r"^  (\w+): (\d+)$", text, re.MULTILINE))
    assert chip.bandwidth == pytest.approx(float(known["memory_bandwidth"]), rel=0.001)
    assert 0.93 * float(known["device_memory_size"]) <= chip.memory <= float(known["device_memory_size"])
    assert planning.check_target(f"{name}:1x1") == name
    where = cost.of_mesh(name, jd.make_mesh({"data": 2}, devices=jax.devices()[:2]))
    assert where.chip is chip
    assert [link.name for link in where.links] == ["network", "PCIe" if name in ("l40s", "rtx4090") else "NVLink"]


def test_advice_for_one_device_is_something_that_it_can_do():
    method, chip = parse.parse_method("exact", "adam:1e-3"), cost.CHIPS["h100"]
    device = {"parameters": 30e9, "optimizer state": 60e9, "temporaries": 20e9}
    lines = planning.advise(device, chip, method, None, False, devices=1)
    assert not any("--zero" in line for line in lines)
    assert [line.split(" ")[1] for line in lines] == ["host", "host_layers", "layers"]
    assert any("nvme_layers" in line for line in lines)
    small = planning.advise(device, cost.CHIPS["rtx4090"], method, None, False, devices=1)
    assert [line.split(" ")[1] for line in small] == ["host_layers", "layers"]
    # ZeRO shards nothing there, whatever was asked for.
    for stage in (1, 3):
        zero = parse.parse_method(f"zero:{stage}", "adam:1e-3")
        lines = planning.advise(device, chip, zero, one_worker.Offload(), False, devices=1)
        assert [line[:32] for line in lines] == ["--offload host_layers instead of", "--offload layers instead of --ze"]
    assert "--zero 1" in planning.advise(device, chip, method, None, False, devices=64)[0]
    assert not any("layers" in line for line in planning.advise(device, chip, method, None, False, devices=64))


def test_the_command_prints_and_draws(four, workload, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(parse, "parse_workload", lambda *names: workload)
    arguments = ["plan", "--target", "h100:1x8", "--model", MODEL, "--out", str(tmp_path)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith("compiling for h100:1x8 ...\n")
    for part in ("optimizer state", "all-reduce", "over network", "as measured on an H100", "rows/s", "fits: "):
        assert part in said
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    four(memory=1e4)
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert "does not fit" in said
    assert "--zero 1 shards" in said


def test_a_short_step_has_a_time_that_is_not_zero():
    durations = [plans._duration(seconds) for seconds in (0.0, 4e-6, 7.9e-4, 0.0351, 3.5)]
    assert durations == ["0.0 ms", "4.0 µs", "0.8 ms", "35.1 ms", "3,500 ms"]


def test_a_folder_that_cannot_be_made_is_found_before_the_compilation(monkeypatch, capsys, workload):
    def refuse(path, **settings):
        raise PermissionError(f"no permission for {path}")

    monkeypatch.setattr(parse, "parse_workload", lambda *names: workload)
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    monkeypatch.setattr(planning, "plan", lambda *given, **options: pytest.fail("compiled"))
    assert main(["plan", "--target", "h100:1x8", "--model", MODEL, "--out", "new"]) == 2
    assert "no permission for new" in capsys.readouterr().err


def test_a_step_without_communication_has_a_time(four, workload, monkeypatch, capsys, tmp_path):
    plan = planning.plan
    monkeypatch.setattr(planning, "plan", lambda *given, **options: plan(*given, **options)._replace(collectives=()))
    monkeypatch.setattr(parse, "parse_workload", lambda *names: workload)
    assert main(["plan", "--target", "h100:1x8", "--model", MODEL, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rows/s" in said
    assert "all-reduce" not in said


def test_a_program_that_the_compiler_refuses():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded by 4.75G."
    held = {"device": {"parameters": 2.0**30}, "pinned_host": {}}
    known = {"target": "v5e:2x2", "devices": 4, "chip": cost.CHIPS["v5e"], "parameters": 1}
    method = parse.parse_method("exact", "adam:1e-3")
    found = planning._plan_refused(message, known, held, method, None, 1.0)
    assert not found.fits
    assert found.peak == 20.5 * 2**30
    assert found.device_bytes["temporaries"] == 19.5 * 2**30
    assert any("--batch" in line for line in found.advice)
    # The other form of it tells the temporaries alone; parameters of a thousandth of the memory need no ZeRO.
    message = (
        "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (16.66G) exceeds available HBM (15.75G)."
    )
    held["device"]["parameters"] = 2.0**23
    found = planning._plan_refused(message, known, held, method, None, 1.0)
    assert found.device_bytes["temporaries"] == pytest.approx(16.66 * 2**30)
    assert found.peak == pytest.approx(16.66 * 2**30 + 2**23)
    assert not any("--zero" in line for line in found.advice)
    assert any("--batch" in line for line in found.advice)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("exact", "a --reducer with fewer bytes, or --sync diloco:H=50"),
        ("zero:2", "more examples on each device (--batch), or --reducer two_shot:int8"),
        ("diloco:H=2", "more examples on each device (--batch), or a larger H"),
        ("dion:1e-2,rank=4", "more examples on each device (--batch)"),
    ],
)
def test_the_cure_for_communication_that_is_not_hidden_is_one_that_the_method_has(name, cure):
    method = parse.parse_method(name, "adam:1e-3")
    lines = planning.advise({}, cost.CHIPS["h100"], method, None, True, exposed=0.3)
    assert lines == (f"communication is not hidden: {cure}",)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "h100:8"], "needs a shape: h100:1x1 is one GPU, h100:1x8 a node of 8"),
        (["--target", "v5e:64"], "needs a shape: v5e:1x1 is one chip, v5e:8x8"),
        (["--target", "v5e:2x2", "--slices", "2", "--offload", "layers"], "for one machine"),
        (["--target", "v9:3"], "unknown target 'v9:3'; there are v5e:16x16"),
        (["--target", "v5e:2x2", "--xla", "foo"], "--xla needs NAME=VALUE"),
        (["--target", "v5e:2x2", "--xla", "=1"], "--xla needs NAME=VALUE"),
        (["--target", "v5p:4x4"], "unknown target 'v5p:4x4'"),
        (["--target", "tpu7x:4x4"], "v6e:8x8, tpu7x:4x4x4 (TPU: generation and shape)"),
        (["--target", "v5e:2x2", "--model", "gpt:2b"], "unknown size '2b'; known: tiny"),
        (["--target", "v5e:2x2", "--model", "convnet:4"], "--model must be gpt:SIZE"),
        ([], "plan needs --target, one of v5e:16x16"),
        (["--memory", "24GB"], "gpu:1x1 is a chip of your own and needs --flops, --bandwidth, as in --memory 24GB"),
        (["--target", "gpu:1x2"], "needs --memory, --flops, --bandwidth"),
        (["--target", "gpu"], "needs a shape: gpu:1x1 is one GPU"),
        (["--memory", "24", "--flops", "1e12", "--bandwidth", "1TB/s"], "--memory must be a number of bytes"),
        (["--memory", "0GB", "--flops", "1e12", "--bandwidth", "1TB/s"], "--memory must be a number of bytes"),
        (["--target", "h100:1x1", "--flops", "-1"], "--flops must be positive, got -1"),
        (
            ["--target", "v5e:2x2", "--zero", "3", "--reducer", "ef:power_sgd:4"],
            "got 'zero:3/ef:power_sgd:4': use exact",
        ),
        (["--target", "v5e:2x2", "--reducer", "nothing"], "unknown reducer 'nothing'; known: exact"),
        (["--target", "h100:2x8", "--slices", "2"], "--slices is for TPUs"),
    ],
)
def test_what_cannot_work_is_one_line(capsys, arguments, said):
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_what_is_waited_for_is_what_no_computation_covers():
    assert plans.subtract_intervals([(0.0, 10.0), (12.0, 13.0)], [(1.0, 2.0), (4.0, 5.0), (9.0, 12.5)]) == [
        (0.0, 1.0),
        (2.0, 4.0),
        (5.0, 9.0),
        (12.5, 13.0),
    ]
    spans = [Span("compute", "a", 0.0, 2.0), Span("compute", "b", 1.0, 3.0), Span("compute", "c", 4.0, 5.0)]
    assert plans.merge_intervals([(span.start, span.end) for span in spans]) == [(0.0, 3.0), (4.0, 5.0)]


@pytest.mark.slow
def test_many_layers_are_a_loop_with_the_same_loss(monkeypatch):
    monkeypatch.setattr(layering, "LOOP_FROM", 3)
    config = gpt.GPTConfig(layers=3, width=8, heads=1, context=4)
    params = gpt.init(config, jax.random.key(0))
    tokens = jnp.arange(10, dtype=jnp.uint8).reshape(2, 5)
    blocks = [params[f"block_{n}"] for n in range(config.layers)]
    ends = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}

    def one_by_one(f, layers, x):
        for layer in layers:
            x = f(layer, x)
        return x

    plain = layering.LayerRunner(lambda f: f, one_by_one)
    expected, slopes = jax.jit(jax.value_and_grad(lambda p: gpt.loss(config, p, tokens, layers=plain)))(params)
    compiled = jax.jit(jax.value_and_grad(lambda p: gpt.loss(config, p, tokens))).lower(params).compile()
    found, got = compiled(params)
    assert "while(" in str(compiled.as_text())
    chex.assert_trees_all_close((found, got), (expected, slopes), rtol=1e-4, atol=1e-6)
    stacked = {**ends, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
    looped = layering.LayerRunner(lambda f: f, layering.apply_in_loop)
    again = jax.jit(lambda p: gpt.loss(config, p, tokens, layers=looped))(stacked)
    assert again == pytest.approx(float(expected), rel=1e-5)
