// Layouts that cannot be, and what their trainers hear: rows of the table "what bad input gets"
// that concern registration. Each against a real daemon with two trainers; afterwards both register
// what is right and train: nothing has changed.
//
// The other rows: session_input_test.cc (sessions, buffers), step_input_test.cc (steps, scalars,
// sizes), startup_input_test.cc (sockets, ports, directories), group_input_test.cc (daemons of one
// group). A weight that was changed from outside and not pushed is seen by the torch client:
// tests/python/test_torch_weights.py, test_weights_changed_by_hand_are_refused_by_name_….
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "dmuond/client/session.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"
#include "tests/client/trainers.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/expect_error.h"

namespace dmuond::client {
namespace {

using absl::StatusCode;
using testing::DaemonProcess;
using testing::DaemonStatus;
using testing::ExpectRefused;
using testing::OnEveryRank;
using testing::Refusal;

constexpr int32_t kWorld = 2;

Layout Good(int32_t /*rank*/) {
  LayoutBuilder builder(kWorld);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "matrix", .shape = {8, 16}});
  builder.Add({.name = "vector", .shape = {32}, .route = Route::kAdamW});
  return *builder.Build();
}
// The matrix in rows: each rank holds those given.
Layout Rows(int64_t begin, int64_t end) {
  LayoutBuilder builder(kWorld);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "matrix", .shape = {8, 16}, .box = Box{{begin, 0}, {end, 16}}});
  return *builder.Build();
}
Layout Changed(int32_t rank, const std::function<void(Layout&)>& change) {
  Layout layout = Good(rank);
  if (rank == 1) change(layout);
  return layout;
}

struct Row {
  const char* name;
  std::function<Layout(int32_t rank)> layout;
  Refusal refusal;
  // A layout that is wrong by itself is refused to its own trainer alone, before the other's
  // counts.
  bool alone = false;
  // How often others are answered, at least, before it is refused.
  int answers = 1;
};
std::ostream& operator<<(std::ostream& out, const Row& row) { return out << row.name; }

class LayoutInputTest : public ::testing::TestWithParam<Row> {
 protected:
  static void SetUpTestSuite() {
    auto daemon = DaemonProcess::Start({.devices = "cpu:1", .flags = {"--threads=1"}});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  static void TearDownTestSuite() { daemon_.reset(); }
  static std::unique_ptr<DaemonProcess> daemon_;
};
std::unique_ptr<DaemonProcess> LayoutInputTest::daemon_;

// How often somebody else is answered until `done`.
int AnswersUntil(const std::atomic<bool>& done, const std::string& address) {
  constexpr std::chrono::seconds kPatience{60};
  DaemonStatus status(address);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  int answers = 0;
  do {
    EXPECT_FALSE(status.Get().version().empty());
    ++answers;
  } while (!done && std::chrono::steady_clock::now() < deadline);
  return answers;
}

TEST_P(LayoutInputTest, IsRefusedByNameAndACorrectedOneTrains) {
  const Row& row = GetParam();
  std::atomic<bool> refused = false;
  OnEveryRank(kWorld, [&](int32_t rank) {
    auto opened =
        Session::Open({.address = daemon_->address(), .rank = rank, .world_size = kWorld});
    ASSERT_TRUE(opened.ok()) << opened.status();
    Session& session = **opened;
    if (!row.alone || rank == 1) {
      ExpectRefused(session.Register(row.layout(rank)).status(), row.refusal);
      refused = true;
    } else {
      EXPECT_GE(AnswersUntil(refused, daemon_->address()), row.answers);
    }
    const auto registered = session.Register(Good(rank));
    ASSERT_TRUE(registered.ok()) << registered.status();
    ASSERT_TRUE(session.Attach().ok());
    for (const int32_t parameter : {0, 1}) {
      for (float& weight : session.Weight<float>(parameter)) weight = 0.5F;
      for (float& gradient : session.Gradient<float>(parameter)) gradient = 0.25F;
    }
    ASSERT_TRUE(session.Push().ok());
    const auto outcome = session.Step({.groups = {{.learning_rate = 0.1}}});
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->step, 1);
    EXPECT_TRUE(session.Close().ok());
  });
}

