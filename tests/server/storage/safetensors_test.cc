#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/storage/safetensors_header.h"
#include "server/storage/safetensors_reader.h"
#include "server/storage/safetensors_writer.h"
#include "tests/server/storage/fault_storage.h"

namespace dmuond::server::storage {
namespace {

using testing::FaultStorage;
using ::testing::HasSubstr;

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span<const char>(text));
}

absl::Status ParseError(const std::string& json, int64_t data_bytes = 8) {
  return ParseHeader(Bytes(json), data_bytes).status();
}

TEST(SafetensorsHeaderTest, ComesBackAsItWent) {
  SafetensorsHeader header;
  header.metadata = {{"step", "12"}, {"odd \"key\"\n", "ü"}};
  header.tensors = {{.name = "n", .type = TensorType::kI64},
                    {.name = "w \\ \"x\"", .type = TensorType::kF32, .shape = {3, 5}},
                    {.name = "empty", .type = TensorType::kU8, .shape = {0}}};
  ASSERT_TRUE(PlaceTensors(header.tensors).ok());
  const auto text = EncodeHeader(header);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->size() % kDataAlignment, 0);
  const auto size = static_cast<int64_t>(text->size()) + 68;
  const auto json = JsonBytes(Bytes(*text).first<kLengthBytes>(), size);
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(*json, static_cast<int64_t>(text->size()) - kLengthBytes);
  const auto parsed = ParseHeader(Bytes(*text).subspan(kLengthBytes), 68);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, header);
}

TEST(SafetensorsHeaderTest, RefusesTensorsThatNoFileCanHold) {
  const auto refuse = [](std::vector<TensorInfo> tensors, const char* why) {
    const absl::Status status = PlaceTensors(tensors);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  refuse({{.name = ""}}, "name");
  refuse({{.name = "__metadata__"}}, "name");
  refuse({{.name = "bad \xff"}}, "bad \\xff");
  refuse({{.name = "x"}, {.name = "x"}}, "\"x\" is there twice");
  refuse({{.name = "x", .shape = {int64_t{1} << 40, int64_t{1} << 40}}}, "too large");
  refuse({{.name = "x"}, {.name = "count", .type = TensorType::kI64}},
         "\"count\" would lie at byte 4, no multiple of the 8 bytes of I64");
}

TEST(SafetensorsHeaderTest, LengthsAreLimitedBeforeMemoryIsTaken) {
  std::vector<std::byte> word(8, std::byte{0xff});
  const std::span<const std::byte, 8> span(word.data(), 8);
  EXPECT_THAT(std::string(JsonBytes(span, 1 << 20).status().message()),
              HasSubstr("announces 18446744073709551615 bytes; at most 100000000"));
  std::fill(word.begin(), word.end(), std::byte{0});
  word[2] = std::byte{1};
  EXPECT_THAT(std::string(JsonBytes(span, 65000).status().message()),
              HasSubstr("announces 65536 bytes, the file has 64992"));
  EXPECT_EQ(JsonBytes(span, 0).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(*JsonBytes(span, 65544), 65536);
}

TEST(SafetensorsHeaderTest, NamesTheTensorThatIsWrong) {
  const auto refuse = [](const std::string& json, const char* why) {
    const absl::Status status = ParseError(json);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << json;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why)) << json;
  };
  refuse(R"({"x":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}})",
         R"(tensor "x": dtype "BF16" is none of F32, I64, U8)");
  refuse(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,12]}})",
         R"(tensor "x": lies at bytes 0 to 12; F32 of shape [2] does not)");
  refuse(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "bytes 8 to 0");
  refuse(R"({"x":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})",
         R"(tensor "x" ends at byte 12 of the data, which has 8)");
  refuse(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "tensors end at byte 4");
  refuse(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
         R"("x" begins at byte 4, the one before ends at 0)");
  refuse(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
             "y":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
         R"("y" begins at byte 4, the one before ends at 8)");
  refuse(R"({"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})",
         "shape [4611686018427387904, 4] does not");
  refuse(R"({"x":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})",
         "too large");
  refuse(R"({"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "negative");
  refuse(R"({"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "no integer");
  refuse(R"({"x":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]}})",
         "more than 8 dimensions");
  refuse(R"({"x":{"dtype":"F32","shape":[2]}})", "lacks");
  refuse(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "not two");
  refuse(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", "more than two");
  refuse(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"dtype":"F32"}})", "dtype twice");
  refuse(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"extra":1}})", "extra");
  refuse(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
             "x":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}})",
         R"(tensor "x": is there twice)");
  refuse(R"({"x":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", "unexpected");
  refuse(R"({"x":{"dtype":"F32","shape":{"a":1},"data_offsets":[0,8]}})", "unexpected");
  refuse(R"({"x":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", "unexpected");
  refuse(R"({"x":[1,2]})", "unexpected");
  refuse(R"({"x":null})", "unexpected");
  refuse(R"({"__metadata__":{"a":1}})", "unexpected");
  refuse(R"({"__metadata__":{"a":"1","a":"2"}})", "twice");
  refuse(R"({"__metadata__":{},"__metadata__":{}})", "twice");
  refuse(R"({"x":{"dtype":"F32")", "no JSON");
  refuse(R"({} x)", "no JSON");
  refuse(R"([])", "does not begin with '{'");
  refuse("", "does not begin with '{'");
  refuse(" {}", "does not begin with '{'");
}

