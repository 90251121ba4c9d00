// The group: how daemons find each other, and what they send. Node 0 serves Peer.Join and forms the
// group when exactly `nodes` members have joined; every other node keeps one stream to it and joins
// again after a cut. Any node serves ReadState and WriteState.
//
// Every end proves itself before it is listened to, on loopback too: a stream by peer_handshake.h,
// the other calls by state_calls.h. Strangers hold a bounded number of threads, each for a bounded
// time.
//
// Threads: one that beats and judges silence, which never waits for the core; one that delivers to
// the core what the group says (delivery_queue.h); one that joins (other nodes); one writer a
// stream; gRPC's for what comes in.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEERS_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEERS_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "server/daemon/daemon.h"
#include "server/daemon/group/peer_credentials.h"

namespace dmuond::server {

struct PeerOptions {
  int32_t node = 0;
  int32_t nodes = 1;
  int32_t lanes = 1;
  int64_t lane_memory_bytes = 0;
  v1::LaneBits bits;        // of this daemon's lanes
  std::string device_type;  // as NodeDevice says
  std::string listen;       // host:port of this daemon's Peer service
  std::string advertise;    // what others reach it by; empty: listen. Port 0: the one really bound
  std::string coordinator;  // host:port of node 0's Peer service
  bool allow_plaintext = false;
  // PEM files, all three or none: mutual TLS between daemons.
  std::string tls_ca_file;
  std::string tls_certificate_file;
  std::string tls_key_file;
  PeerProofs proofs;
  int64_t message_bytes_max = 0;          // of one message of a proven daemon
  uint32_t epoch = 0;                     // newest that this node knows
  storage::Storage* snapshots = nullptr;  // null: none are made
};

class Peers : public PeerLinks {
 public:
  // Listens. FAILED_PRECONDITION when it would speak plaintext beyond loopback without being told
  // to; UNAVAILABLE naming the address when the port is taken.
  static absl::StatusOr<std::unique_ptr<Peers>> Start(PeerOptions options, Daemon& daemon);

  // Begins to join; from now on the daemon hears of the group. REQUIRES: daemon.Bind() was called.
  virtual void Join() = 0;
  // Leaves: streams end, joining stops, the server closes.
  virtual void Stop() = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEERS_H_
