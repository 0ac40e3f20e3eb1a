// Stores a row-major matrix at any alignment; see unaligned_pieces.cuh.
#pragma once

#include "unaligned_pieces.cuh"

namespace ep {

template <class Element, class StrideMNL, class Schedule>
struct UnalignedStore : UnalignedNode<UnalignedStoreArguments<Element, StrideMNL>, Staging<Element, Schedule>> {
  using Stage = Staging<Element, Schedule>;
  using Base = UnalignedNode<UnalignedStoreArguments<Element, StrideMNL>, Stage>;
  using Base::Base;
  using ElementAux = Element;

  template <class Rows, class RTensor, int kTilesM, int kTilesN>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    static_assert(decltype(cute::size(cute::declval<RTensor>()))::value == kValues, "an epilogue tile has 32 columns");

    CUTLASS_DEVICE ConsumerStoreCallbacks(Rows const& r, RTensor v, char* s) : tile(r), registers(v), staged(s) {}

    Rows tile;
    RTensor registers;  // (CPY, CPY_M, CPY_N)
    char* staged;
    Element before[kTilesM][kHalves][2];             // own elements of the last chunk of the 32 columns before
    uint4 pieces[kHalves][Stage::kPiecesPerThread];  // of the epilogue tile before, on their way to global memory

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
      // now, and not when they were read from shared memory: reading takes as long as the visit since then
      if (epi_m > 0) {
        store_pieces(epi_m - 1, epi_n);
      } else if (epi_n > 0) {
        store_pieces(kTilesM - 1, epi_n - 1);
      }
      __syncwarp();  // the rows before have been read
      stage(epi_m, epi_n);
      __syncwarp();
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        char const* const from = staged + half * 8 * Stage::kPitch;
        char* const to = tile.pieces(epi_m, half) + epi_n * Stage::kRowBytes;
        bool const exists = tile.exists(epi_m, half);
        int const begin = epi_n == 0 ? tile.phase : 0;
        if (!is_whole(epi_n)) {
          int const columns = tile.columns - kColumns * epi_n;
          copy_elements<Element>(to, from, begin, exists ? tile.phase + columns * static_cast<int>(sizeof(Element)) : 0);
          continue;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Stage::kPiecesPerThread; ++i) {
          pieces[half][i] = *reinterpret_cast<uint4 const*>(from + piece_of(i));
        }
        if (epi_n == 0) {
          copy_elements<Element>(to, from, begin, exists && begin > 0 ? kPieceBytes : 0);
        }
        if (epi_n == kTilesN - 1) {
          copy_elements<Element>(to, from, Stage::kRowBytes, exists ? Stage::kRowBytes + tile.phase : 0);
        }
      }
      if (epi_m == kTilesM - 1 && epi_n == kTilesN - 1) {
        store_pieces(epi_m, epi_n);
      }
    }

    // Lays this thread's values out in the staged rows, and in front of them the last chunk of the columns before.
    CUTLASS_DEVICE void stage(int epi_m, int epi_n) {
      auto const values = cute::coalesce(registers);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        auto* const own = reinterpret_cast<Element*>(staged + half * 8 * Stage::kPitch + tile.phase) + 2 * (threadIdx.x & 3);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int chunk = 0; chunk < kChunks; ++chunk) {
            own[8 * chunk + i] = values(4 * chunk + 2 * half + i);
          }
          if (epi_n > 0) {
            own[i - 8] = before[epi_m][half][i];
          }
          before[epi_m][half][i] = values(4 * (kChunks - 1) + 2 * half + i);
        }
      }
    }

    // Whether the matrix has all 32 columns, as in all tiles but those at the end of the rows.
    CUTLASS_DEVICE bool is_whole(int epi_n) const { return tile.columns >= kColumns * (epi_n + 1); }

    CUTLASS_DEVICE void store_pieces(int epi_m, int epi_n) const {
      if (!is_whole(epi_n)) {
        return;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        char* const to = tile.pieces(epi_m, half) + epi_n * Stage::kRowBytes;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Stage::kPiecesPerThread; ++i) {
          if (tile.exists(epi_m, half) && (epi_n > 0 || piece_of(i) >= tile.phase)) {
            *reinterpret_cast<uint4*>(to + piece_of(i)) = pieces[half][i];
          }
        }
      }
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::ConsumerStoreArgs<Args...> const& args) {
    using namespace cute;
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto const& stride = this->params_ptr->dAux;
    Tensor matrix = make_tensor(make_gmem_ptr(this->params_ptr->ptr_aux), make_shape(M, N, L), stride);
    Tensor gmem = partition<ReferenceSrc>(matrix, args);  // (CPY, CPY_M, CPY_N, EPI_M, EPI_N)
    Tensor coordinates = partition<ReferenceSrc>(make_identity_tensor(shape(matrix)), args);
    Tensor registers = make_tensor<Element>(take<0, 3>(shape(gmem)));
    using Rows = TileRows<Element, decltype(size<0>(args.epi_tile))::value>;
    return ConsumerStoreCallbacks<
        Rows, decltype(registers), decltype(size<3>(gmem))::value, decltype(size<4>(gmem))::value>(
        Rows(gmem, coordinates, get<0>(stride), static_cast<int>(M), static_cast<int>(N)), registers,
        this->shared->of_thread(args.thread_idx));
  }
};

}  // namespace ep
