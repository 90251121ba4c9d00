#include "tests/scheduler/membership_simulator.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler::testing {
namespace {

constexpr int64_t kTick = 100;
constexpr int64_t kRejoinAfter = 200;
constexpr int64_t kTroubleLasts = 60'000;
constexpr int64_t kSettlesWithin = 60'000;

}  // namespace

MembershipSimulator::MembershipSimulator(uint64_t seed)
    : chance_(seed), nodes_(static_cast<int32_t>(Pick(2, 4))) {
  processes_.resize(nodes_);
  for (int32_t node = 0; node < nodes_; ++node) processes_[node].node = NodeRank(node);
}

// ---- network ----

TimePoint MembershipSimulator::Now() const {
  return TimePoint(std::chrono::milliseconds(time_.now()));
}

void MembershipSimulator::Fail(const std::string& what) {
  if (failure_.empty())
    failure_ = absl::StrCat("at ", time_.now(), " ms: ", what, "; ", Describe());
}

void MembershipSimulator::In(int32_t node, uint64_t boot, Event event) {
  Process& process = processes_[node];
  if (process.boot != boot || boot == 0) return;
  if (process.stopped) {
    process.waiting.push_back(std::move(event));
  } else {
    event();
  }
}

void MembershipSimulator::Up(uint64_t id, Event at_coordinator) {
  Link& link = links_.at(id);
  if (link.silent || link.ended_here) return;
  link.last_up = std::max(link.last_up, time_.now() + Pick(0, Chance(90) ? 5 : 300));
  After(link.last_up - time_.now(), [this, id, event = std::move(at_coordinator)] {
    const Link& now = links_.at(id);
    if (now.silent || now.ended_there) return;
    In(0, now.coordinator_boot, event);
  });
}

void MembershipSimulator::Down(uint64_t id, Event at_member) {
  Link& link = links_.at(id);
  if (link.silent || link.ended_there) return;
  link.last_down = std::max(link.last_down, time_.now() + Pick(0, Chance(90) ? 5 : 300));
  After(link.last_down - time_.now(), [this, id, event = std::move(at_member)] {
    const Link& now = links_.at(id);
    if (now.silent || now.ended_here) return;
    for (const Process& process : processes_) {
      if (process.boot == now.boot) return In(process.node.value(), now.boot, event);
    }
  });
}

// Both sides learn of it, each at a time of its own; a link that is silent tells neither.
void MembershipSimulator::CutLink(uint64_t id) {
  if (links_.at(id).silent) return;
  After(Pick(0, 300), [this, id] { LinkEndedAtMember(id); });
  After(Pick(0, 300), [this, id] { LinkEndedAtCoordinator(id); });
}

// Nothing arrives any more; the kernels give up long after the heartbeats have.
void MembershipSimulator::Silence(uint64_t id) {
  links_.at(id).silent = true;
  After(Pick(6'000, 20'000), [this, id] { LinkEndedAtMember(id); });
  After(Pick(6'000, 20'000), [this, id] { LinkEndedAtCoordinator(id); });
}

// ---- members ----

MemberInfo MembershipSimulator::InfoOf(const Process& process) const {
  MemberInfo info;
  info.node = process.node;
  info.nodes = nodes_;
  info.version = "1";
  info.device_type = "cpu";
  info.peer_address = absl::StrCat("host", process.node.value(), ":", process.boot);
  info.epoch = process.epoch;
  info.boot_id = process.boot;
  return info;
}

void MembershipSimulator::Join(int32_t node, uint64_t boot) {
  Process& process = processes_[node];
  if (process.link != 0) return;
  process.formed = false;
  if (processes_[0].boot == 0) {  // nobody listens
    After(kRejoinAfter, [this, node, boot] { In(node, boot, [=, this] { Join(node, boot); }); });
    return;
  }
  const uint64_t id = ++links_made_;
  links_[id] = {.node = node, .boot = boot, .coordinator_boot = processes_[0].boot};
  process.link = id;
  process.heard = time_.now();
  Up(id, [this, id, info = InfoOf(process)] { Joined(id, info); });
  if (Chance(3)) Up(id, [this, id, info = InfoOf(process)] { Joined(id, info); });  // told twice
}

void MembershipSimulator::Beat(int32_t node, uint64_t boot) {
  Process& process = processes_[node];
  if (process.link != 0) {
    const uint64_t id = process.link;
    Up(id, [this, id, node] {
      const auto held = joined_.find(node);
      if (held == joined_.end() || held->second.link != id) return;  // its stream is not read
      machine_->OnHeartbeat(Now(), NodeRank(node));
      held->second.heard = time_.now();
    });
    if (time_.now() - process.heard >= options_.timeout.count()) {
      CutLink(id);
      LinkEndedAtMember(id);
    }
  }
  After(options_.interval.count(),
        [this, node, boot] { In(node, boot, [=, this] { Beat(node, boot); }); });
}

