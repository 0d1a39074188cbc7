// Calls of routers, forward and backward, by the names of their arguments.
#define KTC_UNIT stress_router

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

#include "calls.hpp"
#include "ktc/interface/functions.hpp"
#include "memory.hpp"

namespace stress {
namespace {

using namespace ktc;

constexpr std::int64_t kRows[] = {0, 1, 7, 33, 130};

using Arguments = std::map<std::string_view, std::int64_t>;

void call(const FunctionsEntry& entry, std::string_view name, Engine& engine, const Arguments& arguments) {
  const auto* const end = entry.functions + entry.num_functions;
  const auto* const function =
      std::find_if(entry.functions, end, [&](const KernelFunction& of) { return of.name == name; });
  if (function == end) throw std::invalid_argument("no such function");
  std::vector<std::int64_t> values;
  for (std::size_t at = 0; at < function->num_arguments; ++at) {
    values.push_back(arguments.at(function->arguments[at]));
  }
  function->call(engine, values.data());
}

template <class Values>
std::int64_t address(const Values& values) {
  return reinterpret_cast<std::int64_t>(values.data());
}

template <class Logit, class Weight>
struct Rows {
  Rows(const FunctionsEntry& entry, const Facts& facts, std::int64_t rows) : entry(entry), facts(facts), rows(rows) {
    std::mt19937 random(5);
    logits = random_values<Logit>(random, rows * facts.experts, 1);
    bias = random_values<float>(random, facts.experts, 0.25F);
    given = random_values<Weight>(random, rows * facts.top_k, 1);
  }

  Written run(Engine& engine) const {
    std::vector<Weight> weights(given.size());
    std::vector<std::int64_t> indices(given.size());
    std::vector<Logit> gradient(logits.size());
    const Arguments arguments{{"logits", address(logits)},
                              {"bias", facts.biased ? address(bias) : 0},
                              {"weights", address(weights)},
                              {"indices", address(indices)},
                              {"weights_gradient", address(given)},
                              {"logits_gradient", address(gradient)},
                              {"rows", rows}};
    call(entry, "forward", engine, arguments);
    call(entry, "backward", engine, arguments);
    Written written;
    append(written, weights);
    append(written, indices);
    append(written, gradient);
    return written;
  }

  const FunctionsEntry& entry;
  Facts facts;
  std::int64_t rows;
  std::vector<Logit> logits;
  std::vector<float> bias;
  std::vector<Weight> given;
};

}  // namespace

std::vector<Call> calls_of(const FunctionsEntry& entry, const Facts& facts) {
  std::vector<Call> calls;
  with_element(facts.element, [&]<class Logit>(Logit) {
    with_element(facts.weights, [&]<class Weight>(Weight) {
      for (const std::int64_t rows : kRows) {
        const auto of_rows = std::make_shared<Rows<Logit, Weight>>(entry, facts, rows);
        calls.push_back({.name = std::to_string(rows) + " rows",
                         .run = [of_rows](Engine& engine, int) { return of_rows->run(engine); }});
      }
    });
  });
  return calls;
}

}  // namespace stress
