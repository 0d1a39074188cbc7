// Operations of a decoding step that take an element's place from a tensor of indices (int64). An index out of range is
// an error (`std::out_of_range`).
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ktc/interface/text.hpp"
#include "ktc/step/view.hpp"
#include "ktc/unit.hpp"

namespace ktc::step::inline KTC_UNIT {

inline std::int64_t index_at(const View& indices, std::int64_t offset, std::int64_t size) {
  const std::int64_t index = reinterpret_cast<const std::int64_t*>(indices.data)[offset];
  if (index >= 0 && index < size) return index;
  throw std::out_of_range("index " + decimal(index) + " is out of range for a dimension of " + decimal(size));
}

inline void copy_element(const View& to, std::int64_t to_offset, const View& from, std::int64_t from_offset) {
  const auto bytes = static_cast<std::size_t>(bytes_of(from.type));
  std::memcpy(to.data + to_offset * static_cast<std::int64_t>(bytes),
              from.data + from_offset * static_cast<std::int64_t>(bytes), bytes);
}

// A view without a dimension, in which index 0 of that dimension is taken.
inline View without(const View& view, std::int64_t dim) {
  View rest = view;
  rest.sizes.erase(rest.sizes.begin() + dim);
  rest.strides.erase(rest.strides.begin() + dim);
  return rest;
}

// out[.., i, ..] = input[.., indices[.., i, ..], ..], at `dim`.
class Gather {
 public:
  Gather(View out, View input, View indices, std::int64_t dim)
      : dim_(static_cast<std::size_t>(dim)),
        out_(std::move(out)),
        input_(std::move(input)),
        indices_(std::move(indices)) {
    place_.sizes = out_.sizes;
    place_.strides = input_.strides;
    place_.strides[dim_] = 0;
  }

  void operator()() const {
    const std::array<const View*, 3> views{&out_, &place_, &indices_};
    for_each_index(out_.sizes, out_.dims(), views, [&](const std::array<std::int64_t, 3>& offsets) {
      const std::int64_t index = index_at(indices_, offsets[2], input_.sizes[dim_]);
      copy_element(out_, offsets[0], input_, offsets[1] + index * input_.strides[dim_]);
    });
  }

 private:
  std::size_t dim_;
  View out_;
  View input_;
  View indices_;
  View place_;
};

// target[.., indices[.., i, ..], ..] = value[.., i, ..], at `dim`.
class Scatter {
 public:
  Scatter(View target, View indices, View value, std::int64_t dim)
      : dim_(static_cast<std::size_t>(dim)),
        target_(std::move(target)),
        indices_(std::move(indices)),
        value_(std::move(value)) {
    place_.sizes = indices_.sizes;
    place_.strides = target_.strides;
    place_.strides[dim_] = 0;
  }

  void operator()() const {
    const std::array<const View*, 3> views{&value_, &place_, &indices_};
    for_each_index(indices_.sizes, indices_.dims(), views, [&](const std::array<std::int64_t, 3>& offsets) {
      const std::int64_t index = index_at(indices_, offsets[2], target_.sizes[dim_]);
      copy_element(target_, offsets[1] + index * target_.strides[dim_], value_, offsets[0]);
    });
  }

 private:
  std::size_t dim_;
  View target_;
  View indices_;
  View value_;
  View place_;
};

// target[.., indices[i], ..] = source[.., i, ..] at `dim`, and the reverse: rows at places that few indices name.
class IndexedRows {
 public:
  // With `store`, rows are copied into `whole`, otherwise out of it.
  IndexedRows(View whole, View indices, View rows, std::int64_t dim, bool store)
      : dim_(static_cast<std::size_t>(dim)),
        store_(store),
        whole_(std::move(whole)),
        indices_(std::move(indices)),
        rows_(std::move(rows)),
        whole_row_(without(whole_, dim)),
        row_(without(rows_, dim)) {}

  void operator()() const {
    const std::int64_t count = rows_.sizes[dim_], bytes = bytes_of(whole_.type);
    for (std::int64_t row = 0; row < count; ++row) {
      const std::int64_t index = index_at(indices_, row * indices_.last_stride(), whole_.sizes[dim_]);
      const std::int64_t whole_begin = index * whole_.strides[dim_], row_begin = row * rows_.strides[dim_];
      const bool whole_lines = whole_row_.last_stride() == 1 && row_.last_stride() == 1;
      const std::int64_t line = whole_lines ? row_.last_size() : 1;
      const std::array<const View*, 2> views{&whole_row_, &row_};
      const std::int64_t dims = row_.dims() - (whole_lines && row_.dims() > 0 ? 1 : 0);
      for_each_index(row_.sizes, dims, views, [&](const std::array<std::int64_t, 2>& offsets) {
        std::byte* in_whole = whole_.data + (whole_begin + offsets[0]) * bytes;
        std::byte* in_rows = rows_.data + (row_begin + offsets[1]) * bytes;
        const auto size = static_cast<std::size_t>(line * bytes);
        if (store_) {
          std::memcpy(in_whole, in_rows, size);
        } else {
          std::memcpy(in_rows, in_whole, size);
        }
      });
    }
  }

 private:
  std::size_t dim_;
  bool store_;
  View whole_;
  View indices_;
  View rows_;
  View whole_row_;
  View row_;
};

}  // namespace ktc::step::inline KTC_UNIT
