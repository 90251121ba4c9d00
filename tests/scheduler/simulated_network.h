// Messages on their way. Streams keep their order and may be replayed in part, as after a
// reconnect; calls of trainers are unordered, lost and repeated; a connection between daemons can
// be cut: what is on its way is lost then, and each end learns of it at a time of its own.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_NETWORK_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_NETWORK_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "scheduler/types.h"
#include "tests/scheduler/chance.h"
#include "tests/scheduler/event_queue.h"

namespace dmuond::scheduler::testing {

using Microseconds = int64_t;
inline constexpr Microseconds kMillisecond = 1'000;

struct Stream {
  Microseconds last = 0;
  std::deque<Event> recent;  // what may be replayed
};

// Of a member to its coordinator.
struct Connection {
  Stream up;
  Stream down;
  NodeRank node;     // the member's
  bool cut = false;  // nothing arrives any more
  bool ended_at_coordinator = false;
  bool ended_at_member = false;
};

class SimulatedNetwork {
 public:
  SimulatedNetwork(Chance& chance, EventQueue& time) : chance_(chance), time_(time) {}

  void Send(Stream& stream, Microseconds delay, int32_t replay_percent, Event event) {
    const auto deliver = [&](Event message) {
      stream.last = std::max(stream.last, time_.now() + delay);
      time_.At(stream.last, std::move(message));
    };
    if (replay_percent == 0) {  // what is not repeated is not overtaken by repetitions either
      stream.recent.clear();
      return deliver(std::move(event));
    }
    deliver(event);
    stream.recent.push_back(std::move(event));
    if (stream.recent.size() > 6) stream.recent.pop_front();
    if (!chance_.Of(replay_percent)) return;
    const size_t again = chance_.Pick(1, static_cast<int64_t>(stream.recent.size()));
    for (size_t i = stream.recent.size() - again; i < stream.recent.size(); ++i) {
      deliver(stream.recent[i]);
    }
  }
  template <typename AtCoordinator>
  void Up(Connection& connection, int32_t replay_percent, AtCoordinator at_coordinator) {
    Send(connection.up, Travel(), replay_percent, [&connection, event = std::move(at_coordinator)] {
      if (!connection.cut && !connection.ended_at_coordinator) event();
    });
  }
  template <typename AtMember>
  void Down(Connection& connection, int32_t replay_percent, AtMember at_member) {
    Send(connection.down, Travel(), replay_percent, [&connection, event = std::move(at_member)] {
      if (!connection.cut && !connection.ended_at_member) event();
    });
  }
  void Call(Event event) {
    if (chance_.Of(10)) return;
    if (chance_.Of(10)) time_.After(chance_.Pick(0, 300 * kMillisecond), event);
    time_.After(chance_.Of(90) ? chance_.Pick(0, kMillisecond) : chance_.Pick(0, 40 * kMillisecond),
                std::move(event));
  }

 private:
  // Between daemons: mostly quick.
  Microseconds Travel() { return chance_.Pick(0, (chance_.Of(85) ? 1 : 20) * kMillisecond); }

  Chance& chance_;
  EventQueue& time_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_NETWORK_H_
