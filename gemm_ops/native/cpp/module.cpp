// The functions that Python calls; gemm_ops/native/__init__.py says what they are for.  Those that compute are in calls.h,
// those that it tells what it found out by are here.
#include <Python.h>

#include <torch/csrc/Dtype.h>

#include "calls.h"

namespace gemm_ops {
namespace {

std::vector<Owned> names_of(PyObject* tuple) {
  std::vector<Owned> names;
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tuple); ++place) {
    PyObject* name = PyTuple_GET_ITEM(tuple, place);
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    names.push_back(Owned::taken(name));
  }
  return names;
}

std::vector<int64_t> integers_of(PyObject* tuple) {
  std::vector<int64_t> integers;
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tuple); ++place) {
    integers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, place)));
  }
  if (PyErr_Occurred()) throw_python_error();
  return integers;
}

at::ScalarType dtype_of(PyObject* object) {
  TORCH_CHECK_TYPE(THPDtype_Check(object), "expected a torch.dtype");
  return reinterpret_cast<THPDtype*>(object)->scalar_type;
}

// The call that Python describes by its leading tensors, its epilogue and the values of the operands in order; none where
// one of these is of a class that calls here are not looked up with, as numpy's numbers and subclasses of tensors.
std::optional<Call> call_of(PyObject* leading, PyObject* epilogue, PyObject* operands, bool padded) {
  Call call;
  call.epilogue = epilogue;
  call.padded = padded;
  for (PyObject* tuple : {leading, operands}) {
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tuple); ++place) {
      if (!read_value(PyTuple_GET_ITEM(tuple, place), call.values.emplace_back())) return std::nullopt;
    }
  }
  const auto backend = forced_backend();
  TORCH_CHECK(backend, "the backend that is asked for has no place");
  call.backend = *backend;
  return call;
}

// add_epilogue(epilogue, operand names, output names)
PyObject* add_epilogue(PyObject* /*self*/, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *epilogue, *operands, *outputs;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &epilogue, &PyTuple_Type, &operands, &PyTuple_Type, &outputs)) return nullptr;
  if (state().signatures.size() >= 4096) {
    const auto dropped = std::move(state().signatures);
    state().signatures.clear();
  }
  auto made = std::make_shared<Signature>();
  *made = {Owned::of(epilogue), names_of(operands), names_of(outputs)};
  for (const Owned& name : made->operands) made->has_bias |= name.get() == bias_name();
  state().signatures.insert_or_assign(epilogue, std::move(made));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// add_name(name or None, has_bias, epilogue)
PyObject* add_name(PyObject* /*self*/, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *name, *epilogue;
  int has_bias;
  if (!PyArg_ParseTuple(arguments, "OpO", &name, &has_bias, &epilogue)) return nullptr;
  Owned& names = state().named[has_bias];
  if (!names) names = checked(PyDict_New());
  if (PyDict_SetItem(names.get(), name, epilogue) < 0) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// add_plan(leading, epilogue, operands, padded_output, (function, takes_workspace, workspace_bytes, block,
//          input slots, output slots, dtypes, shape, pitch, like_first, is_product, bias), owner)
PyObject* add_plan(PyObject* /*self*/, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *leading, *epilogue, *operands, *block, *inputs, *outputs, *dtypes, *shape, *owner;
  int padded, takes_workspace, like_first, is_product, bias;
  unsigned long long function;
  long long workspace_bytes, pitch;
  if (!PyArg_ParseTuple(
          arguments, "O!OO!p(KpLO!O!O!O!O!Lppi)O", &PyTuple_Type, &leading, &epilogue, &PyTuple_Type, &operands, &padded,
          &function, &takes_workspace, &workspace_bytes, &PyBytes_Type, &block, &PyTuple_Type, &inputs, &PyTuple_Type,
          &outputs, &PyTuple_Type, &dtypes, &PyTuple_Type, &shape, &pitch, &like_first, &is_product, &bias,
          &owner)) {
    return nullptr;
  }
  const auto described = call_of(leading, epilogue, operands, padded);
  if (!described) Py_RETURN_FALSE;
  const Call& call = *described;
  const auto device = call.values[0].tensor.device();
  auto& keys = plain_keys(device.type());
  if (keys.empty()) keys = at::empty({0}, at::TensorOptions().device(device)).key_set();
  auto plan = std::make_shared<Plan>();
  plan->function = reinterpret_cast<void*>(function);
  plan->takes_workspace = takes_workspace;
  plan->workspace_bytes = workspace_bytes;
  plan->block.assign(PyBytes_AS_STRING(block), PyBytes_GET_SIZE(block));
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(inputs); ++place) {
    const auto slot = integers_of(PyTuple_GET_ITEM(inputs, place));
    plan->inputs.push_back({static_cast<size_t>(slot.at(0)), static_cast<size_t>(slot.at(1))});
  }
  for (const int64_t offset : integers_of(outputs)) plan->outputs.push_back(static_cast<size_t>(offset));
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(dtypes); ++place) {
    plan->dtypes.push_back(dtype_of(PyTuple_GET_ITEM(dtypes, place)));
  }
  plan->shape = integers_of(shape);
  plan->pitch = pitch;
  plan->like_first = like_first;
  plan->is_product = is_product;
  plan->bias = bias;
  plan->device = device;
  plan->owner = Owned::of(owner);
  TORCH_CHECK(function == 0 || plan->inputs.size() == call.values.size());
  TORCH_CHECK(plan->outputs.size() == plan->dtypes.size() || (is_product && plan->dtypes.size() == 1));
  TORCH_CHECK(bias < static_cast<int>(call.values.size()));
  const Kind kind = PyTuple_GET_SIZE(leading) == 2 ? Kind::kProduct : Kind::kElementwise;
  plans().insert(key_of(kind, epilogue, call.backend, padded, call.values, false), std::move(plan));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

