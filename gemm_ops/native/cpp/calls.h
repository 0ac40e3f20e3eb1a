// What Python asks for: a call is read off its arguments, looked up and computed, or left to Python.
//
//   PyObject* result = compute_product(a, b, turned, epilogue, padded, operands, nullptr);
//
// Contract: everything here runs with the GIL held, and gives None where Python has to see to it.
#pragma once

#include <Python.h>

#include "operators.h"
#include "plan.h"
#include "python.h"
#include "recording.h"
#include "values.h"

namespace gemm_ops {
namespace {

// What is known of an epilogue, by its identity; used with the GIL held.
struct Signature {
  Owned epilogue;  // keeps the identity from being another's
  std::vector<Owned> operands;
  std::vector<Owned> outputs;
  bool has_bias = false;
};

struct State {
  std::unordered_map<PyObject*, std::shared_ptr<const Signature>> signatures;
  Owned named[2];  // epilogues by name, or None: without a bias, with one
  Owned forced;    // the context variable of use_backend and tuning
  std::vector<Owned> backends;
};

State& state() {
  static auto* found = new State();
  return *found;
}

PyObject* bias_name() {
  static PyObject* name = PyUnicode_InternFromString("bias");
  return name;
}

}  // namespace

// What use_backend and tuning ask for, as its place among all that they can; none for what is not known.
std::optional<uint64_t> forced_backend() {
  PyObject* value = nullptr;
  if (!state().forced || PyContextVar_Get(state().forced.get(), nullptr, &value) < 0 || value == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  Py_DECREF(value);  // the variable holds it
  for (size_t place = 0; place < state().backends.size(); ++place) {
    if (state().backends[place].get() == value) return place;
  }
  return std::nullopt;
}

namespace {

bool read_value(PyObject* object, Value& value) {
  if (THPVariable_CheckExact(object)) {
    value.tensor = THPVariable_Unpack(object);
    return true;
  }
  if (PyFloat_CheckExact(object)) {
    value.number = PyFloat_AS_DOUBLE(object);
    return true;
  }
  if (PyLong_CheckExact(object)) {  // not a bool
    int overflow = 0;
    value.number = static_cast<double>(PyLong_AsLongLongAndOverflow(object, &overflow));
    return overflow == 0;
  }
  return false;
}

// A call, as far as its arguments go.
struct Call {
  std::shared_ptr<const Signature> signature;
  PyObject* epilogue = nullptr;
  Values values;
  uint64_t backend = 0;
  bool turned = false;
  bool padded = false;
};

std::shared_ptr<const Signature> signature_of(PyObject* epilogue) {
  const auto found = epilogue == nullptr ? state().signatures.end() : state().signatures.find(epilogue);
  return found == state().signatures.end() ? nullptr : found->second;
}

// The epilogue that is meant, where it was met before; borrowed.
PyObject* epilogue_meant(PyObject* given, bool has_bias) {
  if (given != Py_None && !PyUnicode_CheckExact(given)) return given;
  PyObject* names = state().named[has_bias].get();
  return names == nullptr ? nullptr : PyDict_GetItemWithError(names, given);
}

// The operands in the epilogue's order, after what is in `call.values`.  bias: the layer's, beside the operands given.
bool read_operands(Call& call, PyObject* given, PyObject* bias) {
  Py_ssize_t used = 0;
  for (const Owned& name : call.signature->operands) {
    const bool own = bias != nullptr && name.get() == bias_name();
    PyObject* item = own ? bias : given == nullptr ? nullptr : PyDict_GetItemWithError(given, name.get());
    if (item == nullptr || !read_value(item, call.values.emplace_back())) return false;
    used += own ? 0 : 1;
  }
  const Py_ssize_t count = given == nullptr ? 0 : PyDict_GET_SIZE(given);
  if (count == used) return true;
  // bias=None is F.linear's way to say that there is none
  return count == used + 1 && !call.signature->has_bias && PyDict_GetItemWithError(given, bias_name()) == Py_None;
}

bool needs_gradients(const Values& values) { return at::GradMode::is_enabled() && needs_of(values) != 0; }

// Under autocast, the matrices in its dtype, as F.linear has them.
void cast_as_autocast(Call& call) {
  const auto type = call.values[0].tensor.device().type();
  if (!at::autocast::is_autocast_enabled(type)) return;
  const auto dtype = at::autocast::get_autocast_dtype(type);
  for (size_t place = 0; place < 2; ++place) {
    at::Tensor& matrix = call.values[place].tensor;
    const auto own = matrix.scalar_type();
    if (own == dtype || (own != at::kFloat && own != at::kHalf && own != at::kBFloat16)) continue;
    matrix = matrix.to(dtype);
  }
}

// The outputs of a call; none where Python has to see to it.
std::optional<std::vector<at::Tensor>> compute(Call& call, Kind plain, Kind recorded) {
  if (!is_ordinary_thread()) return std::nullopt;
  if (!are_plain(call.values, call.values[0].tensor.device())) return std::nullopt;
  const auto backend = forced_backend();
  if (!backend) return std::nullopt;
  if (is_product(plain)) cast_as_autocast(call);
  if (!needs_gradients(call.values)) {
    const Key key = key_of(plain, call.epilogue, *backend, call.padded, call.values, call.turned);
    const auto plan = plans().find(key);
    if (!plan) return std::nullopt;
    if (call.turned && plan->function == nullptr) call.values[1].tensor = call.values[1].tensor.t();
    return plan->run(call.values);
  }
  const Key key = key_of(recorded, call.epilogue, *backend, call.padded, call.values, call.turned);
  const auto kept = recordings().find(key);
  if (!kept) return std::nullopt;
  if (call.turned) call.values[1].tensor = call.values[1].tensor.t();  // what autograd is to see
  std::vector<at::Tensor> tensors;
  for (const size_t place : kept->recording->tensors) tensors.push_back(call.values[place].tensor);
  const at::TensorList list(tensors);
  const Recorded arguments{*kept, call.values};
  auto outputs = RecordedCall::apply(&arguments, list);
  outputs.resize(kept->recording->visible);
  return outputs;
}

// The one output, or all by name; None where Python has to see to it.
PyObject* as_results(const Call& call, const std::optional<std::vector<at::Tensor>>& outputs) {
  if (!outputs) Py_RETURN_NONE;
  ++computed();
  if (outputs->size() == 1) return THPVariable_Wrap((*outputs)[0]);
  Owned results = checked(PyDict_New());
  for (size_t place = 0; place < outputs->size(); ++place) {
    Owned wrapped = wrap((*outputs)[place]);
    if (PyDict_SetItem(results.get(), call.signature->outputs[place].get(), wrapped.get()) < 0) throw_python_error();
  }
  Py_INCREF(results.get());
  return results.get();
}

PyObject* compute_product(
    PyObject* a, PyObject* b, bool turned, PyObject* epilogue, bool padded, PyObject* operands, PyObject* bias) {
  if (!THPVariable_CheckExact(a) || !THPVariable_CheckExact(b)) Py_RETURN_NONE;
  Call call;
  call.epilogue = epilogue;
  call.signature = signature_of(epilogue);
  call.turned = turned;
  call.padded = padded;
  call.values = {{THPVariable_Unpack(a)}, {THPVariable_Unpack(b)}};
  if (call.signature == nullptr || (turned && call.values[1].tensor.dim() != 2)) Py_RETURN_NONE;
  if (!read_operands(call, operands, bias)) {
    if (PyErr_Occurred()) throw_python_error();
    Py_RETURN_NONE;
  }
  return as_results(call, compute(call, Kind::kProduct, Kind::kRecordedProduct));
}

bool is_given(PyObject* operands, PyObject* name) {
  PyObject* value = operands == nullptr ? nullptr : PyDict_GetItemWithError(operands, name);
  return value != nullptr && value != Py_None;
}

// product(a, b, turned, epilogue, padded_output, operands)
PyObject* product(PyObject* /*self*/, PyObject* const* arguments, Py_ssize_t /*count*/) {
  HANDLE_TH_ERRORS
  PyObject* operands = arguments[5];
  if (!PyDict_Check(operands)) Py_RETURN_NONE;  // torch.fx has a proxy there
  PyObject* epilogue = epilogue_meant(arguments[3], is_given(operands, bias_name()));
  return compute_product(
      arguments[0], arguments[1], arguments[2] == Py_True, epilogue, arguments[4] == Py_True, operands, nullptr);
  END_HANDLE_TH_ERRORS
}

// layer(x, attributes, operands): of a FusedLinear, by its __dict__; its weight and bias are those of its parameters,
// unless attributes stand before them
PyObject* layer(PyObject* /*self*/, PyObject* const* arguments, Py_ssize_t /*count*/) {
  HANDLE_TH_ERRORS
  PyObject *x = arguments[0], *held = arguments[1], *operands = arguments[2];
  if (!PyDict_Check(operands) || !THPVariable_CheckExact(x)) Py_RETURN_NONE;  // torch.fx has proxies there
  static PyObject* const weight_name = PyUnicode_InternFromString("weight");
  static PyObject* const parameters_name = PyUnicode_InternFromString("_parameters");
  static PyObject* const epilogues_name = PyUnicode_InternFromString("_epilogues");
  static PyObject* const padded_name = PyUnicode_InternFromString("padded_output");
  static PyObject* const adapter_name = PyUnicode_InternFromString("within_adapter");
  PyObject* parameters = PyDict_GetItemWithError(held, parameters_name);
  PyObject* epilogues = PyDict_GetItemWithError(held, epilogues_name);
  PyObject* padded = PyDict_GetItemWithError(held, padded_name);
  PyObject* adapter = PyDict_GetItemWithError(held, adapter_name);
  if (parameters == nullptr || epilogues == nullptr || padded == nullptr) Py_RETURN_NONE;
  if (adapter != nullptr && adapter != Py_False) Py_RETURN_NONE;
  if (PyDict_Contains(held, weight_name) != 0 || PyDict_Contains(held, bias_name()) != 0) Py_RETURN_NONE;
  PyObject* weight = PyDict_GetItemWithError(parameters, weight_name);
  PyObject* bias = PyDict_GetItemWithError(parameters, bias_name());
  if (weight == nullptr || bias == nullptr || is_given(operands, bias_name())) Py_RETURN_NONE;
  if (bias == Py_None) bias = nullptr;
  PyObject* epilogue = PyTuple_GET_ITEM(epilogues, bias == nullptr ? 1 : 0);
  return compute_product(x, weight, true, epilogue, padded == Py_True, operands, bias);
  END_HANDLE_TH_ERRORS
}

// elementwise(x, epilogue, operands)
PyObject* elementwise(PyObject* /*self*/, PyObject* const* arguments, Py_ssize_t /*count*/) {
  HANDLE_TH_ERRORS
  PyObject* operands = arguments[2];
  if (!THPVariable_CheckExact(arguments[0]) || !PyDict_Check(operands)) Py_RETURN_NONE;
  Call call;
  call.epilogue = epilogue_meant(arguments[1], is_given(operands, bias_name()));
  call.signature = signature_of(call.epilogue);
  call.values = {{THPVariable_Unpack(arguments[0])}};
  if (call.signature == nullptr || !read_operands(call, operands, nullptr)) {
    if (PyErr_Occurred()) throw_python_error();
    Py_RETURN_NONE;
  }
  return as_results(call, compute(call, Kind::kElementwise, Kind::kRecordedElementwise));
  END_HANDLE_TH_ERRORS
}

// signature(x, others...): bytes that tell dtypes, devices, extents, what is a number of which type or None, and autocast;
// None where something is not a plain tensor, a number or None
PyObject* signature(PyObject* /*self*/, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count == 0 || !THPVariable_CheckExact(arguments[0])) Py_RETURN_NONE;
  const auto device = THPVariable_Unpack(arguments[0]).device();
  const auto plain = plain_keys(device.type());
  if (plain.empty()) Py_RETURN_NONE;  // a kind without kernels, which autocast may not know either
  c10::SmallVector<uint64_t, 48> words;
  const bool casts = at::autocast::is_autocast_enabled(device.type());
  words.push_back(casts ? 1 + static_cast<uint64_t>(at::autocast::get_autocast_dtype(device.type())) : 0);
  for (Py_ssize_t place = 0; place < count; ++place) {
    PyObject* argument = arguments[place];
    if (THPVariable_CheckExact(argument)) {
      const at::Tensor& tensor = THPVariable_Unpack(argument);
      if (!is_plain(tensor, plain, device)) Py_RETURN_NONE;
      words.push_back(2 | static_cast<uint64_t>(tensor.scalar_type()) << 8 | static_cast<uint64_t>(tensor.dim()) << 16 |
                      static_cast<uint64_t>(device.index() + 1) << 32 | static_cast<uint64_t>(device.type()) << 48);
      for (const int64_t extent : tensor.sizes()) words.push_back(static_cast<uint64_t>(extent));
    } else if (argument == Py_None) {
      words.push_back(1);
    } else if (PyFloat_CheckExact(argument) || PyLong_CheckExact(argument)) {
      words.push_back(PyFloat_CheckExact(argument) ? 3 : 4);
    } else {
      Py_RETURN_NONE;
    }
  }
  return PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(words.data()), static_cast<Py_ssize_t>(words.size() * sizeof(uint64_t)));
  END_HANDLE_TH_ERRORS
}

}  // namespace
}  // namespace gemm_ops
