// The trainer of the fault matrix: starts in milliseconds, and every step depends on all bits of
// the one before, so that whatever was lost, repeated or mixed shows in the next line that it
// prints:
//   state STEP TRAINER_STATE          at its start, and after a rollback
//   step N attempt A weights HASH at NANOSECONDS durable STEP
//   rolled_back STEP weights HASH at NANOSECONDS
// Exit codes: 0 all steps done; 3 what the job's members can mend while a new trainer starts;
// 1 refused or stopped for good; the reason is the last line.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "dmuond/client/session.h"
#include "tests/faults/trainer_memory.h"

ABSL_FLAG(std::string, address, "", "socket of the daemon");
ABSL_FLAG(std::string, job, "default", "");
ABSL_FLAG(int32_t, rank, 0, "");
ABSL_FLAG(int32_t, world_size, 1, "");
ABSL_FLAG(int64_t, steps, 8, "");
ABSL_FLAG(bool, early, false, "signals each bucket as soon as its gradients are there");
ABSL_FLAG(std::string, device, "cpu", "what it computes with");
ABSL_FLAG(std::string, resume, "never", "never, if_present or require");

namespace {

using dmuond::client::LayoutBuilder;
using dmuond::client::Outcome;
using dmuond::client::Resume;
using dmuond::client::Route;
using dmuond::client::Session;
using dmuond::testing::TrainerMemory;

constexpr double kLearningRate = 0.02;

absl::StatusOr<dmuond::client::Layout> MakeLayout(int32_t rank, int32_t world) {
  LayoutBuilder builder(world);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "first", .shape = {16, 24}});
  builder.Add({.name = "second", .shape = {16, 24}});
  // One row block for each trainer, as a sharded model has it.
  dmuond::client::Box rows;
  rows.begin = {rank * 8, 0};
  rows.end = {rank * 8 + 8, 12};
  builder.Add({.name = "sharded", .shape = {8 * world, 12}, .box = rows});
  builder.Add({.name = "table", .shape = {40, 3}, .route = Route::kAdamW});
  builder.Add({.name = "bias", .shape = {24}, .route = Route::kAdamW});
  builder.set_bucket_bytes(2000);
  return builder.Build();
}

class Model {
 public:
  // early: the bucket of each parameter, where buckets are to be signalled; else empty.
  Model(Session& session, TrainerMemory& memory, int32_t parameters, std::vector<int32_t> early)
      : session_(session), memory_(memory), parameters_(parameters), early_(std::move(early)) {}

  absl::Status Initialise() {
    for (int32_t p = 0; p < parameters_; ++p) {
      uint64_t x = 77 + p;
      for (float& w : memory_.Weights(session_, p)) w = Noise(x);
    }
    return memory_.SendWeights(session_);
  }
  // The weights that lie in the arenas are those to go on with.
  absl::Status Fetch() { return memory_.FetchWeights(session_); }
  absl::StatusOr<Outcome> Step(const dmuond::client::StepScalars& scalars,
                               const dmuond::client::SubmitOptions& options) {
    return memory_.Step(session_, scalars, options);
  }
  // Backwards, so that the first buckets are complete before the last gradient is there.
  absl::Status Gradients(int64_t step) {
    std::vector<int32_t> left = early_;
    for (int32_t p = parameters_ - 1; p >= 0; --p) {
      const auto weights = memory_.Weights(session_, p);
      const auto gradients = memory_.Gradients(session_, p);
      uint64_t x = (step * 1'000'003) + (p * 101) + session_.rank();
      for (size_t i = 0; i < weights.size(); ++i) gradients[i] = 0.3F * weights[i] + Noise(x);
      if (absl::Status sent = memory_.SendGradients(session_, p); !sent.ok()) return sent;
      if (left.empty()) continue;
      const int32_t bucket = left.back();
      left.pop_back();
      if (std::find(left.begin(), left.end(), bucket) != left.end()) continue;
      if (absl::Status marked = memory_.MarkReady(session_, bucket); !marked.ok()) return marked;
    }
    return absl::OkStatus();
  }
  // FNV-1a of all bytes that this trainer holds.
  [[nodiscard]] uint64_t Hash() const {
    uint64_t hash = 0xcbf29ce484222325ULL;
    for (int32_t p = 0; p < parameters_; ++p) {
      for (const std::byte b : std::as_bytes(memory_.Weights(session_, p))) {
        hash = (hash ^ static_cast<uint64_t>(b)) * 0x100000001b3ULL;
      }
    }
    return hash;
  }

 private:
  static float Noise(uint64_t& x) {
    x = x * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<float>(static_cast<int32_t>(x >> 40) - (1 << 23)) / (1 << 23);
  }

