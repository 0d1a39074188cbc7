// `ktc::PackedLinearKernel` as a Python class. Calls that compute or copy weights release the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "ktc/interface/packed_linear.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/host_call.hpp"

namespace ktc_python::packed_linear::inline KTC_UNIT {

namespace py = pybind11;

inline void pack(const ktc::PackedLinearKernel& kernel, Address packed, Address blocks, std::int64_t outputs,
                 std::int64_t row_bytes) {
  const py::gil_scoped_release release;
  kernel.pack(at(packed), at<std::uint8_t>(blocks), outputs, row_bytes);
}

inline void unpack(const ktc::PackedLinearKernel& kernel, Address packed, Address target, std::int64_t inputs,
                   std::int64_t outputs) {
  const py::gil_scoped_release release;
  kernel.unpack(at(packed), at(target), inputs, outputs);
}

inline void forward(const ktc::PackedLinearKernel& kernel, ktc::Engine& engine, Address x, Address packed, Address bias,
                    Address out, std::int64_t rows, std::int64_t inputs, std::int64_t outputs) {
  const py::gil_scoped_release release;
  kernel.forward(engine, {.x = at(x),
                          .packed = at(packed),
                          .bias = at(bias),
                          .out = at(out),
                          .rows = rows,
                          .inputs = inputs,
                          .outputs = outputs});
}

inline std::unique_ptr<ktc::HostCall> call(const ktc::PackedLinearKernel& kernel, ktc::Engine& engine, Address x,
                                           Address packed, Address bias, Address out, std::int64_t rows,
                                           std::int64_t inputs, std::int64_t outputs) {
  const ktc::PackedLinearArguments arguments{.x = at(x),
                                             .packed = at(packed),
                                             .bias = at(bias),
                                             .out = at(out),
                                             .rows = rows,
                                             .inputs = inputs,
                                             .outputs = outputs};
  return host_call([&kernel, &engine, arguments] { kernel.forward(engine, arguments); });
}

inline void add_class(py::module_& library) {
  py::class_<ktc::PackedLinearKernel>(library, "PackedLinearKernel", py::module_local())
      .def("packed_bytes", &ktc::PackedLinearKernel::packed_bytes)
      .def("pack", &pack)
      .def("unpack", &unpack)
      .def("forward", &forward)
      .def("call", &call, py::keep_alive<0, 1>(), py::keep_alive<0, 2>());
}

}  // namespace ktc_python::packed_linear::inline KTC_UNIT
