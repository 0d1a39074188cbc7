// Operations of a decoding step along the last dimension of a tensor: sums, softmax and the largest values.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "ktc/interface/step.hpp"
#include "ktc/step/pointwise.hpp"
#include "ktc/step/view.hpp"
#include "ktc/unit.hpp"

namespace ktc::step::inline KTC_UNIT {

// out (...) = the reduction of input (..., n), whose first sizes are those of `out`.
template <class Lanes>
class Reduce {
 public:
  Reduce(Reduction reduction, View out, View input, Type computed)
      : reduction_(reduction), computed_(computed), out_(std::move(out)), input_(std::move(input)) {}

  void operator()() const {
    switch (computed_) {
      case Type::kFp64:
        return run<double>();
      case Type::kInt64:
        return run<std::int64_t>();
      default:
        return run<float>();
    }
  }

 private:
  static constexpr std::int64_t kBlock = 256;
  static constexpr std::int64_t kSums = 16;  // side by side

  template <class Computed>
  void run() const {
    const std::array<const View*, 2> views{&out_, &input_};
    for_each_index(input_.sizes, input_.dims() - 1, views, [&](const std::array<std::int64_t, 2>& offsets) {
      const Computed value = reduced<Computed>(offsets[1]);
      Blocks<Computed>::store(out_.data + offsets[0] * bytes_of(out_.type), out_.type, 1, 1, &value);
    });
  }

  template <class Computed>
  Computed reduced(std::int64_t offset) const {
    const bool greatest = reduction_ == Reduction::kMaximum;
    alignas(64) Computed block[kBlock];
    alignas(64) Computed sums[kSums];
    std::fill(sums, sums + kSums, greatest ? lowest<Computed>() : Computed{});
    const std::int64_t width = input_.last_size(), stride = input_.last_stride();
    for (std::int64_t begin = 0; begin < width; begin += kBlock) {
      const std::int64_t count = std::min(kBlock, width - begin);
      const std::int64_t at = offset + begin * stride;
      Blocks<Computed>::load(input_.data + at * bytes_of(input_.type), input_.type, stride, count, block);
      if (greatest) {
        for (std::int64_t index = 0; index < count; ++index) sums[0] = larger(sums[0], block[index]);
        continue;
      }
      std::fill(block + count, block + round_up(count, kSums), Computed{});
      for (std::int64_t index = 0; index < count; index += kSums) {
        for (std::int64_t sum = 0; sum < kSums; ++sum) sums[sum] += block[index + sum];
      }
    }
    if (greatest) return sums[0];
    for (std::int64_t half = kSums / 2; half > 0; half /= 2) {
      for (std::int64_t sum = 0; sum < half; ++sum) sums[sum] += sums[sum + half];
    }
    return reduction_ == Reduction::kMean ? sums[0] / static_cast<Computed>(width) : sums[0];
  }

  template <class Computed>
  static Computed lowest() {
    if constexpr (std::is_integral_v<Computed>) return std::numeric_limits<Computed>::min();
    return -std::numeric_limits<Computed>::infinity();
  }

  template <class Computed>
  static Computed larger(Computed a, Computed b) {
    return a > b || a != a ? a : b;
  }

  Reduction reduction_;
  Type computed_;
  View out_;
  View input_;
};

// out (..., n) = softmax of input (..., n). A row of negative infinities is NaN, as in PyTorch.
template <class Lanes>
class Softmax {
 public:
  Softmax(View out, View input, Type computed) : computed_(computed), out_(std::move(out)), input_(std::move(input)) {}

  void operator()() const {
    if (computed_ == Type::kFp64) return run<double>();
    run<float>();
  }

