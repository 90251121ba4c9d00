// One variable of the environment; "" where it is unset.
#ifndef DMUOND_CLIENT_SRC_VARIABLE_H_
#define DMUOND_CLIENT_SRC_VARIABLE_H_

#include <cstdlib>
#include <string>

namespace dmuond::client {

inline std::string Variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return value == nullptr ? "" : value;
}

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_SRC_VARIABLE_H_
