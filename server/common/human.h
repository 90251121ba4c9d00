// Quantities for people.
#ifndef DMUOND_SERVER_COMMON_HUMAN_H_
#define DMUOND_SERVER_COMMON_HUMAN_H_

#include <cstdint>
#include <string>

namespace dmuond::server {

[[nodiscard]] std::string HumanBytes(int64_t bytes);      // "1.5 GiB"
[[nodiscard]] std::string HumanMicroseconds(double us);   // "12.5 ms"
[[nodiscard]] std::string HumanSeconds(int64_t seconds);  // "1h 02m", "3m 04s"
[[nodiscard]] std::string HumanPercent(double fraction);  // "1.23 %"

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_HUMAN_H_
