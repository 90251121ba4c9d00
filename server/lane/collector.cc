#include "server/lane/collector.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::server::lane {

using scheduler::AbsentFragment;
using scheduler::AttemptKind;
using scheduler::RailOperation;

Collector::Collector(const LaneJob& job, const TrainerMemory& trainers, Rail& rail,
                     kernels::Device& device, kernels::Stream& stream)
    : job_(job),
      trainers_(trainers),
      rail_(rail),
      device_(device),
      stream_(stream),
      rank_submitted_(job.local.size()),
      states_(job.buckets()) {}

absl::StatusOr<std::unique_ptr<Collector>> Collector::Create(const LaneJob& job,
                                                             const TrainerMemory& trainers,
                                                             Rail& rail, kernels::Device& device,
                                                             kernels::Stream& stream) {
  std::unique_ptr<Collector> collector(new Collector(job, trainers, rail, device, stream));
  auto gradients = MakeCollectWork(job, CollectKind::kGradients);
  if (!gradients.ok()) return gradients.status();
  auto weights = MakeCollectWork(job, CollectKind::kWeights);
  if (!weights.ok()) return weights.status();
  collector->gradients_ = *std::move(gradients);
  collector->weights_ = *std::move(weights);
  size_t sums = 0;
  for (const scheduler::StagedUnit& staged : job.program.staged) {
    const scheduler::Unit& unit = job.unit(staged.unit);
    const auto count =
        static_cast<size_t>(kernels::NormBlocks(unit.first_element, unit.rows * unit.cols));
    collector->unit_sums_.push_back({staged.unit, sums, count});
    sums += count;
  }
  collector->sums_.resize(sums);
  collector->ReserveScratch(collector->gradients_);
  collector->ReserveScratch(collector->weights_);
  return collector;
}

void Collector::ReserveScratch(const std::vector<CollectBucket>& work) {
  for (const CollectBucket& bucket : work) {
    boxes_.reserve(std::max(boxes_.capacity(), bucket.sources.size()));
    levels_.reserve(boxes_.capacity());
    sum_tasks_.reserve(
        std::max(sum_tasks_.capacity(), std::max(bucket.owned.size(), bucket.sums.size())));
    norm_tasks_.reserve(std::max(norm_tasks_.capacity(), bucket.units.size()));
  }
}

void Collector::Arm(scheduler::Attempt attempt) {
  armed_ = true;
  started_ = false;
  attempt_ = attempt;
  kind_.reset();
  submitted_ = false;
  std::fill(rank_submitted_.begin(), rank_submitted_.end(), false);
  absent_.clear();
  std::fill(states_.begin(), states_.end(), BucketState{});
  unfinished_ = job_.buckets();
}

void Collector::OnSubmission(const scheduler::Submission& submission) {
  kind_ = submission.kind;
  rank_submitted_[submission.rank.value()] = true;
  for (int32_t parameter : submission.absent) absent_.push_back({submission.rank, parameter});
  if (!submission.absent.empty()) std::sort(absent_.begin(), absent_.end());
  if (submission.kind == AttemptKind::kStep) {
    const double scale = submission.scalars.loss_scale;
    if (loss_scale_.has_value() && *loss_scale_ != scale) {
      // Buckets that came early were reduced under the assumption that the scale had not changed.
      for (BucketState& state : states_) {
        if (std::exchange(state.reduced, false)) ++unfinished_;
      }
    }
    loss_scale_ = scale;
  }
  submitted_ = true;
}

void Collector::OnDetach(int32_t rank) {
  for (int32_t b = 0; armed_ && b < job_.buckets(); ++b) {
    const std::vector<int32_t>& ranks = work()[b].ranks;
    if (std::binary_search(ranks.begin(), ranks.end(), rank)) states_[b].seen = false;
  }
}

