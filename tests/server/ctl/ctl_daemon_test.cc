// dmuonctl's questions to a running daemon: tables for people, --json for programs, and what it
// says when there is nobody to ask.
#include <algorithm>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"
#include "tests/client/example_runs.h"
#include "tests/server/ctl/ctl_process.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

using client::LayoutBuilder;
using client::Session;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;
constexpr char kNobody[] = "/nonexistent/dmuond.sock";

// A daemon of two lanes.
class CtlDaemonTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto daemon = DaemonProcess::Start({.devices = "cpu:2", .flags = {"--threads=1"}});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  // One trainer after two steps, with one matrix and one vector.
  void Train() {
    auto session = Session::Open({.address = daemon_->address(),
                                  .job = "night-run",
                                  .reconnect_timeout = std::chrono::milliseconds(0)});
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    LayoutBuilder builder(1);
    builder.Add({.name = "blocks.0.weight", .shape = {24, 40}, .route_reason = "2-D, hidden"});
    builder.Add({.name = "norm.bias",
                 .shape = {100},
                 .route = client::Route::kAdamW,
                 .route_reason = "1-D"});
    ASSERT_TRUE(session_->Register(*builder.Build()).ok());
    ASSERT_TRUE(session_->Attach().ok());
    for (const int32_t parameter : {0, 1}) {
      std::ranges::fill(session_->Weight<float>(parameter), 0.5F);
      std::ranges::fill(session_->Gradient<float>(parameter), 0.25F);
    }
    ASSERT_TRUE(session_->Push().ok());
    for (int step = 1; step <= 2; ++step) {
      ASSERT_TRUE(session_->Step({.groups = {{.learning_rate = 0.1}}}).ok());
    }
  }
  [[nodiscard]] CtlResult Ctl(std::vector<std::string> arguments) const {
    arguments.push_back("--address=" + daemon_->address());
    return RunCtl(arguments);
  }
  [[nodiscard]] json CtlJson(std::vector<std::string> arguments) const {
    arguments.emplace_back("--json");
    const CtlResult result = Ctl(std::move(arguments));
    EXPECT_EQ(result.code, kOk) << result.errors;
    return result.json();
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Session> session_;
};

TEST_F(CtlDaemonTest, StatusShowsDaemonLanesJobAndTrainers) {
  const CtlResult idle = Ctl({"status"});
  EXPECT_EQ(idle.code, kOk) << idle.errors;
  EXPECT_THAT(idle.output, AllOf(HasSubstr("node 0 of 1 (alone"), HasSubstr(daemon_->address()),
                                 HasSubstr("no job")));
  Train();
  const CtlResult busy = Ctl({"status"});
  EXPECT_EQ(busy.code, kOk) << busy.errors;
  EXPECT_THAT(busy.output, AllOf(HasSubstr("job night-run: running, world 1"),
                                 HasSubstr("step 2 committed, none durable"),
                                 HasSubstr("2 parameters, 1 matrices"), Not(HasSubstr("no job"))));
  EXPECT_THAT(busy.output, ContainsRegex("lane +pid +state"));
  EXPECT_THAT(busy.output, ContainsRegex("\n +0 +[0-9]+ +ready"));
  EXPECT_THAT(busy.output, ContainsRegex("\n +1 +[0-9]+ +ready"));
  EXPECT_THAT(busy.output, ContainsRegex("collect +decide +update +publish +quiet +to other"));
  EXPECT_THAT(busy.output, HasSubstr(absl::StrCat(", of uid ", ::geteuid(), "\n")));
  EXPECT_THAT(busy.output,
              ContainsRegex(absl::StrCat("\n +0 +[0-9]+ +", ::geteuid(), " +1 +attached")));

  const json status = CtlJson({"status"});
  EXPECT_EQ(status["node"], 0);
  EXPECT_EQ(status["group_state"], "alone");
  EXPECT_EQ(status["lanes"].size(), 2U);
  EXPECT_EQ(status["lanes"][1]["state"], "ready");
  EXPECT_EQ(status["job"]["name"], "night-run");
  EXPECT_EQ(status["job"]["last_committed_step"], 2);
  EXPECT_FALSE(status["job"].contains("durable_step"));
  EXPECT_EQ(status["job"]["trainers"][0]["state"], "attached");
  EXPECT_EQ(status["job"]["trainers"][0]["pid"], ::getpid());
}

