#include "scheduler/snapshot_schedule.h"

#include <gtest/gtest.h>

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;

const TimePoint kStart{};

TEST(SnapshotScheduleTest, EverySoManySteps) {
  SnapshotSchedule schedule({.every_steps = 3, .every = milliseconds(0)}, std::nullopt, kStart);
  for (int64_t step = 1; step <= 7; ++step) {
    EXPECT_EQ(schedule.OnCommitted(StepId(step), kStart), step % 3 == 0) << step;
    schedule.OnFinished(true);
  }
  EXPECT_EQ(schedule.durable_step(), StepId(6));
  EXPECT_EQ(schedule.counts().left_out, 0);
}

TEST(SnapshotScheduleTest, OrWhenTheTimeHasCome) {
  SnapshotSchedule schedule({.every_steps = 0, .every = milliseconds(100)}, StepId(5), kStart);
  EXPECT_EQ(schedule.durable_step(), StepId(5));
  EXPECT_FALSE(schedule.OnCommitted(StepId(6), kStart + milliseconds(99)));
  EXPECT_TRUE(schedule.OnCommitted(StepId(7), kStart + milliseconds(130)));
  schedule.OnFinished(true);
  EXPECT_FALSE(schedule.OnCommitted(StepId(8), kStart + milliseconds(229)));
  EXPECT_TRUE(schedule.OnCommitted(StepId(9), kStart + milliseconds(230)));
}

TEST(SnapshotScheduleTest, NeverWhereNothingIsAskedFor) {
  SnapshotSchedule schedule({.every_steps = 0, .every = milliseconds(0)}, std::nullopt, kStart);
  EXPECT_FALSE(schedule.OnCommitted(StepId(1'000'000), kStart + std::chrono::hours(1'000)));
}

TEST(SnapshotScheduleTest, WhatFallsDueMeanwhileIsLeftOutAndCounted) {
  SnapshotSchedule schedule({.every_steps = 2, .every = milliseconds(0)}, std::nullopt, kStart);
  EXPECT_TRUE(schedule.OnCommitted(StepId(2), kStart));
  EXPECT_FALSE(schedule.OnCommitted(StepId(3), kStart));
  EXPECT_FALSE(schedule.OnCommitted(StepId(4), kStart));
  EXPECT_EQ(schedule.counts().left_out, 1);
  EXPECT_FALSE(schedule.OnCommitted(StepId(5), kStart));
  EXPECT_EQ(schedule.counts().left_out, 1) << "counted once";
  schedule.OnFinished(true);
  EXPECT_EQ(schedule.durable_step(), StepId(2));
  EXPECT_FALSE(schedule.OnCommitted(StepId(5), kStart));
  EXPECT_TRUE(schedule.OnCommitted(StepId(6), kStart));
}

TEST(SnapshotScheduleTest, AFailedOneIsNotDurableAndTheNextComesInItsTurn) {
  SnapshotSchedule schedule({.every_steps = 2, .every = milliseconds(0)}, StepId(0), kStart);
  EXPECT_TRUE(schedule.OnCommitted(StepId(2), kStart));
  schedule.OnFinished(false);
  EXPECT_EQ(schedule.durable_step(), StepId(0));
  EXPECT_EQ(schedule.counts().failed, 1);
  EXPECT_FALSE(schedule.OnCommitted(StepId(3), kStart));
  EXPECT_TRUE(schedule.OnCommitted(StepId(4), kStart));
}

TEST(SnapshotScheduleTest, ARequestIsServedByTheNextStepThatCan) {
  SnapshotSchedule schedule({.every_steps = 10, .every = milliseconds(0)}, std::nullopt, kStart);
  schedule.Request();
  EXPECT_TRUE(schedule.OnCommitted(StepId(1), kStart));
  schedule.Request();
  EXPECT_FALSE(schedule.OnCommitted(StepId(2), kStart));
  EXPECT_EQ(schedule.counts().left_out, 0) << "a request waits";
  schedule.OnFinished(true);
  EXPECT_TRUE(schedule.OnCommitted(StepId(3), kStart));
  schedule.OnFinished(true);
  EXPECT_FALSE(schedule.OnCommitted(StepId(4), kStart)) << "served once";
}

}  // namespace
}  // namespace dmuond::scheduler
