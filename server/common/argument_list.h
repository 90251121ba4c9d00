// Strings in the form in which exec and posix_spawn take arguments and environments.
#ifndef DMUOND_SERVER_COMMON_ARGUMENT_LIST_H_
#define DMUOND_SERVER_COMMON_ARGUMENT_LIST_H_

#include <string>
#include <vector>

namespace dmuond::server {

// Pointers into `strings`, which must outlive them unchanged, and a null pointer at the end.
inline std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_ARGUMENT_LIST_H_
