#include "scheduler/job/outgoing_reports.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <tuple>
#include <utility>

#include "scheduler/convert/convert.h"

namespace dmuond::scheduler {
namespace {

// Flags of `marks_`: the first three say which reports this node's lanes make of a bucket of a
// rail, the other two which of them have been made.
constexpr uint8_t kPartials = 1;
constexpr uint8_t kAdopts = 2;
constexpr uint8_t kWeights = 4;
constexpr uint8_t kCollected = 8;
constexpr uint8_t kPublished = 16;

}  // namespace

void OutgoingReports::OnPlan(const std::vector<LaneProgram>& programs, int32_t ranks) {
  partials_ = adopts_ = weights_ = {};
  collected_ = published_ = {};
  marks_.clear();
  buckets_ = programs.empty() ? 0 : static_cast<int32_t>(programs.front().weights.size());
  submitting_ = {};
  ranks_ = ranks;
  for (const LaneProgram& program : programs) {
    const auto begin = static_cast<std::ptrdiff_t>(marks_.size());
    marks_.resize(marks_.size() + static_cast<size_t>(buckets_));
    const auto expect = [&](const std::vector<std::vector<Transfer>>& transfers, uint8_t mark,
                            Expected& expected) {
      for (size_t b = 0; b < transfers.size(); ++b) {
        if (transfers[b].empty()) continue;
        marks_[begin + b] |= mark;
        ++expected.count;
      }
    };
    expect(program.partials, kPartials, partials_);
    expect(program.adopts, kAdopts, adopts_);
    expect(program.weights, kWeights, weights_);
  }
}

void OutgoingReports::OnOpen(TimePoint now, const OpenAttempt& open) {
  opened_at_ = now;
  gather_ = open.gather;
}

OutgoingReports::Messages OutgoingReports::OnSubmitted(TimePoint now, v1::RankSubmitted submitted) {
  const bool last = CompletesSubmissions(submitted);
  const bool waits = !last && !submitted.withdraw();
  held_submissions_.push_back(std::move(submitted));
  return TakeUnless(waits, now);
}

OutgoingReports::Messages OutgoingReports::OnReady(TimePoint now, const RailReady& ready) {
  Hold(ready);
  return TakeUnless(!Completes(ready), now);
}

OutgoingReports::Messages OutgoingReports::Tell(v1::MemberMessage message) {
  Messages out = Take();
  out.push_back(std::move(message));
  return out;
}

OutgoingReports::Messages OutgoingReports::TakeUnless(bool waits, TimePoint now) {
  if (!waits || !gathers_ || gather_.count() == 0) return Take();
  if (!due_.has_value()) due_ = EndOfRound(now);
  return {};
}

OutgoingReports::Messages OutgoingReports::Pass(TimePoint now, v1::MemberMessage message) {
  if (!message.has_reports()) return Tell(std::move(message));
  job_ = message.job();
  Messages out;
  const auto add = [&out](Messages more) {
    std::move(more.begin(), more.end(), std::back_inserter(out));
  };
  for (v1::RankSubmitted& submitted : *message.mutable_reports()->mutable_submitted()) {
    add(OnSubmitted(now, std::move(submitted)));
  }
  for (const v1::RailReady& wire : message.reports().ready()) {
    const absl::StatusOr<RailReady> ready = FromProto(wire);
    if (ready.ok()) add(OnReady(now, *ready));  // a lane is of the same build as its daemon
  }
  return out;
}

OutgoingReports::Messages OutgoingReports::OnDue(TimePoint now) {
  if (!due_.has_value() || now < *due_) return {};
  return Take();
}

void OutgoingReports::Forget() {
  held_submissions_.clear();
  held_.clear();
  due_.reset();
}

TimePoint OutgoingReports::EndOfRound(TimePoint now) const {
  const std::chrono::nanoseconds round = std::max(kGatherMin, gather_ * 17 / 20);
  return opened_at_ + ((now - opened_at_) / round + 1) * round;
}

void OutgoingReports::Hold(const RailReady& ready) {
  const auto key = [](const RailReady& r) {
    return std::tie(r.attempt, r.rail, r.operation, r.kind);
  };
  const auto same = std::find_if(held_.begin(), held_.end(),
                                 [&](const RailReady& held) { return key(held) == key(ready); });
  if (same == held_.end()) {
    held_.push_back(ready);
  } else {
    Append(same->buckets, ready.buckets);
  }
}

bool OutgoingReports::CompletesSubmissions(const v1::RankSubmitted& submitted) {
  const Attempt attempt(submitted.attempt());
  if (submitting_ != attempt) submitted_ = 0;
  submitting_ = attempt;
  return ++submitted_ >= ranks_;
}

bool OutgoingReports::Completes(const RailReady& ready) {
  const bool publish = ready.operation == RailOperation::kPublish;
  const uint8_t come = publish ? kPublished : kCollected;
  if (Attempt& marked = publish ? published_ : collected_; marked != ready.attempt) {
    marked = ready.attempt;
    for (uint8_t& mark : marks_) mark &= static_cast<uint8_t>(~come);
    if (publish) {
      weights_.left = weights_.count;
    } else {
      partials_.left = partials_.count;
      adopts_.left = adopts_.count;
    }
  }
  const int64_t first = int64_t{ready.rail.value()} * buckets_;
  if (first < 0 || first >= static_cast<int64_t>(marks_.size())) return false;
  for (const BucketRun& run : ready.buckets) {
    const int32_t end = std::min(run.end().value(), buckets_);
    for (int32_t b = std::max(run.first.value(), 0); b < end; ++b) {
      uint8_t& mark = marks_[first + b];
      if ((mark & come) != 0) continue;
      mark |= come;
      if (publish) {
        if ((mark & kWeights) != 0) --weights_.left;
      } else {
        if ((mark & kPartials) != 0) --partials_.left;
        if ((mark & kAdopts) != 0) --adopts_.left;
      }
    }
  }
  if (publish) return weights_.left == 0;
  return (ready.kind == AttemptKind::kStep ? partials_ : adopts_).left == 0;
}

OutgoingReports::Messages OutgoingReports::Take() {
  Messages out;
  if (!held_submissions_.empty() || !held_.empty()) {
    out.emplace_back().set_job(job_);
    v1::Reports& reports = *out.back().mutable_reports();
    for (v1::RankSubmitted& submitted : held_submissions_) {
      *reports.add_submitted() = std::move(submitted);
    }
    for (const RailReady& ready : held_) ToProto(ready, *reports.add_ready());
  }
  Forget();
  return out;
}

}  // namespace dmuond::scheduler
