// Visitor nodes for row-major matrices at any alignment: what TMA refuses goes between registers and memory in aligned
// pieces of 16 bytes all the same.
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

template <class Element, class StrideMNL>
struct UnalignedStore : UnalignedNode<UnalignedArguments<Element*, StrideMNL>, sizeof(Element) == 2> {
  using Base = UnalignedNode<UnalignedArguments<Element*, StrideMNL>, sizeof(Element) == 2>;
  using Base::Base;
  using ElementAux = Element;
  static constexpr int kWordsPerPair = 2 * sizeof(Element) / 4;
  static constexpr int kWords = kChunks * kWordsPerPair;  // of a thread's chunk
  static constexpr int kPieceElements = kPieceBytes / sizeof(Element);

  template <class GTensor, class RTensor, class CTensor>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    static constexpr int kTilesM = decltype(cute::size<3>(cute::declval<GTensor>()))::value;
    static constexpr int kTilesN = decltype(cute::size<4>(cute::declval<GTensor>()))::value;

    CUTLASS_DEVICE ConsumerStoreCallbacks(GTensor g, RTensor r, CTensor c, int m, int n, uint32_t* staged_)
        : gmem(g), registers(r), coordinates(c), extent_m(m), extent_n(n), staged(staged_) {}

    GTensor gmem;         // (CPY, CPY_M, CPY_N, EPI_M, EPI_N)
    RTensor registers;    // (CPY, CPY_M, CPY_N)
    CTensor coordinates;  // as gmem
    int extent_m, extent_n;
    uint32_t* staged;
    // The end of the row's last 32 columns.  2 bytes: of row `lane` of the warp's 16; 4 bytes: of thread 3 of a quad.
    uint32_t carried[kTilesM][kHalves][kPieceWords];

    template <typename ElementAccumulator, typename ElementInput, int FragmentSize>
    CUTLASS_DEVICE auto visit(
        cutlass::Array<ElementAccumulator, FragmentSize> const&, int epi_v, int, int,
        cutlass::Array<ElementInput, FragmentSize> const& input) {
      cutlass::NumericArrayConverter<Element, ElementInput, FragmentSize, cutlass::FloatRoundStyle::round_to_nearest>
          convert{};
      cute::recast<cutlass::Array<Element, FragmentSize>>(cute::coalesce(registers))(epi_v) = convert(input);
      return input;
    }

    CUTLASS_DEVICE void end_loop(int epi_m, int epi_n) {
      static_assert(decltype(cute::size(registers))::value == kValues, "an epilogue tile of 32 columns is expected");
      if constexpr (sizeof(Element) == 2) {
        store_staged(epi_m, epi_n);
      } else {
        store_exchanged(epi_m, epi_n);
      }
    }

