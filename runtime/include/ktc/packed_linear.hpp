// y = x W^T + b with W in panels of blocks, as the experts have them: the linear layers of a GGUF file, multiplied as
// they are stored. All rows of x are one expert's slots, so the loop, the panels and the products of few and of many
// rows are those of the experts (`moe_sweep.hpp`).
//
// A value is one dot product, summed in fp32 and rounded once. Neither threads nor other rows decide the order of its
// sum, but their number does: the products of few and of many rows add in different orders.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "ktc/concepts.hpp"
#include "ktc/decoded_panels.hpp"
#include "ktc/element.hpp"
#include "ktc/interface/packed_linear.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/panel_outputs.hpp"
#include "ktc/panel_places.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/layout.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

template <class Kernel>
std::unique_ptr<PackedLinearKernel> make_packed_linear() {
  return std::make_unique<Kernel>();
}

template <InstructionSet Isa, WeightPanel Panel>
class PackedLinear final : public PackedLinearKernel {
  using Lanes = typename Isa::Lanes;
  using Accumulator = typename Isa::Accumulator;
  using Panels = typename PanelSources<Isa, Panel>::Stored;
  using Format = typename Panel::Format;
  static_assert(std::is_same_v<typename Isa::Element, bf16> && std::is_same_v<Accumulator, float>);

 public:
  std::int64_t packed_bytes(std::int64_t inputs, std::int64_t outputs) const override {
    return num_panels(outputs) * Panel::bytes(round_up(inputs, kPanelWidth));
  }

  void pack(std::byte* packed, const std::uint8_t* blocks, std::int64_t outputs,
            std::int64_t row_bytes) const override {
    if (row_bytes % Format::kStoredBytes != 0) {
      throw std::invalid_argument("rows of " + decimal(row_bytes) + " bytes are no whole blocks of " + Panel::kStored);
    }
    const std::int64_t inputs = row_bytes / Format::kStoredBytes * Format::kWeights;
    Panel::pack_blocks(MatrixView(blocks, outputs, row_bytes), lanes(packed, inputs, outputs));
  }

  void unpack(const std::byte* packed, void* target, std::int64_t inputs, std::int64_t outputs) const override {
    Panel::unpack(lanes(const_cast<std::byte*>(packed), inputs, outputs),
                  MatrixView(static_cast<bf16*>(target), outputs, inputs));
  }

  void forward(Engine& engine, const PackedLinearArguments& arguments) const override {
    if (arguments.rows == 0) return;
    const std::int64_t padded = round_up(arguments.inputs, kPanelWidth);
    const std::vector<std::int64_t> only_expert(static_cast<std::size_t>(arguments.rows), 0);
    const Routing routing(only_expert.data(), arguments.rows, 1, 1,
                          {.most = Isa::kMaxRows, .least = Isa::kBlocked ? Isa::kStreamRows + 1 : 0});
    const MatrixView x(static_cast<const bf16*>(arguments.x), arguments.rows, arguments.inputs);
    const std::int64_t panels = num_panels(arguments.outputs);
    PanelPlaces places(Panel::bytes(padded));
    places.add(arguments.packed, 0, {0, panels});
    exclusively(engine, [&](const Team& team, Workspace& workspace) {
      Region<bf16> rows(arguments.rows * padded), scratch(Panels::scratch_size(padded) * team.threads());
      Region<Accumulator> sums(sums_at_hand<Isa>() * team.threads());
      const ConvertedSlots<Panels> slots(routing, padded);
      Region<std::byte> converted(slots.bytes());
      workspace.lay_out(rows, scratch, sums, converted);
      const PanelSet set{panels, padded, PanelTurns::kNone, 1, run_rows<Panels>()};
      const PanelQueues<Isa> queues(routing, set, team.threads());
      team.run([&](const Worker& worker) {
        const auto num_groups = static_cast<std::int64_t>(routing.groups().size());
        const Range groups = Range::share(num_groups, worker.index, worker.count);
        gather_slots<Isa>(routing, x, padded, groups, rows.data());
        slots.convert(groups, rows.data(), converted.data());
        worker.barrier.arrive_and_wait();
        Panels panels_of_worker(places, padded, scratch.data() + worker.index * Panels::scratch_size(padded));
        if constexpr (Panels::kConvertedRows > 0) panels_of_worker.read(slots, converted.data());
        sweep<Isa>(routing, queues.of(worker.index), panels_of_worker, rows.data(),
                   sums.data() + worker.index * sums_at_hand<Isa>(), Output{arguments});
      });
    });
  }

 private:
  static std::int64_t num_panels(std::int64_t outputs) { return (outputs + kPanelWidth - 1) / kPanelWidth; }

  static weight_format::PartLanes lanes(std::byte* packed, std::int64_t inputs, std::int64_t outputs) {
    return {.panels = packed,
            .num_panels = num_panels(outputs),
            .padded_k = round_up(inputs, kPanelWidth),
            .first_lane = 0,
            .lanes = kPanelWidth};
  }

  // Writes the sums of a panel to the rows of the output.
  struct Output {
    const PackedLinearArguments& arguments;

    void begin(PanelPart) const {}
    void end(PanelPart) const {}
    void prefetch(const SlotGroup&, PanelPart) const {}
    void complete(Isa&, const SlotGroup&, PanelPart, Accumulator*) const {}

    void operator()(const SlotGroup& group, PanelPart part, const Accumulator* tile) const {
      const std::int64_t first = part.panel * kPanelWidth;
      const std::int64_t columns = std::min(kPanelWidth, arguments.outputs - first);
      const auto* bias = static_cast<const bf16*>(arguments.bias);
      for (int row = 0; row < group.rows; ++row) {
        bf16* out = static_cast<bf16*>(arguments.out) + (group.first_slot + row) * arguments.outputs + first;
        write_outputs<Lanes>(tile + row * kPanelWidth, bias == nullptr ? nullptr : bias + first, columns, out);
      }
    }
  };
};

}  // namespace ktc::inline KTC_UNIT
