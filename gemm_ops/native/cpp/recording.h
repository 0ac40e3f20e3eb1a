// Calls that autograd records: a node of PyTorch's graph whose backward needs no Python.
//
//   outputs = RecordedCall::apply(&recorded, tensors);
//
// A Recording is what gemm_ops.recording found out at the first call of its kind: what the forward stores, what of it
// is kept, and the steps of the backward with every extent and dtype known.  Whatever is not as it was then (a gradient
// that is missing, a backward that is itself differentiated, a mode that looks on) goes to Python, which can do all.
#pragma once

#include <atomic>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "plan.h"

namespace gemm_ops {

// What Python computes where there is no plan yet; set once by `configure`.
struct Callbacks {
  Owned elementwise;  // (x, epilogue, tuple of operands) -> tuple of outputs
  Owned product;      // (a, b) -> a @ b by a fused kernel
  Owned identity;     // the epilogue of a bare product
  // the operators of graphs: (leading tensors, operands, numbers, given, epilogue, needs, padded) -> tuple of outputs
  Owned apply, matmul;
};

inline Callbacks& callbacks() {
  static auto* found = new Callbacks();
  return *found;
}

// How many calls were computed here.
inline std::atomic<uint64_t>& computed() {
  static std::atomic<uint64_t> count{0};
  return count;
}

// The keys that dense tensors of a kind of device have; empty for kinds that have no kernels.
inline c10::DispatchKeySet& plain_keys(c10::DeviceType type) {
  static std::array<c10::DispatchKeySet, c10::COMPILE_TIME_MAX_DEVICE_TYPES> keys{};
  return keys[static_cast<size_t>(type)];
}

inline bool are_plain(const Values& values, c10::Device device) {
  const auto plain = plain_keys(device.type());
  for (const Value& value : values) {
    if (value.is_tensor() && !is_plain(value.tensor, plain, device)) return false;
  }
  return true;
}

struct Source {
  enum class From : int64_t { kGradient = 0, kSaved = 1, kNumber = 2 };
  From from;
  size_t place = 0;  // of the gradient, of the saved tensor, or of the input that is a number
};

// An elementwise epilogue over the gradient of an output; without one, that gradient is all that is wanted.
struct Pass {
  Owned epilogue;
  size_t start = 0;
  std::vector<Source> sources;
};

// How an input's gradient is made of an output of a pass; of nothing, zeros.
struct Target {
  size_t input = 0;
  int64_t pass = -1;
  int64_t output = -1;  // -1: the gradient that the pass begins with
  std::vector<int64_t> dims;  // to sum over
  std::optional<at::ScalarType> sum_dtype;
  std::vector<int64_t> shape;
  at::ScalarType dtype;
};

struct Matrices {
  int64_t a = -1, b = -1;  // which of the saved tensors; -1 where not kept
  std::vector<int64_t> shape_a, shape_b;
  bool turned = false;  // whether b lies as a linear layer's weight, (N, K)
};

struct Recording {
  std::shared_ptr<const Plan> forward;
  bool product = false;
  size_t visible = 1;                                // outputs that the caller sees
  std::vector<std::pair<bool, size_t>> saved;        // (whether it is an output, which)
  std::vector<size_t> tensors;                       // which inputs are tensors; the others are numbers
  bool by_steps = false;                             // whether the backward is the steps below
  std::vector<bool> expected;                        // which outputs' gradients they want
  std::vector<Pass> passes;
  std::vector<Target> targets;
  Matrices matrices;
  Owned owner;  // owner.backward(gradients, saved, numbers) -> gradients of the tensors among the inputs
};

// A recording, and a tensor that keeps it: of what nodes save, compiled autograd takes tensors and numbers.
struct Kept {
  std::shared_ptr<const Recording> recording;
  at::Tensor keeper;

