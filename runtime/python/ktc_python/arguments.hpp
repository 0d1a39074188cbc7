// Argument structs of `ktc/interface/` from dictionaries, whose keys are the names of fields.
//
// `Fields<Struct>` lists them. A binding takes `const Arguments<Struct>&`, for which Python gives a dictionary, so the
// struct alone describes a call. Pointers are addresses, and a struct within a struct is a dictionary too. An instance
// of a Python class per call would take longer to make than all of its fields.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>

#include "ktc/unit.hpp"

namespace ktc_python::inline KTC_UNIT {

namespace py = pybind11;

template <class Struct>
struct Field {
  const char* name;
  void (*set)(Struct&, PyObject* value);
  bool required;
};

// Its `all` is an array of `Field<Struct>`.
template <class Struct>
struct Fields;

// Throws py::type_error for an unknown name, and where a required field is missing.
template <class Struct>
void fill(Struct& arguments, PyObject* named);

template <class Value>
Value value_of(PyObject* object) {
  const auto checked = [](auto value) {
    if (value == static_cast<decltype(value)>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
  };
  if constexpr (std::is_pointer_v<Value>) {
    static_assert(sizeof(Value) == sizeof(unsigned long long));
    return reinterpret_cast<Value>(checked(PyLong_AsUnsignedLongLong(object)));
  } else if constexpr (std::is_same_v<Value, bool>) {
    return object == Py_True;
  } else if constexpr (std::is_floating_point_v<Value>) {
    return static_cast<Value>(checked(PyFloat_AsDouble(object)));
  } else if constexpr (std::is_integral_v<Value> || std::is_enum_v<Value>) {
    return static_cast<Value>(checked(PyLong_AsLongLong(object)));
  } else if constexpr (requires { typename Value::value_type; }) {
    return py::handle(object).cast<Value>();
  } else {
    Value value{};
    fill(value, object);
    return value;
  }
}

template <auto kMember>
struct Member;

template <class Struct, class Value, Value Struct::* kMember>
struct Member<kMember> {
  using Of = Struct;
  static void set(Struct& arguments, PyObject* value) { arguments.*kMember = value_of<Value>(value); }
};

template <auto kMember>
constexpr Field<typename Member<kMember>::Of> required(const char* name) {
  return {name, &Member<kMember>::set, true};
}

// Where it is missing, the field keeps the value that the struct gives it.
template <auto kMember>
constexpr Field<typename Member<kMember>::Of> optional(const char* name) {
  return {name, &Member<kMember>::set, false};
}

// The names as Python has them in a dictionary's literal: the same object for the same text.
template <class Struct>
const auto& names_of() {
  constexpr std::size_t kCount = std::size(Fields<Struct>::all);
  static const std::array<PyObject*, kCount> names = [] {
    std::array<PyObject*, kCount> made{};
    for (std::size_t each = 0; each < kCount; ++each)
      made[each] = PyUnicode_InternFromString(Fields<Struct>::all[each].name);
    return made;
  }();
  return names;
}

template <class Struct>
void fill(Struct& arguments, PyObject* named) {
  const auto& fields = Fields<Struct>::all;
  const auto& names = names_of<Struct>();
  static_assert(std::size(fields) <= 64);
  if (!PyDict_Check(named)) throw py::type_error("the arguments of a kernel are a dictionary of its fields");
  std::uint64_t given = 0;
  std::size_t next = 0;  // most calls name the fields in their order
  Py_ssize_t place = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(named, &place, &key, &value) != 0) {
    std::size_t tried = 0;
    while (tried < names.size() && names[next] != key) next = (next + 1) % names.size(), ++tried;
    if (tried == names.size()) throw py::type_error("a kernel has no argument " + std::string(py::repr(key)));
    fields[next].set(arguments, value);
    given |= std::uint64_t{1} << next;
  }
  for (std::size_t each = 0; each < names.size(); ++each) {
    if (fields[each].required && (given >> each & 1) == 0)
      throw py::type_error("a kernel's argument `" + std::string(fields[each].name) + "` is missing");
  }
}

// What a bound function takes instead of a struct.
template <class Struct>
struct Arguments : Struct {};

}  // namespace ktc_python::inline KTC_UNIT

template <class Struct>
struct pybind11::detail::type_caster<ktc_python::Arguments<Struct>> {
  PYBIND11_TYPE_CASTER(ktc_python::Arguments<Struct>, const_name("dict"));

  bool load(handle source, bool) {
    ktc_python::fill(static_cast<Struct&>(value), source.ptr());
    return true;
  }
};
