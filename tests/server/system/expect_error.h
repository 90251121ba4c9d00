// What a refusal must say: its code, its stable reason, and the names and values in its message.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_EXPECT_ERROR_H_
#define DMUOND_TESTS_SERVER_SYSTEM_EXPECT_ERROR_H_

#include <regex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dmuond/client/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/common/errors.h"

namespace dmuond::testing {

struct Refusal {
  absl::StatusCode code;
  std::string reason;
  std::vector<std::string> names;
};

// What of an expected part of a message is a value: what stands in quotes, and numbers.
inline std::vector<std::string> ValuesIn(const std::string& part) {
  static const std::regex value("'([^']+)'|(\\d+)");
  std::vector<std::string> values;
  for (std::sregex_iterator at(part.begin(), part.end(), value), end; at != end; ++at) {
    values.push_back((*at)[1].matched ? (*at)[1] : (*at)[2]);
  }
  return values;
}

// Programs find the values of the message in the metadata.
// Of the client library's errors and of FromGrpc()'s, which keep the reason in different places.
inline void ExpectRefused(const absl::Status& status, const Refusal& expected) {
  EXPECT_EQ(status.code(), expected.code) << status;
  std::string reason = server::ReasonOf(status);
  if (reason.empty()) reason = client::ReasonOf(status);
  EXPECT_EQ(reason, expected.reason) << status;
  std::vector<std::string> metadata;
  for (const auto& [key, value] : server::MetadataOf(status)) metadata.push_back(value);
  for (const auto& [key, value] : client::MetadataOf(status)) metadata.push_back(value);
  for (const std::string& name : expected.names) {
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(name));
    for (const std::string& value : ValuesIn(name)) {
      EXPECT_THAT(metadata, ::testing::Contains(::testing::HasSubstr(value))) << status;
    }
  }
}

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_EXPECT_ERROR_H_
