// What this build is, and what it speaks.
#ifndef DMUOND_SERVER_DAEMON_VERSION_H_
#define DMUOND_SERVER_DAEMON_VERSION_H_

#include <cstdint>

namespace dmuond::server {

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr uint64_t kFeatures = 0;  // no optional feature exists yet
inline constexpr char kBuildVersion[] = "0.1.0";

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_VERSION_H_
