// Walking through the tensors of an elementwise kernel piece by piece, in 32 or 64 bits.
//
// A piece is kWidth consecutive elements along the innermost dimension, a thread's unit of work.  Pieces begin where
// the main output's address is a multiple of their length, so that it is stored in whole 16 bytes in every row, however
// the row starts; the first and the last piece of a row may be partial, and one beyond the row's end is empty.
//
// Neighbouring threads take neighbouring pieces of a row.  Where a tensor runs across the rows (kTiled), the 32 of a
// warp take two pieces of each of 16 rows: a thread reaches one element of that tensor at a time, but those of 16 rows
// lie side by side, 32 bytes or more.
//
// Where an input begins anew in each of the rows that make a long one (kWrapped), a place also says which of them its
// first element is in, and where.
//
// ElementwiseTensor and ElementwiseArguments (elementwise/arguments.py) are declared before this file is included.
#pragma once

#include <cstdint>
#include <type_traits>

#include "functors.cuh"

namespace ep {
namespace elementwise {

constexpr int kTileRows = 16, kTilePieces = 2;

EP_DEVICE unsigned misalignment(char const* address, unsigned unit) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(address) % unit);
}

// Division by a number that is known when the kernel starts.  Narrow: exact for dividends below 2^31.
template <bool kWide> struct Divisor;

template <> struct Divisor<false> {
  uint32_t value, multiplier, shift;

  void set(int64_t divisor) {
    value = static_cast<uint32_t>(divisor);
    for (shift = 0; (uint64_t{1} << shift) < value; ++shift) {
    }
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - value)) / value + 1);
  }

  EP_DEVICE uint32_t divide(uint32_t dividend) const { return (__umulhi(dividend, multiplier) + dividend) >> shift; }
};

template <> struct Divisor<true> {
  int64_t value;

  void set(int64_t divisor) { value = divisor; }

  EP_DEVICE int64_t divide(int64_t dividend) const { return dividend / value; }
};

// Where a piece is: of every tensor the bytes from its begin to the row's, the column of the piece's first element,
// which is negative where the row begins within the piece, and which of its elements the row has.
template <class Kernel> struct Place {
  int64_t inputs[Kernel::kInputs], outputs[Kernel::kOutputs];
  int64_t column;
  int begin, end;
  int64_t wrap_row;  // where there are wrapped inputs: of the first element that is within the long row
  int wrap, wrap_column;

  EP_DEVICE bool empty() const { return begin >= end; }
  EP_DEVICE bool full() const { return end - begin == Kernel::kWidth; }
  EP_DEVICE bool has(int element) const { return element >= begin && element < end; }
};

// What a loader or a store needs of a tensor.
struct Tensor {
  char* data;
  int64_t bytes, column_stride, row_stride;  // from row to row: of a wrapped one
  float value;
};

