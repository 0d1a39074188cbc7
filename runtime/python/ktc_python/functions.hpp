// Kernels of `ktc/interface/functions.hpp` as Python objects with a method per function.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ktc/interface/functions.hpp"
#include "ktc/interface/host_call.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/arguments.hpp"

namespace ktc_python::inline KTC_UNIT {

// A function and the names of its arguments as Python has them in a dictionary's literal.
class NamedFunction {
 public:
  explicit NamedFunction(const ktc::KernelFunction& function) : function_(function) {
    for (std::size_t at = 0; at < function.num_arguments; ++at)
      names_.push_back(PyUnicode_InternFromString(function.arguments[at]));
  }

  // Throws py::type_error for an unknown name, and where one is missing.
  std::vector<std::int64_t> values(const py::dict& named) const {
    std::vector<std::int64_t> values(names_.size());
    for (std::size_t at = 0; at < names_.size(); ++at) {
      PyObject* value = PyDict_GetItemWithError(named.ptr(), names_[at]);
      if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
      if (value == nullptr)
        throw py::type_error("a kernel's argument `" + std::string(function_.arguments[at]) + "` is missing");
      values[at] = value_of<std::int64_t>(value);
    }
    if (named.size() != names_.size()) throw py::type_error("a kernel has no argument " + unknown_name(named));
    return values;
  }

  void now(ktc::Engine& engine, const py::dict& named) const {
    const std::vector<std::int64_t> given = values(named);
    const py::gil_scoped_release release;
    function_.call(engine, given.data());
  }

  std::unique_ptr<ktc::HostCall> later(ktc::Engine& engine, const py::dict& named) const {
    return std::make_unique<ktc::HostCall>(
        [call = function_.call, &engine, given = values(named)] { call(engine, given.data()); });
  }

 private:
  std::string unknown_name(const py::dict& named) const {
    for (const auto& [name, value] : named) {
      bool known = false;
      for (PyObject* each : names_) known = known || PyUnicode_Compare(each, name.ptr()) == 0;
      if (!known) return py::repr(name);
    }
    return "";
  }

  const ktc::KernelFunction& function_;  // of the library, as long as the process
  std::vector<PyObject*> names_;
};

// Returns an object with each function by its name, and as NAME_call the `HostCall` of one that is made later.
inline py::object functions_of(const ktc::FunctionsEntry& entry) {
  py::object methods = py::module_::import("types").attr("SimpleNamespace")();
  for (std::size_t at = 0; at < entry.num_functions; ++at) {
    const ktc::KernelFunction& function = entry.functions[at];
    const auto named = std::make_shared<const NamedFunction>(function);
    methods.attr(function.name) =
        py::cpp_function([named](ktc::Engine& engine, const py::dict& arguments) { named->now(engine, arguments); });
    methods.attr((std::string(function.name) + "_call").c_str()) = py::cpp_function(
        [named](ktc::Engine& engine, const py::dict& arguments) { return named->later(engine, arguments); },
        py::keep_alive<0, 1>());
  }
  return methods;
}

}  // namespace ktc_python::inline KTC_UNIT
