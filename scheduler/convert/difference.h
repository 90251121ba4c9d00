// Tells people where two messages differ, so that they can make them alike.
#ifndef DMUOND_SCHEDULER_CONVERT_DIFFERENCE_H_
#define DMUOND_SCHEDULER_CONVERT_DIFFERENCE_H_

#include <string>

#include "google/protobuf/message.h"

namespace dmuond {

struct Difference {
  std::string field;  // "momentum", "coefficients[2].a"
  std::string one;    // its values: "0.95"; "none" where it is not set, "5 of them"
  std::string other;
};

// The first field, in the order of their numbers, that differs. REQUIRES: the messages are of one
// type and not equal.
[[nodiscard]] Difference FirstDifference(const google::protobuf::Message& one,
                                         const google::protobuf::Message& other);

}  // namespace dmuond

#endif  // DMUOND_SCHEDULER_CONVERT_DIFFERENCE_H_
