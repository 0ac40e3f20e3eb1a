// Loading and storing the pieces of an elementwise kernel; elementwise_walk.cuh says what a piece is.
//
// An input that does not start where the main output does is read in the aligned 16-byte parts that hold it, which are
// shifted into place: neighbouring threads read the same parts, and the L1 cache serves them.  Only parts that lie
// between the tensor's first byte and its last are read whole, so nothing outside of a tensor is read or written.
//
// Inputs are read by ordinary loads, not through the non-coherent path: an output may be exactly an input.  That is
// safe, for an element is read for use only by the thread that writes it, before it does.  An aligned part may hold
// elements that other threads are writing meanwhile; those are not used.
//
// A generated `Kernel` (templates/elementwise.cu.j2) says how many tensors there are and calls what is here for each.
// ElementwiseTensor and ElementwiseArguments (elementwise/arguments.py) are declared before this file is included.
// All of it but the launch is compiled for the host, too, by tests/elementwise_host.py.
#pragma once

#include <cstdint>

#include "elementwise_walk.cuh"
#include "functors.cuh"

namespace ep {
namespace elementwise {

constexpr int kPartBytes = 16;

// All of the kernel's memory accesses are these four.
EP_DEVICE uint4 read_part(char const* from) { return *reinterpret_cast<uint4 const*>(from); }
EP_DEVICE void write_part(char* to, uint4 part) { *reinterpret_cast<uint4*>(to) = part; }
template <class Bits> EP_DEVICE Bits read_element(char const* from) { return *reinterpret_cast<Bits const*>(from); }
template <class Bits> EP_DEVICE void write_element(char* to, Bits bits) { *reinterpret_cast<Bits*>(to) = bits; }

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

// What every element reads: the element of a tensor, or a number, rounded to the dtype.
template <class Element> EP_DEVICE float scalar(ElementwiseTensor const& tensor) {
  using Bits = typename Element::Bits;
  auto const data = static_cast<char const*>(tensor.data);
  return Element::widen(data ? read_element<Bits>(data) : Element::narrow(tensor.value));
}

// The ways of an input.  `find` says whether `load` can take the piece as it is; if not, `load_within` does, which
// minds the tensor's ends.  Both issue loads, `settle` makes use of them, and after that `at` gives the elements.

// One element for a whole row.
template <class Element> struct Repeated {
  typename Element::Bits bits;

  template <class Place> EP_DEVICE bool find(ElementwiseTensor const&, int64_t, Place const&) { return true; }
  template <class Place> EP_DEVICE void load(ElementwiseTensor const& tensor, int64_t row, Place const&) {
    bits = read_element<typename Element::Bits>(static_cast<char const*>(tensor.data) + row);
  }
  template <class Place> EP_DEVICE void load_within(ElementwiseTensor const& tensor, int64_t row, Place const& place) {
    load(tensor, row, place);
  }
  EP_DEVICE void settle() {}
  EP_DEVICE float at(int) const { return Element::widen(bits); }
};

// Elements that do not lie one after another.
template <class Element, int kWidth> struct Strided {
  typename Element::Bits bits[kWidth];

  template <class Place> EP_DEVICE bool find(ElementwiseTensor const&, int64_t, Place const&) { return true; }
  template <class Place> EP_DEVICE void load(ElementwiseTensor const& tensor, int64_t row, Place const& place) {
    char const* const from = static_cast<char const*>(tensor.data) + row + place.column * tensor.column_stride;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      bits[i] = place.has(i) ? read_element<typename Element::Bits>(from + i * tensor.column_stride) : 0;
    }
  }
  template <class Place> EP_DEVICE void load_within(ElementwiseTensor const& tensor, int64_t row, Place const& place) {
    load(tensor, row, place);
  }
  EP_DEVICE void settle() {}
  EP_DEVICE float at(int i) const { return Element::widen(bits[i]); }
};

// Elements one after another.  Between `load` and `settle` the words are aligned parts of the tensor, the first element
// `shift` bytes into them.
template <class Element, int kWidth, bool kAligned> struct Pieces {
  using Bits = typename Element::Bits;
  static constexpr int kSize = sizeof(Bits);
  static constexpr int kParts = kWidth * kSize / kPartBytes;
  static constexpr int kWords = 4 * kParts;

  uint32_t words[kWords + (kAligned ? 0 : 4)];
  unsigned shift;
  char const* aligned;  // the first part

  template <class Place> EP_DEVICE bool find(ElementwiseTensor const& tensor, int64_t row, Place const& place) {
    auto const first_byte = static_cast<char const*>(tensor.data);
    char const* const from = first_byte + row + place.column * kSize;
    shift = kAligned ? 0 : misalignment(from, kPartBytes);
    aligned = from - shift;
    int const bytes = (kParts + (shift != 0)) * kPartBytes;
    return aligned >= first_byte && aligned + bytes <= first_byte + tensor.bytes;
  }

  template <class Place> EP_DEVICE void load(ElementwiseTensor const&, int64_t, Place const&) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      keep(part, read_part(aligned + part * kPartBytes));
    }
    if constexpr (!kAligned) {
      if (shift != 0) {
        keep(kParts, read_part(aligned + kParts * kPartBytes));
      }
    }
  }

  template <class Place> EP_DEVICE void load_within(ElementwiseTensor const& tensor, int64_t row, Place const& place) {
    if (find(tensor, row, place)) {
      load(tensor, row, place);
    } else {
      gather(aligned + shift, place);
      shift = 0;
    }
  }

  EP_DEVICE void settle() {
    if constexpr (!kAligned) {
      if (shift == 0) {
        return;
      }
      // by two words, by one word, by bytes; each step needs one word less beyond those that remain
#pragma unroll
      for (int i = 0; i < kWords + 2; ++i) {
        words[i] = shift & 8 ? words[i + 2] : words[i];
      }
#pragma unroll
      for (int i = 0; i < kWords + 1; ++i) {
        words[i] = shift & 4 ? words[i + 1] : words[i];
      }
      unsigned const bits = (shift & 3) * 8;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[i] = __funnelshift_r(words[i], words[i + 1], bits);
      }
    }
  }

  EP_DEVICE float at(int i) const {
    constexpr int kPerWord = 4 / kSize;
    return Element::widen(static_cast<Bits>(words[i / kPerWord] >> (i % kPerWord * 8 * kSize)));
  }

 private:
  EP_DEVICE void keep(int part, uint4 loaded) {
    words[4 * part] = loaded.x;
    words[4 * part + 1] = loaded.y;
    words[4 * part + 2] = loaded.z;
    words[4 * part + 3] = loaded.w;
  }

  // Element by element, where a part would reach beyond the tensor.  Seldom: a loop that keeps its code short, from the
  // last element to the first, which all others make room for.
  template <class Place> EP_DEVICE void gather(char const* from, Place const& place) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = 0;
    }
