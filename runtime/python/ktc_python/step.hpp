// `ktc::step::StepKernel` and `Program` as Python classes. A run releases the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ktc/interface/host_call.hpp"
#include "ktc/step/functions.hpp"
#include "ktc/step/indexing.hpp"
#include "ktc/step/program.hpp"
#include "ktc/step/rows.hpp"
#include "ktc/step/view.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/arguments.hpp"

namespace ktc_python::step::inline KTC_UNIT {

namespace py = pybind11;
using ktc::step::Program;
using ktc::step::StepKernel;
using ktc::step::TensorArgument;
using ktc::step::Type;

// `strides` are in elements.
struct Tensor {
  std::byte* data = nullptr;
  Type type{};
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

}  // namespace ktc_python::step::inline KTC_UNIT

namespace ktc_python::inline KTC_UNIT {

template <>
struct Fields<step::Tensor> {
  using Of = step::Tensor;
  static constexpr Field<Of> all[] = {required<&Of::data>("data"), required<&Of::type>("type"),
                                      required<&Of::sizes>("sizes"), required<&Of::strides>("strides")};
};

}  // namespace ktc_python::inline KTC_UNIT

namespace ktc_python::step::inline KTC_UNIT {

using View = Arguments<Tensor>;

// Its arrays are those of the tensor.
inline TensorArgument argument_of(const Tensor& tensor) {
  return {.data = tensor.data,
          .type = tensor.type,
          .dims = static_cast<std::int64_t>(tensor.sizes.size()),
          .sizes = tensor.sizes.data(),
          .strides = tensor.strides.data()};
}

inline ktc::step::View view_of(const Tensor& tensor) {
  return ktc::step::view_of(argument_of(tensor));
}

inline void pointwise(Program& program, const StepKernel& kernel, const std::string& function, const View& out,
                      const std::vector<View>& inputs, int computed) {
  const ktc::step::NamedFunction& named = ktc::step::function_named(function);
  if (named.inputs != inputs.size()) throw py::value_error("`" + function + "` has another number of inputs");
  std::vector<TensorArgument> from;
  for (const View& input : inputs) from.push_back(argument_of(input));
  program.add(
      kernel.pointwise(named.function, argument_of(out), from.data(), from.size(), static_cast<Type>(computed)));
}

inline ktc::step::Reduction reduction_named(const std::string& name) {
  if (name == "sum") return ktc::step::Reduction::kSum;
  if (name == "mean") return ktc::step::Reduction::kMean;
  if (name == "maximum") return ktc::step::Reduction::kMaximum;
  throw py::value_error("no reduction `" + name + "`");
}

inline void add_classes(py::module_& library) {
  py::class_<StepKernel>(library, "StepKernel", py::module_local()).def("program", [](const StepKernel&) {
    return Program();
  });
  py::class_<Program>(library, "Program", py::module_local())
      .def("__len__", &Program::size)
      .def("run", &Program::run, py::call_guard<py::gil_scoped_release>())
      .def(
          "call", [](Program& program, const ktc::HostCall& call) { program.add(call.call()); }, py::keep_alive<1, 2>())
      .def("pointwise", &pointwise)
      .def("reduce",
           [](Program& program, const StepKernel& kernel, const std::string& reduction, const View& out,
              const View& input, int computed) {
             program.add(kernel.reduce(reduction_named(reduction), argument_of(out), argument_of(input),
                                       static_cast<Type>(computed)));
           })
      .def("softmax",
           [](Program& program, const StepKernel& kernel, const View& out, const View& input, int computed) {
             program.add(kernel.softmax(argument_of(out), argument_of(input), static_cast<Type>(computed)));
           })
      .def(
          "matrix_product",  // by pointer: pybind11's function for a reference is one of `module.cpp` too
          [](Program& program, const StepKernel& kernel, ktc::Engine* engine, const View& out, const View& a,
             const View& b, const View& bias) {
            if (engine == nullptr) throw py::type_error("a product of matrices runs on an engine");
            program.add(
                kernel.matrix_product(*engine, argument_of(out), argument_of(a), argument_of(b), argument_of(bias)));
          },
          py::keep_alive<1, 3>())
      .def("top_k",
           [](Program& program, const View& values, const View& indices, const View& input, bool largest, bool sorted) {
             program.add(ktc::step::TopK(view_of(values), view_of(indices), view_of(input), largest, sorted));
           })
      .def("gather",
           [](Program& program, const View& out, const View& input, const View& indices, std::int64_t dim) {
             program.add(ktc::step::Gather(view_of(out), view_of(input), view_of(indices), dim));
           })
      .def("scatter",
           [](Program& program, const View& target, const View& indices, const View& value, std::int64_t dim) {
             program.add(ktc::step::Scatter(view_of(target), view_of(indices), view_of(value), dim));
           })
      .def("indexed_rows", [](Program& program, const View& whole, const View& indices, const View& rows,
                              std::int64_t dim, bool store) {
        program.add(ktc::step::IndexedRows(view_of(whole), view_of(indices), view_of(rows), dim, store));
      });
}

}  // namespace ktc_python::step::inline KTC_UNIT
