#include "server/lane/publisher.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "scheduler/convert/convert.h"
#include "server/lane/strided.h"

namespace dmuond::server::lane {

using scheduler::Box;
using scheduler::RailOperation;
using scheduler::Transfer;
using scheduler::UnitId;

Publisher::Publisher(const LaneJob& job, const TrainerMemory& trainers, Rail& rail,
                     kernels::Device& device)
    : job_(job),
      trainers_(trainers),
      rail_(rail),
      device_(device),
      board_(job.board == nullptr ? nullptr : job.board->data(), job.program.lanes_per_node),
      batches_(job.program.batches.size()),
      buckets_(job.buckets()) {
  for (size_t i = 0; i < batches_.size(); ++i) {
    std::vector<int32_t>& of_batch = batches_[i].buckets;
    for (const UnitId id : job.program.batches[i].units) {
      const scheduler::LaneUnit& of = *job.program.Find(id);
      const int32_t b = of.unit.bucket.value();
      ++buckets_[b].owned_units;
      AddPacks(buckets_[b], id);
      if (!of.holders.empty()) AddUnit(of, &batches_[i].copies);
      if (std::find(of_batch.begin(), of_batch.end(), b) != of_batch.end()) continue;
      of_batch.push_back(b);
      ++buckets_[b].batches;
    }
  }
  for (const scheduler::LaneUnit& of : job.program.units) {
    if (!of.holders.empty() && !job.program.Owns(of)) AddUnit(of, nullptr);
  }
}

absl::StatusOr<std::unique_ptr<Publisher>> Publisher::Create(const LaneJob& job,
                                                             const TrainerMemory& trainers,
                                                             Rail& rail, kernels::Device& device) {
  std::unique_ptr<Publisher> publisher(new Publisher(job, trainers, rail, device));
  for (auto* place : {&publisher->kernels_, &publisher->engines_}) {
    ASSIGN_OR_RETURN(*place, device.CreateStream());
  }
  std::vector<std::unique_ptr<kernels::Event>*> places;
  const auto add = [&](Copies& copies) {
    places.insert(places.end(), {&copies.here_event, &copies.elsewhere_event});
  };
  for (BatchCopies& batch : publisher->batches_) add(batch.copies);
  for (Bucket& bucket : publisher->buckets_) {
    places.push_back(&bucket.pack_event);
    add(bucket.others);
  }
  for (auto* place : places) {
    ASSIGN_OR_RETURN(*place, device.CreateEvent());
  }
  return publisher;
}

absl::Status Publisher::Synchronize() {
  absl::Status status = kernels_->Synchronize();
  status.Update(engines_->Synchronize());
  return status;
}

void Publisher::AddPacks(Bucket& bucket, UnitId id) {
  const scheduler::Unit& unit = job_.unit(id);
  const kernels::DType dtype = ToDType(job_.parameter(id).weight_type);
  const auto& transfers = job_.program.weights[unit.bucket.value()];
  for (const Transfer& transfer : scheduler::TransfersOfUnit(transfers, id)) {
    if (transfer.in_place) continue;
    std::byte* const staging = job_.staging->data();
    bucket.packs.push_back({At(staging + transfer.offset_bytes, dtype,
                               scheduler::ViewInBox(transfer.box, transfer.box)),
                            At(staging + job_.staged(id).weight_offset_bytes, dtype,
                               scheduler::ViewInUnit(unit, transfer.box))});
  }
}

void Publisher::AddUnit(const scheduler::LaneUnit& of, Copies* own) {
  const scheduler::Unit& unit = of.unit;
  Bucket& bucket = buckets_[unit.bucket.value()];
  bucket.part = true;
  const kernels::DType dtype = ToDType(job_.program.FindParameter(unit.parameter)->weight_type);
  std::byte* const staging = job_.staging->data();
  const auto transfers =
      scheduler::TransfersOfUnit(job_.program.weights[unit.bucket.value()], unit.id);
  for (const int32_t f : of.holders) {
    const scheduler::Fragment& fragment = job_.program.fragments[f];
    const Box part = scheduler::Intersect(fragment.box, unit.box);
    const auto add = [&](const Box& box, const kernels::StridedBox& src, Copies& copies) {
      const scheduler::StridedView view =
          scheduler::ViewInSlice(fragment.box, fragment.weight.strides, box);
      const auto& home = job_.program.at_home;
      const bool here = std::binary_search(home.begin(), home.end(), fragment.rank);
      (here ? copies.here : copies.elsewhere)
          .push_back({fragment.rank.value(), fragment.weight.arena,
                      OffsetBytes(fragment.weight, view, dtype), At(nullptr, dtype, view), src,
                      2 * scheduler::Elements(box) * static_cast<int64_t>(kernels::SizeOf(dtype))});
    };
    if (own != nullptr) {
      add(part,
          At(staging + job_.staged(unit.id).weight_offset_bytes, dtype,
             scheduler::ViewInUnit(unit, part)),
          *own);
      continue;
    }
    for (const Transfer& transfer : transfers) {
      const Box box = scheduler::Intersect(part, transfer.box);
      if (scheduler::Empty(box)) continue;
      add(box, At(staging + transfer.offset_bytes, dtype, scheduler::ViewInBox(transfer.box, box)),
          bucket.others);
    }
  }
}

void Publisher::Start(const Job& job) {
  current_ = job;
  gate_open_ = false;
  unfinished_ = job_.buckets();
  updated_ = sent_ = arrived_ = 0;
  copy_time_ = {};
  if (job.republish && job_.buckets() > 0) {
    republished_ = 0;
    for (int32_t b = 0; b < job_.buckets(); ++b) {
      republished_ =
          std::max(republished_, board_.entry(b, job_.program.rail.value()).republished.load());
    }
    ++republished_;
  }
  for (Bucket& bucket : buckets_) {
    bucket.waiting = bucket.owned_units;
    bucket.uncopied = bucket.batches;
    bucket.packing = bucket.packed = bucket.started = bucket.received = false;
    bucket.copying_others = bucket.finished = false;
  }
}

void Publisher::AnnounceAll(scheduler::Attempt attempt) {
  current_ = {};
  current_.attempt = attempt;
  AnnounceEach();
}

void Publisher::OnBatch(const scheduler::Batch& batch) {
  ++updated_;
  for (UnitId id : batch.units) --buckets_[job_.unit(id).bucket.value()].waiting;
}

bool Publisher::Wanted(int32_t rank) const {
  return current_.ranks == nullptr || current_.ranks->empty() ||
         std::find(current_.ranks->begin(), current_.ranks->end(), rank) != current_.ranks->end();
}

absl::Status Publisher::OnGo(const scheduler::Go& go) {
  for (const scheduler::BucketRun& run : go.buckets) {
    for (int32_t b = run.first.value(); b < run.end().value(); ++b) {
      RETURN_IF_ERROR(StartRail(b));
    }
  }
  return absl::OkStatus();
}

absl::Status Publisher::StartRail(int32_t b) {
  Bucket& bucket = buckets_[b];
  if (!running() || !bucket.packed || bucket.started) {
    return absl::InternalError(absl::StrCat("GO to publish bucket ", b, " of attempt ",
                                            current_.attempt.value(), ", which is not ready here"));
  }
  bucket.started = true;
  fault::FaultPoint("lane.publish.go");
  return rail_.Start(RailOperation::kPublish, b, job_.program.weights[b],
                     [](const Transfer&) { return true; });
}

absl::StatusOr<bool> Publisher::OpenGate() {
  if (current_.submitted_first) {
    for (int32_t rank : trainers_.attached()) {
      if (!trainers_.IsThrough(rank, current_.attempt)) return false;
    }
  }
  gate_open_ = true;
  fault::FaultPoint("lane.publish.gate");
  if (current_.poison) {
    RETURN_IF_ERROR(PoisonWeights());
  }
  return true;
}

void Publisher::AddAwaitedRanks(std::vector<int32_t>& ranks) const {
  if (!running() || gate_open_ || !current_.submitted_first) return;
  for (int32_t rank : trainers_.attached()) {
    if (!trainers_.IsThrough(rank, current_.attempt)) ranks.push_back(rank);
  }
}

bool Publisher::awaits_rail() const {
  return running() && std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) {
           return bucket.packed && !bucket.received;
         });
}

