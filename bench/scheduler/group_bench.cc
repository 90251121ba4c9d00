// A group without sockets: the coordinator's and the nodes' machines as they ship, in virtual time.
// Lanes and trainers are the least that speaks with them. It counts the messages of a step, and
// measures how much later GOs come because they are gathered, what the machines take on the
// coordinating node, and what follows the last vote.
//
//   group_bench [NODES [LANES [BUCKETS [STEPS]]]]       128 8 250 5, where nothing is said
//
// Every bucket has a matrix on every rail, whose owners take turns, so that every lane reports
// every bucket twice. A message takes 50 to 150 us, always the same from and to one node; the time
// that the coordinator's machines take, and reading and writing its messages, is measured, and
// passes in the simulation too: messages that come at once wait for one another.
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/group_job.h"
#include "scheduler/job/outgoing_reports.h"
#include "scheduler/plan.h"
#include "scheduler/step_member.h"
#include "tests/scheduler/event_queue.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::nanoseconds;
using testing::EventQueue;
using Clock = std::chrono::steady_clock;

constexpr int64_t kUs = 1'000;  // virtual time is in nanoseconds
constexpr int64_t kMs = 1'000'000;
constexpr int64_t kForward = 50 * kMs;
constexpr int64_t kBackward = 100 * kMs;
constexpr int64_t kUpdate = 10 * kMs;  // a lane has two matrices
constexpr int kNotCounted = 3;  // the job's beginning, and a step at a pace that is not known yet
constexpr int kGroups = 2;      // of hyperparameters

struct Shape {
  int32_t nodes = 128;
  int32_t lanes = 8;
  int32_t buckets = 250;
  int32_t steps = 5;  // that count
};

template <typename Value>
Value Must(absl::StatusOr<Value> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
  std::exit(1);
}

struct Job {
  v1::PlanInputs wire;
  PlannedJob planned;
  std::vector<v1::Registration> registrations;
  std::vector<LaneProgram> programs;  // of one node: of all, where every lane has parts in all
};

v1::Registration RegistrationOf(const Shape& shape, int32_t rank) {
  v1::Registration registration;
  registration.set_rank(rank);
  registration.set_node(rank / shape.lanes);
  registration.set_home_lane(rank % shape.lanes);
  registration.set_job("bench");
  registration.set_world_size(shape.nodes * shape.lanes);
  registration.set_bucket_bytes(int64_t{4} * 64 * 64 * shape.lanes);
  for (int group = 0; group < kGroups; ++group) registration.add_groups()->set_preset("keller");
  Registration value;
  value.rank = TrainerRank(rank);
  const Extents extents = {64, 64};
  for (int32_t i = 0; i < shape.buckets * shape.lanes; ++i) {
    Parameter parameter;
    parameter.name = absl::StrCat("w", i);
    parameter.shape = extents;
    parameter.route = Route::kMuon;
    value.parameters.push_back(std::move(parameter));
    Fragment fragment;
    fragment.rank = value.rank;
    fragment.parameter = i;
    fragment.box = WholeBox(extents);
    fragment.gradient = {0, int64_t{4} * 64 * 64 * i, RowMajorStrides(extents)};
    fragment.weight = {1, int64_t{4} * 64 * 64 * i, RowMajorStrides(extents)};
    value.fragments.push_back(std::move(fragment));
  }
  const v1::Registration said = ToProto(value);
  *registration.mutable_parameters() = said.parameters();
  *registration.mutable_fragments() = said.fragments();
  return registration;
}

