// `ktc::LinearKernel` as a Python class. A call releases the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "ktc/linear.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/host_call.hpp"

namespace ktc_python::linear {

namespace py = pybind11;

inline void forward(const ktc::LinearKernel& kernel, ktc::Engine& engine, Address x, Address weight, Address bias,
                    Address out, std::int64_t rows, std::int64_t inputs, std::int64_t outputs) {
  const py::gil_scoped_release release;
  kernel.forward(engine, {.x = at(x),
                          .weight = at(weight),
                          .bias = at(bias),
                          .out = at(out),
                          .rows = rows,
                          .inputs = inputs,
                          .outputs = outputs});
}

inline std::unique_ptr<ktc::HostCall> call(const ktc::LinearKernel& kernel, ktc::Engine& engine, Address x,
                                           Address weight, Address bias, Address out, std::int64_t rows,
                                           std::int64_t inputs, std::int64_t outputs) {
  const ktc::LinearArguments arguments{.x = at(x),
                                       .weight = at(weight),
                                       .bias = at(bias),
                                       .out = at(out),
                                       .rows = rows,
                                       .inputs = inputs,
                                       .outputs = outputs};
  return host_call([&kernel, &engine, arguments] { kernel.forward(engine, arguments); });
}

inline void multiply(const ktc::LinearKernel& kernel, ktc::Engine& engine, Address x, Address weight, Address bias,
                     Address out, std::int64_t rows, std::int64_t inputs, std::int64_t outputs, bool transposed) {
  const py::gil_scoped_release release;
  kernel.multiply(engine,
                  {.x = at(x),
                   .weight = at(weight),
                   .bias = at(bias),
                   .out = at(out),
                   .rows = rows,
                   .inputs = inputs,
                   .outputs = outputs},
                  transposed);
}

inline void add_class(py::module_& library) {
  py::class_<ktc::LinearKernel>(library, "LinearKernel", py::module_local())
      .def("forward", &forward)
      .def("call", &call, py::keep_alive<0, 1>(), py::keep_alive<0, 2>())
      .def("multiply", &multiply);
}

}  // namespace ktc_python::linear
