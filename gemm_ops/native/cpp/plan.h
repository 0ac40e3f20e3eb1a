// A kernel made ready for calls that are alike, and the table of them.
//
//   if (auto plan = plans().find(key)) outputs = plan->run(values);
//
// Contract: a launch goes to PyTorch's current stream of the tensors' device, takes outputs and workspace from PyTorch's
// allocator, and does not synchronise, so that it can be captured.  A table may be read in any thread, with or without
// the GIL.
#pragma once

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "python.h"
#include "values.h"

namespace gemm_ops {

// Where an input's address and, if it may be a number, its value go in the argument block.
struct Slot {
  size_t data;
  size_t value;
};

// Values from a place on as a tuple of tensors and numbers; with the GIL held.
inline Owned wrap_values(const Values& values, size_t first) {
  Owned tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(values.size() - first)));
  for (size_t place = first; place < values.size(); ++place) {
    const Value& value = values[place];
    PyObject* item = value.is_tensor() ? THPVariable_Wrap(value.tensor) : PyFloat_FromDouble(value.number);
    if (item == nullptr) throw_python_error();
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(place - first), item);
  }
  return tuple;
}

struct Plan {
  // int (const void* block, void* workspace, void* stream), the workspace only where it takes one; null: the owner runs
  // it, as where tensors are copied first
  void* function = nullptr;
  bool takes_workspace = false;
  int64_t workspace_bytes = 0;
  std::string block;
  std::vector<Slot> inputs;
  std::vector<size_t> outputs;
  std::vector<at::ScalarType> dtypes;
  std::vector<int64_t> shape;  // of the outputs
  int64_t pitch = 0;           // elements from row to row of new outputs that are views of padded rows; 0: contiguous
  bool like_first = false;     // outputs lie as the first input does
  bool is_product = false;     // PyTorch multiplies the first input by the second, and adds
  int bias = -1;               // this input to every row, if any
  c10::Device device = c10::Device(c10::kCPU);
  Owned owner;  // its Python object: owner.run_values(tuple of inputs) -> tuple of outputs, owner.raise_failure(code)

  std::vector<at::Tensor> run(const Values& values) const {
    if (is_product) return {multiply(values)};
    if (function == nullptr) {
      WithGil gil;
      Owned inputs_given = wrap_values(values, 0);
      return unwrap_all(checked(PyObject_CallMethod(owner.get(), "run_values", "(O)", inputs_given.get())).get());
    }
    std::vector<at::Tensor> results;
    results.reserve(outputs.size());
    for (const auto dtype : dtypes) results.push_back(new_output(values, dtype));
    c10::SmallVector<char, 2560> filled(block.begin(), block.end());
    for (size_t place = 0; place < inputs.size(); ++place) {
      const Value& value = values[place];
      if (value.is_tensor()) {
        put(filled, inputs[place].data, value.tensor.const_data_ptr());
      } else {
        put(filled, inputs[place].value, static_cast<float>(value.number));
      }
    }
    for (size_t place = 0; place < outputs.size(); ++place) {
      put(filled, outputs[place], results[place].mutable_data_ptr());
    }
    if (const int code = launch(filled.data())) {
      WithGil gil;
      checked(PyObject_CallMethod(owner.get(), "raise_failure", "i", code));
      TORCH_CHECK(false, "a kernel did not start, and nobody said why: code ", code);
    }
    return results;
  }

 private:
  template <typename Container, typename T>
  static void put(Container& block, size_t offset, T value) {
    std::memcpy(block.data() + offset, &value, sizeof(value));
  }

  at::Tensor new_output(const Values& values, at::ScalarType dtype) const {
    if (like_first) return at::empty_like(values[0].tensor, at::TensorOptions().dtype(dtype));
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    if (pitch == 0) return at::empty(shape, options);
    auto wide = shape;
    wide.back() = pitch;
    return at::empty(wide, options).narrow(-1, 0, shape.back());
  }

  // As OnePass.run of two_passes.py has it, and why so.
  at::Tensor multiply(const Values& values) const {
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional<c10::Device>(device));
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::AutoDispatchBelowADInplaceOrView no_autograd;  // which is the caller's
    at::Tensor result = new_output(values, dtypes.front());
    const at::Tensor &a = values[0].tensor, &b = values[1].tensor;
    if (bias < 0) {
      at::matmul_out(result, a, b);
    } else {
      at::Tensor rows = result.view({-1, b.size(-1)});
      at::addmm_out(rows, values[bias].tensor, a.reshape({-1, a.size(-1)}), b);
    }
    return result;
  }

  int launch(const void* filled) const {
    if (device.is_cpu()) return start(filled, nullptr, nullptr);  // the tests' kernels
    const c10::DeviceGuard guard(device);
    // kept until after the launch; freed in stream order, as any temporary of PyTorch's own operators
    at::Tensor workspace;
    if (workspace_bytes > 0) {
      workspace = at::empty({workspace_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    }
    const c10::impl::VirtualGuardImpl implementation(device.type());
    void* stream = implementation.getStream(device).native_handle();
    return start(filled, workspace.defined() ? workspace.mutable_data_ptr() : nullptr, stream);
  }

  int start(const void* filled, void* workspace, void* stream) const {
    if (takes_workspace) return reinterpret_cast<int (*)(const void*, void*, void*)>(function)(filled, workspace, stream);
    return reinterpret_cast<int (*)(const void*, void*)>(function)(filled, stream);
  }
};

// What was made for a key; forgets all when it is full, as shapes may come without end.
template <typename T>
class Table {
 public:
  std::shared_ptr<const T> find(const Key& key) const {
    if (key.overflows()) return nullptr;
    const std::lock_guard<std::mutex> held(mutex_);
    const auto [first, last] = found_.equal_range(key.hash());
    for (auto entry = first; entry != last; ++entry) {
      const auto& words = entry->second.words;
      if (words.size() == key.size() && std::equal(key.begin(), key.end(), words.begin())) return entry->second.made;
    }
    return nullptr;
  }

  void insert(const Key& key, std::shared_ptr<const T> made) {
    if (key.overflows()) return;
    Entries dropped;  // outlives the lock: dropping calls into Python
    const std::lock_guard<std::mutex> held(mutex_);
    if (found_.size() >= kMost) std::swap(dropped, found_);
    const auto [first, last] = found_.equal_range(key.hash());
    for (auto entry = first; entry != last; ++entry) {
      if (std::equal(key.begin(), key.end(), entry->second.words.begin(), entry->second.words.end())) {
        std::swap(entry->second.made, made);
        return;
      }
    }
    found_.emplace(key.hash(), Entry{{key.begin(), key.end()}, std::move(made)});
  }

  void clear() {
    Entries dropped;
    const std::lock_guard<std::mutex> held(mutex_);
    std::swap(dropped, found_);
  }

  size_t size() const {
    const std::lock_guard<std::mutex> held(mutex_);
    return found_.size();
  }

 private:
  struct Entry {
    std::vector<uint64_t> words;
    std::shared_ptr<const T> made;
  };
  using Entries = std::unordered_multimap<uint64_t, Entry>;
  static constexpr size_t kMost = 4096;

  mutable std::mutex mutex_;
  Entries found_;
};

inline Table<Plan>& plans() {
  static auto* table = new Table<Plan>();  // never destroyed: at the process's end Python is gone before
  return *table;
}

}  // namespace gemm_ops