absl::Status Publisher::PoisonWeights() {
  const auto poison = [&](kernels::Stream& stream, const std::vector<CopyOut>& copies) {
    for (const CopyOut& copy : copies) {
      const TrainerMemory::Trainer* trainer = trainers_.Find(copy.rank);
      if (trainer == nullptr || !trainer->poison_parameters) continue;
      kernels::StridedBox dst = copy.dst;
      dst.data = trainers_.Address(copy.rank, copy.arena, copy.offset_bytes);
      RETURN_IF_ERROR(device_.ops().Fill(stream, dst, std::numeric_limits<float>::quiet_NaN()));
    }
    return absl::OkStatus();
  };
  absl::Status status;
  const auto poison_all = [&](const Copies& copies) {  // which follow in the same streams
    status.Update(poison(*kernels_, copies.here));
    status.Update(poison(*engines_, copies.elsewhere));
  };
  for (const BatchCopies& batch : batches_) poison_all(batch.copies);
  for (const Bucket& bucket : buckets_) poison_all(bucket.others);
  return status;
}

absl::StatusOr<bool> Publisher::Progress() {
  if (!running()) return false;
  bool any = false;
  if (!gate_open_) {
    absl::StatusOr<bool> open = OpenGate();
    if (!open.ok()) return open;
    any = *open;
  }
  absl::StatusOr<bool> copied = ProgressBatches();
  if (!copied.ok()) return copied;
  any = any || *copied;
  for (int32_t b = 0; b < job_.buckets(); ++b) {
    if (buckets_[b].finished) continue;
    absl::StatusOr<bool> progress = ProgressBucket(b);
    if (!progress.ok()) return progress;
    any = any || *progress;
  }
  return any;
}

