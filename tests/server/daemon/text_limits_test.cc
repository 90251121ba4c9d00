#include "server/daemon/calls/text_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "dmuond/v1/admin.pb.h"
#include "dmuond/v1/trainer.pb.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

void ExpectTooLong(const google::protobuf::Message& request, const std::string& message,
                   const std::string& reason = "STRING_TOO_LONG") {
  const absl::Status refused = CheckText(request);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_EQ(refused.message(), message);
  EXPECT_EQ(ReasonOf(refused), reason);
}

TEST(TextLimitsTest, FieldLengthAndLimitAreNamed) {
  v1::OpenSessionRequest open;
  open.set_client(std::string(256, 'c'));
  open.set_launch(std::string(128, 'l'));
  open.set_job(std::string(128, 'j'));
  EXPECT_TRUE(CheckText(open).ok());
  open.set_client(std::string(257, 'c'));
  ExpectTooLong(open, "client has 257 bytes; at most 256 are allowed");
  open.clear_client();
  open.set_launch(std::string(129, 'l'));
  ExpectTooLong(open, "launch has 129 bytes; at most 128 are allowed");
  open.clear_launch();
  open.set_job(std::string(129, 'j'));
  ExpectTooLong(open, "job has 129 bytes; at most 128 are allowed", "JOB_NAME_INVALID");
  open.clear_job();
  open.set_token(std::string(4097, 't'));
  ExpectTooLong(open, "token has 4097 bytes; at most 4096 are allowed");
}

TEST(TextLimitsTest, StringsOfMessagesAndListsInARequestAreLookedAtToo) {
  v1::RegisterLayoutRequest layout;
  layout.add_parameters()->set_name("first");
  layout.add_parameters()->set_route_reason(std::string(1025, 'r'));
  ExpectTooLong(layout, "parameters[1].route_reason has 1025 bytes; at most 1024 are allowed");
  layout.mutable_parameters(1)->clear_route_reason();
  layout.mutable_parameters(1)->set_name(std::string(1025, 'n'));
  ExpectTooLong(layout, "parameters[1].name has 1025 bytes; at most 1024 are allowed",
                "LAYOUT_INVALID");
  v1::PushParametersRequest push;
  push.add_weights(std::string(1 << 20, 'w'));
  ExpectTooLong(push, "weights[0] has 1048576 bytes; at most 1024 are allowed");
  push.clear_weights();
  push.add_chunks()->set_data(std::string(1 << 20, 'd'));  // is no text
  EXPECT_TRUE(CheckText(push).ok());
}

TEST(TextLimitsTest, AFieldWithoutALimitOfItsOwnHasOne) {
  v1::CloseSessionRequest close;
  close.set_end_job(std::string(1024, 'e'));
  EXPECT_TRUE(CheckText(close).ok());
  close.set_end_job(std::string(1025, 'e'));
  ExpectTooLong(close, "end_job has 1025 bytes; at most 1024 are allowed");
}

}  // namespace
}  // namespace dmuond::server
