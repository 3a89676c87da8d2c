"""What goes between TPU slices, which programs leave to the hosts: `send` and `recv` as XLA:TPU writes them."""

import pytest

from jaxdist import analysis
from jaxdist.analysis import cost

TOLD = '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="{name}",{rest}'
PROGRAM = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[4096], w: f32[512,512]) -> f32[512,512] {{
  %x = f32[4096]{{0}} parameter(0)
  %w = f32[512,512]{{1,0}} parameter(1)
  %token = token[] after-all()
  %recv = (f32[{received}]{{0}}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, \
frontend_attributes={{{told}}}
  %send = (f32[4096]{{0}}, u32[], token[]) send(%x, %token), channel_id=2, is_host_transfer=true, \
frontend_attributes={{{told}}}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %dot = f32[512,512]{{1,0}} dot(%w, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %recv-done = (f32[{received}]{{0}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %out = f32[512,512]{{1,0}} copy(%dot)
}}
"""
GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))


def program(kind, target='"{1,2}x{0:3}"', received=4096):
    told = TOLD.format(name="mean_0", rest=f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"')
    return PROGRAM.format(told=told, received=received)


@pytest.mark.parametrize(
    ("kind", "name", "sent"),
    [
        ("ALL_REDUCE", "all-reduce", 16384),
        ("REDUCE_SCATTER", "reduce-scatter", 8192),
        ("ALL_GATHER", "all-gather", 16384),
    ],
)
def test_collectives_between_slices_are_counted(kind, name, sent):
    (op,) = analysis.collectives(program(kind)).ops
    assert (op.kind, op.dtype, op.bytes, op.replica_groups, op.wire_bytes) == (name, "float32", 16384, GROUPS, sent)


def test_a_permutation_between_slices():
    moves = "{{100000->200000},{200000->100000},{100001->200001},{200001->100001}}"
    (op,) = analysis.collectives(program("ONE_TO_ONE", moves)).ops
    assert op.kind == "collective-permute"
    assert op.pairs == ((0, 4), (4, 0), (1, 5), (5, 1))
    assert op.wire_bytes == 16384 / 2  # half of the workers send


def test_an_exchange_between_all_devices():
    (op,) = analysis.collectives(
        program("ALL_TO_ALL", "{{100000,100001,100003,100002,200000,200001,200003,200002}}")
    ).ops
    assert (op.kind, op.replica_groups) == ("all-to-all", (tuple(range(8)),))
    assert op.wire_bytes == 16384 * 7 / 8


def test_the_end_of_the_receive_is_what_waits():
    ici, dcn = cost.Link("ICI", 0.0, 1e12), cost.Link("DCN", 0.0, 16384 / 1e-3)  # a millisecond for these bytes
    places = cost.cluster("v5e", [(dcn, 2), (ici, 4)])
    found = analysis.overlap(program("ALL_REDUCE"), places)
    assert found.communication_seconds == pytest.approx(1e-3)
    hidden = found.communication_seconds - found.exposed_seconds
    assert 0 < hidden < 1e-4  # the product runs beside it
    (op,) = found.ops
    assert op.asynchronous
