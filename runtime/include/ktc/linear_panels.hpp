// The products of a linear layer with many rows, forward and the gradient of its input: out = x W^T + b, and out = x W.
//
// For processors that multiply fp32 and not bf16: rows of x and panels of W are widened to fp32 when they are packed,
// so that the inner loop only multiplies. W is read as PyTorch stores it, so there is one copy of it:
// each piece of a panel of 32 columns of the product is packed just before it is used, into a scratch that stays in L1.
//
// A value is one dot product, summed in fp32 in the order of the contraction and rounded once. Neither threads nor
// other rows change a bit.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/packed_slots.hpp"
#include "ktc/panel_outputs.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// x (rows, contraction), out (rows, columns), bias (columns) or null. The matrix is W (columns, contraction), or with
// `transposed` W (contraction, columns). All are contiguous; nothing need be aligned.
struct PanelArguments {
  const bf16* x;
  const bf16* weight;
  const bf16* bias;
  bf16* out;
  std::int64_t rows;
  std::int64_t contraction;
  std::int64_t columns;
  bool transposed;
};

// Rows of bf16 as fp32, the values of all rows at one k together: [k][row]. `rows` are addresses of the first k.
class WidenedRows {
 public:
  static void pack(const bf16* const* rows, int num_rows, std::int64_t size, float* target) {
    const std::int64_t whole = size / kHalfPanel * kHalfPanel;
    alignas(64) std::uint32_t pairs[kStretch / 2 * kPanelWidth];
    const bf16* from[kPanelWidth];
    for (std::int64_t k = 0; k < whole; k += kStretch) {
      const std::int64_t stretch = std::min(kStretch, whole - k);
      for (int row = 0; row < num_rows; ++row) from[row] = rows[row] + k;
      interleave<2>(from, num_rows, 0, stretch, reinterpret_cast<bf16*>(pairs));
      for (std::int64_t pair = 0; pair < stretch / 2; ++pair) {
        widen_pairs(pairs + pair * num_rows, num_rows, target + (k + 2 * pair) * num_rows);
      }
    }
    for (std::int64_t k = whole; k < size; ++k) {
      for (int row = 0; row < num_rows; ++row) target[k * num_rows + row] = static_cast<float>(rows[row][k]);
    }
  }

 private:
  static constexpr std::int64_t kStretch = 64;  // pairs of 32 rows are then 4 KB, in L1

  // A bf16 is the upper half of its fp32.
  static void widen_pairs(const std::uint32_t* pairs, int num_rows, float* target) {
    for (int row = 0; row < num_rows; ++row) target[row] = std::bit_cast<float>(pairs[row] << 16);
    target += num_rows;
    for (int row = 0; row < num_rows; ++row) target[row] = std::bit_cast<float>(pairs[row] & 0xffff0000);
  }
};

template <InstructionSet Isa>
class PanelProduct {
  using Lanes = typename Isa::Lanes;

 public:
  static void run(Engine& engine, const PanelArguments& arguments) {
    if (arguments.rows == 0) return;
    exclusively(engine, [&](const Team& team, Workspace& workspace) {
      const std::int64_t at_a_time = kRows * groups_at_a_time(arguments.contraction);
      Region<float> rows(std::min(arguments.rows, at_a_time) * arguments.contraction);
      Region<float> scratch(team.threads() * kScratch);
      workspace.lay_out(rows, scratch);
      // Blocks of nearly equal size, in whole groups.
      const std::int64_t blocks = (arguments.rows + at_a_time - 1) / at_a_time;
      const std::int64_t of_block = round_up((arguments.rows + blocks - 1) / blocks, kRows);
      for (std::int64_t first = 0; first < arguments.rows; first += of_block) {
        const Range block{first, std::min(first + of_block, arguments.rows)};
        const PanelProduct product(arguments, block, rows.data(), team.threads());
        std::atomic<std::int64_t> next{0};
        team.run([&](const Worker& worker) {
          product.pack_rows(Range::share(product.groups_, worker.index, worker.count));
          worker.barrier.arrive_and_wait();
          float* scratch_of_worker = scratch.data() + worker.index * kScratch;
          for (;;) {
            const std::int64_t task = next.fetch_add(1, std::memory_order_relaxed);
            if (task >= product.panels_ * product.parts_) return;
            product.compute(task / product.parts_, task % product.parts_, scratch_of_worker);
          }
        });
      }
    });
  }

