// Plays the daemons and trainers of a job to real lanes: over real socket pairs, with memory held
// by descriptor. One harness is all nodes, so it also decides what the coordinator would.
#ifndef DMUOND_TESTS_SERVER_LANE_HARNESS_H_
#define DMUOND_TESTS_SERVER_LANE_HARNESS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/unique_fd.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/wire/timeline.h"
#include "kernels/device.h"
#include "scheduler/lane_program.h"
#include "scheduler/plan.h"
#include "scheduler/step.h"
#include "server/shared/state_table.h"
#include "server/storage/host_copy.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::server::lane::testing {

// kLateThread: on a device whose work is done later (late_device.h).
enum class RunAs : uint8_t { kThread, kLateThread, kProcess };

struct Held {  // memory of the daemon, with its own view of it
  wire::UniqueFd fd;
  std::unique_ptr<kernels::Mapping> mapping;
};

// Another device than the CPU, for the lanes of clusters of one node: they are processes then.
struct DeviceUnderTest {
  std::string lane_program;                                  // beside this one
  std::function<std::string(int32_t lane)> flag;             // of --device
  std::function<Held(size_t bytes, int32_t lane)> allocate;  // memory of that lane's device
};
// Set before the first cluster is made.
[[nodiscard]] DeviceUnderTest& OtherDevice();

class Cluster {
 public:
  struct Options {
    RunAs run_as = RunAs::kThread;
    std::string preset = "keller";
    int64_t bucket_bytes = 0;
    bool poison = false;
    bool host_copies = false;
    int64_t snapshot_staging_bytes = 0;
    int64_t landing_bytes_max = 0;
  };
  Cluster(const scheduler::testing::World& world, int32_t nodes, int32_t lanes_per_node,
          Options options);
  Cluster(const scheduler::testing::World& world, int32_t nodes, int32_t lanes_per_node)
      : Cluster(world, nodes, lanes_per_node, Options{}) {}
  ~Cluster();

  // ---- trainers ----
  [[nodiscard]] float* Gradient(int32_t rank, const scheduler::Fragment& fragment);
  [[nodiscard]] float* Weight(int32_t rank, const scheduler::Fragment& fragment);
  // Fills every fragment's box from a function of (rank, parameter, flat index in the parameter).
  template <typename Function>
  void FillGradients(Function function) {
    Fill(false, function);
  }
  template <typename Function>
  void FillWeights(Function function) {
    Fill(true, function);
  }
  // The parameter's weights, put together from all holders, who must agree bit by bit.
  [[nodiscard]] std::vector<float> Weights(const std::string& parameter);
  void SignalReady(int32_t rank);
  void SignalReady(int32_t rank, int32_t bucket);
  void Submit(int32_t rank, const std::vector<int32_t>& absent = {});
  // The two halves of Submit(): the trainer's host has called, its device has nothing more to run.
  void SubmitFromHost(int32_t rank, const std::vector<int32_t>& absent = {});
  void StoreSubmitted(int32_t rank);
  void PushFrom(int32_t rank);
  [[nodiscard]] uint64_t Published(int32_t rank, int32_t bucket) const;
  void Attach(int32_t rank);
  void Detach(int32_t rank);
  void Die(int32_t rank);  // its memory stays
  void Republish(uint64_t attempt, const std::vector<int32_t>& ranks);

  // ---- the coordinator ----
  void Open();  // the next attempt
  void WaitGathered();
  void Decide(scheduler::Verdict verdict);
  void WaitPublished();
  // Has lane 0 digest all units, whose rails are 0, as one extract each.
  void SendCheck();
  void WaitUnitIo(int64_t request, std::string* error);
  // Asks lane 0 until it has updated everything of the decided step, and names trainers whose
  // words it then awaits. Returns them; nobody, if it publishes the step without waiting.
  std::vector<int32_t> WaitUpdated();

  // From open to published.
  void Push();
  void Step(const std::map<int32_t, std::vector<int32_t>>& absent = {});

  void Send(int32_t lane, const v1::LaneCommand& command, const std::vector<int>& fds = {});
  // Handles reports until `done` or half a minute has passed.
  void PumpUntil(const std::function<bool()>& done);
  // Until the lane has taken several turns: then it has acted on all words that were stored before.
  void WaitTurns(int32_t lane);
  [[nodiscard]] int pid(int32_t lane) const { return lanes_[lane].pid; }  // RunAs::kProcess
  // Tells the process to end, and waits; its status as of waitpid().
  int Shutdown(int32_t lane);
  void Restart(int32_t lane);  // kills the process and starts another on the same memory

