// y = x W^T + b for a handful of rows of x: the product of a linear layer when one token is decoded. W is read as
// PyTorch stores it. So there is one copy of it, and training and merged adapters see the same bytes.
//
// An output is one dot product along a row of W, summed in fp32 in an order that only the number of inputs decides:
// neither the threads nor the other rows of x change a bit. Memory is the limit, and W is loaded once for up to four
// rows of x; the others find it in a cache. For three rows and more, or where they would fill L1, 16 outputs are summed
// stretch by stretch of the inputs, so that x stays in L1 beside the lines of W that are fetched ahead.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/interface/linear.hpp"
#include "ktc/linear_panels.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

template <class Kernel>
std::unique_ptr<LinearKernel> make_linear() {
  return std::make_unique<Kernel>();
}

// Neighbours of W as fp32.
template <class Lanes, class Element>
[[gnu::always_inline]] inline Lanes widened(const Element* source) {
  if constexpr (std::is_same_v<Element, float>) {
    return Lanes::load(source);
  } else {
    return Lanes::from_elements(source);
  }
}

// To nearest even; a value too large for the element becomes infinite.
template <class Element>
Element narrowed(float value) {
  if constexpr (std::is_same_v<Element, weight_format::fp16>)
    return weight_format::fp16::nearest(value);
  else
    return Element(value);
}

template <InstructionSet Isa, class Element>
class Linear final : public LinearKernel {
  using Lanes = typename Isa::Lanes;

 public:
  void forward(Engine& engine, const LinearArguments& arguments) const override {
    const std::int64_t padded = (arguments.inputs + kHalfPanel - 1) / kHalfPanel * kHalfPanel;
    exclusively(engine, [&](const Team& team, Workspace& workspace) {
      Region<float> x(arguments.rows * padded);
      workspace.lay_out(x);
      widen_rows(arguments, x.data(), padded);
      if (fetches_into_l2()) {
        run(team, Product<FetchedLines<2>>{arguments, x.data(), padded});
      } else {
        run(team, Product<FetchedPages>{arguments, x.data(), padded});
      }
    });
  }

  void multiply(Engine& engine, const LinearArguments& arguments, bool transposed) const override {
    if constexpr (std::is_same_v<Element, bf16>) {
      PanelProduct<Isa>::run(engine, {.x = static_cast<const bf16*>(arguments.x),
                                      .weight = static_cast<const bf16*>(arguments.weight),
                                      .bias = static_cast<const bf16*>(arguments.bias),
                                      .out = static_cast<bf16*>(arguments.out),
                                      .rows = arguments.rows,
                                      .contraction = transposed ? arguments.outputs : arguments.inputs,
                                      .columns = transposed ? arguments.inputs : arguments.outputs,
                                      .transposed = transposed});
    } else {
      throw std::invalid_argument("many rows are multiplied in bf16 only");
    }
  }

 private:
  static constexpr std::int64_t kAtATime = 16;  // outputs that a worker takes together
  // Independent sums of an output: a single chain of additions would be limited by its latency, not by memory.
  static constexpr int kChains = Isa::kMaxRows >= 12 ? 4 : 2;
  static constexpr std::int64_t kStep = kChains * kHalfPanel;
  // Rows of x that share a load of a row of W. Sums of four rows would fill all registers of AVX2.
  static constexpr int kRowsTogether = kChains == 4 ? 4 : 3;
  // The most bytes of x in a stretch. An L1 of 32 KB has space beside them for the lines that are fetched meanwhile.
  static constexpr std::int64_t kStretchBytes = 16384;
  static constexpr std::int64_t kBytesAhead = 8192;  // of W in L1; with 4 KB, four rows read 23 GB/s instead of 28

  template <class Fetched>
  struct Product;

  template <class Fetched>
  static void run(const Team& team, const Product<Fetched>& product) {
    const std::int64_t outputs = product.arguments.outputs;
    std::atomic<std::int64_t> next{0};
    team.run([&](const Worker&) {
      for (;;) {
        const std::int64_t begin = next.fetch_add(kAtATime, std::memory_order_relaxed);
        if (begin >= outputs) return;
        product.compute({begin, std::min(begin + kAtATime, outputs)});
      }
    });
  }

  // Widens x to fp32, with zeros after each row up to whole lanes.
  static void widen_rows(const LinearArguments& arguments, float* x, std::int64_t padded) {
    const auto* from = static_cast<const Element*>(arguments.x);
    for (std::int64_t row = 0; row < arguments.rows; ++row, from += arguments.inputs, x += padded) {
      std::transform(from, from + arguments.inputs, x, [](Element value) { return static_cast<float>(value); });
      std::fill(x + arguments.inputs, x + padded, 0.0f);
    }
  }

  struct Sum {
    Lanes lanes{0.0f};
  };

  template <class Fetched>
  struct Product {
    const LinearArguments& arguments;
    const float* x;
    std::int64_t padded;

    void compute(Range outputs) const {
      std::int64_t row = 0;
      for (; row + kRowsTogether <= arguments.rows; row += kRowsTogether) rows<kRowsTogether>(row, outputs);
      switch (arguments.rows - row) {
        case 3:
          return rows<3>(row, outputs);
        case 2:
          return rows<2>(row, outputs);
        case 1:
          return rows<1>(row, outputs);
        default:
          return;
      }
    }

