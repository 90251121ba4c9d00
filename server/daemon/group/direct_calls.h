// The calls of any node of the group to any other, past the coordinator: for the state of units
// that the other node owns, and for what its lanes do. This makes such calls, and checks those that
// come in, which direct_service.h answers.
//
// Calls to a node share a connection, which is made for the first one, and again for the first one
// after its end. Calls that come while it is being made wait for it, and fail as it does. Its ends
// are proven (peer_connections.h). Without TLS each call is, too, by what peer_calls.h has: nobody
// on the way can make, change or repeat one.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_DIRECT_CALLS_H_
#define DMUOND_SERVER_DAEMON_GROUP_DIRECT_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "server/daemon/group/peer_calls.h"
#include "server/daemon/group/peer_connections.h"
#include "server/daemon/group/peer_links.h"
#include "server/daemon/memory/state_transfer.h"

namespace dmuond::server {

class DirectCalls {
 public:
  // So many calls to one node wait for its connection. The next ones are refused: the other end
  // closes connections that are not proven where there are many, and who waits holds a thread.
  static constexpr int kWaitingMax = 128;

  // `connections` must outlive it. `secret`: what calls are proven by; unset: by their connection.
  DirectCalls(int32_t node, int32_t nodes, PeerConnections& connections,
              const std::optional<PeerSecret>& secret)
      : connections_(connections), calls_(node, nodes, secret) {}

  // The group has formed anew: calls from before count no more.
  void OnFormed(const v1::JoinReply& formed);
  // Calls do not wait any longer for the group to form anew.
  void Stop();

  // ---- of this node: blocking ----
  absl::StatusOr<StateTensor> ReadState(int32_t node, const v1::ReadStateRequest& request,
                                        size_t elements);
  absl::Status WriteState(int32_t node, const v1::WriteStateRequest& request);
  absl::StatusOr<std::vector<v1::LaneTrace>> TraceNode(int32_t node, v1::TraceNodeRequest request,
                                                       const std::stop_token& stop);
  // Asks several times, and returns the answer that came fastest.
  absl::StatusOr<ClockAhead> ReadClock(int32_t node);

  // ---- of other nodes ----
  // Checks that a node of the group makes this call now, on a connection of its own: `connected`
  // has made the one that it came by. If so, the answer is going to prove this node to it.
  template <typename Request>
  absl::Status Check(const char* method, const Request& request, int32_t connected,
                     grpc::ServerContext& context) {
    absl::Status status = calls_.Check(method, request, connected);
    if (status.ok()) context.AddInitialMetadata(kReplyProof, calls_.ReplyProof(request.proof()));
    return status;
  }

 private:
  absl::StatusOr<StateTensor> ReadOnce(int32_t node, v1::ReadStateRequest request, size_t elements);
  absl::Status WriteOnce(int32_t node, v1::WriteStateRequest request);
  absl::StatusOr<std::unique_ptr<v1::Direct::Stub>> StubOf(int32_t node);
  absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(int32_t node, const std::string& address);
  // Waits before a call is repeated. False: it is not to be repeated.
  bool MayCallAgain(const absl::Status& status, std::chrono::steady_clock::time_point deadline);

  // To one node.
  struct Link {
    std::shared_ptr<grpc::Channel> channel;
    wire::UniqueFd held;  // a duplicate of gRPC's descriptor, by which its end is seen
    [[nodiscard]] bool ended() const;
  };
  // To make one.
  struct Attempt {
    std::optional<absl::StatusOr<std::shared_ptr<grpc::Channel>>> made;  // unset: not yet
    int waiting = 0;                                                     // calls
  };

  PeerConnections& connections_;
  PeerCalls calls_;
  Mutex mutex_;
  CondVar changed_;
  bool stopped_ DMUOND_GUARDED_BY(mutex_) = false;
  std::vector<std::string> addresses_ DMUOND_GUARDED_BY(mutex_);  // by node
  std::map<int32_t, Link> links_ DMUOND_GUARDED_BY(mutex_);       // of the group as it is formed
  // By node, likewise. Calls of before it formed hold theirs.
  std::map<int32_t, std::shared_ptr<Attempt>> attempts_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_DIRECT_CALLS_H_