Target target_of(PyObject* tuple) {
  PyObject *dims, *sum_dtype, *shape, *dtype;
  long long input, pass, output;
  if (!PyArg_ParseTuple(
          tuple, "LLLO!OO!O", &input, &pass, &output, &PyTuple_Type, &dims, &sum_dtype, &PyTuple_Type, &shape, &dtype)) {
    throw_python_error();
  }
  Target target;
  target.input = static_cast<size_t>(input);
  target.pass = pass;
  target.output = output;
  target.dims = integers_of(dims);
  if (sum_dtype != Py_None) target.sum_dtype = dtype_of(sum_dtype);
  target.shape = integers_of(shape);
  target.dtype = dtype_of(dtype);
  return target;
}

Pass pass_of(PyObject* tuple) {
  PyObject *epilogue, *sources;
  long long start;
  if (!PyArg_ParseTuple(tuple, "OLO!", &epilogue, &start, &PyTuple_Type, &sources)) throw_python_error();
  Pass pass;
  if (epilogue != Py_None) pass.epilogue = Owned::of(epilogue);
  pass.start = static_cast<size_t>(start);
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(sources); ++place) {
    const auto words = integers_of(PyTuple_GET_ITEM(sources, place));
    pass.sources.push_back({static_cast<Source::From>(words.at(0)), static_cast<size_t>(words.at(1))});
  }
  return pass;
}

// add_recording(leading, epilogue, operands, forward epilogue, visible, saved, steps or None, matrices or None, owner)
//   saved: (is_output, place) each.  steps: (expected, passes, targets).  matrices: (a, b, shape_a, shape_b, turned)
PyObject* add_recording(PyObject* /*self*/, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *leading, *epilogue, *operands, *forward, *saved, *steps, *matrices, *owner;
  long long visible;
  if (!PyArg_ParseTuple(
          arguments, "O!OO!OLO!OOO", &PyTuple_Type, &leading, &epilogue, &PyTuple_Type, &operands, &forward, &visible,
          &PyTuple_Type, &saved, &steps, &matrices, &owner)) {
    return nullptr;
  }
  const auto described = call_of(leading, epilogue, operands, false);
  if (!described) Py_RETURN_FALSE;
  const Call& call = *described;
  const bool product = PyTuple_GET_SIZE(leading) == 2;
  auto recording = std::make_shared<Recording>();
  const Kind plain = product ? Kind::kProduct : Kind::kElementwise;
  recording->forward = plans().find(key_of(plain, forward, call.backend, false, call.values, false));
  if (!recording->forward) Py_RETURN_FALSE;  // a call that goes another way
  recording->product = product;
  recording->visible = static_cast<size_t>(visible);
  for (size_t place = 0; place < call.values.size(); ++place) {
    if (call.values[place].is_tensor()) recording->tensors.push_back(place);
  }
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(saved); ++place) {
    const auto words = integers_of(PyTuple_GET_ITEM(saved, place));
    recording->saved.emplace_back(words.at(0) != 0, static_cast<size_t>(words.at(1)));
  }
  if (steps != Py_None) {
    recording->by_steps = true;
    PyObject *expected, *passes, *targets;
    if (!PyArg_ParseTuple(
            steps, "O!O!O!", &PyTuple_Type, &expected, &PyTuple_Type, &passes, &PyTuple_Type, &targets)) {
      return nullptr;
    }
    for (const int64_t one : integers_of(expected)) recording->expected.push_back(one != 0);
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(passes); ++place) {
      recording->passes.push_back(pass_of(PyTuple_GET_ITEM(passes, place)));
    }
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(targets); ++place) {
      recording->targets.push_back(target_of(PyTuple_GET_ITEM(targets, place)));
    }
  }
  if (matrices != Py_None) {
    PyObject *shape_a, *shape_b;
    long long a, b;
    int turned;
    if (!PyArg_ParseTuple(matrices, "LLO!O!p", &a, &b, &PyTuple_Type, &shape_a, &PyTuple_Type, &shape_b, &turned)) {
      return nullptr;
    }
    recording->matrices = {a, b, integers_of(shape_a), integers_of(shape_b), turned != 0};
  }
  recording->owner = Owned::of(owner);
  const Kind kind = product ? Kind::kRecordedProduct : Kind::kRecordedElementwise;
  const Key key = key_of(kind, epilogue, call.backend, false, call.values, false);
  recordings().insert(key, std::make_shared<const Kept>(std::move(recording)));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// add_text(text, needs, dtype of the matrices, epilogue): what the operators of graphs are told of it
