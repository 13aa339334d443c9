// The caller's own loss: a Python function, or the address of one compiled to machine code.
#pragma once

#include <pybind11/numpy.h>

#include <atomic>
#include <cstdint>

#include "../problem/own_loss.hpp"

namespace mhfast {

namespace py = pybind11;

/// A Python function, called with the interpreter lock. Its first exception is kept, after which no
/// call is begun. Where the interpreter has no lock, threads may be in the function together, and
/// the one that is first to fail writes the error; it is read when all are done.
class PythonLoss final : public OwnLoss {
 public:
  explicit PythonLoss(py::object function) : function_(std::move(function)) {}

  bool is_slow() const override { return true; }
  bool call(const OwnLossCall& call) noexcept override;
  py::object error() const { return error_; }

 private:
  py::object function_, error_ = py::none();
  std::atomic<bool> failed_{false};
};

/// A compiled function.
class CompiledLoss final : public OwnLoss {
 public:
  /// `has_curvature`: its signature has second derivatives before the user data.
  CompiledLoss(std::uintptr_t address, std::uintptr_t user_data, bool has_curvature)
      : address_(address),
        user_data_(reinterpret_cast<void*>(user_data)),
        has_curvature_(has_curvature) {}

  bool is_slow() const override { return false; }
  bool has_curvature() const { return has_curvature_; }
  bool call(const OwnLossCall& call) noexcept override;

 private:
  const std::uintptr_t address_;
  void* const user_data_;
  const bool has_curvature_;
};

void register_own_loss(py::module_& m);

}  // namespace mhfast