  explicit Kept(std::shared_ptr<const Recording> made) : recording(std::move(made)) {
    auto* owned = new std::shared_ptr<const Recording>(recording);
    keeper = at::from_blob(owned, {0}, [](void* pointer) {
      delete static_cast<std::shared_ptr<const Recording>*>(pointer);
    }, at::TensorOptions().dtype(at::kByte));
  }
};

// The arguments of one recorded call; for as long as its forward runs.
struct Recorded {
  const Kept& kept;
  const Values& values;
};

inline std::vector<at::Tensor> run_elementwise(const Pass& pass, const Values& values) {
  if (are_plain(values, values[0].tensor.device())) {
    const Key key = key_of(Kind::kElementwise, pass.epilogue.get(), 0, false, values, false);
    if (const auto plan = plans().find(key)) return plan->run(values);
  }
  WithGil gil;
  Owned operands = wrap_values(values, 1);
  Owned x = wrap(values[0].tensor);
  Owned found = checked(PyObject_CallFunctionObjArgs(
      callbacks().elementwise.get(), x.get(), pass.epilogue.get(), operands.get(), nullptr));
  return unwrap_all(found.get());
}

// As gemm_ops.product_gradients: by cuBLAS, or by a fused kernel where cuBLAS has no more than slow ones.
inline at::Tensor times(const at::Tensor& a, const at::Tensor& b) {
  const auto leading = [](const at::Tensor& matrix) { return std::max(matrix.stride(-1), matrix.stride(-2)); };
  const bool slow = leading(a) % 8 != 0 || leading(b) % 8 != 0 || b.size(-1) % 8 != 0;
  if (!slow || a.element_size() != 2) return at::matmul(a, b);
  const Values values{{a}, {b}};
  if (are_plain(values, a.device())) {
    const Key key = key_of(Kind::kProduct, callbacks().identity.get(), 0, false, values, false);
    if (const auto plan = plans().find(key)) return plan->run(values)[0];
  }
  WithGil gil;
  Owned left = wrap(a), right = wrap(b);
  Owned found = checked(PyObject_CallFunctionObjArgs(callbacks().product.get(), left.get(), right.get(), nullptr));
  return THPVariable_Unpack(found.get());
}

inline at::Tensor summed(const at::Tensor& found, const std::vector<int64_t>& shape) {
  return found.sizes() == shape ? found : found.sum_to_size(shape);
}

inline at::Tensor gradient_of_a(at::Tensor gradient, const at::Tensor& b, const std::vector<int64_t>& shape) {
  if (shape.size() == 1) gradient = gradient.unsqueeze(-2);
  const at::Tensor found = times(gradient, b.mT());
  if (shape.size() > 1) return summed(found, shape);
  return found.flatten(0, -2).sum_to_size({1, shape[0]}).select(0, 0);
}

inline at::Tensor gradient_of_b(at::Tensor gradient, at::Tensor a, const std::vector<int64_t>& shape, bool turned) {
  if (a.dim() == 1) {
    a = a.unsqueeze(0);
    gradient = gradient.unsqueeze(-2);
  }
  if (shape.size() == 2 && a.dim() > 2) {  // all batches share it: one product
    a = a.flatten(0, -2);
    gradient = gradient.flatten(0, -2);
  }
  return summed(turned ? times(gradient.mT(), a).mT() : times(a.mT(), gradient), shape);
}

inline at::Tensor finished(const Target& target, const at::Tensor& terms) {
  at::Tensor value = terms;
  if (!target.dims.empty()) value = value.sum(target.dims, false, target.sum_dtype);
  if (value.sizes() != target.shape) value = value.reshape(target.shape);
  if (value.scalar_type() != target.dtype) value = value.to(target.dtype);
  // may be a view of what is another gradient, and autograd adds in place
  return !value.is_same(terms) && value.numel() == terms.numel() ? value.clone() : value;
}

class RecordedCall : public torch::autograd::Function<RecordedCall> {
 public:
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* context, const Recorded* call, at::TensorList /*tensors*/) {
    const Recording& recording = *call->kept.recording;
    const Values& values = call->values;
    auto outputs = recording.forward->run(values);
    torch::autograd::variable_list kept;
    kept.reserve(recording.saved.size());
    for (const auto& [is_output, place] : recording.saved) {
      kept.push_back(is_output ? outputs[place] : values[place].tensor);
    }
    context->save_for_backward(std::move(kept));
    context->set_materialize_grads(false);
    context->saved_data["recording"] = reinterpret_cast<int64_t>(&recording);
    context->saved_data["keeper"] = call->kept.keeper;
    if (recording.tensors.size() < values.size()) {  // numbers may change from call to call
      std::vector<double> numbers;
      for (const Value& value : values) numbers.push_back(value.number);
      context->saved_data["numbers"] = numbers;
    }
    return outputs;
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto& recording = *reinterpret_cast<const Recording*>(context->saved_data["recording"].toInt());
    const at::Tensor keeper = context->saved_data["keeper"].toTensor();
    std::vector<double> numbers;
    if (const auto found = context->saved_data.find("numbers"); found != context->saved_data.end()) {
      numbers = found->second.toDoubleVector();
    }
    const auto saved = context->get_saved_variables();
    torch::autograd::variable_list found;
    if (goes_by_steps(recording, gradients, saved)) {
      // the tensors have the dtypes that autocast gave them
      const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
      found = by_steps(context, recording, gradients, saved, numbers);
    } else {
      WithGil gil;
      Owned given = wrap_all(gradients), kept = wrap_all(saved);
      Owned values = checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
      for (size_t place = 0; place < numbers.size(); ++place) {
        PyTuple_SET_ITEM(values.get(), static_cast<Py_ssize_t>(place), PyFloat_FromDouble(numbers[place]));
      }
      Owned results = checked(PyObject_CallMethod(
          recording.owner.get(), "backward", "OOO", given.get(), kept.get(), values.get()));
      found = unwrap_all(results.get());
    }
    found.insert(found.begin(), at::Tensor());  // of the call
    return found;
  }

