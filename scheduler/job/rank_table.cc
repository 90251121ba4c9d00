#include "scheduler/job/rank_table.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/impossible.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

v1::RecordedRollback ToRecord(const Rollback& back) {
  v1::RecordedRollback out;
  out.set_to_step(back.to_step);
  out.set_epoch(back.epoch);
  out.set_asked(back.asked);
  return out;
}

Rollback RollbackOf(const v1::RecordedRollback& record) {
  return {record.to_step(), record.epoch(), record.asked()};
}

namespace {

void WriteSession(const RankTable::Session& session, v1::RecordedSession& out) {
  out.set_id(session.id);
  out.set_rank(session.rank);
  out.set_incarnation(session.incarnation);
  out.set_pid(session.pid);
  out.set_uid(session.uid);
  out.set_end_is_seen(session.end_is_seen);
  out.set_client(session.client);
  out.set_home_lane(session.home_lane);
  out.set_discards(session.discards);
  // A session is never Empty or Vacant.
  out.set_state(static_cast<v1::RecordedSession::State>(
      static_cast<int>(session.state) - static_cast<int>(RankTable::State::kOpen) + 1));
  if (!session.refused.ok()) *out.mutable_refused() = ToRecord(session.refused);
  out.set_refusals(session.refusals);
  for (const LaneIndex lane : session.lanes_mapped) out.add_lanes_mapped(lane.value());
  if (!session.map_error.ok()) *out.mutable_map_error() = ToRecord(session.map_error);
  out.mutable_weight_digests()->Add(session.weight_digests.begin(), session.weight_digests.end());
  out.set_broadcast(session.broadcast);
  out.set_first_attempt(session.first_attempt.value());
  if (session.must_acknowledge.has_value()) {
    *out.mutable_must_acknowledge() = ToRecord(*session.must_acknowledge);
  }
  if (session.acknowledged.has_value()) {
    *out.mutable_acknowledged() = ToRecord(*session.acknowledged);
  }
}
static_assert(static_cast<int>(RankTable::State::kMustAcknowledge) -
                  static_cast<int>(RankTable::State::kOpen) + 1 ==
              v1::RecordedSession::STATE_MUST_ACKNOWLEDGE);

absl::StatusOr<RankTable::Session> ReadSession(const v1::RecordedSession& wire) {
  if (wire.state() < v1::RecordedSession::STATE_OPEN ||
      wire.state() > v1::RecordedSession::STATE_MUST_ACKNOWLEDGE) {
    return absl::InvalidArgumentError(
        absl::StrCat("RecordedSession.state has the unknown value ", wire.state()));
  }
  RankTable::Session session;
  session.id = wire.id();
  session.rank = wire.rank();
  session.incarnation = wire.incarnation();
  session.pid = wire.pid();
  session.uid = wire.uid();
  session.end_is_seen = wire.end_is_seen();
  session.client = wire.client();
  session.home_lane = wire.home_lane();
  session.discards = wire.discards();
  session.state =
      static_cast<RankTable::State>(wire.state() - 1 + static_cast<int>(RankTable::State::kOpen));
  session.refused = StatusOf(wire.refused());
  session.refusals = wire.refusals();
  for (const int32_t lane : wire.lanes_mapped()) session.lanes_mapped.emplace(lane);
  session.map_error = StatusOf(wire.map_error());
  session.weight_digests.assign(wire.weight_digests().begin(), wire.weight_digests().end());
  session.broadcast = wire.broadcast();
  session.first_attempt = Attempt(wire.first_attempt());
  if (wire.has_must_acknowledge()) session.must_acknowledge = RollbackOf(wire.must_acknowledge());
  if (wire.has_acknowledged()) session.acknowledged = RollbackOf(wire.acknowledged());
  return session;
}

}  // namespace

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
  table_changed_ = ++version_;
  Changed(session);
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
  Changed(session);
  session.registered = session.changed;
}