#pragma unroll 1
    for (int element = kWidth - 1; element >= 0; --element) {
      uint32_t const bits = place.has(element) ? read_element<Bits>(from + element * kSize) : 0;
#pragma unroll
      for (int i = kWords - 1; i > 0; --i) {
        words[i] = kSize == 4 ? words[i - 1] : __funnelshift_r(words[i - 1], words[i], 16);
      }
      words[0] = kSize == 4 ? bits : words[0] << 16 | bits;
    }
  }
};

template <class Element, class Place, int kWidth>
EP_DEVICE void store_strided(ElementwiseTensor const& tensor, int64_t row, Place const& place,
                             float const (&values)[kWidth]) {
  char* const to = static_cast<char*>(tensor.data) + row + place.column * tensor.column_stride;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (place.has(i)) {
      write_element<typename Element::Bits>(to + i * tensor.column_stride, Element::narrow(values[i]));
    }
  }
}

template <class Element, bool kAligned, class Place, int kWidth>
EP_DEVICE void store_pieces(ElementwiseTensor const& tensor, int64_t row, Place const& place,
                            float const (&values)[kWidth]) {
  using Bits = typename Element::Bits;
  constexpr int kPerWord = 4 / sizeof(Bits);
  char* const to = static_cast<char*>(tensor.data) + row + place.column * static_cast<int>(sizeof(Bits));
  bool const full = place.end - place.begin == kWidth;
  if (full && (kAligned || misalignment(to, kPartBytes) == 0)) {
#pragma unroll
    for (int i = 0; i < kWidth; i += 4 * kPerWord) {
      write_part(to + i * sizeof(Bits),
                 uint4{Element::word(values + i), Element::word(values + i + kPerWord),
                       Element::word(values + i + 2 * kPerWord), Element::word(values + i + 3 * kPerWord)});
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (place.has(i)) {
      write_element<Bits>(to + i * static_cast<int>(sizeof(Bits)), Element::narrow(values[i]));
    }
  }
}

// Every stride-th piece from the first on, a few at a time: all their loads are issued before the first of them is
// computed.  A step of that many strides beyond the last piece must not overflow.
template <class Kernel, bool kWide>
EP_DEVICE void process(Walk<Kernel, kWide> const& walk, typename Walk<Kernel, kWide>::Index first,
                       typename Walk<Kernel, kWide>::Index stride) {
  constexpr int kInFlight = Kernel::kInFlight;
  auto const scalars = Kernel::read_scalars(walk.inputs);
  for (; first < walk.pieces; first += stride * kInFlight) {
    Place<Kernel> place[kInFlight];
    typename Kernel::Loads loads[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      auto const piece = first + i * stride;
      place[i].begin = place[i].end = 0;
      if (piece < walk.pieces) {
        place[i] = walk.at(piece);
      }
      if (!place[i].empty()) {
        loads[i].issue(walk.inputs, place[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (!place[i].empty()) {
        Kernel::finish(walk.outputs, scalars, loads[i], place[i]);
      }
    }
  }
}

}  // namespace elementwise
}  // namespace ep
