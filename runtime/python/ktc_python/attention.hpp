// `ktc::AttentionKernel` as a Python class. A call releases the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "ktc/interface/attention.hpp"
#include "ktc/seen_positions.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/host_call.hpp"

namespace ktc_python::attention::inline KTC_UNIT {

namespace py = pybind11;

// Address, the strides of batch, head and position, and the width; of codes the address and the strides of their scales
// too, otherwise zeros.
using View = std::array<std::uintptr_t, 9>;

inline ktc::CacheView view_of(const View& view) {
  return {.data = at<const void>(view[0]),
          .batch = static_cast<std::int64_t>(view[1]),
          .head = static_cast<std::int64_t>(view[2]),
          .position = static_cast<std::int64_t>(view[3]),
          .width = static_cast<std::int64_t>(view[4]),
          .scales = at<const float>(view[5]),
          .scale_batch = static_cast<std::int64_t>(view[6]),
          .scale_head = static_cast<std::int64_t>(view[7]),
          .scale_position = static_cast<std::int64_t>(view[8])};
}

// Addresses of lists of positions and of their lengths, or 0; sequences that share one of the cache, and heads
// likewise.
using Chosen = std::array<std::int64_t, 4>;

// Of a cache in pages: the address of every sequence's pages, how far apart those of two sequences are, the address of
// their lengths, how many pages the table has room for, and how many the smallest memory has; otherwise zeros.
using Pages = std::array<std::int64_t, 5>;

// `sizes`: batch, key heads, query heads of each, tokens, positions.
inline ktc::AttentionArguments arguments_of(const Pages& pages, Address query, const View& keys, const View& more_keys,
                                            const View& values, Address mask, std::int64_t mask_batch,
                                            std::int64_t mask_token, Address sinks, Address out,
                                            const std::array<std::int64_t, 5>& sizes, float scale,
                                            const Chosen& chosen) {
  return {.query = at<const void>(query),
          .keys = view_of(keys),
          .more_keys = view_of(more_keys),
          .values = view_of(values),
          .mask = at<const std::uint8_t>(mask),
          .mask_batch = mask_batch,
          .mask_token = mask_token,
          .sinks = at<const float>(sinks),
          .out = at<void>(out),
          .batch = sizes[0],
          .key_heads = sizes[1],
          .group = sizes[2],
          .tokens = sizes[3],
          .positions = sizes[4],
          .scale = scale,
          .lengths = at<const std::int64_t>(static_cast<Address>(pages[2])),
          .pages = at<const std::int32_t>(static_cast<Address>(pages[0])),
          .pages_of_sequence = pages[1],
          .chosen = at<const std::int32_t>(static_cast<Address>(chosen[0])),
          .counts = at<const std::int32_t>(static_cast<Address>(chosen[1])),
          .sequences = chosen[2],
          .choosers = chosen[3]};
}

// A call of a kernel over what its mask leaves visible. `element`: bytes of a value of the cache.
struct Visible {
  const ktc::AttentionKernel& kernel;
  ktc::Engine& engine;
  std::int64_t element;
  Pages pages;
  ktc::AttentionArguments arguments;

  void operator()() const {
    ktc::require_pages(arguments, pages[3], pages[4]);
    std::vector<std::int64_t> lengths;
    kernel.forward(engine, ktc::seen_alone(arguments, element, lengths));
  }
};

template <class... Arguments>
void forward(const ktc::AttentionKernel& kernel, ktc::Engine& engine, std::int64_t element, const Pages& pages,
             Arguments... arguments) {
  const Visible visible{kernel, engine, element, pages, arguments_of(pages, arguments...)};
  const py::gil_scoped_release release;
  visible();
}

template <class... Arguments>
std::unique_ptr<ktc::HostCall> call(const ktc::AttentionKernel& kernel, ktc::Engine& engine, std::int64_t element,
                                    const Pages& pages, Arguments... arguments) {
  return host_call(Visible{kernel, engine, element, pages, arguments_of(pages, arguments...)});
}

template <class... Arguments>
void add_methods(py::module_& library, ktc::AttentionArguments (*)(const Pages&, Arguments...)) {
  py::class_<ktc::AttentionKernel>(library, "AttentionKernel", py::module_local())
      .def("forward", &forward<Arguments...>)
      .def("call", &call<Arguments...>, py::keep_alive<0, 1>(), py::keep_alive<0, 2>());
}

inline void add_class(py::module_& library) {
  add_methods(library, &arguments_of);
}

}  // namespace ktc_python::attention::inline KTC_UNIT