const Row kRows[] = {
    {"OtherShapes",
     [](int32_t rank) {
       LayoutBuilder builder(kWorld);
       builder.Add({.name = "matrix", .shape = {8 + rank, 16}});
       return *builder.Build();
     },
     {StatusCode::kInvalidArgument,
      "LAYOUT_DIFFERS",
      {"'matrix'", "8x16", "9x16", "trainers 0 and 1"}}},
    {"OtherElementTypes",
     [](int32_t rank) {
       return Changed(
           rank, [](Layout& layout) { layout.parameters[0].weight_type = ElementType::kBFloat16; });
     },
     {StatusCode::kInvalidArgument,
      "LAYOUT_DIFFERS",
      {"'matrix'", "float32", "bfloat16", "trainers 0 and 1"}}},
    {"OtherReduceFactors",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) { layout.parameters[0].reduce_factor = 0.25; });
     },
     {StatusCode::kInvalidArgument,
      "LAYOUT_DIFFERS",
      {"'matrix'", "0.5", "0.25", "trainers 0 and 1"}}},
    {"OtherContributions",
     [](int32_t rank) {
       return Changed(
           rank, [](Layout& layout) { layout.fragments[0].contribution = Contribution::kSame; });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_DIFFERS", {"'matrix'", "trainers 0 and 1"}}},
    {"StagesWithoutADivisor",
     [](int32_t rank) {
       LayoutBuilder builder(kWorld);
       builder.Add({.name = rank == 0 ? "first" : "second", .shape = {8, 16}});
       return *builder.Build();
     },
     {StatusCode::kInvalidArgument, "DIVISOR_UNKNOWN", {"'first'", "1 of 2 trainers (0)"}}},
    {"OtherPresets",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) { layout.groups[0].preset = "keller"; });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_DIFFERS", {"torch", "keller", "trainers 0 and 1"}}},
    {"NameTwiceWithOtherShapes",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) { layout.parameters[1].name = "matrix"; });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'matrix'", "8x16", "32", "trainer 1"}},
     /*alone=*/true},
    {"Holes",
     [](int32_t rank) { return rank == 0 ? Rows(0, 3) : Rows(5, 8); },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'matrix'", "[3:5"}}},
    {"OwnBoxesThatOverlap",
     [](int32_t rank) {
       Layout layout = Rows(0, 8);
       if (rank == 0) return layout;
       Fragment second = layout.fragments[0];
       layout.fragments[0].box.end[0] = 5;
       second.box.begin[0] = 3;
       layout.fragments.push_back(second);
       return layout;
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'matrix'", "[0:5", "[3:8", "trainer 1"}},
     /*alone=*/true},
    {"NothingToUpdate",
     [](int32_t) {
       Layout layout = Rows(0, 8);
       for (Parameter& parameter : layout.parameters) parameter.route = Route::kTrainer;
       return layout;
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"2 trainers", "muon or adamw"}}},
    {"NoParameters",
     [](int32_t) {
       Layout layout = Rows(0, 8);
       layout.parameters.clear();
       layout.fragments.clear();
       return layout;
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"2 trainers", "muon or adamw"}}},
    {"UnknownElementType",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) {
         layout.parameters[0].gradient_type = static_cast<ElementType>(99);
       });
     },
     {StatusCode::kInvalidArgument,
      "LAYOUT_INVALID",
      {"matrix", "gradient_type", "99", "trainer 1"}},
     /*alone=*/true},
    {"NoSetOfMatrices",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) { layout.parameters[1].route = Route::kMuon; });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'vector'", "32"}},
     /*alone=*/true},
    {"BoxBeyondTheTensor",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) { layout.fragments[0].box.end[0] = 9; });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'matrix'", "9", "8x16"}},
     /*alone=*/true},
    {"MoreElementsThanCanBeCounted",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) {
         layout.parameters[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
       });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'matrix'", "1099511627776"}},
     /*alone=*/true},
    // The longest names, twice in the message: gRPC's trailers would not hold it all.
    {"WeightsThatShareMemory",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) {
         layout.parameters[0].name = std::string(1024, 'a');
         layout.parameters[1].name = std::string(1024, 'b');
         layout.fragments[1].weight.arena = layout.fragments[0].weight.arena;
         layout.fragments[1].weight.offset_bytes = layout.fragments[0].weight.offset_bytes;
       });
     },
     {StatusCode::kInvalidArgument,
      "LAYOUT_INVALID",
      {std::string(1024, 'a'), "behind the beginning of the weight of 'bbb", "trainer 1"}},
     /*alone=*/true},
    {"MoreElementsThanAModelHas",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) {
         layout.parameters[1].shape = {int64_t{1} << 28, int64_t{1} << 27};
         layout.fragments[1].box = {{0, 0}, {int64_t{1} << 28, int64_t{1} << 27}};
         layout.fragments[1].gradient.strides = {int64_t{1} << 27, 1};
         layout.fragments[1].weight.strides = {int64_t{1} << 27, 1};
       });
     },
     {StatusCode::kInvalidArgument,
      "LAYOUT_INVALID",
      {"'vector'", "268435456x134217728", "1099511627776", "trainer 1"}},
     /*alone=*/true},
    {"MoreFragmentsThanATrainerHas",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) {
         // Each a row: none overlaps another.
         constexpr int64_t kRows = 261'000;
         layout.parameters[1].shape = {kRows};
         Fragment row = layout.fragments.back();
         layout.fragments.pop_back();
         for (int64_t i = 0; i < kRows; ++i) {
           row.box = {{i}, {i + 1}};
           layout.fragments.push_back(row);
         }
       });
     },
     {StatusCode::kInvalidArgument,
      "LAYOUT_INVALID",
      {"'vector'", "261000 fragments", "1024", "trainer 1"}},
     /*alone=*/true,
     // It is looked at for seconds, in which nobody else waits.
     /*answers=*/20},
    {"OffsetThatOverflows",
     [](int32_t rank) {
       return Changed(
           rank, [](Layout& layout) { layout.fragments[0].weight.offset_bytes = INT64_MAX - 3; });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'matrix'", "weight", "trainer 1"}},
     /*alone=*/true},
    {"NegativeOffset",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) { layout.fragments[0].gradient.offset_bytes = -4; });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'matrix'", "gradient", "-4", "trainer 1"}},
     /*alone=*/true},
    {"StridesThatOverflow",
     [](int32_t rank) {
       return Changed(rank, [](Layout& layout) {
         layout.fragments[0].gradient.strides = {int64_t{1} << 62, 1};
       });
     },
     {StatusCode::kInvalidArgument, "LAYOUT_INVALID", {"'matrix'", "gradient", "trainer 1"}},
     /*alone=*/true},
};
INSTANTIATE_TEST_SUITE_P(Rows, LayoutInputTest, ::testing::ValuesIn(kRows),
                         [](const auto& info) { return info.param.name; });

TEST(RanksMissingTest, AreNamedAtTheDeadlineAndMayStillCome) {
  auto daemon = DaemonProcess::Start({.flags = {"--register_timeout=1s"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const auto open = [&](int32_t rank) {
    return Session::Open({.address = (*daemon)->address(), .rank = rank, .world_size = kWorld});
  };
  auto first = open(0);
  ASSERT_TRUE(first.ok()) << first.status();
  ExpectRefused((*first)->Register(Good(0)).status(),
                {StatusCode::kDeadlineExceeded, "RANKS_MISSING", {"'default'", "of 2", "time: 1"}});
  auto second = open(1);
  ASSERT_TRUE(second.ok()) << second.status();
  std::thread late([&] { EXPECT_TRUE((*second)->Register(Good(1)).ok()); });
  EXPECT_TRUE((*first)->Register(Good(0)).ok());
  late.join();
}

}  // namespace
}  // namespace dmuond::client
