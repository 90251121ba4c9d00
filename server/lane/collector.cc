#include "server/lane/collector.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"

namespace dmuond::server::lane {

using scheduler::AbsentFragment;
using scheduler::AttemptKind;
using scheduler::RailOperation;

namespace {

// From so many bytes on a bucket lands in the quiet, too, while others are added up; smaller ones
// are read where they lie, which takes no longer than their copies.
constexpr int64_t kLandsInQuietBytes = int64_t{8} << 20;

absl::StatusOr<std::vector<std::unique_ptr<kernels::Event>>> CreateEvents(kernels::Device& device,
                                                                          int32_t count) {
  std::vector<std::unique_ptr<kernels::Event>> events;
  for (int32_t i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(std::unique_ptr<kernels::Event> event, device.CreateEvent());
    events.push_back(std::move(event));
  }
  return events;
}

}  // namespace

Collector::Collector(const LaneJob& job, const TrainerMemory& trainers, Rail& rail,
                     kernels::Device& device, kernels::Stream& stream)
    : job_(job),
      trainers_(trainers),
      rail_(rail),
      device_(device),
      stream_(stream),
      rank_submitted_(job.local.size()),
      states_(job.buckets()),
      unseen_(job.buckets()) {}

absl::StatusOr<std::unique_ptr<Collector>> Collector::Create(const LaneJob& job,
                                                             const TrainerMemory& trainers,
                                                             Rail& rail, kernels::Device& device,
                                                             kernels::Stream& stream) {
  std::unique_ptr<Collector> collector(new Collector(job, trainers, rail, device, stream));
  ASSIGN_OR_RETURN(auto gradients, MakeCollectWork(job, CollectKind::kGradients));
  ASSIGN_OR_RETURN(auto weights, MakeCollectWork(job, CollectKind::kWeights));
  collector->gradients_ = std::move(gradients);
  collector->weights_ = std::move(weights);
  size_t sums = 0;
  for (const scheduler::StagedUnit& staged : job.program.staged) {
    const scheduler::Unit& unit = job.unit(staged.unit);
    const auto count =
        static_cast<size_t>(kernels::NormBlocks(unit.first_element, unit.rows * unit.cols));
    collector->unit_sums_.push_back({staged.unit, sums, count});
    sums += count;
  }
  if (sums > 0) {
    ASSIGN_OR_RETURN(collector->sums_memory_, device.AllocateHost(sums * sizeof(double)));
    collector->sums_ = reinterpret_cast<double*>(collector->sums_memory_->data());
  }
  ASSIGN_OR_RETURN(collector->events_, CreateEvents(device, job.buckets()));
  if (job.program.landing_bytes > 0) {
    ASSIGN_OR_RETURN(collector->landing_stream_, device.CreateStream());
    ASSIGN_OR_RETURN(collector->landing_events_, CreateEvents(device, job.buckets()));
  }
  for (const CollectBucket& bucket : collector->gradients_) {
    collector->landed_.emplace_back(bucket.sources.size(), 0);
  }
  if (device.links_sleep() && collector->StartsLate()) {
    collector->start_.emplace(
        std::count_if(collector->gradients_.begin(), collector->gradients_.end(),
                      [](const CollectBucket& bucket) { return !bucket.ranks.empty(); }));
  }
  collector->ReserveScratch(collector->gradients_);
  collector->ReserveScratch(collector->weights_);
  return collector;
}

// With MPS only where nothing goes to other nodes afterwards, which takes longer.
bool Collector::StartsLate() const {
  const auto& home = job_.program.at_home;
  bool from_others = false;
  for (const CollectBucket& bucket : gradients_) {
    if (!device_.takes_turns() && !bucket.transfers->empty()) return false;
    for (const int32_t rank : bucket.ranks) {
      from_others |= !std::binary_search(home.begin(), home.end(), scheduler::TrainerRank(rank));
    }
  }
  return from_others;
}

void Collector::ReserveScratch(const std::vector<CollectBucket>& work) {
  size_t sources = 0;
  size_t tasks = 0;
  for (const CollectBucket& bucket : work) {
    sources += bucket.sources.size();
    tasks += std::max(bucket.owned.size(), bucket.sums.size());
    norm_tasks_.reserve(std::max(norm_tasks_.capacity(), bucket.units.size()));
  }
  boxes_.reserve(std::max(boxes_.capacity(), sources));
  levels_.reserve(boxes_.capacity());
  sum_tasks_.reserve(std::max(sum_tasks_.capacity(), tasks));
  to_sum_.reserve(work.size());
  landing_in_use_.reserve(work.size());
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
  for (std::vector<uint8_t>& bucket : landed_) std::fill(bucket.begin(), bucket.end(), 0);
  quiet_ = false;
  if (start_.has_value()) start_->Arm();
  unseen_ = unfinished_ = job_.buckets();
  in_flight_ = 0;
  landing_in_use_.clear();
  sum_time_ = norm_time_ = {};
}

absl::StatusOr<bool> Collector::Idle() const {
  for (const auto* const events : {&events_, &landing_events_}) {
    for (const auto& event : *events) {
      absl::StatusOr<bool> done = event->Done();
      if (!done.ok() || !*done) return done;
    }
  }
  return true;
}

absl::Status Collector::Synchronize() {
  absl::Status status = stream_.Synchronize();
  if (landing_stream_ != nullptr) status.Update(landing_stream_->Synchronize());
  return status;
}

void Collector::OnSubmission(const scheduler::Submission& submission) {
  if (kind_.has_value() && *kind_ != submission.kind) StartOver();
  kind_ = submission.kind;
  rank_submitted_[submission.rank.value()] = true;
  for (int32_t parameter : submission.absent) absent_.push_back({submission.rank, parameter});
  if (!submission.absent.empty()) std::sort(absent_.begin(), absent_.end());
  if (submission.kind == AttemptKind::kStep) {
    const double scale = submission.scalars.loss_scale;
    if (loss_scale_.has_value() && *loss_scale_ != scale) {
      // Buckets that came early were reduced under the assumption that the scale had not changed.
      for (int32_t b = 0; b < job_.buckets(); ++b) {
        BucketState& state = states_[b];
        if (std::exchange(state.reduced, false)) {
          ++unfinished_;
          // Another bucket may have landed on its gradients by now: they are read where they lie.
          std::fill(landed_[b].begin(), landed_[b].end(), 0);
        }
        // What is still under way is followed, in the same stream, by what replaces it.
        if (state.summing || state.norming) End();
        state.summing = state.norming = false;
      }
      sum_time_ = norm_time_ = {};
    }
    loss_scale_ = scale;
  }
  submitted_ = true;
}

void Collector::StartOver() {
  for (BucketState& state : states_) state = {.reported = state.reported};
  for (std::vector<uint8_t>& bucket : landed_) std::fill(bucket.begin(), bucket.end(), 0);
  unseen_ = unfinished_ = job_.buckets();
  while (in_flight_ > 0) End();
  sum_time_ = norm_time_ = {};
}

void Collector::OnDetach(int32_t rank) {
  for (int32_t b = 0; armed_ && b < job_.buckets(); ++b) {
    const std::vector<int32_t>& ranks = work()[b].ranks;
    if (!std::binary_search(ranks.begin(), ranks.end(), rank)) continue;
    if (std::exchange(states_[b].seen, false)) ++unseen_;
    states_[b].fetched = false;
    if (std::exchange(states_[b].fetching, false)) End();
    std::fill(landed_[b].begin(), landed_[b].end(), 0);
  }
}

absl::Status Collector::OnGo(const scheduler::Go& go) {
  if (!kind_.has_value() && !job_.has_trainers) kind_ = go.kind;  // before the submission's news
  const size_t known = absent_.size();
  absent_.insert(absent_.end(), go.absent.begin(), go.absent.end());
  if (absent_.size() != known) {
    std::sort(absent_.begin(), absent_.end());
    absent_.erase(std::unique(absent_.begin(), absent_.end()), absent_.end());
  }
  for (const scheduler::BucketRun& run : go.buckets) {
    for (int32_t b = run.first.value(); b < run.end().value(); ++b) {
      RETURN_IF_ERROR(StartRail(b, go.kind));
    }
  }
  return absl::OkStatus();
}

absl::Status Collector::StartRail(int32_t b, AttemptKind kind_of_go) {
  BucketState& state = states_[b];
  if (!state.reported || state.received) return absl::OkStatus();  // not reported: no part
  if (state.started) {
    return absl::InternalError(
        absl::StrCat("a second GO to collect bucket ", b, " of attempt ", attempt_.value()));
  }
  const bool gradients = kind_of_go != AttemptKind::kPush;
  // Gradients of an attempt that has turned out to be a push cross all the same, whatever they are
  // by now: it is aborted, and the others' messages must end.
  if (!gradients || kind() == AttemptKind::kStep) {
    if (!state.packed) {
      state.gone = true;
      return absl::OkStatus();
    }
    state.started = true;
  }
  fault::FaultPoint("lane.collect.go");
  const std::vector<CollectBucket>& work = gradients ? gradients_ : weights_;
  // What nobody has is neither sent nor waited for: both ends read it from the same GO.
  return rail_.Start(
      RailOperation::kCollect, b, *work[b].transfers, [&](const scheduler::Transfer& transfer) {
        if (!gradients) return true;
        if (absent_.empty()) return true;
        const scheduler::LaneUnit& of = *job_.program.Find(transfer.unit);
        const auto leaves =
            scheduler::LeavesOf(*scheduler::FindCell(of, transfer.cell), transfer.subtree);
        return !std::all_of(leaves.begin(), leaves.end(), [&](const scheduler::CellLeaf& leaf) {
          return std::binary_search(absent_.begin(), absent_.end(),
                                    AbsentFragment{leaf.rank, of.unit.parameter});
        });
      });
}

bool Collector::ContributorsReady(int32_t b) const {
  // No trainer here ever has a part in anything: what comes from others may come at once.
  if (!job_.has_trainers) return true;
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
  if (!quiet_ && LooksQuiet()) quiet_ = any = true;
  for (int32_t b = 0; b < job_.buckets(); ++b) {
    BucketState& state = states_[b];
    if (state.reduced) continue;
    if (!state.seen) {
      if (!ContributorsReady(b)) continue;
      state.seen = true;
      --unseen_;
      if (start_.has_value() && kind() == AttemptKind::kStep && !work()[b].ranks.empty()) {
        start_->OnReady(Clock::now());
      }
      fault::FaultPoint("lane.collect.bucket");
      started_ = job_.has_trainers;
      if (!kind_.has_value() && job_.has_trainers) kind_ = AttemptKind::kStep;
      any = true;
      continue;
    }
    if (IsTooEarly()) continue;
    absl::StatusOr<bool> progress = ProgressBucket(b);
    if (!progress.ok()) return progress;
    any = any || *progress;
  }
  if (!to_sum_.empty()) {
    RETURN_IF_ERROR(SumOwned());
    any = true;
  }
  return any;
}

bool Collector::LooksQuiet() const {
  if (!device_.takes_turns()) return true;
  // In a push trainers do nothing but wait for its end.
  if (kind_.has_value() && kind_ != AttemptKind::kStep) return true;
  return std::all_of(
      job_.program.at_home.begin(), job_.program.at_home.end(),
      [&](scheduler::TrainerRank rank) { return trainers_.IsThrough(rank.value(), attempt_); });
}

bool Collector::IsTooEarly() const {
  if (!start_.has_value() || kind() != AttemptKind::kStep || start_->due()) return false;
  return !quiet_ || !device_.takes_turns();
}

bool Collector::IsToLand(int32_t b) const {
  const int64_t bytes = gradients_[b].landing_bytes;
  if (bytes == 0 || kind() != AttemptKind::kStep) return false;
  const BucketState& state = states_[b];
  if (!quiet_) return !state.fetched;
  // With MPS it is always quiet. Once all gradients are ready there is no pass to disturb, and a
  // sum that reads them where they lie is done before a copy and its sum.
  if (!device_.takes_turns() && all_ready()) return false;
  const bool begun = state.fetched || state.packing || state.packed;
  return !begun && bytes >= kLandsInQuietBytes;
}

bool Collector::HasRoomToLand(int32_t b) const {
  const auto overlaps = [&](int32_t other) {
    const CollectBucket& one = gradients_[b];
    const CollectBucket& two = gradients_[other];
    return other != b && one.landing_begin_bytes < two.landing_begin_bytes + two.landing_bytes &&
           two.landing_begin_bytes < one.landing_begin_bytes + one.landing_bytes;
  };
  return std::none_of(landing_in_use_.begin(), landing_in_use_.end(), overlaps);
}

// While the kind of an attempt is open, its gradients' and its weights' messages may both come.
bool Collector::NeedsRail(int32_t b) const {
  if (kind_.has_value()) return !work()[b].transfers->empty();
  return !gradients_[b].transfers->empty() || !weights_[b].transfers->empty();
}

absl::StatusOr<bool> Collector::ProgressBucket(int32_t b) {
  BucketState& state = states_[b];
  bool any = false;
  if (state.fetching) {
    absl::StatusOr<bool> fetched = Finished(*landing_events_[b]);
    if (!fetched.ok() || !*fetched) return fetched;
    state.fetching = false;
    state.fetched = any = true;
  }
  if (IsToLand(b)) {
    if (HasRoomToLand(b)) {
      RETURN_IF_ERROR(Fetch(b));
      return true;
    }
    // Its sum makes room. With other nodes that sum may be waiting for one that waits for this
    // bucket.
    if (!NeedsRail(b)) return any;
  }
  if (!quiet_) return any;
  if (!state.packed) {
    if (!work()[b].lones.empty() || !work()[b].sums.empty()) {
      absl::StatusOr<bool> packed = Through(b, state.packing, &Collector::Pack);
      if (!packed.ok() || !*packed) return packed;
    }
    state.packed = any = true;
    fault::FaultPoint("lane.collect.packed");
    if (NeedsRail(b)) {
      absl::Status status;
      if (!std::exchange(state.reported, true)) {
        status = rail_.ReportReady(attempt_, RailOperation::kCollect, b, kind());
      } else if (std::exchange(state.gone, false)) {
        status = StartRail(b, kind());
      }
      if (!status.ok()) return status;
    }
  }
  if (!kind_.has_value()) return any;
  if (!state.received && !state.started && !NeedsRail(b)) state.received = true;
  if (!state.received && state.started) {
    absl::StatusOr<bool> done = rail_.Done(RailOperation::kCollect, b);
    if (!done.ok()) return done;
    state.received = *done;
    any = any || *done;
  }
  const bool factor_known = kind() == AttemptKind::kPush || loss_scale_.has_value();
  if (!state.received || !factor_known) return any;
  absl::StatusOr<bool> reduced = ProgressReduce(b);
  if (!reduced.ok()) return reduced;
  return any || *reduced;
}

absl::StatusOr<bool> Collector::ProgressReduce(int32_t b) {
  BucketState& state = states_[b];
  const CollectBucket& bucket = work()[b];
  if (!state.norming) {
    if (!state.summing) {
      to_sum_.push_back(b);
      return true;
    }
    absl::StatusOr<bool> summed = Finished(*events_[b]);
    if (!summed.ok() || !*summed) return summed;
    state.summing = false;
    sum_time_.us += Microseconds(state.enqueued, Clock::now());
    sum_time_.bytes += bucket.owned_bytes;
  }
  if (!bucket.norm_units.empty()) {
    absl::StatusOr<bool> done = Through(b, state.norming, &Collector::Norms);
    if (!done.ok() || !*done) return done;
    norm_time_.us += Microseconds(state.enqueued, Clock::now());
  }
  state.reduced = true;
  landing_in_use_.erase(std::remove(landing_in_use_.begin(), landing_in_use_.end(), b),
                        landing_in_use_.end());
  --unfinished_;
  fault::FaultPoint("lane.collect.reduced");
  return true;
}

absl::StatusOr<bool> Collector::Through(int32_t b, bool& under_way,
                                        absl::Status (Collector::*enqueue)(const CollectBucket&)) {
  if (!under_way) {
    const Clock::time_point begun = Clock::now();
    absl::Status status = (this->*enqueue)(work()[b]);
    if (status.ok()) status = Follow(b, under_way, begun);
    if (!status.ok()) return status;
  }
  absl::StatusOr<bool> done = Finished(*events_[b]);
  if (done.ok() && *done) under_way = false;
  return done;
}

absl::Status Collector::Follow(int32_t b, bool& under_way, Clock::time_point begun) {
  states_[b].enqueued = begun;
  under_way = true;
  Begin();
  return stream_.Record(*events_[b]);
}

absl::StatusOr<bool> Collector::Finished(kernels::Event& event) {
  absl::StatusOr<bool> done = event.Done();
  if (done.ok() && *done) End();
  return done;
}

void Collector::Begin() {
  if (in_flight_++ == 0 && start_.has_value()) start_->OnBusy(Clock::now());
}

void Collector::End() {
  if (--in_flight_ == 0 && start_.has_value()) start_->OnIdle(Clock::now());
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
  } else if (HasLanded(bucket, source)) {
    box = source.landing;
  } else if (source.rank >= 0) {
    box.data = trainers_.Address(source.rank, source.arena, source.offset_bytes);
  }
  return box;
}