absl::Status Collector::OnGo(const scheduler::Go& go) {
  const int32_t b = go.bucket.value();
  if (!states_[b].packed || states_[b].received) return absl::OkStatus();  // not reported: no part
  if (states_[b].started) {
    return absl::InternalError(
        absl::StrCat("a second GO to collect bucket ", b, " of attempt ", attempt_.value()));
  }
  const size_t known = absent_.size();
  absent_.insert(absent_.end(), go.absent.begin(), go.absent.end());
  if (absent_.size() != known) {
    std::sort(absent_.begin(), absent_.end());
    absent_.erase(std::unique(absent_.begin(), absent_.end()), absent_.end());
  }
  const bool gradients = kind() != AttemptKind::kPush;
  states_[b].started = true;
  // What nobody has is neither sent nor waited for: both ends read it from the same GO.
  return rail_.Start(
      RailOperation::kCollect, b, *work()[b].transfers, [&](const scheduler::Transfer& transfer) {
        if (!gradients) return true;
        const scheduler::Cell& cell =
            job_.plan.gradient_cells[transfer.unit.value()][transfer.cell];
        for (int32_t i = 0; i < transfer.subtree.leaves; ++i) {
          const scheduler::Fragment& fragment =
              job_.inputs.layout.fragments[cell.fragments[transfer.subtree.first + i]];
          const AbsentFragment leaf{fragment.rank, fragment.parameter};
          if (!std::binary_search(absent_.begin(), absent_.end(), leaf)) return true;
        }
        return false;
      });
}

bool Collector::ContributorsReady(int32_t b) const {
  const CollectBucket& bucket = work()[b];
  // Without a contributor here only the kind of the attempt is still open.
  if (bucket.ranks.empty()) return kind_.has_value();
  for (int32_t rank : bucket.ranks) {
    const TrainerMemory::Trainer* trainer = trainers_.Find(rank);
    if (trainer == nullptr) return false;
    if (kind() == AttemptKind::kPush) {
      if (!rank_submitted_[rank]) return false;
    } else if (!Reached(trainer->page.ready(static_cast<uint32_t>(b)), attempt_.value())) {
      return false;
    }
  }
  return true;
}

absl::StatusOr<bool> Collector::Progress() {
  if (!armed_ || kind_ == AttemptKind::kLoad || unfinished_ == 0) return false;
  bool any = false;
  for (int32_t b = 0; b < job_.buckets(); ++b) {
    BucketState& state = states_[b];
    if (state.reduced) continue;
    if (!state.seen) {
      if (!ContributorsReady(b)) continue;
      state.seen = true;
      started_ = true;
      if (!kind_.has_value()) kind_ = AttemptKind::kStep;
      any = true;
      continue;
    }
    absl::StatusOr<bool> progress = ProgressBucket(b);
    if (!progress.ok()) return progress;
    any = any || *progress;
  }
  return any;
}

absl::StatusOr<bool> Collector::ProgressBucket(int32_t b) {
  BucketState& state = states_[b];
  const CollectBucket& bucket = work()[b];
  bool any = false;
  if (!state.packed) {
    if (absl::Status status = Pack(bucket); !status.ok()) return status;
    state.packed = true;
    state.received = bucket.transfers->empty();
    if (!state.received) {
      absl::Status status = rail_.ReportReady(attempt_, RailOperation::kCollect, b, kind());
      if (!status.ok()) return status;
    }
    any = true;
  }
  if (!state.received && state.started) {
    absl::StatusOr<bool> done = rail_.Done(RailOperation::kCollect, b);
    if (!done.ok()) return done;
    state.received = *done;
    any = any || *done;
  }
  const bool factor_known = kind() == AttemptKind::kPush || loss_scale_.has_value();
  if (state.received && factor_known) {
    if (absl::Status status = Reduce(bucket); !status.ok()) return status;
    state.reduced = true;
    --unfinished_;
    any = true;
  }
  return any;
}

bool Collector::IsAbsent(const CollectBucket& bucket, const CollectSource& source) const {
  if (absent_.empty() || kind() == AttemptKind::kPush) return false;
  for (int32_t i = 0; i < source.leaves; ++i) {
    if (!std::binary_search(absent_.begin(), absent_.end(), bucket.leaves[source.first_leaf + i])) {
      return false;
    }
  }
  return true;
}

kernels::StridedBox Collector::Resolve(const CollectBucket& bucket,
                                       const CollectSource& source) const {
  kernels::StridedBox box = source.box;
  if (IsAbsent(bucket, source)) {
    box.data = nullptr;
  } else if (source.rank >= 0) {
    box.data = trainers_.Address(source.rank, source.arena, source.offset_bytes);
  }
  return box;
}

