// Says in words who or what keeps a job waiting, since when, until when, and what happens then. The
// facts come from the coordinator's machines. Pure; nothing here decides anything.
#ifndef DMUOND_SCHEDULER_AWAITED_H_
#define DMUOND_SCHEDULER_AWAITED_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/step.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

struct Awaited {
  std::string what;  // "rank 3 (pid 4711 on node 0), whose trainer has died"
  TimePoint since;
  std::optional<TimePoint> until;  // unset: without a limit
  std::string otherwise;           // what happens then: "the job ends with TRAINER_MISSING"

  bool operator==(const Awaited&) const = default;
};

// What the open attempt still needs, as StepCoordinator knows it.
struct StepLacks {
  StepId step;  // that is open
  AttemptKind kind = AttemptKind::kStep;
  std::map<TrainerRank, TimePoint> dead;  // when each died; a replacement may come
  // Ranks that live and have not submitted, while others have: the first of those at first_at.
  std::vector<TrainerRank> silent;
  TimePoint first_at;
  // Nodes that have not voted although all ranks have submitted: the last one at last_at.
  std::vector<NodeRank> gathering;
  TimePoint last_at;
};

// All that the coordinator knows of who is awaited. An empty list means that nobody of its kind is.
struct JobLacks {
  // The trainer that has a rank's place, or had it last.
  struct Place {
    int32_t node = 0;
    int64_t pid = 0;    // 0: not known
    bool open = false;  // it has a session
  };
  std::map<int32_t, Place> places;  // by rank

  std::vector<int32_t> unregistered;         // ranks that have not registered
  TimePoint registering_since;               // when the first of the others did
  std::vector<int32_t> not_back;             // ranks that have not come to the step of a rollback
  TimePoint back_since;                      // when the last of the others did
  int64_t back_to = 0;                       // that step
  std::map<int32_t, std::string> preparing;  // node -> what it waits for itself
  TimePoint preparing_since;                 // when a node last got something done
  std::optional<StepLacks> steps;
  // Lanes, which cannot work.
  struct Parked {
    std::string why;
    TimePoint since;
    TimePoint tried_again;
  };
  std::optional<Parked> parked;
};

// How long each of them is awaited before the job goes on without or ends.
struct Patience {
  std::chrono::milliseconds registration{0};
  std::chrono::milliseconds step{0};         // CoordinatorOptions' step_timeout
  std::chrono::milliseconds work{0};         // … work_timeout()
  std::chrono::milliseconds replacement{0};  // … session_linger
};

// Who has been awaited the longest comes first.
[[nodiscard]] std::vector<Awaited> WhoIsAwaited(const JobLacks& lacks, const Patience& patience);

// Picks what is worth telling: what has been awaited for kAwaitedQuiet, and each thing once.
inline constexpr std::chrono::milliseconds kAwaitedQuiet{5'000};
class AwaitedNews {
 public:
  // Returns what to tell now: an empty list says that nobody is awaited any more; nullopt that
  // there is nothing new.
  [[nodiscard]] std::optional<std::vector<Awaited>> Update(TimePoint now,
                                                           std::vector<Awaited> awaited);
  // Whoever was told is gone: everything is news again.
  void Forget() { told_.clear(); }

 private:
  std::vector<Awaited> told_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_AWAITED_H_
