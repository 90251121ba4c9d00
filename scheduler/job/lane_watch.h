// Finds out whether a lane that lives still works. The lane is pinged now and then. Its loop
// answers, and says what it waits for: its device, trainers, or other nodes. Pure: time and
// processor time are passed in.
//
//   LaneWatch watch({.lane_timeout = …, .work_timeout = …});
//   every 100 ms: auto look = watch.OnTick(now, owes, processor_time);
//                 if (look.ping) send it; if (!look.hangs.empty()) kill the lane
//
// Threads: the caller's lock.
#ifndef DMUOND_SCHEDULER_JOB_LANE_WATCH_H_
#define DMUOND_SCHEDULER_JOB_LANE_WATCH_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/step.h"

namespace dmuond::scheduler {

struct LaneWatchOptions {
  // A lane hangs that has neither answered nor used a processor for so long. 0: it is not pinged.
  std::chrono::milliseconds lane_timeout{30'000};
  // A lane hangs whose device has been busy, whose work has been due, or which has computed without
  // an answer, for so long and without progress.
  std::chrono::milliseconds work_timeout{600'000};
};

class LaneWatch {
 public:
  explicit LaneWatch(LaneWatchOptions options);

  // What a lane says of itself.
  struct Answer {
    uint64_t number = 0;  // of the ping that it answers
    uint64_t progress = 0;
    bool device_busy = false;
    bool awaits_rail = false;
    std::vector<int32_t> awaited_ranks;
  };
  void OnAnswer(const Answer& answer);
  // The lane has reported anything else.
  void OnReport() { quiet_ = silence_ = Duration(0); }

  struct Look {
    std::optional<uint64_t> ping;  // a ping with this number is to be sent
    bool overdue = false;          // its work is overdue: what it waits for is to blame
    std::string hangs;             // how it hangs; empty: it does not
  };
  using ProcessorTime = std::function<std::optional<std::chrono::milliseconds>()>;
  // Call it every 100 ms. `owes`: the lane has work to do, and all that it needs for it.
  [[nodiscard]] Look OnTick(TimePoint now, bool owes, const ProcessorTime& used);

  // It has answered until now, so that its last answer still holds.
  [[nodiscard]] bool answers() const { return silence_ < 2 * interval_; }
  [[nodiscard]] const Answer& last() const { return last_; }

 private:
  using Duration = std::chrono::steady_clock::duration;

  void Listen(Duration elapsed, const ProcessorTime& used, Look& look);

  const LaneWatchOptions options_;
  const Duration interval_;  // from an answer to the next ping
  std::optional<TimePoint> ticked_;
  uint64_t number_ = 0;
  bool asked_ = false;   // a ping is not answered yet
  Duration idle_{0};     // since the last answer, if no ping is out
  Duration silence_{0};  // since the ping, or since the last report
  Duration quiet_{0};    // the part of silence_ in which it used no processor
  std::optional<std::chrono::milliseconds> used_;
  Answer last_;
  Duration stuck_{0};  // with a busy device and without progress
  Duration owed_{0};   // with work to do and without progress
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_LANE_WATCH_H_