 private:
  static bool goes_by_steps(
      const Recording& recording, const torch::autograd::variable_list& gradients,
      const torch::autograd::variable_list& saved) {
    if (!recording.by_steps || at::GradMode::is_enabled() || !is_ordinary_thread()) return false;
    const auto plain = plain_keys(recording.forward->device.type());
    const auto device = recording.forward->device;
    for (size_t place = 0; place < gradients.size(); ++place) {
      if (gradients[place].defined() != recording.expected[place]) return false;
      if (gradients[place].defined() && !is_plain(gradients[place], plain, device)) return false;
    }
    for (const auto& tensor : saved) {
      if (!is_plain(tensor, plain, device)) return false;  // hooks on saved tensors may give any
    }
    return true;
  }

  static torch::autograd::variable_list by_steps(
      torch::autograd::AutogradContext* context, const Recording& recording,
      const torch::autograd::variable_list& gradients, const torch::autograd::variable_list& saved,
      const std::vector<double>& numbers) {
    std::vector<std::vector<at::Tensor>> results;
    for (const Pass& pass : recording.passes) {
      Values values{{gradients[pass.start]}};
      for (const Source& source : pass.sources) {
        switch (source.from) {
          case Source::From::kGradient: values.push_back({gradients[source.place]}); break;
          case Source::From::kSaved: values.push_back({saved[source.place]}); break;
          case Source::From::kNumber: values.push_back({{}, numbers[source.place]}); break;
        }
      }
      results.push_back(pass.epilogue ? run_elementwise(pass, values) : std::vector<at::Tensor>());
    }
    std::vector<at::Tensor> of_inputs(recording.tensors.back() + 1);
    at::Tensor product;
    for (const Target& target : recording.targets) {
      const bool is_product = recording.product && target.input == 0;
      at::Tensor value = target.pass < 0
          ? at::zeros(target.shape, at::TensorOptions().dtype(target.dtype).device(recording.forward->device))
          : finished(
                target, target.output < 0 ? gradients[recording.passes[target.pass].start]
                                          : results[target.pass][target.output]);
      (is_product ? product : of_inputs[target.input]) = std::move(value);
    }
    if (recording.product && product.defined()) {
      const Matrices& matrices = recording.matrices;
      if (matrices.b >= 0 && context->needs_input_grad(0)) {
        of_inputs[0] = gradient_of_a(product, saved[matrices.b], matrices.shape_a);
      }
      if (matrices.a >= 0 && context->needs_input_grad(1)) {
        of_inputs[1] = gradient_of_b(product, saved[matrices.a], matrices.shape_b, matrices.turned);
      }
    }
    torch::autograd::variable_list found;
    for (const size_t input : recording.tensors) found.push_back(of_inputs[input]);
    return found;
  }
};

inline Table<Kept>& recordings() {
  static auto* table = new Table<Kept>();
  return *table;
}

}  // namespace gemm_ops
