// What must hold whatever the input is. The fuzzer keeps the input of a process that aborts.
#ifndef DMUOND_TESTS_FUZZ_REQUIRE_H_
#define DMUOND_TESTS_FUZZ_REQUIRE_H_

#include <cstdlib>

namespace dmuond::testing {

inline void Require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_FUZZ_REQUIRE_H_
