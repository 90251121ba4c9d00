#include "base/status_macros.h"

#include <memory>

#include "gtest/gtest.h"

namespace dmuond {
namespace {

using Value = std::unique_ptr<int>;  // moves, and is not copied

absl::StatusOr<Value> Give(int value, absl::Status status) {
  if (!status.ok()) return status;
  return std::make_unique<int>(value);
}

absl::Status Both(const absl::Status& first, const absl::Status& second, int& calls) {
  RETURN_IF_ERROR((++calls, first));
  RETURN_IF_ERROR((++calls, second));
  return absl::OkStatus();
}

absl::StatusOr<int> Sum(const absl::Status& first, const absl::Status& second) {
  ASSIGN_OR_RETURN(const Value one, Give(1, first));
  Value two;
  ASSIGN_OR_RETURN(two, Give(2, second));
  return *one + *two;
}

TEST(StatusMacrosTest, AnErrorIsReturnedAtOnceAndOnlyThen) {
  int calls = 0;
  EXPECT_EQ(Both(absl::DataLossError("a"), absl::OkStatus(), calls), absl::DataLossError("a"));
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(Both(absl::OkStatus(), absl::AbortedError("b"), calls), absl::AbortedError("b"));
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(Both(absl::OkStatus(), absl::OkStatus(), calls).ok());
  EXPECT_EQ(calls, 5);
}

TEST(StatusMacrosTest, AValueIsMovedOrItsErrorReturned) {
  EXPECT_EQ(Sum(absl::OkStatus(), absl::OkStatus()).value(), 3);
  EXPECT_EQ(Sum(absl::DataLossError("a"), absl::OkStatus()).status(), absl::DataLossError("a"));
  EXPECT_EQ(Sum(absl::OkStatus(), absl::AbortedError("b")).status(), absl::AbortedError("b"));
}

}  // namespace
}  // namespace dmuond