    template <int kRows>
    void rows(std::int64_t row, Range outputs) const {
      constexpr std::int64_t kMostInputs = kStretchBytes / static_cast<std::int64_t>(kRows * sizeof(float));
      const std::int64_t inputs = arguments.inputs;
      if (kRows >= 3 || inputs > kMostInputs) {
        const std::int64_t stretches = std::max<std::int64_t>((inputs + kMostInputs - 1) / kMostInputs, 1);
        const std::int64_t steps = std::max<std::int64_t>((inputs + kStep - 1) / kStep, 1);
        return by_stretches<kRows>(row, outputs, (steps + stretches - 1) / stretches * kStep);
      }
      // One output after the other: a row of W is then one stream of memory, which processors prefetch best.
      for (std::int64_t output = outputs.begin; output < outputs.end; ++output) {
        dot<kRows, Fetched>(row, output, {0, inputs}, nullptr, weights_of(output));
      }
    }

    // All outputs for a stretch of the inputs, then for the next one. Where stretches end, the processor loses the
    // stream of memory, so each line of W is prefetched.
    template <int kRows>
    void by_stretches(std::int64_t row, Range outputs, std::int64_t stretch) const {
      const std::int64_t inputs = arguments.inputs;
      const std::int64_t ahead =
          std::max<std::int64_t>(kBytesAhead / (stretch * static_cast<std::int64_t>(sizeof(Element))), 1);
      alignas(kCacheLine) float sums[kAtATime * kRows * kStep];
      std::int64_t begin = 0;
      do {  // also without inputs, where an output is its bias
        const Range columns{begin, std::min(begin + stretch, inputs)};
        for (std::int64_t output = outputs.begin; output < outputs.end; ++output) {
          // The same columns of a later output; after the last output the next stretch, then the outputs that follow.
          const Element* fetched = weights_of(output + ahead);
          if (output + ahead >= outputs.end) {
            fetched += columns.end < inputs ? stretch - outputs.size() * inputs : -begin;
          }
          float* unfinished = sums + (output - outputs.begin) * kRows * kStep;
          dot<kRows, FetchedLines<3, 0>>(row, output, columns, unfinished, fetched);
        }
        begin += stretch;
      } while (begin < inputs);
    }

    // Sums begin as zeros in the first stretch, and as `unfinished` (rows, chains, lanes) in the others; all but the
    // last stretch leave them there. So the order of a sum does not depend on the stretches.
    template <int kRows, class FetchedHere>
    [[gnu::noinline]] void dot(std::int64_t row, std::int64_t output, Range columns, float* unfinished,
                               const Element* fetched) const {
      const std::int64_t inputs = arguments.inputs, whole = columns.end / kHalfPanel * kHalfPanel;
      const Element* weight = weights_of(output);
      const float* values = x + row * padded;
      Sum sums[kRows][kChains];
      const auto for_each_sum = [&](auto&& body) {
#pragma GCC unroll 4
        for (int of_x = 0; of_x < kRows; ++of_x) {
#pragma GCC unroll 4
          for (int chain = 0; chain < kChains; ++chain) {
            body(sums[of_x][chain].lanes, unfinished + of_x * kStep + chain * kHalfPanel);
          }
        }
      };
      const auto add = [&](int chain, const Element* at, std::int64_t column) {
        const Lanes weights = widened<Lanes>(at);
#pragma GCC unroll 4
        for (int of_x = 0; of_x < kRows; ++of_x) {
          Lanes& sum = sums[of_x][chain].lanes;
          sum = fused_multiply_add(weights, Lanes::load(values + of_x * padded + column), sum);
        }
      };
      if (columns.begin > 0) for_each_sum([](Lanes& sum, const float* at) { sum = Lanes::load(at); });
      std::int64_t column = columns.begin;
      for (; column + kStep <= whole; column += kStep) {
        FetchedHere::template fetch<kStep* static_cast<std::int64_t>(sizeof(Element))>(fetched + column);
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) {
          const std::int64_t at = column + chain * kHalfPanel;
          add(chain, weight + at, at);
        }
      }
      if (columns.end < inputs) return for_each_sum([](const Lanes& sum, float* at) { sum.store(at); });
      for (; column < whole; column += kHalfPanel) add(0, weight + column, column);
      if (whole < inputs) {
        Element rest[kHalfPanel] = {};
        std::copy(weight + whole, weight + inputs, rest);
        add(0, rest, whole);
      }
#pragma GCC unroll 4
      for (int of_x = 0; of_x < kRows; ++of_x) {
#pragma GCC unroll 4
        for (int chain = 1; chain < kChains; ++chain) {
          sums[of_x][0].lanes = sums[of_x][0].lanes + sums[of_x][chain].lanes;
        }
        put(row + of_x, output, sums[of_x][0].lanes.sum());
      }
    }

    const Element* weights_of(std::int64_t output) const {
      return static_cast<const Element*>(arguments.weight) + output * arguments.inputs;
    }

    void put(std::int64_t row, std::int64_t output, float sum) const {
      const auto* bias = static_cast<const Element*>(arguments.bias);
      if (bias != nullptr) sum += static_cast<float>(bias[output]);
      static_cast<Element*>(arguments.out)[row * arguments.outputs + output] = narrowed<Element>(sum);
    }
  };
};

}  // namespace ktc::inline KTC_UNIT
