// Asks a lane's program about GPUs (server/lane/gpu_probe.h), in a process of its own: the driver
// may hang, and dmuonctl has none.
#ifndef DMUOND_SERVER_CTL_PROBE_H_
#define DMUOND_SERVER_CTL_PROBE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

struct Probe {
  bool cuda = true;  // false: the program was built without CUDA
  Json nccl;         // null: it has not come so far
  Json driver;
  std::vector<Json> devices;
  std::string at;     // what it did last
  bool done = false;  // false: it hangs there, or has ended there
  bool hangs = false;
  std::string words;  // whatever else it has written
};

// Runs `lane_binary --probe` with this environment and no other. After `timeout` it is killed, and
// what it has said until then is returned. The error: it cannot be run.
[[nodiscard]] absl::StatusOr<Probe> RunProbe(const std::string& lane_binary,
                                             const std::vector<std::string>& environment,
                                             absl::Duration timeout);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_PROBE_H_
