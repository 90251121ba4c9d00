// The lanes of one job on one node: which of them live, what each has come to, and what those that
// are new still have to do. Pure: time is passed in; processes are started, killed and spoken to by
// who holds this machine, as its answers say.
//
//                started    ready    hangs       gone    given up
//   Absent       Starting   x        x           x       Absent
//   Starting     x          Ready    Condemned   Gone    Absent
//   Ready        x          x        Condemned   Gone    Absent
//   Condemned    x          -        -           Gone    Absent
//   Gone         x          -        x           -       Absent
//
// "-": ignored; x: impossible (impossible.h). All lanes are given up together: a new epoch has new
// ones, over the same memory, and none starts before every predecessor has ended.
#ifndef DMUOND_SCHEDULER_JOB_LANE_SET_H_
#define DMUOND_SCHEDULER_JOB_LANE_SET_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/record.pb.h"
#include "scheduler/job/lane_watch.h"
#include "scheduler/step.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

class LaneSet {
 public:
  enum class State : uint8_t { kAbsent, kStarting, kReady, kCondemned, kGone };

  struct Lane {
    LaneId id;
    State state = State::kAbsent;
    int32_t starts = 0;  // processes that this place has had
    std::string device;
    uint64_t published_attempt = 0;   // newest whose weights are out
    uint64_t gathered_attempt = 0;    // newest whose gradients it has gathered
    std::vector<int32_t> non_finite;  // units with infinite or NaN weights, as it said with those

    [[nodiscard]] bool lives() const {
      return state == State::kStarting || state == State::kReady || state == State::kCondemned;
    }
    [[nodiscard]] bool ready() const { return state == State::kReady; }
  };

  LaneSet() = default;
  // `first`: of this node's lanes, which follow each other.
  LaneSet(LaneId first, int32_t lanes, LaneWatchOptions watch);
  // What another one has come to, but for how long its lanes have been silent, and how long ago
  // they were condemned: that is counted from now on. INVALID_ARGUMENT: no set of so many lanes has
  // written it.
  [[nodiscard]] static absl::StatusOr<LaneSet> FromRecord(LaneId first, int32_t lanes,
                                                          LaneWatchOptions watch,
                                                          const v1::RecordedLanes& record);
  void ToRecord(v1::RecordedLanes& record) const;

  [[nodiscard]] size_t size() const { return lanes_.size(); }
  [[nodiscard]] const Lane& operator[](LaneIndex lane) const { return lanes_[lane.value()].known; }
  // The group's, for which they were started.
  [[nodiscard]] uint32_t epoch() const { return epoch_; }
  [[nodiscard]] bool all_ready() const;
  // Every place is free for a new process.
  [[nodiscard]] bool all_absent() const;
  // Newest attempt that every lane has published.
  [[nodiscard]] uint64_t published_attempt() const;

  // ---- processes ----
  // A process begins in this place, for an epoch of the group.
  void OnStarted(LaneIndex lane, uint32_t epoch);
  // True: it was the last one.
  [[nodiscard]] bool OnReady(LaneIndex lane, std::string device);
  // False: it is known.
  [[nodiscard]] bool OnGone(LaneIndex lane);
  // All of them end, and what they were doing for somebody. What they have published stays known.
  void GiveUp();
  // What lies in their memory is void: they have published nothing.
  void ForgetState();

  // ---- what new lanes do before they work ----
  // They map a rank's memory again, which was mapped by their predecessors.
  void BeginMapping(int32_t rank, LaneIndex lane) { mapping_.emplace(rank, lane); }
  // True: that was the last of it.
  [[nodiscard]] bool OnMapped(int32_t rank, LaneIndex lane);
  [[nodiscard]] bool mapping() const { return !mapping_.empty(); }
  // They take a snapshot's state out of their host copies.
  void BeginLoading();
  // True: it was the last one.
  [[nodiscard]] bool OnLoaded(LaneIndex lane);
  [[nodiscard]] bool loading() const { return !loading_.empty(); }
  // Grows with everything of this that gets done.
  [[nodiscard]] uint64_t done() const;

  // ---- steps ----
  void OnGathered(LaneIndex lane, uint64_t attempt, std::vector<int32_t> non_finite);
  void OnPublished(LaneIndex lane, uint64_t attempt);

  // ---- lanes that hang ----
  void OnReport(LaneIndex lane);
  void OnPong(LaneIndex lane, const LaneWatch::Answer& answer);
  struct Ping {
    LaneIndex lane;
    uint64_t number = 0;
  };
  // What it owes is overdue, and these trainers keep it waiting: they count as dead. Where none of
  // them is there any more, the lane itself may be to blame.
  struct Expel {
    LaneIndex lane;
    std::vector<int32_t> ranks;
    bool else_condemn = false;
  };
  // It is condemned: kill it. Its end is told by OnGone().
  struct Kill {
    LaneIndex lane;
    std::string why;
    std::string awaited;  // from it
  };
  // Not even SIGKILL has ended it: its memory cannot be given to another one.
  struct Unkillable {
    LaneIndex lane;
  };
  using Order = std::variant<Ping, Expel, Kill, Unkillable>;
  // What an attempt waits for, of which the lanes have all that they need.
  struct Owed {
    uint64_t applied_attempt = 0;  // its weights; 0: nothing
    uint64_t open_attempt = 0;     // its gradients; 0: none is open
  };
  using ProcessorTime = std::function<std::optional<std::chrono::milliseconds>(LaneIndex)>;
  // Every 100 ms. Trainers are expelled last: the job may be over then.
  [[nodiscard]] std::vector<Order> OnTick(TimePoint now, const Owed& owed,
                                          const ProcessorTime& used);
  // The attempt has been waited for too long: who keeps it waiting ends. A lane that waits for
  // another node's is not to blame.
  [[nodiscard]] std::vector<Order> OnGatherOverdue(TimePoint now, uint64_t attempt,
                                                   const std::string& why);
  [[nodiscard]] Kill Condemn(TimePoint now, LaneIndex lane, std::string why, const Owed& owed);
  // For people: what a lane is waited for. REQUIRES: it lives.
  [[nodiscard]] std::string AwaitedFrom(LaneIndex lane, const Owed& owed) const;

 private:
  struct Place {
    Lane known;
    std::optional<LaneWatch> watch;         // of the process
    std::optional<TimePoint> condemned_at;  // by this object
  };
  [[nodiscard]] Place& At(LaneIndex lane) { return lanes_[lane.value()]; }

  LaneWatchOptions options_;
  uint32_t epoch_ = 0;
  std::vector<Place> lanes_;
  std::set<std::pair<int32_t, LaneIndex>> mapping_;  // by rank
  std::set<LaneIndex> loading_;
};

[[nodiscard]] const char* Name(LaneSet::State state);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_LANE_SET_H_
