// `ktc::PackedLinearKernel` as a Python class. Calls that compute or copy weights release the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "ktc/interface/packed_linear.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/arguments.hpp"
#include "ktc_python/calls.hpp"

namespace ktc_python::inline KTC_UNIT {

template <>
struct Fields<ktc::PackedLinearArguments> {
  using Of = ktc::PackedLinearArguments;
  static constexpr Field<Of> all[] = {required<&Of::x>("x"),
                                      required<&Of::packed>("packed"),
                                      required<&Of::bias>("bias"),
                                      required<&Of::out>("out"),
                                      required<&Of::rows>("rows"),
                                      required<&Of::inputs>("inputs"),
                                      required<&Of::outputs>("outputs")};
};

inline void pack_linear(const ktc::PackedLinearKernel& kernel, Address packed, Address blocks, std::int64_t outputs,
                        std::int64_t row_bytes) {
  const py::gil_scoped_release release;
  kernel.pack(at(packed), at<std::uint8_t>(blocks), outputs, row_bytes);
}

inline void unpack_linear(const ktc::PackedLinearKernel& kernel, Address packed, Address target, std::int64_t inputs,
                          std::int64_t outputs) {
  const py::gil_scoped_release release;
  kernel.unpack(at(packed), at(target), inputs, outputs);
}

inline void add_packed_linear(py::module_& library) {
  py::class_<ktc::PackedLinearKernel> kernel(library, "PackedLinearKernel", py::module_local());
  kernel.def("packed_bytes", &ktc::PackedLinearKernel::packed_bytes)
      .def("pack", &pack_linear)
      .def("unpack", &unpack_linear);
  def_call<&ktc::PackedLinearKernel::forward>(kernel, "forward", "call");
}

}  // namespace ktc_python::inline KTC_UNIT
