// `ktc::Engine` as a Python class.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>

#include "ktc/interface/engine.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"

namespace ktc_python::inline KTC_UNIT {

namespace py = pybind11;

// Addresses of the runtime's functions, in the order of `ktc::OpenMp`; all 0 without a runtime.
using Functions = std::array<Address, 4>;

inline ktc::OpenMp openmp(const Functions& functions) {
  const auto count = [](Address address) { return reinterpret_cast<int (*)()>(address); };
  ktc::OpenMp runtime;
  runtime.parallel = reinterpret_cast<decltype(runtime.parallel)>(functions[0]);
  runtime.thread_num = count(functions[1]);
  runtime.num_threads = count(functions[2]);
  runtime.max_threads = count(functions[3]);
  return runtime;
}

inline void add_engine(py::module_& library) {
  // Both calls wait until the call of another thread has ended.
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ktc::Engine>(library, "Engine", py::module_local())
      .def(py::init([](int threads, const ktc::NodeCpus& nodes, const Functions& functions) {
             return std::make_unique<ktc::Engine>(threads, nodes, openmp(functions));
           }),
           py::arg("threads"), py::arg("nodes") = ktc::NodeCpus{}, py::arg("openmp") = Functions{}, WithoutGil())
      .def_property_readonly("threads", &ktc::Engine::threads)
      .def_property_readonly("workspace_bytes", py::cpp_function(&ktc::Engine::workspace_bytes, WithoutGil()));
}

}  // namespace ktc_python::inline KTC_UNIT