 private:
  static constexpr int kRows = Isa::kFp32Rows;  // of a group
  static constexpr std::int64_t kTile = kRows * kPanelWidth;
  // Of the contraction: 32 KB of a panel, which stay in L1 for all groups.
  static constexpr std::int64_t kStretch = 256;
  // Rows that are packed together, to be read by all threads from L3: those of 16 MB. With fewer groups than the
  // least, packing a panel would take too much of the time. The plan counts on both
  // (ktc/model/kernels/working_memory.py).
  static constexpr std::int64_t kRowBytes = std::int64_t{16} << 20;
  static constexpr std::int64_t kMostGroups = 128;
  static constexpr std::int64_t kFewestGroups = 16;
  // A thread's own: a stretch of a panel, then the sums of all groups.
  static constexpr std::int64_t kScratch = kStretch * kPanelWidth + kMostGroups * kTile;
  static constexpr std::int64_t kTasksPerThread = 4;  // at least, so that threads end at nearly the same time
  static constexpr std::int64_t kLeastGroups = 8;     // of a task: fewer would not pay for packing its panel

  PanelProduct(const PanelArguments& arguments, Range block, float* rows, int threads)
      : arguments_(arguments),
        block_(block),
        rows_(rows),
        groups_((block.size() + kRows - 1) / kRows),
        panels_((arguments.columns + kPanelWidth - 1) / kPanelWidth),
        parts_(threads == 1 ? 1
                            : std::clamp((kTasksPerThread * threads + panels_ - 1) / panels_, std::int64_t{1},
                                         std::max(std::int64_t{1}, groups_ / kLeastGroups))) {}

  static std::int64_t groups_at_a_time(std::int64_t contraction) {
    constexpr std::int64_t kValue = sizeof(float);
    return std::clamp(kRowBytes / (contraction * kRows * kValue), kFewestGroups, kMostGroups);
  }

  int rows_of(std::int64_t group) const {
    return static_cast<int>(std::min<std::int64_t>(kRows, block_.size() - group * kRows));
  }

  void pack_rows(Range groups) const {
    for (std::int64_t group = groups.begin; group < groups.end; ++group) {
      const std::int64_t first = group * kRows;
      const bf16* rows[kRows];
      for (int row = 0; row < rows_of(group); ++row) {
        rows[row] = arguments_.x + (block_.begin + first + row) * arguments_.contraction;
      }
      WidenedRows::pack(rows, rows_of(group), arguments_.contraction, rows_ + first * arguments_.contraction);
    }
  }

  void compute(std::int64_t panel, std::int64_t part, float* scratch) const {
    const Range columns{panel * kPanelWidth, std::min((panel + 1) * kPanelWidth, arguments_.columns)};
    const Range groups = Range::share(groups_, static_cast<int>(part), static_cast<int>(parts_));
    float* const tiles = scratch + kStretch * kPanelWidth;
    std::fill_n(tiles, groups.size() * kTile, 0.0f);
    for (std::int64_t k = 0; k < arguments_.contraction; k += kStretch) {
      const Range stretch{k, std::min(k + kStretch, arguments_.contraction)};
      if (arguments_.transposed) {
        pack_columns(columns, stretch, scratch);
      } else {
        pack_outputs(columns, stretch, scratch);
      }
      for (std::int64_t group = groups.begin; group < groups.end; ++group) {
        const float* rows = rows_ + group * kRows * arguments_.contraction + k * rows_of(group);
        multiply_add(rows_of(group), stretch.size(), rows, scratch, tiles + (group - groups.begin) * kTile);
      }
    }
    for (std::int64_t group = groups.begin; group < groups.end; ++group) {
      for (int row = 0; row < rows_of(group); ++row) {
        const float* sums = tiles + (group - groups.begin) * kTile + row * kPanelWidth;
        put(sums, block_.begin + group * kRows + row, columns);
      }
    }
  }

