#include "scheduler/job/group_jobs.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace dmuond::scheduler {
namespace {

void Append(GroupActions more, GroupActions& to) {
  std::move(more.messages.begin(), more.messages.end(), std::back_inserter(to.messages));
  std::move(more.plans.begin(), more.plans.end(), std::back_inserter(to.plans));
}

}  // namespace

GroupJobs::GroupJobs(const GroupJobOptions& options, size_t places) : nodes_(options.nodes) {
  for (size_t i = 0; i < places; ++i) places_.push_back({"", GroupJob(options)});
}

GroupJobs::Place& GroupJobs::PlaceOf(const std::string& name) {
  const auto had = std::find_if(places_.begin(), places_.end(),
                                [&](const Place& place) { return place.name == name; });
  if (had != places_.end()) return *had;
  // One that never had a job first: what is known of the last one is kept for who missed its end.
  for (const bool fresh : {true, false}) {
    for (Place& place : places_) {
      if (place.job.busy() || (fresh && !place.name.empty())) continue;
      place.name = name;
      return place;
    }
  }
  return places_.front();
}

const GroupJob* GroupJobs::Find(absl::string_view name) const {
  for (const Place& place : places_) {
    if (place.name == name) return &place.job;
  }
  return nullptr;
}

GroupActions GroupJobs::OnFormed(TimePoint now, uint32_t epoch) {
  GroupActions out;
  for (Place& place : places_) Append(place.job.OnFormed(now, epoch), out);
  return out;
}

GroupActions GroupJobs::OnMessage(TimePoint now, int32_t from, const v1::MemberMessage& message) {
  if (message.has_member_state()) return OnMemberState(now, from, message.member_state());
  GroupActions out;
  if (message.job().empty()) {
    for (Place& place : places_) Append(place.job.OnMessage(now, from, message), out);
    return out;
  }
  // Incarnations tell any two jobs of a name apart, in whatever place they were.
  uint64_t newest = 0;
  for (const Place& place : places_) newest = std::max(newest, place.job.incarnations());
  GroupJob& job = PlaceOf(message.job()).job;
  job.KnowIncarnations(newest);
  return job.OnMessage(now, from, message);
}

GroupActions GroupJobs::OnMemberState(TimePoint now, int32_t from, const v1::MemberState& state) {
  std::vector<v1::MemberState>& told = states_[from];
  if (!told.empty() && told.front().epoch() != state.epoch()) {
    if (state.epoch() < told.front().epoch()) return {};
    told.clear();
  }
  told.push_back(state);
  // All nodes, each with all of its places, of one epoch.
  if (states_.size() < static_cast<size_t>(nodes_)) return {};
  for (const auto& [node, states] : states_) {
    if (states.size() < places_.size() || states.front().epoch() != state.epoch()) return {};
  }
  const auto states = std::exchange(states_, {});
  for (const auto& [node, of_node] : states) {
    for (const v1::MemberState& held : of_node) {
      if (!held.job().empty()) (void)PlaceOf(held.job());
    }
  }
  GroupActions out;
  for (Place& place : places_) {
    for (const auto& [node, of_node] : states) {
      v1::MemberMessage message;
      v1::MemberState& of_place = *message.mutable_member_state();
      of_place.set_epoch(state.epoch());
      for (const v1::MemberState& held : of_node) {
        if (!held.job().empty() && &PlaceOf(held.job()) == &place) of_place = held;
      }
      Append(place.job.OnMessage(now, node, message), out);
    }
  }
  return out;
}

GroupActions GroupJobs::OnMemberGone(TimePoint now, int32_t node, const std::string& why) {
  states_.clear();
  GroupActions out;
  for (Place& place : places_) Append(place.job.OnMemberGone(now, node, why), out);
  return out;
}

GroupActions GroupJobs::OnPlanMade(TimePoint now, const PlanOrder& order,
                                   absl::StatusOr<PlannedJob> made) {
  for (Place& place : places_) {
    if (place.job.Awaits(order)) return place.job.OnPlanMade(now, order, std::move(made));
  }
  return {};
}

GroupActions GroupJobs::OnTick(TimePoint now) {
  GroupActions out;
  for (Place& place : places_) Append(place.job.OnTick(now), out);
  return out;
}

std::optional<TimePoint> GroupJobs::due() const {
  std::optional<TimePoint> first;
  for (const Place& place : places_) {
    const std::optional<TimePoint> due = place.job.due();
    if (due.has_value() && (!first.has_value() || *due < *first)) first = due;
  }
  return first;
}

GroupActions GroupJobs::OnDue(TimePoint now) {
  GroupActions out;
  for (Place& place : places_) Append(place.job.OnDue(now), out);
  return out;
}

bool GroupJobs::Formed() const {
  return std::all_of(places_.begin(), places_.end(),
                     [](const Place& place) { return place.job.Formed(); });
}

uint32_t GroupJobs::epoch() const {
  uint32_t newest = 0;
  for (const Place& place : places_) newest = std::max(newest, place.job.epoch());
  return newest;
}

}  // namespace dmuond::scheduler
