"""The text of compiled programs: groups in every spelling, trip counts, asynchronous operations, narrow types."""

import textwrap

import jax
import pytest

from jaxdist import analysis
from jaxdist.analysis import hlo_reader

DATA_GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))
POD_GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)

SNIPPET = """
HloModule step, is_scheduled=true, num_partitions=8

FileNames
1 "step.py"

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %add = f32[]{:T(128)} add(%a, %b)
}

%wrapped (p: bf16[8,16]) -> bf16[2,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %scattered = bf16[2,16]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
}, execution_thread="parallel"

ENTRY %main (x: f32[4,64], y: bf16[8,16], z: s4[32]) -> f32[4,64] {
  %x = f32[4,64]{1,0:T(8,128)S(1)} parameter(0), metadata={op_name="a (strange) name, all-reduce(%x)"}
  %y = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(1)
  %z = s4[32]{0:T(128)E(4)} parameter(2)
  %r = (f32[4,64]{1,0}, /*index=1*/bf16[8,16]{1,0}) all-reduce-start(%x, %y), channel_id=1, GROUPS, to_apply=%sum
  %rd = (f32[4,64]{1,0}, bf16[8,16]{1,0}) all-reduce-done(%r)
  %g = (s4[32]{0}, s4[256]{0}) all-gather-start(%z), channel_id=2, replica_groups={}, dimensions={0}
  %gd = s4[256]{0} all-gather-done(%g)
  %c = (f32[4,64]{1,0}, f32[4,64]{1,0}, u32[]{:S(2)}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %cd = f32[4,64]{1,0} collective-permute-done(%c)
  %s = ((bf16[8,16]{1,0}), bf16[2,16]{1,0}, s32[]) async-start(%y), calls=%wrapped
  %sd = bf16[2,16]{1,0} async-done(%s), calls=%wrapped
  %b = f32[4,64]{1,0} collective-broadcast(%x), replica_groups={{0,1},{2,3}}
  ROOT %out = f32[4,64]{1,0} add(%cd, %b)
}
"""

SPELLINGS = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": DATA_GROUPS,
    "replica_groups=[2,4]<=[8]": DATA_GROUPS,
    "replica_groups=[4,2]<=[2,4]T(1,0)": POD_GROUPS,
    "replica_groups=[2,4]<=[2,2,2]T(1,0,2)": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "replica_groups={}": ALL,
    "replica_groups=mesh['pod'=2,'data'=4] {'data'}": DATA_GROUPS,
    "replica_groups=mesh['pod'=2,'data'=4] {'pod'}": POD_GROUPS,
    "replica_groups=mesh['pod'=2,'data'=4] {'pod','data'}": ALL,
    "replica_groups=@mesh<pod=2,data=4> {data}": DATA_GROUPS,
    "replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}": ALL,
    "replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_1'}": tuple((i,) for i in range(8)),
    "replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}": DATA_GROUPS,
    "replica_groups=mesh['axis_0'=8] {'axis_0':(2)2}": ((0, 2), (1, 3), (4, 6), (5, 7)),
    "replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}": POD_GROUPS,
    "replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "replica_groups=mesh['x'=2,'y'=4], device_ids=(7,6,5,4,3,2,1,0) {'y'}": ((7, 6, 5, 4), (3, 2, 1, 0)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_replica_groups_in_every_spelling(spelling):
    assert hlo_reader.replica_groups(f" channel_id=1, {spelling}, to_apply=%sum", 8) == SPELLINGS[spelling]


def test_asynchronous_operations_count_once_with_the_bytes_of_their_operands():
    text = SNIPPET.replace("GROUPS", "replica_groups=mesh['pod'=2,'data'=4] {'data'}")
    found = analysis.collectives(text)
    assert [(op.kind, op.dtype, op.bytes, op.messages, op.wire_bytes, op.where) for op in found.ops] == [
        ("all-reduce", ("float32", "bfloat16"), 1280, 2, 1.5 * 1280, "main"),
        ("all-gather", "int4", 16, 1, 7.0 * 16, "main"),
        ("collective-permute", "float32", 1024, 1, 1024 / 4, "main"),
        ("reduce-scatter", "bfloat16", 256, 1, 0.75 * 256, "wrapped"),
        ("collective-broadcast", "float32", 1024, 1, 0.5 * 1024, "main"),
    ]
    assert found.ops[2].pairs == ((0, 1), (1, 0))
    assert found.warnings == ()


def test_groups_in_an_unknown_spelling_warn():
    found = analysis.collectives(SNIPPET.replace("GROUPS", "replica_groups=new<spelling>"))
    assert found.ops[0].replica_groups is None
    assert found.ops[0].group_size == 8
    assert "cannot be read" in found.warnings[0]


