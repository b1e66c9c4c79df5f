"""Bytes that the body of a loop moves: by hand for the text of a program, and of a real one where a TPU's compiler is."""

import importlib.util
import os
import subprocess
import sys

import pytest

from benchmarks.step_bytes import Traffic

# A ring of [4, 128] in HBM is read as a whole into fast memory and gets one row; a table is read by the row; weights go through a
# fusion that reads an operand in fast memory too; an array of 100 columns is padded to 128.
TEXT = """HloModule loop, is_scheduled=true

%fused_row (p0.1: f32[64,128], p1.1: s32[]) -> f32[1,128] {
  %p0.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %p1.1 = s32[]{:T(128)} parameter(1)
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %row = f32[1,128]{1,0:T(1,128)} dynamic-slice(%p0.1, %p1.1, %zero.1), dynamic_slice_sizes={1,128}
}

%fused_product (p0.2: bf16[128,256], p1.2: f32[1,128]) -> (f32[1,256], f32[4,128]) {
  %p0.2 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  %p1.2 = f32[1,128]{1,0:T(1,128)} parameter(1)
  %y = f32[1,256]{1,0:T(1,128)} dot(%p1.2, %p0.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = f32[4,128]{1,0:T(4,128)} broadcast(%p1.2), dimensions={0,1}
  ROOT %both = (f32[1,256]{1,0:T(1,128)}, f32[4,128]{1,0:T(4,128)}) tuple(%y, %z)
}

%cheap (c: f32[8,100]) -> f32[8,100] {
  ROOT %c = f32[8,100]{1,0:T(8,128)} parameter(0)
}

%costly (d: f32[8,100]) -> f32[8,100] {
  %d = f32[8,100]{1,0:T(8,128)} parameter(0)
  ROOT %e = f32[8,100]{1,0:T(8,128)} exponential(%d)
}

%body (state: (f32[4,128], f32[64,128], bf16[128,256], f32[8,100], s32[])) -> (f32[4,128], f32[64,128], bf16[128,256], f32[8,100], s32[]) {
  %state = (f32[4,128]{1,0:T(4,128)}, f32[64,128]{1,0:T(8,128)}, bf16[128,256]{1,0:T(8,128)(2,1)}, f32[8,100]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %ring = f32[4,128]{1,0:T(4,128)} get-tuple-element(%state), index=0
  %table = f32[64,128]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %weight = bf16[128,256]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %odd = f32[8,100]{1,0:T(8,128)} get-tuple-element(%state), index=3
  %t = s32[]{:T(128)} get-tuple-element(%state), index=4
  %start = (f32[4,128]{1,0:T(4,128)S(1)}, f32[4,128]{1,0:T(4,128)}, u32[]{:S(2)}) copy-start(%ring)
  %near = f32[4,128]{1,0:T(4,128)S(1)} copy-done(%start)
  %picked = f32[1,128]{1,0:T(1,128)S(1)} fusion(%table, %t), kind=kLoop, calls=%fused_row
  %made = (f32[1,256]{1,0:T(1,128)S(1)}, f32[4,128]{1,0:T(4,128)}) fusion(%weight, %picked), kind=kOutput, calls=%fused_product
  %written = f32[4,128]{1,0:T(4,128)} dynamic-update-slice(%ring, %picked, %t, %t)
  %chosen = f32[8,100]{1,0:T(8,128)} conditional(%t, %odd, %odd), branch_computations={%cheap, %costly}
  %doubled = f32[8,100]{1,0:T(8,128)} add(%chosen, %odd)
  ROOT %next = (f32[4,128]{1,0:T(4,128)}, f32[64,128]{1,0:T(8,128)}, bf16[128,256]{1,0:T(8,128)(2,1)}, f32[8,100]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%written, %table, %weight, %doubled, %t)
}

%condition (all: (f32[4,128], f32[64,128], bf16[128,256], f32[8,100], s32[])) -> pred[] {
  %all = (f32[4,128]{1,0:T(4,128)}, f32[64,128]{1,0:T(8,128)}, bf16[128,256]{1,0:T(8,128)(2,1)}, f32[8,100]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  ROOT %yes = pred[]{:T(512)} constant(true)
}

ENTRY %main (begin: (f32[4,128], f32[64,128], bf16[128,256], f32[8,100], s32[])) -> (f32[4,128], f32[64,128], bf16[128,256], f32[8,100], s32[]) {
  %begin = (f32[4,128]{1,0:T(4,128)}, f32[64,128]{1,0:T(8,128)}, bf16[128,256]{1,0:T(8,128)(2,1)}, f32[8,100]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  ROOT %loop = (f32[4,128]{1,0:T(4,128)}, f32[64,128]{1,0:T(8,128)}, bf16[128,256]{1,0:T(8,128)(2,1)}, f32[8,100]{1,0:T(8,128)}, s32[]{:T(128)}) while(%begin), condition=%condition, body=%body
}
"""  # noqa: E501


def test_each_instruction_counts_what_it_moves_in_main_memory():
    traffic = Traffic(TEXT)
    assert traffic.loops() == ["body"]
    assert dict(traffic.by_instruction("body")) == {
        "start": 4 * 128 * 4,  # the ring is read, its copy lies in fast memory
        "picked": 128 * 4 + 4,  # a row of the table, and its number
        "made": 128 * 256 * 2 + 4 * 128 * 4,  # the weight, and the second result
        "written": 0 + 128 * 4,  # one row, which comes from fast memory
        "doubled": 3 * 8 * 128 * 4,  # two operands and a result of 100 columns; the cheaper arm before it moves nothing
    }
    assert traffic.of_loop() == 2048 + 516 + 67584 + 512 + 12288


def test_a_program_without_a_loop_is_refused():
    with pytest.raises(ValueError, match="no loop"):
        Traffic(TEXT[: TEXT.index("ENTRY")]).of_loop()


PROGRAM = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from benchmarks.step_bytes import Traffic

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
size, layers = 4096, 8  # 32 MiB a layer: more than fast memory holds of all

def f(x, weights):
    def step(state):
        x, t = state
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x, t + 1
    return jax.lax.while_loop(lambda state: state[1] < 100, step, (x, 0))

shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(devices[0]))
compiled = jax.jit(f).lower(shaped(8, size), [shaped(size, size)] * layers).compile()
weights = 2 * layers * size * size
print(Traffic(compiled.as_text()).of_loop() / weights, compiled.cost_analysis()["bytes accessed"] / weights)
"""


@pytest.mark.slow
def test_a_loop_over_weights_reads_them_once_a_step():
    """A v5e's fast memory holds three of the eight weights at most. The compiler's own count has the copies there as well."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which holds the compiler for TPUs, is not installed: it comes with the extra `tpu`")
    from benchmarks import decode_memory

    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment = kept | decode_memory.ENVIRONMENT | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    counted, told = map(float, done.stdout.split())
    assert 0.9 < counted < 1.05 and told > 1.5, done.stdout
