#include "server/daemon/calls/trace_calls.h"

#include <chrono>
#include <future>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dmuond/wire/start_thread.h"
#include "server/common/errors.h"
#include "server/daemon/calls/admin_calls.h"
#include "server/daemon/group/peer_links.h"

namespace dmuond::server {
namespace {

using scheduler::NodeJob;

constexpr int32_t kStepsMax = 1000;
constexpr int64_t kTimeoutMaxMs = 600'000;
// So many steps may begin before all nodes have heard that they are to trace the later ones.
constexpr uint64_t kStepsToTell = 2;

absl::Status CheckRange(int32_t steps, int64_t timeout_ms) {
  if (steps >= 1 && steps <= kStepsMax && timeout_ms >= 1 && timeout_ms <= kTimeoutMaxMs) {
    return absl::OkStatus();
  }
  return Error(
      absl::StatusCode::kInvalidArgument, "TRACE_INVALID",
      Say("a trace of ", Named("steps", steps), " steps within ", Named("timeout_ms", timeout_ms),
          " ms: 1 to ", kStepsMax, " steps, within 1 to ", kTimeoutMaxMs, " ms"));
}

// Another node's lanes, on a clock that is known.
v1::TraceStepsReply::Node TraceOther(PeerLinks& peers, int32_t node,
                                     const v1::TraceNodeRequest& request,
                                     const std::stop_token& stop) {
  v1::TraceStepsReply::Node traced;
  traced.set_node(node);
  absl::StatusOr<std::vector<v1::LaneTrace>> lanes = peers.TraceNode(node, request, stop);
  absl::StatusOr<ClockAhead> clock = lanes.ok() ? peers.ReadClock(node) : lanes.status();
  if (!clock.ok()) {
    traced.set_error(std::string(clock.status().message()));
    return traced;
  }
  for (v1::LaneTrace& lane : *lanes) *traced.add_lanes() = std::move(lane);
  traced.set_clock_ahead_us(clock->ahead_us);
  traced.set_clock_error_us(clock->error_us);
  return traced;
}

}  // namespace

absl::StatusOr<v1::TraceStepsReply> TraceCalls::TraceSteps(const v1::TraceStepsRequest& request,
                                                           const Core::Cancelled& cancelled) {
  absl::Status range = CheckRange(request.steps(), request.timeout_ms());
  if (!range.ok()) return range;
  v1::TraceNodeRequest of_node;
  of_node.set_place(core_.place);
  of_node.set_steps(request.steps());
  of_node.set_timeout_ms(request.timeout_ms());
  v1::TraceStepsReply reply;
  v1::TraceStepsReply::Node& here = *reply.add_nodes();
  here.set_node(core_.options.node);
  std::stop_source stop;
  std::vector<std::future<v1::TraceStepsReply::Node>> others;
  std::vector<std::thread> threads;
  absl::StatusOr<std::vector<v1::LaneTrace>> lanes;
  {
    StateLock lock(core_.mutex);
    const NodeJob& job = core_.held_job();
    if (!job.exists() || job.plan() == nullptr) return NoPlan();
    reply.set_job(job.name());
    const bool group = core_.peers != nullptr && !request.this_node();
    of_node.set_job_incarnation(job.wire().job_incarnation());
    if (job.steps() != nullptr) {
      of_node.set_after_attempt(job.steps()->open().attempt.value() + (group ? kStepsToTell : 0));
    }
    for (int32_t node = 0; group && node < core_.options.nodes; ++node) {
      if (node == core_.options.node) continue;
      std::packaged_task<v1::TraceStepsReply::Node()> trace(
          [this, node, of_node, token = stop.get_token()] {
            return TraceOther(*core_.peers, node, of_node, token);
          });
      std::future<v1::TraceStepsReply::Node> traced = trace.get_future();
      absl::StatusOr<std::thread> thread = wire::StartThread("a node's trace", std::move(trace));
      if (!thread.ok()) {
        v1::TraceStepsReply::Node& missing = *reply.add_nodes();
        missing.set_node(node);
        missing.set_error(std::string(thread.status().message()));
        continue;
      }
      others.push_back(std::move(traced));
      threads.push_back(*std::move(thread));
    }
    lanes = Trace(of_node, cancelled);
  }
  if (!lanes.ok()) stop.request_stop();
  for (std::thread& thread : threads) thread.join();
  for (std::future<v1::TraceStepsReply::Node>& other : others) *reply.add_nodes() = other.get();
  if (!lanes.ok()) return lanes.status();
  for (v1::LaneTrace& lane : *lanes) *here.add_lanes() = std::move(lane);
  reply.set_monotonic_us(MonotonicUs());
  reply.set_unix_us(std::chrono::duration_cast<std::chrono::microseconds>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count());
  return reply;
}

absl::StatusOr<std::vector<v1::LaneTrace>> TraceCalls::TraceForPeer(
    const v1::TraceNodeRequest& request, const Core::Cancelled& cancelled) {
  absl::Status range = CheckRange(request.steps(), request.timeout_ms());
  if (!range.ok()) return range;
  StateLock lock(core_.mutex);
  const NodeJob& job = core_.held_job();
  if (!job.exists() || job.plan() == nullptr ||
      job.wire().job_incarnation() != request.job_incarnation()) {
    return NoPlan();
  }
  return Trace(request, cancelled);
}

absl::StatusOr<std::vector<v1::LaneTrace>> TraceCalls::Trace(const v1::TraceNodeRequest& request,
                                                             const Core::Cancelled& cancelled) {
  if (core_.traces.has_value()) {
    return Error(absl::StatusCode::kAborted, "TRACE_RUNS", "another trace is under way; ask again");
  }
  const NodeJob& job = core_.held_job();
  const uint64_t number = job.number();
  const uint64_t generation = core_.lanes.generation();
  const size_t wanted = static_cast<size_t>(request.steps()) * core_.options.lanes;
  core_.traces.emplace();
  v1::LaneCommand command;
  command.mutable_trace()->set_steps(request.steps());
  command.mutable_trace()->set_after_attempt(request.after_attempt());
  core_.lanes.Broadcast(command);
  const absl::StatusOr<bool> come = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        return core_.traces->size() >= wanted || job.number() != number ||
               core_.lanes.generation() != generation;
      },
      std::chrono::steady_clock::now() + std::chrono::milliseconds(request.timeout_ms()),
      cancelled);
  std::vector<v1::LaneTrace> lanes = std::move(*core_.traces);
  core_.traces.reset();
  command.mutable_trace()->Clear();
  core_.lanes.Broadcast(command);
  if (!come.ok()) return come.status();
  return lanes;
}

}  // namespace dmuond::server