Job MakeJob(const Shape& shape) {
  Job job;
  GatheredRegistrations gathered;
  for (int32_t rank = 0; rank < shape.nodes * shape.lanes; ++rank) {
    job.registrations.push_back(Pack(RegistrationOf(shape, rank)));
    gathered.Set(job.registrations.back());
  }
  job.wire.set_job("bench");
  job.wire.set_nodes(shape.nodes);
  job.wire.set_lanes_per_node(shape.lanes);
  if (!gathered.AddTo(job.wire).ok()) std::exit(1);
  job.planned = Must(MakePlannedJob(job.wire));
  auto plan = std::make_shared<Plan>(*job.planned.plan);
  std::vector<int32_t> in_bucket(plan->buckets);
  for (Unit& unit : plan->units) {
    const int32_t rail = in_bucket[unit.bucket.value()]++ % shape.lanes;
    const int32_t node = (unit.id.value() / shape.lanes) % shape.nodes;
    unit.owner = LaneId(node * shape.lanes + rail);
  }
  job.planned.plan = plan;
  for (int32_t lane = 0; lane < shape.lanes; ++lane) {
    job.programs.push_back(Must(MakeLaneProgram(*job.planned.inputs, *plan, LaneId(lane))));
  }
  return job;
}

// The messages, bytes and times of one step.
struct StepFigures {
  int64_t up = 0;  // messages of nodes but the coordinating one
  int64_t down = 0;
  int64_t bytes_up = 0;
  int64_t bytes_down = 0;
  nanoseconds machines{0};     // the coordinator's
  nanoseconds own{0};          // those of its node as a member
  nanoseconds wire{0};         // there: reading and writing messages
  nanoseconds decision{0};     // machines, from the last vote to the decision
  std::vector<int64_t> added;  // of each GO at each node
  std::vector<int64_t> added_publish;
  int64_t added_last = 0;  // before the last GO to collect, of all nodes
  int64_t added_last_publish = 0;
};

class SimulatedGroup {
 public:
  SimulatedGroup(const Shape& shape, const Job& job) : shape_(shape), job_(job) {
    GroupJobOptions options;
    options.nodes = shape.nodes;
    options.lanes_per_node = shape.lanes;
    coordinator_.emplace(options);
    for (int32_t node = 0; node < shape.nodes; ++node) {
      Node& made = nodes_.emplace_back();
      made.rank = node;
      made.latency = node == 0 ? 0 : Pick(50 * kUs, 150 * kUs);
      std::vector<TrainerRank> ranks;
      for (int32_t i = 0; i < shape.lanes; ++i) ranks.emplace_back(node * shape.lanes + i);
      made.reports.OnPlan(job.programs, shape.lanes);
      made.steps = std::make_unique<StepMember>(ranks, shape.lanes, StepId(0));
    }
  }

  std::vector<StepFigures> Run() {
    Begin();
    while (!time_.empty() && static_cast<int32_t>(figures_.size()) <= kNotCounted + shape_.steps)
      time_.RunNext();
    figures_.resize(kNotCounted + shape_.steps);
    return {figures_.begin() + kNotCounted, figures_.end()};
  }

 private:
  struct Node {
    int32_t rank = 0;
    int64_t latency = 0;
    OutgoingReports reports{/*gathers=*/true};
    std::unique_ptr<StepMember> steps;
    std::vector<int32_t> to_collect;  // by rail
    int64_t stream_up = 0;            // when the last message on it arrives
    int64_t stream_down = 0;
    std::optional<TimePoint> timer;
  };
  // When each bucket could go, on each rail, if nothing were gathered: as it would be heard at the
  // coordinator.
  using Ideal = std::vector<std::vector<int64_t>>;