bool Collector::HasLanded(const CollectBucket& bucket, const CollectSource& source) const {
  if (source.landing.data == nullptr) return false;
  return landed_[&bucket - gradients_.data()][&source - bucket.sources.data()] != 0;
}

absl::Status Collector::Fetch(int32_t b) {
  const CollectBucket& bucket = gradients_[b];
  std::vector<uint8_t>& landed = landed_[b];
  for (size_t i = 0; i < bucket.sources.size(); ++i) {
    const CollectSource& source = bucket.sources[i];
    if (source.landing.data == nullptr) continue;
    const kernels::StridedBox from = Resolve(bucket, source);
    // What takes a kernel is read where it lies, in the quiet.
    if (from.data == nullptr || !device_.ops().CopiesByEngine(source.landing, from)) continue;
    RETURN_IF_ERROR(device_.ops().Copy(*landing_stream_, source.landing, from));
    landed[i] = 1;
  }
  states_[b].fetching = true;
  if (std::find(landing_in_use_.begin(), landing_in_use_.end(), b) == landing_in_use_.end()) {
    landing_in_use_.push_back(b);
  }
  Begin();
  return landing_stream_->Record(*landing_events_[b]);
}

absl::Status Collector::Pack(const CollectBucket& bucket) {
  for (const CollectTask& task : bucket.lones) {
    const kernels::StridedBox from = Resolve(bucket, bucket.sources[task.first_source]);
    if (from.data == nullptr) continue;
    RETURN_IF_ERROR(device_.ops().Copy(stream_, task.dst, from));
  }
  AddSums(bucket, bucket.sums, 0);
  return Sum();
}

