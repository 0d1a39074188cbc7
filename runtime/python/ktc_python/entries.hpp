// The interface between the generated `bindings.cpp`, which lists the kernels of a library, and `module.cpp`, which is
// the same for every library. It does not include pybind11, whose headers take longer to compile than the kernels.
#pragma once

#include "ktc/decode_attention.hpp"
#include "ktc/linear.hpp"
#include "ktc/moe_kernel.hpp"
#include "ktc/packed_linear.hpp"

namespace pybind11 {
class module_;
}

namespace ktc_python {

namespace fused_moe {
using Entry = ktc::KernelEntry;
}
namespace linear {
using Entry = ktc::LinearEntry;
}
namespace packed_linear {
using Entry = ktc::PackedLinearEntry;
}
namespace attention {
using Entry = ktc::AttentionEntry;
}

void expose(pybind11::module_& library, const fused_moe::Entry& entry);
void expose(pybind11::module_& library, const linear::Entry& entry);
void expose(pybind11::module_& library, const packed_linear::Entry& entry);
void expose(pybind11::module_& library, const attention::Entry& entry);

// Exposes every kernel of the library.
void expose_entries(pybind11::module_& library);

}  // namespace ktc_python
