// Who a trainer is, and where its daemon listens.
#ifndef DMUOND_CLIENT_OPTIONS_H_
#define DMUOND_CLIENT_OPTIONS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "dmuond/client/arenas.h"

namespace dmuond::client {

// What happens when the job has state, or has none.
enum class Resume : uint8_t {
  kNever = 1,      // state is an error: a crashed run must not seep into the next one
  kIfPresent = 2,  // continue where there is state, else start
  kRequire = 3,    // no state is an error
  // A job that has state is ended first, once for each start of all ranks (Options::launch).
  // Refused while a rank of another start is attached. Its snapshots stay on disk and no longer
  // count.
  kDiscard = 4
};

struct Options {
  std::string address;  // path of the socket, "unix:PATH" too; empty: DMUOND_ADDRESS or the default
  std::string job = "default";  // [A-Za-z0-9._-]{1,128}, no dot first
  int32_t rank = 0;
  int32_t world_size = 1;
  Resume resume = Resume::kNever;
  // The token goes to a daemon of this user, too, not only to one of root or of this process's
  // user.
  std::optional<uid_t> server_uid;
  // Names the start of all ranks together that this trainer belongs to, for Resume::kDiscard: equal
  // on all of them, another one with the next start; at most 128 bytes. Not needed in a world of 1.
  std::string launch;
  std::string token;       // empty where the daemon asks for none
  int32_t home_lane = -1;  // lane of the trainer's own device; -1: any
  // Maps the arenas, and names the device that the trainer computes with. Null: arenas lie in host
  // memory.
  std::shared_ptr<Arenas> arenas;
  bool poison = false;  // fill this trainer's weights with NaN between decision and publish
  std::string client;   // for logs and status; empty: library, host and process
  // How long Open waits for a daemon that is just starting.
  std::chrono::milliseconds connect_timeout{10'000};
  // How long a call waits for the successor of a daemon that has gone, and Open and Register for
  // that of one that is leaving; 0: DAEMON_LOST, or DRAINING, at once.
  std::chrono::milliseconds reconnect_timeout{600'000};
  // Called with a line for people when such a wait begins and ends; and when a step has waited for
  // 5 s, and then less and less often, with whom it waits for. It runs in the thread of the call.
  // Unset: the line goes to stderr.
  std::function<void(const std::string& what)> log;
};

// From DMUOND_ADDRESS, DMUOND_JOB, RANK, WORLD_SIZE, LOCAL_RANK (the home lane, where it is one),
// DMUOND_RESUME (1, never, if_present, require or discard; after a restart by torchrun discard
// means if_present: the state that is there is the run's own), DMUOND_LAUNCH (or what torchrun and
// Slurm say of the start), DMUOND_POISON, DMUOND_TOKEN_FILE, DMUOND_SERVER_UID and
// DMUOND_RECONNECT_S (reconnect_timeout, in seconds); what is not set keeps the default above.
// INVALID_ARGUMENT naming a variable that is not what it should be.
[[nodiscard]] absl::StatusOr<Options> OptionsFromEnvironment();

// The path of the gRPC socket that an address means: without "unix:", or, if empty, DMUOND_ADDRESS
// or ${XDG_RUNTIME_DIR:-/tmp}/dmuond-$UID/dmuond.sock. INVALID_ARGUMENT when it cannot be one.
[[nodiscard]] absl::StatusOr<std::string> SocketPath(const std::string& address);

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_OPTIONS_H_
