// The group's daemons: they find each other, and send messages. Node 0 serves Peer.Join and forms
// the group when exactly `nodes` members have joined; every other node keeps one stream to it and
// joins again after a cut. Any node serves ReadState and WriteState.
//
// The daemon accepts connections itself, and both ends of each prove themselves before gRPC reads
// anything of it, on loopback too (peer_connections.h). Strangers hold a limited number of threads,
// each for a limited time (calls/grpc_socket.h). A connection is never mended: whoever joins, or
// makes a direct call after the end of the connection for them, makes a new one.
//
// Threads: one accepts connections, and there is one for each that is being proven, and for each
// that has TLS. One sends heartbeats and judges silence, and never waits for the core. One delivers
// to the core what the group says (delivery_queue.h). One joins (not on node 0). One writes, for
// each stream. gRPC's read.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEERS_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEERS_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "server/daemon/daemon.h"
#include "server/daemon/group/peer_handshake.h"

namespace dmuond::server {

struct PeerOptions {
  int32_t node = 0;
  int32_t nodes = 1;
  int32_t lanes = 1;
  int32_t jobs_max = 1;
  int64_t lane_memory_bytes = 0;
  v1::LaneBits bits;                 // of this daemon's lanes
  std::string device_type;           // as NodeDevice says
  std::vector<std::string> devices;  // the same
  std::string listen;                // host:port of this daemon's Peer service
  std::string advertise;    // its address for others; empty: listen. Port 0: the one that is bound
  std::string coordinator;  // host:port of node 0's Peer service
  bool allow_plaintext = false;
  // PEM files, all three or none: mutual TLS between daemons.
  std::string tls_ca_file;
  std::string tls_certificate_file;
  std::string tls_key_file;
  PeerProofs proofs;
  int64_t message_bytes_max = 0;          // largest message that a proven daemon may send
  uint32_t epoch = 0;                     // the newest one that this node knows
  storage::Storage* snapshots = nullptr;  // null: none are made
};

// What the connections of a group of so many nodes take at most.
[[nodiscard]] int64_t PeerDescriptorsMax(int32_t nodes, bool tls);

class Peers : public PeerLinks {
 public:
  // Listens. FAILED_PRECONDITION when it would speak plaintext beyond loopback without being told
  // to; UNAVAILABLE naming the address when the port is taken.
  static absl::StatusOr<std::unique_ptr<Peers>> Start(PeerOptions options, Daemon& daemon);

  // Begins to join; from now on the daemon hears of the group. REQUIRES: daemon.Bind() was called.
  virtual void Join() = 0;
  // Reads the TLS files again, and says in the log what came of it. Without TLS: nothing.
  virtual void ReloadCertificates() = 0;
  // Leaves: streams end, joining stops, the server closes.
  virtual void Stop() = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEERS_H_