// The arguments of a launch as the kernel takes them: no more of them than it has tensors and dimensions, and first what
// every thread reads.  Each launch waits for them anew, a cache line at a time: with little else to do that is seen.
template <class Kernel, bool kWide> struct Walk {
  using Index = std::conditional_t<kWide, int64_t, uint32_t>;
  static constexpr int kInputs = Kernel::kInputs, kOutputs = Kernel::kOutputs, kDimensions = Kernel::kDimensions;
  static constexpr bool kTiled = Kernel::kTiled;
  static_assert(kDimensions > 0 || !kTiled);
  // one more than is used where there are none, for there are no arrays of nothing; a wrapped tensor uses it
  static constexpr int kStrides = kDimensions > 0 ? kDimensions : 1;

  char *input_data[kInputs], *output_data[kOutputs];
  int64_t columns;
  Index pieces;
  Divisor<kWide> per_row;          // pieces, or tiles
  Divisor<kWide> outer[kStrides];  // extents; of the last one in tiles, where there are tiles
  int64_t input_strides[kInputs][kStrides], output_strides[kOutputs][kStrides];
  int64_t last_extent;
  Divisor<kWide> wrap;  // elements
  int64_t input_column_stride[kInputs], output_column_stride[kOutputs];
  int64_t input_bytes[kInputs], output_bytes[kOutputs];
  float values[kInputs];

  explicit Walk(ElementwiseArguments const& args) : columns(args.columns) {
    for (int i = 0; i < kInputs; ++i) {
      take(args.inputs[i], input_data[i], input_strides[i], input_column_stride[i], input_bytes[i]);
      values[i] = args.inputs[i].value;
    }
    for (int i = 0; i < kOutputs; ++i) {
      take(args.outputs[i], output_data[i], output_strides[i], output_column_stride[i], output_bytes[i]);
    }
    for (int d = 0; d < kStrides; ++d) {
      outer[d].set(d < kDimensions ? steps(args, d) : 1);
    }
    last_extent = kDimensions > 0 ? args.outer[kStrides - 1] : 1;
    per_row.set(steps_per_row(args));
    wrap.set(args.wrap > 0 ? args.wrap : 1);
    pieces = static_cast<Index>(count(args));
  }

  static void take(ElementwiseTensor const& given, char*& data, int64_t (&strides)[kStrides], int64_t& column_stride,
                   int64_t& bytes) {
    data = static_cast<char*>(given.data);
    column_stride = given.column_stride;
    bytes = given.bytes;
    for (int d = 0; d < kStrides; ++d) {
      strides[d] = given.strides[d];
    }
  }

  EP_DEVICE Tensor input(int i) const {
    return {input_data[i], input_bytes[i], input_column_stride[i], input_strides[i][0], values[i]};
  }

  EP_DEVICE Tensor output(int i) const {
    return {output_data[i], output_bytes[i], output_column_stride[i], output_strides[i][0], 0};
  }

  static int64_t steps(ElementwiseArguments const& args, int d) {
    return kTiled && d == kDimensions - 1 ? (args.outer[d] + kTileRows - 1) / kTileRows : args.outer[d];
  }

  static int64_t steps_per_row(ElementwiseArguments const& args) {
    return kTiled ? (args.pieces_per_row + kTilePieces - 1) / kTilePieces : args.pieces_per_row;
  }

  static int64_t count(ElementwiseArguments const& args) {
    int64_t pieces = steps_per_row(args) * (kTiled ? kTileRows * kTilePieces : 1);
    for (int d = 0; d < kDimensions; ++d) {
      pieces *= steps(args, d);
    }
    return pieces;
  }

  EP_DEVICE Place<Kernel> at(Index piece) const {
    Place<Kernel> place{};
    Index in_row = piece;
    if constexpr (kDimensions > 0) {
      int in_tile = 0;
      if constexpr (kTiled) {
        in_tile = static_cast<int>(piece % (kTileRows * kTilePieces));
        piece /= kTileRows * kTilePieces;
      }
      Index row = per_row.divide(piece);
      in_row = piece - row * per_row.value;
      if constexpr (kTiled) {
        in_row = in_row * kTilePieces + in_tile / kTileRows;
      }
#pragma unroll
      for (int d = kDimensions - 1; d >= 0; --d) {
        Index const next = d > 0 ? outer[d].divide(row) : 0;
        int64_t index = static_cast<int64_t>(row - next * outer[d].value);
        if constexpr (kTiled) {
          if (d == kDimensions - 1) {
            index = index * kTileRows + in_tile % kTileRows;
            if (index >= last_extent) {
              return place;  // which is empty
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          place.inputs[i] += index * input_strides[i][d];
        }
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
          place.outputs[i] += index * output_strides[i][d];
        }
        row = next;
      }
    }
    int phase = 0;
    if constexpr (Kernel::kMainInPieces && !Kernel::kWhole) {
      constexpr int kSize = sizeof(typename Kernel::Main::Bits);
      char const* const begin = output_data[0] + place.outputs[0];
      phase = static_cast<int>(misalignment(begin, Kernel::kWidth * kSize) / kSize);
    }
    place.column = static_cast<int64_t>(in_row) * Kernel::kWidth - phase;
    place.begin = 0;
    place.end = Kernel::kWidth;
    if constexpr (!Kernel::kWhole) {  // else these are constants, and what deals with parts of pieces is left out
      int64_t const left = columns - place.column;
      place.begin = place.column < 0 ? phase : 0;
      place.end = left < Kernel::kWidth ? static_cast<int>(left) : Kernel::kWidth;
    }
    if constexpr (Kernel::kWrapped) {
      Index const element = static_cast<Index>(place.column + place.begin);
      Index const row = wrap.divide(element);
      place.wrap_row = static_cast<int64_t>(row);
      place.wrap = static_cast<int>(wrap.value);
      place.wrap_column = static_cast<int>(element - row * wrap.value);
    }
    return place;
  }
};

}  // namespace elementwise
}  // namespace ep
