#include "bench/recovery/kills.h"

#include <algorithm>
#include <csignal>
#include <memory>

#include "absl/strings/str_cat.h"
#include "bench/recovery/group.h"

namespace dmuond::bench {
namespace {

constexpr int kTrainers = 2;
constexpr int64_t kSnapshotEvery = 50;

absl::StatusOr<double> KillTrainer(Group& group, const TrainerOptions& options) {
  const testing::ChildProcess& process = group.trainer(options.rank).process();
  process.Signal(SIGKILL);
  TrainerOptions replacement = options;
  replacement.resume = true;
  if (absl::Status status = group.StartTrainer(replacement); !status.ok()) return status;
  absl::StatusOr<Record> session = group.trainer(options.rank).WaitForSession();
  if (!session.ok()) return session.status();
  absl::StatusOr<Record> step = group.trainer(options.rank).WaitForStepAfter(session->begin);
  if (!step.ok()) return step.status();
  return static_cast<double>(step->end - session->begin) / 1e9;
}

// Since `killed`, for all ranks.
absl::StatusOr<double> UntilCommitted(Group& group, int64_t killed) {
  double longest = 0;
  for (int32_t rank = 0; rank < kTrainers; ++rank) {
    absl::StatusOr<Record> step = group.trainer(rank).WaitForStepAfter(killed);
    if (!step.ok()) return step.status();
    longest = std::max(longest, static_cast<double>(step->end - killed) / 1e9);
  }
  return longest;
}

absl::StatusOr<double> KillLane(Group& group, int node) {
  absl::StatusOr<v1::GetStatusReply> status = group.Status(node);
  if (!status.ok()) return status.status();
  if (status->lanes_size() == 0) return absl::InternalError("a daemon without lanes");
  const int64_t killed = Now();
  if (::kill(status->lanes(0).pid(), SIGKILL) != 0) return absl::InternalError("no lane to kill");
  return UntilCommitted(group, killed);
}

absl::StatusOr<double> KillDaemon(Group& group, int node) {
  absl::StatusOr<v1::GetStatusReply> status = group.Status(0);
  if (!status.ok()) return status.status();
  // A snapshot of this life, so that each kill goes back by as much.
  absl::Status durable = group.WaitDurable(status->job().last_committed_step() + 1);
  if (!durable.ok()) return durable;
  const int64_t killed = Now();
  group.daemon(node).Kill();
  if (absl::Status again = group.daemon(node).StartAgain(); !again.ok()) return again;
  return UntilCommitted(group, killed);
}

}  // namespace

absl::StatusOr<std::vector<double>> Kill(const Victim& victim, int times) {
  auto group = Group::Start(
      victim.nodes, "cpu:2",
      {"--threads=1", "--snapshot_dir", absl::StrCat("--snapshot_every_steps=", kSnapshotEvery)});
  if (!group.ok()) return group.status();
  const TrainerOptions options{.trainers = kTrainers, .trainer_state_bytes = 1024};
  for (int32_t rank = 0; rank < kTrainers; ++rank) {
    TrainerOptions mine = options;
    mine.rank = rank;
    if (absl::Status status = (*group)->StartTrainer(mine); !status.ok()) return status;
  }
  std::vector<double> seconds;
  for (int kill = 0; kill < times; ++kill) {
    // From one that goes well to the next.
    if (absl::StatusOr<double> well = UntilCommitted(**group, Now()); !well.ok()) {
      return well.status();
    }
    TrainerOptions killed = options;
    killed.rank = kill % kTrainers;
    absl::StatusOr<double> took =
        victim.kind == Victim::Kind::kTrainer ? KillTrainer(**group, killed)
        : victim.kind == Victim::Kind::kLane  ? KillLane(**group, victim.node)
                                              : KillDaemon(**group, victim.node);
    if (!took.ok()) {
      return absl::Status(
          took.status().code(),
          absl::StrCat(victim.name, ", kill ", kill + 1, ": ", std::string(took.status().message()),
                       "\n", (*group)->daemon(victim.node).Log()));
    }
    seconds.push_back(*took);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

}  // namespace dmuond::bench