absl::Status Collector::SumOwned() {
  const double divisor = kind() == AttemptKind::kPush ? 0 : *loss_scale_;
  const Clock::time_point begun = Clock::now();
  for (const int32_t b : to_sum_) AddSums(work()[b], work()[b].owned, divisor);
  absl::Status status = Sum();
  for (const int32_t b : to_sum_) {
    if (status.ok()) status = Follow(b, states_[b].summing, begun);
  }
  to_sum_.clear();
  return status;
}

void Collector::AddSums(const CollectBucket& bucket, const std::vector<CollectTask>& tasks,
                        double divisor) {
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
    if (task.squares_of >= 0) {
      sum.squares = sums_ + unit_sums_[job_.staged_index(scheduler::UnitId(task.squares_of))].first;
    }
    sum_tasks_.push_back(sum);
  }
}

absl::Status Collector::Sum() {
  absl::Status status = device_.ops().Sum(stream_, sum_tasks_);
  boxes_.clear();
  levels_.clear();
  sum_tasks_.clear();
  return status;
}

absl::Status Collector::Norms(const CollectBucket& bucket) {
  norm_tasks_.clear();
  for (scheduler::UnitId id : bucket.norm_units) {
    const scheduler::Unit& unit = job_.unit(id);
    norm_tasks_.push_back({reinterpret_cast<const float*>(job_.staging->data() +
                                                          job_.staged(id).gradient_offset_bytes),
                           unit.rows * unit.cols, unit.first_element,
                           sums_ + unit_sums_[job_.staged_index(id)].first});
  }
  return device_.ops().SumsOfSquares(stream_, norm_tasks_);
}

