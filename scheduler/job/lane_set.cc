#include "scheduler/job/lane_set.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "scheduler/job/impossible.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// A process that SIGKILL does not end by then never ends.
constexpr std::chrono::seconds kKilledWithin{60};

LaneIndex Index(size_t i) { return LaneIndex(static_cast<int32_t>(i)); }

const v1::LaneBits::Module* FindIn(const v1::LaneBits& bits, const std::string& name) {
  const auto found =
      std::find_if(bits.modules().begin(), bits.modules().end(),
                   [&](const v1::LaneBits::Module& module) { return module.name() == name; });
  return found == bits.modules().end() ? nullptr : &*found;
}

}  // namespace

const char* Name(LaneSet::State state) {
  switch (state) {
    case LaneSet::State::kAbsent:
      return "Absent";
    case LaneSet::State::kStarting:
      return "Starting";
    case LaneSet::State::kReady:
      return "Ready";
    case LaneSet::State::kCondemned:
      return "Condemned";
    case LaneSet::State::kGone:
      return "Gone";
  }
  return "unknown";
}

LaneSet::LaneSet(LaneId first, int32_t lanes, LaneWatchOptions watch)
    : options_(watch), lanes_(lanes) {
  for (int32_t i = 0; i < lanes; ++i) lanes_[i].known.id = LaneId(first.value() + i);
}

bool LaneSet::all_ready() const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const Place& place) { return place.known.ready(); });
}

bool LaneSet::any_checked() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const Place& place) {
    return place.known.state != State::kAbsent && place.known.checked;
  });
}

bool LaneSet::all_absent() const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const Place& place) { return place.known.state == State::kAbsent; });
}

uint64_t LaneSet::published_attempt() const {
  const auto behind =
      std::min_element(lanes_.begin(), lanes_.end(), [](const Place& a, const Place& b) {
        return a.known.published_attempt < b.known.published_attempt;
      });
  return behind == lanes_.end() ? 0 : behind->known.published_attempt;
}

// ---- processes ----

void LaneSet::OnStarted(LaneIndex lane, uint32_t epoch) {
  Place& place = At(lane);
  if (place.known.state != State::kAbsent) {
    Impossible("LaneSet", Name(place.known.state), "started");
    return;
  }
  epoch_ = epoch;
  place.known.state = State::kStarting;
  place.known.checked = false;
  ++place.known.starts;
  place.watch.emplace(options_);
}

std::vector<BitsDifference> LaneSet::Differences(LaneIndex lane, const v1::LaneBits& bits) const {
  // The lanes of a node have one program and one of each library.
  for (const Place& place : lanes_) {
    if (place.known.bits.ByteSizeLong() == 0) continue;
    std::vector<BitsDifference> differences =
        CodeDifferences(place.known.bits, bits, Between::kLanes);
    if (!differences.empty()) return differences;
  }
  const v1::LaneBits& own = lanes_[lane.value()].known.bits;
  return own.ByteSizeLong() == 0 ? std::vector<BitsDifference>() : DeviceDifferences(own, bits);
}

absl::Status LaneSet::CheckBits(LaneIndex lane, const v1::LaneBits& bits) {
  const std::vector<BitsDifference> differences = Differences(lane, bits);
  Lane& known = At(lane).known;
  if (differences.empty()) {
    known.checked = true;
    if (known.bits.ByteSizeLong() == 0) known.bits = bits;
    // One that a lane loads later than its predecessor did counts from now on.
    for (const v1::LaneBits::Module& module : bits.modules()) {
      if (FindIn(known.bits, module.name()) == nullptr) *known.bits.add_modules() = module;
    }
    // The job's build is here again: what was refused before can no longer be accepted.
    ForgetRefused();
    return absl::OkStatus();
  }
  ForgetRefused();
  known.refused = bits;
  return Error(
      absl::StatusCode::kFailedPrecondition, "LANE_DIFFERS",
      Say("lane ", Named("lane", known.id.value()), " would go on with other bits: its ",
          Named("what", differences.front().what), " is ", Named("now", differences.front().now),
          ", and the job began with ", Named("began", differences.front().began),
          ". Install that again, and the job goes on; with `dmuonctl job accept-lanes` on this "
          "node, or a daemon that is started again, it goes on with what is installed then"));
}

