// sm80_128x128x32_4stages bf16 row/column -> bf16, sm_80
#include <cuda_runtime.h>
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>

#include "functors.cuh"

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

namespace {

using ThreadblockShape = cutlass::gemm::GemmShape<128, 128, 32>;
using WarpShape = cutlass::gemm::GemmShape<64, 64, 32>;
using InstructionShape = cutlass::gemm::GemmShape<16, 8, 16>;
constexpr int kEpilogueStages = 1;
// All visitors access memory in vectors of so many elements.
constexpr int kAlignmentD = 128 / cutlass::sizeof_bits<cutlass::bfloat16_t>::value;
using OutputTileThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<
    ThreadblockShape, WarpShape, cutlass::bfloat16_t, kAlignmentD, kEpilogueStages>;

// output 0, stored as bf16
template <class T> struct Functor0;
template <> struct Functor0<float> {
  CUTLASS_DEVICE static float apply(float leaf0, float leaf1, float leaf2, float leaf3, float leaf4) {
    namespace fn = ep::fast;
    auto const v0 = fn::mul(leaf0, leaf1);
    auto const v1 = fn::add(v0, leaf2);
    auto const v2 = fn::mul(v1, leaf3);
    auto const v3 = fn::add(v2, leaf4);
    return v3;
  }
};
template <int Size> struct Functor0<cutlass::Array<float, Size>> {
  using Fragment = cutlass::Array<float, Size>;
  template <class... Ignored>
  CUTLASS_DEVICE Fragment operator()(Fragment const& leaf0, Fragment const& leaf1, Fragment const& leaf2, Fragment const& leaf3, Fragment const& leaf4, Ignored const&...) const {
    Fragment result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Size; ++i) {
      result[i] = Functor0<float>::apply(leaf0[i], leaf1[i], leaf2[i], leaf3[i], leaf4[i]);
    }
    return result;
  }
};


using Accum = cutlass::epilogue::threadblock::VisitorAccFetch;

using Operand0 = cutlass::epilogue::threadblock::VisitorRowBroadcast<
    OutputTileThreadMap, cutlass::bfloat16_t,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using Operand1 = cutlass::epilogue::threadblock::VisitorRowBroadcast<
    OutputTileThreadMap, cutlass::bfloat16_t,
    cute::Stride<cute::Int<0>, cute::Int<1>, cute::Int<0>>
>;

using Operand2 = cutlass::epilogue::threadblock::VisitorScalarBroadcast<
    float, cute::Stride<cute::Int<0>, cute::Int<0>, cute::Int<0>>, 1, cutlass::multiplies
>;

using Operand3 = cutlass::epilogue::threadblock::VisitorAuxLoad<
    OutputTileThreadMap, cutlass::half_t, cute::Stride<int64_t, cute::Int<1>, cute::Int<0>>
>;

using Value0 = cutlass::epilogue::threadblock::VisitorCompute<
    Functor0, cutlass::bfloat16_t, float,
    cutlass::FloatRoundStyle::round_to_nearest
>;

using EVTValue0 = cutlass::epilogue::threadblock::Sm80EVT<
    Value0,
    Accum,
    Operand0,
    Operand1,
    Operand2,
    Operand3>;

using D = cutlass::epilogue::threadblock::VisitorAuxStore<
    OutputTileThreadMap, cutlass::bfloat16_t, cutlass::FloatRoundStyle::round_to_nearest,
    cute::Stride<int64_t, cute::Int<1>, cute::Int<0>>
>;

using EVTD = cutlass::epilogue::threadblock::Sm80EVT<
    D,
    EVTValue0>;

using Visitor = EVTD;

using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
    cutlass::bfloat16_t, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, 8,
    cutlass::bfloat16_t, cutlass::layout::ColumnMajor, cutlass::ComplexTransform::kNone, 8,
    cutlass::bfloat16_t, cutlass::layout::RowMajor, kAlignmentD,
    float, float,
    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    ThreadblockShape, WarpShape, InstructionShape,
    Visitor,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>,
    4, cutlass::arch::OpMultiplyAdd, kEpilogueStages>::GemmKernel;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments make_arguments(GemmArguments const& args) {
  // C and D belong to the visitor
  return typename Gemm::Arguments(
      cutlass::gemm::GemmUniversalMode::kGemm,
      {static_cast<int>(args.m), static_cast<int>(args.n), static_cast<int>(args.k)},
      /* batch count */ 1,
      {{{}, {static_cast<cutlass::bfloat16_t*>(args.operands[0].data), cutlass::bfloat16_t(0), {}}, {static_cast<cutlass::bfloat16_t*>(args.operands[1].data), cutlass::bfloat16_t(0), {}}, {{float(args.operands[2].value)}, {static_cast<float*>(args.operands[2].data)}, {}}, {static_cast<cutlass::half_t*>(args.operands[3].data), cutlass::half_t(0), cute::make_stride(args.operands[3].leading_dimension, cute::Int<1>{}, cute::Int<0>{})}, {}}, {static_cast<cutlass::bfloat16_t*>(args.outputs[0].data), cute::make_stride(args.outputs[0].leading_dimension, cute::Int<1>{}, cute::Int<0>{})}},
      args.a, args.b, nullptr, nullptr,
      0, 0, 0, 0,
      args.lda, args.ldb, 0, 0);
}

cutlass::Status launch(GemmArguments const& args, void* workspace, cudaStream_t stream) {
  Gemm gemm;
  cutlass::Status const status = gemm.initialize(make_arguments(args), workspace, stream);
  return status == cutlass::Status::kSuccess ? gemm.run(stream) : status;
}

}  // namespace

// The functions that Python calls; the same in every kernel of CUTLASS's.

// Bytes of device memory that gemm_run needs for these arguments.
extern "C" __attribute__((visibility("default"))) int64_t gemm_workspace_size(GemmArguments const* args) {
  return static_cast<int64_t>(Gemm::get_workspace_size(make_arguments(*args)));
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
