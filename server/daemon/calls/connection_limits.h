// Limits how many connections each holder has, so that none can keep others out. A holder is a user
// of this machine, or a network address. A connection counts as a stranger's until it has proven
// what it is for. When its holder has too many, the oldest stranger is closed: a client that proves
// itself at once gets in, however many others say nothing. When all holders together have too many,
// a random one of the holder with most is: however fast others come, each of them has as good a
// chance to be closed as one that needs some time to prove itself, and most of theirs go first.
//
// Plain bookkeeping: the owner's lock guards it.
#ifndef DMUOND_SERVER_DAEMON_CALLS_CONNECTION_LIMITS_H_
#define DMUOND_SERVER_DAEMON_CALLS_CONNECTION_LIMITS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>

namespace dmuond::server {

class ConnectionLimits {
 public:
  struct Limits {
    size_t all = 4096;                 // of all holders
    size_t per_holder = 256;           // of one
    size_t strangers_per_holder = 64;  // of one, that have proven nothing
    // Of all holders, that have proven nothing: a further one closes one of the holder with most.
    size_t strangers = std::numeric_limits<size_t>::max();
  };
  explicit ConnectionLimits(Limits limits) : limits_(limits) {}

  struct Verdict {
    bool taken = false;               // counted, as a stranger
    std::optional<uint64_t> instead;  // the caller must close this stranger; it counts no more
  };
  // `id` grows from connection to connection.
  Verdict Add(uint64_t id, uint64_t holder) {
    Verdict verdict;
    Connections& own = holders_[holder];
    if (own.strangers.size() >= limits_.strangers_per_holder ||
        own.strangers.size() + own.known.size() >= limits_.per_holder || all_ >= limits_.all) {
      if (own.strangers.empty()) {
        if (own.known.empty()) holders_.erase(holder);
        return verdict;
      }
      verdict.instead = *own.strangers.begin();
      Remove(*verdict.instead, holder);
    } else if (strangers_ >= limits_.strangers) {
      const auto [one, its_holder] = AnyOfTheHolderWithMost();
      verdict.instead = one;
      Remove(one, its_holder);
    }
    holders_[holder].strangers.insert(id);
    ++strangers_;
    ++all_;
    verdict.taken = true;
    return verdict;
  }
  // The connection has proven what it is for.
  void MakeKnown(uint64_t id, uint64_t holder) {
    const auto own = holders_.find(holder);
    if (own == holders_.end() || own->second.strangers.erase(id) == 0) return;
    own->second.known.insert(id);
    --strangers_;
  }
  // Does nothing for a connection that is not counted.
  void Remove(uint64_t id, uint64_t holder) {
    const auto own = holders_.find(holder);
    if (own == holders_.end()) return;
    const size_t strangers = own->second.strangers.erase(id);
    strangers_ -= strangers;
    all_ -= strangers + own->second.known.erase(id);
    if (own->second.strangers.empty() && own->second.known.empty()) holders_.erase(own);
  }

 private:
  struct Connections {
    std::set<uint64_t> strangers;  // oldest first
    std::set<uint64_t> known;
  };
  // REQUIRES: there is a stranger.
  std::pair<uint64_t, uint64_t> AnyOfTheHolderWithMost() {
    std::pair<uint64_t, uint64_t> any{};
    size_t most = 0;
    size_t seen = 0;
    for (const auto& [holder, connections] : holders_) {
      if (connections.strangers.size() < most) continue;
      if (connections.strangers.size() > most) seen = 0;
      most = connections.strangers.size();
      // Each of those seen so far has the same chance.
      for (const uint64_t id : connections.strangers) {
        if (random_() % ++seen == 0) any = {id, holder};
      }
    }
    return any;
  }

  const Limits limits_;
  size_t all_ = 0;
  std::map<uint64_t, Connections> holders_;
  size_t strangers_ = 0;
  std::minstd_rand random_{std::random_device{}()};
};

// Limits how many connections each holder begins in a second.
class ConnectionRate {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  explicit ConnectionRate(size_t per_second) : per_second_(per_second) {}

  // False: it is one too many in this second.
  bool Take(TimePoint now, uint64_t holder) {
    if (now >= next_second_) {
      taken_.clear();
      next_second_ = now + std::chrono::seconds(1);
    }
    return ++taken_[holder] <= per_second_;
  }

 private:
  const size_t per_second_;
  TimePoint next_second_{};
  std::map<uint64_t, size_t> taken_;  // in this second: as many as the kernel accepts in it
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_CONNECTION_LIMITS_H_