void MembershipSimulator::LinkEndedAtMember(uint64_t id) {
  Link& link = links_.at(id);
  if (link.ended_here) return;
  for (Process& process : processes_) {
    if (process.boot != link.boot) continue;
    In(process.node.value(), link.boot, [this, id, &process] {
      Link& now = links_.at(id);
      if (now.ended_here) return;
      now.ended_here = true;
      if (process.link != id) return;
      process.link = 0;
      process.formed = false;
      After(kRejoinAfter, [this, node = process.node.value(), boot = process.boot] {
        In(node, boot, [=, this] { Join(node, boot); });
      });
    });
  }
}

// ---- the coordinator ----

void MembershipSimulator::StartCoordinator() {
  joined_.clear();
  machine_.emplace(nodes_, InfoOf(processes_[0]), options_);
  After(Pick(0, kTick), [this, boot = processes_[0].boot] { In(0, boot, [this] { Tick(); }); });
}

void MembershipSimulator::Joined(uint64_t id, const MemberInfo& info) {
  Link& link = links_.at(id);
  const int32_t node = info.node.value();
  const auto before = joined_.find(node);
  const auto actions = machine_->OnJoin(Now(), info);
  if (!actions.ok()) {
    ++counts_.refused;
    const bool twice = ReasonOf(actions.status()) == "RANK_TWICE";
    if (twice && (before == joined_.end() || before->second.boot == info.boot_id)) {
      Fail("a process is refused for its own sake");
    }
    if (twice && time_.now() - before->second.heard >= options_.timeout.count()) {
      Fail("a process is refused for one that has been silent");
    }
    link.ended_there = true;
    CutLink(id);
    return;
  }
  if (before != joined_.end() && before->second.boot != info.boot_id &&
      time_.now() - before->second.heard < options_.timeout.count()) {
    Fail("a process has taken the place of a living one");
  }
  joined_[node] = {info.boot_id, id, time_.now()};
  Perform(*actions);
}

void MembershipSimulator::LinkEndedAtCoordinator(uint64_t id) {
  const uint64_t coordinator = links_.at(id).coordinator_boot;
  In(0, coordinator, [this, id] {
    Link& link = links_.at(id);
    if (link.ended_there) return;
    link.ended_there = true;
    // Told of the stream's process, whoever has joined for its node since.
    const auto held = joined_.find(link.node);
    const bool mine = held != joined_.end() && held->second.boot == link.boot;
    const bool formed = machine_->formed();
    const auto actions = machine_->OnGone(Now(), NodeRank(link.node), link.boot);
    if (!mine && (!actions.empty() || machine_->formed() != formed)) {
      Fail("the end of an older process's stream touched its successor");
    }
    Perform(actions);
    if (mine) joined_.erase(link.node);
  });
}

void MembershipSimulator::Tick() {
  const bool formed = machine_->formed();
  const auto actions = machine_->OnTick(Now());
  if (formed) {
    for (const auto& [node, held] : joined_) {
      if (time_.now() - held.heard >= options_.timeout.count() && machine_->formed()) {
        Fail(absl::StrCat("node ", node, " has been silent, and the group stands"));
      }
    }
  }
  Perform(actions);
  After(kTick, [this, boot = processes_[0].boot] { In(0, boot, [this] { Tick(); }); });
}

void MembershipSimulator::Perform(const std::vector<MembershipAction>& actions) {
  for (const MembershipAction& action : actions) {
    if (const auto* formed = std::get_if<GroupFormed>(&action)) {
      Check(*formed);
      processes_[0].epoch = formed->epoch;
      processes_[0].formed = true;
      epoch_of_boot_[processes_[0].boot] = formed->epoch;
      for (const auto& [node, held] : joined_) {
        Down(held.link, [this, node = node, epoch = formed->epoch] {
          Process& process = processes_[node];
          if (epoch <= process.epoch) return Fail("a member is told an epoch that is not new");
          process.epoch = epoch;
          process.formed = true;
          process.heard = time_.now();
          epoch_of_boot_[process.boot] = epoch;
        });
      }
    } else if (const auto* broken = std::get_if<GroupBroken>(&action)) {
      Check(*broken);
      processes_[0].formed = false;
      for (const auto& [node, held] : joined_) {
        links_.at(held.link).ended_there = true;
        CutLink(held.link);
      }
      joined_.clear();
      machine_->StartOver();
    } else if (std::holds_alternative<SendHeartbeat>(action)) {
      for (const auto& [node, held] : joined_) {
        Down(held.link, [this, node = node] { processes_[node].heard = time_.now(); });
      }
    } else {
      const auto& dropped = std::get<MemberDropped>(action);
      const auto held = joined_.find(dropped.node.value());
      if (held == joined_.end()) continue;  // its stream had ended
      links_.at(held->second.link).ended_there = true;
      CutLink(held->second.link);
      joined_.erase(held);
    }
  }
}

