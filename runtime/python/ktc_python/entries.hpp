// The interface between the generated `bindings.cpp`, which lists the kernels of a library, and `module.cpp`, which is
// the same for every library. It includes nothing: `bindings.cpp` is compiled for every library, only names entries,
// and the headers of pybind11 take longer to compile than the kernels.
#pragma once

namespace pybind11 {
class module_;
}

namespace ktc {
struct AttentionEntry;
struct FunctionsEntry;
struct Int8AttentionEntry;
struct KernelEntry;
struct LinearEntry;
struct PackedLinearEntry;
struct SparseAttentionEntry;
}  // namespace ktc

namespace ktc::step {
struct StepEntry;
}

namespace ktc_python {

namespace functions {
using Entry = ktc::FunctionsEntry;
}
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
namespace int8_attention {
using Entry = ktc::Int8AttentionEntry;
}
namespace sparse_attention {
using Entry = ktc::SparseAttentionEntry;
}
namespace step {
using Entry = ktc::step::StepEntry;
}

void expose(pybind11::module_& library, const functions::Entry& entry);
void expose(pybind11::module_& library, const fused_moe::Entry& entry);
void expose(pybind11::module_& library, const linear::Entry& entry);
void expose(pybind11::module_& library, const packed_linear::Entry& entry);
void expose(pybind11::module_& library, const attention::Entry& entry);
void expose(pybind11::module_& library, const int8_attention::Entry& entry);
void expose(pybind11::module_& library, const sparse_attention::Entry& entry);
void expose(pybind11::module_& library, const step::Entry& entry);

// Exposes every kernel of the library.
void expose_entries(pybind11::module_& library);

}  // namespace ktc_python
