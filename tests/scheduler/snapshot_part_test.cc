#include "scheduler/job/snapshot_part.h"

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "gtest/gtest.h"

namespace dmuond::scheduler {
namespace {

constexpr uint64_t kAttempt = 7;
const SnapshotPart::Able kAble{.lanes_ready = true, .applied_attempt = kAttempt, .disk_hangs = ""};

v1::SaveState Save(uint64_t attempt = kAttempt) {
  v1::SaveState save;
  save.set_attempt(attempt);
  save.set_step(3);
  return save;
}

v1::SnapshotDone Done(uint64_t attempt, const std::string& error = "") {
  v1::SnapshotDone done;
  done.set_attempt(attempt);
  done.set_step(3);
  done.set_error(error);
  if (error.empty()) done.set_durable_step(3);
  return done;
}

std::vector<v1::SnapshotFile> OneFile() {
  v1::SnapshotFile file;
  file.set_name("lane0");
  return {file};
}

const SnapshotPart::Write* AsWrite(const SnapshotPart::Order& order) {
  return std::get_if<SnapshotPart::Write>(&order);
}

TEST(SnapshotPartTest, WhatIsWrittenIsAnsweredOnceAndToldAgainWhenItIsAskedForAgain) {
  SnapshotPart part(2);
  SnapshotPart::Order order = part.OnSave(Save(), kAble);
  ASSERT_NE(AsWrite(order), nullptr);
  EXPECT_EQ(AsWrite(order)->abandoned, "");
  order = part.OnSave(Save(), kAble);
  EXPECT_TRUE(std::holds_alternative<std::monostate>(order)) << "it is being written";
  const std::optional<v1::SnapshotWritten> written = part.OnWritten(kAttempt, OneFile(), "");
  ASSERT_TRUE(written.has_value());
  EXPECT_EQ(written->node(), 2);
  EXPECT_EQ(written->files(0).name(), "lane0");
  EXPECT_FALSE(part.OnWritten(kAttempt, OneFile(), "").has_value());
  order = part.OnSave(Save(), kAble);
  ASSERT_TRUE(std::holds_alternative<v1::SnapshotWritten>(order));
  EXPECT_EQ(std::get<v1::SnapshotWritten>(order).SerializeAsString(), written->SerializeAsString());
  EXPECT_TRUE(part.OnDone(Done(kAttempt)));
  EXPECT_TRUE(part.Saved(kAttempt));
  EXPECT_EQ(part.durable_step(), 3);
}

TEST(SnapshotPartTest, WithoutLanesOrWithNewerStateNothingIsCopied) {
  SnapshotPart part;
  SnapshotPart::Able able = kAble;
  able.lanes_ready = false;
  SnapshotPart::Order order = part.OnSave(Save(), able);
  ASSERT_NE(AsWrite(order), nullptr);
  EXPECT_EQ(AsWrite(order)->abandoned, "the node's lanes are being replaced");
  able = kAble;
  able.applied_attempt = kAttempt + 2;
  order = part.OnSave(Save(kAttempt + 1), able);
  ASSERT_NE(AsWrite(order), nullptr);
  EXPECT_EQ(AsWrite(order)->abandoned, "the node heard of it too late");
}

TEST(SnapshotPartTest, ADiskThatHangsIsAnsweredForAndItsLateWordIgnored) {
  SnapshotPart part;
  (void)part.OnSave(Save(), kAble);
  const std::optional<v1::SnapshotWritten> answer = part.OnDiskHangs("a write");
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->reason(), "SNAPSHOT_DIR_HANGS");
  EXPECT_FALSE(part.OnDiskHangs("a write").has_value());
  EXPECT_FALSE(part.OnWritten(kAttempt, OneFile(), "").has_value());
  SnapshotPart::Able able = kAble;
  able.disk_hangs = "a write";
  const SnapshotPart::Order order = part.OnSave(Save(kAttempt + 1), able);
  ASSERT_TRUE(std::holds_alternative<v1::SnapshotWritten>(order));
  EXPECT_EQ(std::get<v1::SnapshotWritten>(order).error(), "a write");
}

TEST(SnapshotPartTest, AFailedSnapshotOfTheSameStateMayBeAskedForAgain) {
  SnapshotPart part;
  (void)part.OnSave(Save(), kAble);
  part.OnNonFinite(kAttempt, "weights of 'a' are NaN");
  const std::optional<v1::SnapshotWritten> answer = part.OnWritten(kAttempt, OneFile(), "");
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->reason(), "WEIGHTS_NOT_FINITE");
  EXPECT_EQ(answer->files_size(), 0);
  EXPECT_TRUE(part.OnDone(Done(kAttempt, "node 1: disk full")));
  EXPECT_FALSE(part.Saved(kAttempt));
  EXPECT_NE(AsWrite(part.OnSave(Save(), kAble)), nullptr);
  ASSERT_TRUE(part.OnWritten(kAttempt, OneFile(), "").has_value());
}

TEST(SnapshotPartTest, TheSameStateUnderAnotherAttemptStaysSavedAndGoingBackForgetsIt) {
  SnapshotPart part;
  EXPECT_FALSE(part.OnDone(Done(kAttempt))) << "another node's; this one had no part in it";
  part.OnRepublished(kAttempt, 9, /*from_snapshot=*/false);
  EXPECT_TRUE(part.Saved(9));
  part.OnRepublished(12, 13, /*from_snapshot=*/false);
  EXPECT_FALSE(part.Saved(13)) << "12 was never saved";
  part.GoBack();
  EXPECT_FALSE(part.Saved(9));
  EXPECT_FALSE(part.Saved(0));
  part.OnRepublished(0, 20, /*from_snapshot=*/true);
  EXPECT_TRUE(part.Saved(20));
  EXPECT_EQ(part.durable_step(), 3);
}

}  // namespace
}  // namespace dmuond::scheduler