void MembershipSimulator::Check(const GroupFormed& formed) {
  ++counts_.formed;
  if (static_cast<int32_t>(joined_.size()) != nodes_ - 1) Fail("a group formed without a member");
  if (formed.epoch <= processes_[0].epoch) Fail("an epoch that the coordinator knew came again");
  for (const auto& [node, held] : joined_) {
    if (formed.epoch <= epoch_of_boot_[held.boot]) {
      Fail(absl::StrCat("epoch ", formed.epoch.value(), " formed with node ", node,
                        ", which has been in epoch ", epoch_of_boot_[held.boot].value()));
    }
    if (formed.peer_addresses[node] != absl::StrCat("host", node, ":", held.boot)) {
      Fail("the group names an older process's address");
    }
  }
}

void MembershipSimulator::Check(const GroupBroken& broken) {
  ++counts_.broken;
  if (!absl::StrContains(broken.detail, "nothing heard")) return;
  ++counts_.silences;
  const auto held = joined_.find(broken.lost.value());
  if (held == joined_.end() || time_.now() - held->second.heard < options_.timeout.count()) {
    Fail("a member that was heard of counts as lost by silence");
  }
}

// ---- trouble ----

void MembershipSimulator::Kill(int32_t node) {
  Process& process = processes_[node];
  if (process.boot == 0) return;
  ++(node == 0 ? counts_.coordinator_deaths : counts_.deaths);
  const uint64_t boot = process.boot;
  // The kernel closes its sockets; a machine that loses its power does not.
  const bool tells = Chance(80);
  for (auto& [id, link] : links_) {
    if (link.boot != boot && link.coordinator_boot != boot) continue;
    if (tells) {
      CutLink(id);
    } else {
      Silence(id);
    }
  }
  process = Process{};
  process.node = NodeRank(node);
  if (node == 0) machine_.reset();
  After(Pick(10, 8'000), [this, node] { Start(node); });
}

void MembershipSimulator::Start(int32_t node) {
  Process& process = processes_[node];
  if (process.boot != 0) return;
  process.boot = ++boots_;
  if (node == 0) return StartCoordinator();
  After(0, [this, node, boot = process.boot] {
    In(node, boot, [=, this] {
      Join(node, boot);
      Beat(node, boot);
    });
  });
}

void MembershipSimulator::Stop(int32_t node) {
  Process& process = processes_[node];
  if (process.boot == 0 || process.stopped) return;
  ++counts_.stops;
  process.stopped = true;
  After(Pick(100, 12'000), [this, node, boot = process.boot] {
    if (processes_[node].boot == boot) Wake(node);
  });
}

void MembershipSimulator::Wake(int32_t node) {
  Process& process = processes_[node];
  process.stopped = false;
  std::vector<Event> waiting = std::move(process.waiting);
  process.waiting.clear();
  const uint64_t boot = process.boot;
  for (Event& event : waiting) In(node, boot, std::move(event));
}

void MembershipSimulator::Disturb() {
  if (time_.now() >= calm_from_) return;
  const auto node = static_cast<int32_t>(Pick(0, nodes_ - 1));
  const int64_t what = Pick(0, 99);
  if (what < 40) {
    Kill(node);
  } else if (what < 65) {
    Stop(node);
  } else if (const uint64_t link = processes_[node].link; link != 0) {
    ++counts_.cut_links;
    if (Chance(70)) {
      CutLink(link);
    } else {
      Silence(link);
    }
  }
  After(Pick(10, 10'000), [this] { Disturb(); });
}

// ---- the run ----

bool MembershipSimulator::Settled() const {
  return machine_.has_value() && machine_->formed() &&
         std::all_of(processes_.begin(), processes_.end(), [this](const Process& process) {
           return process.boot != 0 && process.formed && process.epoch == machine_->epoch();
         });
}

std::string MembershipSimulator::Describe() const {
  std::string text = machine_.has_value()
                         ? absl::StrCat("machine epoch ", machine_->epoch().value(),
                                        machine_->formed() ? " formed" : " joining")
                         : "no machine";
  for (const Process& process : processes_) {
    absl::StrAppend(&text, "; node ", process.node.value(), " boot ", process.boot, " epoch ",
                    process.epoch.value(), process.formed ? " formed" : "",
                    process.stopped ? " stopped" : "", " link ", process.link);
  }
  return text;
}

std::string MembershipSimulator::Run() {
  calm_from_ = Pick(0, kTroubleLasts);
  for (int32_t node = 0; node < nodes_; ++node) {
    After(Pick(0, 3'000), [this, node] { Start(node); });
  }
  After(Pick(0, 10'000), [this] { Disturb(); });
  const Milliseconds end = calm_from_ + kSettlesWithin;
  while (!time_.empty() && failure_.empty() && time_.now() <= end) {
    if (time_.now() >= calm_from_ + 30'000 && Settled()) return "";
    time_.RunNext();
  }
  if (failure_.empty() && !Settled()) Fail("the group does not form, and nothing hinders it");
  return failure_;
}

}  // namespace dmuond::scheduler::testing
