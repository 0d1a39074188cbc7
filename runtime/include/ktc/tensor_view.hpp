// A view of a row-major matrix.
#pragma once

#include <cstdint>

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <class T>
struct MatrixView {
  T* data;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t row_stride;

  MatrixView(T* data, std::int64_t rows, std::int64_t columns) : MatrixView(data, rows, columns, columns) {}
  MatrixView(T* data, std::int64_t rows, std::int64_t columns, std::int64_t row_stride)
      : data(data), rows(rows), columns(columns), row_stride(row_stride) {}

  T* row(std::int64_t index) const { return data + index * row_stride; }
};

// The part of [0, size) that falls to one of `count` workers; the parts are contiguous and differ by one at most.
struct Range {
  std::int64_t begin;
  std::int64_t end;

  std::int64_t size() const { return end - begin; }
  static Range share(std::int64_t size, int index, int count) {
    return {size * index / count, size * (index + 1) / count};
  }
};

}  // namespace ktc::inline KTC_UNIT
