// In what lanes differ that are to compute the same bits: builds of libraries, results of
// functions.
//
//   for (const BitsDifference& differs : CodeDifferences(began, now, Between::kNodes)) …
#ifndef DMUOND_SCHEDULER_JOB_BITS_DIFFERENCE_H_
#define DMUOND_SCHEDULER_JOB_BITS_DIFFERENCE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "dmuond/v1/peer.pb.h"

namespace dmuond::scheduler {

struct BitsDifference {
  std::string what;   // "libopenblas.so.0 (/usr/lib/libopenblas.so.0)"
  std::string began;  // how that is where the job began
  std::string now;    // and how it is now
};

// Lanes of one node have one program; those of several nodes may have several builds of it, from
// the same sources.
enum class Between : uint8_t { kLanes, kNodes };

// What does not depend on the device. A library that one of the two has not loaded is not compared.
[[nodiscard]] std::vector<BitsDifference> CodeDifferences(const v1::LaneBits& began,
                                                          const v1::LaneBits& now, Between between);

// What depends on the device: lanes of a node may have devices of several kinds.
[[nodiscard]] std::vector<BitsDifference> DeviceDifferences(const v1::LaneBits& began,
                                                            const v1::LaneBits& now);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_BITS_DIFFERENCE_H_
