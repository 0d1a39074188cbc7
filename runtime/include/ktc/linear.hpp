// y = x W^T + b for a handful of rows of x: the product of a linear layer when one token is decoded. W is read as
// PyTorch stores it. So there is one copy of it, and training and merged adapters see the same bytes.
//
// An output is one dot product along a row of W, summed in fp32 in an order that only the number of inputs decides:
// neither the threads nor the other rows of x change a bit. Memory is the limit, and a row of W is loaded once for up
// to four rows of x; the others find it in a cache.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "ktc/element.hpp"
#include "ktc/engine.hpp"
#include "ktc/linear_panels.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc {

// x (rows, inputs), weight (outputs, inputs), bias (outputs) or null, and out (rows, outputs) are contiguous and of the
// kernel's element type; nothing need be aligned.
struct LinearArguments {
  const void* x;
  const void* weight;
  const void* bias;
  void* out;
  std::int64_t rows;
  std::int64_t inputs;
  std::int64_t outputs;
};

class LinearKernel {
 public:
  virtual ~LinearKernel() = default;
  virtual void forward(Engine& engine, const LinearArguments& arguments) const = 0;
  // The same for many rows, and with `transposed` x (rows, outputs) times W. Throws std::invalid_argument for elements
  // other than bf16.
  virtual void multiply(Engine& engine, const LinearArguments& arguments, bool transposed) const = 0;
};

// How a library lists a kernel for linear layers: its name, and the function that makes one.
struct LinearEntry {
  const char* name;
  std::unique_ptr<LinearKernel> (*make)();
};

template <class Kernel>
std::unique_ptr<LinearKernel> make_linear() {
  return std::make_unique<Kernel>();
}

// Neighbours of W as fp32.
template <class Lanes, class Element>
[[gnu::always_inline]] inline Lanes widened(const Element* source) {
  if constexpr (std::is_same_v<Element, float>) {
    return Lanes::load(source);
  } else if constexpr (requires { Lanes::from_elements(source); }) {
    return Lanes::from_elements(source);
  } else {
    float values[kHalfPanel];
    for (int lane = 0; lane < kHalfPanel; ++lane) values[lane] = static_cast<float>(source[lane]);
    return Lanes::load(values);
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

template <class Isa, class Element>
class Linear final : public LinearKernel {
  using Lanes = typename Isa::Lanes;

 public:
  void forward(Engine& engine, const LinearArguments& arguments) const override {
    const std::int64_t padded = (arguments.inputs + kHalfPanel - 1) / kHalfPanel * kHalfPanel;
    engine.exclusively([&](const Team& team, Workspace& workspace) {
      Region<float> x(arguments.rows * padded);
      workspace.lay_out(x);
      widen_rows(arguments, x.data(), padded);
      if (fetches_by_lines()) {
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
  static constexpr int kRowsTogether = 4;       // of x, for which a row of W is loaded once
  // Sums of an output, side by side: a single chain of additions would wait for its own latency, not for memory.
  static constexpr int kChains = Isa::kMaxRows >= 12 ? 4 : 2;

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

  // As fp32, each row followed by zeros up to whole lanes.
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

    // One output after the other: a row of W is then one stream of memory, which processors prefetch best.
    template <int kRows>
    void rows(std::int64_t row, Range outputs) const {
      for (std::int64_t output = outputs.begin; output < outputs.end; ++output) dot<kRows>(row, output);
    }

    template <int kRows>
    [[gnu::noinline]] void dot(std::int64_t row, std::int64_t output) const {
      constexpr std::int64_t kStep = kChains * kHalfPanel;
      const std::int64_t inputs = arguments.inputs, whole = inputs / kHalfPanel * kHalfPanel;
      const Element* weight = static_cast<const Element*>(arguments.weight) + output * inputs;
      const float* values = x + row * padded;
      Sum sums[kRows][kChains];
      const auto add = [&](int chain, const Element* at, std::int64_t column) {
        const Lanes weights = widened<Lanes>(at);
#pragma GCC unroll 4
        for (int each = 0; each < kRows; ++each) {
          Lanes& sum = sums[each][chain].lanes;
          sum = fused_multiply_add(weights, Lanes::load(values + each * padded + column), sum);
        }
      };
      std::int64_t column = 0;
      for (; column + kStep <= whole; column += kStep) {
        Fetched::template fetch<kStep* static_cast<std::int64_t>(sizeof(Element))>(weight + column);
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) {
          const std::int64_t at = column + chain * kHalfPanel;
          add(chain, weight + at, at);
        }
      }
      for (; column < whole; column += kHalfPanel) add(0, weight + column, column);
      if (whole < inputs) {
        Element rest[kHalfPanel] = {};
        std::copy(weight + whole, weight + inputs, rest);
        add(0, rest, whole);
      }
      for (int each = 0; each < kRows; ++each) {
        for (int chain = 1; chain < kChains; ++chain) {
          sums[each][0].lanes = sums[each][0].lanes + sums[each][chain].lanes;
        }
        put(row + each, output, sums[each][0].lanes.sum());
      }
    }

    void put(std::int64_t row, std::int64_t output, float sum) const {
      const auto* bias = static_cast<const Element*>(arguments.bias);
      if (bias != nullptr) sum += static_cast<float>(bias[output]);
      static_cast<Element*>(arguments.out)[row * arguments.outputs + output] = narrowed<Element>(sum);
    }
  };
};

}  // namespace ktc
