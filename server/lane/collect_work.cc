#include "server/lane/collect_work.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "scheduler/convert/convert.h"
#include "scheduler/state_slots.h"
#include "server/lane/strided.h"

namespace dmuond::server::lane {
namespace {

using scheduler::CellLeaf;
using scheduler::Fragment;
using scheduler::LaneCell;
using scheduler::LaneUnit;
using scheduler::Subtree;
using scheduler::Transfer;
using scheduler::Unit;

class WorkBuilder {
 public:
  WorkBuilder(const LaneJob& job, CollectKind kind)
      : job_(job), gradients_(kind == CollectKind::kGradients), work_(job.buckets()) {}

  absl::StatusOr<std::vector<CollectBucket>> Build() {
    for (int32_t b = 0; b < job_.buckets(); ++b) {
      CollectBucket& bucket = work_[b];
      bucket.transfers = gradients_ ? &job_.program.partials[b] : &job_.program.adopts[b];
      for (const Transfer& transfer : *bucket.transfers) {
        if (transfer.from == job_.program.lane) AddSend(bucket, transfer);
      }
    }
    for (const scheduler::StagedUnit& staged : job_.program.staged) {
      const LaneUnit& of = job_.lane_unit(staged.unit);
      CollectBucket& bucket = work_[of.unit.bucket.value()];
      bucket.units.push_back(staged.unit);
      const bool fused =
          gradients_ && of.cells.size() == 1 && of.unit.first_element % kernels::kNormBlock == 0;
      if (gradients_ && !fused) bucket.norm_units.push_back(staged.unit);
      for (const LaneCell& cell : of.cells) {
        RETURN_IF_ERROR(AddOwned(bucket, staged, of, cell));
        if (fused) bucket.owned.back().squares_of = staged.unit.value();
      }
    }
    for (CollectBucket& bucket : work_) {
      std::sort(bucket.ranks.begin(), bucket.ranks.end());
      bucket.ranks.erase(std::unique(bucket.ranks.begin(), bucket.ranks.end()), bucket.ranks.end());
    }
    PlaceLanding();
    return std::move(work_);
  }

 private:
  // A weight comes from its lowest holder alone.
  [[nodiscard]] std::span<const CellLeaf> LeavesOf(const LaneCell& cell,
                                                   const Subtree& subtree) const {
    if (gradients_) return scheduler::LeavesOf(cell, subtree);
    return {&cell.lowest, 1};
  }
  // What an owned cell is put together of.
  [[nodiscard]] std::vector<Subtree> SubtreesOf(const LaneCell& cell) const {
    if (!gradients_) return {Subtree{.node = cell.lowest.node}};
    std::vector<scheduler::NodeRank> nodes;
    nodes.reserve(cell.leaves.size());
    for (const CellLeaf& leaf : cell.leaves) nodes.push_back(leaf.node);
    return scheduler::MaximalSubtrees(nodes);
  }
  [[nodiscard]] kernels::DType TypeOf(const Unit& unit) const {
    const scheduler::LaneParameter& parameter = *job_.program.FindParameter(unit.parameter);
    return ToDType(gradients_ ? parameter.gradient_type : parameter.weight_type);
  }

  void AddTrainerSource(CollectBucket& bucket, const Unit& unit, const LaneCell& cell,
                        const CellLeaf& leaf) {
    const Fragment& fragment = job_.program.fragments[leaf.fragment];
    const scheduler::Slice& slice = gradients_ ? fragment.gradient : fragment.weight;
    const kernels::DType dtype = TypeOf(unit);
    const scheduler::StridedView view =
        scheduler::ViewInSlice(fragment.box, slice.strides, cell.box);
    CollectSource source;
    source.rank = fragment.rank.value();
    source.arena = slice.arena;
    source.offset_bytes = OffsetBytes(slice, view, dtype);
    source.box = At(nullptr, dtype, view);
    if (gradients_ && job_.program.landing_bytes > 0 && job_.program.IsFarAway(leaf)) {
      source.landing = At(nullptr, dtype, scheduler::ViewInBox(cell.box, cell.box));
    }
    source.first_leaf = static_cast<int32_t>(bucket.leaves.size());
    bucket.leaves.push_back({leaf.rank, unit.parameter});
    bucket.sources.push_back(source);
    bucket.ranks.push_back(source.rank);
  }

  [[nodiscard]] kernels::StridedBox TransferBox(const Transfer& transfer) const {
    return At(job_.staging->data() + transfer.offset_bytes, ToDType(transfer.type),
              scheduler::ViewInBox(transfer.box, transfer.box));
  }

