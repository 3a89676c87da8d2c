"""What schedules hide: recorded programs of the compilers for GPU and TPU, and clocks wound by hand."""

import jax
import pytest
from paths import SUPPORT

import jaxdist as jd
from jaxdist import analysis
from jaxdist.analysis import base, cost, measured
from jaxdist.analysis.hlo_reader import parse
from jaxdist.analysis.hlo_work import CostModel

DATA = SUPPORT / "data"
# Stage 3 of ZeRO with prefetch on 2x4 devices: four layers of two bfloat16 kernels of 1024 x 1024, 512 rows a device.
RECORDED = {"h100": (DATA / "zero3_h100_2x4.hlo").read_text(), "v5e": (DATA / "zero3_v5e_2x4.hlo").read_text()}
ICI = cost.tpu_links("v5e")[0]
CLUSTERS = {
    "h100": cost.cluster("h100", [(cost.NETWORK, 2), (cost.NVLINK, 4)]),
    "v5e": cost.cluster("v5e", [(ICI, 2), (ICI, 4)]),
}
PRODUCT = 2 * 512 * 1024**2


@pytest.fixture(scope="module")
def found():
    return {chip: analysis.overlap(text, CLUSTERS[chip]) for chip, text in RECORDED.items()}


@pytest.mark.parametrize("chip", RECORDED)
def test_recorded_programs_send_and_compute_what_was_written(found, chip):
    """Both compilers: 8 products forward, 4 again, 15 for the gradients; bytes as `collectives` counts them."""
    assert found[chip].flops == 27 * PRODUCT
    assert found[chip].wire_bytes == analysis.collectives(RECORDED[chip]).wire_bytes
    assert sum(op.collective.count for op in found[chip].ops) == (12 if chip == "h100" else 19)
    assert found[chip].asynchronous_bytes + sum(
        op.collective.wire_bytes for op in found[chip].ops if not op.asynchronous
    ) == pytest.approx(found[chip].wire_bytes)


def test_what_lies_underneath_the_gathers(found):
    """GPU: pairs. TPU: pieces under fusions, one kernel of two; its other gather and the scatters are waited for."""
    gathers = {c: [op for op in o.ops if op.collective.kind == "all-gather"] for c, o in found.items()}
    assert [(op.asynchronous, op.flops / PRODUCT) for op in gathers["h100"]] == [(True, 0), (True, 0), (True, 1)]
    assert [(op.asynchronous, op.flops / PRODUCT) for op in gathers["v5e"]] == [
        *[(False, 0)] * 3,
        *[(True, 2), (True, 4), (True, 1)],
    ]
    assert [op.collective.count for op in gathers["v5e"]] == [1, 1, 3, 3, 3, 3]
    hidden = gathers["v5e"][4]
    assert hidden.exposed_seconds == 0 < hidden.seconds
    waited = [op for op in found["v5e"].ops if not op.asynchronous]
    assert all(op.exposed_seconds == pytest.approx(op.seconds * op.collective.count) for op in waited)


@pytest.mark.parametrize("chip", RECORDED)
def test_time_is_work_and_waiting(found, chip):
    o = found[chip]
    assert o.compute_seconds + o.exposed_seconds <= o.seconds * (1 + 1e-9)
    assert o.exposed_seconds <= o.communication_seconds
    assert o.seconds <= o.compute_seconds + o.communication_seconds + sum(
        span.end - span.start for span in o.spans if span.lane in ("memory", "host")
    )
    assert max(span.end for span in o.spans) == pytest.approx(o.seconds, rel=1e-6)
    assert analysis.overlap(RECORDED[chip]).seconds == 0  # without a cluster there is no clock


CLOCK = """
HloModule clock, is_scheduled=true, num_partitions=8
body {
  c = (s32[], f32[2000,2000]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  x = f32[2000,2000] get-tuple-element(c), index=1
  FIRST
  y = f32[2000,2000] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  LAST
  ROOT r = (s32[], f32[2000,2000]) tuple(next, z)
}
test {
  c = (s32[], f32[2000,2000]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  n = s32[] constant(5)
  ROOT t = pred[] compare(i, n), direction=LT
}
ENTRY main {
  x = f32[2000,2000] parameter(0)
  zero = s32[] constant(0)
  start = (s32[], f32[2000,2000]) tuple(zero, x)
  ROOT w = (s32[], f32[2000,2000]) while(start), condition=test, body=body
}
"""
PAIR = (
    "s = f32[2000,2000] all-reduce-start(x), replica_groups={}, to_apply=add",
    "z = f32[2000,2000] all-reduce-done(s)",
)
WRAPPED = (
    "s = ((f32[2000,2000]), f32[2000,2000], u32[]) async-start(x), calls=wrapped",
    "z = f32[2000,2000] async-done(s), calls=wrapped",
)
SYNCHRONOUS = ("z = f32[2000,2000] all-reduce(x), replica_groups={}, to_apply=add", "k = f32[] constant(0)")


