// Loading and storing the pieces of an elementwise kernel; elementwise_walk.cuh says what a piece is.
//
// An input that does not start where the main output does is read in the aligned parts that hold it, of 16 bytes or of
// what a shorter piece has, which are shifted into place: neighbouring threads read the same parts, and the L1 cache
// serves them.  Only parts that lie between the tensor's first byte and its last are read whole, so nothing outside of a
// tensor is read or written.
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

#include "element_types.cuh"
#include "elementwise_walk.cuh"
#include "functors.cuh"

namespace ep {
namespace elementwise {

using ep::Bf16;
using ep::F16;
using ep::F32;

// The words of one vector access: four, two or one.
template <int kWords> struct alignas(4 * kWords) Part {
  uint32_t words[kWords];
};

// All of the kernel's memory accesses are these four.
template <int kWords> EP_DEVICE Part<kWords> read_part(char const* from) {
  return *reinterpret_cast<Part<kWords> const*>(from);
}
template <int kWords> EP_DEVICE void write_part(char* to, Part<kWords> part) {
  *reinterpret_cast<Part<kWords>*>(to) = part;
}
template <class Bits> EP_DEVICE Bits read_element(char const* from) { return *reinterpret_cast<Bits const*>(from); }
template <class Bits> EP_DEVICE void write_element(char* to, Bits bits) { *reinterpret_cast<Bits*>(to) = bits; }

// The ways of an input.  `find` says whether `load` can take the piece as it is; if not, `load_within` does, which
// minds the tensor's ends.  Both issue loads, `settle` makes use of them, and after that `at` gives the elements.

// What every element shares: the one element of a tensor, or a number, rounded to the dtype.
template <class Element> struct Single {
  typename Element::Bits bits;

  template <class Place> EP_DEVICE bool find(Tensor const&, int64_t, Place const&) { return true; }
  template <class Place> EP_DEVICE void load(Tensor const& tensor, int64_t, Place const&) {
    bits = tensor.data ? read_element<typename Element::Bits>(tensor.data) : Element::narrow(tensor.value);
  }
  template <class Place> EP_DEVICE void load_within(Tensor const& tensor, int64_t row, Place const& place) {
    load(tensor, row, place);
  }
  EP_DEVICE void settle() {}
  EP_DEVICE float at(int) const { return Element::widen(bits); }
};

// One element for a whole row.
template <class Element> struct Repeated {
  typename Element::Bits bits;

  template <class Place> EP_DEVICE bool find(Tensor const&, int64_t, Place const&) { return true; }
  template <class Place> EP_DEVICE void load(Tensor const& tensor, int64_t row, Place const&) {
    bits = read_element<typename Element::Bits>(tensor.data + row);
  }
  template <class Place> EP_DEVICE void load_within(Tensor const& tensor, int64_t row, Place const& place) {
    load(tensor, row, place);
  }
  EP_DEVICE void settle() {}
  EP_DEVICE float at(int) const { return Element::widen(bits); }
};

// Elements that do not lie one after another.
template <class Element, int kWidth> struct Strided {
  typename Element::Bits bits[kWidth];

  template <class Place> EP_DEVICE bool find(Tensor const&, int64_t, Place const&) { return true; }
  template <class Place> EP_DEVICE void load(Tensor const& tensor, int64_t row, Place const& place) {
    char const* const from = tensor.data + row + place.column * tensor.column_stride;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      bits[i] = place.has(i) ? read_element<typename Element::Bits>(from + i * tensor.column_stride) : 0;
    }
  }
  template <class Place> EP_DEVICE void load_within(Tensor const& tensor, int64_t row, Place const& place) {
    load(tensor, row, place);
  }
  EP_DEVICE void settle() {}
  EP_DEVICE float at(int i) const { return Element::widen(bits[i]); }
};

// Elements of rows that make a long one, in each of which the tensor begins anew.
template <class Element, int kWidth> struct Wrapped {
  typename Element::Bits bits[kWidth];

  template <class Place> EP_DEVICE bool find(Tensor const&, int64_t, Place const&) { return true; }
  template <class Place> EP_DEVICE void load(Tensor const& tensor, int64_t, Place const& place) {
    int64_t const to_next_row = tensor.row_stride - place.wrap * tensor.column_stride;
    char const* from = tensor.data + place.wrap_row * tensor.row_stride + place.wrap_column * tensor.column_stride;
    int column = place.wrap_column;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      bits[i] = 0;
      if (place.has(i)) {
        bits[i] = read_element<typename Element::Bits>(from);
        from += tensor.column_stride;
        if (++column == place.wrap) {
          column = 0;
          from += to_next_row;
        }
      }
    }
  }
  template <class Place> EP_DEVICE void load_within(Tensor const& tensor, int64_t row, Place const& place) {
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
  static constexpr int kWords = kWidth * kSize / 4;
  static constexpr int kPart = kWords < 4 ? kWords : 4;  // words
  static constexpr int kPartBytes = 4 * kPart, kParts = kWords / kPart;

  uint32_t words[kWords + (kAligned ? 0 : kPart)];
  unsigned shift;
  char const* aligned;  // the first part

  template <class Place> EP_DEVICE bool find(Tensor const& tensor, int64_t row, Place const& place) {
    char const* const from = tensor.data + row + place.column * kSize;
    shift = kAligned ? 0 : misalignment(from, kPartBytes);
    aligned = from - shift;
    if (kAligned && place.full()) {
      return true;
    }
    int const bytes = (kParts + (shift != 0)) * kPartBytes;
    return aligned >= tensor.data && aligned + bytes <= tensor.data + tensor.bytes;
  }

  template <class Place> EP_DEVICE void load(Tensor const&, int64_t, Place const&) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      keep(part);
    }
    if constexpr (!kAligned) {
      if (shift != 0) {
        keep(kParts);
      }
    }
  }

  template <class Place> EP_DEVICE void load_within(Tensor const& tensor, int64_t row, Place const& place) {
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
      for (int i = 0; kPart > 2 && i < kWords + 2; ++i) {
        words[i] = shift & 8 ? words[i + 2] : words[i];
      }
#pragma unroll
      for (int i = 0; kPart > 1 && i < kWords + 1; ++i) {
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
  EP_DEVICE void keep(int part) {
    auto const loaded = read_part<kPart>(aligned + part * kPartBytes);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      words[part * kPart + i] = loaded.words[i];
    }
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
EP_DEVICE void store_strided(Tensor const& tensor, int64_t row, Place const& place,
                             float const (&values)[kWidth]) {
  char* const to = tensor.data + row + place.column * tensor.column_stride;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (place.has(i)) {
      write_element<typename Element::Bits>(to + i * tensor.column_stride, Element::narrow(values[i]));
    }
  }
}

template <class Element, bool kAligned, class Place, int kWidth>
EP_DEVICE void store_pieces(Tensor const& tensor, int64_t row, Place const& place,
                            float const (&values)[kWidth]) {
  using Bits = typename Element::Bits;
  constexpr int kPerWord = 4 / sizeof(Bits), kWords = kWidth / kPerWord, kPart = kWords < 4 ? kWords : 4;
  char* const to = tensor.data + row + place.column * static_cast<int>(sizeof(Bits));
  if (__builtin_expect(place.full() && (kAligned || misalignment(to, 4 * kPart) == 0), 1)) {
#pragma unroll
    for (int first = 0; first < kWords; first += kPart) {
      Part<kPart> part;
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        part.words[i] = Element::word(values + (first + i) * kPerWord);
      }
      write_part(to + 4 * first, part);
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

// A thread's work: one piece.
template <class Kernel, bool kWide>
EP_DEVICE void process(Walk<Kernel, kWide> const& walk, typename Walk<Kernel, kWide>::Index piece) {
  if (piece >= walk.pieces) {
    return;
  }
  auto const place = walk.at(piece);
  if (place.empty()) {
    return;
  }
  typename Kernel::Loads loads;
  loads.issue(walk, place);
  Kernel::finish(walk, loads, place);
}

}  // namespace elementwise
}  // namespace ep