  // Rows of W. Those that it lacks are the last one again: nothing reads their sums.
  void pack_outputs(Range outputs, Range stretch, float* packed) const {
    const bf16* rows[kPanelWidth];
    for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
      const std::int64_t output = std::min(outputs.begin + lane, outputs.end - 1);
      rows[lane] = arguments_.weight + output * arguments_.contraction + stretch.begin;
    }
    WidenedRows::pack(rows, kPanelWidth, stretch.size(), packed);
  }

  // Columns of W.
  void pack_columns(Range columns, Range stretch, float* packed) const {
    bf16 last[kPanelWidth];
    for (std::int64_t k = stretch.begin; k < stretch.end; ++k, packed += kPanelWidth) {
      const bf16* source = arguments_.weight + k * arguments_.columns + columns.begin;
      if (columns.size() < kPanelWidth) {
        std::copy_n(source, columns.size(), last);
        source = last;
      }
      for (int lane = 0; lane < kPanelWidth; ++lane) packed[lane] = static_cast<float>(source[lane]);
    }
  }

  static void multiply_add(int rows, std::int64_t contraction, const float* a, const float* panel, float* tile) {
    using Multiply = void (*)(std::int64_t, const float*, const float*, float*);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{&multiply_rows<static_cast<int>(row) + 1>...};
    }(std::make_index_sequence<kRows>{});
    const Multiply multiply_lanes = kByRows[static_cast<std::size_t>(rows - 1)];
    for (int lane = 0; lane < kPanelWidth; lane += kWidth) {
      multiply_lanes(contraction, a, panel + lane, tile + lane);
    }
  }

  static constexpr int kWidth = Isa::kFp32Halves * kHalfPanel;  // of the panel, in one pass over the contraction

  // tile[row][...] += sum over k of a[k][row] * panel[k][...]
  template <int kGroup>
  [[gnu::noinline]] static void multiply_rows(std::int64_t contraction, const float* a, const float* panel,
                                              float* tile) {
    constexpr int kHalves = Isa::kFp32Halves;
    struct Sum {
      Lanes lanes{0.0f};
    };
    Sum sums[kGroup][kHalves];
#pragma GCC unroll 12
    for (int row = 0; row < kGroup; ++row) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        sums[row][half].lanes = Lanes::load(tile + row * kPanelWidth + half * kHalfPanel);
      }
    }
    for (std::int64_t k = 0; k < contraction; ++k, a += kGroup, panel += kPanelWidth) {
      const Lanes left = Lanes::load(panel);
      const Lanes right = Lanes::load(panel + (kHalves - 1) * kHalfPanel);
#pragma GCC unroll 12
      for (int row = 0; row < kGroup; ++row) {
        const Lanes x(a[row]);
        sums[row][0].lanes = fused_multiply_add(x, left, sums[row][0].lanes);
        if constexpr (kHalves == 2) sums[row][1].lanes = fused_multiply_add(x, right, sums[row][1].lanes);
      }
    }
#pragma GCC unroll 12
    for (int row = 0; row < kGroup; ++row) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        sums[row][half].lanes.store(tile + row * kPanelWidth + half * kHalfPanel);
      }
    }
  }

  void put(const float* sums, std::int64_t row, Range columns) const {
    const bf16* bias = arguments_.bias == nullptr ? nullptr : arguments_.bias + columns.begin;
    bf16* out = arguments_.out + row * arguments_.columns + columns.begin;
    write_outputs<Lanes>(sums, bias, columns.size(), out);
  }

  const PanelArguments& arguments_;
  Range block_;
  float* rows_;
  std::int64_t groups_;
  std::int64_t panels_;
  std::int64_t parts_;
};

}  // namespace ktc::inline KTC_UNIT
