// `ktc::Int8AttentionKernel` as a Python class. A call releases the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>

#include "ktc/interface/attention.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/attention.hpp"
#include "ktc_python/host_call.hpp"

namespace ktc_python::int8_attention::inline KTC_UNIT {

namespace py = pybind11;

// `strides`: those of batch, head and token of the rows. `sizes`: batch, heads, tokens.
inline ktc::QuantiseArguments arguments_of(Address rows, const std::array<std::int64_t, 3>& strides,
                                           const attention::View& codes, const std::array<std::int64_t, 3>& sizes) {
  return {.rows = at<const void>(rows),
          .batch_stride = strides[0],
          .head_stride = strides[1],
          .token_stride = strides[2],
          .codes = attention::view_of(codes),
          .batch = sizes[0],
          .heads = sizes[1],
          .tokens = sizes[2]};
}

inline void quantise(const ktc::Int8AttentionKernel& kernel, Address rows, const std::array<std::int64_t, 3>& strides,
                     const attention::View& codes, const std::array<std::int64_t, 3>& sizes) {
  const py::gil_scoped_release release;
  kernel.quantise(arguments_of(rows, strides, codes, sizes));
}

inline void add_class(py::module_& library) {
  py::class_<ktc::Int8AttentionKernel, ktc::AttentionKernel>(library, "Int8AttentionKernel", py::module_local())
      .def("quantise", &quantise);
}

}  // namespace ktc_python::int8_attention::inline KTC_UNIT