def clock(first, last, link, chip):
    text = CLOCK.replace("FIRST", first).replace("LAST", last)
    wrapped = "wrapped {\n  p = f32[2000,2000] parameter(0)\n"
    wrapped += "  ROOT a = f32[2000,2000] all-reduce(p), replica_groups={}, to_apply=add\n}\n"
    text = text.replace("ENTRY", wrapped + "ENTRY") if "wrapped" in first else text
    return analysis.overlap(text, cost.cluster(chip, [(link, 8)]))


@pytest.mark.parametrize("spelling", [PAIR, WRAPPED, SYNCHRONOUS], ids=["pair", "wrapped", "synchronous"])
@pytest.mark.parametrize("bandwidth", [28e6, 280e6])
def test_a_clock_wound_by_hand(spelling, bandwidth):
    """Five rounds of a product of 16 ms and an all-reduce of 7/4 of 16 MB: 1 s or 0.1 s, and 14 hops."""
    chip = cost.Chip("own", {"other": 1e12}, 1e9, 1e15, 1e9)
    first, last = spelling
    o = clock(first, last, cost.Link("wire", 1e-3, bandwidth), chip)
    send, work = 14e-3 + 28e6 / bandwidth, 16e-3
    exposed = send if spelling is SYNCHRONOUS else send - work
    assert o.ops[0].collective.count == 5
    assert o.ops[0].seconds == pytest.approx(send)
    assert o.exposed_seconds == pytest.approx(5 * exposed)
    assert o.seconds == pytest.approx(5 * (exposed + work), rel=1e-6)
    assert o.exposed_bytes == (5 * 28e6 if spelling is SYNCHRONOUS else 0)
    assert sum(s.end - s.start for s in o.spans if s.lane == "wire") == pytest.approx(5 * send)


def test_one_class_of_links_carries_one_collective_at_a_time():
    two = (
        PAIR[0] + "\n  s2 = f32[2000,2000] all-reduce-start(x), replica_groups={}, to_apply=add",
        "z2 = f32[2000,2000] all-reduce-done(s2)\n  " + PAIR[1],
    )
    chip = cost.Chip("own", {"other": 1e12}, 1e9, 1e15, 1e9)
    first, last = two
    o = clock(first, last, cost.Link("wire", 0.0, 28e6), chip)
    assert o.seconds == pytest.approx(5 * 2.0, rel=1e-6)


def test_hierarchical_rings_share_the_slow_links():
    """All-reduce of `b` over 4 nodes of 8: each device sends 2 · 3/4 · b/8 to other nodes and 2 · 7/8 · b inside."""
    places = cost.cluster("h100", [(cost.NETWORK, 4), (cost.NVLINK, 8)])

    def sent(kind, nbytes, group, **more):
        op = analysis.base.make_collective(kind, [("float32", nbytes)], groups=(group,), devices=32, where="", **more)
        return {crossing.link: crossing.bytes for crossing in cost.crossings(op, places)}

    everyone, one_each = tuple(range(32)), (3, 11, 19, 27)
    assert sent("all-reduce", 800, everyone) == {"network": 150, "NVLink": 1400}
    assert sent("reduce-scatter", 800, everyone) == {"network": 75, "NVLink": 700}
    assert sent("all-gather", 25, everyone) == {"network": 75, "NVLink": 700}
    assert sent("all-to-all", 800, everyone) == {"network": 600, "NVLink": 700}
    assert sent("all-reduce", 800, one_each) == {"network": 1200}
    assert sent("all-reduce", 800, tuple(range(8, 16))) == {"NVLink": 1400}
    permute = analysis.base.make_collective(
        "collective-permute", [("float32", 80)], pairs=((0, 1), (7, 8)), devices=32, where=""
    )
    assert [(c.link, c.bytes) for c in cost.crossings(permute, places)] == [("network", 80)]


def test_a_torus_sends_along_all_its_axes():
    square = cost.cluster("v5e", [(ICI, 4), (ICI, 4)])

    def took(group):
        op = analysis.base.make_collective("all-reduce", [("f", 10**9)], groups=(group,), devices=16, where="")
        return cost.seconds(cost.crossings(op, square))

    assert took(tuple(range(16))) == pytest.approx(2 * 15 / 16 * 1e9 / 200e9 + 2 * 6e-6)
    assert took((0, 1, 2, 3)) == pytest.approx(2 * 3 / 4 * 1e9 / 100e9 + 2 * 3e-6)