CHAIN = """
HloModule chain, num_partitions=4
begin {
  p = bf16[8] parameter(0)
  g = bf16[32] all-gather(p), replica_groups={}, dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT s = (bf16[8], bf16[32], u32[]) custom-call(g), custom_call_target="AsyncCollectiveStart"
}
under {
  p = bf16[8] parameter(0)
  x = f32[8] parameter(1)
  g = bf16[32] all-gather(p), replica_groups={}, dimensions={0}, frontend_attributes={chain_id="7"}
  ROOT y = f32[8] multiply(x, x)
}
ENTRY main {
  p = bf16[8] parameter(0)
  x = f32[8] parameter(1)
  s = (bf16[8], bf16[32], u32[]) fusion(p), kind=kCustom, calls=begin
  y = f32[8] fusion(p, x), kind=kOutput, calls=under
  g = bf16[32] all-gather(p), replica_groups={}, dimensions={0}OWN
  ROOT z = f32[8] fusion(p, y), kind=kOutput, calls=under
}
"""


def test_a_collective_spread_over_several_fusions_counts_once():
    # The TPU compiler repeats an operation in every fusion that it runs underneath, and names the chain.
    assert [op.where for op in analysis.collectives(CHAIN.replace("OWN", "")).ops] == ["begin", "main"]
    other = CHAIN.replace("OWN", ', frontend_attributes={chain_id="8"}').replace("AsyncCollectiveStart", "Something")
    assert [op.where for op in analysis.collectives(other).ops] == ["begin", "under", "main", "under"]


LOOP = """
HloModule loop, num_partitions=2

test_call {
  l = s32[] parameter(0)
  r = s32[] parameter(1)
  ROOT c = pred[] compare(l, r), direction=DIRECTION
}

test {
  carry = (s32[], f32[8], s32[]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  end = s32[] get-tuple-element(carry), index=2
  ROOT t = pred[] fusion(OPERANDS), kind=kLoop, calls=test_call
}

body {
  carry = (s32[], f32[8], s32[]) parameter(0)
  i = s32[] get-tuple-element(carry), index=0
  x = f32[8] get-tuple-element(carry), index=1
  end = s32[] get-tuple-element(carry), index=2
  y = f32[8] collective-permute(x), source_target_pairs={{0,1},{1,0}}
  by = s32[] constant(STEP)
  next = s32[] add(by, i)
  ROOT out = (s32[], f32[8], s32[]) tuple(next, y, end)
}

ENTRY main {
  x = f32[8] parameter(0)
  from = s32[] constant(FROM)
  to = s32[] constant(TO)
  start = (s32[], f32[8], s32[]) tuple(from, x, to)
  w = (s32[], f32[8], s32[]) while(start), condition=test, body=body
  ROOT y = f32[8] get-tuple-element(w), index=1
}
"""


@pytest.mark.parametrize(
    ("direction", "operands", "start", "step", "end", "times"),
    [
        ("LT", "i, end", 0, 1, 6, 6),
        ("LT", "i, end", 1, 4, 10, 3),
        ("LE", "i, end", 0, 2, 6, 4),
        ("GT", "end, i", 0, 1, 6, 6),
        ("GE", "i, end", 6, -2, 1, 3),
        ("NE", "i, end", 9, -3, 0, 3),
        ("LT", "i, end", 9, 1, 3, 0),
        ("LT", "i, end", 0, -1, 3, None),
        ("EQ", "i, end", 0, 1, 3, None),
    ],
)
def test_trip_count_from_a_counter_a_step_and_a_limit(direction, operands, start, step, end, times):
    text = LOOP.replace("DIRECTION", direction).replace("OPERANDS", operands)
    text = text.replace("STEP", str(step)).replace("FROM", str(start)).replace("TO", str(end))
    found = analysis.collectives(text)
    assert [op.count for op in found.ops] == [1 if times is None else times]
    assert len(found.warnings) == (times is None)


def test_the_condition_of_a_loop_runs_once_more_than_its_body():
    text = LOOP.replace("DIRECTION", "LT").replace("OPERANDS", "i, end")
    text = text.replace("STEP", "1").replace("FROM", "0").replace("TO", "6")
    tested = "  v = f32[8] get-tuple-element(carry), index=1\n  m = f32[8] all-reduce(v), replica_groups={{0,1}}\n"
    found = analysis.collectives(text.replace("  ROOT t", tested + "  ROOT t"))
    assert [(op.kind, op.count) for op in found.ops] == [("collective-permute", 6), ("all-reduce", 7)]


