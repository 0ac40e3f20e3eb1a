// The device side of the operation table (epilogues/operations.py): one function per row, on float.
//
// Three variants.  `ep::exact` is for epilogues with an fp32 output: library functions, good to an ulp or two of
// fp32.  `ep::fast` is for outputs of 16 bits: built on ex2.approx and rcp.approx, whose relative error of about
// 2^-22 vanishes in a 16-bit rounding.  Where fast has no faster way it is the exact one.  `ep::eager` is for trees
// with eager rounding: PyTorch's own formulas, to the bit; most are those of exact, measured on an H200 with
// PyTorch 2.11.  A generated functor calls the functions of one of these namespaces.
//
// NaN and infinity come out as from PyTorch: minimum, maximum, relu and clamp use the .NaN forms.  Comparisons give bool,
// which where and the logical functions take.  tests/test_gemm_functors.py runs both variants on the host against the
// table's reference.
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
EP_DEVICE float sqrt_approx(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
EP_DEVICE float rsqrt_approx(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kPi = 3.14159265358979f;
constexpr float kSqrtHalf = 0.7071067811865476f;
constexpr float kGeluBeta = 1.5957691216057308f;    // 2 sqrt(2/pi)
constexpr float kGeluCubic = 0.044715f;
constexpr float kSeluAlpha = 1.6732632423543772f;
constexpr float kSeluScale = 1.0507009873554805f;
constexpr float kQuickGelu = 1.702f;
constexpr float kSixth = 1.0f / 6.0f;

// log(1 + exp(-|d|)) and its base-2 sibling, what the larger of two logarithms is short of their sum
EP_DEVICE float log_rest(float d) { return ::log1pf(::expf(-fabsf(d))); }
EP_DEVICE float log2_rest(float d) { return ::log1pf(::exp2f(-fabsf(d))) * kLog2E; }

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
// the normal distribution's own function: 1 + erf(z) cancels where x is very negative, and erfc(-z) magnifies the
// rounding of z there (by 2 z^2)
EP_DEVICE float gelu_erf(float x) { return x * ::normcdff(x); }
EP_DEVICE float gelu_tanh(float x) { return __fdiv_rn(x, 1.0f + ::expf(-detail::gelu_argument(x))); }

EP_DEVICE float abs(float x) { return fabsf(x); }
EP_DEVICE float sign(float x) { return static_cast<float>((x > 0.0f) - (x < 0.0f)); }  // of NaN: 0
EP_DEVICE float floor(float x) { return ::floorf(x); }
EP_DEVICE float ceil(float x) { return ::ceilf(x); }
EP_DEVICE float round(float x) { return ::rintf(x); }  // half to even
EP_DEVICE float trunc(float x) { return ::truncf(x); }
EP_DEVICE float reciprocal(float x) { return __fdiv_rn(1.0f, x); }
EP_DEVICE float square(float x) { return x * x; }
EP_DEVICE float sqrt(float x) { return __fsqrt_rn(x); }
EP_DEVICE float rsqrt(float x) { return __frsqrt_rn(x); }
EP_DEVICE float exp2(float x) { return ::exp2f(x); }
EP_DEVICE float expm1(float x) { return ::expm1f(x); }
EP_DEVICE float log(float x) { return ::logf(x); }
EP_DEVICE float log2(float x) { return ::log2f(x); }
EP_DEVICE float log10(float x) { return ::log10f(x); }
EP_DEVICE float log1p(float x) { return ::log1pf(x); }
EP_DEVICE float logit(float x) { return ::logf(__fdiv_rn(x, 1.0f - x)); }
EP_DEVICE float entr(float x) {
  return x > 0.0f ? -x * ::logf(x) : x == 0.0f ? 0.0f : x < 0.0f ? __uint_as_float(0xff800000u) : x;
}
EP_DEVICE float sinc(float x) {
  float const scaled = detail::kPi * x;
  return x == 0.0f ? 1.0f : __fdiv_rn(::sinf(scaled), scaled);
}
EP_DEVICE float sin(float x) { return ::sinf(x); }
EP_DEVICE float cos(float x) { return ::cosf(x); }
EP_DEVICE float tan(float x) { return ::tanf(x); }
EP_DEVICE float asin(float x) { return ::asinf(x); }
EP_DEVICE float acos(float x) { return ::acosf(x); }
EP_DEVICE float atan(float x) { return ::atanf(x); }
EP_DEVICE float sinh(float x) { return ::sinhf(x); }
EP_DEVICE float cosh(float x) { return ::coshf(x); }
EP_DEVICE float asinh(float x) { return ::asinhf(x); }
EP_DEVICE float acosh(float x) { return ::acoshf(x); }
EP_DEVICE float atanh(float x) { return ::atanhf(x); }
EP_DEVICE float erf(float x) { return ::erff(x); }
EP_DEVICE float erfc(float x) { return ::erfcf(x); }

EP_DEVICE float softplus(float x, float beta, float threshold) {
  float const scaled = x * beta;
  return scaled > threshold ? x : __fdiv_rn(::log1pf(::expf(scaled)), beta);
}
EP_DEVICE float mish(float x) { return x * ::tanhf(::log1pf(::expf(x))); }
EP_DEVICE float hardsigmoid(float x) { return clamp(x + 3.0f, 0.0f, 6.0f) * detail::kSixth; }
EP_DEVICE float hardswish(float x) { return x * clamp(x + 3.0f, 0.0f, 6.0f) * detail::kSixth; }
EP_DEVICE float elu(float x, float alpha) { return x <= 0.0f ? ::expm1f(x) * alpha : x; }
EP_DEVICE float selu(float x) { return detail::kSeluScale * elu(x, detail::kSeluAlpha); }
EP_DEVICE float celu(float x, float alpha) { return x <= 0.0f ? ::expm1f(__fdiv_rn(x, alpha)) * alpha : x; }
EP_DEVICE float quick_gelu(float x) { return x * sigmoid(detail::kQuickGelu * x); }
EP_DEVICE float logsigmoid(float x) { return detail::min_nan(x, 0.0f) - detail::log_rest(x); }
EP_DEVICE float softsign(float x) { return __fdiv_rn(x, 1.0f + fabsf(x)); }
EP_DEVICE float tanhshrink(float x) { return x - ::tanhf(x); }
EP_DEVICE float hardshrink(float x, float bound) { return x >= -bound && x <= bound ? 0.0f : x; }
// x - x is 0, and NaN for NaN
EP_DEVICE float softshrink(float x, float bound) { return x > bound ? x - bound : x < -bound ? x + bound : x - x; }
EP_DEVICE float threshold(float x, float bound, float value) { return x <= bound ? value : x; }

EP_DEVICE float pow(float a, float b) { return ::powf(a, b); }
EP_DEVICE float fmod(float a, float b) { return ::fmodf(a, b); }
// the sign is the divisor's, as in Python
EP_DEVICE float remainder(float a, float b) {
  float const rest = ::fmodf(a, b);
  return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
EP_DEVICE float atan2(float a, float b) { return ::atan2f(a, b); }
EP_DEVICE float hypot(float a, float b) { return ::hypotf(a, b); }
// a == b covers two equal infinities, whose difference is NaN
EP_DEVICE float logaddexp(float a, float b) {
  return fabsf(a) == __uint_as_float(0x7f800000u) && a == b ? a : detail::max_nan(a, b) + detail::log_rest(a - b);
}
EP_DEVICE float logaddexp2(float a, float b) {
  return fabsf(a) == __uint_as_float(0x7f800000u) && a == b ? a : detail::max_nan(a, b) + detail::log2_rest(a - b);
}
EP_DEVICE float copysign(float a, float b) { return ::copysignf(a, b); }
EP_DEVICE float fmin(float a, float b) { return ::fminf(a, b); }
EP_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }
EP_DEVICE float xlogy(float a, float b) { return a == 0.0f && !(b != b) ? 0.0f : a * ::logf(b); }

// from the nearer end, as PyTorch has it
EP_DEVICE float lerp(float a, float b, float weight) {
  float const distance = b - a;
  return fabsf(weight) < 0.5f ? a + weight * distance : b - distance * (1.0f - weight);
}
EP_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
EP_DEVICE float where(bool condition, float a, float b) { return condition ? a : b; }

EP_DEVICE bool gt(float a, float b) { return a > b; }
EP_DEVICE bool ge(float a, float b) { return a >= b; }
EP_DEVICE bool lt(float a, float b) { return a < b; }
EP_DEVICE bool le(float a, float b) { return a <= b; }
EP_DEVICE bool eq(float a, float b) { return a == b; }
EP_DEVICE bool ne(float a, float b) { return a != b; }
EP_DEVICE bool isnan(float x) { return x != x; }
EP_DEVICE bool isinf(float x) { return fabsf(x) == __uint_as_float(0x7f800000u); }
EP_DEVICE bool isfinite(float x) { return fabsf(x) < __uint_as_float(0x7f800000u); }
EP_DEVICE bool logical_and(bool a, bool b) { return a && b; }
EP_DEVICE bool logical_or(bool a, bool b) { return a || b; }
EP_DEVICE bool logical_xor(bool a, bool b) { return a != b; }
EP_DEVICE bool logical_not(bool a) { return !a; }
}  // namespace exact

// Everything is as in exact, but for what is declared here and hides it.
namespace fast {
using namespace exact;
EP_DEVICE float exp(float x) { return detail::ex2_approx(x * detail::kLog2E); }
EP_DEVICE float sigmoid(float x) { return detail::rcp_approx(1.0f + detail::ex2_approx(-x * detail::kLog2E)); }
// sign-symmetric: the argument of exp is never positive, so that nothing overflows.  1 - e has an absolute error of
// 2^-22, too much near zero, where two terms of the series have a relative error below 2^-22
EP_DEVICE float tanh(float x) {
  float e = detail::ex2_approx(-2.0f * detail::kLog2E * fabsf(x));
  float y = fabsf(x) < 0.03125f ? fmaf(x * x * (-1.0f / 3.0f), x, x) : (1.0f - e) * detail::rcp_approx(1.0f + e);
  return copysignf(y, x);  // of -0.0 too, which the series makes +0.0
}
EP_DEVICE float silu(float x) { return x * sigmoid(x); }
// x / (1 + 2^q) with q the logarithm of (1 - Phi) / Phi, Phi the normal distribution's function: q is odd, so x times a
// polynomial in x^2, fitted for |x| <= 5.5 so that the result is within 2^-14 of itself or 2^-27.  Beyond, the result is
// x or next to nothing, and the polynomial goes on falling.  Half of the instructions of erff
EP_DEVICE float gelu_erf(float x) {
  float const t = x * x;
  float p = -2.54164349e-09f;
  p = fmaf(p, t, 2.27461478e-07f);
  p = fmaf(p, t, -7.96387149e-06f);
  p = fmaf(p, t, 0.000123128143f);
  p = fmaf(p, t, 0.000275530267f);
  p = fmaf(p, t, -0.10521605f);
  p = fmaf(p, t, -2.30198266f);
  return x * detail::rcp_approx(1.0f + detail::ex2_approx(x * p));
}
// as in exact, with the base of the exponential folded into the polynomial
EP_DEVICE float gelu_tanh(float x) {
  constexpr float linear = -detail::kGeluBeta * detail::kLog2E;
  float exponent = x * fmaf(linear * detail::kGeluCubic, x * x, linear);
  return x * detail::rcp_approx(1.0f + detail::ex2_approx(exponent));
}
EP_DEVICE float reciprocal(float x) { return detail::rcp_approx(x); }
EP_DEVICE float sqrt(float x) { return detail::sqrt_approx(x); }
EP_DEVICE float rsqrt(float x) { return detail::rsqrt_approx(x); }
EP_DEVICE float exp2(float x) { return detail::ex2_approx(x); }
// tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2); beyond 20 it is 1, where n would overflow
EP_DEVICE float mish(float x) {
  float const e = detail::ex2_approx(detail::kLog2E * x);
  float const n = e * (e + 2.0f);
  return x > 20.0f ? x : x * n * detail::rcp_approx(n + 2.0f);
}
EP_DEVICE float quick_gelu(float x) { return x * sigmoid(detail::kQuickGelu * x); }
EP_DEVICE float softsign(float x) { return x * detail::rcp_approx(1.0f + fabsf(x)); }
}  // namespace fast

// As exact, but for the formulas that PyTorch's CUDA kernels have another of.
namespace eager {
using namespace exact;
// never contracted to a fused multiply-add: PyTorch stores a float32 result between two operations
EP_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
EP_DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
EP_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
EP_DEVICE float square(float x) { return __fmul_rn(x, x); }
EP_DEVICE float rsqrt(float x) { return ::rsqrtf(x); }
EP_DEVICE float gelu_erf(float x) { return x * 0.5f * (1.0f + ::erff(x * detail::kSqrtHalf)); }
EP_DEVICE float gelu_tanh(float x) {
  constexpr float beta = 0.5f * detail::kGeluBeta;
  float const cube = x * x * x;
  return 0.5f * x * (1.0f + ::tanhf(beta * (x + detail::kGeluCubic * cube)));
}
EP_DEVICE float selu(float x) {
  constexpr float below = detail::kSeluAlpha * detail::kSeluScale;
  return x <= 0.0f ? ::expm1f(x) * below : x * detail::kSeluScale;
}
EP_DEVICE float celu(float x, float alpha) { return x <= 0.0f ? ::expm1f(x * __fdiv_rn(1.0f, alpha)) * alpha : x; }
}  // namespace eager

}  // namespace ep
