// sm90_cooperative_128x256x64_2x1 bf16 row/column -> bf16, sm_90a
// where the kernel waits for the one ahead of it, and lets the next one start
#define CUTLASS_ENABLE_GDC_FOR_SM90
// the driver's function is the one of sm90_launch.cuh
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL
#include <cuda_runtime.h>
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "functors.cuh"
#include "sm90_launch.cuh"

struct OperandArgument {
  void* data;
  int64_t leading_dimension;
  int64_t column_stride;
  int64_t batch_stride;
  float value;
  int32_t reserved;
};
static_assert(sizeof(OperandArgument) == 40);

struct OutputArgument {
  void* data;
  int64_t leading_dimension;
  int64_t column_stride;
  int64_t batch_stride;
};
static_assert(sizeof(OutputArgument) == 32);

struct LastCaptured {
  int64_t enabled;
  int64_t capture;
  void* node;
  int64_t overlapped;
};
static_assert(sizeof(LastCaptured) == 32);

struct GemmArguments {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t batch;
  void* a;
  int64_t lda;
  int64_t batch_stride_a;
  void* b;
  int64_t ldb;
  int64_t batch_stride_b;
  int32_t device;
  int32_t multiprocessors;
  int32_t swizzle;
  int32_t reserved;
  LastCaptured* last_captured;
  OperandArgument operands[16];
  OutputArgument outputs[8];
};
static_assert(sizeof(GemmArguments) == 1000);

#include "dependent_launch.cuh"

namespace {

using TileShape = cute::Shape<cute::_128, cute::_256, cute::_64>;
using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;
using KernelSchedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
using EpilogueTile = cutlass::epilogue::collective::EpilogueTileAuto;
using EpilogueDescriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<
    TileShape, EpilogueTile, void, cutlass::bfloat16_t, EpilogueSchedule>;

// output 0, stored as bf16
template <class T> struct Functor0;
template <> struct Functor0<float> {
  CUTLASS_DEVICE static float apply(float leaf0, float leaf1) {
    namespace fn = ep::fast;
    auto const v0 = ep::cast_bf16(leaf0);
    auto const v1 = fn::add(v0, leaf1);
    auto const v2 = ep::constant(0x3dcccccdu);
    auto const v3 = fn::mul(v1, v2);
    auto const v4 = ep::cast_f16(v3);
    auto const v5 = ep::constant(0xff800000u);
    auto const v6 = fn::maximum(v4, v5);
    auto const v7 = ep::constant(0x7fc00000u);
    auto const v8 = fn::minimum(v6, v7);
    auto const v9 = ep::constant(0x80000000u);
    auto const v10 = ep::constant(0x7f800000u);
    auto const v11 = fn::clamp(v8, v9, v10);
    auto const v12 = ep::constant(0x40400000u);
    auto const v13 = fn::mul(v11, v12);
    return v13;
  }
};
template <int Size> struct Functor0<cutlass::Array<float, Size>> {
  using Fragment = cutlass::Array<float, Size>;
  template <class... Ignored>
  CUTLASS_DEVICE Fragment operator()(Fragment const& leaf0, Fragment const& leaf1, Ignored const&...) const {
    Fragment result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Size; ++i) {
      result[i] = Functor0<float>::apply(leaf0[i], leaf1[i]);
    }
    return result;
  }
};


using Accum = cutlass::epilogue::fusion::Sm90AccFetch;

using Operand0 = cutlass::epilogue::fusion::Sm90RowBroadcast<
    0 /*Stages*/, typename EpilogueDescriptor::TileShape, cutlass::bfloat16_t, cutlass::bfloat16_t,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using Value0 = cutlass::epilogue::fusion::Sm90Compute<
    Functor0, cutlass::bfloat16_t, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTValue0 = cutlass::epilogue::fusion::Sm90EVT<
    Value0,
    Accum,
    Operand0>;

using ElementD = cutlass::bfloat16_t;
using StrideD = cute::Stride<int64_t, cute::Int<1>, cute::Int<0>>;
using ElementC = void;
using StrideC = StrideD;

using Visitor = EVTValue0;

// The alignment arguments of the builders choose the copy instruction (TMA) and are checked against strides and
// pointers by the caller; extents need no alignment.
using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape, EpilogueTile,
    float, float,
    ElementC, StrideC, 0,
    ElementD, StrideD, 128 / cutlass::sizeof_bits<ElementD>::value,
    EpilogueSchedule, Visitor>::CollectiveOp;

using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, 8,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, 8,
    float, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<
        static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>,
    KernelSchedule>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue, cutlass::gemm::PersistentScheduler>;

typename Kernel::Arguments make_arguments(GemmArguments const& args) {
  using Element = cutlass::bfloat16_t;
  // StrideA and StrideB have a constant 1 where the operand is contiguous
  typename Kernel::StrideA stride_a{};
  typename Kernel::StrideB stride_b{};
  cute::get<0>(stride_a) = args.lda;
  cute::get<0>(stride_b) = args.ldb;
  StrideD stride_d = cute::make_stride(args.outputs[0].leading_dimension, cute::Int<1>{}, cute::Int<0>{});

  typename Kernel::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {static_cast<int>(args.m), static_cast<int>(args.n), static_cast<int>(args.k), 1},
      {static_cast<Element const*>(args.a), stride_a, static_cast<Element const*>(args.b), stride_b},
      {{{}, {static_cast<cutlass::bfloat16_t*>(args.operands[0].data), cutlass::bfloat16_t(0), {}}, {}}, nullptr, stride_d,
       static_cast<ElementD*>(args.outputs[0].data), stride_d}};
  arguments.hw_info.device_id = args.device;
  arguments.hw_info.sm_count = args.multiprocessors;
  arguments.scheduler.max_swizzle_size = args.swizzle;
  return arguments;
}

cutlass::Status launch(GemmArguments const& args, void* workspace, cudaStream_t stream) {
  bool const overlapped = ep::follows_own_kernel(args.last_captured, stream);
  cutlass::Status const status = ep::launch<Kernel>(make_arguments(args), workspace, args.device, stream, overlapped);
  if (status == cutlass::Status::kSuccess) {
    ep::note_captured(args.last_captured, stream);
  }
  return status;
}

}  // namespace

// The functions that Python calls; the same in every kernel of CUTLASS's.

// Bytes of device memory that gemm_run needs for these arguments.
extern "C" __attribute__((visibility("default"))) int64_t gemm_workspace_size(GemmArguments const* args) {
  return static_cast<int64_t>(Kernel::get_workspace_size(make_arguments(*args)));
}

// Launches on the stream and returns at once.  Zero, or a CUTLASS status with a CUDA error code above it.
extern "C" __attribute__((visibility("default"))) int gemm_run(
    GemmArguments const* args, void* workspace, void* stream) {
  cutlass::Status const status = launch(*args, workspace, static_cast<cudaStream_t>(stream));
  if (status == cutlass::Status::kSuccess) {
    return 0;
  }
  // also clears a launch error that is not sticky, so that the next CUDA call does not report it as its own
  cudaError_t const error = cudaGetLastError();
  return static_cast<int>(status) | (static_cast<int>(error) << 8);
}

// What a return value of gemm_run says, in words.
extern "C" __attribute__((visibility("default"))) char const* gemm_status_text(int code) {
  return cutlass::cutlassGetStatusString(static_cast<cutlass::Status>(code & 0xff));
}

extern "C" __attribute__((visibility("default"))) char const* gemm_cuda_error_text(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code >> 8));
}
