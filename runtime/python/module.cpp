// The Python module of a kernel library: its classes, and one function per entry that makes a kernel.
#define KTC_UNIT module

#include <pybind11/pybind11.h>

#include <cstdint>

#include "ktc_python/attention.hpp"
#include "ktc_python/engine.hpp"
#include "ktc_python/entries.hpp"
#include "ktc_python/functions.hpp"
#include "ktc_python/fused_moe.hpp"
#include "ktc_python/host_call.hpp"
#include "ktc_python/host_thread.hpp"
#include "ktc_python/linear.hpp"
#include "ktc_python/packed_linear.hpp"

namespace py = pybind11;

void ktc_python::expose(py::module_& library, const functions::Entry& entry) {
  library.def(entry.name, [&entry] { return functions_of(entry); });
}

void ktc_python::expose(py::module_& library, const fused_moe::Entry& entry) {
  library.def(
      entry.name,
      [make = entry.make](std::int64_t num_experts, std::int64_t hidden, std::int64_t intermediate, std::int64_t top_k,
                          int nodes) { return make({num_experts, hidden, intermediate, top_k, nodes}); },
      py::arg("num_experts"), py::arg("hidden"), py::arg("intermediate"), py::arg("top_k"), py::arg("nodes") = 1);
}

void ktc_python::expose(py::module_& library, const linear::Entry& entry) {
  library.def(entry.name, entry.make);
}

void ktc_python::expose(py::module_& library, const packed_linear::Entry& entry) {
  library.def(entry.name, entry.make);
}

void ktc_python::expose(py::module_& library, const attention::Entry& entry) {
  library.def(entry.name, entry.make);
}

void ktc_python::expose(py::module_& library, const int8_attention::Entry& entry) {
  library.def(entry.name, entry.make);
}

void ktc_python::expose(py::module_& library, const sparse_attention::Entry& entry) {
  library.def(entry.name, entry.make);
}

// A digest of the interface that these functions have (`interface_digest` of `ktc/model/kernels/kernel_library.py`).
#ifndef KTC_INTERFACE
#error "define KTC_INTERFACE, the digest of the interface"
#endif
static constexpr const char* kInterface = KTC_INTERFACE;

// A library's classes, threads and workspace belong to a process, and its calls release one interpreter's lock.
static constexpr const char* kMainAlone =
    "ktc's kernels run in the main interpreter of a process alone, not in a subinterpreter";

static bool in_main_interpreter() {
  return PyInterpreterState_Get() == PyInterpreterState_Main();
}

PYBIND11_MODULE(ktc_kernels_of_main, library) {
  if (!in_main_interpreter())
    throw py::import_error(kMainAlone);  // where Python ran the function below in the main one
  library.attr("interface") = kInterface;
  ktc_python::add_engine(library);
  ktc_python::add_host_call(library);
  ktc_python::add_host_thread(library);
  ktc_python::add_fused_moe(library);
  ktc_python::add_linear(library);
  ktc_python::add_packed_linear(library);
  ktc_python::add_attention(library);
  ktc_python::expose_entries(library);
}

// Python calls this function. In a subinterpreter of Python 3.11 the function of pybind11 would wait for ever, for a
// lock that its own thread holds.
extern "C" PYBIND11_EXPORT PyObject* PyInit_ktc_kernels() {
  if (in_main_interpreter()) return PyInit_ktc_kernels_of_main();
  PyErr_SetString(PyExc_ImportError, kMainAlone);
  return nullptr;
}
