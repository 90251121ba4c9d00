// Who or what keeps a job waiting, since when, until when, and what happens then: facts in, words
// for people out. Pure; nothing here decides anything.
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

// Whom the open attempt lacks, as StepCoordinator knows it.
struct StepLacks {
  StepId step;  // that is open
  AttemptKind kind = AttemptKind::kStep;
  std::map<TrainerRank, TimePoint> dead;  // since then; their replacements may come
  // Live, and have not handed in what others have. The time of the first of those.
  std::vector<TrainerRank> silent;
  TimePoint first_at;
  // All ranks have handed it in, the last one at last_at, and these have not voted.
  std::vector<NodeRank> gathering;
  TimePoint last_at;
};

// All that the coordinator knows of who is awaited. What is empty is not.
struct JobLacks {
  // The trainer that has a rank's place, or had it last.
  struct Place {
    int32_t node = 0;
    int64_t pid = 0;    // 0: not known
    bool open = false;  // it has a session
  };
  std::map<int32_t, Place> places;  // by rank

  std::vector<int32_t> unregistered;  // ranks, while others have registered since:
  TimePoint registering_since;
  std::vector<int32_t> not_back;  // ranks of a job that goes back, while others are there since:
  TimePoint back_since;
  int64_t back_to = 0;                       // the step
  std::map<int32_t, std::string> preparing;  // node -> what it waits for itself; since:
  TimePoint preparing_since;
  std::optional<StepLacks> steps;
};

// How long each is awaited.
struct Patience {
  std::chrono::milliseconds registration{0};
  std::chrono::milliseconds step{0};         // CoordinatorOptions' step_timeout
  std::chrono::milliseconds work{0};         // … work_timeout()
  std::chrono::milliseconds replacement{0};  // … session_linger
};

// Who has been awaited the longest comes first.
[[nodiscard]] std::vector<Awaited> WhoIsAwaited(const JobLacks& lacks, const Patience& patience);

// What is worth telling: nothing before something has been awaited for kAwaitedQuiet, and nothing
// twice.
inline constexpr std::chrono::milliseconds kAwaitedQuiet{5'000};
class AwaitedNews {
 public:
  // What to tell now; empty: that nothing is awaited any more; unset: nothing new.
  [[nodiscard]] std::optional<std::vector<Awaited>> Update(TimePoint now,
                                                           std::vector<Awaited> awaited);
  // Nobody knows what was told before.
  void Forget() { told_.clear(); }

 private:
  std::vector<Awaited> told_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_AWAITED_H_
