// The calls of kernels as methods of Python classes: at once, without the GIL, or as a `HostCall` for later.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>

#include "ktc/interface/engine.hpp"
#include "ktc/interface/host_call.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/arguments.hpp"

namespace ktc_python::inline KTC_UNIT {

namespace py = pybind11;

template <auto kFunction, class Kernel, class Struct>
struct CallOf {
  static void now(const Kernel& kernel, ktc::Engine& engine, const Arguments<Struct>& arguments) {
    const py::gil_scoped_release release;
    std::invoke(kFunction, kernel, engine, static_cast<const Struct&>(arguments));
  }

  static std::unique_ptr<ktc::HostCall> later(const Kernel& kernel, ktc::Engine& engine,
                                              const Arguments<Struct>& arguments) {
    const Struct copied = arguments;
    return std::make_unique<ktc::HostCall>(
        [&kernel, &engine, copied] { std::invoke(kFunction, kernel, engine, copied); });
  }
};

// Of a method of a kernel that takes an engine and a struct of arguments, or of a function that takes a kernel too.
template <auto kFunction>
struct Call;

template <class Kernel, class Struct, void (Kernel::*kMethod)(ktc::Engine&, const Struct&) const>
struct Call<kMethod> : CallOf<kMethod, Kernel, Struct> {};

template <class Kernel, class Struct, void (*kFunction)(const Kernel&, ktc::Engine&, const Struct&)>
struct Call<kFunction> : CallOf<kFunction, Kernel, Struct> {};

// Adds both forms. A `HostCall` keeps its kernel and its engine.
template <auto kFunction, class Class>
void def_call(Class& kernel, const char* now, const char* later) {
  kernel.def(now, &Call<kFunction>::now)
      .def(later, &Call<kFunction>::later, py::keep_alive<0, 1>(), py::keep_alive<0, 2>());
}

}  // namespace ktc_python::inline KTC_UNIT