    // Through shared memory: see the file's first page.
    CUTLASS_DEVICE void store_staged(int epi_m, int epi_n) {
      using namespace cute;
      int const lane = static_cast<int>(threadIdx.x & 31);
      int const q = lane & 3;
      auto const words = recast<uint32_t>(coalesce(registers));  // pairs: 2 rows x 4 chunks
      auto const places = gmem(_, _, _, epi_m, epi_n);
      auto const where = coordinates(_, _, _, epi_m, epi_n);
      int const tile_begin = get<1>(coordinates(_, _, _, epi_m, 0)(0)) - 2 * q;
      int const first_column = get<1>(where(0)) - 2 * q;  // of the 32
      __syncwarp();  // the rows before have been read
      if (lane < kStagedRows && epi_n > 0) {
        uint32_t const(&before)[kPieceWords] = carried[epi_m][0];
        *reinterpret_cast<uint4*>(staged + lane * kStagedPitch) =
            make_uint4(before[0], before[1], before[2], before[3]);
      }
      // four 8x8 matrices at a time: rows 0 to 7 and 8 to 15 of two chunks; each thread gives the address of one row
      uint32_t* const to = staged + ((lane >> 3 & 1) * 8 + (lane & 7)) * kStagedPitch + kPieceWords * (1 + (lane >> 4));
      SM90_U32x4_STSM_N::copy(words(0), words(1), words(2), words(3), *reinterpret_cast<uint128_t*>(to));
      SM90_U32x4_STSM_N::copy(
          words(4), words(5), words(6), words(7), *reinterpret_cast<uint128_t*>(to + 2 * kPieceWords));
      __syncwarp();
      bool const last = epi_n == kTilesN - 1;
      uint32_t pieces[kHalves][kPieceWords];
      char* rows[kHalves];      // where the quad's 32 columns begin
      unsigned phases[kHalves];  // of that, bytes after an aligned address
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        rows[half] = reinterpret_cast<char*>(&places(2 * half) - 2 * q);
        phases[half] = static_cast<unsigned>(reinterpret_cast<uintptr_t>(rows[half])) & (kPieceBytes - 1);
        // this thread's piece begins so many bytes into the staged row; read from the 8 bytes that hold its begin on
        unsigned const begins = kPieceBytes * (1 + q) - phases[half];
        uint32_t const* const from = staged + (half * 8 + (lane >> 2)) * kStagedPitch + (begins >> 3) * 2;
        uint2 const v0 = *reinterpret_cast<uint2 const*>(from);
        uint2 const v1 = *reinterpret_cast<uint2 const*>(from + 2);
        // the last 8 bytes are needed, and there, only where the piece does not begin with the first
        uint2 const v2 = begins & 7 ? *reinterpret_cast<uint2 const*>(from + 4) : make_uint2(0, 0);
        bool const by_word = begins & 4;
        uint32_t const w0 = by_word ? v0.y : v0.x, w1 = by_word ? v1.x : v0.y, w2 = by_word ? v1.y : v1.x;
        uint32_t const w3 = by_word ? v2.x : v1.y, w4 = by_word ? v2.y : v2.x;
        unsigned const bits = (begins & 3) * 8;
        pieces[half][0] = __funnelshift_r(w0, w1, bits);
        pieces[half][1] = __funnelshift_r(w1, w2, bits);
        pieces[half][2] = __funnelshift_r(w2, w3, bits);
        pieces[half][3] = __funnelshift_r(w3, w4, bits);
      }
      if (lane < kStagedRows) {
        uint4 const end = *reinterpret_cast<uint4 const*>(staged + lane * kStagedPitch + 4 * kPieceWords);
        carried[epi_m][0][0] = end.x;
        carried[epi_m][0][1] = end.y;
        carried[epi_m][0][2] = end.z;
        carried[epi_m][0][3] = end.w;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        if (get<0>(where(2 * half)) < extent_m) {
          int const phase_elements = static_cast<int>(phases[half] / sizeof(Element));
          int const begins = first_column + 8 * q - phase_elements;
          char* const place = rows[half] - phases[half] + kPieceBytes * q;
          store_part<Element>(place, pieces[half], tile_begin - begins, extent_n - begins);
          if (last && q == 3 && phases[half] != 0) {
            uint32_t const* const from = staged + (half * 8 + (lane >> 2)) * kStagedPitch + 4 * kPieceWords;
            uint32_t rest[2 * kPieceWords] = {from[0], from[1], from[2], from[3]};
            uint32_t end[kPieceWords];
            shift_words(rest, kPieceBytes - phases[half], end);
            store_part<Element>(place + kPieceBytes, end, 0, min(phase_elements, extent_n - begins - kPieceElements));
          }
        }
      }
    }

    // By exchange within quads.
    CUTLASS_DEVICE void store_exchanged(int epi_m, int epi_n) {
      using namespace cute;
      unsigned const q = threadIdx.x & 3;
      auto const values = coalesce(registers);
      auto const places = gmem(_, _, _, epi_m, epi_n);
      auto const where = coordinates(_, _, _, epi_m, epi_n);
      int const tile_begin = get<1>(coordinates(_, _, _, epi_m, 0)(0)) - 2 * static_cast<int>(q);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        uint32_t current[kWords];
        CUTLASS_PRAGMA_UNROLL
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          Element pair[2] = {values(4 * chunk + 2 * half), values(4 * chunk + 2 * half + 1)};
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kWordsPerPair; ++i) {
            current[chunk * kWordsPerPair + i] = reinterpret_cast<uint32_t const*>(pair)[i];
          }
        }
        transpose_quad<kWordsPerPair>(current);
        auto const corner = where(2 * half);
        bool const in_rows = get<0>(corner) < extent_m;
        int const first_column = get<1>(corner) - 2 * static_cast<int>(q);  // of the 32
        int const column = first_column + 8 * static_cast<int>(q);          // of this thread's chunk
        char* const row = reinterpret_cast<char*>(&places(2 * half) + 6 * static_cast<int>(q));
        unsigned const phase = static_cast<unsigned>(reinterpret_cast<uintptr_t>(row)) & (kPieceBytes - 1);
        int const phase_elements = static_cast<int>(phase / sizeof(Element));
        // the left neighbour's last 16 bytes; of the first thread the last thread's of the 32 columns before
        uint32_t joined[kWords + kPieceWords];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPieceWords; ++i) {
          uint32_t const own = current[kWords - kPieceWords + i];
          uint32_t const sent = q == 3 ? carried[epi_m][half][i] : own;
          joined[i] = __shfl_sync(0xffffffffu, sent, (q + 3) & 3, 4);
          carried[epi_m][half][i] = own;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWords; ++i) {
          joined[kPieceWords + i] = current[i];
        }
        uint32_t pieces[kWords];
        shift_words(joined, kPieceBytes - phase, pieces);
        if (in_rows) {
          CUTLASS_PRAGMA_UNROLL
          for (int piece = 0; piece < kWords / kPieceWords; ++piece) {
            int const begins = column - phase_elements + piece * kPieceElements;
            store_part<Element>(
                row - phase + piece * kPieceBytes, pieces + piece * kPieceWords, tile_begin - begins,
                extent_n - begins);
          }
          if (epi_n == kTilesN - 1 && q == 3 && phase != 0) {
            uint32_t rest[2 * kPieceWords] = {};
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kPieceWords; ++i) {
              rest[i] = carried[epi_m][half][i];
            }
            uint32_t last[kPieceWords];
            shift_words(rest, kPieceBytes - phase, last);
            int const begins = column - phase_elements + kWords / kPieceWords * kPieceElements;
            store_part<Element>(
                row - phase + kWords / kPieceWords * kPieceBytes, last, 0, min(phase_elements, extent_n - begins));
          }
        }
      }
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    using cutlass::epilogue::fusion::sm90_partition_for_epilogue;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    Tensor matrix = make_tensor(make_gmem_ptr(this->params_ptr->ptr_aux), make_shape(M, N, L), this->params_ptr->dAux);
    Tensor gmem = sm90_partition_for_epilogue<ReferenceSrc>(
        matrix, args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy, args.thread_idx);
    Tensor registers = make_tensor<Element>(take<0, 3>(shape(gmem)));
    Tensor coordinates = sm90_partition_for_epilogue<ReferenceSrc>(
        make_identity_tensor(shape(matrix)), args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy,
        args.thread_idx);
    return ConsumerStoreCallbacks<decltype(gmem), decltype(registers), decltype(coordinates)>(
        gmem, registers, coordinates, static_cast<int>(M), static_cast<int>(N), staging(this->shared));
  }
};