void LaneSet::ForgetRefused() {
  for (Place& place : lanes_) place.known.refused.Clear();
}

bool LaneSet::refused() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const Place& place) { return place.known.refused.ByteSizeLong() > 0; });
}

std::string LaneSet::Accept(int64_t step) {
  std::vector<std::string> what;
  for (Place& place : lanes_) {
    const v1::LaneBits accepted = std::exchange(place.known.refused, {});
    if (accepted.ByteSizeLong() == 0) continue;
    const LaneIndex lane(static_cast<int32_t>(&place - lanes_.data()));
    for (const BitsDifference& differs : Differences(lane, accepted)) {
      what.push_back(
          absl::StrCat(differs.what, " is ", differs.now, " instead of ", differs.began));
    }
    const v1::LaneBits before = place.known.bits;
    for (Place& other : lanes_) {
      v1::LaneBits& bits = other.known.bits;
      if (bits.ByteSizeLong() == 0) continue;
      for (v1::LaneBits::Module& module : *bits.mutable_modules()) {
        if (const auto* by = FindIn(accepted, module.name()); by != nullptr) module = *by;
      }
      bits.set_code(accepted.code());
      bits.set_functions(accepted.functions());
      if (bits.library() == before.library()) bits.set_library(accepted.library());
      if (bits.core_type() == before.core_type()) bits.set_core_type(accepted.core_type());
    }
  }
  std::string text = absl::StrJoin(what, ", ");
  absl::StrAppend(&accepted_, accepted_.empty() ? "" : "; ", "after step ", step, ": ", text);
  return text;
}

bool LaneSet::OnReady(LaneIndex lane, std::string device) {
  Lane& known = At(lane).known;
  if (known.state == State::kCondemned || known.state == State::kGone) return false;
  if (known.state != State::kStarting) return Impossible("LaneSet", Name(known.state), "ready");
  known.state = State::kReady;
  known.device = std::move(device);
  if (!all_ready()) return false;
  ForgetRefused();
  return true;
}

bool LaneSet::OnGone(LaneIndex lane) {
  Lane& known = At(lane).known;
  if (known.state == State::kGone) return false;
  if (known.state == State::kAbsent) return Impossible("LaneSet", Name(known.state), "gone");
  known.state = State::kGone;
  std::erase_if(unmapping_, [lane](const auto& of) { return of.first.second == lane; });
  return true;
}

void LaneSet::GiveUp() {
  for (Place& place : lanes_) {
    place.known.state = State::kAbsent;
    place.watch.reset();
  }
  mapping_.clear();
  unmapping_.clear();  // new ones begin when these have ended
  loading_.clear();
}

void LaneSet::ForgetState() {
  for (Place& place : lanes_) place.known.published_attempt = 0;
  loading_.clear();
}

// ---- what new lanes do before they work ----

bool LaneSet::OnMapped(int32_t rank, LaneIndex lane) {
  return mapping_.erase({rank, lane}) > 0 && mapping_.empty();
}

void LaneSet::BeginUnmapping(int32_t rank, uint64_t incarnation) {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const State state = lanes_[i].known.state;
    if (state != State::kReady && state != State::kCondemned) continue;
    unmapping_[{rank, Index(i)}] = incarnation;
  }
}

void LaneSet::OnUnmapped(int32_t rank, uint64_t incarnation, LaneIndex lane) {
  const auto found = unmapping_.find({rank, lane});
  if (found != unmapping_.end() && found->second == incarnation) unmapping_.erase(found);
}

bool LaneSet::unmapping(int32_t rank) const {
  const auto first = unmapping_.lower_bound({rank, LaneIndex(0)});
  return first != unmapping_.end() && first->first.first == rank;
}

void LaneSet::BeginLoading() {
  for (size_t i = 0; i < lanes_.size(); ++i) loading_.insert(Index(i));
}

bool LaneSet::OnLoaded(LaneIndex lane) { return loading_.erase(lane) > 0 && loading_.empty(); }

