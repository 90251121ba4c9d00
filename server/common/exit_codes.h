// The daemon ends with these codes, beside 0 (nothing is lost) and 1 (an error). Whoever starts it
// again after an error does not do so after these.
#ifndef DMUOND_SERVER_COMMON_EXIT_CODES_H_
#define DMUOND_SERVER_COMMON_EXIT_CODES_H_

namespace dmuond::server {

inline constexpr int kWrongSettings = 2;
inline constexpr int kNotSaved = 3;  // told to leave, and the last steps are in no snapshot

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_EXIT_CODES_H_