absl::StatusOr<bool> Publisher::ProgressBatches() {
  bool any = false;
  for (; gate_open_ && sent_ < updated_; ++sent_) {
    RETURN_IF_ERROR(Enqueue(batches_[sent_].copies));
    ++in_flight_;
    any = true;
  }
  for (; arrived_ < sent_; ++arrived_) {
    const BatchCopies& batch = batches_[arrived_];
    absl::StatusOr<bool> done = AreThrough(batch.copies);
    if (!done.ok()) return done;
    if (!*done) break;
    --in_flight_;
    const Clock::time_point enqueued = batch.copies.enqueued;
    const Clock::time_point before = arrived_ == 0 ? enqueued : arrived_at_;
    arrived_at_ = Clock::now();
    copy_time_.us += Microseconds(std::max(enqueued, before), arrived_at_);
    for (const int32_t b : batch.buckets) --buckets_[b].uncopied;
    any = true;
  }
  return any;
}

absl::StatusOr<bool> Publisher::ProgressPack(int32_t b) {
  Bucket& bucket = buckets_[b];
  if (!bucket.packing) {
    for (const Pack& pack : bucket.packs) {
      RETURN_IF_ERROR(device_.ops().Copy(*kernels_, pack.dst, pack.src));
    }
    RETURN_IF_ERROR(kernels_->Record(*bucket.pack_event));
    bucket.packing = true;
    ++in_flight_;
  }
  absl::StatusOr<bool> done = bucket.pack_event->Done();
  if (!done.ok() || !*done) return done;
  --in_flight_;
  bucket.packed = true;
  bucket.received = job_.program.weights[b].empty() || !current_.rail;
  if (bucket.received) return true;
  RETURN_IF_ERROR(rail_.ReportReady(current_.attempt, RailOperation::kPublish, b,
                                    scheduler::AttemptKind::kStep));
  return true;
}

