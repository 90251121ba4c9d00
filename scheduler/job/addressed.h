// A message of the coordinator, and the node that it is for.
#ifndef DMUOND_SCHEDULER_JOB_ADDRESSED_H_
#define DMUOND_SCHEDULER_JOB_ADDRESSED_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "dmuond/v1/peer.pb.h"

namespace dmuond::scheduler {

struct Addressed {
  std::optional<int32_t> node;  // nullopt: every node
  v1::CoordinatorMessage message;
};
using AddressedMessages = std::vector<Addressed>;

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_ADDRESSED_H_
