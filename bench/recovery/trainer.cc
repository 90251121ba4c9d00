#include "bench/recovery/trainer.h"

#include <ctime>
#include <fstream>
#include <span>
#include <thread>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"

ABSL_FLAG(int32_t, trainer_rank, -1, "internal: be this trainer");
ABSL_FLAG(int32_t, trainers, 1, "internal");
ABSL_FLAG(std::string, address, "", "internal: the daemon's socket");
ABSL_FLAG(int64_t, rows, 1, "internal");
ABSL_FLAG(int64_t, cols, 1, "internal");
ABSL_FLAG(int32_t, matrices, 0, "internal");
ABSL_FLAG(int64_t, vector, 0, "internal");
ABSL_FLAG(bool, resume, false, "internal: take a dead trainer's place");
ABSL_FLAG(int64_t, last_step, 0, "internal");
ABSL_FLAG(int64_t, trainer_state_bytes, 0, "internal");
ABSL_FLAG(std::string, log, "", "internal: where it writes what it does");

namespace dmuond::bench {
namespace {

using client::LayoutBuilder;
using client::Outcome;
using client::Resume;
using client::Route;
using client::Session;

constexpr std::chrono::seconds kPatience{60};

absl::StatusOr<client::Layout> MakeLayout(const Model& model, int trainers) {
  LayoutBuilder builder(trainers);
  for (int i = 0; i < model.matrices; ++i) {
    builder.Add({.name = absl::StrCat("matrix", i), .shape = {model.rows, model.cols}});
  }
  if (model.vector > 0) {
    builder.Add({.name = "vector", .shape = {model.vector}, .route = Route::kAdamW});
  }
  return builder.Build();
}

void Fill(std::span<float> values, uint32_t seed) {
  uint32_t state = seed;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<int32_t>(state)) * 1e-11F;
  }
}

void FillGradients(Session& session, size_t parameters, int32_t rank) {
  for (size_t i = 0; i < parameters; ++i) {
    const auto index = static_cast<int32_t>(i);
    Fill(session.Gradient<float>(index), 1000 + index + rank);
  }
}

class Log {
 public:
  explicit Log(const std::string& path) : file_(path, std::ios::binary | std::ios::app) {}
  void Write(const Record& record) {
    file_.write(reinterpret_cast<const char*>(&record), sizeof(record));
    file_.flush();
  }

 private:
  std::ofstream file_;
};

absl::Status Train(const TrainerOptions& options, Log& log) {
  absl::StatusOr<client::Layout> layout = MakeLayout(options.model, options.trainers);
  if (!layout.ok()) return layout.status();
  const int64_t opening = Now();
  absl::StatusOr<std::unique_ptr<Session>> opened =
      Session::Open({.address = options.address,
                     .job = "recovery",
                     .rank = options.rank,
                     .world_size = options.trainers,
                     .resume = options.resume ? Resume::kRequire : Resume::kNever,
                     .log = [](const std::string& /*what*/) {}});
  if (!opened.ok()) return opened.status();
  Session& session = **opened;
  if (auto registered = session.Register(*layout); !registered.ok()) return registered.status();
  if (absl::Status status = session.Attach(); !status.ok()) return status;
  log.Write({opening, Now(), session.last_committed_step(), Record::Kind::kSession});
  FillGradients(session, layout->parameters.size(), options.rank);
  if (!session.has_state()) {
    for (size_t i = 0; i < layout->parameters.size(); ++i) {
      Fill(session.Weight<float>(static_cast<int32_t>(i)), i);
    }
    if (absl::Status status = session.Push(); !status.ok()) return status;
  }
  const client::StepScalars scalars{.groups = {{.learning_rate = 1e-3}}};
  const std::string state(options.trainer_state_bytes, 's');
  while (options.steps == 0 || session.last_committed_step() < options.steps) {
    const int64_t begin = Now();
    absl::StatusOr<Outcome> outcome = session.Step(scalars, {.trainer_state = state});
    if (!outcome.ok()) return outcome.status();
    const bool committed = outcome->kind == Outcome::Kind::kCommitted;
    log.Write(
        {begin, Now(), outcome->step, committed ? Record::Kind::kCommitted : Record::Kind::kOther});
    if (outcome->fresh_memory) FillGradients(session, layout->parameters.size(), options.rank);
  }
  return session.Close();
}

}  // namespace

int64_t Now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t{now.tv_sec} * 1'000'000'000) + now.tv_nsec;
}

absl::StatusOr<Trainer> Trainer::Start(const TrainerOptions& options, const std::string& log) {
  auto process = testing::ChildProcess::Start(
      "recovery_bench",
      {absl::StrCat("--trainer_rank=", options.rank), absl::StrCat("--trainers=", options.trainers),
       "--address=" + options.address, absl::StrCat("--rows=", options.model.rows),
       absl::StrCat("--cols=", options.model.cols),
       absl::StrCat("--matrices=", options.model.matrices),
       absl::StrCat("--vector=", options.model.vector),
       absl::StrCat("--resume=", options.resume ? "true" : "false"),
       absl::StrCat("--last_step=", options.steps),
       absl::StrCat("--trainer_state_bytes=", options.trainer_state_bytes), "--log=" + log});
  if (!process.ok()) return process.status();
  return Trainer(*std::move(process), log);
}

std::vector<Record> Trainer::Records(size_t first) const {
  std::ifstream file(log_, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(first * sizeof(Record)));
  std::vector<Record> records;
  for (Record record; file.read(reinterpret_cast<char*>(&record), sizeof(record));) {
    records.push_back(record);
  }
  return records;
}

absl::Status Trainer::Missing(const std::string& what) const {
  return absl::DeadlineExceededError(
      absl::StrCat("a trainer (pid ", process_->pid(), ") has written of no ", what));
}

absl::StatusOr<Record> Trainer::WaitForStepAfter(int64_t time) const {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  size_t seen = 0;
  while (std::chrono::steady_clock::now() < deadline) {
    const std::vector<Record> records = Records(seen);
    for (const Record& record : records) {
      if (record.kind == Record::Kind::kCommitted && record.begin >= time) return record;
    }
    seen += records.size();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // between two looks
  }
  return Missing("step");
}

absl::StatusOr<Record> Trainer::WaitForSession() const {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    const std::vector<Record> records = Records();
    if (!records.empty()) return records.front();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // between two looks
  }
  return Missing("session");
}

bool IsTrainer() { return absl::GetFlag(FLAGS_trainer_rank) >= 0; }

absl::Status RunTrainer() {
  Log log(absl::GetFlag(FLAGS_log));
  return Train({.address = absl::GetFlag(FLAGS_address),
                .rank = absl::GetFlag(FLAGS_trainer_rank),
                .trainers = absl::GetFlag(FLAGS_trainers),
                .model = {.rows = absl::GetFlag(FLAGS_rows),
                          .cols = absl::GetFlag(FLAGS_cols),
                          .matrices = absl::GetFlag(FLAGS_matrices),
                          .vector = absl::GetFlag(FLAGS_vector)},
                .resume = absl::GetFlag(FLAGS_resume),
                .steps = absl::GetFlag(FLAGS_last_step),
                .trainer_state_bytes = absl::GetFlag(FLAGS_trainer_state_bytes)},
               log);
}

}  // namespace dmuond::bench
