// The operators of graphs (gemm_ops.operators), where tensors lie on devices that have kernels.
//
//   register_operators("CUDA");
//
// Contract: those of Python, to the bit.  An epilogue is told by its text; one that is not known here yet, or a call that
// there is no plan of, goes to the Python implementation, which makes both known.
#pragma once

#include <string_view>

#include <torch/library.h>

#include "plan.h"
#include "recording.h"

namespace gemm_ops {

// Epilogues by their texts; may be read without the GIL.
class Texts {
 public:
  const void* find(const std::string& text) const {
    const std::lock_guard<std::mutex> held(mutex_);
    const auto found = known_.find(text);
    return found == known_.end() ? nullptr : found->second.get();
  }

  void insert(std::string text, Owned epilogue) {
    std::unordered_map<std::string, Owned> dropped;  // outlives the lock
    const std::lock_guard<std::mutex> held(mutex_);
    if (known_.size() >= 4096) std::swap(dropped, known_);
    known_.insert_or_assign(std::move(text), std::move(epilogue));
  }

  void clear() {
    std::unordered_map<std::string, Owned> dropped;
    const std::lock_guard<std::mutex> held(mutex_);
    std::swap(dropped, known_);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Owned> known_;
};

inline Texts& texts() {
  static auto* found = new Texts();
  return *found;
}

// What a graph's call is given, besides the leading tensors.
struct Described {
  at::TensorList operands;
  at::ArrayRef<double> numbers;
  std::string_view given;     // of each operand whether it is the next tensor, "t", or number, "n"
  std::string_view epilogue;  // text
  std::string_view needs;     // of what gradients will be needed; "" for inference, and of an elementwise call
  bool padded = false;
};

inline std::string name_of_forward(const Described& call, at::ScalarType dtype) {
  std::string name(call.epilogue);
  if (!call.needs.empty()) name.append("\n").append(call.needs).append("\n").append(std::to_string(int(dtype)));
  return name;
}

inline std::vector<at::Tensor> compute_described(
    Kind kind, c10::ArrayRef<at::Tensor> leading, const Described& call, const Owned& python, uint64_t backend) {
  const auto device = leading[0].device();
  Values values;
  for (const auto& tensor : leading) values.push_back({tensor});
  size_t tensors = 0, numbers = 0;
  for (const char way : call.given) {
    if (way == 't') {
      values.push_back({call.operands.at(tensors++)});
    } else {
      values.push_back({{}, call.numbers.at(numbers++)});
    }
  }
  if (are_plain(values, device)) {
    if (const void* epilogue = texts().find(name_of_forward(call, leading[0].scalar_type()))) {
      const Key key = key_of(kind, epilogue, backend, call.padded, values, false);
      if (const auto plan = plans().find(key)) {
        ++computed();
        return plan->run(values);
      }
    }
  }
  WithGil gil;
  Owned given = wrap_all(leading), of_operands = wrap_all(call.operands);
  Owned of_numbers = checked(PyTuple_New(static_cast<Py_ssize_t>(call.numbers.size())));
  for (size_t place = 0; place < call.numbers.size(); ++place) {
    PyTuple_SET_ITEM(of_numbers.get(), static_cast<Py_ssize_t>(place), PyFloat_FromDouble(call.numbers[place]));
  }
  const auto text = [](std::string_view view) {
    return checked(PyUnicode_FromStringAndSize(view.data(), static_cast<Py_ssize_t>(view.size())));
  };
  Owned ways = text(call.given), epilogue = text(call.epilogue), needs = text(call.needs);
  Owned found = checked(PyObject_CallFunctionObjArgs(
      python.get(), given.get(), of_operands.get(), of_numbers.get(), ways.get(), epilogue.get(), needs.get(),
      call.padded ? Py_True : Py_False, nullptr));
  return unwrap_all(found.get());
}

std::optional<uint64_t> forced_backend();

inline uint64_t backend_of_graph() {
  WithGil gil;
  return forced_backend().value_or(~uint64_t{0} >> 8);  // one that no plan has
}

inline std::vector<at::Tensor> apply_operator(
    const at::Tensor& x, at::TensorList operands, at::ArrayRef<double> numbers, std::string_view given,
    std::string_view epilogue) {
  const Described call{operands, numbers, given, epilogue, "", false};
  return compute_described(Kind::kElementwise, x, call, callbacks().apply, backend_of_graph());
}

inline std::vector<at::Tensor> matmul_operator(
    const at::Tensor& a, const at::Tensor& b, at::TensorList operands, at::ArrayRef<double> numbers,
    std::string_view given, std::string_view epilogue, std::string_view needs, bool padded) {
  const Described call{operands, numbers, given, epilogue, needs, padded};
  return compute_described(Kind::kProduct, {a, b}, call, callbacks().matmul, backend_of_graph());
}

inline std::vector<at::Tensor> matmul_inference_operator(
    const at::Tensor& a, const at::Tensor& b, at::TensorList operands, at::ArrayRef<double> numbers,
    std::string_view given, std::string_view epilogue, bool padded) {
  return matmul_operator(a, b, operands, numbers, given, epilogue, "", padded);
}

inline std::unordered_map<std::string, torch::Library>& operator_libraries() {
  static auto* found = new std::unordered_map<std::string, torch::Library>();
  return *found;
}

// Takes the operators' work over on devices of a kind, until `forget_operators`.
inline void register_operators(const std::string& key) {
  if (operator_libraries().count(key) != 0) return;
  torch::Library library(torch::Library::IMPL, "gemm_ops", c10::parseDispatchKey(key), __FILE__, __LINE__);
  library.impl("apply", TORCH_FN(apply_operator));
  library.impl("matmul", TORCH_FN(matmul_operator));
  library.impl("matmul_inference", TORCH_FN(matmul_inference_operator));
  operator_libraries().emplace(key, std::move(library));
}

inline void forget_operators(const std::string& key) { operator_libraries().erase(key); }

}  // namespace gemm_ops
