// The daemon: places for jobs, each with a core of its own (core.h), so that no job waits for
// another one's lock, lanes, disk or end. What trainers call goes to the place of their session;
// what the group's other daemons say, to the place that it names, or to all.
//
// Threads: any, but for Bind(), which comes first, and the destructor.
#ifndef DMUOND_SERVER_DAEMON_DAEMON_H_
#define DMUOND_SERVER_DAEMON_DAEMON_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "server/daemon/calls/node_calls.h"
#include "server/daemon/calls/place_finder.h"
#include "server/daemon/ended_jobs.h"
#include "server/daemon/memory/node_device.h"
#include "server/daemon/place.h"
#include "server/daemon/rpc_counts.h"

namespace dmuond::server {

class Daemon {
 public:
  using Cancelled = Core::Cancelled;
  // `device` outlives the daemon.
  Daemon(const DaemonOptions& options, NodeDevice& device);

  // Call it before anything else. `attach` and `peers` must live as long as the daemon is called.
  // `peers` is null in a group of one.
  void Bind(AttachServer* attach, PeerLinks* peers);

  // ---- calls ----
  // SessionCalls', in the place of its job. `uid`: who calls; nullopt: it is not known.
  absl::StatusOr<v1::OpenSessionReply> OpenSession(const v1::OpenSessionRequest& request,
                                                   std::optional<uid_t> uid,
                                                   const Cancelled& cancelled);
  // Whose calls have this key. Every key has a place; an unknown one is refused there.
  [[nodiscard]] Place& PlaceOf(const v1::SessionKey& key);
  // 0 … options.places-1; what is beyond is the first.
  [[nodiscard]] Place& place(int32_t number);
  // Has the calls that are about the node, and not about one job.
  [[nodiscard]] NodeCalls& node() { return node_; }
  // Sends lanes what the step calls have collected for them.
  void TellLanes();
  [[nodiscard]] RpcCounts& rpcs() { return rpcs_; }
  [[nodiscard]] std::chrono::steady_clock::time_point started() const {
    return places_.front().core.started;
  }

  // ---- events, from their sources' threads ----
  void OnAttachGone(AttachId id);
  void OnFormed(uint32_t epoch);
  void OnMemberMessage(int32_t node, const v1::MemberMessage& message);  // node 0
  void OnMemberGone(int32_t node, const std::string& why);               // node 0
  void OnCoordinatorMessage(const v1::CoordinatorMessage& message);      // other nodes
  void OnCoordinatorGone(const std::string& why);                        // other nodes
  void Tick();

  [[nodiscard]] bool formed();
  // The newest group epoch of which it was a part; 0: none.
  [[nodiscard]] uint32_t newest_epoch() const;

 private:
  // OK: the user may open a session of this job.
  absl::Status CheckJobsOf(uid_t uid, const std::string& job);

  std::deque<Place> places_;
  PlaceFinder finder_;
  EndedJobs ended_{places_, finder_};
  NodeCalls node_{places_};
  RpcCounts rpcs_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_DAEMON_H_
