// `ktc::HostCall` as a Python class.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>

#include "ktc/interface/host_call.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"

namespace ktc_python::inline KTC_UNIT {

namespace py = pybind11;

inline void add_host_call(py::module_& library) {
  py::class_<ktc::HostCall>(library, "HostCall", py::module_local())
      .def_property_readonly_static("function",
                                    [](const py::object&) { return reinterpret_cast<Address>(&ktc::HostCall::run); })
      .def_property_readonly("address", [](ktc::HostCall& call) { return reinterpret_cast<Address>(&call); })
      .def_property_readonly("work",
                             [](ktc::HostCall& call) {
                               const ktc::HostWork work = call.work();
                               return py::make_tuple(work.nanoseconds, work.amount, work.runs, work.squares,
                                                     work.products);
                             })
      .def("rethrow", &ktc::HostCall::rethrow, py::arg("runs") = std::numeric_limits<std::int64_t>::max());
}

}  // namespace ktc_python::inline KTC_UNIT
