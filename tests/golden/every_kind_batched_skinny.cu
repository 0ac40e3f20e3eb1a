// skinny_16x16_8warps_2stages bf16 row/column -> bf16+f32, batched, sm_90
//
// What is computed, and of which tensors; cuda/skinny.cuh multiplies.
#include <cstdint>
#include <cuda_runtime.h>

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
#include "skinny.cuh"

namespace {

using namespace ep;

struct Kernel {
  using Element = Bf16;
  static constexpr int kTileM = 16;
  static constexpr int kTileN = 16;
  static constexpr int kWarps = 8;   // of a block, each with its part of the depth
  static constexpr int kStages = 2;  // loaded ahead
  static constexpr int kBlocks = 2;  // of a multiprocessor, at least: caps the registers of a thread
  static constexpr bool kOverlaps = true;  // see dependent_launch.cuh

  static EP_DEVICE void finish(GemmArguments const& args, float sum, int64_t m, int64_t n, int64_t batch) {
    float out0;
    float out1;
    compute(sum, skinny::read_row<Bf16>(args.operands[0], n, batch), skinny::read_column<Bf16>(args.operands[1], m, batch), skinny::read_scalar<F32>(args.operands[2]), skinny::read_matrix<Bf16>(args.operands[3], m, n, batch), out0, out1);
    skinny::write_matrix<Bf16>(args.outputs[0], m, n, batch, out0);
    skinny::write_matrix<F32>(args.outputs[1], m, n, batch, out1);
  }

  // One element.
  static EP_DEVICE void compute(float in0, float in1, float in2, float in3, float in4, float& out0, float& out1) {
    namespace fn = ep::exact;
    auto const v0 = fn::mul(in0, in1);
    auto const v1 = fn::add(v0, in2);
    auto const v2 = fn::gelu_tanh(v1);
    auto const v3 = fn::mul(v2, in3);
    auto const v4 = fn::add(v3, in4);
    auto const v5 = ep::cast_f32(v1);
    out0 = v4;
    out1 = v5;
  }
};

}  // namespace

// The functions that Python calls, as those of the other families (host.cu.j2).

extern "C" __attribute__((visibility("default"))) int64_t gemm_workspace_size(GemmArguments const*) { return 0; }

// Launches on the stream and returns at once.  Zero, or a CUDA error code times 256.
extern "C" __attribute__((visibility("default"))) int gemm_run(GemmArguments const* args, void*, void* stream) {
  return skinny::run<Kernel>(*args, static_cast<cudaStream_t>(stream));
}

extern "C" __attribute__((visibility("default"))) char const* gemm_status_text(int code) {
  return code == 0 ? "Success" : "The kernel was not launched";
}

extern "C" __attribute__((visibility("default"))) char const* gemm_cuda_error_text(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code >> 8));
}
