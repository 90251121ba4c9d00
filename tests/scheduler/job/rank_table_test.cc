#include "scheduler/job/rank_table.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "scheduler/job/impossible.h"

namespace dmuond::scheduler {
namespace {

using State = RankTable::State;
constexpr State kStates[] = {State::kEmpty,          State::kVacant, State::kOpen,
                             State::kRegistered,     State::kMapped, State::kAttached,
                             State::kMustAcknowledge};
constexpr uint64_t kId = 11;
constexpr Rollback kBack{.to_step = 4, .epoch = 2};

std::string* impossible = nullptr;

// Rank 0, brought to a state by events that the table allows.
class RankTableTest : public ::testing::Test {
 protected:
  RankTableTest() {
    impossible = &impossible_;
    on_impossible = [](const std::string& what) { *impossible = what; };
  }
  ~RankTableTest() override { on_impossible = nullptr; }

  static void Open(RankTable& table) { table.Open({.id = kId, .rank = 0}); }
  static void Register(RankTable& table) {
    table.Register(kId, {}, std::make_shared<const Registration>());
  }
  static void Attach(RankTable& table) {
    table.BeginMapping(kId, {});
    table.Attach(kId, Attempt(9), {}, false);
  }
  static RankTable In(State state) {
    RankTable table;
    if (state == State::kEmpty) return table;
    Open(table);
    if (state == State::kVacant) table.End(kId, Attempt(5));
    if (state >= State::kRegistered) Register(table);
    if (state >= State::kMapped) Attach(table);
    if (state >= State::kAttached) table.Tell(kId);
    if (state == State::kMustAcknowledge) table.GoBack(kBack);
    return table;
  }
  // The state after the event; nullopt: it is impossible.
  std::optional<State> After(State state, const std::function<void(RankTable&)>& event) {
    RankTable table = In(state);
    EXPECT_EQ(table.StateOf(0), state);
    impossible_.clear();
    event(table);
    if (!impossible_.empty()) return std::nullopt;
    return table.StateOf(0);
  }

  std::string impossible_;
};

TEST_F(RankTableTest, EveryStateHasTheTransitionsOfTheHeader) {
  const auto none = std::nullopt;
  using S = std::optional<State>;
  // open, register, attach, tell, goes back, acknowledge, ends as its trainer dies
  const std::map<State, std::array<S, 7>> table = {
      {State::kOpen, {none, State::kRegistered, none, none, State::kOpen, none, State::kVacant}},
      {State::kRegistered,
       {none, State::kRegistered, State::kMapped, none, State::kRegistered, none, State::kVacant}},
      {State::kMapped,
       {none, none, State::kMapped, State::kAttached, State::kMapped, none, State::kVacant}},
      {State::kAttached,
       {none, none, none, State::kAttached, State::kMustAcknowledge, none, State::kVacant}},
      {State::kMustAcknowledge,
       {none, none, none, none, State::kMustAcknowledge, State::kAttached, State::kVacant}},
  };
  const std::function<void(RankTable&)> events[] = {
      [](RankTable& t) { t.Open({.id = kId + 1, .rank = 0}); },
      [](RankTable& t) { Register(t); },
      [](RankTable& t) { t.Attach(kId, Attempt(9), {}, false); },
      [](RankTable& t) { t.Tell(kId); },
      [](RankTable& t) { t.GoBack(kBack); },
      [](RankTable& t) { t.Acknowledge(kId); },
      [](RankTable& t) { t.End(kId, Attempt(5)); },
  };
  for (const auto& [state, row] : table) {
    for (size_t i = 0; i < row.size(); ++i) {
      EXPECT_EQ(After(state, events[i]), row[i]) << Name(state) << ", event " << i;
    }
  }
  for (const State free : {State::kEmpty, State::kVacant}) {
    EXPECT_EQ(After(free, Open), State::kOpen) << Name(free);
  }
}

TEST_F(RankTableTest, EveryStateHasANameOfItsOwn) {
  std::set<std::string> names;
  for (const State state : kStates) names.insert(Name(state));
  EXPECT_EQ(names.size(), std::size(kStates));
}

TEST_F(RankTableTest, AReplacementThatDiesBeforeItIsMappedLeavesThePlaceAsItFoundIt) {
  RankTable table = In(State::kVacant);
  table.Open({.id = kId + 1, .rank = 0, .client = "later"});
  table.End(kId + 1, Attempt(8));
  ASSERT_NE(table.VacancyOf(0), nullptr);
  EXPECT_EQ(table.VacancyOf(0)->attempt, Attempt(5));
  EXPECT_EQ(table.VacancyOf(0)->client, "later");
  EXPECT_EQ(table.Open({.id = kId + 2, .rank = 0}).incarnation, 3U);
}

TEST_F(RankTableTest, WhoIsMappedIsNotAwaitedAnyMore) {
  RankTable table = In(State::kVacant);
  table.Open({.id = kId, .rank = 0});
  Register(table);
  Attach(table);
  EXPECT_EQ(table.VacancyOf(0), nullptr);
}

TEST_F(RankTableTest, ALayoutThatIsRefusedMayBeRegisteredAgain) {
  RankTable table = In(State::kRegistered);
  table.RefuseAll(absl::InvalidArgumentError("holes"));
  EXPECT_EQ(table.StateOf(0), State::kOpen);
  EXPECT_EQ(table.Find(kId)->refusals, 1);
  Register(table);
  EXPECT_EQ(table.StateOf(0), State::kRegistered);
}

}  // namespace
}  // namespace dmuond::scheduler
