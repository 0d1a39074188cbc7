// `ktc::LinearKernel` as a Python class. A call releases the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "ktc/linear.hpp"
#include "ktc_python/address.hpp"

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
      .def("multiply", &multiply);
}

}  // namespace ktc_python::linear
