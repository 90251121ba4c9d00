// Signals to stop that come so soon after the first one are the same wish: `timeout`, say, signals
// its child and then the child's group. A later one insists.
#ifndef DMUOND_SERVER_COMMON_ONE_SIGNAL_H_
#define DMUOND_SERVER_COMMON_ONE_SIGNAL_H_

#include <chrono>

namespace dmuond::server {

inline constexpr std::chrono::milliseconds kOneSignal{500};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_ONE_SIGNAL_H_
