// What a check of all copies finds, whom it waits for, and how much it asks for at a time.
#include "scheduler/job/replica_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/convert/convert.h"
#include "scheduler/extract.h"
#include "scheduler/plan.h"
#include "tests/scheduler/job/registrations.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A matrix that both ranks hold, each on a node of its own; lane 0 owns it.
class ReplicaCheckTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kRequest = 77;

  ReplicaCheckTest() : inputs_(Inputs()), plan_(*MakePlan(inputs_)) {}

  static PlanInputs Inputs() {
    v1::PlanInputs wire;
    wire.set_job("job");
    wire.set_nodes(2);
    wire.set_lanes_per_node(1);
    for (int32_t rank = 0; rank < 2; ++rank) {
      v1::Registration& registration = *wire.add_registrations();
      registration = OfOneMatrix(rank, 2);
      registration.set_node(rank);
    }
    return *FromProto(wire);
  }

  // What is told to all nodes next: an order is kept, an end is returned.
  std::optional<v1::CheckDone> Advance(const std::string& why_not = "") {
    const std::optional<v1::CoordinatorMessage> told = check_.Advance(now_, why_not, pushing_);
    if (!told.has_value()) return std::nullopt;
    if (told->has_check_done()) return told->check_done();
    order_ = told->check();
    ++orders_;
    return std::nullopt;
  }
  void Request(milliseconds patience = seconds(10)) {
    v1::CheckRequest request;
    request.set_request(kRequest);
    request.set_patience_ms(patience.count());
    check_.OnRequest(now_, request);
    EXPECT_FALSE(Advance().has_value());
  }
  // `published`: the digest of the rank's weights. The owner's state has the digests of `state`,
  // and its master is rounded to weights with the digest `rounded`.
  void Answer(int32_t node, uint64_t published, uint64_t rounded = 5,
              const std::vector<uint64_t>& state = {1, 2}, uint64_t written = 3) {
    v1::ExtractsChecked checked;
    checked.set_number(order_.number());
    checked.set_node(node);
    v1::ExtractDigests& digests = *checked.add_digests();
    if (plan_.units[0].owner.value() == node) {
      digests.set_written(written);
      digests.mutable_state()->Add(state.begin(), state.end());
      digests.add_rounded(rounded);
    }
    v1::ExtractDigests::Copies& copies = *digests.add_copies();
    copies.set_digest(published);
    copies.add_ranks(node);
    check_.OnChecked(checked);
  }
  int32_t Owner() const { return plan_.units[0].owner.value(); }
  void Commit(v1::AttemptKind kind) {
    v1::Decision decision;
    decision.set_kind(kind);
    decision.set_verdict(v1::Decision::VERDICT_COMMIT);
    check_.OnDecision(decision);
  }

  TimePoint now_{hours(1)};
  PlanInputs inputs_;
  Plan plan_;
  ReplicaCheck check_{inputs_, plan_, milliseconds(0), now_};
  v1::CheckExtracts order_;
  int orders_ = 0;
  bool pushing_ = false;
};

TEST_F(ReplicaCheckTest, EqualCopiesAreCountedAndWhoHasAskedIsAnswered) {
  Request();
  ASSERT_EQ(order_.extracts_size(), 1);
  EXPECT_EQ(order_.extracts(0).held_size(), 1);
  Answer(0, 5);
  EXPECT_FALSE(Advance().has_value());
  Answer(1, 5);
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->error(), "");
  EXPECT_THAT(done->requests(), ElementsAre(kRequest));
  EXPECT_EQ(done->different(), 0);
  EXPECT_EQ(done->digests(), 2);
  EXPECT_EQ(done->ranks(), 2);
  EXPECT_FALSE(Advance().has_value());
}

TEST_F(ReplicaCheckTest, WeightsThatDifferAreNamedWhenNoPushFollows) {
  Request();
  Answer(0, 5);
  Answer(1, 6);
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(check_.state(), ReplicaCheck::State::kDoubting);
  Commit(v1::ATTEMPT_KIND_STEP);
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(orders_, 1);
  ASSERT_EQ(done->different(), 1);
  const v1::CheckDone::Difference& difference = done->differences(0);
  EXPECT_EQ(difference.parameter(), "w");
  EXPECT_EQ(difference.kind(), "published");
  EXPECT_EQ(difference.node(), 1);
  EXPECT_THAT(difference.ranks(), ElementsAre(1));
  EXPECT_EQ(difference.digest(), 6U);
  EXPECT_EQ(difference.expected_digest(), 5U);
  EXPECT_EQ(difference.against(), "master");
}

