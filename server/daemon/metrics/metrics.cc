#include "server/daemon/metrics/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/daemon/metrics/seen_job.h"

namespace dmuond::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;
using SteadyTime = std::chrono::steady_clock::time_point;

double Seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

// Prometheus wants moments, not ages: the picture's age adds to those.
double UnixTime(SteadyTime moment) {
  const auto age = std::chrono::steady_clock::now() - moment;
  return Seconds(std::chrono::system_clock::now().time_since_epoch() - age);
}

// Metrics of one name stand together, whoever adds them. Each gets the label of the group.
class Metrics {
 public:
  explicit Metrics(const std::string& group) : group_{"group", group} {}

  void Gauge(const char* name, const char* help, const Labels& labels, double value) {
    Add(name, help, MetricType::Gauge, labels).gauge.value = value;
  }
  void Counter(const char* name, const char* help, const Labels& labels, double value) {
    Add(name, help, MetricType::Counter, labels).counter.value = value;
  }
  void Histogram(const char* name, const char* help, const Labels& labels,
                 const scheduler::TimeHistogram& times) {
    ClientMetric::Histogram& histogram = Add(name, help, MetricType::Histogram, labels).histogram;
    uint64_t count = 0;
    for (size_t i = 0; i < times.kBounds.size(); ++i) {
      count += static_cast<uint64_t>(times.counts[i]);
      histogram.bucket.push_back({count, times.kBounds[i]});
    }
    histogram.sample_count = count + static_cast<uint64_t>(times.counts.back());
    histogram.sample_sum = times.sum_s;
  }
  // 1 for the state that holds, 0 for the others.
  void State(const char* name, const char* help, const Labels& labels,
             const std::vector<const char*>& states, const std::string& holds) {
    for (const char* state : states) {
      Labels with = labels;
      with.push_back({"state", state});
      Gauge(name, help, with, holds == state ? 1 : 0);
    }
  }
  [[nodiscard]] std::string Text() const {
    return prometheus::TextSerializer().Serialize(families_);
  }

 private:
  ClientMetric& Add(const char* name, const char* help, MetricType type, const Labels& labels) {
    const auto [found, is_new] = by_name_.emplace(name, families_.size());
    if (is_new) families_.push_back({name, help, type, {}});
    ClientMetric& metric = families_[found->second].metric.emplace_back();
    metric.label.reserve(labels.size() + 1);
    metric.label.push_back(group_);
    metric.label.insert(metric.label.end(), labels.begin(), labels.end());
    return metric;
  }

  const ClientMetric::Label group_;
  std::vector<MetricFamily> families_;
  std::map<std::string, size_t> by_name_;
};

// So many of `things` are in each of the states.
template <typename Things>
std::map<std::string, int> CountStates(const Things& things,
                                       std::initializer_list<const char*> states) {
  std::map<std::string, int> counts;
  for (const char* state : states) counts[state] = 0;
  for (const auto& thing : things) ++counts[thing.state()];
  return counts;
}

void AddDaemon(const std::vector<Core::Seen>& places, SteadyTime started, Metrics& metrics) {
  const v1::GetStatusReply& status = places.front().view->status;
  SteadyTime taken = SteadyTime::max();
  StateMutex::Held lock_held;
  bool hangs = false;
  for (const Core::Seen& place : places) {
    const NodeView& view = *place.view;
    taken = std::min(taken, view.taken);
    lock_held.total += view.lock_held.total;
    lock_held.times += view.lock_held.times;
    lock_held.longest = std::max(lock_held.longest, view.lock_held.longest);
    hangs = hangs || !view.status.snapshot_dir_hangs().empty();
  }
  metrics.Gauge("dmuond_build_info", "1; the labels say what runs",
                {{"version", status.version()}, {"device_type", status.device_type()}}, 1);
  metrics.Gauge("dmuond_start_time_seconds", "Unix time at which the daemon began", {},
                UnixTime(started));
  metrics.Gauge("dmuond_picture_timestamp_seconds",
                "Unix time of the picture of the node that all this is read from; it stays behind "
                "where the core's lock is held",
                {}, UnixTime(taken));
  metrics.Counter("dmuond_core_lock_held_seconds_total",
                  "Time for which the core's locks were held, of all places for jobs", {},
                  Seconds(lock_held.total));
  metrics.Counter("dmuond_core_lock_taken_total", "How often one of the core's locks was taken", {},
                  static_cast<double>(lock_held.times));
  metrics.Gauge("dmuond_core_lock_held_longest_seconds",
                "The longest time for which one of them was held since the daemon began", {},
                Seconds(lock_held.longest));
  metrics.Gauge("dmuond_snapshot_directory_hangs", "1: an operation in --snapshot_dir hangs", {},
                hangs ? 1 : 0);
}

