// `ktc::HostThread` as a Python class.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>

#include "ktc/interface/host_thread.hpp"
#include "ktc/unit.hpp"
#include "ktc_python/address.hpp"

namespace ktc_python::inline KTC_UNIT {

namespace py = pybind11;

inline void add_host_thread(py::module_& library) {
  py::class_<ktc::HostThread>(library, "HostThread", py::module_local())
      .def(py::init([](Address mailbox, const py::object&) {
             return std::make_unique<ktc::HostThread>(at<ktc::Mailbox>(mailbox));
           }),
           py::keep_alive<1, 3>())  // the memory of the mailbox ends after the thread
      .def_property_readonly_static("mailbox_bytes", [](const py::object&) { return sizeof(ktc::Mailbox); })
      .def_property_readonly_static("done_at", [](const py::object&) { return offsetof(ktc::Mailbox, done); })
      .def_property_readonly("expected", &ktc::HostThread::expected)
      .def("wait", &ktc::HostThread::wait, py::call_guard<py::gil_scoped_release>())
      .def("expect", &ktc::HostThread::expect)
      .def("dismiss", &ktc::HostThread::dismiss);
}

}  // namespace ktc_python::inline KTC_UNIT
