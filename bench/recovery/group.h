// Daemons of a bench's own, their directory, and the trainers of one job on them.
#ifndef DMUOND_BENCH_RECOVERY_GROUP_H_
#define DMUOND_BENCH_RECOVERY_GROUP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/recovery/trainer.h"
#include "dmuond/v1/admin.grpc.pb.h"
#include "tests/client/daemon_group.h"

namespace dmuond::bench {

class Group {
 public:
  // `flags` are everybody's. Rank r trains on node r modulo nodes.
  static absl::StatusOr<std::unique_ptr<Group>> Start(int nodes, const std::string& devices,
                                                      std::vector<std::string> flags);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // The address is filled in; a rank that has a trainer gets another one.
  absl::Status StartTrainer(TrainerOptions options);
  [[nodiscard]] const Trainer& trainer(int32_t rank) const { return *trainers_[rank]; }
  void DropTrainers() { trainers_.clear(); }
  [[nodiscard]] testing::DaemonProcess& daemon(int node) const { return *daemons_[node]; }
  [[nodiscard]] const std::string& directory() const { return directory_; }  // --snapshot_dir

  absl::StatusOr<v1::GetStatusReply> Status(int node);
  // Returns when the snapshot exists; its step.
  absl::StatusOr<int64_t> Save(int node);
  // Until a snapshot of `step` or a later one exists.
  absl::Status WaitDurable(int64_t step);

 private:
  Group() = default;
  std::string directory_;
  testing::DaemonGroup daemons_;
  std::vector<std::unique_ptr<Trainer>> trainers_;  // by rank
  int logs_ = 0;
};

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_RECOVERY_GROUP_H_