bool Collector::complete() const {
  if (!armed_ || !submitted_) return false;
  return kind_ == AttemptKind::kLoad || unfinished_ == 0;
}

bool Collector::watches_words() const {
  if (!armed_ || unfinished_ == 0 || kind_ == AttemptKind::kPush || kind_ == AttemptKind::kLoad) {
    return false;
  }
  return !quiet_ || !all_ready();
}

void Collector::AddAwaitedRanks(std::vector<int32_t>& ranks) const {
  if (!armed_ || unfinished_ == 0 || kind_ != AttemptKind::kStep) return;
  const auto add = [&](int32_t rank) {
    if (!rank_submitted_[rank] || std::find(ranks.begin(), ranks.end(), rank) != ranks.end())
      return;
    ranks.push_back(rank);
  };
  for (int32_t b = 0; b < job_.buckets(); ++b) {
    if (states_[b].seen) continue;
    for (int32_t rank : work()[b].ranks) {
      const TrainerMemory::Trainer* trainer = trainers_.Find(rank);
      if (trainer == nullptr) continue;
      if (!Reached(trainer->page.ready(static_cast<uint32_t>(b)), attempt_.value())) add(rank);
    }
  }
  if (quiet_) return;
  for (const scheduler::TrainerRank rank : job_.program.at_home) {
    if (!trainers_.IsThrough(rank.value(), attempt_)) add(rank.value());
  }
}

bool Collector::awaits_rail() const {
  return armed_ && std::any_of(states_.begin(), states_.end(), [](const BucketState& state) {
           return state.packed && !state.received;
         });
}

void Collector::AddNorms(v1::UnitNorms& norms) const {
  if (kind() != AttemptKind::kStep) return;
  for (const UnitSums& sums : unit_sums_) {
    const scheduler::Unit& unit = job_.unit(sums.unit);
    const bool by_block = unit.flat && unit.kind == scheduler::UnitKind::kPiece;
    norms.add_unit(sums.unit.value());
    norms.add_first_block(unit.first_element / kernels::kNormBlock);
    norms.add_first_element(by_block ? unit.first_element : 0);
    norms.add_sum_count(by_block ? static_cast<int32_t>(sums.count) : 1);
    const double* first = sums_ + sums.first;
    if (by_block) {
      norms.mutable_sums()->Add(first, first + sums.count);
    } else {
      norms.add_sums(std::accumulate(first, first + sums.count, 0.0));
    }
  }
}

}  // namespace dmuond::server::lane
