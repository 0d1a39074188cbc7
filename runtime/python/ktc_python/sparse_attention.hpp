// `ktc::SparseAttentionKernel` as a Python class. A call releases the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>

#include "ktc/interface/attention.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/attention.hpp"

namespace ktc_python::sparse_attention::inline KTC_UNIT {

namespace py = pybind11;

// Addresses of blocks, scales, mean and signs, the capacity in blocks, the format and the width of a key.
using Index = std::array<std::uintptr_t, 7>;

inline ktc::IndexView index_of(const Index& index) {
  return {.blocks = at<std::uint8_t>(index[0]),
          .scales = at(index[1]),
          .mean = at<const float>(index[2]),
          .signs = at<const float>(index[3]),
          .capacity = static_cast<std::int64_t>(index[4]),
          .layout = {static_cast<ktc::KeyFormat>(index[5]), static_cast<std::int64_t>(index[6])}};
}

// `sizes`: batch, key heads, first position, end.
inline void encode(const ktc::SparseAttentionKernel& kernel, ktc::Engine& engine, const attention::View& keys,
                   const attention::View& more_keys, const Index& index, const std::array<std::int64_t, 4>& sizes) {
  const py::gil_scoped_release release;
  kernel.encode(engine, {.keys = attention::view_of(keys),
                         .more_keys = attention::view_of(more_keys),
                         .index = index_of(index),
                         .batch = sizes[0],
                         .key_heads = sizes[1],
                         .begin = sizes[2],
                         .end = sizes[3]});
}

// `sizes`: batch, key heads, query heads of each, tokens, positions, the most that are chosen. `budget`: k, first and
// last positions.
inline void select(const ktc::SparseAttentionKernel& kernel, ktc::Engine& engine, Address query, const Index& index,
                   Address mask, std::int64_t mask_batch, std::int64_t mask_token, Address positions, Address counts,
                   const std::array<std::int64_t, 6>& sizes, float scale, const std::array<std::int64_t, 3>& budget,
                   bool shared) {
  const py::gil_scoped_release release;
  kernel.select(engine, {.query = at<const void>(query),
                         .index = index_of(index),
                         .mask = at<const std::uint8_t>(mask),
                         .mask_batch = mask_batch,
                         .mask_token = mask_token,
                         .positions = at<std::int32_t>(positions),
                         .counts = at<std::int32_t>(counts),
                         .batch = sizes[0],
                         .key_heads = sizes[1],
                         .group = sizes[2],
                         .tokens = sizes[3],
                         .length = sizes[4],
                         .most = sizes[5],
                         .scale = scale,
                         .k = budget[0],
                         .sink = budget[1],
                         .local = budget[2],
                         .shared = shared});
}

inline void add_class(py::module_& library) {
  py::class_<ktc::SparseAttentionKernel, ktc::AttentionKernel>(library, "SparseAttentionKernel", py::module_local())
      .def("encode", &encode)
      .def("select", &select);
}

}  // namespace ktc_python::sparse_attention::inline KTC_UNIT
