// Limits how many connections each user holds, so that one user cannot keep others out. A
// connection counts as a stranger's until it has proven what it is for. When its user has too many,
// the oldest stranger is closed: a client that proves itself at once gets in, however many others
// say nothing.
//
// Plain bookkeeping: the owner's lock guards it.
#ifndef DMUOND_SERVER_DAEMON_CALLS_CONNECTION_LIMITS_H_
#define DMUOND_SERVER_DAEMON_CALLS_CONNECTION_LIMITS_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>

namespace dmuond::server {

class ConnectionLimits {
 public:
  struct Limits {
    size_t all = 4096;              // of all users
    size_t per_uid = 256;           // of one
    size_t strangers_per_uid = 64;  // of one, that have proven nothing
  };
  explicit ConnectionLimits(Limits limits) : limits_(limits) {}

  struct Verdict {
    bool taken = false;               // counted, as a stranger
    std::optional<uint64_t> instead;  // the caller must close this stranger; it counts no more
  };
  // `id` grows from connection to connection.
  Verdict Add(uint64_t id, uid_t uid) {
    Verdict verdict;
    User& user = users_[uid];
    if (user.strangers.size() >= limits_.strangers_per_uid ||
        user.strangers.size() + user.known.size() >= limits_.per_uid || all_ >= limits_.all) {
      if (user.strangers.empty()) {
        if (user.known.empty()) users_.erase(uid);
        return verdict;
      }
      verdict.instead = *user.strangers.begin();
      user.strangers.erase(user.strangers.begin());
      --all_;
    }
    user.strangers.insert(id);
    ++all_;
    verdict.taken = true;
    return verdict;
  }
  // The connection has proven what it is for.
  void MakeKnown(uint64_t id, uid_t uid) {
    const auto user = users_.find(uid);
    if (user != users_.end() && user->second.strangers.erase(id) > 0) user->second.known.insert(id);
  }
  // Does nothing for a connection that is not counted.
  void Remove(uint64_t id, uid_t uid) {
    const auto user = users_.find(uid);
    if (user == users_.end()) return;
    all_ -= user->second.strangers.erase(id) + user->second.known.erase(id);
    if (user->second.strangers.empty() && user->second.known.empty()) users_.erase(user);
  }

 private:
  struct User {
    std::set<uint64_t> strangers;  // oldest first
    std::set<uint64_t> known;
  };
  const Limits limits_;
  size_t all_ = 0;
  std::map<uid_t, User> users_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_CONNECTION_LIMITS_H_
