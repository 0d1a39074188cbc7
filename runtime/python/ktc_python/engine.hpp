// `ktc::Engine` as a Python class.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ktc/engine.hpp"

namespace ktc_python {

namespace py = pybind11;

inline void add_engine(py::module_& library) {
  // Both calls wait until the call of another thread has ended.
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ktc::Engine>(library, "Engine", py::module_local())
      .def(py::init<int, ktc::NodeCpus>(), py::arg("threads"), py::arg("nodes") = ktc::NodeCpus{}, WithoutGil())
      .def_property_readonly("threads", &ktc::Engine::threads)
      .def_property_readonly("workspace_bytes", py::cpp_function(&ktc::Engine::workspace_bytes, WithoutGil()));
}

}  // namespace ktc_python
