// The classes of decoding steps, for the libraries that have a kernel for them.
#define KTC_UNIT step_module

#include "ktc_python/entries.hpp"
#include "ktc_python/step.hpp"

void ktc_python::expose(pybind11::module_& library, const step::Entry& entry) {
  step::add_classes(library);
  library.def(entry.name, entry.make);
}
