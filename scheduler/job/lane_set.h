// The lanes of one job on one node: which of them live, how far each has come, and what new ones
// still have to do. Pure: time is passed in, and the caller starts, commands and kills processes as
// the answers say.
//
//                started    ready    hangs       gone    given up
//   Absent       Starting   x        x           x       Absent
//   Starting     x          Ready    Condemned   Gone    Absent
//   Ready        x          x        Condemned   Gone    Absent
//   Condemned    x          -        -           Gone    Absent
//   Gone         x          -        x           -       Absent
//
// "-": ignored; x: impossible (impossible.h). All lanes are given up together: a new epoch has new
// ones, over the same memory, and none starts before every predecessor has ended. (A process that
// has let go of its work has ended for this class, and its successor's may be the same.)
#ifndef DMUOND_SCHEDULER_JOB_LANE_SET_H_
#define DMUOND_SCHEDULER_JOB_LANE_SET_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/record.pb.h"
#include "scheduler/job/bits_difference.h"
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
    v1::LaneBits bits;               // that processes here compute with; empty: none yet
    bool checked = false;            // the present process computes with the same
    v1::LaneBits refused;            // of the newest process that differed; empty: none, or settled
    uint64_t published_attempt = 0;  // newest whose weights it has published
    uint64_t gathered_attempt = 0;   // newest whose gradients it has gathered
    std::vector<int32_t> non_finite;  // units with infinite or NaN weights, as of gathered_attempt

    [[nodiscard]] bool lives() const {
      return state == State::kStarting || state == State::kReady || state == State::kCondemned;
    }
    // Its process lives, and has not come so far that lanes of other nodes know of it.
    [[nodiscard]] bool begins() const { return state == State::kStarting && !checked; }
    [[nodiscard]] bool ready() const { return state == State::kReady; }
  };

  LaneSet() = default;
  // `first` is the first of this node's lanes, whose ids follow each other.
  LaneSet(LaneId first, int32_t lanes, LaneWatchOptions watch);
  // A set that goes on where the one that wrote `record` has stopped. For how long lanes are silent
  // or condemned is counted anew. INVALID_ARGUMENT: no set of so many lanes has written it.
  [[nodiscard]] static absl::StatusOr<LaneSet> FromRecord(LaneId first, int32_t lanes,
                                                          LaneWatchOptions watch,
                                                          const v1::RecordedLanes& record);
  void ToRecord(v1::RecordedLanes& record) const;

  [[nodiscard]] size_t size() const { return lanes_.size(); }
  [[nodiscard]] const Lane& operator[](LaneIndex lane) const { return lanes_[lane.value()].known; }
  // The epoch that they were started for.
  [[nodiscard]] uint32_t epoch() const { return epoch_; }
  [[nodiscard]] bool all_ready() const;
  // Every place is free for a new process.
  [[nodiscard]] bool all_absent() const;
  // Lanes of other nodes may know of one: it has been told to connect its rail.
  [[nodiscard]] bool any_checked() const;
  // The newest attempt that every lane has published.
  [[nodiscard]] uint64_t published_attempt() const;

  // ---- processes ----
  // A process begins in this place, for an epoch of the group.
  void OnStarted(LaneIndex lane, uint32_t epoch);
  // What a process computes with, which it says before it is ready. FAILED_PRECONDITION
  // (LANE_DIFFERS): not with what the job began with, so that the job would go on with other bits.
  // OK: it is the same, or the first.
  [[nodiscard]] absl::Status CheckBits(LaneIndex lane, const v1::LaneBits& bits);
  // CheckBits() has refused a process, and not all lanes were ready since.
  [[nodiscard]] bool refused() const;
  // Processes may compute with what was refused, from after `step` on. Returns in what it differs,
  // for people. REQUIRES: refused().
  [[nodiscard]] std::string Accept(int64_t step);
  // What was accepted, and after which steps; empty: nothing.
  [[nodiscard]] const std::string& accepted() const { return accepted_; }
  // True: all lanes are ready by this.
  [[nodiscard]] bool OnReady(LaneIndex lane, std::string device);
  // False: its end was known already.
  [[nodiscard]] bool OnGone(LaneIndex lane);
  // All lanes are given up, with what they had still to map or load. What they have published stays
  // known.
  void GiveUp();
  // The state in their memory counts no more: they have published nothing.
  void ForgetState();

  // ---- what new lanes do before they work ----
  // The lane is to map a rank's memory, as its predecessor did.
  void BeginMapping(int32_t rank, LaneIndex lane) { mapping_.emplace(rank, lane); }
  // True: nothing is left to be mapped.
  [[nodiscard]] bool OnMapped(int32_t rank, LaneIndex lane);
  [[nodiscard]] bool mapping() const { return !mapping_.empty(); }
  // Every lane that may have mapped the memory of a rank's session is to unmap it, or to end.
  void BeginUnmapping(int32_t rank, uint64_t incarnation);
  void OnUnmapped(int32_t rank, uint64_t incarnation, LaneIndex lane);
  // Some lane has yet to unmap memory of the rank, or of any.
  [[nodiscard]] bool unmapping(int32_t rank) const;
  [[nodiscard]] bool unmapping() const { return !unmapping_.empty(); }
  // All lanes are to take a snapshot's state out of their host copies.
  void BeginLoading();
  // True: all lanes have loaded by this.
  [[nodiscard]] bool OnLoaded(LaneIndex lane);
  [[nodiscard]] bool loading() const { return !loading_.empty(); }
  // Grows with everything that gets mapped or loaded.
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
  // The lane's work is overdue because it waits for these trainers: they count as dead. If none of
  // them is there any more and `else_condemn` is set, the lane is to blame.
  struct Expel {
    LaneIndex lane;
    std::vector<int32_t> ranks;
    bool else_condemn = false;
  };
  // The lane is condemned, and the caller is to kill it. OnGone() tells its end.
  struct Kill {
    LaneIndex lane;
    std::string why;
    std::string awaited;  // what it was waited for
  };
  // Not even SIGKILL has ended the lane: its memory cannot be given to another one.
  struct Unkillable {
    LaneIndex lane;
  };
  using Order = std::variant<Ping, Expel, Kill, Unkillable>;
  // What the lanes have to do, and have all that they need for.
  struct Owed {
    uint64_t applied_attempt = 0;  // they publish its weights; 0: none
    uint64_t open_attempt = 0;     // they gather its gradients; 0: no attempt is open
  };
  using ProcessorTime = std::function<std::optional<std::chrono::milliseconds>(LaneIndex)>;
  // Call it every 100 ms. Expel orders come last, because the job may be over after one.
  [[nodiscard]] std::vector<Order> OnTick(TimePoint now, const Owed& owed,
                                          const ProcessorTime& used);
  // The attempt's gradients have been waited for too long: the lanes and trainers that delay them
  // end. A lane that waits for another node's lane is not to blame.
  [[nodiscard]] std::vector<Order> OnGatherOverdue(TimePoint now, uint64_t attempt,
                                                   const std::string& why);
  [[nodiscard]] Kill Condemn(TimePoint now, LaneIndex lane, std::string why, const Owed& owed);
  // What the lane is waited for, for a message to people. REQUIRES: it lives.
  [[nodiscard]] std::string AwaitedFrom(LaneIndex lane, const Owed& owed) const;

 private:
  struct Place {
    Lane known;
    std::optional<LaneWatch> watch;         // of the living process
    std::optional<TimePoint> condemned_at;  // nullopt: it is not, or only its record says so
  };
  [[nodiscard]] Place& At(LaneIndex lane) { return lanes_[lane.value()]; }
  void ForgetRefused();  // no lane's bits can be accepted any more
  // How `bits` of a process in this place differ from those that the job has had.
  [[nodiscard]] std::vector<BitsDifference> Differences(LaneIndex lane,
                                                        const v1::LaneBits& bits) const;

  LaneWatchOptions options_;
  uint32_t epoch_ = 0;
  std::vector<Place> lanes_;
  std::set<std::pair<int32_t, LaneIndex>> mapping_;              // by rank
  std::map<std::pair<int32_t, LaneIndex>, uint64_t> unmapping_;  // by rank: its incarnation
  std::set<LaneIndex> loading_;
  std::string accepted_;
};

[[nodiscard]] const char* Name(LaneSet::State state);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_LANE_SET_H_
