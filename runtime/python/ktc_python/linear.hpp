// `ktc::LinearKernel` as a Python class. A call releases the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "ktc/interface/linear.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/host_call.hpp"

namespace ktc_python::linear::inline KTC_UNIT {

namespace py = pybind11;

inline ktc::LinearArguments arguments(Address x, Address weight, Address bias, Address out, std::int64_t rows,
                                      std::int64_t inputs, std::int64_t outputs) {
  return {.x = at(x),
          .weight = at(weight),
          .bias = at(bias),
          .out = at(out),
          .rows = rows,
          .inputs = inputs,
          .outputs = outputs};
}

inline void forward(const ktc::LinearKernel& kernel, ktc::Engine& engine, Address x, Address weight, Address bias,
                    Address out, std::int64_t rows, std::int64_t inputs, std::int64_t outputs) {
  const py::gil_scoped_release release;
  kernel.forward(engine, arguments(x, weight, bias, out, rows, inputs, outputs));
}

inline std::unique_ptr<ktc::HostCall> call(const ktc::LinearKernel& kernel, ktc::Engine& engine, Address x,
                                           Address weight, Address bias, Address out, std::int64_t rows,
                                           std::int64_t inputs, std::int64_t outputs) {
  const auto given = arguments(x, weight, bias, out, rows, inputs, outputs);
  return host_call([&kernel, &engine, given] { kernel.forward(engine, given); });
}

inline void multiply(const ktc::LinearKernel& kernel, ktc::Engine& engine, Address x, Address weight, Address bias,
                     Address out, std::int64_t rows, std::int64_t inputs, std::int64_t outputs, bool transposed) {
  const py::gil_scoped_release release;
  kernel.multiply(engine, arguments(x, weight, bias, out, rows, inputs, outputs), transposed);
}

inline std::unique_ptr<ktc::HostCall> multiply_call(const ktc::LinearKernel& kernel, ktc::Engine& engine, Address x,
                                                    Address weight, Address bias, Address out, std::int64_t rows,
                                                    std::int64_t inputs, std::int64_t outputs, bool transposed) {
  const auto given = arguments(x, weight, bias, out, rows, inputs, outputs);
  return host_call([&kernel, &engine, given, transposed] { kernel.multiply(engine, given, transposed); });
}

inline void add_class(py::module_& library) {
  py::class_<ktc::LinearKernel>(library, "LinearKernel", py::module_local())
      .def("forward", &forward)
      .def("call", &call, py::keep_alive<0, 1>(), py::keep_alive<0, 2>())
      .def("multiply", &multiply)
      .def("multiply_call", &multiply_call, py::keep_alive<0, 1>(), py::keep_alive<0, 2>());
}

}  // namespace ktc_python::linear::inline KTC_UNIT
