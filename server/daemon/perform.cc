// How what NodeJob and GroupJob order is performed: by whom, and what comes back. Nothing here
// decides.
#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "scheduler/convert/convert.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/core.h"

namespace dmuond::server {
namespace node = scheduler::node;
namespace {

// Fault points of what the coordinator is about to say. It has decided, and nobody knows yet.
void AboutToSend(const v1::CoordinatorMessage& message) {
  if (message.has_open()) fault::FaultPoint("coordinator.open");
  if (message.has_goes()) fault::FaultPoint("coordinator.go");
  if (message.has_decision()) {
    fault::FaultPoint("coordinator.decided");
    fault::FaultPoint("coordinator.before_send");
  }
  if (message.has_reform()) fault::FaultPoint("coordinator.reform");
  if (message.has_roll_back()) fault::FaultPoint("coordinator.roll_back");
  if (message.has_republish()) fault::FaultPoint("coordinator.restart");
}

// The same of a member.
void AboutToSend(const v1::MemberMessage& message) {
  if (message.has_vote()) fault::FaultPoint("daemon.vote");
  if (message.has_member_state()) fault::FaultPoint("daemon.member_state");
  if (message.has_plan_ready() && message.plan_ready().error().empty()) {
    fault::FaultPoint("daemon.plan_ready");
  }
}

log::Level LevelOf(node::Note::Level level) {
  switch (level) {
    case node::Note::Level::kDebug:
      return log::Level::kDebug;
    case node::Note::Level::kInfo:
      return log::Level::kInfo;
    case node::Note::Level::kWarn:
      return log::Level::kWarn;
    case node::Note::Level::kError:
      return log::Level::kError;
  }
  return log::Level::kError;
}

}  // namespace

template <>
void Core::Perform(node::Wake& /*order*/) {
  mutex.Changed();
}

template <>
void Core::Perform(node::Note& note) {
  std::vector<log::Field> fields;
  fields.reserve(note.fields.size());
  for (const node::Note::Field& field : note.fields) {
    fields.emplace_back(field.key, field.value).number = field.number;
  }
  log::Write(LevelOf(note.level), note.message, fields);
}

void Core::Count(const scheduler::Dropped& dropped) {
  const auto reason = static_cast<size_t>(dropped.reason);
  ++counters.dropped[reason];
  const std::optional<int64_t> before = drops_.Now(std::chrono::steady_clock::now());
  if (!before.has_value()) return;
  log::Info("a message changes nothing: it is of another epoch or attempt",
            {{"job", job.exists() ? job.name() : ""},
             {"epoch", job.epoch()},
             {"message", dropped.message},
             {"from_node", dropped.from},
             {"reason", scheduler::kDropReasons[reason]},
             {"said", dropped.said},
             {"wanted", dropped.wanted},
             {"others_since_the_last_line", *before}});
}

template <>
void Core::Perform(node::CountDropped& order) {
  Count(order.dropped);
}

template <>
void Core::Perform(node::TellCoordinator& order) {
  AboutToSend(order.message);
  Queue(reports.Pass(std::chrono::steady_clock::now(), std::move(order.message)));
}

// ---- lanes ----

template <>
void Core::Perform(node::CommandLanes& order) {
  lanes.Command(order, memory);
}

template <>
void Core::Perform(node::StartLanes& order) {
  if (order.anew) fault::FaultPoint("daemon.new_lanes");
  const absl::Status lanes_started = lanes.Start(order, job.wire(), *job.plan(), memory);
  Do(job.OnLanesStarted(std::chrono::steady_clock::now(), lanes_started));
}

template <>
void Core::Perform(node::EndLanes& order) {
  lanes.End(order.others_follow);
  reap_timer_.Set(std::chrono::steady_clock::now());
}

template <>
void Core::Perform(node::CondemnLane& order) {
  log::Error("lane hangs and is killed", {{"job", job.name()},
                                          {"lane", job.lanes()[order.lane].id},
                                          {"pid", lanes.host().pid(order.lane)},
                                          {"awaited", order.awaited},
                                          {"what", order.why}});
  ++counters.lanes_hung;
  lanes.Condemn(order);
}

// ---- memory ----

template <>
void Core::Perform(node::Prepare& order) {
  fault::FaultPoint("daemon.plan");
  memory.Prepare(order, [this](absl::StatusOr<scheduler::PlannedJob> planned,
                               bool host_copies) DMUOND_REQUIRES(mutex) {
    const std::optional<scheduler::CostTable>& costs = options.coordinator.costs;
    if (planned.ok() && costs.has_value() && job.wire().has_restore() &&
        ToProto(*costs).SerializeAsString() != job.wire().costs().SerializeAsString()) {
      log::Info("the job goes on with the costs that it was planned with: --replan takes others",
                {{"job", job.name()}, {"device", job.wire().costs().device()}});
    }
    if (planned.ok()) TellReports(planned->inputs->layout);
    using Prepared = absl::StatusOr<scheduler::NodeJob::Prepared>;
    Do(job.OnPrepared(
        std::chrono::steady_clock::now(),
        planned.ok() ? Prepared({*std::move(planned), host_copies}) : Prepared(planned.status())));
  });
}

// What lanes and trainers of this node are going to report, so that nothing waits for more.
void Core::TellReports(const scheduler::Layout& layout) {
  std::vector<scheduler::LaneProgram> programs;
  for (const v1::LaneProgram& program : memory.programs()) programs.push_back(*FromProto(program));
  reports.OnPlan(programs,
                 static_cast<int32_t>(std::count_if(layout.trainers.begin(), layout.trainers.end(),
                                                    [this](const scheduler::Trainer& trainer) {
                                                      return trainer.node.value() == options.node;
                                                    })));
}

template <>
void Core::Perform(node::DropMemory& /*order*/) {
  memory.Drop();
}

template <>
void Core::Perform(node::Poison& /*order*/) {
  memory.Poison();
}

template <>
void Core::Perform(node::MarkRollback& order) {
  memory.MarkRollback(order.epoch, order.awaited);
}

// ---- pushed state ----

template <>
void Core::Perform(node::ApplyLoad& order) {
  for (const PendingState::Tensor& tensor : memory.pending()->Tensors(order.attempt)) {
    const scheduler::Unit& unit = job.plan()->units[tensor.unit.value()];
    if (!tensor.whole) {
      log::Warn("state was pushed in part and is left as it was",
                {{"job", job.name()},
                 {"epoch", job.epoch()},
                 {"parameter", job.inputs()->layout.parameters[unit.parameter].name},
                 {"kind", v1::StateKind_Name(tensor.kind)}});
      continue;
    }
    v1::LaneCommand command;
    command.mutable_write_unit()->set_request(++unit_requests);
    command.mutable_write_unit()->set_unit(tensor.unit.value());
    command.mutable_write_unit()->set_kind(tensor.kind);
    absl::Status written = lanes.Send(RailOf(unit.owner), command, {tensor.fd});
    if (!written.ok()) {
      log::Error("state was not written",
                 {{"job", job.name()}, {"epoch", job.epoch()}, {"what", written}});
    }
  }
}

template <>
void Core::Perform(node::DropLoads& order) {
  fault::FaultPoint("daemon.published");
  // Nothing, after a step: state is pushed seldom.
  if (auto dropped = memory.pending()->DropThrough(order.through); dropped != nullptr) {
    memory.LetGo(std::move(dropped));
  }
  if (waiting_for_published > 0) mutex.Changed();
}

template <>
void Core::Perform(node::ForgetLoads& /*order*/) {
  memory.ForgetPending();
}

// ---- snapshots ----

template <>
void Core::Perform(node::WriteSnapshot& order) {
  disks.Write(order, job.name(), memory.host());
}

template <>
void Core::Perform(node::Copied& order) {
  disks.OnCopied(order);
}

template <>
void Core::Perform(node::AbandonCopies& order) {
  disks.AbandonCopies(order.why);
}

template <>
void Core::Perform(node::GiveUpCopies& order) {
  disks.GiveUpCopies(order.why);
}

template <>
void Core::Perform(node::ForgetCopies& /*order*/) {
  disks.ForgetCopies();
}

template <>
void Core::Perform(node::Restore& order) {
  disks.Restore(order, JobForDisks());
}

template <>
void Core::Perform(node::StopRestoring& /*order*/) {
  disks.StopRestoring();
}

template <>
void Core::Perform(node::SetSnapshotsAside& order) {
  disks.SetAside(order, job.name());
}

template <>
void Core::Perform(node::KeepSnapshots& /*order*/) {
  disks.Keep();
}

// ---- sessions ----

template <>
void Core::Perform(node::SessionEnded& order) {
  clients.OnEnded(order);
}

template <>
void Core::Perform(node::DiscardRefused& order) {
  clients.discard_refusals()[order.rank] = order.why;
}

// ---- all of it ----

void Core::Do(scheduler::GroupActions actions) {
  for (const scheduler::Dropped& dropped : actions.dropped) Count(dropped);
  for (scheduler::Addressed& addressed : actions.messages) {
    AboutToSend(addressed.message);
    const bool others = options.nodes > 1 && addressed.node != options.node;
    const bool here = !addressed.node.has_value() || *addressed.node == options.node;
    if (!others && addressed.message.has_decision()) fault::FaultPoint("coordinator.sent");
    if (here) heard_.push_back(others ? addressed.message : std::move(addressed.message));
    if (others) for_members_.push_back(std::move(addressed));
  }
  // A daemon that has left has no worker, and its coordinator no group.
  for (scheduler::PlanOrder& plan : actions.plans) {
    if (memory.worker() == nullptr) break;
    memory.worker()->Post([this, order = std::move(plan)] {
      auto made =
          std::make_shared<absl::StatusOr<scheduler::PlannedJob>>(planner.Make(*order.inputs));
      Enter([&]() DMUOND_REQUIRES(mutex) {
        Do(coordinator->OnPlanMade(std::chrono::steady_clock::now(), order, std::move(*made)));
      });
    });
  }
  Pump();
}

void Core::SendToMembers() {
  for (; !for_members_.empty(); for_members_.pop_front()) {
    scheduler::Addressed& addressed = for_members_.front();
    addressed.message.set_place(place);
    peers->SendToMembers(addressed.node, addressed.message);
    if (addressed.message.has_decision()) fault::FaultPoint("coordinator.sent");
  }
}

void Core::Do(node::Actions actions) {
  WriteRecord();
  for (node::Action& action : actions) {
    std::visit([this](auto& order) DMUOND_REQUIRES(mutex) { Perform(order); }, action);
  }
  Pump();
}

}  // namespace dmuond::server
