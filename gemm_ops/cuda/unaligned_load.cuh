// Loads a row-major matrix at any alignment; see unaligned_pieces.cuh.
#pragma once

#include "unaligned_pieces.cuh"

namespace ep {

template <class Element, class StrideMNL, class Schedule>
struct UnalignedLoad : UnalignedNode<UnalignedLoadArguments<Element, StrideMNL>, Staging<Element, Schedule>> {
  using Stage = Staging<Element, Schedule>;
  using Base = UnalignedNode<UnalignedLoadArguments<Element, StrideMNL>, Stage>;
  using Base::Base;

  template <class Rows, class RTensor, int kTilesM, int kTilesN>
  struct ConsumerStoreCallbacks : cutlass::epilogue::fusion::EmptyConsumerStoreCallbacks {
    static_assert(decltype(cute::size(cute::declval<RTensor>()))::value == kValues, "an epilogue tile has 32 columns");
    static constexpr int kTiles = kTilesM * kTilesN;
    // epilogue tiles whose loads are under way; where a tile has two along M, registers are few
    static constexpr int kAhead = kTilesM == 1 && kTilesN > 1 && sizeof(Element) == 2 ? 2 : 1;
    static constexpr int kLoads = Stage::kPiecesPerThread + 1;

    CUTLASS_DEVICE ConsumerStoreCallbacks(
        Rows const& rows, RTensor v, char const* memory_begin, char const* memory_end, char* s)
        : tile(rows), registers(v), staged(s) {
      wanted = tile.phase + min(tile.columns, kColumns * kTilesN) * static_cast<int>(sizeof(Element));
      begins_inside = tile.first >= memory_begin;
      CUTLASS_PRAGMA_UNROLL
      for (int epi_m = 0; epi_m < kTilesM; ++epi_m) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < kHalves; ++half) {
          int64_t const there = memory_end - tile.pieces(epi_m, half);
          int const whole = there < wanted + kPieceBytes ? static_cast<int>(there) & ~(kPieceBytes - 1) : wanted;
          readable[epi_m][half] = static_cast<int16_t>(tile.exists(epi_m, half) ? min(whole, wanted) : 0);
        }
      }
    }

    Rows tile;
    RTensor registers;  // (CPY, CPY_M, CPY_N)
    char* staged;
    int wanted;                          // bytes of a row, from its first piece on
    int16_t readable[kTilesM][kHalves];  // how many of them pieces within the matrix have
    bool begins_inside;                  // whether the first piece of the first row is one of those
    uint4 loaded[kAhead][kHalves][kLoads];

    // The last thread of a quad also loads the piece that ends the 32 columns.
    CUTLASS_DEVICE static int offset_of(int i) { return i < kLoads - 1 ? piece_of(i) : Stage::kRowBytes; }
    CUTLASS_DEVICE static bool has_piece(int i) { return i < kLoads - 1 || (threadIdx.x & 3) == 3; }

    // Asks for the pieces of an epilogue tile, in the order in which they are visited.
    CUTLASS_DEVICE void request(int index) {
      int const epi_m = index % kTilesM, epi_n = index / kTilesM;
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        char const* const row = tile.pieces(epi_m, half) + epi_n * Stage::kRowBytes;
        int const bytes = readable[epi_m][half] - epi_n * Stage::kRowBytes;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          int const at = offset_of(i);
          if (has_piece(i) && at < bytes && (at > 0 || epi_n > 0 || begins_inside)) {
            loaded[index % kAhead][half][i] = __ldg(reinterpret_cast<uint4 const*>(row + at));
          }
        }
      }
    }

    CUTLASS_DEVICE void begin() {
      CUTLASS_PRAGMA_UNROLL
      for (int index = 0; index < kAhead; ++index) {
        request(index);
      }
    }

    CUTLASS_DEVICE void begin_loop(int epi_m, int epi_n) {
      int const index = epi_n * kTilesM + epi_m;
      __syncwarp();  // the rows before have been read
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          if (has_piece(i)) {
            *reinterpret_cast<uint4*>(staged + half * 8 * Stage::kPitch + offset_of(i)) = loaded[index % kAhead][half][i];
          }
        }
      }
      __syncwarp();
      complete(epi_m, epi_n);
      take();
      if (index + kAhead < kTiles) {
        request(index + kAhead);
      }
    }

    // What no whole piece has: the two ends of the matrix.
    CUTLASS_DEVICE void complete(int epi_m, int epi_n) {
      int const before = epi_n * Stage::kRowBytes;
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        char* const to = staged + half * 8 * Stage::kPitch;
        char const* const row = tile.pieces(epi_m, half) + before;
        if (epi_n == 0 && !begins_inside && tile.exists(epi_m, half)) {
          copy_elements<Element>(to, row, tile.phase, min(kPieceBytes, wanted));
        }
        if (readable[epi_m][half] < wanted && tile.exists(epi_m, half)) {
          int const from = max(readable[epi_m][half] - before, epi_n == 0 ? tile.phase : 0);
          copy_elements<Element>(to, row, from, min(wanted - before, Stage::kRowBytes + kPieceBytes));
        }
      }
      __syncwarp();
    }

    // This thread's values from the staged rows.
    CUTLASS_DEVICE void take() {
      auto values = cute::coalesce(registers);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < kHalves; ++half) {
        auto const* const own =
            reinterpret_cast<Element const*>(staged + half * 8 * Stage::kPitch + tile.phase) + 2 * (threadIdx.x & 3);
        CUTLASS_PRAGMA_UNROLL
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          values(4 * chunk + 2 * half) = own[8 * chunk];
          values(4 * chunk + 2 * half + 1) = own[8 * chunk + 1];
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
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto const& stride = this->params_ptr->dAux;
    Tensor matrix = make_tensor(make_gmem_ptr(this->params_ptr->ptr_aux), make_shape(M, N, L), stride);
    Tensor gmem = partition<ReferenceSrc>(matrix, args);  // (CPY, CPY_M, CPY_N, EPI_M, EPI_N)
    Tensor coordinates = partition<ReferenceSrc>(make_identity_tensor(shape(matrix)), args);
    Tensor registers = make_tensor<Element>(take<0, 3>(shape(gmem)));
    int64_t const elements = static_cast<int64_t>(M - 1) * get<0>(stride) +
                             static_cast<int64_t>(L - 1) * static_cast<int64_t>(get<2>(stride)) + N;
    auto const* const begin = reinterpret_cast<char const*>(this->params_ptr->ptr_aux);
    using Rows = TileRows<Element, decltype(size<0>(args.epi_tile))::value>;
    return ConsumerStoreCallbacks<
        Rows, decltype(registers), decltype(size<3>(gmem))::value, decltype(size<4>(gmem))::value>(
        Rows(gmem, coordinates, get<0>(stride), static_cast<int>(M), static_cast<int>(N)), registers, begin,
        begin + elements * static_cast<int64_t>(sizeof(Element)), this->shared->of_thread(args.thread_idx));
  }
};

}  // namespace ep
