// A product of few rows: every weight goes once from memory to registers, and from there into mma.sync.
//
// Such a product takes as long as reading B, the weight, so all that matters is how much of it is under way at a time.
// A block computes kTileN columns of kTileM rows of the output; its warps share the depth between them, 64 elements
// each in turn, with kStages of them loaded ahead, and add up their sums in shared memory.  Neither operand goes
// through shared memory: mma.sync does not mind in which order the depth is taken as long as both operands have the
// same, so a thread loads 16 bytes of a row at a time, which serve two instructions as they are:
//
//   element of the depth        0 1 2 3 4 5 6 7 | 8 ...         of a row, 16 bytes per thread
//   thread of four              0 0 0 0 0 0 0 0 | 1 ...
//   instruction, register       0,0 0,1 1,0 1,1                 two elements each
//
// The weight's rows (the output's columns) are the 16 rows of mma.sync, x's rows its 8 columns.  Rows of A and B start
// at multiples of 16 bytes; what lies beyond their K elements is neither read nor used.  Nothing outside of the outputs
// is written.
//
// A generated `Kernel` (templates/skinny.cu.j2) has the constants, and computes and stores the outputs of one sum.
// GemmArguments (runtime/abi.py) is declared before this file is included.
#pragma once

#include <cstdint>

#include "element_types.cuh"
#include "functors.cuh"

namespace ep {
namespace skinny {

constexpr int kDepth = 64;      // elements of K that a warp takes at a time
constexpr int kVector = 8;      // elements of one access
constexpr int kLanes = 4;       // threads that share a row
constexpr int kPadding = 4;     // words between rows of sums, for stores without bank conflicts
constexpr unsigned kMostBatches = 65535;  // of a grid

// Of the weight, what is brought into the L2 cache while the kernel ahead ends.  Measured on an H200 at 1x4096x4096,
// over torch.mm in graphs of one call after another: 0.90 without, 0.86 with 4 MB, 0.83 with 8, 0.81 with 16, 0.88 with
// all of its 33, which leave the cache again before they are used.
constexpr int64_t kPrefetchedBytes = 16000000;
constexpr uint32_t kLine = 128;

struct alignas(16) Vector {
  uint32_t words[4];
};

// Weights are read once: they are kept out of the L1 cache, which x needs.  Neither goes by the read-only path (.nc): in
// a launch that overlaps with the one ahead, what is read may be written while this kernel is there already.
EP_DEVICE Vector read_once(void const* from) {
  Vector v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
      : "l"(from));
  return v;
}

EP_DEVICE Vector read_often(void const* from) {
  Vector v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
      : "l"(from));
  return v;
}

// What there is of a row of `depth` elements from an element on, zeros for the rest.
EP_DEVICE Vector read_part(uint16_t const* row, int at, int depth) {
  if (at + kVector <= depth) {
    return read_often(row + at);
  }
  uint64_t low = 0, high = 0;
#pragma unroll 1  // is seldom run: unrolled, its loads would take registers from those that always are
  for (int i = 0; i < kVector && at + i < depth; ++i) {
    uint64_t const bits = static_cast<uint64_t>(row[at + i]) << (i % 4 * 16);
    (i < 4 ? low : high) |= bits;
  }
  return {
      {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
       static_cast<uint32_t>(high >> 32)}};
}

// sums (16 x 8) += rows (16 x 16) . columns (16 x 8)
template <class Element>
EP_DEVICE void multiply(
    float (&sums)[4], uint32_t row0, uint32_t row8, uint32_t row0_next, uint32_t row8_next, uint32_t column,
    uint32_t column_next);

template <>
EP_DEVICE void multiply<Bf16>(
    float (&sums)[4], uint32_t row0, uint32_t row8, uint32_t row0_next, uint32_t row8_next, uint32_t column,
    uint32_t column_next) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(row0), "r"(row8), "r"(row0_next), "r"(row8_next), "r"(column), "r"(column_next));
}

template <>
EP_DEVICE void multiply<F16>(
    float (&sums)[4], uint32_t row0, uint32_t row8, uint32_t row0_next, uint32_t row8_next, uint32_t column,
    uint32_t column_next) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(row0), "r"(row8), "r"(row0_next), "r"(row8_next), "r"(column), "r"(column_next));
}

