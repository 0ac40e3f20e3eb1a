// What a call is given, and the key that says which calls are alike.
//
//   Key key = key_of(Kind::kProduct, epilogue, backend, flags, values, 2);
//
// Contract: two calls with equal keys differ in the tensors' elements and in where they lie, and in numbers, and in
// nothing else that decides how they are computed.  Tensors are dense, of PyTorch's own class, and not transformed
// (no functorch, no dispatch mode, no tracing, no forward-mode differentiation): everything else is left to Python, which
// knows what to say of it.  Function modes, such as that of torch.set_default_device, see PyTorch's functions, not these.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace gemm_ops {

// A tensor, or a number.
struct Value {
  at::Tensor tensor;
  double number = 0;

  bool is_tensor() const { return tensor.defined(); }
};

using Values = c10::SmallVector<Value, 8>;

enum class Kind : uint64_t { kProduct = 1, kElementwise = 2, kRecordedProduct = 3, kRecordedElementwise = 4 };

inline bool is_product(Kind kind) { return kind == Kind::kProduct || kind == Kind::kRecordedProduct; }

// Words that decide how a call is computed; of fixed room, as making one is part of every call.
class Key {
 public:
  void add(uint64_t word) {
    if (size_ == words_.size()) {
      overflows_ = true;
      return;
    }
    words_[size_++] = word;
    hash_ = (hash_ ^ word) * 0x9E3779B97F4A7C15ULL;
    hash_ ^= hash_ >> 29;
  }

  // The transposed matrix counts where a weight (N, K) is the matrix (K, N) of a product.
  void add(const at::Tensor& tensor, bool turned = false) {
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    const auto dims = static_cast<uint64_t>(sizes.size());
    // which 16-byte accesses are aligned, and of an elementwise kernel 32 bytes of fp32
    const auto address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    add(static_cast<uint64_t>(tensor.scalar_type()) | dims << 8 | (address & 31) << 16 |
        static_cast<uint64_t>(tensor.device().index() + 1) << 32 | static_cast<uint64_t>(tensor.device().type()) << 48);
    for (uint64_t place = 0; place < dims; ++place) {
      const auto from = turned && place + 2 >= dims ? 2 * dims - 3 - place : place;
      add(static_cast<uint64_t>(sizes[from]));
      add(static_cast<uint64_t>(strides[from]));
    }
  }

  uint64_t hash() const { return hash_; }
  bool overflows() const { return overflows_; }
  const uint64_t* begin() const { return words_.data(); }
  const uint64_t* end() const { return words_.data() + size_; }
  size_t size() const { return size_; }

 private:
  std::array<uint64_t, 256> words_;
  size_t size_ = 0;
  uint64_t hash_ = 0;
  bool overflows_ = false;
};

// What of the arguments needs gradients, as a word of the key: bit i is input i.
inline uint64_t needs_of(const Values& values) {
  uint64_t needs = 0;
  for (size_t place = 0; place < values.size(); ++place) {
    if (values[place].is_tensor() && values[place].tensor.requires_grad()) needs |= uint64_t{1} << place;
  }
  return needs;
}

// epilogue: its identity.  backend: what use_backend asks for.  turned: the second input is a weight (N, K).
inline Key key_of(Kind kind, const void* epilogue, uint64_t backend, bool padded, const Values& values, bool turned) {
  Key key;
  key.add(static_cast<uint64_t>(kind) | backend << 8 | static_cast<uint64_t>(padded) << 16);
  key.add(reinterpret_cast<uint64_t>(epilogue));
  if (kind == Kind::kRecordedProduct || kind == Kind::kRecordedElementwise) key.add(needs_of(values));
  for (size_t place = 0; place < values.size(); ++place) {
    if (values[place].is_tensor()) {
      key.add(values[place].tensor, turned && place == 1);
    } else {
      key.add(~uint64_t{0});
    }
  }
  return key;
}

// Whether calls in this thread are what they seem: nothing looks on or puts something else in their place.
inline bool is_ordinary_thread() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return !included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
      !included.has(c10::DispatchKey::Functionalize) && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
      !torch::jit::tracer::isTracing() &&
      !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

// Whether a tensor is no more than dense memory of a device, not negated, conjugated or wrapped.
inline bool is_plain(const at::Tensor& tensor, c10::DispatchKeySet plain, c10::Device device) {
  // the difference of sets of keys would keep what says which device it is
  const bool adds_nothing = (tensor.key_set().raw_repr() & ~plain.raw_repr()) == 0;
  return adds_nothing && tensor.device() == device && tensor.has_storage();
}

}  // namespace gemm_ops
