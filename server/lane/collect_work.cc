#include "server/lane/collect_work.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "server/lane/strided.h"

namespace dmuond::server::lane {
namespace {

using scheduler::Cell;
using scheduler::Fragment;
using scheduler::Subtree;
using scheduler::Transfer;
using scheduler::Unit;
using scheduler::UnitId;

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
      CollectBucket& bucket = work_[job_.unit(staged.unit).bucket.value()];
      bucket.units.push_back(staged.unit);
      const std::vector<Cell>& cells = CellsOf(staged.unit);
      const bool fused = gradients_ && cells.size() == 1 &&
                         job_.unit(staged.unit).first_element % kernels::kNormBlock == 0;
      if (gradients_ && !fused) bucket.norm_units.push_back(staged.unit);
      for (size_t c = 0; c < cells.size(); ++c) {
        absl::Status status = AddOwned(bucket, staged, static_cast<int32_t>(c));
        if (!status.ok()) return status;
        if (fused) bucket.owned.back().squares_of = staged.unit.value();
      }
    }
    for (CollectBucket& bucket : work_) {
      std::sort(bucket.ranks.begin(), bucket.ranks.end());
      bucket.ranks.erase(std::unique(bucket.ranks.begin(), bucket.ranks.end()), bucket.ranks.end());
    }
    return std::move(work_);
  }

 private:
  [[nodiscard]] const std::vector<Cell>& CellsOf(UnitId id) const {
    return job_.plan.cells[id.value()];
  }
  // A weight comes from its lowest holder alone.
  [[nodiscard]] const Fragment& FragmentOf(const Cell& cell, int32_t leaf) const {
    return job_.inputs.layout.fragments[gradients_ ? cell.fragments[leaf] : cell.lowest];
  }
  // The nodes of the leaves of a cell's tree.
  [[nodiscard]] std::vector<scheduler::NodeRank> NodesOf(const Cell& cell) const {
    if (gradients_) return scheduler::LeafNodes(job_.inputs.layout, cell);
    return {job_.inputs.layout.trainers[FragmentOf(cell, 0).rank.value()].node};
  }
  [[nodiscard]] kernels::DType TypeOf(const Unit& unit) const {
    const scheduler::Parameter& parameter = job_.inputs.layout.parameters[unit.parameter];
    return ToDType(gradients_ ? parameter.gradient_type : parameter.weight_type);
  }

  void AddLeafName(CollectBucket& bucket, const Fragment& fragment) {
    bucket.leaves.push_back({fragment.rank, fragment.parameter});
  }

  void AddTrainerSource(CollectBucket& bucket, const Unit& unit, const Cell& cell, int32_t leaf) {
    const Fragment& fragment = FragmentOf(cell, leaf);
    const scheduler::Slice& slice = gradients_ ? fragment.gradient : fragment.weight;
    const kernels::DType dtype = TypeOf(unit);
    const scheduler::StridedView view =
        scheduler::ViewInSlice(fragment.box, slice.strides, cell.box);
    CollectSource source;
    source.rank = fragment.rank.value();
    source.arena = slice.arena;
    source.offset_bytes = OffsetBytes(slice, view, dtype);
    source.box = At(nullptr, dtype, view);
    source.first_leaf = static_cast<int32_t>(bucket.leaves.size());
    AddLeafName(bucket, fragment);
    bucket.sources.push_back(source);
    bucket.ranks.push_back(source.rank);
  }

  [[nodiscard]] kernels::StridedBox TransferBox(const Transfer& transfer) const {
    return At(job_.staging->data() + transfer.offset_bytes, ToDType(transfer.type),
              scheduler::ViewInBox(transfer.box, transfer.box));
  }

  void AddSend(CollectBucket& bucket, const Transfer& transfer) {
    const Unit& unit = job_.unit(transfer.unit);
    const Cell& cell = CellsOf(transfer.unit)[transfer.cell];
    CollectTask task;
    task.dst = TransferBox(transfer);
    task.first_source = static_cast<int32_t>(bucket.sources.size());
    const Subtree subtree = gradients_ ? transfer.subtree : Subtree{};
    for (int32_t i = 0; i < subtree.leaves; ++i) {
      AddTrainerSource(bucket, unit, cell, subtree.first + i);
    }
    task.sources = subtree.leaves;
    (subtree.leaves == 1 ? bucket.lones : bucket.sums).push_back(task);
  }

  absl::Status AddOwned(CollectBucket& bucket, const scheduler::StagedUnit& staged, int32_t c) {
    const Unit& unit = job_.unit(staged.unit);
    const Cell& cell = CellsOf(staged.unit)[c];
    CollectTask task;
    task.dst = At(job_.staging->data() + staged.gradient_offset_bytes, kernels::DType::kF32,
                  scheduler::ViewInUnit(unit, cell.box));
    task.first_source = static_cast<int32_t>(bucket.sources.size());
    task.reduce_factor =
        gradients_ ? job_.inputs.layout.parameters[unit.parameter].reduce_factor : 1;
    for (const Subtree& subtree : scheduler::MaximalSubtrees(NodesOf(cell))) {
      if (subtree.node == job_.program.node) {
        for (int32_t i = 0; i < subtree.leaves; ++i) {
          AddTrainerSource(bucket, unit, cell, subtree.first + i);
        }
      } else if (!AddPartial(bucket, staged.unit, cell, c, subtree)) {
        return absl::InternalError(absl::StrCat("unit ", staged.unit.value(), ", cell ", c,
                                                ": no transfer from node ", subtree.node.value()));
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

  [[nodiscard]] bool AddPartial(CollectBucket& bucket, UnitId id, const Cell& cell, int32_t c,
                                const Subtree& subtree) {
    for (const Transfer& transfer : *bucket.transfers) {
      if (transfer.unit != id || transfer.cell != c || transfer.to != job_.program.lane) continue;
      if (gradients_ && transfer.subtree.first != subtree.first) continue;
      CollectSource source;
      source.box = TransferBox(transfer);
      source.level = subtree.level;
      source.first_leaf = static_cast<int32_t>(bucket.leaves.size());
      source.leaves = subtree.leaves;
      for (int32_t i = 0; i < subtree.leaves; ++i) {
        AddLeafName(bucket, FragmentOf(cell, subtree.first + i));
      }
      bucket.sources.push_back(source);
      return true;
    }
    return false;
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
