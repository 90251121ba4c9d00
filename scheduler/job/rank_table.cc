#include "scheduler/job/rank_table.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/job/impossible.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

const char* Name(RankTable::State state) {
  switch (state) {
    case RankTable::State::kEmpty:
      return "Empty";
    case RankTable::State::kVacant:
      return "Vacant";
    case RankTable::State::kOpen:
      return "Open";
    case RankTable::State::kRegistered:
      return "Registered";
    case RankTable::State::kMapped:
      return "Mapped";
    case RankTable::State::kAttached:
      return "Attached";
    case RankTable::State::kMustAcknowledge:
      return "MustAcknowledge";
  }
  return "?";
}

bool RankTable::Refuse(const Session& session, const char* event) const {
  return Impossible(absl::StrCat("RankTable, rank ", session.rank), Name(session.state), event);
}

RankTable::State RankTable::StateOf(int32_t rank) const {
  if (const Session* session = OfRank(rank); session != nullptr) return session->state;
  return vacancies_.contains(rank) ? State::kVacant : State::kEmpty;
}

const RankTable::Session* RankTable::Find(uint64_t id) const {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : &found->second;
}

const RankTable::Session* RankTable::OfRank(int32_t rank) const {
  for (const auto& [id, session] : sessions_) {
    if (session.rank == rank) return &session;
  }
  return nullptr;
}

const RankTable::Vacancy* RankTable::VacancyOf(int32_t rank) const {
  const auto found = vacancies_.find(rank);
  return found == vacancies_.end() ? nullptr : &found->second;
}

const RankTable::Session& RankTable::Open(Session session) {
  if (const Session* other = OfRank(session.rank); other != nullptr) Refuse(*other, "open");
  session.incarnation = ++incarnations_[session.rank];
  session.state = State::kOpen;
  const uint64_t id = session.id;
  return sessions_[id] = std::move(session);
}

void RankTable::Register(uint64_t id, v1::Registration registration,
                         std::shared_ptr<const Registration> layout) {
  Session& session = At(id);
  if (session.state != State::kOpen && session.state != State::kRegistered) {
    Refuse(session, "register");
    return;
  }
  session.registration = std::move(registration);
  session.layout = std::move(layout);
  session.state = State::kRegistered;
}

void RankTable::RefuseAll(const absl::Status& why) {
  for (auto& [id, session] : sessions_) {
    session.refused = why;
    ++session.refusals;
    session.state = State::kOpen;
  }
}

void RankTable::Deny(int32_t rank, uint64_t incarnation, const absl::Status& why) {
  for (auto& [id, session] : sessions_) {
    if (session.rank == rank && session.incarnation == incarnation) session.denied = why;
  }
}

void RankTable::BeginMapping(uint64_t id, v1::LaneCommand command) {
  Session& session = At(id);
  if (session.state != State::kRegistered && session.state != State::kMapped) {
    Refuse(session, "begin mapping");
    return;
  }
  session.lanes_mapped.clear();
  session.map_error = absl::OkStatus();
  attachments_[session.rank] = std::move(command);
}

void RankTable::OnLaneMapped(int32_t rank, uint64_t incarnation, LaneIndex lane,
                             const std::string& error) {
  for (auto& [id, session] : sessions_) {
    if (session.rank != rank || session.incarnation != incarnation) continue;
    session.lanes_mapped.insert(lane);
    if (error.empty()) continue;
    session.map_error =
        Error(absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
              Say("lane ", Named("lane", lane.value()), " cannot map the memory of rank ",
                  Named("rank", rank), ": ", error));
  }
}

void RankTable::ForgetMappings() {
  for (auto& [id, session] : sessions_) session.lanes_mapped.clear();
}

void RankTable::Attach(uint64_t id, Attempt open, std::vector<std::string> weight_digests,
                       bool broadcast) {
  Session& session = At(id);
  if (session.state != State::kRegistered && session.state != State::kMapped) {
    Refuse(session, "attach");
    return;
  }
  session.state = State::kMapped;
  session.first_attempt = open;
  session.weight_digests = std::move(weight_digests);
  session.broadcast = broadcast;
  vacancies_.erase(session.rank);
}

void RankTable::Tell(uint64_t id) {
  Session& session = At(id);
  if (session.state != State::kMapped && session.state != State::kAttached) {
    Refuse(session, "tell");
    return;
  }
  session.state = State::kAttached;
}

void RankTable::GoBack(const Rollback& back) {
  for (auto& [id, session] : sessions_) {
    if (session.state != State::kAttached && session.state != State::kMustAcknowledge) continue;
    session.state = State::kMustAcknowledge;
    session.must_acknowledge = back;
  }
}

void RankTable::Acknowledge(uint64_t id) {
  Session& session = At(id);
  if (session.state != State::kMustAcknowledge) {
    Refuse(session, "acknowledge");
    return;
  }
  session.state = State::kAttached;
  session.acknowledged = std::exchange(session.must_acknowledge, std::nullopt);
}

RankTable::Session RankTable::End(uint64_t id, std::optional<Attempt> vacant) {
  const auto found = sessions_.find(id);
  Session session = std::move(found->second);
  sessions_.erase(found);
  if (vacant.has_value()) {
    // A replacement that dies before it is mapped leaves the place as it found it.
    Vacancy& vacancy =
        vacancies_.try_emplace(session.rank, Vacancy{.attempt = *vacant}).first->second;
    vacancy.pid = session.pid;
    vacancy.session = session.id;
  }
  return session;
}

void RankTable::VacanciesEndNothing() {
  for (auto& [rank, vacancy] : vacancies_) vacancy.attempt = Attempt(0);
}

void RankTable::Clear() {
  sessions_.clear();
  vacancies_.clear();
  attachments_.clear();
  gone_.clear();
}

}  // namespace dmuond::scheduler