TEST_F(CtlDaemonTest, JobsHaveOneLineEach) {
  EXPECT_EQ(Ctl({"jobs"}).output, "no job\n");
  EXPECT_TRUE(CtlJson({"jobs"})["jobs"].empty());
  Train();
  EXPECT_THAT(
      Ctl({"jobs"}).output,
      ContainsRegex("\nnight-run +[0-9]+ +running +1 +2 +none +1\\.[0-9]+ +0 +0 +0 +0 +2 +1\n"));
  const json jobs = CtlJson({"jobs"});
  ASSERT_EQ(jobs["jobs"].size(), 1U);
  EXPECT_EQ(jobs["jobs"][0]["world_size"], 1);
  EXPECT_EQ(jobs["jobs"][0]["owner_uid"], ::geteuid());
}

TEST_F(CtlDaemonTest, RoutingShowsEveryParameterAndWhy) {
  Train();
  const std::string table = Ctl({"routing"}).output;
  EXPECT_THAT(table, ContainsRegex("blocks.0.weight +muon +1 +[01] +0 +2-D, hidden\n"));
  EXPECT_THAT(table, ContainsRegex("norm.bias +adamw +[01].* +0 +1-D\n"));
  const json rows = CtlJson({"routing"})["rows"];
  ASSERT_EQ(rows.size(), 2U);
  for (const json& row : rows) {
    const bool matrix = row["parameter"] == "blocks.0.weight";
    EXPECT_EQ(row["route"], matrix ? "ROUTE_MUON" : "ROUTE_ADAMW");
    EXPECT_FALSE(row["owners"].empty());
  }
}

TEST_F(CtlDaemonTest, PlanOfTheRunningJob) {
  const CtlResult none = Ctl({"plan"});
  EXPECT_EQ(none.code, kFailed);
  EXPECT_THAT(none.errors, HasSubstr("[NO_PLAN]"));
  EXPECT_EQ(Ctl({"routing"}).code, kFailed);
  Train();
  EXPECT_THAT(
      Ctl({"plan"}).output,
      AllOf(HasSubstr("proven lower bound"), HasSubstr("2 lanes, 1 buckets"),
            ContainsRegex("lane +update +memory +matrices"), HasSubstr("a snapshot has 8.7 KiB"),
            HasSubstr("nothing crosses between nodes in a step")));
  const json plan = CtlJson({"plan"});
  // Two tensors of a matrix and three of another parameter, of 4 bytes.
  EXPECT_EQ(
      plan["lanes"][0]["snapshot_bytes"].get<int>() + plan["lanes"][1]["snapshot_bytes"].get<int>(),
      (24 * 40 * 2 * 4) + (100 * 3 * 4));
  EXPECT_EQ(plan["lanes"].size(), 2U);
  EXPECT_EQ(plan["lanes"][0]["matrices"].get<int>() + plan["lanes"][1]["matrices"].get<int>(), 1);
  EXPECT_GE(plan["makespan_us"].get<double>(), plan["lower_bound_us"].get<double>());
}

TEST_F(CtlDaemonTest, DoctorFindsTheDaemonWell) {
  const CtlResult doctor = Ctl({"doctor"});
  EXPECT_EQ(doctor.code, kOk) << doctor.output;
  EXPECT_THAT(doctor.output, ContainsRegex("ok +attach socket +trainers of uid"));
  const json findings = CtlJson({"doctor"});
  std::vector<std::string> what;
  for (const json& finding : findings) {
    EXPECT_NE(finding["verdict"], "fail") << finding;
    const auto remedy = finding["remedy"].get<std::string>();
    EXPECT_EQ(remedy.empty(), finding["verdict"] == "ok") << finding;
    what.push_back(finding["what"]);
  }
  EXPECT_THAT(what, ::testing::IsSupersetOf({"socket directory", "socket", "daemon", "lanes",
                                             "programs", "attach socket"}));
}

