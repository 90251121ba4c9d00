// Measures how long a node takes to write its job's record, for each kind of event of a step. Every
// turn of a daemon pays this before anything of it leaves the node.
//
//   record_bench [RANKS [LANES [BUCKETS [STEPS [STATE_BYTES]]]]]      default: 32 8 250 2000 0
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/node_job.h"
#include "server/daemon/memory/record_file.h"

namespace dmuond::bench {
namespace {

namespace node = scheduler::node;
using scheduler::Attempt;
using scheduler::Decision;
using scheduler::GroupEpoch;
using scheduler::LaneIndex;
using scheduler::MakeAttempt;
using scheduler::MakePlannedJob;
using scheduler::NodeJob;
using scheduler::OutcomeKind;
using scheduler::Plan;
using scheduler::PlannedJob;
using scheduler::Registration;
using scheduler::ResumePoint;
using scheduler::StepId;
using scheduler::Submission;
using scheduler::TimePoint;
using scheduler::TrainerRank;
using scheduler::Verdict;

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "record_bench: %s\n", std::string(status.message()).c_str());
  std::exit(1);
}

struct Shape {
  int32_t ranks = 32;
  int32_t lanes = 8;
  int32_t buckets = 250;
  int32_t steps = 2000;
  int32_t state_bytes = 0;  // of each rank's trainer_state
};

// Every rank has all of as many matrices as there are buckets.
v1::Registration RegistrationOf(const Shape& shape, int32_t rank) {
  constexpr int64_t kSide = 64;
  v1::Registration registration;
  registration.set_rank(rank);
  registration.set_home_lane(rank % shape.lanes);
  registration.set_job("job");
  registration.set_world_size(shape.ranks);
  registration.add_groups()->set_preset("dmuon");
  registration.set_bucket_bytes(kSide * kSide * 2);
  for (int32_t i = 0; i < shape.buckets; ++i) {
    v1::Parameter& parameter = *registration.add_parameters();
    parameter.set_name(absl::StrCat("layers.", i, ".weight"));
    parameter.set_weight_type(v1::ELEMENT_TYPE_BFLOAT16);
    parameter.set_gradient_type(v1::ELEMENT_TYPE_BFLOAT16);
    parameter.set_route(v1::ROUTE_MUON);
    parameter.set_reduce_factor(1);
    v1::Fragment& fragment = *registration.add_fragments();
    fragment.set_parameter(i);
    fragment.set_contribution(v1::CONTRIBUTION_SUM);
    for (int dimension = 0; dimension < 2; ++dimension) {
      parameter.add_shape(kSide);
      fragment.mutable_box()->add_begin(0);
      fragment.mutable_box()->add_end(kSide);
    }
    for (v1::Slice* slice : {fragment.mutable_gradient(), fragment.mutable_weight()}) {
      slice->add_strides(kSide);
      slice->add_strides(1);
      slice->set_offset_bytes(i * kSide * kSide * 2);
    }
    fragment.mutable_weight()->set_arena(1);
  }
  return registration;
}

class Bench {
 public:
  explicit Bench(const Shape& shape) : shape_(shape), job_({.lanes = shape.lanes}) {
    state_.assign(shape.state_bytes, 's');
  }

  void Begin() {
    Took("begins", job_.OnFormed(now_, 1));
    v1::CoordinatorMessage plan;
    v1::PlanInputs& inputs = *plan.mutable_plan();
    inputs.set_job("job");
    inputs.set_job_incarnation(1);
    inputs.set_nodes(1);
    inputs.set_lanes_per_node(shape_.lanes);
    for (int32_t rank = 0; rank < shape_.ranks; ++rank) {
      NodeJob::Opening opening;
      opening.id = Id(rank);
      opening.rank = rank;
      opening.world_size = shape_.ranks;
      opening.job = "job";
      node::Actions actions;
      (void)job_.Open(now_, opening, {std::optional<ResumePoint>()}, actions);
      const v1::Registration registration = RegistrationOf(shape_, rank);
      *inputs.add_registrations() = registration;
      Took("begins", job_.Register(Id(rank), registration,
                                   std::make_shared<const Registration>(*FromProto(registration))));
    }
    Took("begins", job_.OnMessage(now_, plan));
    absl::StatusOr<PlannedJob> planned = MakePlannedJob(inputs);
    Check(planned.status());
    plan_ = planned->plan;
    Took("begins", job_.OnPrepared(now_, NodeJob::Prepared{*std::move(planned), true}));
    Took("begins", job_.OnLanesStarted(now_, absl::OkStatus()));
    for (int32_t lane = 0; lane < shape_.lanes; ++lane) {
      v1::LaneReport report;
      report.mutable_ready()->set_device("cpu");
      Took("begins", job_.OnLaneReport(now_, LaneIndex(lane), report));
    }
    OpenAttempt(1);
    for (int32_t rank = 0; rank < shape_.ranks; ++rank) {
      v1::LaneCommand command;
      command.mutable_attach()->set_rank(rank);
      command.mutable_attach()->set_incarnation(1);
      Took("begins", job_.BeginMapping(Id(rank), command));
      for (int32_t lane = 0; lane < shape_.lanes; ++lane) {
        v1::LaneReport report;
        report.mutable_attached()->set_rank(rank);
        report.mutable_attached()->set_incarnation(1);
        Took("begins", job_.OnLaneReport(now_, LaneIndex(lane), report));
      }
      Took("begins", job_.Attach(Id(rank), {}, false));
      job_.TellAttached(Id(rank));
    }
  }

