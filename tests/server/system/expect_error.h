// What a refusal must say: its code, its stable reason, and the names and values in its message.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_EXPECT_ERROR_H_
#define DMUOND_TESTS_SERVER_SYSTEM_EXPECT_ERROR_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dmuond/client/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon/errors.h"

namespace dmuond::testing {

struct Refusal {
  absl::StatusCode code;
  std::string reason;
  std::vector<std::string> names;
};

// Of the client library's errors and of FromGrpc()'s, which keep the reason in different places.
inline void ExpectRefused(const absl::Status& status, const Refusal& expected) {
  EXPECT_EQ(status.code(), expected.code) << status;
  std::string reason = server::ReasonOf(status);
  if (reason.empty()) reason = client::ReasonOf(status);
  EXPECT_EQ(reason, expected.reason) << status;
  for (const std::string& name : expected.names) {
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(name));
  }
}

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_EXPECT_ERROR_H_
