// Row-major matrices at any alignment: what the visitor nodes that load and store them share.  What TMA refuses goes
// between registers and memory in aligned pieces of 16 bytes all the same.
//
// After a wgmma, the four threads of a quad hold 32 consecutive columns of a row as pairs: thread q has the columns
// 8c + 2q and 8c + 2q + 1 of the chunks c = 0 to 3, and so for a second row, 8 below.  Stored as they are, that is two
// bytes at a time, a dozen of the instructions and many times the memory transactions that the bytes need.  So a warp
// lays its 16 rows of 32 columns out in shared memory, each row as many bytes behind a multiple of 16 as it is in global
// memory: element by element, which any distance allows.  From there every thread takes 16 bytes that are an aligned
// piece of the row in both, and stores them whole.  The elements after the last whole piece are written once more in
// front of the next 32 columns.  What is left at either end of a tile's row goes element by element.  Loads go the same
// way in the opposite direction, ahead of the epilogue tile that takes them.
//
// A tile's epilogue costs what its instructions cost, so addresses are made once for a tile.  That is possible because
// 32 columns are a multiple of 16 bytes, and 8 rows too: the distance is one number for all that a thread has of a tile.
// Seen on an H200 at 4096 x 50257 x 768: laying the rows out unshifted, matrices of 8 x 8 at a time, and shifting what
// is read from there takes 4 % longer; asking the L2 cache for a tile's operand from the warp that loads does not pay
// either, for the warps that store then have to keep in step with it.
//
// Nothing outside the matrix is written.  Loads read aligned pieces that lie between its first and its last byte, and
// element by element where a piece would not.
#pragma once

#include <cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp>

namespace ep {

constexpr int kPieceBytes = 16;

// Where a thread's values lie: 16 of an epilogue tile, 2 columns x 2 rows x 4 chunks.
constexpr int kValues = 16;
constexpr int kHalves = 2;
constexpr int kChunks = 4;
constexpr int kColumns = 32;

// An element as it is moved.
template <class Element>
using Bits = cute::conditional_t<sizeof(Element) == 2, uint16_t, uint32_t>;

// A warp's rows in shared memory: the last chunk of the 32 columns before, 32 columns, and the piece that ends them.
template <class Element, class Schedule>
struct Staging {
  static constexpr int kRows = 16;
  static constexpr int kRowBytes = kColumns * sizeof(Element);
  static constexpr int kPiecesPerThread = kRowBytes / kPieceBytes / 4;
  static constexpr int kFront = kRowBytes / kChunks;
  static constexpr int kPitch = (kFront + kRowBytes + kPieceBytes) | kPieceBytes;  // spreads eight rows over the banks
  // pingpong warp groups take turns in the epilogue
  static constexpr int kWarps =
      cute::is_same_v<Schedule, cutlass::epilogue::TmaWarpSpecializedCooperative> ? 8 : 4;

  alignas(16) char bytes[kWarps * kRows * kPitch];

  // Where the first of this thread's two rows begins: the multiple of 16 bytes at or before its 32 columns.
  CUTLASS_DEVICE char* of_thread(int thread) {
    return bytes + (thread / 32 * kRows + (thread & 31) / 4) * kPitch + kFront;
  }
};

// A thread's part of a tile: two rows of each epilogue tile along M, in global memory.
template <class Element, int kEpilogueRows>
struct TileRows {
  char* first;         // the multiple of 16 bytes at or before the first row's first element
  int64_t eight_rows;  // bytes
  int phase;           // bytes from a row's multiple of 16 to its first element, the same for all rows
  int rows, columns;   // of the matrix, from the first on

  template <class GTensor, class CTensor>
  CUTLASS_DEVICE TileRows(GTensor const& gmem, CTensor const& coordinates, int64_t pitch, int extent_m, int extent_n) {
    using namespace cute;
    int const before = 2 * static_cast<int>(threadIdx.x & 3);  // the other threads' columns of the quad
    auto* const element = &gmem(0) - before;
    phase = static_cast<int>(reinterpret_cast<uintptr_t>(element) & (kPieceBytes - 1));
    first = const_cast<char*>(reinterpret_cast<char const*>(element)) - phase;
    eight_rows = 8 * pitch * static_cast<int64_t>(sizeof(Element));
    rows = extent_m - static_cast<int>(get<0>(coordinates(0)));
    columns = extent_n - (static_cast<int>(get<1>(coordinates(0))) - before);
  }

  CUTLASS_DEVICE char* pieces(int epi_m, int half) const {
    return first + (epi_m * (kEpilogueRows / 8) + half) * eight_rows;
  }
  CUTLASS_DEVICE bool exists(int epi_m, int half) const { return epi_m * kEpilogueRows + 8 * half < rows; }
};

// Of the pieces of a row's 32 columns, one or two of this thread: every fourth.
CUTLASS_DEVICE int piece_of(int i) { return kPieceBytes * (static_cast<int>(threadIdx.x & 3) + 4 * i); }

// Copies the bytes [from, to) of a row, element by element, by the four threads of a quad.
template <class Element>
CUTLASS_DEVICE void copy_elements(char* to_row, char const* from_row, int from, int to) {
  using Unit = Bits<Element>;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int byte = from + static_cast<int>(threadIdx.x & 3) * sizeof(Unit); byte < to; byte += 4 * sizeof(Unit)) {
    *reinterpret_cast<Unit*>(to_row + byte) = *reinterpret_cast<Unit const*>(from_row + byte);
  }
}

// A tensor of the problem's extents as the threads of an epilogue have it.
template <bool ReferenceSrc, class Matrix, class Args>
CUTLASS_DEVICE auto partition(Matrix const& matrix, Args const& args) {
  return cutlass::epilogue::fusion::sm90_partition_for_epilogue<ReferenceSrc>(
      matrix, args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy, args.thread_idx);
}

// What the two nodes share: no workspace, nothing for the producer warp to load.
template <class Arguments_, class SharedStorage_>
struct UnalignedNode {
  using SharedStorage = SharedStorage_;
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

template <class Element, class StrideMNL>
struct UnalignedStoreArguments {
  Element* ptr_aux = nullptr;
  StrideMNL dAux = {};
};

template <class Element, class StrideMNL>
struct UnalignedLoadArguments {
  Element const* ptr_aux = nullptr;
  Element null_default = Element(0);
  StrideMNL dAux = {};
};

}  // namespace ep