  void Step(int64_t step) {
    if (step > 1) OpenAttempt(step);
    Submission submission;
    submission.attempt = AttemptOf(step);
    submission.step = StepId(step);
    submission.scalars.groups.resize(4);
    for (int32_t rank = 0; rank < shape_.ranks; ++rank) {
      submission.rank = TrainerRank(rank);
      node::Actions actions;
      Check(job_.Submit(Id(rank), submission, state_, actions).status());
      Took("submission", actions);
    }
    for (int32_t lane = 0; lane < shape_.lanes; ++lane) {
      v1::LaneReport report;
      report.mutable_gathered()->set_attempt(AttemptOf(step).value());
      std::vector<scheduler::UnitNorm> norms;
      for (const scheduler::Unit& unit : plan_->units) {
        if (unit.owner.value() == lane) norms.push_back({.unit = unit.id, .sums = {1}});
      }
      *report.mutable_gathered()->mutable_norms() = ToProto(norms);
      Took("gathered", job_.OnLaneReport(now_, LaneIndex(lane), report));
    }
    Decision decision;
    decision.attempt = AttemptOf(step);
    decision.step = StepId(step);
    decision.verdict = Verdict::kCommit;
    decision.scalars = submission.scalars;
    decision.outcome.kind = OutcomeKind::kCommitted;
    decision.outcome.step = StepId(step);
    decision.outcome.attempt = AttemptOf(step);
    decision.outcome.next_attempt = AttemptOf(step + 1);
    v1::CoordinatorMessage message;
    *message.mutable_decision() = ToProto(decision);
    Took("decision", job_.OnMessage(now_, message));
    for (int32_t lane = 0; lane < shape_.lanes; ++lane) {
      v1::LaneReport report;
      report.mutable_published()->set_attempt(AttemptOf(step).value());
      Took("published", job_.OnLaneReport(now_, LaneIndex(lane), report));
    }
  }

  void Forget() { times_.clear(); }

  void Print() {
    std::printf("# %d ranks, %d lanes, %d buckets, %d units, trainer_state of %d bytes\n",
                shape_.ranks, shape_.lanes, plan_->buckets, static_cast<int>(plan_->units.size()),
                shape_.state_bytes);
    std::printf("# the record is a file of %.1f KiB\n", static_cast<double>(file_.size()) / 1024);
    std::printf("%-12s %10s %10s %10s %10s\n", "write after", "writes", "p50 us", "p99 us",
                "max us");
    double all = 0;
    for (auto& [what, times] : times_) {
      std::sort(times.begin(), times.end());
      const auto at = [&times = times](double part) {
        return times[static_cast<size_t>(part * static_cast<double>(times.size() - 1))];
      };
      for (const double time : times) all += time;
      std::printf("%-12s %10d %10.2f %10.2f %10.2f\n", what.c_str(), static_cast<int>(times.size()),
                  at(0.5), at(0.99), at(1));
    }
    std::printf("a step's writes together: %.1f us\n", all / shape_.steps);
  }

 private:
  static Attempt AttemptOf(int64_t step) {
    return MakeAttempt(GroupEpoch(1), static_cast<uint32_t>(step));
  }
  static uint64_t Id(int32_t rank) { return static_cast<uint64_t>(rank) + 1; }

  void OpenAttempt(int64_t step) {
    v1::CoordinatorMessage message;
    message.mutable_open()->set_attempt(AttemptOf(step).value());
    message.mutable_open()->set_step(step);
    Took("open", job_.OnMessage(now_, message));
  }

  // As the daemon does it before it performs anything.
  void Took(const char* what, const node::Actions& /*actions*/) {
    const auto begin = std::chrono::steady_clock::now();
    if (version_ != job_.record_version()) {
      version_ = job_.record_version();
      Check(file_.Write(job_));
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    times_[what].push_back(took.count());
  }

  const Shape shape_;
  const TimePoint now_{};
  NodeJob job_;
  server::RecordFile file_;
  uint64_t version_ = 0;
  std::shared_ptr<const Plan> plan_;
  std::string state_;
  std::map<std::string, std::vector<double>> times_;
};

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) {
  dmuond::bench::Shape shape;
  int32_t* const numbers[] = {&shape.ranks, &shape.lanes, &shape.buckets, &shape.steps,
                              &shape.state_bytes};
  for (int i = 1; i < argc && i <= 5; ++i) *numbers[i - 1] = std::atoi(argv[i]);
  dmuond::bench::Bench bench(shape);
  constexpr int kWarmUp = 20;
  bench.Begin();
  for (int step = 1; step <= kWarmUp; ++step) bench.Step(step);
  bench.Forget();
  for (int step = 1; step <= shape.steps; ++step) bench.Step(kWarmUp + step);
  bench.Print();
  return 0;
}
