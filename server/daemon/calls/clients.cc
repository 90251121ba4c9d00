#include "server/daemon/calls/clients.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "scheduler/job/refusals.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

// Longer than clients repeat a call.
constexpr std::chrono::seconds kRefusalKept{60};

}  // namespace

v1::SessionKey Client::Key() const {
  v1::SessionKey key;
  key.set_session(id);
  key.set_incarnation(incarnation);
  key.set_secret(secret);
  return key;
}

absl::StatusOr<Client*> Clients::Find(const v1::SessionKey& key, bool leaves) {
  const auto found = clients_.find(key.session());
  const absl::Status* ended = ended_.Find(key);
  if (found == clients_.end() && ended != nullptr) {
    if (leaves) {  // what a trainer hears that waits for the successor
      return Error(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving");
    }
    if (!ended->ok()) return *ended;
    return Error(absl::StatusCode::kUnavailable, "JOB_ENDED",
                 Say("the job of session ", Named("session", key.session()),
                     " ended as the session began: open a new one"));
  }
  if (found == clients_.end() || !SameSecret(found->second.secret, key.secret())) {
    return Error(absl::StatusCode::kFailedPrecondition, "INCARNATION_OLD",
                 Say("session ", Named("session", key.session()),
                     " is not open here: it closed, its trainer "
                     "was gone, or its job ended. Open a new one"));
  }
  Client& client = found->second;
  if (client.incarnation != key.incarnation()) {
    return Error(absl::StatusCode::kFailedPrecondition, "INCARNATION_OLD",
                 Say("rank ", Named("rank", client.rank), " is at incarnation ",
                     Named("incarnation", client.incarnation), ", the call carries ",
                     Named("given_incarnation", key.incarnation())));
  }
  return &client;
}

Client* Clients::OfRequest(const std::string& request) {
  for (auto& [id, client] : clients_) {
    if (client.request == request) return &client;
  }
  return nullptr;
}

Client* Clients::OfAttach(AttachId id) {
  for (auto& [session, client] : clients_) {
    if (client.attach == id) return &client;
  }
  return nullptr;
}

bool Clients::Knows(const std::string& nonce) const {
  return opening_.contains(nonce) || RefusalOf(nonce) != nullptr ||
         std::any_of(clients_.begin(), clients_.end(),
                     [&](const auto& entry) { return entry.second.nonce == nonce; });
}

void Clients::KeepRefusal(AttachId attach, const std::string& nonce, const absl::Status& why) {
  refused_opens_[attach] = {nonce, why, std::chrono::steady_clock::now() + kRefusalKept};
}

const absl::Status* Clients::RefusalOf(const std::string& nonce) const {
  for (const auto& [id, refused] : refused_opens_) {
    if (refused.nonce == nonce) return &refused.status;
  }
  return nullptr;
}

void Clients::OnEnded(const scheduler::node::SessionEnded& ended) {
  const auto found = clients_.find(ended.id);
  if (found == clients_.end()) return;
  const Client client = std::move(found->second);
  clients_.erase(found);
  if (!ended.told.has_value()) {
    processes_[client.rank] = {client.id, client.process};
    return attach_->Close(client.attach);
  }
  ended_.Keep(client.Key(), *ended.told);
  if (ended.told->ok()) return attach_->Close(client.attach);
  KeepRefusal(client.attach, client.nonce, *ended.told);
  // Who was computing meanwhile must not take the daemon for gone, and the job up again.
  if (ReasonOf(*ended.told) == scheduler::kJobEnded) {
    refused_opens_[client.attach].forget_at = scheduler::TimePoint::max();
  }
}

TrainerProcessPtr Clients::ProcessOf(uint64_t session) const {
  for (const auto& [rank, last] : processes_) {
    if (last.first == session) return last.second;
  }
  return nullptr;
}

std::optional<uint64_t> Clients::OnAttachGone(AttachId id) {
  refused_opens_.erase(id);
  const Client* client = OfAttach(id);
  return client == nullptr ? std::nullopt : std::optional(client->id);
}

void Clients::OnTick(scheduler::TimePoint now) {
  for (auto refused = refused_opens_.begin(); refused != refused_opens_.end();) {
    if (now < refused->second.forget_at) {
      ++refused;
      continue;
    }
    attach_->Close(refused->first);
    refused = refused_opens_.erase(refused);
  }
}

}  // namespace dmuond::server
