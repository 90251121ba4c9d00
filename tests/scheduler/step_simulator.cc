#include "tests/scheduler/step_simulator.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/scheduler/layouts.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler::testing {
namespace {

constexpr int64_t kMillisecond = 1'000;
constexpr std::chrono::milliseconds kStepTimeout{2'000};
constexpr std::chrono::milliseconds kLinger{5'000};
constexpr int64_t kGivesUpAfter = 600'000 * kMillisecond;

SimulatedWorld Make(const World& world) {
  SimulatedWorld made;
  made.inputs = *world.Inputs();
  made.inputs.bucket_bytes = 1;  // a bucket for each parameter
  made.plan = *MakePlan(made.inputs);
  made.tables = *MakeRailTables(made.inputs, made.plan);
  return made;
}

uint64_t Mix(uint64_t x) {  // splitmix64: the same on every machine
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

std::vector<SimulatedWorld> SimulatedWorlds() {
  std::vector<SimulatedWorld> worlds;
  worlds.push_back(Make(World(2, 1, 1).Replicate(Muon("v", {8, 8})).Replicate(AdamW("b", {8}))));
  worlds.push_back(Make(World(2, 2, 1)
                            .Replicate(Muon("u", {8, 8}))
                            .Replicate(Muon("v", {8, 8}))
                            .Replicate(AdamW("b", {8}))));
  worlds.push_back(Make(World(4, 2, 2)
                            .Replicate(Muon("u", {8, 8}))
                            .ShardRows(Muon("v", {9, 8}))
                            .Replicate(Muon("w", {4, 8}))
                            .ShardRows(AdamW("e", {10, 4}))));
  worlds.push_back(Make(World(3, 3, 1).Replicate(Muon("u", {8, 8})).ShardRows(Muon("v", {8, 8}))));
  // The last node of each has no trainers, and owns parameters.
  worlds.push_back(Make(World(2, 3, 1)
                            .Replicate(Muon("u", {8, 8}))
                            .ShardRows(Muon("v", {8, 8}))
                            .Replicate(Muon("w", {8, 8}))));
  worlds.push_back(Make(World(1, 2, 2).Replicate(Muon("u", {8, 8})).Replicate(AdamW("b", {8}))));
  return worlds;
}

StepSimulator::StepSimulator(const SimulatedWorld& world, uint64_t seed)
    : world_(world),
      state_(Mix(seed)),
      seed_(seed),
      last_step_(Pick(1, 3)),
      lingers_(Chance(80)),
      coordinator_(world.inputs, world.plan, kFirstAttempt, StepId(0),
                   {.step_timeout = kStepTimeout,
                    .session_linger = lingers_ ? kLinger : std::chrono::milliseconds(0),
                    .skips_max = 50}) {
  for (int32_t node = 0; node < world.inputs.nodes; ++node) {
    std::vector<TrainerRank> ranks;
    for (const scheduler::Trainer& trainer : world.inputs.layout.trainers) {
      if (trainer.node.value() == node) ranks.push_back(trainer.rank);
    }
    nodes_.push_back({StepMember(ranks, world.inputs.lanes_per_node, StepId(0)), ranks});
    for (int32_t rail = 0; rail < world.inputs.lanes_per_node; ++rail) {
      Lane lane;
      lane.node = NodeRank(node);
      lane.rail = LaneIndex(rail);
      nodes_.back().lanes.push_back(std::move(lane));
    }
  }
  for (const scheduler::Trainer& trainer : world.inputs.layout.trainers) {
    trainers_.emplace_back();
    trainers_.back().rank = trainer.rank;
    trainers_.back().node = &nodes_[trainer.node.value()];
    trainers_.back().attempt = kFirstAttempt;
  }
}

// ---- chance and network ----

uint64_t StepSimulator::Random() { return Mix(state_ += 0x9e3779b97f4a7c15ULL); }
int64_t StepSimulator::Pick(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(Random() % static_cast<uint64_t>(high - low + 1));
}
bool StepSimulator::Chance(int32_t percent) { return Pick(0, 99) < percent; }

// The same for whoever asks: what all trainers agree on.
bool StepSimulator::FateOf(StepId step, const char* what, int32_t percent) const {
  return Mix(seed_ * 31 + static_cast<uint64_t>(step.value()) * 7 + what[0]) % 100 <
         static_cast<uint64_t>(percent);
}

void StepSimulator::After(Microseconds delay, Event event) {
  queue_.push({now_ + delay, sequence_++, std::move(event)});
}

void StepSimulator::Send(Stream& stream, Microseconds delay, int32_t replay_percent, Event event) {
  const auto deliver = [&](Event message) {
    stream.last = std::max(stream.last, now_ + delay);
    queue_.push({stream.last, sequence_++, std::move(message)});
  };
  deliver(event);
  if (replay_percent == 0) return;
  stream.recent.push_back(std::move(event));
  if (stream.recent.size() > 6) stream.recent.pop_front();
  if (!Chance(replay_percent)) return;
  const size_t again = Pick(1, static_cast<int64_t>(stream.recent.size()));
  for (size_t i = stream.recent.size() - again; i < stream.recent.size(); ++i) {
    deliver(stream.recent[i]);
  }
}

// Between daemons: mostly quick.
StepSimulator::Microseconds StepSimulator::Travel() {
  return Pick(0, Chance(85) ? kMillisecond : 20 * kMillisecond);
}

void StepSimulator::Call(Event event) {
  if (Chance(10)) return;
  if (Chance(10)) After(Pick(0, 300 * kMillisecond), event);
  After(Chance(90) ? Pick(0, kMillisecond) : Pick(0, 40 * kMillisecond), std::move(event));
}

TimePoint StepSimulator::Now() const { return TimePoint(std::chrono::microseconds(now_)); }

void StepSimulator::Fail(const std::string& what) {
  if (failure_.empty()) failure_ = absl::StrCat("at ", now_, " us: ", what);
}

// ---- trainers ----

void StepSimulator::Begin(Trainer& trainer) {
  const uint64_t call = ++trainer.call;
  if (trainer.committed == last_step_) {
    trainer.done = true;
    return;
  }
  if (trainer.committed == trainer.hangs_at) return;
  trainer.submitted = false;
  trainer.early.clear();
  const bool push = FateOf(trainer.committed, "push", 30) &&
                    !trainer.pushed_at.contains(trainer.committed.value());
  Submission& request = trainer.request;
  request = Submission{};
  request.rank = trainer.rank;
  request.attempt = trainer.attempt;
  request.kind = push ? AttemptKind::kPush : AttemptKind::kStep;
  request.step = push ? trainer.committed : StepId(trainer.committed.value() + 1);
  if (!push) {
    request.scalars = Scalars(0.1 * static_cast<double>(request.step.value()));
    const int32_t parameters = static_cast<int32_t>(world_.inputs.layout.parameters.size());
    for (int32_t p = 0; p < parameters; ++p) {
      if (Chance(10)) request.absent.push_back(p);
    }
  }
  const bool mistaken = trainer.mistakes > 0 && Chance(10);
  if (mistaken) {
    --trainer.mistakes;
    if (push && Chance(50)) {
      request.pushed = {0};
    } else if (!push && Chance(50)) {
      request.scalars.groups[1].eps = 7;
    } else {
      request.withdraw = true;
    }
  }
  if ((!push || mistaken) && Chance(50)) {  // a push after early buckets is a mistake of its own
    for (int32_t bucket = 0; bucket < world_.plan.buckets; ++bucket) {
      bool absent = false;
      for (int32_t p : request.absent) absent |= world_.plan.parameter_bucket[p] == bucket;
      if (!absent && Chance(70)) trainer.early.insert(BucketId(bucket));
    }
    for (Lane& lane : trainer.node->lanes) After(Pick(0, 500), [&] { Progress(lane); });
  }
  asked_[request.attempt][trainer.rank] = request;
  const Microseconds thinks = Pick(0, Chance(50) ? 100 : 10 * kMillisecond);
  After(thinks, [&trainer, call, this] { Submit(trainer, call); });
}

// Its calls on their way are not heard any more, and its node notices.
void StepSimulator::Die(Trainer& trainer, const std::string& why) {
  if (trainer.dead || trainer.done) return;
  trainer.dead = true;
  ++trainer.call;
  trainer.early.clear();
  Node& node = *trainer.node;
  Send(node.to_coordinator, Travel(), 5, [&trainer, gone = trainer.incarnation, why, this] {
    AtCoordinator(coordinator_.OnRankGone(Now(), trainer.rank, gone, why));
  });
  if (!trainer.replaced) {
    trainer.done = true;
    disturbed_ = true;
    return;
  }
  After(Pick(0, 500 * kMillisecond),
        [&trainer, vacated = node.member.open().attempt, this] { Replace(trainer, vacated); });
}

void StepSimulator::Replace(Trainer& trainer, Attempt vacated) {
  const StepMember& member = trainer.node->member;
  if (member.open().attempt <= vacated) {
    return After(kMillisecond, [&trainer, vacated, this] { Replace(trainer, vacated); });
  }
  ++counts_.replacements;
  trainer.dead = false;
  trainer.hangs_at = StepId(-1);
  if (!std::exchange(ticking_, true)) Tick();
  trainer.first_attempt = trainer.attempt = member.open().attempt;
  trainer.committed = member.last_committed();
  for (const auto& [attempt, decision] : decided_) {
    const bool pushed = decision.kind == AttemptKind::kPush && decision.verdict == Verdict::kCommit;
    if (pushed && attempt < trainer.attempt) trainer.pushed_at.insert(decision.step.value());
  }
  Send(trainer.node->to_coordinator, Travel(), 5, [&trainer, now = ++trainer.incarnation, this] {
    coordinator_.OnRankBack(Now(), trainer.rank, now);
  });
  Begin(trainer);
}

// Submits, later waits, until something comes back.
void StepSimulator::Submit(Trainer& trainer, uint64_t call) {
  if (trainer.call != call || trainer.done) return;
  const bool wait = trainer.submitted && Chance(70);
  const Submission request = trainer.request;
  Call([&trainer, call, wait, request, incarnation = trainer.incarnation, this] {
    if (trainer.dead || trainer.incarnation != incarnation) return;  // its session has ended
    StepMember& member = trainer.node->member;
    absl::StatusOr<StepAnswer> answer = StepAnswer{};
    if (wait) {
      answer = member.OnWait(request.rank, request.step, request.attempt);
    } else {
      auto accepted = member.OnSubmission(request);
      if (!accepted.ok()) {
        answer = accepted.status();
      } else {
        answer = accepted->answer;
        if (!accepted->answer.pending()) ++counts_.repeated_answers;
        if (accepted->forward) {
          Send(trainer.node->to_coordinator, Travel(), 5,
               [request, this] { AtCoordinator(coordinator_.OnSubmission(Now(), request)); });
          for (Lane& lane : trainer.node->lanes) {
            Tell(lane, [&lane, request, this] {
              lane.submitted[request.attempt][request.rank] = request;
              Progress(lane);
            });
          }
        }
      }
    }
    Call([&trainer, call, answer, this] { Answer(trainer, call, answer); });
  });
  After(Pick(10, 60) * kMillisecond, [&trainer, call, this] { Submit(trainer, call); });
}

void StepSimulator::Answer(Trainer& trainer, uint64_t call,
                           const absl::StatusOr<StepAnswer>& answer) {
  if (trainer.call != call || trainer.done) return;
  if (!answer.ok()) {
    return Fail(absl::StrCat("rank ", trainer.rank.value(), " got ",
                             std::string(answer.status().message())));
  }
  trainer.submitted = true;
  if (!answer->pending()) Finish(trainer, *answer);
}

void StepSimulator::Finish(Trainer& trainer, const StepAnswer& answer) {
  const auto decided = decided_.find(trainer.attempt);
  if (decided == decided_.end()) return Fail("an answer without a decision");
  const Decision& decision = decided->second;
  if (answer.outcome.has_value() == (decision.verdict == Verdict::kRefuse)) {
    return Fail("a refusal and an outcome were mistaken for each other");
  }
  // A new epoch's attempts, too, are later ones.
  if (answer.next_attempt <= trainer.attempt) return Fail("the next attempt is not a later one");
  trainer.attempt = answer.next_attempt;
  if (answer.outcome) {
    const Outcome& outcome = *answer.outcome;
    if (outcome.kind != decision.outcome.kind || outcome.attempt != decision.attempt) {
      return Fail("an outcome that was not decided");
    }
    if (outcome.kind == OutcomeKind::kAborted && !outcome.retry) {
      if (!disturbed_) Fail(absl::StrCat("aborted for good: ", outcome.detail));
      trainer.done = true;
      return;
    }
    if (outcome.kind != OutcomeKind::kAborted) {
      if (trainer.request.kind != decision.kind || outcome.step != trainer.request.step) {
        return Fail("another step was committed than the one submitted");
      }
      if (decision.kind == AttemptKind::kStep) {
        trainer.committed = outcome.step;
      } else {
        trainer.pushed_at.insert(outcome.step.value());
      }
    }
  }
  Begin(trainer);
}

// ---- daemons ----

void StepSimulator::AtMember(Node& node, const CoordinatorAction& action) {
  const Attempt before = node.member.open().attempt;
  if (const auto* decision = std::get_if<Decision>(&action)) {
    node.member.OnDecision(*decision);
    if (node.decisions.empty() || node.decisions.back() < decision->attempt) {
      if (node.member.last_decision()->attempt != decision->attempt)
        Fail("a decision was not heard");
      node.decisions.push_back(decision->attempt);
      for (Lane& lane : node.lanes) {
        Tell(lane, [&lane, decision = *decision, this] {
          if (decision.verdict == Verdict::kCommit) {
            Apply(lane, decision);
            if (lane.publishing.value() != 0) Fail("committed while a lane was still publishing");
            lane.publishing = decision.attempt;
            lane.published.clear();
            lane.publish_reported = false;
          }
          lane.armed = {};
          Progress(lane);
        });
      }
    } else if (node.member.last_decision()->attempt == decision->attempt &&
               decision->attempt < node.decisions.back()) {
      Fail("an older decision was heard");
    } else if (decision->verdict == Verdict::kCommit) {
      // Told again: new lanes apply what their predecessors did not live to, and publish later.
      for (Lane& lane : node.lanes) {
        Tell(lane, [&lane, decision = *decision, this] { Apply(lane, decision); });
      }
    }
  } else if (const auto* open = std::get_if<OpenAttempt>(&action)) {
    node.member.OnOpen(*open);
    if (node.armed < open->attempt) {
      node.armed = open->attempt;
      for (Lane& lane : node.lanes) {
        Tell(lane, [&lane, armed = *open, this] {
          lane.armed = armed;
          lane.reported.clear();
          lane.gone.clear();
          lane.gathered = false;
          Progress(lane);
        });
      }
    }
  } else if (const auto* begun = std::get_if<Begun>(&action)) {
    if (&nodes_[begun->node.value()] != &node) return;
    for (Lane& lane : node.lanes) {
      Tell(lane, [&lane, first = begun->submission, this] {
        lane.begun.emplace(first.attempt, first.kind);
        Progress(lane);
      });
    }
  } else if (const auto* expel = std::get_if<Expel>(&action)) {
    Trainer& trainer = trainers_[expel->rank.value()];
    if (trainer.node == &node && trainer.first_attempt <= expel->attempt) Die(trainer, "it hangs");
  } else if (const auto* republish = std::get_if<Republish>(&action)) {
    if (node.republished >= republish->attempt) return;
    node.republished = republish->attempt;
    for (Lane& lane : node.lanes) {
      Tell(lane, [&lane, attempt = republish->attempt, this] {
        if (lane.publishing.value() != 0) Fail("published anew while a lane was still publishing");
        lane.publishing = attempt;
        lane.published.clear();
        lane.publish_reported = false;
        Progress(lane);
      });
    }
  } else if (const auto* sent = std::get_if<Go>(&action)) {
    const Go& go = *sent;
    Lane& lane = node.lanes[go.rail.value()];
    Tell(lane, [&lane, go, this] {
      if (go.operation == RailOperation::kCollect && go.attempt == lane.armed.attempt) {
        lane.gone.insert(go.bucket);
      }
      if (go.operation == RailOperation::kPublish && go.attempt == lane.publishing) {
        lane.published.insert(go.bucket);
      }
      Progress(lane);
    });
  }
  if (node.member.open().attempt < before) Fail("a member went back to an older attempt");
}

void StepSimulator::AtCoordinator(const std::vector<CoordinatorAction>& actions) {
  for (const CoordinatorAction& action : actions) {
    std::visit([this](const auto& a) { Check(a); }, action);
    for (Node& node : nodes_) {
      Send(node.from_coordinator, Travel(), 5, [&node, action, this] { AtMember(node, action); });
    }
  }
}

void StepSimulator::Check(const Decision& decision) {
  const auto before = decided_.find(decision.attempt);
  if (retelling_ && before != decided_.end()) {
    if (before->second.verdict != decision.verdict) Fail("told another decision than before");
    return;
  }
  if (decision.attempt != open_) Fail("decided an attempt that is not open");
  if (!decided_.emplace(decision.attempt, decision).second) Fail("decided an attempt twice");
  const bool consumes = decision.verdict == Verdict::kCommit || decision.verdict == Verdict::kSkip;
  switch (decision.verdict) {
    case Verdict::kCommit:
      ++(decision.kind == AttemptKind::kStep ? counts_.commits : counts_.pushes);
      break;
    case Verdict::kSkip:
      ++counts_.skips;
      break;
    case Verdict::kAbort:
      ++counts_.aborts;
      break;
    case Verdict::kRefuse:
      ++counts_.refusals;
      break;
  }
  if (!consumes) return;
  const auto& asked = asked_[decision.attempt];
  if (asked.size() != trainers_.size()) Fail("committed without all ranks");
  for (const auto& [rank, submission] : asked) {
    if (submission.kind != decision.kind || submission.step != decision.step) {
      Fail("committed another step than the submitted ones");
    }
    if (submission.withdraw) Fail("committed a withdrawn attempt");
    if (decision.kind == AttemptKind::kStep && decision.verdict == Verdict::kCommit &&
        Compare(submission.scalars, decision.scalars)) {
      Fail("committed with other scalars than a rank's");
    }
  }
  if (decision.kind == AttemptKind::kPush && gradients_reported_.contains(decision.attempt)) {
    Fail("a push was committed where lanes had gradients to send");
  }
  for (const Node& node : nodes_) {
    for (const Lane& lane : node.lanes) {
      if (!lane.gathered || lane.armed.attempt != decision.attempt) Fail("committed ungathered");
    }
  }
  if (decision.kind != AttemptKind::kStep) return;
  if (decision.step.value() != consumed_.value() + 1) Fail("a step was consumed out of order");
  consumed_ = decision.step;
  if ((decision.verdict == Verdict::kSkip) != FateOf(decision.step, "nan", 15)) {
    Fail("skipped a finite step or committed another");
  }
}

void StepSimulator::Check(const OpenAttempt& open) {
  if (open.attempt <= open_) Fail("opened an older attempt");
  if (open.step.value() != consumed_.value() + 1) Fail("opened another step than the next");
  open_ = open.attempt;
}

void StepSimulator::Check(const Begun& begun) {
  ++counts_.begun;
  if (!nodes_[begun.node.value()].ranks.empty())
    Fail("a node with trainers was told of an attempt");
  const auto& asked = asked_[begun.submission.attempt];
  const auto submission = asked.find(begun.submission.rank);
  if (submission == asked.end() || submission->second.kind != begun.submission.kind) {
    Fail("a node was told of a submission that nobody made");
  }
}

void StepSimulator::Check(const Republish& republish) {
  if (republish.attempt <= open_) Fail("published anew under an older attempt");
  if (republish.step != consumed_) Fail("published anew another step than the last one");
}

void StepSimulator::Check(const Go& go) {
  ++counts_.goes;
  auto& last = last_go_[{go.attempt, go.operation}];
  const auto [before, first] = last.emplace(go.rail, go.bucket);
  if (!first && !(before->second < go.bucket)) Fail("buckets went out of order");
  before->second = go.bucket;
  const bool collect = go.operation == RailOperation::kCollect;
  const auto& asked = asked_[go.attempt];
  const bool step = !std::any_of(asked.begin(), asked.end(),
                                 [](const auto& a) { return a.second.kind != AttemptKind::kStep; });
  const RailTable& table = !collect ? world_.tables.weights
                           : step   ? world_.tables.partials
                                    : world_.tables.adopts;
  const auto& buckets = table[go.rail.value()];
  if (!buckets.contains(go.bucket)) {
    if (step || !collect) Fail("a bucket without messages went");
    return;  // gradients that went before anybody knew of the push, which then ends the attempt
  }
  for (NodeRank node : buckets.at(go.bucket)) {
    if (collect && !step) continue;
    if (!reports_.contains({go.attempt, go.operation, go.rail, go.bucket, node})) {
      Fail("a bucket went before all its lanes were ready");
    }
    // A lane that only receives may be ready before its own trainers are: they are in no message.
    if (!collect || !world_.tables.SendsPartials(go.rail, go.bucket, node)) continue;
    for (TrainerRank rank : nodes_[node.value()].ranks) {
      const auto submission = asked.find(rank);
      if (submission == asked.end()) continue;
      for (int32_t p : submission->second.absent) {
        const bool told = std::find(go.absent.begin(), go.absent.end(), AbsentFragment{rank, p}) !=
                          go.absent.end();
        if (told != (world_.plan.parameter_bucket[p] == go.bucket.value())) {
          Fail("a go does not name the absent fragments of its bucket");
        }
      }
    }
  }
}

// ---- new epochs ----

void StepSimulator::LaneDies(Lane& lane) {
  if (lane.dead) return;
  lane.dead = true;
  Send(nodes_[lane.node.value()].to_coordinator, Travel(), 5,
       [epoch = lane.epoch, this] { AtCoordinatorLaneLost(epoch); });
}

void StepSimulator::AtCoordinatorLaneLost(uint32_t epoch) {
  if (epoch != epoch_ || coordinator_.lost()) return;
  ++epoch_;
  ++counts_.reformations;
  ready_.clear();
  coordinator_.Suspend();
  for (Node& node : nodes_) {
    Send(node.from_coordinator, Travel(), 5, [&node, now = epoch_, this] { Reform(node, now); });
  }
}

// Its lanes end, and new ones start over the same memory.
void StepSimulator::Reform(Node& node, uint32_t epoch) {
  if (node.epoch >= epoch) return;
  node.epoch = epoch;
  for (Lane& lane : node.lanes) {
    lane.dead = false;
    lane.epoch = epoch;
    lane.armed = {};
    lane.reported.clear();
    lane.gone.clear();
    lane.gathered = false;
    lane.publishing = Attempt(0);
    lane.published.clear();
    lane.publish_reported = false;
  }
  const NodeRank rank = node.lanes.front().node;
  After(Pick(0, 300 * kMillisecond), [&node, rank, epoch, this] {
    if (node.epoch != epoch) return;
    Send(node.to_coordinator, Travel(), 5,
         [rank, epoch, this] { AtCoordinatorPlanReady(rank, epoch); });
  });
}

void StepSimulator::AtCoordinatorPlanReady(NodeRank node, uint32_t epoch) {
  if (epoch != epoch_ || coordinator_.lost() || !ready_.insert(node).second) return;
  if (ready_.size() < nodes_.size()) return;
  retelling_ = true;
  AtCoordinator(coordinator_.OnReformed(MakeAttempt(GroupEpoch(epoch), 1), OutcomeReason::kLaneLost,
                                        "a lane died"));
  retelling_ = false;
}

// ---- lanes ----

void StepSimulator::Tell(Lane& lane, Event event) {
  Send(lane.from_member, Pick(0, 100), 0, [&lane, epoch = lane.epoch, event = std::move(event)] {
    if (!lane.dead && lane.epoch == epoch) event();
  });
}

// A commit, once, from the gradients that lie gathered: in the lane's own life or its successor's.
void StepSimulator::Apply(Lane& lane, const Decision& decision) {
  if (lane.applied >= decision.attempt) return;
  if (lane.kept != decision.attempt) Fail("committed ungathered");
  lane.applied = decision.attempt;
  ++lane.commits;
  if (decision.attempt.value() >> 32 != lane.epoch) ++counts_.redone;
}

void StepSimulator::Progress(Lane& lane) {
  if (lane.dead) return;
  if (lane.publishing.value() != 0) Publish(lane);
  if (lane.publishing.value() == 0 && lane.armed.attempt.value() != 0) Collect(lane);
}

void StepSimulator::Report(Lane& lane, RailOperation operation, BucketId bucket, Attempt attempt,
                           AttemptKind kind, bool gradients) {
  Node& node = nodes_[lane.node.value()];
  Send(lane.to_member, Pick(0, 200), 0,
       [&lane, &node, operation, bucket, attempt, kind, gradients, epoch = lane.epoch, this] {
         if (lane.epoch != epoch) return;  // of a lane that has been given up
         Send(node.to_coordinator, Travel(), 5,
              [&lane, &node, operation, bucket, attempt, kind, gradients, this] {
                if (gradients && !heard_.contains({attempt, &node}))
                  gradients_reported_.insert(attempt);
                reports_.insert({attempt, operation, lane.rail, bucket, lane.node});
                AtCoordinator(coordinator_.OnRailReady(Now(), attempt, lane.node, lane.rail,
                                                       operation, bucket, kind));
              });
       });
}

void StepSimulator::Collect(Lane& lane) {
  Node& node = nodes_[lane.node.value()];
  const Attempt attempt = lane.armed.attempt;
  const auto& submitted = lane.submitted[attempt];
  const auto begun = lane.begun.find(attempt);
  const bool away = node.ranks.empty();  // it knows what it has been told, and sends nothing
  const bool step = away
                        ? begun == lane.begun.end() || begun->second == AttemptKind::kStep
                        : submitted.empty() || submitted.begin()->second.kind == AttemptKind::kStep;
  const bool all = away ? begun != lane.begun.end() : submitted.size() == node.ranks.size();
  const RailTable& table = step ? world_.tables.partials : world_.tables.adopts;
  bool complete = all;
  for (const auto& entry : table[lane.rail.value()]) {
    const BucketId bucket = entry.first;
    if (!entry.second.contains(lane.node)) continue;
    const bool only_receives = step && !world_.tables.SendsPartials(lane.rail, bucket, lane.node);
    const bool ready = std::all_of(node.ranks.begin(), node.ranks.end(), [&](TrainerRank rank) {
      const Trainer& trainer = trainers_[rank.value()];
      return submitted.contains(rank) ||
             (step && trainer.attempt == attempt && trainer.early.contains(bucket));
    });
    if ((ready || only_receives) && lane.reported.insert(bucket).second) {
      Report(lane, RailOperation::kCollect, bucket, attempt,
             step ? AttemptKind::kStep : AttemptKind::kPush, step && !only_receives);
    }
    complete = complete && lane.gone.contains(bucket);
  }
  if (!complete || lane.gathered) return;
  lane.gathered = true;
  lane.kept = attempt;
  std::vector<UnitNorm> norms;
  const LaneId id(lane.node.value() * world_.inputs.lanes_per_node + lane.rail.value());
  const double sum =
      FateOf(lane.armed.step, "nan", 15) ? std::numeric_limits<double>::quiet_NaN() : 1;
  for (const Unit& unit : world_.plan.units) {
    if (step && unit.owner == id) norms.push_back({unit.id, 0, {sum}, unit.first_element});
  }
  Send(lane.to_member, Pick(0, 500), 0, [&lane, &node, attempt, norms, epoch = lane.epoch, this] {
    if (lane.epoch != epoch) return;
    auto vote = node.member.OnGathered(attempt, lane.rail, norms);
    if (!vote) return;
    Send(node.to_coordinator, Travel(), 5, [&lane, attempt, vote = *std::move(vote), this] {
      AtCoordinator(coordinator_.OnVote(Now(), attempt, lane.node, world_.plan.digest, vote, ""));
    });
  });
}

void StepSimulator::Publish(Lane& lane) {
  std::vector<BucketId> mine;
  for (const auto& [bucket, members] : world_.tables.weights[lane.rail.value()]) {
    if (members.contains(lane.node)) mine.push_back(bucket);
  }
  if (!lane.publish_reported) {
    lane.publish_reported = true;
    std::vector<BucketId> order = mine;  // updates end in the order of batches
    for (size_t i = 1; i < order.size(); ++i) std::swap(order[i], order[Pick(0, i)]);
    for (BucketId bucket : order)
      Report(lane, RailOperation::kPublish, bucket, lane.publishing, AttemptKind::kStep, false);
  }
  if (lane.published.size() == mine.size()) lane.publishing = Attempt(0);
}

// ---- the run ----

bool StepSimulator::AllDone() const {
  return std::all_of(trainers_.begin(), trainers_.end(), [](const Trainer& trainer) {
    return trainer.done || trainer.hangs_at == trainer.committed;
  });
}

std::string StepSimulator::Describe() const {
  std::string text =
      absl::StrCat("coordinator open ", coordinator_.Current().attempt.value() & 0xffff);
  for (const Trainer& trainer : trainers_) {
    absl::StrAppend(&text, "; rank ", trainer.rank.value(), " attempt ",
                    trainer.attempt.value() & 0xffff, " committed ", trainer.committed.value(),
                    " member open ", trainer.node->member.open().attempt.value() & 0xffff,
                    trainer.dead ? " dead" : "", trainer.done ? " done" : "");
  }
  return text;
}

void StepSimulator::Tick() {
  AtCoordinator(coordinator_.OnTick(Now()));
  ticking_ = !AllDone();
  if (!ticking_) return;
  if (now_ > kGivesUpAfter) return Fail(absl::StrCat("a trainer waits for ever: ", Describe()));
  After(100 * kMillisecond, [this] { Tick(); });
}

std::string StepSimulator::Run() {
  if (Chance(10)) {
    disturbed_ = true;
    trainers_[Pick(0, static_cast<int64_t>(trainers_.size()) - 1)].hangs_at =
        StepId(Pick(0, last_step_.value() - 1));
  }
  for (Trainer& trainer : trainers_) {
    trainer.replaced = lingers_ && Chance(70);
    if (!lingers_ || !Chance(15)) continue;
    const int64_t deaths = Pick(1, 2);
    for (int64_t i = 0; i < deaths; ++i) {
      After(Pick(0, 400 * kMillisecond), [&trainer, this] { Die(trainer, "it was killed"); });
    }
  }
  while (Chance(15)) {
    std::vector<Lane>& lanes = nodes_[Pick(0, world_.inputs.nodes - 1)].lanes;
    Lane& lane = lanes[Pick(0, static_cast<int64_t>(lanes.size()) - 1)];
    After(Pick(0, 400 * kMillisecond), [&lane, this] { LaneDies(lane); });
  }
  if (Chance(10)) {
    disturbed_ = true;
    After(Pick(0, 200 * kMillisecond), [this] {
      AtCoordinator(coordinator_.OnLost(Now(), OutcomeReason::kPeerLost, "a node is gone"));
    });
  }
  AtCoordinator({coordinator_.Current()});
  for (Trainer& trainer : trainers_) {
    // A session starts when its member has the plan, and with it the first attempt.
    Send(trainer.node->from_coordinator, Pick(0, 5 * kMillisecond), 0,
         [&trainer, this] { Begin(trainer); });
  }
  After(100 * kMillisecond, [this] { Tick(); });
  while (!queue_.empty() && failure_.empty()) {
    now_ = queue_.top().at;
    if (now_ > kGivesUpAfter) Fail(absl::StrCat("something goes on for ever: ", Describe()));
    const Event event = std::move(const_cast<Queued&>(queue_.top()).event);
    queue_.pop();
    event();
  }
  if (failure_.empty()) CheckTheEnd();
  return failure_;
}

// Everything is delivered.
void StepSimulator::CheckTheEnd() {
  if (!AllDone()) return Fail("a trainer never got an answer");
  // A job that was lost has nobody to replace a dead lane, and others wait for it on the rail.
  const bool lane_missing = std::any_of(nodes_.begin(), nodes_.end(), [](const Node& node) {
    return std::any_of(node.lanes.begin(), node.lanes.end(),
                       [](const Lane& lane) { return lane.dead; });
  });
  for (const Node& node : nodes_) {
    if (node.decisions.size() != decided_.size() ||
        !std::equal(node.decisions.begin(), node.decisions.end(), decided_.begin(),
                    [](Attempt a, const auto& d) { return a == d.first; })) {
      Fail("a member heard other decisions, or in another order");
    }
    if (node.member.last_committed() != consumed_) Fail("a member is at another step");
    // A job that was given up while its lanes were dead or new has none to apply anything.
    const bool given_up = coordinator_.lost() && ready_.size() < nodes_.size() && epoch_ > 1;
    for (const Lane& lane : node.lanes) {
      if (given_up || (coordinator_.lost() && lane.dead)) continue;
      if (lane.commits != counts_.commits + counts_.pushes) Fail("a commit was not applied once");
      const bool stuck = coordinator_.lost() && lane_missing;
      if (lane.publishing.value() != 0 && !stuck) Fail("weights were never published");
    }
  }
  for (const Trainer& trainer : trainers_) {
    if (trainer.done && !disturbed_ && trainer.committed != last_step_) {
      Fail("a trainer stopped before the last step");
    }
  }
}

}  // namespace dmuond::scheduler::testing