void AddGroup(const NodeView& view, Metrics& metrics) {
  const v1::GetStatusReply& status = view.status;
  metrics.Gauge("dmuond_group_nodes", "Daemons that make the group", {}, status.nodes());
  metrics.Gauge("dmuond_group_epoch", "Epoch of the group; 0: it has not formed", {},
                status.epoch());
  metrics.Gauge("dmuond_group_formed", "1: the group has formed, as this daemon sees it", {},
                status.epoch() != 0 ? 1 : 0);
  metrics.Gauge("dmuond_group_draining", "1: this daemon is leaving", {},
                status.group_state() == "draining" ? 1 : 0);
  if (status.node() == 0) {
    metrics.Gauge("dmuond_group_missing_nodes", "Nodes that have not joined; node 0 alone has it",
                  {}, status.missing_nodes_size());
  }
  for (const auto& [node, heard] : view.heard) {
    metrics.Gauge("dmuond_group_heard_timestamp_seconds",
                  "Unix time at which another daemon was heard of last: on node 0 every member, "
                  "elsewhere node 0",
                  {{"node", absl::StrCat(node)}}, UnixTime(heard));
  }
  if (view.certificates_expire.has_value()) {
    metrics.Gauge("dmuond_certificate_expiry_timestamp_seconds",
                  "Unix time at which the first of the certificates between daemons expires", {},
                  absl::ToDoubleSeconds(*view.certificates_expire - absl::UnixEpoch()));
  }
  const char* const name = "dmuond_group_breaks_total";
  const char* const help = "How often the group broke, by whom it lost";
  if (status.node() == 0) {
    metrics.Counter(name, help, {{"lost", "member"}},
                    static_cast<double>(view.counters.members_gone));
  } else {
    metrics.Counter(name, help, {{"lost", "coordinator"}},
                    static_cast<double>(view.counters.coordinator_gone));
  }
}

void AddDropped(const std::vector<Core::Seen>& places, Metrics& metrics) {
  for (size_t reason = 0; reason < scheduler::kDropReasons.size(); ++reason) {
    int64_t dropped = 0;
    for (const Core::Seen& place : places) dropped += place.view->counters.dropped[reason];
    metrics.Counter("dmuond_messages_dropped_total",
                    "Messages between daemons that changed nothing, because they were of another "
                    "epoch or attempt. Some come whenever an epoch or attempt ends",
                    {{"reason", scheduler::kDropReasons[reason]}}, static_cast<double>(dropped));
  }
}

void AddLanes(const std::vector<Core::Seen>& places, Metrics& metrics) {
  int64_t ended = 0;
  int64_t hung = 0;
  for (const Core::Seen& place : places) {
    ended += place.view->counters.lanes_ended;
    hung += place.view->counters.lanes_hung;
  }
  for (const auto& [reason, count] : {std::pair{"ended", ended}, std::pair{"hung", hung}}) {
    metrics.Counter("dmuond_lane_losses_total",
                    "Lanes that ended while they were needed, and lanes that hung and were killed",
                    {{"reason", reason}}, static_cast<double>(count));
  }
  for (const SeenJob& job : JobsOf(places)) {
    const ClientMetric::Label name{"job", job.status.name()};
    for (const auto& [state, count] : CountStates(job.lanes, {"gone", "ready", "starting"})) {
      metrics.Gauge("dmuond_lanes", "Lanes of this node", {name, {"state", state}}, count);
    }
    for (const v1::LaneStatus& lane : job.lanes) {
      const ClientMetric::Label index{"lane", absl::StrCat(lane.lane())};
      metrics.Counter("dmuond_lane_restarts_total",
                      "Processes that took the lane's place since the job began here",
                      {name, index}, lane.restarts());
      metrics.Gauge("dmuond_lane_rail_silent_seconds",
                    "No byte has crossed the lane's rail for so long, though some should",
                    {name, index}, static_cast<double>(lane.rail_silent_ms()) * 1e-3);
      metrics.Gauge("dmuond_lane_load_seconds", "The planner's estimate of the lane's update",
                    {name, index}, lane.load_us() * 1e-6);
      metrics.Gauge("dmuond_memory_bytes",
                    "Memory of a lane: optimizer state, and staging of gradients and weights",
                    {name, index, {"kind", "state"}}, static_cast<double>(lane.state_bytes()));
      metrics.Gauge("dmuond_memory_bytes", "", {name, index, {"kind", "staging"}},
                    static_cast<double>(lane.staging_bytes()));
    }
  }
}