absl::Status Collector::Pack(const CollectBucket& bucket) {
  for (const CollectTask& task : bucket.lones) {
    const kernels::StridedBox from = Resolve(bucket, bucket.sources[task.first_source]);
    if (from.data == nullptr) continue;
    absl::Status status = device_.ops().Copy(stream_, task.dst, from);
    if (!status.ok()) return status;
  }
  absl::Status status = SumTasks(bucket, bucket.sums, 0);
  if (!status.ok()) return status;
  return stream_.Synchronize();
}

absl::Status Collector::SumTasks(const CollectBucket& bucket, const std::vector<CollectTask>& tasks,
                                 double divisor) {
  if (tasks.empty()) return absl::OkStatus();
  boxes_.clear();
  levels_.clear();
  sum_tasks_.clear();
  for (const CollectTask& task : tasks) {
    const size_t first = boxes_.size();
    bool all_leaves = true;
    for (int32_t i = 0; i < task.sources; ++i) {
      const CollectSource& source = bucket.sources[task.first_source + i];
      boxes_.push_back(Resolve(bucket, source));
      levels_.push_back(source.level);
      all_leaves = all_leaves && source.level == 0;
    }
    kernels::SumTask sum;
    sum.dst = task.dst;
    // Reserved before: these views stay.
    sum.sources = {boxes_.data() + first, static_cast<size_t>(task.sources)};
    if (!all_leaves) sum.levels = {levels_.data() + first, static_cast<size_t>(task.sources)};
    sum.factor = divisor == 0 ? 1.0F : static_cast<float>(task.reduce_factor / divisor);
    sum_tasks_.push_back(sum);
  }
  return device_.ops().Sum(stream_, sum_tasks_);
}

absl::Status Collector::Reduce(const CollectBucket& bucket) {
  const bool push = kind() == AttemptKind::kPush;
  absl::Status status = SumTasks(bucket, bucket.owned, push ? 0 : *loss_scale_);
  if (!status.ok()) return status;
  if (!push && !bucket.units.empty()) {
    norm_tasks_.clear();
    for (scheduler::UnitId id : bucket.units) {
      const scheduler::Unit& unit = job_.unit(id);
      const UnitSums& sums = unit_sums_[job_.staged_index[id.value()]];
      norm_tasks_.push_back({reinterpret_cast<const float*>(job_.staging->data() +
                                                            job_.staged(id).gradient_offset_bytes),
                             unit.rows * unit.cols, unit.first_element, sums_.data() + sums.first});
    }
    status = device_.ops().SumsOfSquares(stream_, norm_tasks_);
    if (!status.ok()) return status;
  }
  return stream_.Synchronize();
}

bool Collector::complete() const {
  if (!armed_ || !submitted_) return false;
  return kind_ == AttemptKind::kLoad || unfinished_ == 0;
}

bool Collector::watches_words() const {
  if (!armed_ || unfinished_ == 0 || kind_ == AttemptKind::kPush || kind_ == AttemptKind::kLoad) {
    return false;
  }
  return std::any_of(states_.begin(), states_.end(), [](const BucketState& s) { return !s.seen; });
}

void Collector::AddNorms(v1::LaneReport::Gathered& gathered) const {
  if (kind() != AttemptKind::kStep) return;
  for (const UnitSums& sums : unit_sums_) {
    const scheduler::Unit& unit = job_.unit(sums.unit);
    v1::UnitNorm& norm = *gathered.add_norms();
    norm.set_unit(sums.unit.value());
    norm.set_first_block(unit.first_element / kernels::kNormBlock);
    if (unit.flat && unit.kind == scheduler::UnitKind::kPiece) {
      norm.set_first_element(unit.first_element);
      for (size_t i = 0; i < sums.count; ++i) norm.add_sums(sums_[sums.first + i]);
      continue;
    }
    double total = 0;
    for (size_t i = 0; i < sums.count; ++i) total += sums_[sums.first + i];
    norm.add_sums(total);
  }
}

}  // namespace dmuond::server::lane
