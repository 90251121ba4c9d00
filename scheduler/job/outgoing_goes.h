// GOs on their way from the coordinator to the nodes, gathered into few messages. A node gets those
// that it has a part in. Pure: time is passed in.
//
// All nodes report in rounds that end at about the same time. The GOs that follow from one round
// come within a twentieth of the gathering time, and leave in one message. The last GO of an
// operation is due at once.
#ifndef DMUOND_SCHEDULER_JOB_OUTGOING_GOES_H_
#define DMUOND_SCHEDULER_JOB_OUTGOING_GOES_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/addressed.h"
#include "scheduler/step.h"
#include "scheduler/step_rails.h"

namespace dmuond::scheduler {

class OutgoingGoes {
 public:
  // `tables` must outlive the object.
  OutgoingGoes(const RailTables& tables, int32_t nodes);

  // Holds the GO back. `gather` is the gathering time of the open attempt.
  void Add(TimePoint now, std::chrono::microseconds gather, Go go);
  // When to call Take(); nullopt: nothing is held back.
  [[nodiscard]] std::optional<TimePoint> due() const { return due_; }
  // Hands out all that is held back.
  [[nodiscard]] AddressedMessages Take(TimePoint now);
  // Drops all that is held back: its lanes have ended.
  void Forget() {
    held_.clear();
    due_.reset();
  }

 private:
  // Nodes that have parts in the same buckets of all operations.
  struct Alike {
    std::vector<int32_t> nodes;
    bool all = false;  // every node of the group
  };
  [[nodiscard]] const RailTable& TableOf(const Go& go) const;
  [[nodiscard]] v1::Goes GoesOf(const Alike& alike) const;

  const RailTables& tables_;
  std::vector<Alike> alike_;
  std::vector<Go> held_;  // one for each attempt, rail, operation and kind
  std::optional<TimePoint> due_;
  std::optional<TimePoint> sent_;  // when Take() was called last
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_OUTGOING_GOES_H_