 private:
  template <class Computed>
  void run() const {
    const std::int64_t width = input_.last_size();
    std::vector<Computed> row(static_cast<std::size_t>(round_up(std::max<std::int64_t>(width, 1), kHalfPanel)));
    const std::array<const View*, 2> views{&out_, &input_};
    for_each_index(input_.sizes, input_.dims() - 1, views, [&](const std::array<std::int64_t, 2>& offsets) {
      Blocks<Computed>::load(input_.data + offsets[1] * bytes_of(input_.type), input_.type, input_.last_stride(), width,
                             row.data());
      Computed greatest = -std::numeric_limits<Computed>::infinity();
      for (std::int64_t index = 0; index < width; ++index)
        greatest = std::max(greatest, row[static_cast<std::size_t>(index)]);
      for (std::int64_t index = 0; index < width; ++index) row[static_cast<std::size_t>(index)] -= greatest;
      Values<Computed, Lanes>::exponentials(row.data(), width);
      Computed sum{};
      for (std::int64_t index = 0; index < width; ++index) sum += row[static_cast<std::size_t>(index)];
      for (std::int64_t index = 0; index < width; ++index) row[static_cast<std::size_t>(index)] /= sum;
      Blocks<Computed>::store(out_.data + offsets[0] * bytes_of(out_.type), out_.type, out_.last_stride(), width,
                              row.data());
    });
  }

  Type computed_;
  View out_;
  View input_;
};

// values (..., k) and indices (..., k) of the largest of input (..., n), the largest first if `sorted`. Among equal
// values it takes those that PyTorch takes: the same searches of the standard library, chosen by the same sizes.
class TopK {
 public:
  TopK(View values, View indices, View input, bool largest, bool sorted)
      : largest_(largest),
        sorted_(sorted),
        values_(std::move(values)),
        indices_(std::move(indices)),
        input_(std::move(input)) {}

  void operator()() const {
    using Pair = std::pair<double, std::int64_t>;
    const std::int64_t width = input_.last_size(), k = values_.last_size();
    std::vector<Pair> queue(static_cast<std::size_t>(width));
    std::vector<double> row(static_cast<std::size_t>(width));
    std::vector<std::int64_t> chosen(static_cast<std::size_t>(k));
    const auto first = [this](const Pair& a, const Pair& b) { return precedes(a.first, b.first); };
    const std::array<const View*, 3> views{&input_, &values_, &indices_};
    for_each_index(input_.sizes, input_.dims() - 1, views, [&](const std::array<std::int64_t, 3>& offsets) {
      Blocks<double>::load(input_.data + offsets[0] * bytes_of(input_.type), input_.type, input_.last_stride(), width,
                           row.data());
      for (std::size_t index = 0; index < queue.size(); ++index)
        queue[index] = {row[index], static_cast<std::int64_t>(index)};
      if (k > 0 && k * kFewOf <= width) {
        std::partial_sort(queue.begin(), queue.begin() + k, queue.end(), first);
      } else if (k > 0) {
        std::nth_element(queue.begin(), queue.begin() + k - 1, queue.end(), first);
        if (sorted_) std::sort(queue.begin(), queue.begin() + k - 1, first);
      }
      for (std::size_t index = 0; index < chosen.size(); ++index) {
        row[index] = queue[index].first;
        chosen[index] = queue[index].second;
      }
      Blocks<double>::store(values_.data + offsets[1] * bytes_of(values_.type), values_.type, values_.last_stride(), k,
                            row.data());
      Blocks<std::int64_t>::store(indices_.data + offsets[2] * bytes_of(indices_.type), indices_.type,
                                  indices_.last_stride(), k, chosen.data());
    });
  }

 private:
  static constexpr std::int64_t kFewOf = 64;

  // A NaN counts as the largest.
  bool precedes(double a, double b) const {
    const bool a_is_nan = a != a, b_is_nan = b != b;
    if (largest_) return (a_is_nan && !b_is_nan) || a > b;
    return (!a_is_nan && b_is_nan) || a < b;
  }

  bool largest_;
  bool sorted_;
  View values_;
  View indices_;
  View input_;
};

}  // namespace ktc::step::inline KTC_UNIT
