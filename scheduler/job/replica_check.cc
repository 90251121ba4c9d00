#include "scheduler/job/replica_check.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "scheduler/convert/convert.h"
#include "scheduler/extract.h"
#include "scheduler/fragment_algebra.h"

namespace dmuond::scheduler {
namespace {

constexpr int kDifferencesShown = 100;
constexpr int kExtractsMax = 4096;  // of one order
// A node that has been asked for so long and has not answered is named.
constexpr std::chrono::milliseconds kNamedAfter{500};

// The parts of the extract that trainers hold, each once.
std::vector<HeldBox> HeldOf(const Layout& layout, const Indices& holders, const Box& extract) {
  std::vector<Holding> holdings(holders.size());
  for (size_t i = 0; i < holders.size(); ++i) {
    holdings[i].box = Intersect(layout.fragments[holders[i]].box, extract);
    holdings[i].label = holders[i];
  }
  return GroupEqualBoxes(std::move(holdings));
}

// Of a slot's tensors, whose last one is the master.
const char* KindOf(UnitKind unit, int tensor, int tensors) {
  if (tensor == tensors - 1) return "master";
  if (unit == UnitKind::kMatrix) return "momentum";
  return tensor == 0 ? "exp_avg" : "exp_avg_sq";
}

bool OfWeights(const v1::CheckDone::Difference& difference) {
  return difference.against() != "before";
}

}  // namespace

ReplicaCheck::ReplicaCheck(const PlanInputs& inputs, const Plan& plan,
                           std::chrono::milliseconds every, TimePoint now)
    : inputs_(inputs),
      plan_(plan),
      every_(every),
      due_(now + every),
      number_(static_cast<uint64_t>(now.time_since_epoch().count())) {
  std::map<int32_t, int32_t> ranks;
  for (const Trainer& trainer : inputs.layout.trainers) {
    ranks_per_node_ = std::max(ranks_per_node_, ++ranks[trainer.node.value()]);
  }
}

void ReplicaCheck::OnRequest(TimePoint now, const v1::CheckRequest& request) {
  const uint64_t id = request.request();
  // Asked once more, because the group has formed anew.
  if (std::find(requests_.begin(), requests_.end(), id) != requests_.end()) return;
  std::erase_if(wanted_, [id](const auto& wanted) { return wanted.first == id; });
  wanted_.emplace_back(id, now + std::chrono::milliseconds(request.patience_ms()));
}

void ReplicaCheck::OnChecked(const v1::ExtractsChecked& checked) {
  if (state_ == State::kAsking && checked.number() == number_) answers_[checked.node()] = checked;
}

void ReplicaCheck::OnDecision(const v1::Decision& decision) {
  if (decision.verdict() != v1::Decision::VERDICT_COMMIT) return;
  settled_ = true;
  pushed_ = pushed_ || decision.kind() != v1::ATTEMPT_KIND_STEP;
}

std::optional<v1::CoordinatorMessage> ReplicaCheck::Advance(TimePoint now,
                                                            const std::string& why_not,
                                                            bool pushing) {
  std::erase_if(wanted_, [now](const auto& wanted) { return now >= wanted.second; });
  const bool due = state_ == State::kIdle && every_.count() > 0 && now >= due_ && why_not.empty();
  // Who asks does not wait for a check that nobody has asked for.
  if (due || (requests_.empty() && !wanted_.empty())) {
    Begin(now);
    if (why_not.empty()) return Order(now);
    state_ = State::kWaiting;
  }
  if (state_ == State::kIdle) return std::nullopt;
  if (now >= ends_by_) {
    return Finish(now, "CHECK_UNANSWERED", why_not.empty() ? Unanswered(now) : why_not);
  }
  if (!why_not.empty()) {
    answers_.clear();
    Wait(now);
    return std::nullopt;
  }
  switch (state_) {
    case State::kIdle:
      return std::nullopt;
    case State::kWaiting:
      if (now < waits_until_) return std::nullopt;
      return order_.extracts().empty() ? Order(now) : OrderAgain(now);
    case State::kAsking:
      return OnAnswers(now);
    case State::kDoubting:
      break;
  }
  if (pushed_) return OrderAgain(now);
  if (pushing) doubts_until_ = now + kDoubt;  // an attempt that fails is tried again
  if (!settled_ && now < doubts_until_) return std::nullopt;
  return Accept(now);
}

std::optional<v1::CoordinatorMessage> ReplicaCheck::OnAnswers(TimePoint now) {
  if (answers_.size() < static_cast<size_t>(inputs_.nodes)) return std::nullopt;
  bool again = false;
  for (const auto& [node, answer] : answers_) {
    if (!answer.error().empty()) {
      return Finish(now, "CHECK_FAILED", absl::StrCat("node ", node, ": ", answer.error()));
    }
    again = again || answer.again();
  }
  if (again) {
    Wait(now + kAgain);
    return std::nullopt;
  }
  Compare();
  // A push commits in time, or none does; a whole arena that is wrong would be doubted for hours.
  const bool enough = done_.different() >= kDifferencesShown;
  if (enough || std::none_of(differences_.begin(), differences_.end(), OfWeights)) {
    return Accept(now);
  }
  if (pushed_) return OrderAgain(now);
  if (settled_) return Accept(now);
  state_ = State::kDoubting;
  doubts_until_ = now + kDoubt;
  return std::nullopt;
}

void ReplicaCheck::Wait(TimePoint until) {
  state_ = State::kWaiting;
  waits_until_ = until;
}

std::string ReplicaCheck::Unanswered(TimePoint now) const {
  std::vector<int32_t> nodes;
  const bool named = state_ == State::kAsking && now >= told_ + kNamedAfter;
  for (int32_t node = 0; node < inputs_.nodes; ++node) {
    const auto answer = answers_.find(node);
    if (answer == answers_.end() ? named : answer->second.again()) nodes.push_back(node);
  }
  if (nodes.empty()) return "the check has not come to its end in time";
  return absl::StrCat("node ", absl::StrJoin(nodes, ", "),
                      " has not told in time what its lanes hold: its log says why");
}

void ReplicaCheck::Begin(TimePoint now) {
  requests_.clear();
  ends_by_ = now;
  for (const auto& [request, until] : wanted_) {
    requests_.push_back(request);
    ends_by_ = std::max(ends_by_, until);
  }
  if (wanted_.empty()) ends_by_ = now + kOwnCheckPatience;
  wanted_.clear();
  began_ = now;
  done_.Clear();
  ranks_.clear();
  next_ = {};
  order_.Clear();
  answers_.clear();
}

v1::CoordinatorMessage ReplicaCheck::Order(TimePoint now) {
  order_.Clear();
  places_.clear();
  std::map<int32_t, int64_t> bytes;  // by rail
  int64_t holders = 0;
  while (next_.unit < static_cast<int32_t>(plan_.units.size())) {
    const Unit& unit = plan_.units[next_.unit];
    const int32_t rail = unit.owner.value() % inputs_.lanes_per_node;
    const int64_t of_weights =
        SizeOf(inputs_.layout.parameters[unit.parameter].weight_type) * ranks_per_node_;
    const std::vector<Box> boxes = Extracts(unit.box);
    const auto more_holders = static_cast<int64_t>(plan_.holders[next_.unit].size());
    for (; next_.number < static_cast<int32_t>(boxes.size()); ++next_.number) {
      const Box& box = boxes[next_.number];
      // State of 12 bytes, and the master once more.
      int64_t& sum = bytes[rail];
      const int64_t more = Elements(box) * (16 + of_weights);
      const bool full = sum > 0 && sum + more > kCheckOrderBytes;
      const bool many = holders > 0 && holders + more_holders > kCheckOrderHolders;
      if (full || many || order_.extracts_size() == kExtractsMax) return OrderAgain(now);
      sum += more;
      holders += more_holders;
      v1::Extract& extract = *order_.add_extracts();
      extract.set_unit(unit.id.value());
      extract.set_rail(rail);
      *extract.mutable_box() = ToProto(box);
      for (const HeldBox& held : HeldOf(inputs_.layout, plan_.holders[next_.unit], box)) {
        *extract.add_held() = ToProto(held.box);
      }
      places_.push_back(next_);
    }
    next_ = {next_.unit + 1, 0};
  }
  return OrderAgain(now);
}

v1::CoordinatorMessage ReplicaCheck::OrderAgain(TimePoint now) {
  state_ = State::kAsking;
  settled_ = false;
  pushed_ = false;
  told_ = now;
  answers_.clear();
  order_.set_number(++number_);
  v1::CoordinatorMessage message;
  *message.mutable_check() = order_;
  return message;
}

v1::CoordinatorMessage ReplicaCheck::Accept(TimePoint now) {
  for (v1::CheckDone::Difference& difference : differences_) {
    done_.set_different(done_.different() + 1);
    if (done_.differences_size() < kDifferencesShown) {
      *done_.add_differences() = std::move(difference);
    }
  }
  for (auto& [place, look] : looks_now_) looks_[place] = std::move(look);
  done_.set_digests(done_.digests() + digests_);
  for (const auto& [node, answer] : answers_) {
    done_.set_held_us(std::max(done_.held_us(), answer.held_us()));
    for (const v1::ExtractDigests& digests : answer.digests()) {
      for (const auto& copies : digests.copies()) {
        ranks_.insert(copies.ranks().begin(), copies.ranks().end());
      }
    }
  }
  return next_.unit < static_cast<int32_t>(plan_.units.size()) ? Order(now) : Finish(now);
}

v1::CoordinatorMessage ReplicaCheck::Finish(TimePoint now, const std::string& reason,
                                            const std::string& error) {
  using std::chrono::milliseconds;
  state_ = State::kIdle;
  due_ = now + every_;
  v1::CoordinatorMessage message;
  v1::CheckDone& done = *message.mutable_check_done();
  done = std::move(done_);
  done.mutable_requests()->Add(requests_.begin(), requests_.end());
  done.set_reason(reason);
  done.set_error(error);
  if (!error.empty() && done.different() > 0) {
    done.set_error(absl::StrCat(error, "; ", done.different(),
                                " copies differed until then: dmuonctl status"));
  }
  done.set_ranks(static_cast<int32_t>(ranks_.size()));
  done.set_took_ms(std::chrono::duration_cast<milliseconds>(now - began_).count());
  requests_.clear();
  return message;
}

void ReplicaCheck::Compare() {
  differences_.clear();
  looks_now_.clear();
  digests_ = 0;
  std::vector<OfNodes> of_extracts(order_.extracts_size());
  for (const auto& [node, answer] : answers_) {
    for (const v1::ExtractDigests& digests : answer.digests()) {
      const int32_t extract = digests.extract();
      if (extract < 0 || extract >= order_.extracts_size()) continue;
      of_extracts[extract].emplace_back(node, &digests);
      if (digests.state_size() > 0) CompareState(extract, node, digests);
    }
  }
  for (int32_t i = 0; i < order_.extracts_size(); ++i) CompareCopies(i, of_extracts[i]);
}

v1::CheckDone::Difference ReplicaCheck::About(int32_t extract) const {
  const Unit& unit = plan_.units[order_.extracts(extract).unit()];
  v1::CheckDone::Difference difference;
  difference.set_parameter(inputs_.layout.parameters[unit.parameter].name);
  *difference.mutable_box() = order_.extracts(extract).box();
  difference.set_lane(unit.owner.value());
  difference.set_node(unit.owner.value() / inputs_.lanes_per_node);
  return difference;
}

void ReplicaCheck::CompareState(int32_t extract, int32_t node, const v1::ExtractDigests& digests) {
  const Place place = places_[extract];
  Look& now = looks_now_[place];
  now.written = digests.written();
  now.digests.assign(digests.state().begin(), digests.state().end());
  const auto before = looks_.find(place);
  if (before == looks_.end() || before->second.written != now.written ||
      before->second.digests.size() != now.digests.size()) {
    return;
  }
  const auto tensors = static_cast<int>(now.digests.size());
  for (int i = 0; i < tensors; ++i) {
    ++digests_;
    if (before->second.digests[i] == now.digests[i]) continue;
    v1::CheckDone::Difference& difference = differences_.emplace_back(About(extract));
    difference.set_kind(KindOf(plan_.units[place.unit].kind, i, tensors));
    difference.set_node(node);
    difference.set_digest(now.digests[i]);
    difference.set_expected_digest(before->second.digests[i]);
    difference.set_against("before");
  }
}

// What all copies have in common is right where only the master says otherwise.
void ReplicaCheck::CompareCopies(int32_t extract, const OfNodes& of_nodes) {
  struct Copies {
    int32_t node = 0;
    const v1::ExtractDigests::Copies* copies = nullptr;
  };
  const int held = order_.extracts(extract).held_size();
  std::vector<std::vector<Copies>> found(held);
  const v1::ExtractDigests* owner = nullptr;
  for (const auto& [node, digests] : of_nodes) {
    if (digests->rounded_size() == held) owner = digests;
    for (const v1::ExtractDigests::Copies& copies : digests->copies()) {
      if (copies.held() < 0 || copies.held() >= held) continue;
      found[copies.held()].push_back({node, &copies});
    }
  }
  if (owner == nullptr) return;
  for (int h = 0; h < held; ++h) {
    const uint64_t rounded = owner->rounded(h);
    int ranks = 0;
    bool agree = true;
    for (const Copies& each : found[h]) {
      ranks += each.copies->ranks_size();
      agree = agree && each.copies->digest() == found[h][0].copies->digest();
    }
    digests_ += ranks;
    if (ranks > 1 && agree && found[h][0].copies->digest() != rounded) {
      v1::CheckDone::Difference& difference = differences_.emplace_back(About(extract));
      *difference.mutable_box() = order_.extracts(extract).held(h);
      difference.set_kind("master");
      difference.set_digest(rounded);
      difference.set_expected_digest(found[h][0].copies->digest());
      difference.set_against("published");
      continue;
    }
    for (const Copies& each : found[h]) {
      if (each.copies->digest() == rounded) continue;
      v1::CheckDone::Difference& difference = differences_.emplace_back(About(extract));
      *difference.mutable_box() = order_.extracts(extract).held(h);
      difference.set_kind("published");
      difference.set_node(each.node);
      *difference.mutable_ranks() = each.copies->ranks();
      difference.set_digest(each.copies->digest());
      difference.set_expected_digest(rounded);
      difference.set_against("master");
    }
  }
}

}  // namespace dmuond::scheduler
