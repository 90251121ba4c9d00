#include "bench/recovery/trainer.h"

#include <ctime>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"

ABSL_FLAG(bool, resume, false, "internal: take a dead trainer's place");
ABSL_FLAG(int64_t, last_step, 0, "internal");
ABSL_FLAG(int64_t, trainer_state_bytes, 0, "internal");
ABSL_FLAG(std::string, log, "", "internal: where it writes what it does");

namespace dmuond::bench {
namespace {

using client::Outcome;
using client::Resume;
using client::Session;

constexpr std::chrono::seconds kPatience{60};

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
  FillGradients(session, options.model, options.rank);
  if (!session.has_state()) {
    FillWeights(session, options.model);
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
    if (outcome->fresh_memory) FillGradients(session, options.model, options.rank);
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
  std::vector<std::string> flags =
      TrainerFlags(options.rank, options.trainers, options.address, options.model);
  flags.push_back(absl::StrCat("--resume=", options.resume ? "true" : "false"));
  flags.push_back(absl::StrCat("--last_step=", options.steps));
  flags.push_back(absl::StrCat("--trainer_state_bytes=", options.trainer_state_bytes));
  flags.push_back("--log=" + log);
  auto process = testing::ChildProcess::Start("recovery_bench", std::move(flags));
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

absl::Status RunTrainer(int32_t rank) {
  Log log(absl::GetFlag(FLAGS_log));
  return Train({.address = AddressOfFlags(),
                .rank = rank,
                .trainers = TrainersOfFlags(),
                .model = ModelOfFlags(),
                .resume = absl::GetFlag(FLAGS_resume),
                .steps = absl::GetFlag(FLAGS_last_step),
                .trainer_state_bytes = absl::GetFlag(FLAGS_trainer_state_bytes)},
               log);
}

}  // namespace dmuond::bench