void AddEnds(const std::vector<Core::Seen>& places, Metrics& metrics) {
  for (size_t i = 0; i < scheduler::JobEnds::kReasons.size(); ++i) {
    int64_t count = 0;
    for (const Core::Seen& place : places) count += place.view->ends.counts[i];
    metrics.Counter("dmuond_jobs_ended_total", "Jobs that have ended on this node, by why",
                    {{"reason", std::string(scheduler::JobEnds::kReasons[i])}},
                    static_cast<double>(count));
  }
}

void AddRpcs(const RpcCounts::Counts& counts, Metrics& metrics) {
  for (const auto& [call, count] : counts.calls) {
    const auto& [method, code] = call;
    metrics.Counter(
        "dmuond_rpcs_total", "Calls that were answered, of trainers, dmuonctl and peers",
        {{"method", method}, {"code", absl::StatusCodeToString(code)}}, static_cast<double>(count));
  }
  for (const auto& [reason, count] : counts.refusals) {
    metrics.Counter("dmuond_refusals_total", "Calls that ended with an error, by its reason",
                    {{"reason", reason}}, static_cast<double>(count));
  }
}

void AddSteps(const SeenJob& job, const Labels& labels, Metrics& metrics) {
  const v1::JobStatus& status = job.status;
  const scheduler::JobFigures& figures = job.figures;
  metrics.Gauge("dmuond_job_last_committed_step", "Newest committed step; 0: none", labels,
                static_cast<double>(status.last_committed_step()));
  if (figures.began.has_value()) {
    metrics.Gauge("dmuond_job_last_progress_timestamp_seconds",
                  "Unix time at which a step was last committed or skipped, or the job began here",
                  labels, UnixTime(figures.progressed.value_or(*figures.began)));
  }
  if (figures.opened.has_value()) {
    metrics.Gauge("dmuond_job_attempt_opened_timestamp_seconds",
                  "Unix time since which the present attempt is open", labels,
                  UnixTime(*figures.opened));
  }
  for (const auto& [outcome, count] :
       {std::pair{"committed", figures.committed_steps},
        std::pair{"skipped", figures.skipped_steps}, std::pair{"aborted", figures.aborted_attempts},
        std::pair{"rolled_back", figures.rollbacks}}) {
    Labels with = labels;
    with.push_back({"outcome", outcome});
    metrics.Counter("dmuond_job_steps_total",
                    "Attempts by what became of them, since the job began here", with,
                    static_cast<double>(count));
  }
  for (size_t i = 0; i < scheduler::kPhases; ++i) {
    Labels with = labels;
    with.push_back({"phase", scheduler::kPhaseNames[i]});
    metrics.Histogram("dmuond_job_phase_seconds",
                      "How long each part of a step took, of this node's slowest lane", with,
                      figures.phases[i]);
  }
  metrics.Counter("dmuond_job_rail_sent_bytes_total",
                  "Bytes that this node's lanes have sent to those of other nodes", labels,
                  static_cast<double>(figures.rail_bytes));
  metrics.Gauge("dmuond_job_gradient_norm", "Of the last decided step, before clipping", labels,
                figures.gradient_norm);
  metrics.Gauge("dmuond_job_clip_coefficient",
                "What gradients of the last decided step were multiplied with", labels,
                figures.clip_coefficient);
}

// Adds the least, the median and the largest value: labels by matrix would make ten thousand
// series.
void AddSpread(const char* name, const char* help, std::vector<double> values, const Labels& labels,
               Metrics& metrics) {
  if (values.empty()) return;
  // One that is not a number comes last, and is the largest.
  std::sort(values.begin(), values.end(),
            [](double a, double b) { return a < b || (std::isnan(b) && !std::isnan(a)); });
  for (const auto& [stat, value] :
       {std::pair{"min", values.front()}, std::pair{"median", values[values.size() / 2]},
        std::pair{"max", values.back()}}) {
    Labels with = labels;
    with.push_back({"stat", stat});
    metrics.Gauge(name, help, with, value);
  }
}

void AddMatrices(const SeenJob& job, const Labels& labels, Metrics& metrics) {
  std::vector<double> norms;
  std::vector<double> updates;
  for (const SeenMatrix& matrix : MatricesOf(job)) {
    norms.push_back(matrix.norm);
    if (matrix.update_rms.has_value()) updates.push_back(*matrix.update_rms);
  }
  AddSpread("dmuond_job_matrix_gradient_norm",
            "Of the gradients of the matrices that this node owns, before clipping; /statusz names "
            "those that stand out",
            std::move(norms), labels, metrics);
  AddSpread("dmuond_job_matrix_update_rms",
            "Root mean square of the last update of each matrix that this node owns, before the "
            "learning rate",
            std::move(updates), labels, metrics);
}

