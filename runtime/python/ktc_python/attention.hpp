// The kernels of attention as Python classes. A call releases the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "ktc/interface/attention.hpp"
#include "ktc/seen_positions.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/arguments.hpp"
#include "ktc_python/calls.hpp"

namespace ktc_python::inline KTC_UNIT {

template <>
struct Fields<ktc::CacheView> {
  using Of = ktc::CacheView;
  static constexpr Field<Of> all[] = {required<&Of::data>("data"),
                                      required<&Of::batch>("batch"),
                                      required<&Of::head>("head"),
                                      required<&Of::position>("position"),
                                      required<&Of::width>("width"),
                                      optional<&Of::scales>("scales"),
                                      optional<&Of::scale_batch>("scale_batch"),
                                      optional<&Of::scale_head>("scale_head"),
                                      optional<&Of::scale_position>("scale_position")};
};

template <>
struct Fields<ktc::AttentionArguments> {
  using Of = ktc::AttentionArguments;
  static constexpr Field<Of> all[] = {required<&Of::query>("query"),
                                      required<&Of::keys>("keys"),
                                      required<&Of::values>("values"),
                                      required<&Of::out>("out"),
                                      required<&Of::batch>("batch"),
                                      required<&Of::key_heads>("key_heads"),
                                      required<&Of::group>("group"),
                                      required<&Of::tokens>("tokens"),
                                      required<&Of::positions>("positions"),
                                      required<&Of::scale>("scale"),
                                      required<&Of::element_bytes>("element_bytes"),
                                      optional<&Of::rope_keys>("rope_keys"),
                                      optional<&Of::mask>("mask"),
                                      optional<&Of::mask_batch>("mask_batch"),
                                      optional<&Of::mask_token>("mask_token"),
                                      optional<&Of::sinks>("sinks"),
                                      optional<&Of::lengths>("lengths"),
                                      optional<&Of::pages>("pages"),
                                      optional<&Of::pages_of_sequence>("pages_of_sequence"),
                                      optional<&Of::most_pages>("most_pages"),
                                      optional<&Of::num_pages>("num_pages"),
                                      optional<&Of::chosen>("chosen"),
                                      optional<&Of::counts>("counts"),
                                      optional<&Of::sequences>("sequences"),
                                      optional<&Of::selectors_per_kv_head>("selectors_per_kv_head")};
};

template <>
struct Fields<ktc::QuantiseArguments> {
  using Of = ktc::QuantiseArguments;
  static constexpr Field<Of> all[] = {required<&Of::rows>("rows"),
                                      required<&Of::batch_stride>("batch_stride"),
                                      required<&Of::head_stride>("head_stride"),
                                      required<&Of::token_stride>("token_stride"),
                                      required<&Of::codes>("codes"),
                                      required<&Of::batch>("batch"),
                                      required<&Of::heads>("heads"),
                                      required<&Of::tokens>("tokens")};
};

template <>
struct Fields<ktc::KeyLayout> {
  using Of = ktc::KeyLayout;
  static constexpr Field<Of> all[] = {required<&Of::format>("format"), required<&Of::width>("width")};
};

template <>
struct Fields<ktc::IndexView> {
  using Of = ktc::IndexView;
  static constexpr Field<Of> all[] = {required<&Of::blocks>("blocks"),     required<&Of::scales>("scales"),
                                      required<&Of::mean>("mean"),         required<&Of::signs>("signs"),
                                      required<&Of::capacity>("capacity"), required<&Of::layout>("layout")};
};

template <>
struct Fields<ktc::EncodeArguments> {
  using Of = ktc::EncodeArguments;
  static constexpr Field<Of> all[] = {required<&Of::keys>("keys"),          required<&Of::index>("index"),
                                      required<&Of::batch>("batch"),        required<&Of::key_heads>("key_heads"),
                                      required<&Of::begin>("begin"),        required<&Of::end>("end"),
                                      optional<&Of::rope_keys>("rope_keys")};
};

template <>
struct Fields<ktc::SelectArguments> {
  using Of = ktc::SelectArguments;
  static constexpr Field<Of> all[] = {required<&Of::query>("query"),
                                      required<&Of::index>("index"),
                                      required<&Of::positions>("positions"),
                                      required<&Of::counts>("counts"),
                                      required<&Of::batch>("batch"),
                                      required<&Of::key_heads>("key_heads"),
                                      required<&Of::group>("group"),
                                      required<&Of::tokens>("tokens"),
                                      required<&Of::length>("length"),
                                      required<&Of::most>("most"),
                                      required<&Of::scale>("scale"),
                                      required<&Of::k>("k"),
                                      required<&Of::sink>("sink"),
                                      required<&Of::local>("local"),
                                      required<&Of::shared>("shared"),
                                      optional<&Of::mask>("mask"),
                                      optional<&Of::mask_batch>("mask_batch"),
                                      optional<&Of::mask_token>("mask_token")};
};

// A call of a kernel over what its mask leaves visible.
inline void forward_seen(const ktc::AttentionKernel& kernel, ktc::Engine& engine,
                         const ktc::AttentionArguments& arguments) {
  ktc::require_pages(arguments);
  std::vector<std::int64_t> lengths;
  kernel.forward(engine, ktc::seen_alone(arguments, lengths));
}

inline void quantise(const ktc::Int8AttentionKernel& kernel, const Arguments<ktc::QuantiseArguments>& arguments) {
  const py::gil_scoped_release release;
  kernel.quantise(arguments);
}

inline void add_attention(py::module_& library) {
  py::class_<ktc::AttentionKernel> kernel(library, "AttentionKernel", py::module_local());
  def_call<&forward_seen>(kernel, "forward", "call");
  py::class_<ktc::Int8AttentionKernel, ktc::AttentionKernel>(library, "Int8AttentionKernel", py::module_local())
      .def("quantise", &quantise);
  py::class_<ktc::SparseAttentionKernel, ktc::AttentionKernel>(library, "SparseAttentionKernel", py::module_local())
      .def("encode", &Call<&ktc::SparseAttentionKernel::encode>::now)
      .def("select", &Call<&ktc::SparseAttentionKernel::select>::now);
}

}  // namespace ktc_python::inline KTC_UNIT
