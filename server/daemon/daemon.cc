#include "server/daemon/daemon.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_join.h"
#include "base/fault_point.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/session_keys.h"

namespace dmuond::server {
namespace {

std::deque<Place> MakePlaces(const DaemonOptions& options, NodeDevice& device) {
  std::deque<Place> places;
  for (int32_t i = 0; i < options.places; ++i) places.emplace_back(options, device, i);
  return places;
}

}  // namespace

Daemon::Daemon(const DaemonOptions& options, NodeDevice& device)
    : places_(MakePlaces(options, device)), finder_(places_) {}

void Daemon::Bind(AttachServer* attach, PeerLinks* peers) {
  for (Place& place : places_) {
    place.core.attach = attach;
    place.core.peers = peers;
    StateLock lock(place.core.mutex);
    place.core.clients.Bind(attach);
  }
}

// ---- calls ----

absl::StatusOr<v1::OpenSessionReply> Daemon::OpenSession(const v1::OpenSessionRequest& request,
                                                         std::optional<uid_t> uid,
                                                         const Cancelled& cancelled) {
  Place& first = places_.front();
  if (places_.size() == 1) return first.sessions.OpenSession(request, cancelled);
  // This is asked before the places are: once the nonce is claimed, one of them knows of it.
  const bool unclaimed = first.core.attach->Knows(request.nonce());
  // A call that is repeated, and one of a stranger, keeps no place for a job.
  for (Place& place : places_) {
    if (place.sessions.HasHeardOf(request.nonce())) {
      return place.sessions.OpenSession(request, cancelled);
    }
  }
  if (!unclaimed || !first.sessions.Check(request).ok()) {
    return first.sessions.OpenSession(request, cancelled);
  }
  if (uid.has_value()) {
    if (absl::Status may = CheckJobsOf(*uid, request.job()); !may.ok()) return may;
  }
  const absl::StatusOr<int32_t> found = finder_.Find(request.job(), cancelled);
  if (!found.ok()) return found.status();
  return place(*found).sessions.OpenSession(request, cancelled);
}

absl::Status Daemon::CheckJobsOf(uid_t uid, const std::string& job) {
  const int32_t most = places_.front().core.options.jobs_per_uid;
  if (most == 0) return absl::OkStatus();
  std::vector<std::string> theirs;
  for (Place& place : places_) {
    StateLock lock(place.core.mutex);
    const auto& clients = place.core.clients.all();
    const bool has = std::any_of(clients.begin(), clients.end(), [&](const auto& entry) {
      return entry.second.process->peer.uid() == uid;
    });
    if (!place.core.job.exists() || !has) continue;
    if (place.core.job.name() != job) theirs.push_back(place.core.job.name());
  }
  if (theirs.size() < static_cast<size_t>(most)) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted, "JOBS_TOO_MANY",
               Say("job '", Named("job", job), "' is one too many for uid ", Named("uid", uid),
                   ", which has '", Named("jobs", absl::StrJoin(theirs, "', '")),
                   "' on this node already (--jobs_per_uid=", Named("jobs_per_uid", most),
                   "): `dmuonctl job end ", theirs.front(), "` ends one"));
}

Place& Daemon::PlaceOf(const v1::SessionKey& key) { return place(server::PlaceOf(key)); }

Place& Daemon::place(int32_t number) {
  const bool exists = number >= 0 && number < static_cast<int32_t>(places_.size());
  return places_[exists ? number : 0];
}

void Daemon::TellLanes() {
  for (Place& place : places_) place.steps.TellLanes();
}

// ---- events ----

void Daemon::OnAttachGone(AttachId id) {
  for (Place& place : places_) place.core.OnAttachGone(id);
}

void Daemon::OnFormed(uint32_t epoch) {
  fault::FaultPoint("daemon.formed");
  log::Info("group formed", {{"epoch", epoch}, {"nodes", places_.front().core.options.nodes}});
  finder_.OnNewGroup();
  for (Place& place : places_) place.core.OnFormed(epoch);
}

void Daemon::OnMemberMessage(int32_t node, const v1::MemberMessage& message) {
  if (message.has_find_place()) return finder_.OnQuestion(node, message.find_place());
  place(message.place()).core.OnMemberMessage(node, message);
}

void Daemon::OnMemberGone(int32_t node, const std::string& why) {
  finder_.OnNewGroup();
  for (Place& place : places_) place.core.OnMemberGone(node, why);
  fault::FaultPoint("daemon.broken");
}

void Daemon::OnCoordinatorMessage(const v1::CoordinatorMessage& message) {
  if (message.has_place_found()) return finder_.OnAnswer(message.place_found());
  place(message.place()).core.OnCoordinatorMessage(message);
}

void Daemon::OnCoordinatorGone(const std::string& why) {
  finder_.OnNewGroup();
  for (Place& place : places_) place.core.OnCoordinatorGone(why);
  fault::FaultPoint("daemon.broken");
}

void Daemon::Tick() {
  for (Place& place : places_) place.core.Tick();
  finder_.Tick();
  ended_.Tick();
}

bool Daemon::formed() {
  Core& first = places_.front().core;
  StateLock lock(first.mutex);
  return first.job.epoch() != 0;
}

uint32_t Daemon::newest_epoch() const {
  uint32_t newest = 0;
  for (const Place& place : places_) newest = std::max(newest, place.core.newest_epoch.load());
  return newest;
}

}  // namespace dmuond::server
