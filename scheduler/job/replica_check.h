// The coordinator's part in comparing all copies of what a job holds: it has every node digest
// extracts of units as they are between two steps, some of them at a time, compares the digests,
// and says what differs. Pure: time is passed in, and messages are returned.
//
//   CheckExtracts to all → ExtractsChecked of every node → the next ones → CheckDone to all
//
// Compared are
//   published weights   in the arenas of each trainer, with the master rounded to them
//   state               with what the last check found, where nothing has written it since
//
// Training goes on. No step waits for more than one order's extracts in one lane, whose bytes are
// limited, because the next order leaves when every node has answered.
//
//                                                              its time                      time
//               due, wanted   all answered       decision      has come        interrupted   over
//   Idle        Asking (1)    -                  -             -               -             -
//   Waiting     Asking (2)    -                  -             Asking          -             Idle
//   Asking      Asking (2)    any of them (3)    -             -               Waiting       Idle
//   Doubting    Asking (2)    -                  Asking, Idle  Asking, Idle    Waiting       Idle
//
// Waiting: nothing can be compared at present, or a node could not digest yet: the same is asked
// again when the job runs, or after kAgain.
// Doubting: weights in an arena differ. A trainer may have written them itself, and be about to
// push them: then the same is asked again after the push, which may commit while nodes still
// answer. If something else has committed since the order, or nothing has for kDoubt and nobody is
// pushing, the difference counts. Once as many differ as are shown, nothing is doubted any more.
// (1) Waiting, where nothing can be compared. (2) Only where somebody asks during a check that
// nobody has asked for: that one is given up. (3) Asking: the next extracts; Idle: there are none.
//
// Threads: one at a time.
#ifndef DMUOND_SCHEDULER_JOB_REPLICA_CHECK_H_
#define DMUOND_SCHEDULER_JOB_REPLICA_CHECK_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/plan.h"
#include "scheduler/step.h"

namespace dmuond::scheduler {

// So many bytes a lane reads at most for one order.
inline constexpr int64_t kCheckOrderBytes = int64_t{32} << 20;
// So many holders of extracts an order looks at: it is made under node 0's lock.
inline constexpr int64_t kCheckOrderHolders = 16'384;
inline constexpr std::chrono::milliseconds kDoubt{500};
// What a node could not digest it is asked for again after so long.
inline constexpr std::chrono::milliseconds kAgain{100};
// A check that nobody has asked for ends after so long.
inline constexpr std::chrono::milliseconds kOwnCheckPatience{12 * 3'600'000};

class ReplicaCheck {
 public:
  enum class State : uint8_t { kIdle, kWaiting, kAsking, kDoubting };

  // Both must outlive the object. `every`: from one check to the next; 0: only when asked.
  ReplicaCheck(const PlanInputs& inputs, const Plan& plan, std::chrono::milliseconds every,
               TimePoint now);

  void OnRequest(TimePoint now, const v1::CheckRequest& request);
  void OnChecked(const v1::ExtractsChecked& checked);
  // Behind it nodes have other weights, and maybe another state.
  void OnDecision(const v1::Decision& decision);
  // What is to be told to all nodes now, behind all that they have been told. `why_not`: why
  // nothing can be compared at present; empty: it can. `pushing`: a trainer has submitted weights
  // of its own, and nothing is decided yet.
  [[nodiscard]] std::optional<v1::CoordinatorMessage> Advance(TimePoint now,
                                                              const std::string& why_not,
                                                              bool pushing);
  [[nodiscard]] State state() const { return state_; }

 private:
  struct Place {  // of an extract
    int32_t unit = 0;
    int32_t number = 0;  // among the unit's
    auto operator<=>(const Place&) const = default;
  };
  struct Look {  // at the state of an extract
    uint64_t written = 0;
    absl::InlinedVector<uint64_t, 3> digests;
  };
  // What the nodes that have something of an extract say of it.
  using OfNodes = std::vector<std::pair<int32_t, const v1::ExtractDigests*>>;
  void Begin(TimePoint now);
  // Orders the extracts from next_ on.
  [[nodiscard]] v1::CoordinatorMessage Order(TimePoint now);
  [[nodiscard]] v1::CoordinatorMessage OrderAgain(TimePoint now);
  void Wait(TimePoint until);
  [[nodiscard]] std::optional<v1::CoordinatorMessage> OnAnswers(TimePoint now);
  [[nodiscard]] v1::CoordinatorMessage Finish(TimePoint now, const std::string& reason = "",
                                              const std::string& error = "");
  // The order's digests are counted, and those after it are asked for.
  [[nodiscard]] v1::CoordinatorMessage Accept(TimePoint now);
  void Compare();
  void CompareState(int32_t extract, int32_t node, const v1::ExtractDigests& digests);
  void CompareCopies(int32_t extract, const OfNodes& of_nodes);
  [[nodiscard]] v1::CheckDone::Difference About(int32_t extract) const;
  [[nodiscard]] std::string Unanswered(TimePoint now) const;

  const PlanInputs& inputs_;
  const Plan& plan_;
  const std::chrono::milliseconds every_;
  int32_t ranks_per_node_ = 0;  // the most
  std::map<Place, Look> looks_;

  State state_ = State::kIdle;
  TimePoint due_;  // of the next check that nobody has asked for
  std::vector<std::pair<uint64_t, TimePoint>> wanted_;  // by whom, and until when it may take
  // ---- of the check that is under way ----
  std::vector<uint64_t> requests_;
  TimePoint began_;
  TimePoint ends_by_;
  v1::CheckDone done_;
  std::set<int32_t> ranks_;
  Place next_;  // behind the order
  v1::CheckExtracts order_;
  std::vector<Place> places_;                       // of its extracts
  std::map<int32_t, v1::ExtractsChecked> answers_;  // by node
  TimePoint told_;                                  // the order
  TimePoint waits_until_;                           // in kWaiting
  // What the answers to the order say. It counts when the order is accepted.
  std::vector<v1::CheckDone::Difference> differences_;
  std::map<Place, Look> looks_now_;
  int64_t digests_ = 0;
  TimePoint doubts_until_;
  bool settled_ = false;  // something has committed since the order
  bool pushed_ = false;   // a push, load or restart has
  uint64_t number_ = 0;   // of the newest order; none is used twice
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_REPLICA_CHECK_H_