  Session& session_;
  TrainerMemory& memory_;
  const int32_t parameters_;
  const std::vector<int32_t> early_;
};

void Print(const char* what, int64_t step, const Session& session, uint64_t attempt,
           uint64_t hash) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  std::printf("%s %lld attempt %llu weights %016llx at %lld durable %lld\n", what,
              static_cast<long long>(step),                                   // NOLINT
              static_cast<unsigned long long>(attempt),                       // NOLINT
              static_cast<unsigned long long>(hash),                          // NOLINT
              static_cast<long long>(std::chrono::nanoseconds(now).count()),  // NOLINT
              static_cast<long long>(session.durable_step().value_or(-1)));   // NOLINT
}

// What a script keeps beside the weights must be of the same step as they are.
absl::Status CheckTrainerState(const Session& session) {
  std::printf("state %lld %s\n", static_cast<long long>(session.last_committed_step()),  // NOLINT
              session.trainer_state().c_str());
  if (session.last_committed_step() == 0 ||
      session.trainer_state() == absl::StrCat(session.last_committed_step())) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("WRONG: at step ", session.last_committed_step(),
                                          " the trainer state is that of step ",
                                          session.trainer_state()));
}

absl::Status Train(Session& session, Model& model) {
  absl::Status status = CheckTrainerState(session);
  if (!status.ok()) return status;
  if (!session.has_state()) {
    status = model.Initialise();
    if (status.ok()) status = session.Push();
    if (!status.ok()) return status;
  }
  if (status = model.Fetch(); !status.ok()) return status;
  dmuond::client::StepScalars scalars;
  scalars.groups.resize(1);
  scalars.max_grad_norm = 3;
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  while (session.last_committed_step() < steps) {
    const int64_t step = session.last_committed_step() + 1;
    if (status = model.Gradients(step); !status.ok()) return status;
    scalars.groups[0].learning_rate = kLearningRate / static_cast<double>(step);
    scalars.groups[0].weight_decay = 0.01;
    absl::StatusOr<Outcome> outcome = model.Step(scalars, {.trainer_state = absl::StrCat(step)});
    if (!outcome.ok()) return outcome.status();
    if (outcome->kind == Outcome::Kind::kRolledBack) {
      Print("rolled_back", session.last_committed_step(), session, outcome->attempt, model.Hash());
      status = CheckTrainerState(session);
      if (!status.ok()) return status;
      continue;
    }
    if (outcome->kind != Outcome::Kind::kCommitted || outcome->step != step) {
      return absl::InternalError(absl::StrCat("WRONG: step ", step, " is ", Name(outcome->kind),
                                              " as step ", outcome->step));
    }
    Print("step", step, session, outcome->attempt, model.Hash());
  }
  return session.Close();
}

Resume ResumeFlag() {
  const std::string resume = absl::GetFlag(FLAGS_resume);
  if (resume == "if_present") return Resume::kIfPresent;
  return resume == "require" ? Resume::kRequire : Resume::kNever;
}

absl::Status Run() {
  const int32_t rank = absl::GetFlag(FLAGS_rank);
  const int32_t world = absl::GetFlag(FLAGS_world_size);
  absl::StatusOr<dmuond::client::Layout> layout = MakeLayout(rank, world);
  if (!layout.ok()) return layout.status();
  const auto parameters = static_cast<int32_t>(layout->parameters.size());
  absl::StatusOr<std::unique_ptr<TrainerMemory>> memory =
      dmuond::testing::MakeTrainerMemory(absl::GetFlag(FLAGS_device), parameters);
  if (!memory.ok()) return memory.status();
  absl::Status status = (*memory)->Place(*layout);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<Session>> session =
      Session::Open({.address = absl::GetFlag(FLAGS_address),
                     .job = absl::GetFlag(FLAGS_job),
                     .rank = rank,
                     .world_size = world,
                     .resume = ResumeFlag(),
                     .arenas = (*memory)->arenas()});
  if (!session.ok()) return session.status();
  absl::StatusOr<dmuond::client::Registered> registered = (*session)->Register(*layout);
  if (!registered.ok()) return registered.status();
  status = (*session)->Attach();
  if (!status.ok()) return status;
  Model model(**session, **memory, parameters,
              absl::GetFlag(FLAGS_early) ? registered->parameter_bucket : std::vector<int32_t>());
  return Train(**session, model);
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  dmuond::fault::ConnectFaultDriver();
  const absl::Status status = Run();
  if (status.ok()) return 0;
  std::cout << "ended " << dmuond::client::ReasonOf(status) << " " << status << "\n" << std::flush;
  return absl::IsUnavailable(status) || absl::IsAborted(status) ? 3 : 1;
}