  void AddSend(CollectBucket& bucket, const Transfer& transfer) {
    const LaneUnit& of = *job_.program.Find(transfer.unit);
    const LaneCell& cell = *scheduler::FindCell(of, transfer.cell);
    CollectTask task;
    task.dst = TransferBox(transfer);
    task.first_source = static_cast<int32_t>(bucket.sources.size());
    for (const CellLeaf& leaf : LeavesOf(cell, transfer.subtree)) {
      AddTrainerSource(bucket, of.unit, cell, leaf);
    }
    task.sources = static_cast<int32_t>(bucket.sources.size()) - task.first_source;
    (task.sources == 1 ? bucket.lones : bucket.sums).push_back(task);
  }

  absl::Status AddOwned(CollectBucket& bucket, const scheduler::StagedUnit& staged,
                        const LaneUnit& of, const LaneCell& cell) {
    CollectTask task;
    task.dst = At(job_.staging->data() + staged.gradient_offset_bytes, kernels::DType::kF32,
                  scheduler::ViewInUnit(of.unit, cell.box));
    task.first_source = static_cast<int32_t>(bucket.sources.size());
    task.reduce_factor = gradients_ ? job_.parameter(staged.unit).reduce_factor : 1;
    for (const Subtree& subtree : SubtreesOf(cell)) {
      if (subtree.node == job_.program.node) {
        for (const CellLeaf& leaf : LeavesOf(cell, subtree)) {
          AddTrainerSource(bucket, of.unit, cell, leaf);
        }
      } else if (!AddPartial(bucket, of.unit, cell, subtree)) {
        return absl::InvalidArgumentError(absl::StrCat("unit ", staged.unit.value(), ", cell ",
                                                       cell.number, ": no transfer from node ",
                                                       subtree.node.value()));
      }
    }
    task.sources = static_cast<int32_t>(bucket.sources.size()) - task.first_source;
    int64_t element_bytes = 4;  // written
    for (int32_t i = 0; i < task.sources; ++i) {
      element_bytes +=
          static_cast<int64_t>(kernels::SizeOf(bucket.sources[task.first_source + i].box.dtype));
    }
    bucket.owned_bytes += element_bytes * scheduler::Elements(cell.box);
    bucket.owned.push_back(task);
    return absl::OkStatus();
  }

  // Adds the sum that comes along the rail; false: none does.
  [[nodiscard]] bool AddPartial(CollectBucket& bucket, const Unit& unit, const LaneCell& cell,
                                const Subtree& subtree) {
    // In the order of cells and first leaves.
    const std::span<const Transfer> transfers =
        scheduler::TransfersOfUnit(*bucket.transfers, unit.id);
    const auto wanted = std::pair(cell.number, gradients_ ? subtree.first : 0);
    const auto key = [&](const Transfer& transfer) {
      return std::pair(transfer.cell, gradients_ ? transfer.subtree.first : 0);
    };
    const auto found = std::lower_bound(
        transfers.begin(), transfers.end(), wanted,
        [&](const Transfer& transfer, const auto& value) { return key(transfer) < value; });
    if (found == transfers.end() || key(*found) != wanted) return false;
    if (gradients_ && found->subtree.leaves != subtree.leaves) return false;
    CollectSource source;
    source.box = TransferBox(*found);
    source.level = subtree.level;
    source.first_leaf = static_cast<int32_t>(bucket.leaves.size());
    source.leaves = subtree.leaves;
    for (const CellLeaf& leaf : LeavesOf(cell, subtree)) {
      bucket.leaves.push_back({leaf.rank, unit.parameter});
    }
    bucket.sources.push_back(source);
    return true;
  }

  // Gives buckets their parts of the landing one after the other, and again from its beginning on
  // where it ends.
  void PlaceLanding() {
    const int64_t room = job_.program.landing_bytes;
    if (room == 0) return;
    std::byte* const landing = job_.staging->data() + job_.program.staging_bytes - room;
    int64_t next = 0;
    for (CollectBucket& bucket : work_) {
      int64_t bytes = 0;
      for (const CollectSource& source : bucket.sources) bytes += LandingBytes(source);
      if (bytes > room) continue;
      if (bytes > room - next) next = 0;
      bucket.landing_begin_bytes = next;
      bucket.landing_bytes = bytes;
      for (CollectSource& source : bucket.sources) {
        if (LandingBytes(source) == 0) continue;
        source.landing.data = landing + next;
        next += LandingBytes(source);
      }
    }
  }

  [[nodiscard]] static int64_t LandingBytes(const CollectSource& source) {
    const kernels::StridedBox& box = source.landing;
    if (box.dims == 0) return 0;
    return scheduler::AlignUp(std::accumulate(box.shape.begin(), box.shape.begin() + box.dims,
                                              static_cast<int64_t>(kernels::SizeOf(box.dtype)),
                                              std::multiplies<>()));
  }

  const LaneJob& job_;
  bool gradients_;
  std::vector<CollectBucket> work_;
};

}  // namespace

absl::StatusOr<std::vector<CollectBucket>> MakeCollectWork(const LaneJob& job, CollectKind kind) {
  return WorkBuilder(job, kind).Build();
}

}  // namespace dmuond::server::lane