  [[nodiscard]] const scheduler::Plan& plan() const { return plan_; }
  [[nodiscard]] const scheduler::PlanInputs& inputs() const { return inputs_; }
  [[nodiscard]] const std::vector<scheduler::Fragment>& fragments() const { return fragments_; }
  [[nodiscard]] const scheduler::LaneProgram& program(int32_t lane) const {
    return lanes_[lane].program;
  }
  [[nodiscard]] StateView State(int32_t unit) const;
  // All tensors of an owned unit's current slot, in the slot's order.
  [[nodiscard]] std::vector<float> StateOf(scheduler::UnitId unit) const;
  [[nodiscard]] const storage::HostCopy& host_copy(int32_t lane) const {
    return lanes_[lane].host_copy;
  }
  [[nodiscard]] const std::byte* host_memory(int32_t lane) const {
    return lanes_[lane].host_memory.mapping->data();
  }
  [[nodiscard]] int32_t lanes() const { return static_cast<int32_t>(lanes_.size()); }
  [[nodiscard]] uint64_t attempt() const { return attempt_; }

  scheduler::StepScalars scalars;
  double clip_coefficient = 1;
  std::map<int32_t, scheduler::UnitNorm> norms;            // of the last gathered attempt, by unit
  std::string failure;                                     // a lane's last words
  std::map<int32_t, v1::LaneReport::Published> published;  // by lane, of the last attempt
  std::vector<v1::LaneReport::Copied> copied;              // in the order in which they came
  std::optional<v1::LaneReport::StateLoaded> state_loaded;
  std::optional<v1::ExtractsChecked> checked;  // the last one
  int copied_before_checked = 0;               // of `copied`, when that came

 private:
  struct LaneEnd {
    scheduler::LaneProgram program;
    wire::UniqueFd socket;
    std::thread thread;
    int pid = -1;
    Held state, staging, table, board, host_memory;
    storage::HostCopy host_copy;
    bool ready = false;
    bool gathered = false;
  };
  struct TrainerEnd {
    int32_t node = 0;
    uint64_t incarnation = 0;
    Held gradients, weights, timeline;
  };

  template <typename Function>
  void Fill(bool weights, Function function) {
    for (const scheduler::Fragment& fragment : fragments_) {
      const int32_t rank = fragment.rank.value();
      float* data = weights ? Weight(rank, fragment) : Gradient(rank, fragment);
      ForEach(fragment, [&](int64_t local, int64_t flat) {
        data[local] = function(rank, fragment.parameter, flat);
      });
    }
  }
  void ForEach(const scheduler::Fragment& fragment,
               const std::function<void(int64_t local, int64_t flat)>& visit) const;
  [[nodiscard]] bool on_other_device() const {
    return inputs_.nodes == 1 && !OtherDevice().lane_program.empty();
  }
  [[nodiscard]] Held HoldOnDevice(size_t bytes, int32_t lane) const;
  void StartLane(int32_t lane);
  void SendConfigure(int32_t lane);
  void Handle(int32_t lane, const v1::LaneReport& report);
  void OnRailReady(int32_t node, const v1::RailReady& wire);
  void SendSubmission(int32_t rank, scheduler::AttemptKind kind,
                      const std::vector<int32_t>& absent);

  Options options_;
  scheduler::PlanInputs inputs_;
  std::vector<scheduler::Fragment> fragments_;  // of the layout
  scheduler::Plan plan_;
  std::vector<LaneEnd> lanes_;
  std::vector<TrainerEnd> trainers_;
  std::map<int32_t, std::map<int32_t, std::string>> blobs_;  // by rail, then node
  int64_t attached_ = 0;
  int64_t detached_ = 0;
  std::map<int64_t, std::string> unit_io_;
  std::optional<v1::LaneReport::Pong> pong_;                       // the last one
  std::map<std::tuple<int, int, int>, std::set<int>> rail_ready_;  // (rail, operation, bucket)
  std::map<std::pair<int, int>, std::set<int>> rail_done_;         // (rail, operation): buckets
  scheduler::AttemptKind kind_ = scheduler::AttemptKind::kStep;
  uint64_t attempt_ = (uint64_t{1} << 32);
  int64_t step_ = 0;
  std::vector<scheduler::AbsentFragment> absent_;
};

}  // namespace dmuond::server::lane::testing

#endif  // DMUOND_TESTS_SERVER_LANE_HARNESS_H_
