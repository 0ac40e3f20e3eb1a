// The device side of the operation table (epilogues/operations.py): one function per row, on float.
//
// Two variants.  `ep::exact` is for epilogues with an fp32 output: library functions, good to an ulp or two of
// fp32.  `ep::fast` is for outputs of 16 bits: built on ex2.approx and rcp.approx, whose relative error of about
// 2^-22 vanishes in a 16-bit rounding.  Where fast has no faster way it is the exact one.  A generated functor
// calls the functions of one of the two namespaces.
//
// NaN goes through everything, as in PyTorch: minimum, maximum, relu and clamp use the .NaN forms.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define EP_DEVICE __device__ __forceinline__

namespace ep {

// a constant of the tree, by its fp32 bits: exact, and NaN and infinity need no special spelling
EP_DEVICE float constant(unsigned bits) { return __uint_as_float(bits); }

// explicit casts: round to the dtype, go on in fp32
EP_DEVICE float cast_f32(float x) { return x; }
EP_DEVICE float cast_f16(float x) { return __half2float(__float2half_rn(x)); }
EP_DEVICE float cast_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

namespace detail {
EP_DEVICE float ex2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
EP_DEVICE float rcp_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
EP_DEVICE float min_nan(float a, float b) { float y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
EP_DEVICE float max_nan(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kSqrtHalf = 0.7071067811865476f;
constexpr float kGeluBeta = 1.5957691216057308f;    // 2 sqrt(2/pi)
constexpr float kGeluCubic = 0.044715f;

// 2u of the tanh GELU, with gelu(x) = x * sigmoid(2u)
EP_DEVICE float gelu_argument(float x) { return kGeluBeta * x * fmaf(kGeluCubic * x, x, 1.0f); }
}  // namespace detail

namespace exact {
EP_DEVICE float identity(float x) { return x; }
EP_DEVICE float neg(float x) { return -x; }
EP_DEVICE float add(float a, float b) { return a + b; }
EP_DEVICE float sub(float a, float b) { return a - b; }
EP_DEVICE float mul(float a, float b) { return a * b; }
EP_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
EP_DEVICE float minimum(float a, float b) { return detail::min_nan(a, b); }
EP_DEVICE float maximum(float a, float b) { return detail::max_nan(a, b); }
EP_DEVICE float clamp(float x, float low, float high) { return detail::min_nan(detail::max_nan(x, low), high); }
EP_DEVICE float relu(float x) { return detail::max_nan(x, 0.0f); }
EP_DEVICE float leaky_relu(float x, float slope) { return x > 0.0f ? x : x * slope; }
EP_DEVICE float exp(float x) { return ::expf(x); }
EP_DEVICE float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + ::expf(-x)); }
EP_DEVICE float tanh(float x) { return ::tanhf(x); }
EP_DEVICE float silu(float x) { return __fdiv_rn(x, 1.0f + ::expf(-x)); }
// 1 + erf(z) as erfc(-z): no cancellation where x is very negative
EP_DEVICE float gelu_erf(float x) { return 0.5f * x * ::erfcf(-x * detail::kSqrtHalf); }
EP_DEVICE float gelu_tanh(float x) { return __fdiv_rn(x, 1.0f + ::expf(-detail::gelu_argument(x))); }
}  // namespace exact

namespace fast {
using exact::identity;
using exact::neg;
using exact::add;
using exact::sub;
using exact::mul;
using exact::div;
using exact::minimum;
using exact::maximum;
using exact::clamp;
using exact::relu;
using exact::leaky_relu;
EP_DEVICE float exp(float x) { return detail::ex2_approx(x * detail::kLog2E); }
EP_DEVICE float sigmoid(float x) { return detail::rcp_approx(1.0f + detail::ex2_approx(-x * detail::kLog2E)); }
// sign-symmetric: the argument of exp is never positive, so that nothing overflows.  1 - e has an absolute error of
// 2^-22, too much near zero, where two terms of the series have a relative error below 2^-22
EP_DEVICE float tanh(float x) {
  float e = detail::ex2_approx(-2.0f * detail::kLog2E * fabsf(x));
  float y = copysignf((1.0f - e) * detail::rcp_approx(1.0f + e), x);
  return fabsf(x) < 0.03125f ? fmaf(x * x * (-1.0f / 3.0f), x, x) : y;
}
EP_DEVICE float silu(float x) { return x * sigmoid(x); }
EP_DEVICE float gelu_erf(float x) { return 0.5f * x * (1.0f + ::erff(x * detail::kSqrtHalf)); }
// as in exact, with the base of the exponential folded into the polynomial
EP_DEVICE float gelu_tanh(float x) {
  constexpr float linear = -detail::kGeluBeta * detail::kLog2E;
  float exponent = x * fmaf(linear * detail::kGeluCubic, x * x, linear);
  return x * detail::rcp_approx(1.0f + detail::ex2_approx(exponent));
}
}  // namespace fast

}  // namespace ep