def test_the_two_devices_of_a_chip_share_its_ici():
    """Between chips a device sends its half; within a chip, the whole."""
    ici, *_, within = cost.tpu_links("tpu7x")
    places = cost.cluster("tpu7x", [(ici, 2), (within, 2)])
    mean = analysis.base.make_collective(
        "all-reduce", [("float32", 800)], groups=(tuple(range(4)),), devices=4, where=""
    )
    assert {c.link: c.bytes for c in cost.crossings(mean, places)} == {"ICI": 400, "chip": 800}
    assert (ici.bandwidth, within.bandwidth) == (100e9, 600e9)
    assert [link.name for link in cost.tpu_links("tpu7x", slices=True)] == ["DCN", "ICI", "ICI", "ICI", "chip"]


WORK = """
HloModule work
sliced {
  stack = f32[24,512,512] parameter(0)
  i = s32[] parameter(1)
  z = s32[] constant(0)
  one = f32[1,512,512] dynamic-slice(stack, i, z, z), dynamic_slice_sizes={1,512,512}
  ROOT r = f32[512,512] bitcast(one)
}
placed {
  stack = f32[24,512,512] parameter(0)
  new = f32[1,512,512] parameter(1)
  i = s32[] parameter(2)
  z = s32[] constant(0)
  ROOT r = f32[24,512,512] dynamic-update-slice(stack, new, i, z, z)
}
ENTRY main {
  stack = f32[24,512,512] parameter(0)
  i = s32[] parameter(1)
  start = ((f32[24,512,512], s32[]), f32[512,512], u32[]) fusion-start(stack, i), kind=kLoop, calls=sliced
  k = f32[2,128,4,64]{3,2,1,0:S(1)} parameter(2)
  scores = f32[2,4,128,128] convolution(k, k), window={size=2x4 stride=1x3 lhs_dilate=2x4}, dim_labels=0b1f_0o1i->01bf
  layer = f32[512,512] fusion(stack, i), kind=kLoop, calls=sliced
  new = f32[1,512,512] bitcast(layer)
  put = f32[24,512,512] fusion(stack, new, i), kind=kLoop, calls=placed
  gemm = f32[512,512] custom-call(layer, layer), custom_call_target="__cublas$gemm", DIMENSIONS
  ROOT other = f32[512] custom-call(layer), custom_call_target="topk", api_version=API
}
"""


def test_work_of_single_instructions():
    """Slices and updates in place count as what they touch; a batch that became a dilated dimension counts once."""
    module = parse(WORK.replace("DIMENSIONS", 'backend_config={"lhs_contracting_dimensions":["1"]}'))
    work = CostModel(module).cost
    weighed = {name: work("main", op) for name, op in module.computations["main"].instructions.items()}
    layer = 4 * 512**2
    assert weighed["layer"].bytes == weighed["start"].bytes == 2 * layer + 4
    assert weighed["put"].bytes == 2 * layer + 4
    assert weighed["scores"].flops == {"f32": 2 * 2 * 4 * 128 * 128 * 64}
    assert weighed["scores"].bytes == 4 * 2 * 4 * 128 * 128  # the operands lie on the chip
    assert weighed["gemm"].flops == {"f32": 2 * 512**3}
    assert weighed["other"].flops == {}


def test_kernels_of_chips_that_were_measured_take_longer():
    """The rates that products and copies reach, and a launch for each kernel; nothing for what is no kernel."""
    best = cost.CHIPS["h100"]._replace(flops_reached=1.0, bandwidth_reached=1.0, launch=0.0)
    measured = best._replace(flops_reached=0.5, bandwidth_reached=0.8, launch=1e-3)
    assert (best.is_measured, measured.is_measured) == (False, True)
    for flops, nbytes in (({"f32": 1e12}, 1.0), ({"f32": 1.0}, 1e10)):
        share = 0.5 if nbytes == 1.0 else 0.8
        taken = cost.compute_seconds(flops, nbytes, best) / share + 1e-3
        assert cost.compute_seconds(flops, nbytes, measured) == pytest.approx(taken)
    assert cost.compute_seconds({}, 0.0, measured) == 0.0


def test_refusals():
    with pytest.raises(ValueError, match="unknown chip 'h9000'; pass one of v5e"):
        cost.cluster("h9000", [(cost.NVLINK, 8)])
    with pytest.raises(ValueError, match="unknown chip 'v9'"):
        cost.of_mesh("v9", jd.make_mesh({"data": 2}, devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="runs on 8 devices or more, the cluster has 4"):
        cost.crossings(
            base.make_collective("all-reduce", [("float32", 8)], groups=(tuple(range(8)),), devices=8, where=""),
            cost.cluster("h100", [(cost.NVLINK, 4)]),
        )
    with pytest.raises(ValueError, match="turns must be at least 1, got 0"):
        measured.measure_link(jd.make_mesh({"data": 2}, devices=jax.devices()[:2]), turns=0)
    with pytest.raises(ValueError, match="positive size"):
        cost.cluster("h100", [(cost.NVLINK, 0)])
    with pytest.raises(ValueError, match="branch must be"):
        analysis.overlap(WORK, branch="best")