template <class Element, class StrideMNL>
struct UnalignedLoad : UnalignedNode<UnalignedLoadArguments<Element, StrideMNL>, sizeof(Element) == 2> {
  using Base = UnalignedNode<UnalignedLoadArguments<Element, StrideMNL>, sizeof(Element) == 2>;
  using Base::Base;
  static constexpr int kWordsPerPair = 2 * sizeof(Element) / 4;
  static constexpr int kWords = kChunks * kWordsPerPair;

  template <class GTensor, class RTensor, class CTensor>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    static constexpr int kTilesM = decltype(cute::size<3>(cute::declval<GTensor>()))::value;
    static constexpr int kTilesN = decltype(cute::size<4>(cute::declval<GTensor>()))::value;

    CUTLASS_DEVICE ConsumerStoreCallbacks(
        GTensor g, RTensor r, CTensor c, int m, int n, uintptr_t begin_, uintptr_t end_, uint32_t* staged_)
        : gmem(g),
          registers(r),
          coordinates(c),
          extent_m(m),
          extent_n(n),
          memory_begin(begin_),
          memory_end(end_),
          staged(staged_) {}

    GTensor gmem;
    RTensor registers;
    CTensor coordinates;
    int extent_m, extent_n;
    uintptr_t memory_begin, memory_end;  // of the matrix
    uint32_t* staged;
    uint32_t loaded[kHalves][kWords + kPieceWords];  // aligned pieces of the next epilogue tile

