// Stores a row-major matrix at any alignment; see unaligned_pieces.cuh.
#pragma once

#include "unaligned_pieces.cuh"

namespace ep {

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

}  // namespace ep