uint64_t LaneSet::done() const {
  const auto ready = std::count_if(lanes_.begin(), lanes_.end(),
                                   [](const Place& place) { return place.known.ready(); });
  // What is still to be mapped and loaded shrinks, from what there could be at most.
  constexpr uint64_t kMost = uint64_t{1} << 32;
  return kMost + static_cast<uint64_t>(ready) - mapping_.size() - loading_.size();
}

// ---- steps ----

void LaneSet::OnGathered(LaneIndex lane, uint64_t attempt, std::vector<int32_t> non_finite) {
  Lane& known = At(lane).known;
  known.gathered_attempt = attempt;
  known.non_finite = std::move(non_finite);
}

void LaneSet::OnPublished(LaneIndex lane, uint64_t attempt) {
  Lane& known = At(lane).known;
  known.published_attempt = std::max(known.published_attempt, attempt);
}

// ---- lanes that hang ----

void LaneSet::OnReport(LaneIndex lane) {
  if (At(lane).watch.has_value()) At(lane).watch->OnReport();
}

void LaneSet::OnPong(LaneIndex lane, const LaneWatch::Answer& answer) {
  if (At(lane).watch.has_value()) At(lane).watch->OnAnswer(answer);
}

std::vector<LaneSet::Order> LaneSet::OnTick(TimePoint now, const Owed& owed,
                                            const ProcessorTime& used) {
  std::vector<Order> orders;
  std::vector<Order> expelled;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const LaneIndex lane = Index(i);
    Place& place = lanes_[i];
    if (place.known.state == State::kCondemned) {
      if (!place.condemned_at.has_value()) place.condemned_at = now;
      if (now - *place.condemned_at >= kKilledWithin) orders.emplace_back(Unkillable{lane});
      continue;
    }
    if (!place.known.lives()) continue;
    const bool owes = place.known.ready() && place.known.published_attempt < owed.applied_attempt;
    const LaneWatch::Look look = place.watch->OnTick(now, owes, [&] { return used(lane); });
    if (!look.hangs.empty()) {
      orders.emplace_back(Condemn(now, lane, look.hangs, owed));
      continue;
    }
    const std::vector<int32_t>& ranks = place.watch->last().awaited_ranks;
    if (look.overdue && !ranks.empty()) expelled.emplace_back(Expel{lane, ranks});
    if (look.ping.has_value()) orders.emplace_back(Ping{lane, *look.ping});
  }
  std::move(expelled.begin(), expelled.end(), std::back_inserter(orders));
  return orders;
}

std::vector<LaneSet::Order> LaneSet::OnGatherOverdue(TimePoint now, uint64_t attempt,
                                                     const std::string& why) {
  std::vector<Order> orders;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const LaneIndex lane = Index(i);
    Place& place = lanes_[i];
    const bool works = place.known.state == State::kStarting || place.known.state == State::kReady;
    if (!works || place.known.gathered_attempt >= attempt) continue;
    const bool answers = place.watch->answers();
    // It is the other node's lane that hangs, and that node is told, too.
    const bool excused = answers && place.watch->last().awaits_rail;
    if (answers && !place.watch->last().awaited_ranks.empty()) {
      orders.emplace_back(Expel{lane, place.watch->last().awaited_ranks, !excused});
      continue;
    }
    if (excused) continue;
    orders.emplace_back(Condemn(now, lane, why, {.open_attempt = attempt}));
  }
  return orders;
}

LaneSet::Kill LaneSet::Condemn(TimePoint now, LaneIndex lane, std::string why, const Owed& owed) {
  Kill kill{lane, std::move(why), AwaitedFrom(lane, owed)};
  At(lane).known.state = State::kCondemned;
  At(lane).condemned_at = now;
  return kill;
}

std::string LaneSet::AwaitedFrom(LaneIndex lane, const Owed& owed) const {
  const Lane& known = lanes_[lane.value()].known;
  if (known.state == State::kStarting) return "to be ready";
  if (loading_.contains(lane)) return "to take the state of a snapshot";
  for (const auto& [rank, mapper] : mapping_) {
    if (mapper == lane) return absl::StrCat("to map the memory of rank ", rank);
  }
  for (const auto& [of, incarnation] : unmapping_) {
    if (of.second == lane) return absl::StrCat("to unmap the memory of rank ", of.first);
  }
  if (known.published_attempt < owed.applied_attempt) {
    return absl::StrCat("the weights after attempt ", owed.applied_attempt);
  }
  if (owed.open_attempt == 0) return "nothing yet";
  if (known.gathered_attempt < owed.open_attempt) {
    return absl::StrCat("the gradients of attempt ", owed.open_attempt);
  }
  return absl::StrCat("the decision of attempt ", owed.open_attempt);
}

