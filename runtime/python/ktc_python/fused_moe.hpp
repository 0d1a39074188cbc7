// `ktc::MoeKernel` as a Python class. Calls that compute or copy weights release the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ktc/interface/moe.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"
#include "ktc_python/host_call.hpp"

namespace ktc_python::fused_moe::inline KTC_UNIT {

namespace py = pybind11;
using ktc::MoeKernel;
using ktc::SourceType;
using ktc::weight_format::Part;
// Of expert, output and rank.
using Strides = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
// A, B and their gradients, rank, scale, whether the outputs are interleaved, strides of B and of its gradient.
using Lora = std::tuple<Address, Address, Address, Address, std::int64_t, double, bool, Strides, Strides>;

inline ktc::FactorStrides factor_strides(const Strides& strides) {
  const auto& [expert, output, rank] = strides;
  return {expert, output, rank};
}

inline ktc::LoraFactors factors(const Lora& lora) {
  const auto& [a, b, grad_a, grad_b, rank, scale, interleaved, b_strides, grad_b_strides] = lora;
  return {.a = at(a),
          .b = at(b),
          .grad_a = at(grad_a),
          .grad_b = at(grad_b),
          .rank = rank,
          .scale = scale,
          .interleaved = interleaved,
          .b_strides = factor_strides(b_strides),
          .grad_b_strides = factor_strides(grad_b_strides)};
}

inline Part part_of(const std::string& name) {
  if (name == "gate") return Part::kGate;
  if (name == "up") return Part::kUp;
  if (name == "down") return Part::kDown;
  if (name == "gate_bias") return Part::kGateBias;
  if (name == "up_bias") return Part::kUpBias;
  if (name == "down_bias") return Part::kDownBias;
  throw py::value_error("part must be gate, up, down or the bias of one, found " + name);
}

inline SourceType source_type(const std::string& name) {
  if (name == "bf16") return SourceType::kBf16;
  if (name == "fp32") return SourceType::kFp32;
  if (name == "fp64") return SourceType::kFp64;
  throw py::value_error("source type must be bf16, fp32 or fp64, found " + name);
}

inline void pack(const MoeKernel& kernel, Address packed, std::int64_t expert, const std::string& part, Address source,
                 const std::string& type, std::int64_t rows, std::int64_t columns) {
  const Part which = part_of(part);
  const SourceType from = source_type(type);
  const py::gil_scoped_release release;
  kernel.pack(at(packed), expert, which, at(source), from, rows, columns);
}

inline py::object coding(const MoeKernel& kernel, const std::string& part) {
  const ktc::Coding coding = kernel.coding(part_of(part));
  if (coding.name == nullptr) return py::none();
  return py::make_tuple(coding.name, coding.group);
}

inline void pack_codes(const MoeKernel& kernel, Address packed, std::int64_t expert, const std::string& part,
                       Address codes, Address scales, std::int64_t rows, std::int64_t columns, std::int64_t groups) {
  const Part which = part_of(part);
  const py::gil_scoped_release release;
  kernel.pack_codes(at(packed), expert, which, at<std::uint8_t>(codes), at<float>(scales), rows, columns, groups);
}

inline void pack_blocks(const MoeKernel& kernel, Address packed, std::int64_t expert, const std::string& part,
                        Address blocks, const std::string& type, std::int64_t rows, std::int64_t row_bytes) {
  const Part which = part_of(part);
  const py::gil_scoped_release release;
  kernel.pack_blocks(at(packed), expert, which, at<std::uint8_t>(blocks), type, rows, row_bytes);
}

inline py::object blocks(const MoeKernel& kernel, const std::string& part) {
  const char* type = kernel.blocks(part_of(part));
  if (type == nullptr) return py::none();
  return py::str(type);
}

inline void unpack(const MoeKernel& kernel, Address packed, std::int64_t expert, const std::string& part,
                   Address target, std::int64_t rows, std::int64_t columns) {
  const Part which = part_of(part);
  const py::gil_scoped_release release;
  kernel.unpack(at(packed), expert, which, at(target), rows, columns);
}

inline void shard(const MoeKernel& kernel, Address whole, std::int64_t expert, Address packed) {
  const py::gil_scoped_release release;
  kernel.shard(at(whole), expert, at(packed));
}

inline void join(const MoeKernel& kernel, Address packed, std::int64_t expert, Address whole) {
  const py::gil_scoped_release release;
  kernel.join(at(packed), expert, at(whole));
}

inline void forward(const MoeKernel& kernel, ktc::Engine& engine, Address packed, Address hidden_states,
                    Address top_k_index, Address top_k_weights, Address out, Address saved, std::int64_t tokens,
                    const Lora& first, const Lora& down) {
  const ktc::LoraFactors lora_first = factors(first);
  const ktc::LoraFactors lora_down = factors(down);
  const py::gil_scoped_release release;
  kernel.forward(engine, {.packed = at(packed),
                          .hidden_states = at(hidden_states),
                          .top_k_index = at<std::int64_t>(top_k_index),
                          .top_k_weights = at(top_k_weights),
                          .out = at(out),
                          .saved = at(saved),
                          .tokens = tokens,
                          .lora_first = lora_first,
                          .lora_down = lora_down});
}

inline std::unique_ptr<ktc::HostCall> call(const MoeKernel& kernel, ktc::Engine& engine, Address packed,
                                           Address hidden_states, Address top_k_index, Address top_k_weights,
                                           Address out, std::int64_t tokens, const Lora& first, const Lora& down) {
  const ktc::ForwardArguments arguments{.packed = at(packed),
                                        .hidden_states = at(hidden_states),
                                        .top_k_index = at<std::int64_t>(top_k_index),
                                        .top_k_weights = at(top_k_weights),
                                        .out = at(out),
                                        .saved = nullptr,
                                        .tokens = tokens,
                                        .lora_first = factors(first),
                                        .lora_down = factors(down)};
  return ktc_python::host_call([&kernel, &engine, arguments] { kernel.forward(engine, arguments); });
}

inline void backward(const MoeKernel& kernel, ktc::Engine& engine, Address packed, Address top_k_index,
                     Address top_k_weights, Address saved, Address hidden_states, Address grad_out,
                     Address grad_hidden_states, Address grad_top_k_weights, std::int64_t tokens, const Lora& first,
                     const Lora& down, Address d_first_rows, Address activated_rows) {
  const ktc::LoraFactors lora_first = factors(first);
  const ktc::LoraFactors lora_down = factors(down);
  const py::gil_scoped_release release;
  kernel.backward(engine, {.packed = at(packed),
                           .top_k_index = at<std::int64_t>(top_k_index),
                           .top_k_weights = at(top_k_weights),
                           .saved = at(saved),
                           .hidden_states = at(hidden_states),
                           .grad_out = at(grad_out),
                           .grad_hidden_states = at(grad_hidden_states),
                           .grad_top_k_weights = at(grad_top_k_weights),
                           .tokens = tokens,
                           .lora_first = lora_first,
                           .lora_down = lora_down,
                           .rows = {.d_first = at(d_first_rows), .activated = at(activated_rows)}});
}

inline void add_classes(py::module_& library) {
  py::class_<MoeKernel>(library, "MoeKernel", py::module_local())
      .def_property_readonly("packed_bytes", &MoeKernel::packed_bytes)
      .def("coding", &coding)
      .def("saved_bytes", &MoeKernel::saved_bytes, py::arg("tokens"), py::arg("first_rank") = 0,
           py::arg("down_rank") = 0)
      .def_property_readonly("expert_bytes", &MoeKernel::expert_bytes)
      .def("bind", [](const MoeKernel& kernel, Address packed,
                      const std::vector<int>& nodes) { kernel.bind(at(packed), nodes); })
      .def("shard", &shard)
      .def("join", &join)
      .def("pack", &pack)
      .def("pack_codes", &pack_codes)
      .def("blocks", &blocks)
      .def("pack_blocks", &pack_blocks)
      .def("unpack", &unpack)
      .def("forward", &forward)
      .def("call", &call, py::keep_alive<0, 1>(), py::keep_alive<0, 2>())
      .def("backward", &backward);
}

}  // namespace ktc_python::fused_moe::inline KTC_UNIT
