// `ktc::LinearKernel` as a Python class.
#pragma once

#include <pybind11/pybind11.h>

#include "ktc/interface/linear.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/arguments.hpp"
#include "ktc_python/calls.hpp"

namespace ktc_python::inline KTC_UNIT {

template <>
struct Fields<ktc::LinearArguments> {
  using Of = ktc::LinearArguments;
  static constexpr Field<Of> all[] = {required<&Of::x>("x"),
                                      required<&Of::weight>("weight"),
                                      required<&Of::bias>("bias"),
                                      required<&Of::out>("out"),
                                      required<&Of::rows>("rows"),
                                      required<&Of::inputs>("inputs"),
                                      required<&Of::outputs>("outputs"),
                                      optional<&Of::transposed>("transposed")};
};

inline void add_linear(py::module_& library) {
  py::class_<ktc::LinearKernel> kernel(library, "LinearKernel", py::module_local());
  def_call<&ktc::LinearKernel::forward>(kernel, "forward", "call");
  def_call<&ktc::LinearKernel::multiply>(kernel, "multiply", "multiply_call");
}

}  // namespace ktc_python::inline KTC_UNIT