// What a thread has of kDepth elements of both operands.
template <class Kernel> struct Loaded {
  static constexpr int kRows = Kernel::kTileN / 8;     // rows of the weight: two for each mma.sync
  static constexpr int kColumns = Kernel::kTileM / 8;  // rows of x
  static constexpr int kVectors = kDepth / kVector / kLanes;

  Vector weight[kRows][kVectors];
  Vector x[kColumns][kVectors];

  // `k` is the thread's first element.  Rows beyond the weight are read from its last one, as their sums are not used.
  // kWhole: whether all kDepth elements are there.
  template <bool kWhole>
  EP_DEVICE void load(
      uint16_t const* const (&weight_rows)[kRows], uint16_t const* const (&x_rows)[kColumns], int k, int depth) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      int const at = k + v * kVector * kLanes;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        weight[i][v] = kWhole ? read_once(weight_rows[i] + at) : read_part(weight_rows[i], at, depth);
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        x[i][v] = Vector{};
        if (x_rows[i] != nullptr) {
          x[i][v] = kWhole ? read_often(x_rows[i] + at) : read_part(x_rows[i], at, depth);
        }
      }
    }
  }

  EP_DEVICE void accumulate(float (&sums)[kRows / 2][kColumns][4]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
#pragma unroll
        for (int i = 0; i < kRows; i += 2) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            multiply<typename Kernel::Element>(
                sums[i / 2][j], weight[i][v].words[half], weight[i + 1][v].words[half], weight[i][v].words[half + 1],
                weight[i + 1][v].words[half + 1], x[j][v].words[half], x[j][v].words[half + 1]);
          }
        }
      }
    }
  }
};

template <class Kernel>
EP_DEVICE void compute_tile(GemmArguments const& args, int64_t batch, float* shared) {
  using Loads = Loaded<Kernel>;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int const group = lane / kLanes, member = lane % kLanes;
  int64_t const first_n = int64_t{blockIdx.x} * Kernel::kTileN, first_m = int64_t{blockIdx.y} * Kernel::kTileM;

  uint16_t const* const weight = static_cast<uint16_t const*>(args.b) + batch * args.batch_stride_b;
  uint16_t const* weight_rows[Loads::kRows];
#pragma unroll
  for (int i = 0; i < Loads::kRows; ++i) {
    int64_t const n = first_n + i * 8 + group;
    weight_rows[i] = weight + (n < args.n ? n : args.n - 1) * args.ldb;
  }
  uint16_t const* const x = static_cast<uint16_t const*>(args.a) + batch * args.batch_stride_a;
  uint16_t const* x_rows[Loads::kColumns];
#pragma unroll
  for (int i = 0; i < Loads::kColumns; ++i) {
    int64_t const m = first_m + i * 8 + group;
    x_rows[i] = m < args.m ? x + m * args.lda : nullptr;
  }

  float sums[Loads::kRows / 2][Loads::kColumns][4] = {};
  Loads loads[Kernel::kStages];
  int const depth = static_cast<int>(args.k), steps = depth / kDepth, k = member * kVector;
  // The last elements, fewer than kDepth, are for the warp whose turn it would be.  First, while registers are free.
  if (steps * kDepth < depth && steps % Kernel::kWarps == warp) {
    loads[0].template load<false>(weight_rows, x_rows, k + steps * kDepth, depth);
    loads[0].accumulate(sums);
  }
#pragma unroll
  for (int stage = 0; stage < Kernel::kStages; ++stage) {
    int const step = warp + stage * Kernel::kWarps;
    if (step < steps) {
      loads[stage].template load<true>(weight_rows, x_rows, k + step * kDepth, depth);
    }
  }
  for (int first = warp; first < steps; first += Kernel::kWarps * Kernel::kStages) {
#pragma unroll
    for (int stage = 0; stage < Kernel::kStages; ++stage) {
      int const step = first + stage * Kernel::kWarps, next = step + Kernel::kWarps * Kernel::kStages;
      if (step < steps) {
        loads[stage].accumulate(sums);
      }
      if (next < steps) {
        loads[stage].template load<true>(weight_rows, x_rows, k + next * kDepth, depth);
      }
    }
  }
  // sums of a warp: a row of kTileN for each row of x
  constexpr int kPitch = Kernel::kTileN + kPadding;
  float* const own = shared + warp * Kernel::kTileM * kPitch;
#pragma unroll
  for (int i = 0; i < Loads::kRows / 2; ++i) {
#pragma unroll
    for (int j = 0; j < Loads::kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const n = i * 16 + group + e / 2 * 8, m = j * 8 + member * 2 + e % 2;
        own[m * kPitch + n] = sums[i][j][e];
      }
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < Kernel::kTileM * Kernel::kTileN; e += Kernel::kWarps * 32) {
    int const n = e % Kernel::kTileN, m = e / Kernel::kTileN;
    if (first_n + n < args.n && first_m + m < args.m) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < Kernel::kWarps; ++w) {
        sum += shared[(w * Kernel::kTileM + m) * kPitch + n];
      }
      Kernel::finish(args, sum, first_m + m, first_n + n, batch);
    }
  }
}

