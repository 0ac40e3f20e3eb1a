// Launching an SM90 kernel with little of the host's time.
//
// CUTLASS's adapter asks for the driver's function that encodes TMA descriptors by name, for every descriptor, and sets
// attributes of the kernel at every launch.  Here both are done once.
#pragma once

#include <atomic>
#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>

// The name that CUTLASS calls (CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL), so that the library need not be linked with the
// driver's and loads on machines that have none.
extern "C" __attribute__((visibility("hidden"))) CUresult CUDAAPI cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* extents,
    cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* element_strides, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static void* const found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t const error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    cudaError_t const error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  if (found == nullptr) {
    return CUDA_ERROR_NOT_FOUND;
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
      map, type, rank, address, extents, strides, box, element_strides, interleave, swizzle, promotion, fill);
}

namespace ep {

// Lets the kernel have its shared memory on a device, at its first launch there.  False: the device has less.
template <class Kernel> bool prepare(int device) {
  constexpr int kDevices = 64;
  static std::atomic<uint64_t> prepared{0};  // a bit for each
  uint64_t const bit = device < kDevices ? uint64_t{1} << device : 0;
  if ((prepared.load(std::memory_order_relaxed) & bit) != 0) {
    return true;
  }
  cudaError_t const error = cudaFuncSetAttribute(
      cutlass::device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
  if (error == cudaSuccess) {
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  return error == cudaSuccess;
}

// Launches on the current device, which is `device`; overlapped: see dependent_launch.cuh.
template <class Kernel>
cutlass::Status launch(
    typename Kernel::Arguments const& arguments, void* workspace, int device, cudaStream_t stream, bool overlapped) {
  if (!prepare<Kernel>(device)) {
    return cutlass::Status::kErrorInternal;
  }
  if (workspace != nullptr) {
    cutlass::Status const status = Kernel::initialize_workspace(arguments, workspace, stream);
    if (status != cutlass::Status::kSuccess) {
      return status;
    }
  }
  using Cluster = typename Kernel::DispatchPolicy::ClusterShape;
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, workspace);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  config.gridDim = Kernel::get_grid_shape(params);
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = attributes;
  if (cute::size(Cluster{}) > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {
        static_cast<unsigned>(cute::size<0>(Cluster{})), static_cast<unsigned>(cute::size<1>(Cluster{})), 1};
  }
  if (overlapped) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  void* parameters[] = {&params};
  void const* const kernel = reinterpret_cast<void const*>(cutlass::device_kernel<Kernel>);
  return cudaLaunchKernelExC(&config, kernel, parameters) == cudaSuccess ? cutlass::Status::kSuccess
                                                                         : cutlass::Status::kErrorInternal;
}

}  // namespace ep
