// A sweep: which panels and groups its epilogue is called for, in which order, and with which sums.
#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "check.hpp"
#include "ktc/concepts.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/panel_source.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/panel.hpp"

namespace unit_tests {
namespace {

using namespace ktc;

constexpr std::int64_t kExperts = 3;
constexpr std::int64_t kPanels = 6;
constexpr std::int64_t kContraction = 256;

struct alignas(64) Line {
  bf16 values[32];
};

// Packed weights of all experts.
struct Weights {
  Weights() : lines(kExperts * kPanels * kContraction) {
    Random random(1);
    for (Line& line : lines) {
      for (bf16& value : line.values) value = bf16(random.normal());
    }
  }
  PanelPlaces places() const {
    constexpr std::int64_t kBytes = kContraction * kPanelWidth * std::int64_t{sizeof(bf16)};
    PanelPlaces places(kBytes);
    places.add(reinterpret_cast<const std::byte*>(lines.data()), kPanels * kBytes, {0, kPanels});
    return places;
  }
  float at(std::int64_t expert, std::int64_t output, std::int64_t k) const {
    const bf16* panel = lines.front().values + (expert * kPanels + output / kPanelWidth) * kContraction * kPanelWidth;
    return static_cast<float>(panel[weight_format::panel_offset<bf16>(output % kPanelWidth, k)]);
  }
  std::vector<Line> lines;
};

// Writes down its calls, and keeps the sums by (slot, output). `complete` adds 1 to each.
struct Recorder {
  std::map<std::pair<std::int64_t, std::int64_t>, float>& sums;
  std::vector<std::int64_t>& open;  // the panel that has begun, if any
  std::int64_t& announced;

  void begin(PanelPart part) const {
    CHECK(open.empty());
    open.push_back(part.panel);
  }
  void prefetch(const SlotGroup&, PanelPart) const { ++announced; }
  void complete(Isa&, const SlotGroup& group, PanelPart part, float* tile) const {
    CHECK(open == std::vector<std::int64_t>{part.panel});
    for (std::int64_t i = 0; i < group.rows * kPanelWidth; ++i) tile[i] += 1.0f;
  }
  void operator()(const SlotGroup& group, PanelPart part, const float* tile) const {
    for (int row = 0; row < group.rows; ++row) {
      for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
        const bool is_new = sums.emplace(std::pair(group.first_slot + row, part.panel * kPanelWidth + lane),
                                         tile[row * kPanelWidth + lane])
                                .second;
        CHECK(is_new);
      }
    }
  }
  void end(PanelPart part) const {
    CHECK(open == std::vector<std::int64_t>{part.panel});
    open.clear();
  }
};
static_assert(SweepEpilogue<Recorder, Isa>);

// Some tokens for each expert: none, few or many of them.
template <bool kTransposed>
void check_sweep(const Weights& weights, const std::vector<std::int64_t>& tokens_of) {
  std::vector<std::int64_t> experts;
  for (std::size_t expert = 0; expert < tokens_of.size(); ++expert) {
    experts.insert(experts.end(), static_cast<std::size_t>(tokens_of[expert]), static_cast<std::int64_t>(expert));
  }
  const auto slots = static_cast<std::int64_t>(experts.size());
  const Routing routing(experts.data(), slots, 1, kExperts,
                        {.most = Isa::kMaxRows, .least = Isa::kBlocked ? Isa::kStreamRows + 1 : 0});
  constexpr std::int64_t kWidth = kTransposed ? kPanels * kPanelWidth : kContraction;
  constexpr std::int64_t kOutputs = kTransposed ? kContraction : kPanels * kPanelWidth;
  Random random(2);
  std::vector<bf16> rows(static_cast<std::size_t>(slots * kWidth));
  for (bf16& value : rows) value = bf16(random.normal());
  std::vector<Line> packed(static_cast<std::size_t>(slots * kWidth / 32)), scratch(2 * kPanels * kPanelWidth);
  const auto num_groups = static_cast<std::int64_t>(routing.groups().size());
  gather_slots<Isa>(routing, MatrixView<const bf16>(rows.data(), slots, kWidth), kWidth, {0, num_groups},
                    packed.front().values);

  const StoredPanels<Isa> stored(weights.places(), kContraction, nullptr);
  struct alignas(64) Sums {
    float values[16];
  };
  std::vector<Sums> sums_at_hand_W(static_cast<std::size_t>(sums_at_hand<Isa>() / 16));
  std::map<std::pair<std::int64_t, std::int64_t>, float> sums;
  std::vector<std::int64_t> open;
  std::int64_t announced = 0;
  const auto run = [&](auto panels) {
    const PanelSet set{kOutputs / kPanelWidth, kWidth, PanelTurns::kByExpert, 1, run_rows<decltype(panels)>()};
    const PanelQueues<Isa> queues(routing, set, 1);
    sweep<Isa>(routing, queues.of(0), panels, packed.front().values, sums_at_hand_W.front().values,
               Recorder{sums, open, announced});
  };
  if constexpr (kTransposed) {
    run(TransposedPanels<Isa>(stored, kPanels, scratch.front().values));
  } else {
    run(stored);
  }
  CHECK(open.empty());
  CHECK(announced == num_groups * kOutputs / kPanelWidth);
  CHECK(static_cast<std::int64_t>(sums.size()) == slots * kOutputs);
  for (const auto& [place, computed] : sums) {
    const auto [slot, output] = place;
    const std::int64_t expert = experts[static_cast<std::size_t>(routing.token(slot))];
    double expected = 1;
    for (std::int64_t k = 0; k < kWidth; ++k) {
      const auto value = static_cast<double>(rows[static_cast<std::size_t>(routing.token(slot) * kWidth + k)]);
      expected +=
          value * static_cast<double>(kTransposed ? weights.at(expert, k, output) : weights.at(expert, output, k));
    }
    CHECK_NEAR(computed, expected, 2e-4);
  }
}

const Test stored("sweep: stored panels, few and many rows of an expert", [] {
  Isa::require();
  const Weights weights;
  check_sweep<false>(weights, {1, 0, 1});
  check_sweep<false>(weights, {3, 4, 2});
  check_sweep<false>(weights, {0, 70, 5});
});

const Test transposed("sweep: panels transposed beside the products", [] {
  Isa::require();
  const Weights weights;
  check_sweep<true>(weights, {1, 0, 1});
  check_sweep<true>(weights, {17, 3, 40});
});

// Panels of zeros that write down which one is multiplied, and which one is then fetched.
struct Followed : StoredPanels<Isa> {
  static constexpr int kStreamRows = 6;
  static constexpr bool kMultipliesCodes = true;
  struct Call {
    PanelPart part;
    PanelPart next;
  };