// Brings the first of the block's rows of the weight into the L2 cache, which cannot be stale, whoever writes them.
template <class Kernel> EP_DEVICE void prefetch_weight(GemmArguments const& args) {
  int64_t const n = int64_t{blockIdx.x} * Kernel::kTileN + threadIdx.x;
  if (threadIdx.x < Kernel::kTileN && n < args.n) {
    int64_t const row = args.k * int64_t{sizeof(uint16_t)}, share = kPrefetchedBytes / args.n;
    uint32_t const bytes = static_cast<uint32_t>(share < row ? share : row) / kLine * kLine;
    if (bytes > 0) {
      uint16_t const* const from =
          static_cast<uint16_t const*>(args.b) + blockIdx.z * args.batch_stride_b + n * args.ldb;
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
    }
  }
}

template <class Kernel>
__global__ void __launch_bounds__(32 * Kernel::kWarps, Kernel::kBlocks)
    skinny(GemmArguments const args, bool const overlapped) {
#if __CUDA_ARCH__ >= 900
  if (overlapped) {
    prefetch_weight<Kernel>(args);
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  __shared__ float shared[Kernel::kWarps * Kernel::kTileM * (Kernel::kTileN + kPadding)];
  for (int64_t batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    if (batch != blockIdx.z) {
      __syncthreads();  // the sums of the problem before have been read
    }
    compute_tile<Kernel>(args, batch, shared);
  }
}

// An operand's entry for an element, and an output's element.
template <class Dtype> EP_DEVICE float read(void const* data, int64_t at) {
  return Dtype::widen(static_cast<typename Dtype::Bits const*>(data)[at]);
}
template <class Dtype> EP_DEVICE float read_row(OperandArgument const& operand, int64_t n, int64_t batch) {
  return read<Dtype>(operand.data, n + batch * operand.batch_stride);
}
template <class Dtype> EP_DEVICE float read_column(OperandArgument const& operand, int64_t m, int64_t batch) {
  return read<Dtype>(operand.data, m + batch * operand.batch_stride);
}
template <class Dtype> EP_DEVICE float read_scalar(OperandArgument const& operand) {
  return operand.data == nullptr ? operand.value : read<Dtype>(operand.data, 0);
}
template <class Dtype> EP_DEVICE float read_matrix(OperandArgument const& operand, int64_t m, int64_t n, int64_t batch) {
  return read<Dtype>(
      operand.data, m * operand.leading_dimension + n * operand.column_stride + batch * operand.batch_stride);
}
template <class Dtype>
EP_DEVICE void write_matrix(OutputArgument const& output, int64_t m, int64_t n, int64_t batch, float value) {
  int64_t const at = m * output.leading_dimension + n * output.column_stride + batch * output.batch_stride;
  static_cast<typename Dtype::Bits*>(output.data)[at] = Dtype::narrow(value);
}

template <class Kernel> int run(GemmArguments const& args, cudaStream_t stream) {
  dim3 const grid(
      static_cast<unsigned>((args.n + Kernel::kTileN - 1) / Kernel::kTileN),
      static_cast<unsigned>((args.m + Kernel::kTileM - 1) / Kernel::kTileM),
      static_cast<unsigned>(args.batch < kMostBatches ? args.batch : kMostBatches));
  bool const overlapped = Kernel::kOverlaps && follows_own_kernel(args.last_captured, stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(32 * Kernel::kWarps);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlapped ? 1 : 0;
  cudaError_t const error = cudaLaunchKernelEx(&config, skinny<Kernel>, args, overlapped);
  if (error != cudaSuccess) {
    cudaGetLastError();  // so that the next CUDA call does not report it as its own
  } else if (Kernel::kOverlaps) {
    note_captured(args.last_captured, stream);
  }
  return static_cast<int>(error) << 8;
}

}  // namespace skinny
}  // namespace ep
