// Loads a row-major matrix at any alignment; see unaligned_pieces.cuh.
#pragma once

#include "unaligned_pieces.cuh"

namespace ep {

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
