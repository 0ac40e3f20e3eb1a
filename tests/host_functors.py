"""The device functions of functors.cuh as C++ for the host.

>>> (folder / "functors.cpp").write_text(host_functors() + loops)

The few lines of PTX and the CUDA intrinsics are replaced by what they are defined to compute: approximations by exact
values with the same flushing of denormals.
"""

from __future__ import annotations

import re
from pathlib import Path

import gemm_ops

CUDA = Path(gemm_ops.__file__).parent / "cuda"

_SHIM = """
#include <cmath>
#include <cstring>
#include <limits>
#define EP_DEVICE inline
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float normcdff(float x) { return static_cast<float>(0.5 * std::erfc(-static_cast<double>(x) * M_SQRT1_2)); }
inline float ftz(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }
"""
_HOST = {
    "ex2_approx": "ftz(::exp2f(ftz(x)))",
    "rcp_approx": "ftz(1.0f / ftz(x))",
    "sqrt_approx": "ftz(std::sqrt(ftz(x)))",
    "rsqrt_approx": "ftz(__frsqrt_rn(ftz(x)))",
    "min_nan": "a != a ? a : b != b ? b : std::fmin(a, b)",
    "max_nan": "a != a ? a : b != b ? b : std::fmax(a, b)",
}

#: The conversions of CUDA's 16-bit types: to nearest, ties to even, beyond the largest to infinity; NaN is canonical.
_DTYPES = """
#include <cstdint>
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
struct __half { uint16_t bits; };
struct __half2 { __half low, high; };
struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 low, high; };
inline __half __float2half_rn(float value) {
  unsigned const sign = __float_as_uint(value) >> 16 & 0x8000u, size = __float_as_uint(value) & 0x7fffffffu;
  if (size > 0x7f800000u) return {0x7fff};
  if (size >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (size < 0x38800000u)  // denormals of the type: multiples of 2^-24
    return {static_cast<uint16_t>(sign | static_cast<unsigned>(std::nearbyint(std::fabs(value) * 0x1p24f)))};
  return {static_cast<uint16_t>(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13)};
}
inline float __half2float(__half value) {
  unsigned const sign = (value.bits & 0x8000u) << 16, size = value.bits & 0x7fffu;
  if (size >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | size << 13);
  if (size < 0x400u) return std::copysign(static_cast<float>(size) * 0x1p-24f, __uint_as_float(sign));
  return __uint_as_float(sign | ((size << 13) + 0x38000000u));
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  unsigned const bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half value) { return value.bits; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
"""


def host_functors() -> str:
    """The header and what it needs, casts to 16 bits included."""
    text = (CUDA / "functors.cuh").read_text()
    text = re.sub(r"#pragma once|#include <cuda\w+\.h>|#define EP_DEVICE.*", "", text)
    for name, body in _HOST.items():
        text, found = re.subn(
            rf"(EP_DEVICE float {name}\([^)]*\)) {{ float y; asm\(.*", rf"\1 {{ return {body}; }}", text
        )
        assert found == 1, name
    assert "asm" not in text
    return _SHIM + _DTYPES + text
