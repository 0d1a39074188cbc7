// Calls of kernels for linear layers.
#define KTC_UNIT stress_linear

#include "ktc/interface/linear.hpp"

#include <stdexcept>

#include "calls.hpp"
#include "ktc/interface/packed_linear.hpp"
#include "ktc/shape.hpp"
#include "memory.hpp"

namespace stress {
namespace {

using namespace ktc;

struct Case {
  std::int64_t rows;
  std::int64_t inputs;  // of a packed layer: whole blocks
  std::int64_t outputs;
  bool biased = false;
};

constexpr Case kFewRows[] = {{1, 1, 1, true},    {1, 70, 37, true}, {2, 33, 65},        {3, 5, 1, true},
                             {4, 129, 40, true}, {7, 64, 96},       {8, 257, 17, true}, {0, 16, 16}};
constexpr Case kManyRows[] = {{9, 70, 37, true}, {40, 33, 65}, {65, 129, 40, true}, {1, 1, 1}, {130, 64, 32}};
constexpr Case kPacked[] = {{1, 1, 1, true},     {2, 70, 37, true}, {5, 256, 33}, {7, 96, 64, true},
                            {40, 160, 65, true}, {130, 32, 40},     {0, 32, 32}};

std::string name_of(const char* operation, const Case& which) {
  return std::string(operation) + " " + std::to_string(which.rows) + " x " + std::to_string(which.inputs) + " to " +
         std::to_string(which.outputs);
}

template <class Element>
struct Layer {
  Layer(const LinearEntry& entry, const Case& which, bool transposed)
      : kernel(entry.make()), which(which), transposed(transposed) {
    std::mt19937 random(3);
    x = random_values<Element>(random, which.rows * (transposed ? which.outputs : which.inputs), 1);
    weight = random_values<Element>(random, which.inputs * which.outputs, 1);
    bias = random_values<Element>(random, transposed ? which.inputs : which.outputs, 1);
  }

  Written run(Engine& engine, bool many) const {
    std::vector<Element> out(static_cast<std::size_t>(which.rows * (transposed ? which.inputs : which.outputs)));
    const LinearArguments arguments{.x = x.data(),
                                    .weight = weight.data(),
                                    .bias = which.biased ? bias.data() : nullptr,
                                    .out = out.data(),
                                    .rows = which.rows,
                                    .inputs = which.inputs,
                                    .outputs = which.outputs};
    if (many) {
      kernel->multiply(engine, arguments, transposed);
    } else {
      kernel->forward(engine, arguments);
    }
    Written written;
    append(written, out);
    return written;
  }

  std::unique_ptr<LinearKernel> kernel;
  Case which;
  bool transposed;
  std::vector<Element> x, weight, bias;
};

template <class Element>
Call call_of(const LinearEntry& entry, const Case& which, bool many, bool transposed) {
  const auto layer = std::make_shared<Layer<Element>>(entry, which, transposed);
  return {.name = name_of(many ? (transposed ? "multiply transposed" : "multiply") : "forward", which),
          .run = [layer, many](Engine& engine, int) { return layer->run(engine, many); }};
}

struct PackedLayer {
  PackedLayer(const PackedLinearEntry& entry, const StoredBlocks& stored, Case of) : kernel(entry.make()), which(of) {
    which.inputs = round_up(which.inputs, std::max<std::int64_t>(stored.weights, 1));
    std::mt19937 random(4);
    packed = aligned(static_cast<std::size_t>(kernel->packed_bytes(which.inputs, which.outputs)));
    const auto blocks = random_blocks(random, stored, which.inputs * which.outputs);
    kernel->pack(packed.get(), blocks.data(), which.outputs, which.inputs / stored.weights * stored.bytes);
    std::vector<bf16> back(static_cast<std::size_t>(which.inputs * which.outputs));
    kernel->unpack(packed.get(), back.data(), which.inputs, which.outputs);
    x = random_values<bf16>(random, which.rows * which.inputs, 1);
    bias = random_values<bf16>(random, which.outputs, 1);
  }

  Written run(Engine& engine) const {
    std::vector<bf16> out(static_cast<std::size_t>(which.rows * which.outputs));
    kernel->forward(engine, {.x = x.data(),
                             .packed = packed.get(),
                             .bias = which.biased ? bias.data() : nullptr,
                             .out = out.data(),
                             .rows = which.rows,
                             .inputs = which.inputs,
                             .outputs = which.outputs});
    Written written;
    append(written, out);
    return written;
  }

  std::unique_ptr<PackedLinearKernel> kernel;
  Case which;
  Bytes packed;
  std::vector<bf16> x, bias;
};

}  // namespace

std::vector<Call> calls_of(const LinearEntry& entry, const Facts& facts) {
  std::vector<Call> calls;
  with_element(facts.element, [&]<class Element>(Element) {
    for (const Case& which : kFewRows) calls.push_back(call_of<Element>(entry, which, false, false));
    if constexpr (std::is_same_v<Element, bf16>) {
      for (const Case& which : kManyRows) {
        for (const bool transposed : {false, true}) calls.push_back(call_of<Element>(entry, which, true, transposed));
      }
    }
  });
  return calls;
}

std::vector<Call> calls_of(const PackedLinearEntry& entry, const Facts& facts) {
  std::vector<Call> calls;
  for (const Case& which : kPacked) {
    const auto layer = std::make_shared<PackedLayer>(entry, facts.first, which);
    calls.push_back(
        {.name = name_of("forward", which), .run = [layer](Engine& engine, int) { return layer->run(engine); }});
  }
  return calls;
}

}  // namespace stress
