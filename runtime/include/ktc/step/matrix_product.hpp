// Products of small matrices in a decoding step, as routers and absorbed up-projections have them: the weights are read
// once, by the threads of the engine where there are many.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "ktc/concepts.hpp"
#include "ktc/linear.hpp"
#include "ktc/shape.hpp"
#include "ktc/step/view.hpp"
#include "ktc/team.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::step::inline KTC_UNIT {

// out (B, M, N) = a (B, M, K) b (B, K, N) + bias (B, M, N), which may have no data, summed in fp32 (fp64 for doubles)
// and rounded once. An output is one sum in an order that the sizes decide, so the number of threads changes no bit.
template <InstructionSet Isa>
class MatrixProduct {
  using Lanes = typename Isa::Lanes;

 public:
  MatrixProduct(Engine& engine, View out, View a, View b, View bias)
      : engine_(engine), out_(std::move(out)), a_(std::move(a)), b_(std::move(b)), bias_(std::move(bias)) {
    // Rows of the larger factor are read from memory, the smaller one is kept as fp32.
    if (out_.sizes[1] > out_.sizes[2]) {
      for (View* view : {&out_, &a_, &b_, &bias_}) {
        std::swap(view->sizes[1], view->sizes[2]);
        std::swap(view->strides[1], view->strides[2]);
      }
      std::swap(a_, b_);
    }
  }

  void operator()() const {
    if (out_.type == Type::kFp64) return by_element<double>();
    const std::int64_t K = a_.sizes[2];
    if (b_.strides[1] == 1 && K > 1) return with_element(b_.type, [&]<class Element>(Element) { rows<Element>(); });
    if (b_.strides[2] == 1) return with_element(b_.type, [&]<class Element>(Element) { columns<Element>(); });
    by_element<float>();
  }

 private:
  static constexpr std::int64_t kAtATime = 16;             // outputs that a worker takes together
  static constexpr std::int64_t kBlock = 256;              // columns
  static constexpr std::int64_t kBytesPerThread = 131072;  // with less, waking a thread costs more than it saves

  template <class Computed>
  void by_element() const {
    const std::int64_t K = a_.sizes[2];
    for (std::int64_t batch = 0; batch < out_.sizes[0]; ++batch) {
      for (std::int64_t m = 0; m < out_.sizes[1]; ++m) {
        for (std::int64_t n = 0; n < out_.sizes[2]; ++n) {
          Computed sum{};
          for (std::int64_t k = 0; k < K; ++k)
            sum += value<Computed>(a_, batch, m, k) * value<Computed>(b_, batch, k, n);
          put(batch, m, n, sum);
        }
      }
    }
  }

  template <class Computed>
  static Computed value(const View& view, std::int64_t batch, std::int64_t row, std::int64_t column) {
    Computed element{};
    const std::int64_t at = batch * view.strides[0] + row * view.strides[1] + column * view.strides[2];
    Blocks<Computed>::load(view.data + at * bytes_of(view.type), view.type, 1, 1, &element);
    return element;
  }

  template <class Computed>
  void put(std::int64_t batch, std::int64_t m, std::int64_t n, Computed sum) const {
    if (bias_.data != nullptr) sum += value<Computed>(bias_, batch, m, n);
    const std::int64_t at = batch * out_.strides[0] + m * out_.strides[1] + n * out_.strides[2];
    Blocks<Computed>::store(out_.data + at * bytes_of(out_.type), out_.type, 1, 1, &sum);
  }

  // `body(batch, range of outputs)` in pieces of `width`, on as many threads as the bytes of `b` are worth.
  template <class Body>
  void shared(std::int64_t width, Body&& body) const {
    const std::int64_t N = out_.sizes[2], pieces = (N + width - 1) / width, all = out_.sizes[0] * pieces;
    const auto piece = [&](std::int64_t index) {
      const std::int64_t begin = index % pieces * width;
      body(index / pieces, Range{begin, std::min(begin + width, N)});
    };
    if (b_.elements() * bytes_of(b_.type) < 2 * kBytesPerThread || engine_.threads() == 1) {
      for (std::int64_t index = 0; index < all; ++index) piece(index);
      return;
    }
    exclusively(engine_, [&](const Team& team, Workspace&) {
      std::atomic<std::int64_t> next{0};
      team.run([&](const Worker&) {
        for (std::int64_t index = next.fetch_add(1); index < all; index = next.fetch_add(1)) piece(index);
      });
    });
  }