TEST_F(CtlDaemonTest, LogLevelChangesWhatIsLogged) {
  EXPECT_THAT(Ctl({"log-level", "error"}).output, HasSubstr("log level error, until now info"));
  Train();
  EXPECT_THAT(daemon_->Log(), Not(HasSubstr("session opened")));
  const json changed = CtlJson({"log-level", "debug"});
  EXPECT_EQ(changed["previous"], "error");
  EXPECT_EQ(changed["level"], "debug");
  const CtlResult wrong = Ctl({"log-level", "loud"});
  EXPECT_EQ(wrong.code, kFailed);
  EXPECT_THAT(wrong.errors, HasSubstr("loud"));
  EXPECT_EQ(Ctl({"log-level"}).code, kUsage);
}

TEST_F(CtlDaemonTest, DrainFinishesTheStepAndTheDaemonLeavesWithZero) {
  Train();
  const CtlResult drained = Ctl({"drain"});
  EXPECT_EQ(drained.code, kOk) << drained.errors;
  EXPECT_THAT(drained.output, HasSubstr("left after step 2; there is no snapshot"));
  EXPECT_EQ(daemon_->Wait(std::chrono::seconds(20)), 0);
  EXPECT_TRUE(absl::IsUnavailable(session_->Step({.groups = {{}}}).status()));
}

// Its answer comes some 100 ms before the process ends.
TEST_F(CtlDaemonTest, DrainReturnsWhenASuccessorCanServeTheSocket) {
  Train();
  const CtlResult drained = Ctl({"drain"});
  EXPECT_EQ(drained.code, kOk) << drained.errors;
  EXPECT_EQ(daemon_->Wait(std::chrono::milliseconds(0)), 0) << "it has not ended";
}

// A job that has gone back, and whose only trainer is dead.
TEST(CtlGoneBackTest, AJobThatWaitsForTrainersIsSavedAlreadyGoesBackAndEnds) {
  const ScratchDirectory scratch;
  auto daemon = DaemonProcess::Start(
      {.flags = {"--threads=1", "--snapshot_dir=" + scratch.path() + "/snapshots"}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  const std::string address = "--address=" + (*daemon)->address();
  const std::string output = scratch.path() + "/output";
  auto trainer = ChildProcess::Start("dmuond-example-trainer",
                                     {address, "--job=night-run", "--steps=1000000"}, output);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  ASSERT_TRUE(Until([&] { return Steps(output).size() >= 10; })) << Text(output);
  const auto ctl = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {address, "--snapshot_timeout=15s"});
    return RunCtl(arguments);
  };
  const CtlResult first = ctl({"snapshot", "save"});
  ASSERT_EQ(first.code, kOk) << first.errors;
  (*trainer)->Signal(SIGSTOP);
  const CtlResult load = ctl({"snapshot", "load"});
  ASSERT_EQ(load.code, kOk) << load.errors;
  (*trainer)->Signal(SIGKILL);
  EXPECT_EQ((*trainer)->Wait(kPatience), 128 + SIGKILL);

  const CtlResult saved = ctl({"snapshot", "save"});
  EXPECT_EQ(saved.code, kOk) << saved.errors;
  EXPECT_EQ(saved.output, first.output);
  const CtlResult loaded = ctl({"snapshot", "load"});
  EXPECT_EQ(loaded.code, kOk) << loaded.errors;
  EXPECT_EQ(loaded.output, load.output);
  const CtlResult ended = ctl({"job", "end", "night-run", "--save"});
  EXPECT_EQ(ended.code, kOk) << ended.errors;
  EXPECT_EQ(ctl({"jobs"}).output, "no job\n");
}

