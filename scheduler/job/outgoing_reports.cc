#include "scheduler/job/outgoing_reports.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <tuple>
#include <utility>

#include "scheduler/convert/convert.h"

namespace dmuond::scheduler {
namespace {

std::vector<bool> NotEmpty(const std::vector<std::vector<Transfer>>& transfers) {
  std::vector<bool> parts;
  parts.reserve(transfers.size());
  for (const std::vector<Transfer>& bucket : transfers) parts.push_back(!bucket.empty());
  return parts;
}

}  // namespace

void OutgoingReports::OnPlan(const std::vector<LaneProgram>& programs, int32_t ranks) {
  partials_ = adopts_ = weights_ = {};
  collected_ = published_ = {};
  submitting_ = {};
  ranks_ = ranks;
  for (const LaneProgram& program : programs) {
    partials_.parts.push_back(NotEmpty(program.partials));
    adopts_.parts.push_back(NotEmpty(program.adopts));
    weights_.parts.push_back(NotEmpty(program.weights));
  }
  for (Expected* expected : {&partials_, &adopts_, &weights_}) {
    for (const std::vector<bool>& rail : expected->parts) {
      expected->count += static_cast<int32_t>(std::count(rail.begin(), rail.end(), true));
    }
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
  Reported& reported = publish ? published_ : collected_;
  if (reported.attempt != ready.attempt) {
    reported.attempt = ready.attempt;
    reported.buckets = weights_.parts;  // for its shape
    for (std::vector<bool>& rail : reported.buckets) rail.assign(rail.size(), false);
    for (Expected* expected : {&partials_, &adopts_, &weights_}) {
      if (publish == (expected == &weights_)) expected->left = expected->count;
    }
  }
  const int32_t rail = ready.rail.value();
  if (rail < 0 || rail >= static_cast<int32_t>(reported.buckets.size())) return false;
  std::vector<bool>& buckets = reported.buckets[rail];
  for (const BucketRun& run : ready.buckets) {
    const int32_t end = std::min(run.end().value(), static_cast<int32_t>(buckets.size()));
    for (int32_t b = run.first.value(); b < end; ++b) {
      if (buckets[b]) continue;
      buckets[b] = true;
      for (Expected* expected : {&partials_, &adopts_, &weights_}) {
        if (publish == (expected == &weights_) && expected->parts[rail][b]) --expected->left;
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
