// GOs on their way from the coordinator to the nodes, gathered into few messages. A node gets those
// that it has a part in. Pure: time is passed in.
//
// Nodes report in rounds that begin for all of them at about the same time, so what a round lets go
// goes within a twentieth of the gathering time, in one message. A GO after which nothing more of
// its operation is to go is due at once.
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

  // Holds the GO back. `gather`: the open attempt's.
  void Add(TimePoint now, std::chrono::microseconds gather, Go go);
  // When Take() is due; nullopt: nothing is held back.
  [[nodiscard]] std::optional<TimePoint> due() const { return due_; }
  // All that is held back.
  [[nodiscard]] AddressedMessages Take(TimePoint now);
  // Drops it: the lanes that it is for are no more.
  void Forget() {
    held_.clear();
    due_.reset();
  }

 private:
  // Nodes that have parts in the same buckets of everything.
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
  std::optional<TimePoint> sent_;  // the last ones
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_OUTGOING_GOES_H_