PyObject* add_text(PyObject* /*self*/, PyObject* arguments) {
  HANDLE_TH_ERRORS
  const char *text, *needs;
  PyObject *dtype, *epilogue;
  if (!PyArg_ParseTuple(arguments, "ssOO", &text, &needs, &dtype, &epilogue)) return nullptr;
  Described call;
  call.epilogue = text;
  call.needs = needs;
  texts().insert(name_of_forward(call, dtype_of(dtype)), Owned::of(epilogue));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// register_operators(name of the dispatch key)
PyObject* add_operators(PyObject* /*self*/, PyObject* name) {
  HANDLE_TH_ERRORS
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) return nullptr;
  register_operators(text);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// forget_operators(name of the dispatch key)
PyObject* drop_operators(PyObject* /*self*/, PyObject* name) {
  HANDLE_TH_ERRORS
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) return nullptr;
  forget_operators(text);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// configure(context variable, all that it can hold, elementwise, product, identity, apply, matmul)
PyObject* configure(PyObject* /*self*/, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *forced, *backends, *compute_elementwise, *compute_product, *identity, *apply, *matmul;
  if (!PyArg_ParseTuple(
          arguments, "OO!OOOOO", &forced, &PyTuple_Type, &backends, &compute_elementwise, &compute_product, &identity,
          &apply, &matmul)) {
    return nullptr;
  }
  state().forced = Owned::of(forced);
  state().backends.clear();
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(backends); ++place) {
    state().backends.push_back(Owned::of(PyTuple_GET_ITEM(backends, place)));
  }
  callbacks() = {
      Owned::of(compute_elementwise), Owned::of(compute_product), Owned::of(identity), Owned::of(apply),
      Owned::of(matmul)};
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* clear(PyObject* /*self*/, PyObject* /*none*/) {
  HANDLE_TH_ERRORS
  recordings().clear();
  plans().clear();
  texts().clear();
  const auto signatures = std::move(state().signatures);
  state().signatures.clear();
  for (Owned& names : state().named) names = Owned();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// counts() -> (plans, recordings, calls computed here)
PyObject* counts(PyObject* /*self*/, PyObject* /*none*/) {
  HANDLE_TH_ERRORS
  return Py_BuildValue(
      "nnK", static_cast<Py_ssize_t>(plans().size()), static_cast<Py_ssize_t>(recordings().size()),
      static_cast<unsigned long long>(computed().load()));
  END_HANDLE_TH_ERRORS
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"product", fast(product), METH_FASTCALL, nullptr},
    {"layer", fast(layer), METH_FASTCALL, nullptr},
    {"elementwise", fast(elementwise), METH_FASTCALL, nullptr},
    {"signature", fast(signature), METH_FASTCALL, nullptr},
    {"add_epilogue", add_epilogue, METH_VARARGS, nullptr},
    {"add_name", add_name, METH_VARARGS, nullptr},
    {"add_plan", add_plan, METH_VARARGS, nullptr},
    {"add_recording", add_recording, METH_VARARGS, nullptr},
    {"add_text", add_text, METH_VARARGS, nullptr},
    {"register_operators", add_operators, METH_O, nullptr},
    {"forget_operators", drop_operators, METH_O, nullptr},
    {"configure", configure, METH_VARARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "gemm_ops_native", nullptr, -1, methods};

}  // namespace
}  // namespace gemm_ops

PyMODINIT_FUNC PyInit_gemm_ops_native() { return PyModule_Create(&gemm_ops::definition); }