def test_old_conditionals_sends_and_ragged_exchanges():
    text = textwrap.dedent("""
        HloModule old, replica_count=4
        yes {
          p = f32[4] parameter(0)
          ROOT y = f32[4] all-reduce(p), replica_groups={{0,1,2,3}}
        }
        no {
          ROOT p = f32[4] parameter(0)
        }
        ENTRY main {
          q = pred[] parameter(0)
          p = f32[4] parameter(1)
          k = s32[4] parameter(2)
          c = f32[4] conditional(q, p, p), true_computation=yes, false_computation=no
          t = token[] after-all()
          s = (f32[4], token[]) send(p, t), frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{2,3}}}
          h = (f32[4], token[]) send(p, t), is_host_transfer=true
          ROOT a = f32[4] ragged-all-to-all(p, c, k, k, k, k), replica_groups={{0,1,2,3}}
        }
    """)
    found = analysis.collectives(text)
    assert [(op.kind, op.bytes, op.wire_bytes) for op in found.ops] == [
        ("all-reduce", 16, 24.0),
        ("collective-permute", 16, 8.0),
        ("ragged-all-to-all", 16, 12.0),
    ]
    assert len(found.warnings) == 2


def test_narrow_and_unusual_types_have_their_numpy_names_and_bits():
    types = "(pred[3], s4[5], u8[2], f8e4m3fn[7], f8e5m2[1], f4e2m1fn[3], c64[2], bf16[<=4,2], token[])"
    assert hlo_reader.arrays(types) == [
        ("bool", 3),
        ("int4", 3),
        ("uint8", 2),
        ("float8_e4m3fn", 7),
        ("float8_e5m2", 1),
        ("float4_e2m1fn", 2),
        ("complex64", 16),
        ("bfloat16", 16),
    ]


@pytest.mark.parametrize(
    ("text", "padded"),
    [
        ("bf16[3,3,64,64]{3,2,1,0:T(8,128)(2,1)}", 3 * 3 * 64 * 128 * 2),
        ("s8[1,65536]{1,0:T(4,128)(4,1)}", 4 * 65536),
        ("s8[65536]{0:T(1024)(128)(4,1)S(1)}", 65536),
        ("f32[]{:T(128)}", 512),
        ("f32[1000]{0:T(1024)}", 4096),
        ("f32[9,130]{0,1:T(8,128)}", 4 * 136 * 128),  # the first dimension is the minor one
        ("f32[2,3,100]{2,1,0:T(*,128)}", 4 * 2 * 3 * 128),
        ("f32[2,3,100]{2,1,0:T(4,*,128)}", 4 * 4 * 3 * 128),
        ("f32[9,130]{1,0}", 4 * 9 * 130),
        ("f32[0,130]{1,0:T(8,128)}", 0),
    ],
)
def test_the_tiles_of_a_layout_pad_the_buffer(text, padded):
    (shape,) = hlo_reader.shapes(text)
    assert shape.padded_nbytes == padded


def test_a_function_that_was_not_lowered_is_refused_with_what_to_pass():
    read = hlo_reader.compile_lowered.__wrapped__  # as users call it, without the type checks of the tests
    with pytest.raises(TypeError, match=r"PjitFunction is no program: pass what step.lower\(state, batch\) returns"):
        read(jax.jit(abs))


def test_padding_is_counted_beside_the_entries():
    """A row of bytes fills one of four rows of a tile, and collectives send them all."""
    text = textwrap.dedent("""\
        HloModule row, num_partitions=4
        ENTRY %main (x: s8[1,1024]) -> s8[1,1024] {
          %x = s8[1,1024]{1,0:T(4,128)(4,1)} parameter(0)
          ROOT %y = s8[1,1024]{1,0:T(4,128)(4,1)} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
        }""")
    found = analysis.collectives(text)
    (op,) = found.ops
    assert (op.bytes, op.padded_bytes) == (1024, 4096)
    assert (found.wire_bytes, found.padded_wire_bytes) == (1536, 6144)
    assert analysis.table(found).splitlines() == [
        "kind              dtype  workers  times  messages  bytes  wire bytes  padded  wire padded",
        "all-reduce        int8         4      1         1  1,024       1,536   4,096        6,144",
        "one worker sends                                               1,536                6,144",
    ]
    # Without tiles there is nothing to add.
    plain = analysis.collectives(text.replace(":T(4,128)(4,1)", ""))
    assert plain.padded_wire_bytes == plain.wire_bytes
    assert "padded" not in analysis.table(plain)
