// References to Python objects that may be dropped in any thread, and calls into Python from any.
#pragma once

#include <Python.h>

#include <utility>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace gemm_ops {

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// A reference that is kept; made with the GIL held.
class Owned {
 public:
  Owned() = default;
  static Owned of(PyObject* object) {
    Py_XINCREF(object);
    return Owned(object);
  }
  static Owned taken(PyObject* object) { return Owned(object); }
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    // after Python's end there is nobody to give it back to
    if (object_ != nullptr && Py_IsInitialized()) {
      WithGil gil;
      Py_DECREF(object_);
    }
  }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit Owned(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// Throws Python's current error as PyTorch's engine and bindings expect it; with the GIL held.
[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

inline Owned checked(PyObject* object) {
  if (object == nullptr) throw_python_error();
  return Owned::taken(object);
}

inline Owned wrap(const at::Tensor& tensor) {
  return tensor.defined() ? checked(THPVariable_Wrap(tensor)) : Owned::of(Py_None);
}

// A tuple of tensors, None for those undefined.
inline Owned wrap_all(c10::ArrayRef<at::Tensor> tensors) {
  Owned tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t place = 0; place < tensors.size(); ++place) {
    Owned wrapped = wrap(tensors[place]);
    Py_INCREF(wrapped.get());
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(place), wrapped.get());
  }
  return tuple;
}

// Tensors of a tuple of tensors and Nones.
inline std::vector<at::Tensor> unwrap_all(PyObject* tuple) {
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tuple); ++place) {
    PyObject* item = PyTuple_GET_ITEM(tuple, place);
    tensors.push_back(item == Py_None ? at::Tensor() : THPVariable_Unpack(item));
  }
  return tensors;
}

}  // namespace gemm_ops
