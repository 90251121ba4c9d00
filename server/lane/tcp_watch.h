// The TCP connections of this process, which are a lane's rail: ends those whose other machine is
// not heard any more, and says what crosses them.
//
// They are found anew by each call, since who owns them closes them at any time. Threads: any.
#ifndef DMUOND_SERVER_LANE_TCP_WATCH_H_
#define DMUOND_SERVER_LANE_TCP_WATCH_H_

#include <chrono>
#include <cstdint>
#include <string>

namespace dmuond::server::lane {

// A connection that is there ends, with ETIMEDOUT for who uses it, when the other machine has
// acknowledged nothing for `timeout`, which is a second or more. Where nothing is under way, the
// kernel asks. A process that hangs is not silent: its kernel answers.
void EndSilentConnections(std::chrono::milliseconds timeout);

struct TcpTraffic {
  uint64_t bytes = 0;       // received, and sent and acknowledged, on the connections there are
  std::string connections;  // each with its other end and what has not come, for people
};
[[nodiscard]] TcpTraffic ReadTcpTraffic();

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_TCP_WATCH_H_