TEST_F(ReplicaCheckTest, WeightsThatDifferAreNamedWhenNothingFollows) {
  Request();
  Answer(0, 6);
  Answer(1, 5);
  EXPECT_FALSE(Advance().has_value());
  now_ += kDoubt;
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->different(), 1);
}

TEST_F(ReplicaCheckTest, WeightsThatATrainerWasAboutToPushAreAskedForAgain) {
  Request();
  Answer(0, 5);
  Answer(1, 6);
  EXPECT_FALSE(Advance().has_value());
  Commit(v1::ATTEMPT_KIND_PUSH);
  const uint64_t before = order_.number();
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(orders_, 2);
  EXPECT_GT(order_.number(), before);
  Answer(0, 6, 6);
  Answer(1, 6, 6);
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->different(), 0);
}

TEST_F(ReplicaCheckTest, WeightsThatWerePushedWhileNodesAnsweredAreAskedForAgain) {
  Request();
  Answer(0, 5);
  Commit(v1::ATTEMPT_KIND_PUSH);
  Answer(1, 6);
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(orders_, 2);
  // Nodes digest what was there before a step that commits meanwhile: no push can follow.
  Answer(0, 5);
  Commit(v1::ATTEMPT_KIND_STEP);
  Answer(1, 6);
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->different(), 1);
  EXPECT_EQ(orders_, 2);
}

TEST_F(ReplicaCheckTest, WeightsThatATrainerIsPushingAreDoubtedUntilThatIsDecided) {
  Request();
  Answer(0, 5);
  Answer(1, 6);
  EXPECT_FALSE(Advance().has_value());
  pushing_ = true;
  now_ += 2 * kDoubt;
  EXPECT_FALSE(Advance().has_value());
  pushing_ = false;  // that attempt was aborted, and is tried again
  now_ += kDoubt - milliseconds(1);
  EXPECT_FALSE(Advance().has_value());
  Commit(v1::ATTEMPT_KIND_PUSH);
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(orders_, 2);
}

TEST_F(ReplicaCheckTest, AMasterThatAllCopiesContradictIsTheOneThatDiffers) {
  Request();
  Answer(0, 5, 9);
  Answer(1, 5, 9);
  EXPECT_FALSE(Advance().has_value());
  Commit(v1::ATTEMPT_KIND_STEP);
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  ASSERT_EQ(done->different(), 1);
  const v1::CheckDone::Difference& difference = done->differences(0);
  EXPECT_EQ(difference.kind(), "master");
  EXPECT_EQ(difference.node(), Owner());
  EXPECT_EQ(difference.lane(), Owner());
  EXPECT_EQ(difference.digest(), 9U);
  EXPECT_EQ(difference.expected_digest(), 5U);
}

TEST_F(ReplicaCheckTest, StateThatNothingHasWrittenIsComparedWithTheLookBefore) {
  Request();
  Answer(0, 5);
  Answer(1, 5);
  EXPECT_TRUE(Advance().has_value());
  Request();
  Answer(0, 5, 5, {8, 2});
  Answer(1, 5, 5, {8, 2});
  std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  ASSERT_EQ(done->different(), 1);
  EXPECT_EQ(done->digests(), 4);
  EXPECT_EQ(done->differences(0).kind(), "momentum");
  EXPECT_EQ(done->differences(0).node(), Owner());
  EXPECT_EQ(done->differences(0).digest(), 8U);
  EXPECT_EQ(done->differences(0).expected_digest(), 1U);
  EXPECT_EQ(done->differences(0).against(), "before");
  // A step has written it since.
  Request();
  Answer(0, 5, 5, {9, 9}, /*written=*/4);
  Answer(1, 5, 5, {9, 9}, /*written=*/4);
  done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->different(), 0);
}

TEST_F(ReplicaCheckTest, ANodeThatDoesNotAnswerIsNamed) {
  Request(seconds(3));
  Answer(0, 5);
  now_ += seconds(2);
  EXPECT_FALSE(Advance().has_value());
  now_ += seconds(1);
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->reason(), "CHECK_UNANSWERED");
  EXPECT_THAT(done->error(), HasSubstr("node 1 "));
}

TEST_F(ReplicaCheckTest, WhatANodeCannotDoYetItIsAskedForAgain) {
  Request();
  v1::ExtractsChecked busy;
  busy.set_number(order_.number());
  busy.set_node(1);
  busy.set_again(true);
  check_.OnChecked(busy);
  Answer(0, 5);
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(check_.state(), ReplicaCheck::State::kWaiting);
  now_ += kAgain - milliseconds(1);
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(orders_, 1);
  now_ += milliseconds(1);
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(orders_, 2);
}

