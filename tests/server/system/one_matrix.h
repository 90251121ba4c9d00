// The least that can be trained: one matrix, and numbers in it.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_ONE_MATRIX_H_
#define DMUOND_TESTS_SERVER_SYSTEM_ONE_MATRIX_H_

#include <algorithm>
#include <cstdint>

#include "dmuond/client/session.h"

namespace dmuond::testing {

inline client::Layout OneMatrix(int32_t world) {
  client::LayoutBuilder builder(world);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "matrix", .shape = {8, 16}});
  return *builder.Build();
}

inline void FillOneMatrix(client::Session& session) {
  std::ranges::fill(session.Weight<float>(0), 0.5F);
  std::ranges::fill(session.Gradient<float>(0), 0.25F);
}

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_ONE_MATRIX_H_
