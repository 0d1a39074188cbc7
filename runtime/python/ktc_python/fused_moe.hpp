// `ktc::MoeKernel` as a Python class. Calls that compute or copy weights release the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ktc/interface/moe.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/arguments.hpp"
#include "ktc_python/calls.hpp"

namespace ktc_python::inline KTC_UNIT {

using ktc::MoeKernel;
using ktc::SourceType;
using ktc::weight_format::Part;

inline Part part_of(const std::string& name) {
  if (name == "gate") return Part::kGate;
  if (name == "up") return Part::kUp;
  if (name == "down") return Part::kDown;
  if (name == "gate_bias") return Part::kGateBias;
  if (name == "up_bias") return Part::kUpBias;
  if (name == "down_bias") return Part::kDownBias;
  throw py::value_error("part must be gate, up, down or the bias of one, found " + name);
}

template <>
inline Part value_of<Part>(PyObject* object) {
  return part_of(py::handle(object).cast<std::string>());
}

inline SourceType source_type(const std::string& name) {
  if (name == "bf16") return SourceType::kBf16;
  if (name == "fp32") return SourceType::kFp32;
  if (name == "fp64") return SourceType::kFp64;
  throw py::value_error("source type must be bf16, fp32 or fp64, found " + name);
}

template <>
struct Fields<ktc::FactorStrides> {
  using Of = ktc::FactorStrides;
  static constexpr Field<Of> all[] = {required<&Of::expert>("expert"), required<&Of::output>("output"),
                                      required<&Of::rank>("rank")};
};

template <>
struct Fields<ktc::LoraFactors> {
  using Of = ktc::LoraFactors;
  static constexpr Field<Of> all[] = {required<&Of::a>("a"),
                                      required<&Of::b>("b"),
                                      required<&Of::rank>("rank"),
                                      required<&Of::scale>("scale"),
                                      required<&Of::interleaved>("interleaved"),
                                      required<&Of::b_strides>("b_strides"),
                                      optional<&Of::dropped>("dropped"),
                                      optional<&Of::seed>("seed"),
                                      optional<&Of::grad_a>("grad_a"),
                                      optional<&Of::grad_b>("grad_b"),
                                      optional<&Of::grad_b_strides>("grad_b_strides")};
};

template <>
struct Fields<ktc::ForwardArguments> {
  using Of = ktc::ForwardArguments;
  static constexpr Field<Of> all[] = {required<&Of::packed>("packed"),
                                      required<&Of::hidden_states>("hidden_states"),
                                      required<&Of::top_k_index>("top_k_index"),
                                      required<&Of::top_k_weights>("top_k_weights"),
                                      required<&Of::out>("out"),
                                      required<&Of::tokens>("tokens"),
                                      optional<&Of::saved>("saved"),
                                      optional<&Of::lora_first>("lora_first"),
                                      optional<&Of::lora_down>("lora_down")};
};

template <>
struct Fields<ktc::WeightGradientRows> {
  using Of = ktc::WeightGradientRows;
  static constexpr Field<Of> all[] = {required<&Of::d_first>("d_first"), required<&Of::activated>("activated")};
};

template <>
struct Fields<ktc::BackwardArguments> {
  using Of = ktc::BackwardArguments;
  static constexpr Field<Of> all[] = {required<&Of::packed>("packed"),
                                      required<&Of::top_k_index>("top_k_index"),
                                      required<&Of::top_k_weights>("top_k_weights"),
                                      required<&Of::saved>("saved"),
                                      required<&Of::hidden_states>("hidden_states"),
                                      required<&Of::grad_out>("grad_out"),
                                      required<&Of::grad_hidden_states>("grad_hidden_states"),
                                      required<&Of::grad_top_k_weights>("grad_top_k_weights"),
                                      required<&Of::tokens>("tokens"),
                                      optional<&Of::lora_first>("lora_first"),
                                      optional<&Of::lora_down>("lora_down"),
                                      optional<&Of::rows>("rows")};
};

template <>
struct Fields<ktc::ExpertMatrix> {
  using Of = ktc::ExpertMatrix;
  static constexpr Field<Of> all[] = {required<&Of::packed>("packed"), required<&Of::expert>("expert"),
                                      required<&Of::part>("part"), required<&Of::rows>("rows"),
                                      required<&Of::columns>("columns")};
};

using Matrix = Arguments<ktc::ExpertMatrix>;

// The intermediate units of experts that a partial forward reads for its choices. A whole expert has `units`; one that
// is divided begins with a later one (`kFirstUnitBit`). Calls have few choices, and a run allocates nothing.
inline std::int64_t units_read(const std::int64_t* index, std::int64_t choices, std::int64_t units) {
  std::int64_t read = 0;
  for (std::int64_t choice = 0; choice < choices; ++choice) {
    const std::int64_t expert = index[choice];
    if (expert == ktc::kComputedElsewhere) continue;
    const auto is_same = [expert](std::int64_t earlier) { return earlier == expert; };
    if (std::none_of(index, index + choice, is_same)) read += units - (expert >> ktc::kFirstUnitBit);
  }
  return read;
}

// A forward for later without the choices that are computed elsewhere. Its work is counted in intermediate units.
inline std::unique_ptr<ktc::HostCall> partial_call(const MoeKernel& kernel, ktc::Engine& engine,
                                                   const Arguments<ktc::ForwardArguments>& arguments,
                                                   std::int64_t choices, std::int64_t units) {
  ktc::ForwardArguments partial = arguments;
  partial.partial = true;
  return std::make_unique<ktc::HostCall>(
      [&kernel, &engine, partial] { kernel.forward(engine, partial); },
      [index = partial.top_k_index, choices, units] { return units_read(index, choices, units); });
}

inline py::object coding(const MoeKernel& kernel, const std::string& part) {
  const ktc::Coding coding = kernel.coding(part_of(part));
  if (coding.name == nullptr) return py::none();
  return py::make_tuple(coding.name, coding.group);
}

inline py::object blocks(const MoeKernel& kernel, const std::string& part) {
  const char* type = kernel.blocks(part_of(part));
  if (type == nullptr) return py::none();
  return py::str(type);
}

inline void pack(const MoeKernel& kernel, const Matrix& to, Address source, const std::string& type) {
  const SourceType from = source_type(type);
  const py::gil_scoped_release release;
  kernel.pack(to, at(source), from);
}

inline void pack_codes(const MoeKernel& kernel, const Matrix& to, Address codes, Address scales, std::int64_t groups) {
  const py::gil_scoped_release release;
  kernel.pack_codes(to, at<std::uint8_t>(codes), at<float>(scales), groups);
}

inline void pack_blocks(const MoeKernel& kernel, const Matrix& to, Address blocks, const std::string& type) {
  const py::gil_scoped_release release;
  kernel.pack_blocks(to, at<std::uint8_t>(blocks), type);
}

inline void unpack(const MoeKernel& kernel, const Matrix& from, Address target) {
  const py::gil_scoped_release release;
  kernel.unpack(from, at(target));
}

inline void shard(const MoeKernel& kernel, Address whole, std::int64_t expert, Address packed) {
  const py::gil_scoped_release release;
  kernel.shard(at(whole), expert, at(packed));
}

inline void join(const MoeKernel& kernel, Address packed, std::int64_t expert, Address whole) {
  const py::gil_scoped_release release;
  kernel.join(at(packed), expert, at(whole));
}

inline void add_fused_moe(py::module_& library) {
  py::class_<MoeKernel> kernel(library, "MoeKernel", py::module_local());
  kernel.def_property_readonly("packed_bytes", &MoeKernel::packed_bytes)
      .def_property_readonly("expert_bytes", &MoeKernel::expert_bytes)
      .def("coding", &coding)
      .def("blocks", &blocks)
      .def("saved_bytes", &MoeKernel::saved_bytes, py::arg("tokens"), py::arg("first_rank") = 0,
           py::arg("down_rank") = 0)
      .def("bind",
           [](const MoeKernel& moe, Address packed, const std::vector<int>& nodes) { moe.bind(at(packed), nodes); })
      .def("shard", &shard)
      .def("join", &join)
      .def("pack", &pack)
      .def("pack_codes", &pack_codes)
      .def("pack_blocks", &pack_blocks)
      .def("unpack", &unpack)
      .def("backward", &Call<&MoeKernel::backward>::now)
      .def("partial_call", &partial_call, py::keep_alive<0, 1>(), py::keep_alive<0, 2>());
  def_call<&MoeKernel::forward>(kernel, "forward", "call");
}

}  // namespace ktc_python::inline KTC_UNIT
