// The namespace of a translation unit.
//
// A library links units that were compiled for different instruction sets. Inline functions and templates of one name
// become one function there, whichever unit the linker takes it from: a scalar kernel would then run AVX-512 code. So a
// unit defines KTC_UNIT before its first include, every header that computes declares
//
//     namespace ktc::inline KTC_UNIT {
//
// and two units never have a function in common. Units share what is in `ktc/interface/` alone: plain structs, enums
// and abstract classes, none of which has a function in a header. `runtime/src/interface.cpp` defines those functions.
#pragma once

#ifndef KTC_UNIT
#error "define KTC_UNIT, a name that no other unit and no namespace of ktc has, before the first include of ktc"
#endif