  int64_t Pick(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  [[nodiscard]] TimePoint Now() const { return TimePoint(nanoseconds(time_.now())); }
  StepFigures& figures() { return figures_.back(); }

  // Runs the work of the coordinating node, and has its time pass. Returns when it ends.
  template <typename Work>
  int64_t OnCoordinator(nanoseconds StepFigures::*counts, Work work) {
    const Clock::time_point begin = Clock::now();
    work();
    const nanoseconds took = Clock::now() - begin;
    figures().*counts += took;
    busy_until_ = std::max(busy_until_, time_.now()) + took.count();
    return busy_until_;
  }

  void Begin() {
    figures_.emplace_back();
    const auto tell = [&](int32_t node, const v1::MemberMessage& message) {
      return coordinator_->OnMessage(Now(), node, message);
    };
    (void)coordinator_->OnFormed(Now(), 1);
    for (const Node& node : nodes_) {
      v1::MemberMessage state;
      state.mutable_member_state()->set_epoch(1);
      (void)tell(node.rank, state);
    }
    GroupActions actions;
    for (const bool registers : {false, true}) {
      for (size_t rank = 0; rank < job_.registrations.size(); ++rank) {
        const auto node = static_cast<int32_t>(rank) / shape_.lanes;
        v1::MemberMessage message;
        if (registers) {
          *message.mutable_registration() = job_.registrations[rank];
        } else {
          v1::RankSession& session = *message.mutable_rank_session();
          session.set_rank(static_cast<int32_t>(rank));
          session.set_node(node);
          session.set_job("bench");
          session.set_world_size(static_cast<int32_t>(job_.registrations.size()));
          session.set_incarnation(1);
        }
        actions = tell(node, message);
      }
    }
    if (actions.plans.empty()) std::exit(1);
    (void)coordinator_->OnPlanMade(Now(), actions.plans.front(), job_.planned);
    for (const Node& node : nodes_) {
      v1::MemberMessage ready;
      ready.mutable_plan_ready()->set_node(node.rank);
      ready.mutable_plan_ready()->set_digest(job_.planned.plan->digest);
      ready.mutable_plan_ready()->set_epoch(1);
      actions = tell(node.rank, ready);
    }
    Perform(std::move(actions), 0);
  }

  // ---- the coordinator ----

  // Its messages leave it at `at`.
  void Perform(GroupActions actions, int64_t at) {
    for (Addressed& addressed : actions.messages) {
      const auto message =
          std::make_shared<const v1::CoordinatorMessage>(std::move(addressed.message));
      if (message->has_waiting()) continue;
      std::string bytes;
      for (Node& node : nodes_) {
        if (addressed.node.value_or(node.rank) != node.rank) continue;
        if (node.rank != 0) {  // as a stream writes it, for each node
          at = OnCoordinator(&StepFigures::wire, [&] { bytes = message->SerializeAsString(); });
          ++figures().down;
          figures().bytes_down += static_cast<int64_t>(bytes.size());
        }
        node.stream_down = std::max(node.stream_down, at + node.latency);
        time_.At(node.stream_down, [this, &node, message] { Hear(node, *message); });
      }
    }
    SetTimer();
  }
  void SetTimer() {
    const std::optional<TimePoint> due = coordinator_->due();
    if (!due.has_value() || due == timer_) return;
    timer_ = due;
    time_.At(std::max(time_.now(), due->time_since_epoch().count()), [this] {
      timer_.reset();
      Wake();
    });
  }
  void Wake() {
    if (busy_until_ > time_.now()) return time_.At(busy_until_, [this] { Wake(); });
    GroupActions actions;
    const int64_t at =
        OnCoordinator(&StepFigures::machines, [&] { actions = coordinator_->OnDue(Now()); });
    Perform(std::move(actions), at);
  }
  void CoordinatorHears(int32_t from, std::shared_ptr<const std::string> bytes) {
    if (busy_until_ > time_.now()) {  // in the order of their coming
      return time_.At(busy_until_, [this, from, bytes] { CoordinatorHears(from, bytes); });
    }
    v1::MemberMessage message;
    const auto parse = [&] { (void)message.ParseFromString(*bytes); };
    if (from == 0) {
      parse();
    } else {
      OnCoordinator(&StepFigures::wire, parse);
    }
    GroupActions actions;
    const Clock::time_point begin = Clock::now();
    const int64_t at = OnCoordinator(
        &StepFigures::machines, [&] { actions = coordinator_->OnMessage(Now(), from, message); });
    if (std::any_of(actions.messages.begin(), actions.messages.end(),
                    [](const Addressed& a) { return a.message.has_decision(); })) {
      figures().decision = Clock::now() - begin;
    }
    Perform(std::move(actions), at);
  }

  // ---- a node ----

  // Its machines: on the coordinating node their time counts.
  template <typename Work>
  void OnNode(const Node& node, Work work) {
    if (node.rank == 0) {
      OnCoordinator(&StepFigures::own, work);
    } else {
      work();
    }
  }
  void Send(Node& node, const OutgoingReports::Messages& messages) {
    for (const v1::MemberMessage& message : messages) {
      const auto bytes = std::make_shared<const std::string>(message.SerializeAsString());
      if (node.rank != 0) {
        ++figures().up;
        figures().bytes_up += static_cast<int64_t>(bytes->size());
      }
      node.stream_up = std::max(node.stream_up, time_.now() + node.latency);
      time_.At(node.stream_up, [this, &node, bytes] { CoordinatorHears(node.rank, bytes); });
    }
    const std::optional<TimePoint> due = node.reports.due();
    if (!due.has_value() || due == node.timer) return;
    node.timer = due;
    time_.At(std::max(time_.now(), due->time_since_epoch().count()), [this, &node] {
      OutgoingReports::Messages sent;
      OnNode(node, [&] { sent = node.reports.OnDue(Now()); });
      Send(node, sent);
    });
  }
  void Tell(Node& node, v1::MemberMessage message) {
    OutgoingReports::Messages sent;
    OnNode(node, [&] { sent = node.reports.Tell(std::move(message)); });
    Send(node, sent);
  }

  void Hear(Node& node, const v1::CoordinatorMessage& message) {
    if (message.has_open()) {
      const OpenAttempt open = FromProto(message.open());
      OnNode(node, [&] {
        node.steps->OnOpen(open);
        node.reports.OnOpen(Now(), open);
      });
      node.to_collect.assign(shape_.lanes, job_.planned.plan->buckets);
      if (node.rank == 0) Opened(open);
    } else if (message.has_goes()) {
      for (const v1::Go& go : message.goes().goes()) Went(node, Must(FromProto(go)));
    } else if (message.has_decision()) {
      const Decision decision = Must(FromProto(message.decision()));
      OnNode(node, [&] { node.steps->OnDecision(decision); });
      if (decision.verdict != Verdict::kCommit) {
        std::fprintf(stderr, "not committed: %s\n", decision.outcome.detail.c_str());
        std::exit(1);
      }
      if (node.rank == 0) Publish(decision.attempt);
    }
  }

  // ---- lanes and trainers ----

  // The whole group's backward pass, as it is going to be.
  void Opened(const OpenAttempt& open) {
    figures_.emplace_back();
    const int32_t buckets = job_.planned.plan->buckets;
    collected_.assign(shape_.lanes, std::vector<int64_t>(buckets, 0));
    for (Node& node : nodes_) {
      const int64_t begins = time_.now() + kForward + Pick(0, kMs);
      int64_t end = 0;
      for (int32_t b = 0; b < buckets; ++b) {
        for (int32_t rail = 0; rail < shape_.lanes; ++rail) {
          const int64_t at = begins + kBackward * (b + 1) / buckets + Pick(0, 50 * kUs);
          end = std::max(end, at);
          Report(node, at, rail, b, RailOperation::kCollect, open.attempt, collected_);
        }
      }
      for (int32_t i = 0; i < shape_.lanes; ++i) {
        const int32_t rank = node.rank * shape_.lanes + i;
        time_.At(end + Pick(100 * kUs, 300 * kUs), [this, &node, rank, open] {
          Submission submission;
          submission.rank = TrainerRank(rank);
          submission.attempt = open.attempt;
          submission.step = open.step;
          submission.scalars.groups.resize(kGroups);
          OnNode(node, [&] { (void)node.steps->OnSubmission(submission); });
          OutgoingReports::Messages sent;
          OnNode(node, [&] { sent = node.reports.OnSubmitted(Now(), ToProto(submission)); });
          Send(node, sent);
        });
      }
    }
    InOrder(collected_);
  }
  // A lane has nothing to do for buckets of others' units, and an update for its own.
  void Publish(Attempt attempt) {
    const int32_t buckets = job_.planned.plan->buckets;
    published_.assign(shape_.lanes, std::vector<int64_t>(buckets, 0));
    std::vector<std::vector<bool>> owned(shape_.nodes * shape_.lanes, std::vector<bool>(buckets));
    for (const Unit& unit : job_.planned.plan->units) {
      owned[unit.owner.value()][unit.bucket.value()] = true;
    }
    for (Node& node : nodes_) {
      for (int32_t rail = 0; rail < shape_.lanes; ++rail) {
        const int64_t begins = time_.now() + node.latency + Pick(100 * kUs, 300 * kUs);
        for (int32_t b = 0; b < buckets; ++b) {
          const bool mine = owned[node.rank * shape_.lanes + rail][b];
          Report(node, begins + (mine ? Pick(0, kUpdate) : 0), rail, b, RailOperation::kPublish,
                 attempt, published_);
        }
      }
    }
    InOrder(published_);
  }
  void Report(Node& node, int64_t at, int32_t rail, int32_t bucket, RailOperation operation,
              Attempt attempt, Ideal& ideal) {
    ideal[rail][bucket] = std::max(ideal[rail][bucket], at + node.latency);
    time_.At(at, [this, &node, rail, bucket, operation, attempt] {
      RailReady ready{.attempt = attempt, .rail = LaneIndex(rail), .operation = operation};
      Append(ready.buckets, {BucketId(bucket), 1});
      OutgoingReports::Messages sent;
      OnNode(node, [&] { sent = node.reports.OnReady(Now(), ready); });
      Send(node, sent);
    });
  }
  static void InOrder(Ideal& ideal) {
    for (std::vector<int64_t>& rail : ideal) {
      for (size_t b = 1; b < rail.size(); ++b) rail[b] = std::max(rail[b], rail[b - 1]);
    }
  }
  static int64_t LastOf(const Ideal& ideal) {
    int64_t last = 0;
    for (const std::vector<int64_t>& rail : ideal) last = std::max(last, rail.back());
    return last;
  }

  void Went(Node& node, const Go& go) {
    const bool collect = go.operation == RailOperation::kCollect;
    const Ideal& ideal = collect ? collected_ : published_;
    const int32_t rail = go.rail.value();
    for (const BucketRun& run : go.buckets) {
      for (int32_t b = run.first.value(); b < run.end().value(); ++b) {
        const int64_t added = time_.now() - (ideal[rail][b] + node.latency);
        (collect ? figures().added : figures().added_publish).push_back(added);
        if (b + 1 < job_.planned.plan->buckets) continue;
        int64_t& last = collect ? figures().added_last : figures().added_last_publish;
        last = std::max(last, time_.now() - (LastOf(ideal) + node.latency));
      }
      if (collect) node.to_collect[rail] -= run.count;
    }
    if (!collect || node.to_collect[rail] > 0) return;
    time_.After(300 * kUs, [this, &node, rail, attempt = go.attempt] {
      std::vector<UnitNorm> norms;
      for (const Unit& unit : job_.planned.plan->units) {
        if (unit.owner.value() != node.rank * shape_.lanes + rail) continue;
        norms.push_back({unit.id, 0, {1.0}, unit.first_element});
      }
      std::optional<std::vector<UnitNorm>> vote_norms;
      OnNode(node, [&] {
        vote_norms = node.steps->OnGathered(attempt, LaneIndex(rail), std::move(norms));
      });
      if (!vote_norms.has_value()) return;
      v1::MemberMessage message;
      v1::Vote& vote = *message.mutable_vote();
      vote.set_attempt(attempt.value());
      vote.set_node(node.rank);
      vote.set_plan_digest(job_.planned.plan->digest);
      *vote.mutable_norms() = ToProto(*vote_norms);
      Tell(node, std::move(message));
    });
  }

  const Shape shape_;
  const Job& job_;
  EventQueue time_;
  std::mt19937_64 random_{1};
  std::optional<GroupJob> coordinator_;
  std::deque<Node> nodes_;
  int64_t busy_until_ = 0;
  std::optional<TimePoint> timer_;
  Ideal collected_;
  Ideal published_;
  std::vector<StepFigures> figures_;
};

struct Summary {
  double p50 = 0;
  double most = 0;
};
Summary Summarise(std::vector<int64_t> values) {
  if (values.empty()) return {};
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return {static_cast<double>(*middle) / kMs,
          static_cast<double>(*std::max_element(values.begin(), values.end())) / kMs};
}

double Ms(nanoseconds time) { return std::chrono::duration<double, std::milli>(time).count(); }

void Print(const Shape& shape, const std::vector<StepFigures>& steps) {
  std::printf("%5s %8s %8s %9s %9s | %9s %6s %9s | %8s %8s %8s | %8s %8s %8s\n", "#step", "up",
              "down", "bytes up", "down", "machines", "own", "messages", "GO p50", "most", "last",
              "publish", "most", "last");
  std::printf("%5s %8s %8s %9s %9s | %9s %6s %9s | %8s %8s %8s | %8s %8s %8s\n", "#", "/node",
              "/node", "/node", "/node", "(ms)", "(ms)", "(ms)", "(ms)", "(ms)", "(ms)", "(ms)",
              "(ms)", "(ms)");
  const auto remote = static_cast<double>(shape.nodes - 1);
  for (size_t i = 0; i < steps.size(); ++i) {
    const StepFigures& step = steps[i];
    const Summary collect = Summarise(step.added);
    const Summary publish = Summarise(step.added_publish);
    std::printf(
        "%5zu %8.1f %8.1f %9.0f %9.0f | %9.2f %6.2f %9.2f | %8.2f %8.2f %8.2f | %8.2f %8.2f "
        "%8.2f\n",
        i + 1, static_cast<double>(step.up) / remote, static_cast<double>(step.down) / remote,
        static_cast<double>(step.bytes_up) / remote, static_cast<double>(step.bytes_down) / remote,
        Ms(step.machines), Ms(step.own), Ms(step.wire), collect.p50, collect.most,
        static_cast<double>(step.added_last) / kMs, publish.p50, publish.most,
        static_cast<double>(step.added_last_publish) / kMs);
    std::printf("# decision %.3f ms after the last vote\n", Ms(step.decision));
  }
}

}  // namespace
}  // namespace dmuond::scheduler

int main(int argc, char** argv) {
  // The simulation frees many small blocks, which glibc would merge when the machines ask for a
  // large one.
  ::mallopt(M_MXFAST, 0);
  dmuond::scheduler::Shape shape;
  int32_t* const numbers[] = {&shape.nodes, &shape.lanes, &shape.buckets, &shape.steps};
  for (int i = 1; i < argc && i <= 4; ++i) *numbers[i - 1] = std::atoi(argv[i]);
  const dmuond::scheduler::Job job = dmuond::scheduler::MakeJob(shape);
  std::printf(
      "# %d nodes of %d lanes and as many trainers, %d buckets over 100 ms, updates over 10 ms\n",
      shape.nodes, shape.lanes, job.planned.plan->buckets);
  dmuond::scheduler::Print(shape, dmuond::scheduler::SimulatedGroup(shape, job).Run());
  return 0;
}
