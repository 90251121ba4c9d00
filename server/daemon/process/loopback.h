// Whether addresses lead to this machine, and no further.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_LOOPBACK_H_
#define DMUOND_SERVER_DAEMON_PROCESS_LOOPBACK_H_

#include <string>

namespace dmuond::server {

// By its spelling: "127.0.0.1", "localhost", "::1", "[::1]".
[[nodiscard]] bool IsLoopbackHost(const std::string& host);

// The first address that this machine resolves `host` to, if all of them are loopback addresses: on
// Debian the machine's own name often leads to 127.0.1.1. Empty: one is not, or the name cannot be
// resolved. It may wait for a name server.
[[nodiscard]] std::string LoopbackAddressOf(const std::string& host);

// Whether this machine resolves `host`, and has none of its addresses: a server here cannot listen
// on any. A name that cannot be resolved leads nowhere yet. It may wait for a name server.
[[nodiscard]] bool LeadsElsewhere(const std::string& host);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_LOOPBACK_H_