  explicit Followed(std::vector<Call>& calls)
      : StoredPanels<Isa>(PanelPlaces(0), kContraction, nullptr), calls_(&calls), zeros_(kContraction) {}

  Ahead ahead(PanelPart, PanelPart, std::int64_t) const { return {}; }
  const bf16* current(PanelPart part) const {
    calls_->push_back({part, {-1, -1, 0, 0}});
    return zeros_.front().values;
  }
  void multiply_codes(const SlotGroup& group, PanelPart part, PanelPart next, const bf16*, float* tile) const {
    calls_->push_back({part, next});
    std::fill(tile, tile + group.rows * kPanelWidth, 0.0f);
  }

 private:
  std::vector<Call>* calls_;
  std::vector<Line> zeros_;
};

struct Ignored {
  void begin(PanelPart) const {}
  void end(PanelPart) const {}
  void prefetch(const SlotGroup&, PanelPart) const {}
  void complete(Isa&, const SlotGroup&, PanelPart, float*) const {}
  void operator()(const SlotGroup&, PanelPart, const float*) const {}
};

const Test followed("sweep: what is fetched beside a panel of codes is multiplied after it", [] {
  Isa::require();
  constexpr std::int64_t kMany = 21;
  const auto is = [](PanelPart a, PanelPart b) { return a.expert == b.expert && a.panel == b.panel; };
  for (const auto& tokens_of : std::vector<std::vector<int>>{{1, 40, 3}, {2, 5, 0}, {6, 6, 1}}) {
    std::vector<std::int64_t> experts;
    for (std::size_t expert = 0; expert < tokens_of.size(); ++expert) {
      experts.insert(experts.end(), static_cast<std::size_t>(tokens_of[expert]), static_cast<std::int64_t>(expert));
    }
    const auto slots = static_cast<std::int64_t>(experts.size());
    const Routing routing(experts.data(), slots, 1, kExperts,
                          {.most = Isa::kMaxRows, .least = Isa::kBlocked ? Isa::kStreamRows + 1 : 0});
    for (const int workers : {1, 2}) {  // one of them works; runs of several panels, and single ones
      const PanelQueues<Isa> queues(routing, {kMany, kContraction, PanelTurns::kNone, 1, kRunRows}, workers);
      std::vector<Line> rows(static_cast<std::size_t>(slots * kContraction / 32));
      std::vector<Line> sums(static_cast<std::size_t>(sums_at_hand<Isa>() / 16));
      std::vector<Followed::Call> calls;
      sweep<Isa>(routing, queues.of(0), Followed(calls), rows.front().values,
                 reinterpret_cast<float*>(sums.front().values), Ignored{});
      for (std::size_t call = 0; call < calls.size(); ++call) {
        std::size_t after = call + 1;  // groups of an expert share a panel
        while (after < calls.size() && is(calls[after].part, calls[call].part)) ++after;
        const PanelPart expected = after < calls.size() ? calls[after].part : calls[call].part;
        CHECK(calls[call].next.expert < 0 || is(calls[call].next, expected));
      }
      CHECK(calls.size() >= static_cast<std::size_t>(kMany * 2));
    }
  }
});

}  // namespace
}  // namespace unit_tests
