#include "server/daemon/group/peer_calls.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

constexpr char kCall[] = "dmuond: a call of a node to a node";
constexpr char kReply[] = "dmuond: the answer to a call";

std::vector<std::string> PartsOf(const char* method, const v1::PeerProof& proof, int32_t callee,
                                 const std::string& nonce, const std::string& request) {
  return {method,
          absl::StrCat(proof.node()),
          absl::StrCat(callee),
          absl::StrCat(proof.epoch()),
          nonce,
          absl::StrCat(proof.counter()),
          request};
}

}  // namespace

bool UsedCounters::Use(uint64_t counter) {
  if (counter == 0 || counter + kWindow <= newest_) return false;
  if (counter > newest_ && counter - newest_ >= kWindow) {
    used_.reset();
    newest_ = counter;
  }
  while (newest_ < counter) used_.reset(++newest_ % kWindow);
  if (used_.test(counter % kWindow)) return false;
  used_.set(counter % kWindow);
  return true;
}

void PeerCalls::OnFormed(uint32_t epoch, std::string nonce) {
  MutexLock lock(mutex_);
  epoch_ = epoch;
  nonce_ = std::move(nonce);
  counter_ = 0;
  used_.clear();
}

v1::PeerProof PeerCalls::MakeProof(const char* method, int32_t callee, const std::string& request,
                                   std::string& awaited) {
  v1::PeerProof proof;
  std::string nonce;
  {
    MutexLock lock(mutex_);
    proof.set_node(node_);
    proof.set_epoch(epoch_);
    proof.set_counter(++counter_);
    nonce = nonce_;
  }
  if (!secret_.has_value()) return proof;
  proof.set_proof(secret_->Prove(kCall, PartsOf(method, proof, callee, nonce, request)));
  awaited = secret_->Prove(kReply, {proof.proof()});
  return proof;
}

absl::Status PeerCalls::CheckProof(const char* method, const v1::PeerProof& proof,
                                   const std::string& request) {
  if (proof.node() < 0 || proof.node() >= nodes_ || proof.node() == node_) {
    return NotProven(method, proof, "that is no other node of the group");
  }
  std::string nonce;
  {
    MutexLock lock(mutex_);
    if (proof.epoch() != epoch_) {
      return Error(
          absl::StatusCode::kUnavailable, "PEER_EPOCH_DIFFERS",
          Say("a call ", method, " of group epoch ", Named("epoch", proof.epoch()), " by node ",
              Named("node", proof.node()), "; here, on node ", Named("other_node", node_),
              ", the group has formed for epoch ", Named("other_epoch", epoch_)));
    }
    nonce = nonce_;
  }
  if (!secret_.has_value()) return absl::OkStatus();
  if (!secret_->Proves(proof.proof(), kCall, PartsOf(method, proof, node_, nonce, request))) {
    return NotProven(method, proof, "its proof is wrong");
  }
  MutexLock lock(mutex_);
  if (nonce != nonce_ || !used_[proof.node()].Use(proof.counter())) {
    return NotProven(method, proof, "its proof was used before");
  }
  return absl::OkStatus();
}

std::string PeerCalls::ReplyProof(const v1::PeerProof& proof) const {
  return secret_.has_value() ? secret_->Prove(kReply, {proof.proof()}) : "";
}

absl::Status PeerCalls::NotProven(const char* method, const v1::PeerProof& proof,
                                  const char* why) const {
  return Error(absl::StatusCode::kUnauthenticated, "PEER_NOT_PROVEN",
               Say("a call ", method, " to node ", Named("node", node_),
                   " that says it is of node ", Named("other_node", proof.node()), ": ", why,
                   ". All daemons of a group need one secret (--peer_secret_file), or certificates "
                   "with their names (--peer_tls_names)"));
}

}  // namespace dmuond::server
