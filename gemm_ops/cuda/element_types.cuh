// The dtypes of tensors in memory, for kernels that load and store elements themselves.
#pragma once

#include <cstdint>

#include "functors.cuh"

namespace ep {

// The dtypes: bits to float, float to bits, and the next floats as the 32-bit word that holds them.
struct F32 {
  using Bits = uint32_t;
  static EP_DEVICE float widen(Bits bits) { return __uint_as_float(bits); }
  static EP_DEVICE Bits narrow(float value) { return __float_as_uint(value); }
  static EP_DEVICE uint32_t word(float const* values) { return narrow(values[0]); }
};

struct F16 {
  using Bits = uint16_t;
  static EP_DEVICE float widen(Bits bits) { return __half2float(__ushort_as_half(bits)); }
  static EP_DEVICE Bits narrow(float value) { return __half_as_ushort(__float2half_rn(value)); }
  static EP_DEVICE uint32_t word(float const* values) {
    __half2 const pair = __floats2half2_rn(values[0], values[1]);
    return *reinterpret_cast<uint32_t const*>(&pair);
  }
};

struct Bf16 {
  using Bits = uint16_t;
  static EP_DEVICE float widen(Bits bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
  static EP_DEVICE Bits narrow(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
  static EP_DEVICE uint32_t word(float const* values) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(values[0], values[1]);
    return *reinterpret_cast<uint32_t const*>(&pair);
  }
};

}  // namespace ep