TEST(CtlAloneTest, NobodyToAskIsNamedWithARemedy) {
  for (const char* subcommand : {"status", "jobs", "routing", "plan", "drain"}) {
    const CtlResult result =
        RunCtl({subcommand, std::string("--address=") + kNobody, "--timeout=2s"});
    EXPECT_EQ(result.code, kFailed) << subcommand;
    EXPECT_THAT(result.errors, AllOf(HasSubstr(kNobody), HasSubstr("doctor"))) << subcommand;
    EXPECT_EQ(result.output, "") << subcommand;
  }
  const CtlResult doctor = RunCtl({"doctor", "--json", std::string("--address=unix:") + kNobody});
  EXPECT_EQ(doctor.code, kFailed);
  bool named = false;
  for (const json& finding : doctor.json()) {
    if (finding["what"] != "socket") continue;
    named = true;
    EXPECT_EQ(finding["verdict"], "fail");
    EXPECT_THAT(finding["remedy"].get<std::string>(), HasSubstr("start dmuond"));
  }
  EXPECT_TRUE(named);
}

TEST(CtlAloneTest, WhatIsNoSubcommandIsAnswersUsage) {
  EXPECT_EQ(RunCtl({}).code, kUsage);
  const CtlResult unknown = RunCtl({"stats"});
  EXPECT_EQ(unknown.code, kUsage);
  EXPECT_THAT(unknown.errors, AllOf(HasSubstr("'stats'"), HasSubstr("status")));
  const CtlResult help = RunCtl({"help"});
  EXPECT_EQ(help.code, kOk);
  EXPECT_THAT(help.output, HasSubstr("log-level LEVEL"));
  EXPECT_EQ(RunCtl({"status", "extra"}).code, kUsage);
}

TEST(CtlAloneTest, NoTimeToWaitIsAnsweredUsage) {
  for (const std::string timeout : {"0", "-1s"}) {
    const CtlResult none = RunCtl({"status", "--timeout=" + timeout});
    EXPECT_EQ(none.code, kUsage);
    EXPECT_THAT(none.errors, HasSubstr("--timeout=" + timeout));
  }
}

TEST(CtlPlanOfflineTest, AnswersForModelsThatNobodyTrains) {
  const CtlResult plan = RunCtl({"plan", "--model=llama3-8b", "--lanes=8", "--nodes=16"});
  EXPECT_EQ(plan.code, kOk) << plan.errors;
  EXPECT_THAT(plan.output, AllOf(HasSubstr("llama3-8b on 16 nodes of 8 lanes"),
                                 HasSubstr("128 lanes"), HasSubstr("the 8 heaviest"),
                                 ContainsRegex("; [0-9.]+ [MG]iB crosses between nodes")));
  const json one_node = RunCtl({"plan", "--model=llama3-8b", "--lanes=8", "--json"}).json();
  int matrices = 0;
  for (const json& lane : one_node["lanes"]) matrices += lane["matrices"].get<int>();
  EXPECT_EQ(one_node["lanes"].size(), 8U);
  EXPECT_EQ(one_node["lanes"][0]["network_bytes"], 0);
  EXPECT_EQ(matrices, 224);
  EXPECT_EQ(one_node["model"], "llama3-8b");
  EXPECT_LE(one_node["gap"].get<double>(), 0.02);
}

TEST(CtlPlanOfflineTest, ModelsAndLanesThatAreNotAreNamed) {
  const CtlResult model = RunCtl({"plan", "--model=llama9"});
  EXPECT_EQ(model.code, kFailed);
  EXPECT_THAT(model.errors, AllOf(HasSubstr("llama9"), HasSubstr("llama3-8b")));
  const CtlResult lanes = RunCtl({"plan", "--model=llama3-8b", "--lanes=0"});
  EXPECT_EQ(lanes.code, kFailed);
  EXPECT_THAT(lanes.errors, HasSubstr("--lanes=0"));
}

}  // namespace
}  // namespace dmuond::testing
