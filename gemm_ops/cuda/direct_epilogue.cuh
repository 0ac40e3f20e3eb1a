// The epilogue of a tile none of whose outputs goes through TMA.
//
// CUTLASS's own epilogue meets twice in every 32 columns of a tile, all warps of it, so that shared memory can be handed
// to TMA and taken back; also where nothing is handed over.  Here the warps of a tile go their own ways, each with its
// own rows.  They meet before a tile, for the visitor may put in shared memory what all of them read (a row operand),
// and once more when it is there.
#pragma once

#include <cutlass/epilogue/collective/collective_epilogue.hpp>
#include <cutlass/epilogue/fusion/callbacks.hpp>

namespace ep {

template <class Base>
struct DirectEpilogue : Base {
  using FusionCallbacks = typename Base::FusionCallbacks;
  using TensorStorage = typename Base::TensorStorage;
  using EpilogueTile = typename Base::EpilogueTile;
  using Element = cutlass::epilogue::fusion::get_element_aux_t<FusionCallbacks>;

  FusionCallbacks callbacks;  // the base's are its own

  CUTLASS_HOST_DEVICE DirectEpilogue(typename Base::Params const& params, TensorStorage& storage)
      : Base(params, storage), callbacks(params.thread, storage.thread) {}

  template <class Problem, class TileShape, class TileCoordinate, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE auto store(
      typename Base::LoadPipeline load_pipeline, typename Base::LoadPipelineState load_state,
      typename Base::StorePipeline, typename Base::StorePipelineState store_state, Problem problem, TileShape tile_shape,
      TileCoordinate tile, cute::Tensor<Engine, Layout> accumulators, TiledMma tiled_mma, int thread, TensorStorage&,
      int = -1) {
    using namespace cute;
    auto const [M, N, K, L] = problem;
    auto const [tile_m, tile_n, tile_k, tile_l] = tile;
    // which thread has which elements of an epilogue tile; the accumulators lie so already
    TiledCopy tiled_copy = make_tiled_copy_S(
        Copy_Atom<typename Base::CopyOpR2S, Element>{},
        make_tiled_copy_C_atom(typename Base::CopyAtomC{}, tiled_mma));
    ThrCopy own = tiled_copy.get_slice(thread);
    Tensor tile_coordinates =
        local_tile(make_identity_tensor(make_shape(M, N)), take<0, 2>(tile_shape), make_coord(tile_m, tile_n));
    Tensor absolute = own.partition_S(flat_divide(tile_coordinates, EpilogueTile{}));  // (CPY, CPY_M, CPY_N, EPI_M, EPI_N)
    Tensor relative_tile = make_coord_tensor(tile_coordinates.layout());
    Tensor relative = make_coord_tensor(absolute.layout());
    Tensor unused = make_tensor<Element>(take<0, 3>(shape(absolute)));  // the values of C, which there is none of
    auto visitor = callbacks.template get_consumer_store_callbacks</*ReferenceSrc=*/true>(
        cutlass::epilogue::fusion::detail::ConsumerStoreArgs(
            problem, tile_shape, tile, tiled_mma, EpilogueTile{}, tiled_copy, relative_tile,
            make_coord(M, N) - tile_coordinates(_0{}), relative, make_coord(M, N) - absolute(_0{}), unused, thread));

    constexpr int kFragment = Base::DispatchPolicy::FragmentSize;
    Tensor values = recast<cutlass::Array<typename Engine::value_type, kFragment>>(own.retile_S(accumulators));
    constexpr int kFragments = decltype(size(unused))::value / kFragment;  // of an epilogue tile
    constexpr int kAlongM = decltype(size<3>(absolute))::value, kAlongN = decltype(size<4>(absolute))::value;
    constexpr int kPerMma = decltype(size<0>(values))::value / kFragments;  // epilogue tiles in the columns of one MMA
    static_assert(
        size<0>(EpilogueTile{}) * decltype(size<1>(values))::value == size<0>(tile_shape),
        "an epilogue tile has the rows of one MMA");

    auto const meet = [] {
      cutlass::arch::NamedBarrier::sync(size(TiledMma{}), cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
    };
    bool const loads = callbacks.is_producer_load_needed();  // matrices that TMA loads
    if (visitor.begin_sync_needed()) {
      meet();
    }
    visitor.begin();
    if (visitor.begin_sync_needed()) {
      meet();
    }
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kAlongN; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kAlongM; ++m) {
        visitor.begin_loop(m, n);
        if (loads) {
          load_pipeline.consumer_wait(load_state);
        }
        visitor.previsit(m, n, load_state.count(), loads);
        if (loads) {
          cutlass::arch::fence_view_async_shared();
          load_pipeline.consumer_release(load_state);
          ++load_state;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kFragments; ++v) {
          visitor.visit(values(n % kPerMma * kFragments + v, m, n / kPerMma), v, m, n);
        }
        visitor.postreduce(m, n, store_state.count(), true);
        visitor.end_loop(m, n);
      }
    }
    visitor.end();
    return make_tuple(load_state, store_state);
  }
};

}  // namespace ep
