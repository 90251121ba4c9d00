#include "server/common/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace dmuond::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

absl::Status StepError() {
  return Error(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
               "step 9 submitted, 7 is next", {{"step", "9"}, {"next", "7:x\n"}});
}

google::rpc::ErrorInfo InfoOf(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), status.error_code());
  EXPECT_EQ(details.message(), status.error_message());
  EXPECT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  EXPECT_TRUE(details.details(0).UnpackTo(&info));
  return info;
}

TEST(ErrorsTest, ErrorCarriesReasonAndMetadata) {
  EXPECT_EQ(ReasonOf(StepError()), "STEP_OUT_OF_ORDER");
  EXPECT_THAT(MetadataOf(StepError()), ElementsAre(Pair("step", "9"), Pair("next", "7:x\n")));
  EXPECT_EQ(ReasonOf(absl::OkStatus()), "");
  EXPECT_EQ(ReasonOf(absl::InternalError("x")), "");
  EXPECT_THAT(MetadataOf(absl::InternalError("x")), IsEmpty());
}

TEST(ErrorsTest, WithReasonKeepsAnExistingOne) {
  EXPECT_EQ(ReasonOf(WithReason(absl::NotFoundError("x"), "FIRST")), "FIRST");
  EXPECT_EQ(ReasonOf(WithReason(StepError(), "OTHER")), "STEP_OUT_OF_ORDER");
  EXPECT_TRUE(WithReason(absl::OkStatus(), "OTHER").ok());
}

TEST(ErrorsTest, WireFormIsErrorInfo) {
  const grpc::Status status = ToGrpc(StepError());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  const google::rpc::ErrorInfo info = InfoOf(status);
  EXPECT_EQ(info.reason(), "STEP_OUT_OF_ORDER");
  EXPECT_EQ(info.domain(), "dmuond");
  EXPECT_EQ(info.metadata().at("step"), "9");
}

// As gRPC counts a status: the message with %XX for what is not printed ASCII, details in base64.
size_t TrailerBytes(const grpc::Status& status) {
  size_t bytes = status.error_details().size() * 4 / 3;
  for (const char c : status.error_message()) bytes += c >= ' ' && c <= '~' && c != '%' ? 1 : 3;
  return bytes;
}

TEST(ErrorsTest, AnErrorThatQuotesLongStringsStaysWithinTheTrailersThatAClientTakes) {
  for (const std::string& piece : {std::string("n"), std::string("\u00fc"), std::string("%")}) {
    std::string name;
    while (name.size() + piece.size() <= 1024) name += piece;
    const absl::Status error =
        Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
              Say("parameters '", Named("parameter", name), "', '", Named("other", name), "', '",
                  Named("third", name), "' and '", Named("fourth", name), "' of rank ",
                  Named("rank", 7)));
    const grpc::Status status = ToGrpc(error);
    EXPECT_LT(TrailerBytes(status), 8000);
    const google::rpc::ErrorInfo info = InfoOf(status);
    EXPECT_EQ(info.reason(), "LAYOUT_INVALID");
    EXPECT_EQ(info.metadata().at("rank"), "7");
  }
}

TEST(ErrorsTest, WhatOthersHaveWrittenIsShownEscaped) {
  const absl::Status error = Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                                   Say("parameter '", Named("parameter", "a\x1b[2J\nb"), "'\nend"));
  EXPECT_EQ(error.message(), "parameter 'a\\u001b[2J\\nb'\nend");
  EXPECT_EQ(InfoOf(ToGrpc(error)).metadata().at("parameter"), "a\x1b[2J\nb");  // for programs
  const grpc::Status status = ToGrpc(absl::InternalError("no UTF-8: \xff"));
  EXPECT_EQ(status.error_message(), "no UTF-8: \\ufffd");
}

TEST(ErrorsTest, EveryErrorHasSomeReasonOnTheWire) {
  EXPECT_EQ(InfoOf(ToGrpc(absl::InternalError("x"))).reason(), "INTERNAL_ERROR");
  EXPECT_EQ(InfoOf(ToGrpc(absl::NotFoundError("x"))).reason(), "NOT_FOUND");
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
}

TEST(ErrorsTest, TheWireAndBackIsTheSame) {
  const absl::Status back = FromGrpc(ToGrpc(StepError()));
  EXPECT_EQ(back.code(), StepError().code());
  EXPECT_EQ(back.message(), StepError().message());
  EXPECT_EQ(ReasonOf(back), "STEP_OUT_OF_ORDER");
  EXPECT_THAT(MetadataOf(back),
              ::testing::UnorderedElementsAre(Pair("step", "9"), Pair("next", "7:x\n")));
}

TEST(ErrorsTest, ForeignDetailsAreNoReason) {
  EXPECT_EQ(ReasonOf(FromGrpc({grpc::StatusCode::UNAVAILABLE, "gone"})), "");
  EXPECT_EQ(ReasonOf(FromGrpc({grpc::StatusCode::UNAVAILABLE, "gone", "\xff\xff"})), "");
}

}  // namespace
}  // namespace dmuond::server