// ---- the record ----

void LaneSet::ToRecord(v1::RecordedLanes& record) const {
  record.set_epoch(epoch_);
  record.set_accepted(accepted_);
  for (const Place& place : lanes_) {
    v1::RecordedLane& lane = *record.add_lanes();
    lane.set_state(static_cast<v1::RecordedLane::State>(static_cast<int>(place.known.state) + 1));
    lane.set_starts(place.known.starts);
    lane.set_device(place.known.device);
    lane.set_published_attempt(place.known.published_attempt);
    lane.set_gathered_attempt(place.known.gathered_attempt);
    lane.mutable_non_finite()->Add(place.known.non_finite.begin(), place.known.non_finite.end());
    *lane.mutable_bits() = place.known.bits;
    lane.set_checked(place.known.checked);
    if (place.known.refused.ByteSizeLong() > 0) *lane.mutable_refused() = place.known.refused;
  }
  for (const auto& [rank, lane] : mapping_) {
    v1::RecordedLanes::Mapping& mapping = *record.add_mapping();
    mapping.set_rank(rank);
    mapping.set_lane(lane.value());
  }
  for (const auto& [of, incarnation] : unmapping_) {
    v1::RecordedLanes::Unmapping& unmapping = *record.add_unmapping();
    unmapping.set_rank(of.first);
    unmapping.set_lane(of.second.value());
    unmapping.set_incarnation(incarnation);
  }
  for (const LaneIndex lane : loading_) record.add_loading(lane.value());
}
static_assert(static_cast<int>(LaneSet::State::kAbsent) + 1 == v1::RecordedLane::STATE_ABSENT);
static_assert(static_cast<int>(LaneSet::State::kGone) + 1 == v1::RecordedLane::STATE_GONE);

absl::StatusOr<LaneSet> LaneSet::FromRecord(LaneId first, int32_t lanes, LaneWatchOptions watch,
                                            const v1::RecordedLanes& record) {
  if (record.lanes_size() != lanes) {
    return absl::InvalidArgumentError(
        absl::StrCat("RecordedLanes has ", record.lanes_size(), " lanes; this node has ", lanes));
  }
  LaneSet set(first, lanes, watch);
  set.epoch_ = record.epoch();
  set.accepted_ = record.accepted();
  for (int32_t i = 0; i < lanes; ++i) {
    const v1::RecordedLane& lane = record.lanes(i);
    if (lane.state() < v1::RecordedLane::STATE_ABSENT ||
        lane.state() > v1::RecordedLane::STATE_GONE) {
      return absl::InvalidArgumentError(
          absl::StrCat("RecordedLane.state has the unknown value ", lane.state()));
    }
    Place& place = set.lanes_[i];
    place.known.state = static_cast<State>(lane.state() - 1);
    place.known.starts = lane.starts();
    place.known.device = lane.device();
    place.known.published_attempt = lane.published_attempt();
    place.known.gathered_attempt = lane.gathered_attempt();
    place.known.non_finite.assign(lane.non_finite().begin(), lane.non_finite().end());
    place.known.bits = lane.bits();
    place.known.checked = lane.checked();
    place.known.refused = lane.refused();
    if (place.known.state != State::kAbsent) place.watch.emplace(watch);
  }
  for (const v1::RecordedLanes::Mapping& mapping : record.mapping()) {
    set.mapping_.emplace(mapping.rank(), mapping.lane());
  }
  for (const v1::RecordedLanes::Unmapping& unmapping : record.unmapping()) {
    set.unmapping_[{unmapping.rank(), LaneIndex(unmapping.lane())}] = unmapping.incarnation();
  }
  for (const int32_t lane : record.loading()) set.loading_.emplace(lane);
  return set;
}

}  // namespace dmuond::scheduler