  // a as fp32: (B, M, K padded to whole lanes by zeros).
  std::vector<float> widened_a(std::int64_t padded) const {
    const std::int64_t B = a_.sizes[0], M = a_.sizes[1], K = a_.sizes[2];
    std::vector<float> rows(static_cast<std::size_t>(B * M * padded), 0.0f);
    for (std::int64_t batch = 0; batch < B; ++batch) {
      for (std::int64_t m = 0; m < M; ++m) {
        const std::int64_t at = batch * a_.strides[0] + m * a_.strides[1];
        Blocks<float>::load(a_.data + at * bytes_of(a_.type), a_.type, a_.strides[2], K,
                            rows.data() + (batch * M + m) * padded);
      }
    }
    return rows;
  }

  // Neighbours along K: dot products.
  template <class Element>
  void rows() const {
    if constexpr (std::is_same_v<Element, bf16> || std::is_same_v<Element, fp16> || std::is_same_v<Element, float>) {
      const std::int64_t M = a_.sizes[1], K = a_.sizes[2], padded = round_up(K, kHalfPanel);
      const std::vector<float> a = widened_a(padded);
      shared(kAtATime, [&](std::int64_t batch, Range outputs) {
        for (std::int64_t n = outputs.begin; n < outputs.end; ++n) {
          const auto* weights = reinterpret_cast<const Element*>(b_.data) + batch * b_.strides[0] + n * b_.strides[2];
          for (std::int64_t m = 0; m < M; ++m) put(batch, m, n, dot(weights, a.data() + (batch * M + m) * padded, K));
        }
      });
    } else {
      by_element<float>();
    }
  }

  template <class Element>
  static float dot(const Element* weights, const float* a, std::int64_t K) {
    const std::int64_t whole = K / kHalfPanel * kHalfPanel, fours = K / (4 * kHalfPanel) * (4 * kHalfPanel);
    Lanes sums[4]{Lanes(0.0f), Lanes(0.0f), Lanes(0.0f), Lanes(0.0f)};
    std::int64_t k = 0;
    for (; k < fours; k += 4 * kHalfPanel) {
#pragma GCC unroll 4
      for (int chain = 0; chain < 4; ++chain) {
        const std::int64_t at = k + chain * kHalfPanel;
        sums[chain] = fused_multiply_add(ktc::widened<Lanes>(weights + at), Lanes::load(a + at), sums[chain]);
      }
    }
    for (; k < whole; k += kHalfPanel) {
      sums[0] = fused_multiply_add(ktc::widened<Lanes>(weights + k), Lanes::load(a + k), sums[0]);
    }
    if (whole < K) {
      Element rest[kHalfPanel] = {};
      std::copy(weights + whole, weights + K, rest);
      sums[0] = fused_multiply_add(ktc::widened<Lanes>(rest), Lanes::load(a + whole), sums[0]);
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])).sum();
  }

  // Neighbours along N: rows of b are added up.
  template <class Element>
  void columns() const {
    const std::int64_t M = a_.sizes[1], K = a_.sizes[2], padded = round_up(K, kHalfPanel);
    const std::vector<float> a = widened_a(padded);
    shared(kBlock, [&](std::int64_t batch, Range outputs) {
      alignas(64) float sums[kBlock];
      alignas(64) float row[kBlock];
      const std::int64_t count = outputs.end - outputs.begin;
      for (std::int64_t m = 0; m < M; ++m) {
        std::fill(sums, sums + count, 0.0f);
        for (std::int64_t k = 0; k < K; ++k) {
          const std::int64_t at = batch * b_.strides[0] + k * b_.strides[1] + outputs.begin;
          Blocks<float>::load(b_.data + at * bytes_of(b_.type), b_.type, 1, count, row);
          const float factor = a[static_cast<std::size_t>((batch * M + m) * padded + k)];
          for (std::int64_t column = 0; column < count; ++column) sums[column] += factor * row[column];
        }
        for (std::int64_t column = 0; column < count; ++column) put(batch, m, outputs.begin + column, sums[column]);
      }
    });
  }

  Engine& engine_;
  View out_;
  View a_;
  View b_;
  View bias_;
};

}  // namespace ktc::step::inline KTC_UNIT
