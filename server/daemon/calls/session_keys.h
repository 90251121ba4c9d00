// Keys of sessions. Whoever has a session's key may call for it. A key is 128 bits that nobody can
// guess: the session's number and a secret, both random. A wrong secret gets the same answer as an
// unknown session, so that the number alone tells nothing. The number is looked up in a map, whose
// time may depend on it; the secret is compared in constant time.
#ifndef DMUOND_SERVER_DAEMON_CALLS_SESSION_KEYS_H_
#define DMUOND_SERVER_DAEMON_CALLS_SESSION_KEYS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>

#include "dmuond/v1/trainer.pb.h"
#include "dmuond/wire/peer_process.h"

namespace dmuond::server {

// A random number from the kernel, never 0.
[[nodiscard]] uint64_t RandomKeyHalf();

// Compares in constant time, whatever the compiler makes of it.
[[nodiscard]] bool SameSecret(uint64_t one, uint64_t other);

// Who is at the other end of a connection: a process of this machine, as the kernel names it, or a
// node of the group, as it has proven.
struct Caller {
  wire::ProcessId process;
  uid_t uid = 0;
  int32_t node = -1;  // -1: it is a process of this machine
};

// A key that nobody has had, of a session of the job in a place.
[[nodiscard]] v1::SessionKey NewSessionKey(int32_t place, uint64_t incarnation);
// The place that NewSessionKey() was given, of whichever key; below kPlacesMax.
[[nodiscard]] int32_t PlaceOf(const v1::SessionKey& key);

// Answers for callers whose session has ended. They are kept for the newest kKept sessions.
// Threads: one at a time.
template <typename Answer>
class EndedSessions {
 public:
  static constexpr size_t kKept = 1024;

  void Keep(const v1::SessionKey& key, Answer answer) {
    answers_[key.session()] = {key, std::move(answer)};
    order_.push_back(key.session());
    if (order_.size() <= kKept) return;
    answers_.erase(order_.front());
    order_.pop_front();
  }
  // Null: no session that is kept has this key.
  [[nodiscard]] const Answer* Find(const v1::SessionKey& key) const {
    const auto found = answers_.find(key.session());
    if (found == answers_.end() || !SameSecret(found->second.first.secret(), key.secret()) ||
        found->second.first.incarnation() != key.incarnation()) {
      return nullptr;
    }
    return &found->second.second;
  }

 private:
  std::map<uint64_t, std::pair<v1::SessionKey, Answer>> answers_;
  std::deque<uint64_t> order_;  // oldest first
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_SESSION_KEYS_H_