    // The aligned piece at an address; zeros for what lies outside of the matrix.
    CUTLASS_DEVICE void load_piece(uintptr_t from, uint32_t* words) const {
      if (from >= memory_begin && from + kPieceBytes <= memory_end) {
        uint4 const found = __ldg(reinterpret_cast<uint4 const*>(from));
        words[0] = found.x;
        words[1] = found.y;
        words[2] = found.z;
        words[3] = found.w;
        return;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieceBytes / 2; ++i) {
        uintptr_t const half_word = from + 2 * i;
        uint32_t const found = half_word >= memory_begin && half_word + 2 <= memory_end
                                   ? __ldg(reinterpret_cast<uint16_t const*>(half_word))
                                   : 0;
        words[i / 2] = i % 2 ? words[i / 2] | found << 16 : found;
      }
    }

    // Asks for pieces of the quad's 32 columns: one for each thread, and one more that ends them for the last.
    CUTLASS_DEVICE void request_staged(int epi_m, int epi_n) {
      using namespace cute;
      int const q = static_cast<int>(threadIdx.x & 3);
      auto const places = gmem(_, _, _, epi_m, epi_n);
      auto const where = coordinates(_, _, _, epi_m, epi_n);
      int const left = extent_n - (get<1>(where(0)) - 2 * q);  // columns from the first of the 32 on
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        uintptr_t const address = reinterpret_cast<uintptr_t>(&places(2 * half) - 2 * q);
        unsigned const phase = static_cast<unsigned>(address) & (kPieceBytes - 1);
        int const wanted = static_cast<int>(phase) + min(left, 32) * static_cast<int>(sizeof(Element));
        bool const in_rows = get<0>(where(2 * half)) < extent_m;
        uintptr_t const from = address - phase + kPieceBytes * q;
        if (in_rows && wanted > kPieceBytes * q) {
          load_piece(from, loaded[half]);
        }
        if (in_rows && q == 3 && wanted > 4 * kPieceBytes) {
          load_piece(from + kPieceBytes, loaded[half] + kPieceWords);
        }
      }
    }

    CUTLASS_DEVICE void take_staged(int epi_m, int epi_n) {
      using namespace cute;
      int const lane = static_cast<int>(threadIdx.x & 31);
      int const q = lane & 3;
      auto values = recast<uint32_t>(coalesce(registers));  // pairs: 2 rows x 4 chunks
      auto const places = gmem(_, _, _, epi_m, epi_n);
      __syncwarp();  // the rows before have been read
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        uint32_t* const row = staged + (half * 8 + (lane >> 2)) * kStagedPitch;
        uint32_t const* const found = loaded[half];
        *reinterpret_cast<uint4*>(row + kPieceWords * q) = make_uint4(found[0], found[1], found[2], found[3]);
        if (q == 3) {
          *reinterpret_cast<uint4*>(row + kPieceWords * 4) = make_uint4(found[4], found[5], found[6], found[7]);
        }
      }
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        unsigned const phase =
            static_cast<unsigned>(reinterpret_cast<uintptr_t>(&places(2 * half) - 2 * q)) & (kPieceBytes - 1);
        uint32_t const* const from = staged + (half * 8 + (lane >> 2)) * kStagedPitch + (phase >> 2) + q;
        unsigned const bits = (phase & 2) * 8;
        CUTLASS_PRAGMA_UNROLL
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          uint32_t const low = from[kPieceWords * chunk];
          // one beyond the row at most, and then not used
          uint32_t const high = bits ? from[kPieceWords * chunk + 1] : 0;
          values(2 * chunk + half) = __funnelshift_r(low, high, bits);
        }
      }
    }

    // Asks for the pieces that hold this thread's chunk of an epilogue tile; nothing waits for them here.
    CUTLASS_DEVICE void request(int epi_m, int epi_n) {
      if constexpr (sizeof(Element) == 2) {
        request_staged(epi_m, epi_n);
        return;
      }
      using namespace cute;
      int const q = static_cast<int>(threadIdx.x & 3);
      auto const places = gmem(_, _, _, epi_m, epi_n);
      auto const where = coordinates(_, _, _, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        auto const corner = where(2 * half);
        int const left = get<0>(corner) < extent_m ? extent_n - (get<1>(corner) + 6 * q) : 0;  // columns from the chunk on
        uintptr_t const address = reinterpret_cast<uintptr_t>(&places(2 * half) + 6 * q);
        uintptr_t const aligned = address & ~static_cast<uintptr_t>(kPieceBytes - 1);
        unsigned const phase = static_cast<unsigned>(address - aligned);
        uint32_t(&words)[kWords + kPieceWords] = loaded[half];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWords + kPieceWords; ++i) {
          words[i] = 0;
        }
        // bytes of the row that are wanted, from the aligned address on
        int const wanted = left <= 0 ? 0 : static_cast<int>(phase) + min(left, 8) * static_cast<int>(sizeof(Element));
        CUTLASS_PRAGMA_UNROLL
        for (int piece = 0; piece <= kWords / kPieceWords; ++piece) {
          if (wanted <= piece * kPieceBytes) {
            continue;
          }
          load_piece(aligned + piece * kPieceBytes, words + piece * kPieceWords);
        }
      }
    }

    CUTLASS_DEVICE void begin() { request(0, 0); }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      static_assert(decltype(cute::size(registers))::value == kValues, "an epilogue tile of 32 columns is expected");
      if constexpr (sizeof(Element) == 2) {
        take_staged(epi_m, epi_n);
      } else {
        take_exchanged(epi_m, epi_n);
      }
      bool const last_m = epi_m == kTilesM - 1;
      if (!last_m || epi_n < kTilesN - 1) {
        request(last_m ? 0 : epi_m + 1, last_m ? epi_n + 1 : epi_n);
      }
    }

    CUTLASS_DEVICE void take_exchanged(int epi_m, int epi_n) {
      using namespace cute;
      int const q = static_cast<int>(threadIdx.x & 3);
      auto values = coalesce(registers);
      auto const places = gmem(_, _, _, epi_m, epi_n);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        unsigned const phase =
            static_cast<unsigned>(reinterpret_cast<uintptr_t>(&places(2 * half) + 6 * q)) & (kPieceBytes - 1);
        uint32_t chunk[kWords];
        shift_words(loaded[half], phase, chunk);
        transpose_quad<kWordsPerPair>(chunk);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kChunks; ++i) {
          Element pair[2];
          CUTLASS_PRAGMA_UNROLL
          for (int word = 0; word < kWordsPerPair; ++word) {
            reinterpret_cast<uint32_t*>(pair)[word] = chunk[i * kWordsPerPair + word];
          }
          values(4 * i + 2 * half) = pair[0];
          values(4 * i + 2 * half + 1) = pair[1];
        }
      }
    }

    template <typename ElementAccumulator, int FragmentSize>
    CUTLASS_DEVICE cutlass::Array<Element, FragmentSize> visit(
        cutlass::Array<ElementAccumulator, FragmentSize> const&, int epi_v, int, int) {
      return cute::recast<cutlass::Array<Element, FragmentSize>>(cute::coalesce(registers))(epi_v);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    using cutlass::epilogue::fusion::sm90_partition_for_epilogue;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto const& stride = this->params_ptr->dAux;
    Tensor matrix = make_tensor(make_gmem_ptr(this->params_ptr->ptr_aux), make_shape(M, N, L), stride);
    Tensor gmem = sm90_partition_for_epilogue<ReferenceSrc>(
        matrix, args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy, args.thread_idx);
    Tensor registers = make_tensor<Element>(take<0, 3>(shape(gmem)));
    Tensor coordinates = sm90_partition_for_epilogue<ReferenceSrc>(
        make_identity_tensor(shape(matrix)), args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy,
        args.thread_idx);
    int64_t const elements = static_cast<int64_t>(M - 1) * get<0>(stride) +
                             static_cast<int64_t>(L - 1) * static_cast<int64_t>(get<2>(stride)) + N;
    uintptr_t const begin = reinterpret_cast<uintptr_t>(this->params_ptr->ptr_aux);
    return ConsumerStoreCallbacks<decltype(gmem), decltype(registers), decltype(coordinates)>(
        gmem, registers, coordinates, static_cast<int>(M), static_cast<int>(N), begin,
        begin + static_cast<uintptr_t>(elements) * sizeof(Element), staging(this->shared));
  }
};

}  // namespace ep