TEST_F(ReplicaCheckTest, AnInterruptedJobIsAskedAgainWhenItRuns) {
  Request();
  Answer(0, 5);
  EXPECT_FALSE(Advance("new lanes").has_value());
  Answer(1, 5);
  EXPECT_FALSE(Advance("new lanes").has_value());
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(orders_, 2);
  Answer(0, 5);
  Answer(1, 5);
  EXPECT_TRUE(Advance().has_value());
  // One that does not run again in time is no equal one.
  Request(seconds(1));
  EXPECT_FALSE(Advance("new lanes").has_value());
  now_ += seconds(1);
  const std::optional<v1::CheckDone> done = Advance("new lanes");
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->error(), "new lanes");
}

TEST_F(ReplicaCheckTest, AnErrorOfANodeIsTheEnd) {
  Request();
  v1::ExtractsChecked checked;
  checked.set_number(order_.number());
  checked.set_node(1);
  checked.set_error("unit 0 has no state");
  check_.OnChecked(checked);
  Answer(0, 5);
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->error(), "node 1: unit 0 has no state");
  EXPECT_EQ(done->reason(), "CHECK_FAILED");
}

TEST_F(ReplicaCheckTest, ARequestWhoseTimeIsOverBeginsNoCheck) {
  Request();
  v1::CheckRequest request;
  request.set_request(kRequest + 1);
  request.set_patience_ms(1000);
  check_.OnRequest(now_, request);
  now_ += seconds(2);
  Answer(0, 5);
  Answer(1, 5);
  const std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->error(), "");
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(check_.state(), ReplicaCheck::State::kIdle);
}

TEST_F(ReplicaCheckTest, WhoAsksDoesNotWaitForACheckThatNobodyHasAskedFor) {
  ReplicaCheck daily(inputs_, plan_, hours(24), now_);
  now_ += hours(24);
  ASSERT_TRUE(daily.Advance(now_, "", false).has_value());
  EXPECT_FALSE(daily.Advance(now_, "it is parked", false).has_value());
  v1::CheckRequest request;
  request.set_request(kRequest);
  request.set_patience_ms(1000);
  daily.OnRequest(now_, request);
  EXPECT_FALSE(daily.Advance(now_, "it is parked", false).has_value());
  now_ += seconds(1);
  const std::optional<v1::CoordinatorMessage> told = daily.Advance(now_, "it is parked", false);
  ASSERT_TRUE(told.has_value());
  EXPECT_THAT(told->check_done().requests(), ElementsAre(kRequest));
  EXPECT_EQ(told->check_done().error(), "it is parked");
}

TEST_F(ReplicaCheckTest, NodesThatAreNotAskedAreNotNamed) {
  Request(seconds(1));
  EXPECT_FALSE(Advance("new lanes").has_value());
  now_ += seconds(1);
  std::optional<v1::CheckDone> done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->error(), "the check has not come to its end in time");
  // Neither are those that have been asked just now.
  Request(seconds(1));
  EXPECT_FALSE(Advance("new lanes").has_value());
  now_ += milliseconds(950);
  EXPECT_FALSE(Advance().has_value());
  now_ += milliseconds(50);
  done = Advance();
  ASSERT_TRUE(done.has_value());
  EXPECT_EQ(done->error(), "the check has not come to its end in time");
}

TEST_F(ReplicaCheckTest, ByItselfItBeginsWhenItIsDue) {
  now_ += hours(1000);
  EXPECT_FALSE(Advance().has_value());
  EXPECT_EQ(orders_, 0);
  ReplicaCheck daily(inputs_, plan_, hours(24), now_);
  EXPECT_FALSE(daily.Advance(now_ + hours(23), "", false).has_value());
  EXPECT_FALSE(daily.Advance(now_ + hours(24), "it does not run", false).has_value());
  const std::optional<v1::CoordinatorMessage> told = daily.Advance(now_ + hours(25), "", false);
  ASSERT_TRUE(told.has_value());
  EXPECT_TRUE(told->has_check());
}

TEST(ReplicaCheckOrders, NoLaneReadsMoreThanItMayForOne) {
  const Parameter matrix = testing::Muon("matrix", {3000, 1000});
  const Parameter vector = testing::AdamW("vector", {2'500'000});
  const PlanInputs inputs = *testing::World(2, 2, 1).Replicate(matrix).Replicate(vector).Inputs();
  const Plan plan = *MakePlan(inputs);
  ReplicaCheck check(inputs, plan, milliseconds(0), TimePoint());
  v1::CheckRequest request;
  request.set_patience_ms(1000);
  check.OnRequest(TimePoint(), request);
  int64_t elements = 0;
  int orders = 0;
  for (;; ++orders) {
    const std::optional<v1::CoordinatorMessage> told = check.Advance(TimePoint(), "", false);
    ASSERT_TRUE(told.has_value());
    if (told->has_check_done()) break;
    int64_t of_order = 0;
    for (const v1::Extract& extract : told->check().extracts()) {
      of_order += Elements(*FromProto(extract.box()));
      EXPECT_EQ(extract.held_size(), 1);
    }
    EXPECT_LE(of_order * 20, kCheckOrderBytes);
    elements += of_order;
    for (int32_t node = 0; node < 2; ++node) {
      v1::ExtractsChecked checked;
      checked.set_number(told->check().number());
      checked.set_node(node);
      check.OnChecked(checked);
    }
  }
  EXPECT_EQ(elements, 5'500'000);
  EXPECT_GT(orders, 3);
}