void RankTable::RefuseAll(const absl::Status& why) {
  for (auto& [id, session] : sessions_) {
    session.refused = why;
    ++session.refusals;
    session.state = State::kOpen;
    Changed(session);
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
  Changed(session);
  attached_[session.rank] = version_;
}

bool RankTable::HasOwnMemory(const Session& session) const {
  const auto found = attachments_.find(session.rank);
  if (found == attachments_.end()) return false;
  const v1::LaneCommand::AttachTrainer& attach = found->second.attach();
  return attach.incarnation() == session.incarnation &&
         (!session.end_is_seen ||
          std::any_of(attach.arenas().begin(), attach.arenas().end(),
                      [](const v1::Arena& arena) { return arena.has_cuda_ipc(); }));
}

void RankTable::OnLaneMapped(int32_t rank, uint64_t incarnation, LaneIndex lane,
                             const std::string& error) {
  for (auto& [id, session] : sessions_) {
    if (session.rank != rank || session.incarnation != incarnation) continue;
    session.lanes_mapped.insert(lane);
    Changed(session);
    if (error.empty()) continue;
    session.map_error =
        Error(absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
              Say("lane ", Named("lane", lane.value()), " cannot map the memory of rank ",
                  Named("rank", rank), ": ", error));
  }
}

void RankTable::ForgetMappings() {
  for (auto& [id, session] : sessions_) {
    session.lanes_mapped.clear();
    Changed(session);
  }
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
  Changed(session);
  if (vacancies_.erase(session.rank) > 0) table_changed_ = ++version_;
}

void RankTable::Tell(uint64_t id) {
  Session& session = At(id);
  if (session.state != State::kMapped && session.state != State::kAttached) {
    Refuse(session, "tell");
    return;
  }
  session.state = State::kAttached;
  Changed(session);
}

void RankTable::GoBack(const Rollback& back) {
  for (auto& [id, session] : sessions_) {
    if (session.state != State::kAttached && session.state != State::kMustAcknowledge) continue;
    session.state = State::kMustAcknowledge;
    session.must_acknowledge = back;
    Changed(session);
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
  Changed(session);
}

RankTable::Session RankTable::End(uint64_t id, std::optional<Attempt> vacant) {
  const auto found = sessions_.find(id);
  Session session = std::move(found->second);
  sessions_.erase(found);
  table_changed_ = ++version_;
  if (vacant.has_value()) {
    // A replacement that dies before it is mapped leaves the place as it found it.
    Vacancy& vacancy =
        vacancies_.try_emplace(session.rank, Vacancy{.attempt = *vacant}).first->second;
    vacancy.client = session.client;
    vacancy.session = session.id;
  }
  return session;
}

void RankTable::VacanciesEndNothing() {
  for (auto& [rank, vacancy] : vacancies_) vacancy.attempt = Attempt(0);
  table_changed_ = ++version_;
}

void RankTable::Clear() {
  sessions_.clear();
  vacancies_.clear();
  attachments_.clear();
  attached_.clear();
  gone_.clear();
  table_changed_ = ++version_;
}

// ---- the record ----

const std::vector<RecordPart>& RankTable::Parts() const {
  using Kind = RecordPart::Kind;
  if (parts_version_ == version_) return parts_;
  parts_version_ = version_;
  parts_.clear();
  parts_.push_back({Kind::kRanks, 0, table_changed_});
  for (const auto& [id, session] : sessions_) {
    parts_.push_back({Kind::kSession, id, session.changed});
  }
  for (const auto& [id, session] : sessions_) {
    if (session.layout == nullptr) continue;
    parts_.push_back({Kind::kRegistration, id, session.registered});
  }
  for (const auto& [rank, version] : attached_) {
    parts_.push_back({Kind::kAttachment, static_cast<uint64_t>(rank), version});
  }
  return parts_;
}

void RankTable::WritePart(const RecordPart& part, JobRecord& record) const {
  switch (part.kind) {
    case RecordPart::Kind::kRanks: {
      v1::RecordedRanks& ranks = *record.mutable_ranks();
      for (const auto& [rank, vacancy] : vacancies_) {
        v1::RecordedRanks::Vacancy& out = *ranks.add_vacancies();
        out.set_rank(rank);
        out.set_client(vacancy.client);
        out.set_session(vacancy.session);
        out.set_attempt(vacancy.attempt.value());
      }
      for (const auto& [rank, incarnation] : incarnations_) {
        v1::RecordedRanks::Incarnation& out = *ranks.add_incarnations();
        out.set_rank(rank);
        out.set_incarnation(incarnation);
      }
      for (const auto& [rank, gone] : gone_) *ranks.add_gone() = gone;
      return;
    }
    case RecordPart::Kind::kSession:
      return WriteSession(sessions_.at(part.of), *record.add_sessions());
    case RecordPart::Kind::kRegistration: {
      v1::RecordedRegistration& out = *record.add_registrations();
      out.set_session(part.of);
      *out.mutable_registration() = sessions_.at(part.of).registration;
      return;
    }
    case RecordPart::Kind::kAttachment: {
      v1::RecordedAttachment& out = *record.add_attachments();
      out.set_rank(static_cast<int32_t>(part.of));
      *out.mutable_command() = attachments_.at(out.rank());
      return;
    }
    default:
      Impossible("RankTable", "any", "a part of a record that is not its own");
  }
}

absl::StatusOr<RankTable> RankTable::FromRecord(const JobRecord& record) {
  RankTable table;
  for (const v1::RecordedRanks::Vacancy& vacancy : record.ranks().vacancies()) {
    table.vacancies_[vacancy.rank()] = {vacancy.client(), vacancy.session(),
                                        Attempt(vacancy.attempt())};
  }
  for (const v1::RecordedRanks::Incarnation& incarnation : record.ranks().incarnations()) {
    table.incarnations_[incarnation.rank()] = incarnation.incarnation();
  }
  for (const v1::RankGone& gone : record.ranks().gone()) table.gone_[gone.rank()] = gone;
  for (const v1::RecordedSession& wire : record.sessions()) {
    absl::StatusOr<Session> session = ReadSession(wire);
    if (!session.ok()) return session.status();
    table.Changed(*session);
    if (!table.sessions_.emplace(wire.id(), *std::move(session)).second) {
      return absl::InvalidArgumentError(absl::StrCat("session ", wire.id(), " is there twice"));
    }
  }
  for (const v1::RecordedRegistration& wire : record.registrations()) {
    const auto found = table.sessions_.find(wire.session());
    if (found == table.sessions_.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a registration of session ", wire.session(), ", which is not there"));
    }
    absl::StatusOr<Registration> layout = FromProto(wire.registration());
    if (!layout.ok()) return layout.status();
    found->second.registration = wire.registration();
    found->second.layout = std::make_shared<const Registration>(*std::move(layout));
    found->second.registered = ++table.version_;
  }
  for (const auto& [id, session] : table.sessions_) {
    if (session.state != State::kOpen && session.layout == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("session ", id, " is ", Name(session.state), " without a registration"));
    }
  }
  for (const v1::RecordedAttachment& attachment : record.attachments()) {
    table.attachments_[attachment.rank()] = attachment.command();
    table.attached_[attachment.rank()] = ++table.version_;
  }
  return table;
}

}  // namespace dmuond::scheduler