TEST(SafetensorsHeaderTest, DeepNestingIsRefusedAtOnce) {
  EXPECT_EQ(ParseError(R"({"x":{"shape":)" + std::string(1'000'000, '[')).code(),
            absl::StatusCode::kDataLoss);
}

class SafetensorsFileTest : public ::testing::Test {
 protected:
  std::unique_ptr<SafetensorsWriter> Begin() {
    return SafetensorsWriter::Create(storage_, "f", {{"a", "b"}},
                                     {{.name = "n", .type = TensorType::kI64, .shape = {2}},
                                      {.name = "e", .type = TensorType::kF32, .shape = {0}},
                                      {.name = "w", .type = TensorType::kF32, .shape = {3}}})
        .value();
  }
  FaultStorage storage_{1};
};

TEST_F(SafetensorsFileTest, PartsMayCrossTensors) {
  auto writer = Begin();
  const std::string data = "0123456789abcdef0123456789AB";
  EXPECT_EQ(writer->next_tensor(), 0);
  ASSERT_TRUE(writer->Append(Bytes(data.substr(0, 5))).ok());
  ASSERT_TRUE(writer->Append(Bytes(data.substr(5, 15))).ok());
  EXPECT_EQ(writer->next_tensor(), 2);
  ASSERT_TRUE(writer->Append(Bytes(data.substr(20))).ok());
  const auto summary = writer->Finish();
  ASSERT_TRUE(summary.ok()) << summary.status();
  writer.reset();
  EXPECT_EQ(summary->bytes, static_cast<int64_t>(storage_.Contents("f").size()));
  EXPECT_EQ(storage_.Contents("f").substr(summary->header_bytes), data);

  const auto reader = SafetensorsReader::Open(storage_, "f", *summary);
  ASSERT_TRUE(reader.ok()) << reader.status();
  const auto last = (*reader)->ReadTensor(2);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(last->data()), last->size()),
            data.substr(16));
  EXPECT_TRUE((*reader)->ReadTensor(1)->empty());
}

TEST_F(SafetensorsFileTest, NamesTheTensorThatIsIncomplete) {
  auto writer = Begin();
  ASSERT_TRUE(writer->Append(Bytes(std::string(17, 'x'))).ok());
  const absl::Status status = writer->Finish().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor \"w\" has 1 of its 12 bytes"));
  EXPECT_EQ(writer->Append(Bytes("x")), status) << "an error stays";
  writer.reset();
  EXPECT_TRUE(storage_.List("")->empty()) << "an unfinished file is removed";
}

TEST_F(SafetensorsFileTest, RefusesBytesThatAreTooMany) {
  auto writer = Begin();
  EXPECT_EQ(writer->Append(Bytes(std::string(29, 'x'))).code(), absl::StatusCode::kOutOfRange);
  EXPECT_FALSE(writer->Finish().ok());
}

TEST_F(SafetensorsFileTest, AFileThatIsThereIsNotOverwritten) {
  Begin()->Finish().IgnoreError();
  ASSERT_TRUE(storage_.Create("g").ok());
  EXPECT_TRUE(absl::IsAlreadyExists(SafetensorsWriter::Create(storage_, "g", {}, {}).status()));
  EXPECT_EQ(storage_.List("").value(), std::vector<std::string>{"g"});
}

}  // namespace
}  // namespace dmuond::server::storage