void AddSnapshots(const SeenJob& job, const Labels& labels, Metrics& metrics) {
  const scheduler::JobFigures& figures = job.figures;
  if (job.status.has_durable_step()) {
    metrics.Gauge("dmuond_job_durable_step", "Newest step in a snapshot; absent: none", labels,
                  static_cast<double>(job.status.durable_step()));
  }
  if (figures.began.has_value()) {
    metrics.Gauge("dmuond_job_last_snapshot_timestamp_seconds",
                  "Unix time at which a snapshot was last completed, or the job began here", labels,
                  UnixTime(figures.saved.value_or(*figures.began)));
  }
  for (const auto& [result, count] : {std::pair{"written", figures.snapshots_written},
                                      std::pair{"failed", figures.snapshots_failed},
                                      std::pair{"left_out", job.status.snapshots_left_out()}}) {
    Labels with = labels;
    with.push_back({"result", result});
    metrics.Counter("dmuond_job_snapshots_total",
                    "Snapshots since the job began here; left out: one fell due while another was "
                    "being written",
                    with, static_cast<double>(count));
  }
  metrics.Histogram("dmuond_job_snapshot_seconds",
                    "From the order to write a snapshot until it existed", labels,
                    figures.snapshot_times);
  metrics.Counter("dmuond_job_snapshot_written_bytes_total",
                  "Bytes of snapshots that this node has written", labels,
                  static_cast<double>(figures.snapshot_bytes));
}

void AddCheck(const SeenJob& job, const Labels& labels, Metrics& metrics) {
  const v1::JobCheck& check = job.status.check();
  if (check.compared_unix_ms() != 0) {
    metrics.Gauge("dmuond_job_replicas_checked_timestamp_seconds",
                  "Unix time at which all copies were last compared; absent: not yet", labels,
                  static_cast<double>(check.compared_unix_ms()) / 1e3);
  } else if (check.different() == 0) {
    return;
  }
  metrics.Gauge("dmuond_job_replica_differences",
                "Copies of state and weights that differed then, or in a check that ended early "
                "since",
                labels, static_cast<double>(check.different()));
}

void AddPlan(const SeenJob& job, const Labels& labels, Metrics& metrics) {
  if (job.planned.plan == nullptr) return;
  const scheduler::Plan& plan = *job.planned.plan;
  metrics.Gauge("dmuond_job_parameters", "Parameters of all routes", labels,
                static_cast<double>(job.planned.inputs->layout.parameters.size()));
  metrics.Gauge("dmuond_job_units", "Matrices and pieces that are updated as one", labels,
                static_cast<double>(plan.units.size()));
  metrics.Gauge("dmuond_job_plan_seconds", "How long this node took to make the plan", labels,
                job.planned_in_s);
  metrics.Gauge("dmuond_job_plan_imbalance",
                "Estimated update time of the slowest lane over the mean of all", labels,
                plan.quality.imbalance);
  metrics.Gauge("dmuond_job_plan_makespan_seconds", "Estimated update time of the slowest lane",
                labels, plan.quality.makespan_us * 1e-6);
}

void AddJob(const SeenJob& job, bool snapshots, Metrics& metrics) {
  const Labels labels = {{"job", job.status.name()}};
  metrics.State("dmuond_job_state", "1 for the state that the job is in", labels,
                {"registering", "preparing", "running", "waiting", "parked", "failed"},
                job.status.state());
  metrics.Gauge("dmuond_job_world_size", "Ranks of the job", labels, job.status.world_size());
  for (const auto& [state, count] :
       CountStates(job.status.trainers(), {"open", "registered", "attached", "submitted"})) {
    metrics.Gauge("dmuond_job_trainers", "Trainers of this node", {labels[0], {"state", state}},
                  count);
  }
  AddSteps(job, labels, metrics);
  AddMatrices(job, labels, metrics);
  if (snapshots) AddSnapshots(job, labels, metrics);
  AddCheck(job, labels, metrics);
  AddPlan(job, labels, metrics);
}

}  // namespace

std::string MetricsText(const std::vector<Core::Seen>& places, const std::string& group,
                        SteadyTime started, const RpcCounts::Counts& rpcs) {
  const NodeView& first = *places.front().view;
  Metrics metrics(group);
  AddDaemon(places, started, metrics);
  AddGroup(first, metrics);
  AddDropped(places, metrics);
  AddLanes(places, metrics);
  AddEnds(places, metrics);
  AddRpcs(rpcs, metrics);
  for (const SeenJob& job : JobsOf(places)) AddJob(job, first.snapshots, metrics);
  return metrics.Text();
}

}  // namespace dmuond::server
