// division.cuh: quotients as a division rounds them, by the divisor's reciprocal: a third of a division's instructions, in a loop that has to
// fit the first cache of instructions. A test on the CPU tries all that a cast divides: native/tests/pure/division_test.cc.
#pragma once
#include <cfloat>

namespace moe {

// `reciprocal`: wrong by two units in its last place at most, as that of the instruction is; 0 of infinity.
__device__ inline float divided(float value, float by, float reciprocal) {
  const float near = __fmul_rn(value, reciprocal), size = near < 0 ? -near : near;
  const float exact = __fmaf_rn(__fmaf_rn(-by, near, value), reciprocal, near);
  return size > 0 && size <= FLT_MAX ? exact : near;  // zeros keep their sign; what is infinite is right already
}

}  // namespace moe