// Answers an order as two ranks on a node each do, of which rank 1 has other weights.
void AnswerWithOneWrongRank(const v1::CheckExtracts& order, const Plan& plan, ReplicaCheck& check) {
  for (int32_t node = 0; node < 2; ++node) {
    v1::ExtractsChecked checked;
    checked.set_number(order.number());
    checked.set_node(node);
    for (int32_t i = 0; i < order.extracts_size(); ++i) {
      v1::ExtractDigests& digests = *checked.add_digests();
      digests.set_extract(i);
      if (plan.units[order.extracts(i).unit()].owner.value() == node) digests.add_rounded(5);
      v1::ExtractDigests::Copies& copies = *digests.add_copies();
      copies.set_digest(5 + node);
      copies.add_ranks(node);
    }
    check.OnChecked(checked);
  }
}

TEST(ReplicaCheckOrders, EnoughDifferencesEndTheDoubtAndOutliveTheError) {
  const Parameter vector = testing::AdamW("vector", {300'000'000});
  const PlanInputs inputs = *testing::World(2, 2, 1).Replicate(vector).Inputs();
  const Plan plan = *MakePlan(inputs);
  TimePoint now(hours(1));
  ReplicaCheck check(inputs, plan, milliseconds(0), now);
  v1::CheckRequest request;
  request.set_patience_ms(1'000'000);
  check.OnRequest(now, request);
  std::optional<v1::CoordinatorMessage> told = check.Advance(now, "", false);
  int doubts = 0;
  for (int orders = 0; orders < 200; ++orders) {
    ASSERT_TRUE(told.has_value() && told->has_check());
    AnswerWithOneWrongRank(told->check(), plan, check);
    told = check.Advance(now, "", false);
    if (told.has_value()) continue;
    ++doubts;
    now += kDoubt;
    told = check.Advance(now, "", false);
  }
  EXPECT_GT(doubts, 0);
  EXPECT_LE(doubts, 100);
  told = check.Advance(now + seconds(1000), "", false);
  ASSERT_TRUE(told.has_value());
  EXPECT_GE(told->check_done().different(), 200);
  EXPECT_EQ(told->check_done().differences_size(), 100);
  EXPECT_THAT(told->check_done().error(), HasSubstr("node 0, 1 has not told in time"));
  EXPECT_THAT(told->check_done().error(), HasSubstr("copies differed until then"));
}

TEST(ReplicaCheckOrders, NamesNotTooManyHolders) {
  testing::World world(64, 2, 1);
  for (int i = 0; i < 600; ++i) world.Replicate(testing::AdamW("v" + std::to_string(i), {8}));
  const PlanInputs inputs = *world.Inputs();
  const Plan plan = *MakePlan(inputs);
  ReplicaCheck check(inputs, plan, milliseconds(0), TimePoint());
  v1::CheckRequest request;
  request.set_patience_ms(1000);
  check.OnRequest(TimePoint(), request);
  const std::optional<v1::CoordinatorMessage> told = check.Advance(TimePoint(), "", false);
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->check().extracts_size(), kCheckOrderHolders / 64);
}

TEST(Extracts, CoverABoxOnceAndAreSmall) {
  for (const Extents& shape : std::vector<Extents>{
           {}, {7}, {3'000'000}, {5000, 1000}, {3, 2'000'000}, {2, 3, 1'500'000}}) {
    const Box box = WholeBox(shape);
    int64_t elements = 0;
    const std::vector<Box> extracts = scheduler::Extracts(box);
    for (size_t i = 0; i < extracts.size(); ++i) {
      EXPECT_TRUE(Contains(box, extracts[i]));
      EXPECT_LE(Elements(extracts[i]), kExtractElementsMax);
      elements += Elements(extracts[i]);
      for (size_t j = 0; j < i; ++j) EXPECT_FALSE(Intersects(extracts[i], extracts[j]));
    }
    EXPECT_EQ(elements, Elements(box));
  }
}

}  // namespace
}  // namespace dmuond::scheduler
