// Whether a lane that lives still does its work. It is asked now and then, answers when its loop
// comes to it, and says what keeps it: its device, its trainers, other nodes. Pure: time and
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
  // Of a lane that neither answers nor uses a processor; 0: it is not asked.
  std::chrono::milliseconds lane_timeout{30'000};
  // Of a device that is busy, and of what the lane owes, without anything getting done. Also of a
  // lane that computes without answering.
  std::chrono::milliseconds work_timeout{600'000};
};

class LaneWatch {
 public:
  explicit LaneWatch(LaneWatchOptions options);

  // What a lane says of itself.
  struct Answer {
    uint64_t number = 0;  // of the ping
    uint64_t progress = 0;
    bool device_busy = false;
    bool awaits_rail = false;
    std::vector<int32_t> awaited_ranks;
  };
  void OnAnswer(const Answer& answer);
  // Anything else that it has reported.
  void OnReport() { quiet_ = silence_ = Duration(0); }

  struct Look {
    std::optional<uint64_t> ping;  // to be sent
    bool overdue = false;          // what it owes: who keeps it waiting is to blame
    std::string hangs;             // how, if it does: it is of no use any more
  };
  using ProcessorTime = std::function<std::optional<std::chrono::milliseconds>()>;
  // Every 100 ms. `owes`: it has been told everything that it needs for something that is not done.
  [[nodiscard]] Look OnTick(TimePoint now, bool owes, const ProcessorTime& used);

  // Whether it kept answering until now, so that its last answer is true.
  [[nodiscard]] bool answers() const { return silence_ < 2 * interval_; }
  [[nodiscard]] const Answer& last() const { return last_; }

 private:
  using Duration = std::chrono::steady_clock::duration;

  void Listen(Duration elapsed, const ProcessorTime& used, Look& look);

  const LaneWatchOptions options_;
  const Duration interval_;  // from an answer to the next ping
  std::optional<TimePoint> ticked_;
  uint64_t number_ = 0;
  bool asked_ = false;  // and not answered yet
  Duration idle_{0};    // since the last answer, while nothing is asked
  Duration silence_{0};
  Duration quiet_{0};  // part of it, without processor time
  std::optional<std::chrono::milliseconds> used_;
  Answer last_;
  Duration stuck_{0};  // with a busy device
  Duration owed_{0};
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_LANE_WATCH_H_
