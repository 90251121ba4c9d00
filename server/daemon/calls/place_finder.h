// Finds the place of a trainer's job: that which has the job on this node, else the one that node 0
// names.
//
// Node 0 answers as soon as it knows which jobs the group has, and a place is free. It waits for
// that for as long as a place may be kept for somebody who does not come.
//
// Locks: its own, and with it those of cores; nothing that holds a core's lock calls it.
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_CALLS_PLACE_FINDER_H_
#define DMUOND_SERVER_DAEMON_CALLS_PLACE_FINDER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/job_places.h"
#include "server/daemon/core.h"
#include "server/daemon/place.h"

namespace dmuond::server {

class PlaceFinder {
 public:
  // `places` outlives it, and has one element at least.
  explicit PlaceFinder(std::deque<Place>& places);

  // Blocks. RESOURCE_EXHAUSTED (JOBS_TOO_MANY), naming the jobs: every place has one. UNAVAILABLE
  // (GROUP_NOT_FORMED, DRAINING): as OpenSession's.
  absl::StatusOr<int32_t> Find(const std::string& job, const Core::Cancelled& cancelled);
  // A question of a member; node 0 alone has any.
  void OnQuestion(int32_t node, const v1::FindPlace& question);
  void OnAnswer(const v1::PlaceFound& answer);
  // The group has formed or broken: nobody answers what was asked before.
  void OnNewGroup();
  // A trainer has asked for the job's place and not opened its session, as far as node 0 knows.
  [[nodiscard]] bool Awaits(const std::string& job);
  // Call it every 100 ms.
  void Tick();

 private:
  struct Question {
    int32_t node = 0;
    v1::FindPlace what;
    Core::Deadline give_up;
  };

  [[nodiscard]] std::optional<int32_t> Here(const std::string& job);
  // Until the group has formed.
  absl::Status WaitForGroup(const Core::Cancelled& cancelled);
  // Answers what can be answered.
  void Answer() DMUOND_REQUIRES(mutex_);
  void Send(int32_t node, const v1::PlaceFound& answer) DMUOND_REQUIRES(mutex_);

  std::deque<Place>& places_;
  const DaemonOptions& options_;
  Mutex mutex_;
  CondVar answered_;
  uint64_t newest_ DMUOND_GUARDED_BY(mutex_) = 0;
  // This node's questions; unset: there is no answer yet.
  std::map<uint64_t, std::optional<v1::PlaceFound>> asked_ DMUOND_GUARDED_BY(mutex_);
  // ---- node 0 ----
  std::deque<Question> questions_ DMUOND_GUARDED_BY(mutex_);
  scheduler::JobPlaces jobs_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_PLACE_FINDER_H_
