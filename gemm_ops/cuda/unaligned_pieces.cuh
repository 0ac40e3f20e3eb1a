// Row-major matrices at any alignment: what the visitor nodes that load and store them share.  What TMA refuses goes
// between registers and memory in aligned pieces of 16 bytes all the same.
//
// After a wgmma, the four threads of a quad hold 32 consecutive columns of a row as pairs: thread q has the columns
// 8c + 2q and 8c + 2q + 1 of the chunks c = 0 to 3, and so for a second row, 8 below.  Stored as they are, that is two
// bytes at a time, a dozen of the instructions and twice the memory transactions that the bytes need: 2.2 times the
// time of the GEMM at 4096 x 50257 x 768.  So a warp lays its 16 rows of 32 columns out in shared memory, where every
// thread picks up 16 bytes of a row that are an aligned piece in global memory, and stores them whole.  What is left at
// the end of 32 columns is carried to the next 32, so that only the first and the last piece of a tile's row are stored
// in parts.  Loads go the same way in the opposite direction, one epilogue tile ahead.  Elements of 4 bytes, which
// misalign less, are exchanged between the threads of a quad instead.
//
// Nothing outside the matrix is written.  Loads read aligned pieces that lie between its first and its last byte, and
// element by element where a piece would not.
#pragma once

#include <cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp>

namespace ep {

constexpr int kPieceBytes = 16;
constexpr int kPieceWords = 4;

// A warp's rows in shared memory: a piece of what came before, and 32 columns of 16 bits.  20 words from row to row
// spread the rows over the banks.
constexpr int kStagedRows = 16;
constexpr int kStagedPitch = 20;  // words
constexpr int kWarps = 8;         // of both consumer warp groups

template <bool kStages>
struct Staging {};
template <>
struct Staging<true> {
  alignas(16) uint32_t rows[kWarps][kStagedRows][kStagedPitch];

  CUTLASS_DEVICE uint32_t* of_warp() { return &rows[(threadIdx.x >> 5) % kWarps][0][0]; }
};

// Element j of the result is element q of thread j of the quad; elements are kWords words.
template <int kWords>
CUTLASS_DEVICE void transpose_quad(uint32_t (&w)[4 * kWords]) {
  unsigned const q = threadIdx.x & 3;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    bool const upper = q & step;
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      int const low = step == 1 ? 2 * pair : pair;
      int const high = low + step;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) {
        uint32_t const sent = upper ? w[low * kWords + i] : w[high * kWords + i];
        uint32_t const received = __shfl_xor_sync(0xffffffffu, sent, step);
        if (upper) {
          w[low * kWords + i] = received;
        } else {
          w[high * kWords + i] = received;
        }
      }
    }
  }
}

// out[i] = the word that begins `offset` bytes, 0 to 16, after word i of x.
template <int kOut>
CUTLASS_DEVICE void shift_words(uint32_t const (&x)[kOut + kPieceWords], unsigned offset, uint32_t (&out)[kOut]) {
  uint32_t y[kOut + 5];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kOut + 4; ++i) {
    y[i] = x[i];
  }
  y[kOut + 4] = 0;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 4; step >= 1; step /= 2) {
    bool const by = offset & (4 * step);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kOut + 5; ++i) {
      y[i] = by && i + step < kOut + 5 ? y[i + step] : y[i];
    }
  }
  unsigned const bits = (offset & 3) * 8;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kOut; ++i) {
    out[i] = __funnelshift_r(y[i], y[i + 1], bits);
  }
}

// Stores elements [from, to) of a piece whose place in memory is aligned.
template <class Element>
CUTLASS_DEVICE void store_part(char* place, uint32_t const* words, int from, int to) {
  constexpr int kElements = kPieceBytes / sizeof(Element);
  if (to <= 0 || from >= kElements) {
    return;
  }
  if (from <= 0 && to >= kElements) {
    *reinterpret_cast<uint4*>(place) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
  if constexpr (sizeof(Element) == 2) {
    // a beginning or an end in at most three steps
    if (from <= 0) {
      if (to & 4) {
        *reinterpret_cast<uint2*>(place) = make_uint2(words[0], words[1]);
      }
      if (to & 2) {
        *reinterpret_cast<uint32_t*>(place + (to & 4) * 2) = to & 4 ? words[2] : words[0];
      }
      if (to & 1) {
        uint32_t const word = to & 4 ? (to & 2 ? words[3] : words[2]) : (to & 2 ? words[1] : words[0]);
        *reinterpret_cast<uint16_t*>(place + (to & 6) * 2) = static_cast<uint16_t>(word);
      }
      return;
    }
    if (to >= kElements) {
      if (from & 1) {
        uint32_t const word = from & 4 ? (from & 2 ? words[3] : words[2]) : (from & 2 ? words[1] : words[0]);
        *reinterpret_cast<uint16_t*>(place + from * 2) = static_cast<uint16_t>(word >> 16);
      }
      int const even = (from + 1) & ~1;
      if (even & 2) {
        *reinterpret_cast<uint32_t*>(place + even * 2) = even & 4 ? words[3] : words[1];
      }
      if (even <= 4) {
        *reinterpret_cast<uint2*>(place + 8) = make_uint2(words[2], words[3]);
      }
      return;
    }
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kElements; ++i) {
    if (i >= from && i < to) {
      if constexpr (sizeof(Element) == 2) {
        reinterpret_cast<uint16_t*>(place)[i] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
      } else {
        reinterpret_cast<uint32_t*>(place)[i] = words[i];
      }
    }
  }
}

// What the two nodes share: no workspace, nothing for the producer warp to load.
template <class Arguments_, bool kStages>
struct UnalignedNode {
  using SharedStorage = Staging<kStages>;
  using Arguments = Arguments_;
  using Params = Arguments;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(
      ProblemShape const&, Arguments const&, void*, cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE UnalignedNode() {}
  CUTLASS_HOST_DEVICE UnalignedNode(Params const& params, SharedStorage const& storage)
      : params_ptr(&params), shared(const_cast<SharedStorage*>(&storage)) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(
      cutlass::epilogue::fusion::ProducerLoadArgs<Args...> const&) {
    return cutlass::epilogue::fusion::EmptyProducerLoadCallbacks{};
  }

  Params const* params_ptr;
  SharedStorage* shared;
};

template <class Pointer, class StrideMNL>
struct UnalignedArguments {
  Pointer ptr_aux = nullptr;
  StrideMNL dAux = {};
};

template <class Element, class StrideMNL>
struct UnalignedLoadArguments {
  Element const* ptr_aux = nullptr;
  Element null_default = Element(0);
  StrideMNL dAux = {};
};

CUTLASS_DEVICE uint32_t* staging(Staging<true>* shared) { return shared->of_warp(); }
CUTLASS_DEVICE uint32_t* staging(Staging<false>*) { return nullptr; }

// Where a thread's values lie: 16 of an epilogue tile, 2 columns x 2 rows x 4 chunks.
constexpr int kValues = 16;
constexpr int kHalves = 2;
constexpr int kChunks = 4;

}  // namespace ep
