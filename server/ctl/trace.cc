// dmuonctl trace: what the lanes of all nodes do in the next steps, on one clock, as a file for
// Perfetto (ui.perfetto.dev) and chrome://tracing: Chrome's trace event format, its JSON object
// form.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/ctl/connection.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {
namespace {

// Of each lane.
enum Track : int { kSteps, kBatches, kRail, kTracks };

class Events {
 public:
  // Moments of the node become those of the asked node's Unix time.
  void BeginNode(const v1::TraceStepsReply& traced, const v1::TraceStepsReply::Node& node) {
    node_ = node.node();
    offset_ = traced.unix_us() - traced.monotonic_us() - node.clock_ahead_us();
    Name("process_name", 0, absl::StrCat("node ", node_, ", job ", traced.job()));
  }
  void AddLane(int32_t lane) {
    Name("thread_name", Id(lane, kSteps), absl::StrCat("lane ", lane));
    Name("thread_name", Id(lane, kBatches), absl::StrCat("lane ", lane, ", batches"));
    Name("thread_name", Id(lane, kRail), absl::StrCat("lane ", lane, ", rail"));
  }
  void Add(const v1::LaneTrace& trace) {
    const int steps = Id(trace.lane(), kSteps);
    const Json about = {{"step", trace.step()}, {"attempt", trace.attempt()}};
    Span("collect", steps, trace.first_ready_us(), trace.gathered_us(), about);
    Span("decide", steps, trace.gathered_us(), trace.decided_us(), about);
    Span(trace.committed() ? "update" : "skip", steps, trace.decided_us(), trace.updated_us(),
         about);
    Span("publish", steps, trace.updated_us(), trace.published_us(), about);
    Moment("last gradient", steps, trace.last_ready_us(), about);
    Moment("last submission", steps, trace.last_submit_us(), about);
    for (const v1::LaneTrace::Batch& batch : trace.batches()) {
      const std::string what = batch.rows() > 0 ? absl::StrCat(batch.rows(), " x ", batch.cols())
                                                : std::string("pieces");
      Span(absl::StrCat(what, ", ", batch.units()), Id(trace.lane(), kBatches), batch.begin_us(),
           batch.end_us(), about);
    }
    // Several are under way at once.
    for (const v1::LaneTrace::Transfer& transfer : trace.transfers()) {
      const std::string name =
          absl::StrCat(transfer.publishes() ? "weights" : "sums", ", bucket ", transfer.bucket());
      Json event = Event("b", name, Id(trace.lane(), kRail), transfer.begin_us());
      event["cat"] = "rail";
      event["id"] = ++transfers_;
      event["args"] = about;
      events_.push_back(event);
      event["ph"] = "e";
      event["ts"] = transfer.end_us() + offset_;
      events_.push_back(std::move(event));
    }
  }
  [[nodiscard]] Json Take() {
    return {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events_)}};
  }

 private:
  static int Id(int32_t lane, Track track) { return lane * kTracks + track + 1; }
  [[nodiscard]] Json Event(const char* kind, const std::string& name, int id,
                           int64_t moment) const {
    return {{"ph", kind},   {"name", name}, {"cat", "dmuond"},
            {"pid", node_}, {"tid", id},    {"ts", moment + offset_}};
  }
  void Name(const char* what, int id, const std::string& name) {
    events_.push_back(
        {{"ph", "M"}, {"name", what}, {"pid", node_}, {"tid", id}, {"args", {{"name", name}}}});
  }
  // Nothing where one of its ends did not happen.
  void Span(const std::string& name, int id, int64_t begin, int64_t end, const Json& about) {
    if (begin == 0 || end < begin) return;
    Json event = Event("X", name, id, begin);
    event["dur"] = end - begin;
    event["args"] = about;
    events_.push_back(std::move(event));
  }
  void Moment(const std::string& name, int id, int64_t moment, const Json& about) {
    if (moment == 0) return;
    Json event = Event("i", name, id, moment);
    event["s"] = "t";
    event["args"] = about;
    events_.push_back(std::move(event));
  }

  int32_t node_ = 0;
  int64_t offset_ = 0;
  int64_t transfers_ = 0;
  Json events_ = Json::array();
};

}  // namespace

int RunTrace(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("trace takes no arguments");
  if (options.output.empty()) return FailUsage("trace needs a file to write: -o trace.json");
  auto request = AboutJob<v1::TraceStepsRequest>(options);
  request.set_steps(options.steps);
  request.set_timeout_ms(absl::ToInt64Milliseconds(options.trace_timeout));
  request.set_this_node(options.this_node);
  Options patient = options;
  patient.timeout += options.trace_timeout;
  const auto traced = Call(patient, &v1::Admin::Stub::TraceSteps, request);
  if (!traced.ok()) return Fail(traced.status());
  Events events;
  std::set<int32_t> lanes;
  size_t of_lanes = 0;
  int nodes = 0;
  int64_t clocks_within_us = 0;
  for (const v1::TraceStepsReply::Node& node : traced->nodes()) {
    if (!node.error().empty()) {
      std::cerr << "node " << node.node() << " tells nothing: " << node.error() << "\n";
      continue;
    }
    events.BeginNode(*traced, node);
    for (const v1::LaneTrace& trace : node.lanes()) {
      if (lanes.insert(trace.lane()).second) events.AddLane(trace.lane());
      events.Add(trace);
    }
    of_lanes += node.lanes_size();
    clocks_within_us = std::max(clocks_within_us, node.clock_error_us());
    ++nodes;
  }
  if (lanes.empty()) {
    return Fail(absl::DeadlineExceededError("no step was published in time, and nothing written"));
  }
  std::ofstream file(options.output);
  file << events.Take().dump() << "\n";
  if (!file.flush()) {
    return Fail(absl::UnavailableError(absl::StrCat(options.output, " cannot be written")));
  }
  if (options.json) {
    PrintJson({{"file", options.output},
               {"steps", of_lanes / lanes.size()},
               {"lanes", lanes.size()},
               {"nodes", nodes},
               {"clocks_within_us", clocks_within_us}});
    return kExitOk;
  }
  std::cout << of_lanes / lanes.size() << " of " << options.steps << " steps, of " << lanes.size()
            << " lanes";
  if (nodes > 1)
    std::cout << " of " << nodes << " nodes, clocks within " << clocks_within_us << " us";
  std::cout << ": " << options.output << "\n";
  return kExitOk;
}

}  // namespace dmuond::server::ctl
