// What daemons prove to each other, and what of it nobody else can use; parts of large messages.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"
#include "server/daemon/group/message_parts.h"
#include "server/daemon/group/peer_calls.h"
#include "server/daemon/group/peer_secret.h"

namespace dmuond::server {
namespace {

using scheduler::ReasonOf;

const PeerSecret kOurs("the group's secret");
const PeerSecret kAnother("another secret");

v1::PeerHello HelloOf(int32_t node) {
  v1::PeerHello hello;
  hello.set_node(node);
  hello.set_nonce(NewNonce());
  return hello;
}

TEST(PeerSecretTest, ProofsAreHmacSha256OverLabelAndPartsWithTheirLengths) {
  // Python: hmac.new(b"key", struct.pack("<Q", 5) + b"label" + struct.pack("<Q", 2) + b"ab" +
  //         struct.pack("<Q", 0), "sha256").hexdigest()
  const std::string proof = PeerSecret("key").Prove("label", {"ab", ""});
  std::string hex;
  for (const unsigned char c : proof) hex += absl::StrCat(absl::Hex(c, absl::kZeroPad2));
  EXPECT_EQ(hex, "323ff1c70172175d0cf62e3e974c28b2b065c8d84161a3c7059ca27e6528d394");
  EXPECT_NE(PeerSecret("key").Prove("label", {"a", "b"}), proof);
}

TEST(PeerSecretTest, BothEndsOfAConnectionProveThatTheyKnowTheSecret) {
  const v1::PeerHello hello = HelloOf(1);
  const v1::PeerChallenge challenge = kOurs.Challenge(hello, 0, "b");
  EXPECT_TRUE(kOurs.CheckChallenge(hello, "b", challenge));
  EXPECT_TRUE(kOurs.CheckAnswer(hello, "b", challenge, kOurs.Answer(hello, "b", challenge)));
  EXPECT_FALSE(kAnother.CheckChallenge(hello, "b", challenge));
  EXPECT_FALSE(kOurs.CheckAnswer(hello, "b", challenge, kAnother.Answer(hello, "b", challenge)));
  EXPECT_FALSE(kOurs.CheckAnswer(hello, "b", challenge, v1::PeerAnswer()));
  EXPECT_FALSE(kOurs.CheckChallenge(hello, "b", v1::PeerChallenge()));
}

TEST(PeerSecretTest, AProofIsOfNoUseToTheOtherEndElsewhereOrAgain) {
  const v1::PeerHello hello = HelloOf(1);
  const v1::PeerChallenge challenge = kOurs.Challenge(hello, 0, "b");
  const v1::PeerAnswer answer = kOurs.Answer(hello, "b", challenge);
  v1::PeerAnswer reflected;  // who does not know the secret sends back what it was sent
  reflected.set_proof(challenge.proof());
  EXPECT_FALSE(kOurs.CheckAnswer(hello, "b", challenge, reflected));
  v1::PeerChallenge turned = challenge;
  turned.set_proof(answer.proof());
  EXPECT_FALSE(kOurs.CheckChallenge(hello, "b", turned));

  EXPECT_FALSE(kOurs.CheckAnswer(hello, "b", kOurs.Challenge(hello, 0, "b"), answer)) << "later";
  EXPECT_FALSE(kOurs.CheckChallenge(HelloOf(1), "b", challenge)) << "a later connection";
  v1::PeerChallenge another = challenge;
  another.set_node(1);
  EXPECT_FALSE(kOurs.CheckChallenge(hello, "b", another)) << "of another node";
  EXPECT_FALSE(kOurs.CheckAnswer(hello, "c", challenge, answer)) << "another TLS connection";
  EXPECT_FALSE(kOurs.CheckChallenge(hello, "c", challenge)) << "another TLS connection";
  v1::PeerHello changed = hello;
  changed.set_node(2);
  EXPECT_FALSE(kOurs.CheckAnswer(changed, "b", challenge, answer)) << "another node";
  changed = hello;
  changed.set_callee(2);
  EXPECT_FALSE(kOurs.CheckAnswer(changed, "b", challenge, answer)) << "to another node";
}

class PeerCallsTest : public ::testing::Test {
 protected:
  PeerCallsTest() {
    for (PeerCalls* node : {&first_, &second_, &third_}) node->OnFormed(4, "nonce of the group");
  }
  static v1::ReadStateRequest Read(int32_t unit = 3) {
    v1::ReadStateRequest request;
    request.set_unit(unit);
    return request;
  }
  PeerCalls first_{0, 3, kOurs};
  PeerCalls second_{1, 3, kOurs};
  PeerCalls third_{2, 3, kOurs};
};

TEST_F(PeerCallsTest, AnotherNodeOfTheGroupMayCallAndKnowsTheAnswer) {
  v1::ReadStateRequest request = Read();
  const std::string awaited = first_.Prove("ReadState", 1, request);
  EXPECT_TRUE(second_.Check("ReadState", request, 0).ok());
  EXPECT_EQ(second_.ReplyProof(request.proof()), awaited);
  EXPECT_NE(PeerCalls(1, 3, kAnother).ReplyProof(request.proof()), awaited);
}

TEST_F(PeerCallsTest, AProofIsForOneCallToOneNodeOnceInOneGroup) {
  const auto expect_refused = [](PeerCalls& callee, const char* method,
                                 const v1::ReadStateRequest& request, const std::string& why) {
    const absl::Status status = callee.Check(method, request, request.proof().node());
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << why;
    EXPECT_EQ(ReasonOf(status), "PEER_NOT_PROVEN") << why;
  };
  expect_refused(second_, "ReadState", Read(), "no proof");
  v1::ReadStateRequest request = Read();
  (void)first_.Prove("ReadState", 1, request);
  expect_refused(third_, "ReadState", request, "to another node");
  expect_refused(second_, "WriteState", request, "another call");
  v1::ReadStateRequest changed = request;
  changed.set_unit(4);
  expect_refused(second_, "ReadState", changed, "another unit");
  changed = request;
  changed.mutable_proof()->set_counter(9);
  expect_refused(second_, "ReadState", changed, "another counter");
  changed = request;
  changed.mutable_proof()->set_node(2);
  expect_refused(second_, "ReadState", changed, "in another node's name");
  changed.mutable_proof()->set_node(1);
  expect_refused(second_, "ReadState", changed, "in its own name");
  v1::ReadStateRequest strange = Read();
  PeerCalls stranger(0, 3, kAnother);
  stranger.OnFormed(4, "nonce of the group");
  (void)stranger.Prove("ReadState", 1, strange);
  expect_refused(second_, "ReadState", strange, "another secret");

  EXPECT_EQ(second_.Check("ReadState", request, 2).code(), absl::StatusCode::kUnauthenticated)
      << "by another node's connection";
  EXPECT_TRUE(second_.Check("ReadState", request, 0).ok());
  expect_refused(second_, "ReadState", request, "again");
  second_.OnFormed(4, "nonce of the group after everybody has been started anew");
  expect_refused(second_, "ReadState", request, "in a later group of the same epoch");
}

TEST_F(PeerCallsTest, WhoHasNotHeardYetThatTheGroupHasFormedAnewIsToldToCallAgain) {
  first_.OnFormed(5, "next");
  v1::ReadStateRequest request = Read();
  (void)first_.Prove("ReadState", 1, request);
  const absl::Status status = second_.Check("ReadState", request, 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), "PEER_EPOCH_DIFFERS");
  second_.OnFormed(5, "next");
  EXPECT_TRUE(second_.Check("ReadState", request, 0).ok());
}

TEST_F(PeerCallsTest, ConcurrentCallsMayOvertakeEachOther) {
  UsedCounters used;
  for (const uint64_t counter : {3U, 1U, 2U, 5U, 4U}) EXPECT_TRUE(used.Use(counter));
  for (const uint64_t counter : {0U, 1U, 2U, 3U, 4U, 5U}) EXPECT_FALSE(used.Use(counter));
  constexpr uint64_t kFar = 5 + 2 * UsedCounters::kWindow;
  EXPECT_TRUE(used.Use(kFar));
  EXPECT_FALSE(used.Use(kFar));
  EXPECT_TRUE(used.Use(kFar - UsedCounters::kWindow + 1));
  EXPECT_FALSE(used.Use(kFar - UsedCounters::kWindow)) << "it may have been used";
  EXPECT_TRUE(used.Use(kFar + 1));
  EXPECT_FALSE(used.Use(kFar + 1));
}

// ---- parts of messages ----

v1::MemberMessage Large(size_t bytes) {
  v1::MemberMessage message;
  message.mutable_rank_gone()->set_detail(std::string(bytes, 'x'));
  return message;
}

TEST(MessagePartsTest, ALargeMessageArrivesWholeAndASmallOneAsItIs) {
  PartReader<v1::MemberMessage> reader(int64_t{8} << 20);
  for (const size_t bytes : {size_t{10}, kPartBytesMax, size_t{3} << 20, size_t{5'000'000}}) {
    const v1::MemberMessage sent = Large(bytes);
    std::vector<bool> whole;
    v1::MemberMessage message;
    for (v1::MemberMessage& piece : CutIntoParts(sent)) {
      EXPECT_LE(piece.ByteSizeLong(), kPartBytesMax + 64);
      message = std::move(piece);
      whole.push_back(reader.Take(message).value());
    }
    ASSERT_TRUE(whole.back());
    EXPECT_EQ(std::count(whole.begin(), whole.end(), true), 1);
    EXPECT_EQ(message.SerializeAsString(), sent.SerializeAsString());
  }
}

TEST(MessagePartsTest, TheQuotaIsCheckedAtTheFirstPartAndPartsMustFit) {
  const auto take = [](const std::vector<v1::MemberMessage>& pieces) {
    PartReader<v1::MemberMessage> reader(int64_t{4} << 20);
    for (v1::MemberMessage piece : pieces) {
      absl::StatusOr<bool> taken = reader.Take(piece);
      if (!taken.ok()) return ReasonOf(taken.status());
    }
    return std::string();
  };
  const auto pieces = CutIntoParts(Large(3'000'000));
  ASSERT_EQ(pieces.size(), 3);
  EXPECT_EQ(take(pieces), "");
  EXPECT_EQ(take({CutIntoParts(Large(5'000'000))[0]}), "PEER_MESSAGE_TOO_LARGE");
  EXPECT_EQ(take({pieces[0], Large(1)}), "MESSAGE_PARTS_INVALID");
  EXPECT_EQ(take({pieces[0], pieces[2]}), "MESSAGE_PARTS_INVALID");
  EXPECT_EQ(take({pieces[0], pieces[1], pieces[1]}), "MESSAGE_PARTS_INVALID");
  v1::MemberMessage wrong = pieces[0];
  wrong.mutable_part()->set_last(true);
  EXPECT_EQ(take({wrong}), "MESSAGE_PARTS_INVALID");
  wrong = pieces[0];
  wrong.mutable_part()->set_total(-1);
  EXPECT_EQ(take({wrong}), "MESSAGE_PARTS_INVALID");
  wrong.mutable_part()->set_total(3);
  wrong.mutable_part()->set_data("\xff\xff\xff");
  wrong.mutable_part()->set_last(true);
  EXPECT_EQ(take({wrong}), "MESSAGE_PARTS_INVALID") << "no message";
}

}  // namespace
}  // namespace dmuond::server