absl::StatusOr<bool> Publisher::ProgressBucket(int32_t b) {
  Bucket& bucket = buckets_[b];
  if (bucket.waiting > 0) return false;
  bool any = false;
  if (!bucket.packed) {
    absl::StatusOr<bool> packed = ProgressPack(b);
    if (!packed.ok()) return packed;
    any = *packed;
  }
  if (bucket.packed && !bucket.received && bucket.started) {
    absl::StatusOr<bool> done = rail_.Done(RailOperation::kPublish, b);
    if (!done.ok()) return done;
    bucket.received = *done;
    any = any || *done;
  }
  if (gate_open_ && bucket.uncopied == 0 && bucket.received) {
    absl::StatusOr<bool> copied = ProgressOthers(bucket);
    if (!copied.ok() || !*copied) return copied.ok() ? absl::StatusOr<bool>(any) : copied;
    bucket.finished = true;
    --unfinished_;
    fault::FaultPoint("lane.publish.bucket");
    if (!device_.takes_turns()) {
      Announce(b);
    } else if (!running()) {
      AnnounceEach();
    }
    fault::FaultPoint("lane.publish.announced");
    any = true;
  }
  return any;
}

absl::StatusOr<bool> Publisher::ProgressOthers(Bucket& bucket) {
  if (bucket.others.here.empty() && bucket.others.elsewhere.empty()) return true;
  if (!bucket.copying_others) {
    RETURN_IF_ERROR(Enqueue(bucket.others));
    bucket.copying_others = true;
    ++in_flight_;
  }
  absl::StatusOr<bool> done = AreThrough(bucket.others);
  if (!done.ok() || !*done) return done;
  --in_flight_;
  copy_time_.us += Microseconds(bucket.others.enqueued, Clock::now());
  return true;
}

absl::Status Publisher::Enqueue(Copies& copies) {
  copies.enqueued = Clock::now();
  fault::FaultPoint("lane.publish.copy");
  absl::Status status = Copy(*engines_, copies.elsewhere);
  if (status.ok()) status = engines_->Record(*copies.elsewhere_event);
  if (status.ok()) status = Copy(*kernels_, copies.here);
  if (status.ok()) status = kernels_->Record(*copies.here_event);
  return status;
}

absl::StatusOr<bool> Publisher::AreThrough(const Copies& copies) {
  absl::StatusOr<bool> through = copies.elsewhere_event->Done();
  return through.ok() && *through ? copies.here_event->Done() : through;
}

absl::Status Publisher::Copy(kernels::Stream& stream, const std::vector<CopyOut>& copies) {
  for (const CopyOut& copy : copies) {
    if (!Wanted(copy.rank)) continue;
    kernels::StridedBox dst = copy.dst;
    dst.data = trainers_.Address(copy.rank, copy.arena, copy.offset_bytes);
    if (dst.data == nullptr) continue;  // the trainer is gone
    RETURN_IF_ERROR(device_.ops().Copy(stream, dst, copy.src));
    copy_time_.bytes += copy.bytes;
  }
  return absl::OkStatus();
}

std::atomic<uint64_t>& Publisher::Mark(int32_t b, int32_t lane) const {
  BoardEntry& entry = board_.entry(b, lane);
  return current_.republish ? entry.republished : entry.attempt;
}

bool Publisher::AllHaveAnnounced(int32_t b) const {
  const auto has = [&](int32_t lane) { return Mark(b, lane).load() >= mark_value(); };
  if (!device_.takes_turns()) {
    const auto& lanes = job_.program.publishers[b];
    return std::all_of(lanes.begin(), lanes.end(), has);
  }
  for (int32_t lane = 0; lane < job_.program.lanes_per_node; ++lane) {
    if (!has(lane)) return false;
  }
  return true;
}

void Publisher::AnnounceEach() {
  for (int32_t b = 0; b < job_.buckets(); ++b) Announce(b);
}

void Publisher::Announce(int32_t b) {
  if (!buckets_[b].part && !device_.takes_turns()) return;
  Mark(b, job_.program.rail.value()).store(mark_value());
  if (!AllHaveAnnounced(b)) return;
  for (int32_t rank : trainers_.attached()) {
    if (!Wanted(rank)) continue;
    const TrainerMemory::Trainer& trainer = *trainers_.Find(rank);
    wire::AdvanceTo(trainer.page.published(static_cast<uint32_t>(b), trainer.buckets),
                    current_.attempt.value());
  }
}

}  // namespace dmuond::server::lane
