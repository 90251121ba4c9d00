// The sessions of this node's trainers, once they are open: what the coordinator is told of them,
// their layouts and memory, and their end.
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/difference.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/refusals.h"
#include "scheduler/reason.h"
#include "scheduler/shown_pid.h"

namespace dmuond::scheduler {

// ---- what the coordinator is told ----

v1::MemberMessage NodeJob::NewsOfSession(const RankTable::Session& session) const {
  v1::MemberMessage message;
  v1::RankSession& told = *message.mutable_rank_session();
  told.set_rank(session.rank);
  told.set_node(options_.node);
  told.set_job(job_->name);
  told.set_world_size(job_->world_size);
  told.set_incarnation(session.incarnation);
  told.set_pid(session.pid);
  told.set_uid(session.uid);
  told.set_job_incarnation(job_->wire.job_incarnation());
  if (job_->resume.has_value()) *told.mutable_restore() = ToProto(job_->resume->id());
  if (job_->owner_uid.has_value()) told.set_owner_uid(*job_->owner_uid);
  // Once it has a plan the job is its launch's own: what is told again discards nothing.
  told.set_discard(session.discards && !planned());
  told.set_launch(job_->launch);
  if (!planned() && job_->resume.has_value() && job_->resume->manifest.plan().has_costs()) {
    *told.mutable_costs() = job_->resume->manifest.plan().costs();
  }
  return message;
}

v1::MemberMessage NodeJob::NewsOfAttached(const RankTable::Session& session) const {
  v1::MemberMessage message;
  v1::RankAttached& attached = *message.mutable_rank_attached();
  attached.set_rank(session.rank);
  attached.set_incarnation(session.incarnation);
  attached.set_epoch(epoch_);
  // Nobody asks a job with state what its ranks have begun with.
  if (job_->has_state) return message;
  attached.mutable_weight_digests()->Add(session.weight_digests.begin(),
                                         session.weight_digests.end());
  attached.set_broadcast(session.broadcast);
  return message;
}

// The coordinator may have missed what happened here while the link was down; it ignores what it
// knows already.
void NodeJob::TellRanksAgain() {
  for (const auto& [rank, gone] : ranks_.gone()) {
    v1::MemberMessage message;
    *message.mutable_rank_gone() = gone;
    Tell(std::move(message));
  }
  for (const auto& [id, session] : ranks_.sessions()) {
    Tell(NewsOfSession(session));
    if (session.mapped() && !session.must_acknowledge.has_value()) Tell(NewsOfAttached(session));
  }
}

// ---- layout and memory ----

absl::Status NodeJob::CheckReplacement(const RankTable::Session& session,
                                       const v1::Registration& registration) const {
  const absl::StatusOr<v1::Registration> known = RegistrationOf(job_->wire, session.rank);
  if (!known.ok()) return known.status();
  const v1::Registration& before = *known;
  const auto differs = [&session, &job = job_->name](const std::string& what) {
    return Error(
        absl::StatusCode::kFailedPrecondition, "LAYOUT_DIFFERS",
        scheduler::Say("rank ", Named("rank", session.rank), " replaces a trainer of job '",
                       Named("job", job), "' but registers another ", what,
                       "; start it with the model and options that the job has, or all ranks "
                       "with DMUOND_RESUME=discard, which begins the job anew"));
  };
  // `name`: of one of them, by its number.
  const auto compare = [&](const char* all, const auto& was, const auto& is, const auto& name) {
    if (was.size() != is.size()) {
      return differs(absl::StrCat("number of ", all, ": ", is.size(), ", before ", was.size()));
    }
    for (int i = 0; i < was.size(); ++i) {
      if (was[i].SerializeAsString() == is[i].SerializeAsString()) continue;
      const auto [field, now, then] = FirstDifference(is[i], was[i]);
      return differs(absl::StrCat(name(i), field, ": ", now, ", before ", then));
    }
    return absl::OkStatus();
  };
  if (before.node() != options_.node) {
    return RankMoved(job_->name, session.rank, before.node(), options_.node);
  }
  if (before.SerializeAsString() == registration.SerializeAsString()) return absl::OkStatus();
  const auto parameter = [&](int i) {
    return i < before.parameters_size() ? before.parameters(i).name() : "";
  };
  absl::Status alike =
      compare("parameters", before.parameters(), registration.parameters(),
              [&](int i) { return absl::StrCat("parameter '", parameter(i), "': its "); });
  if (!alike.ok()) return alike;
  alike = compare("boxes", before.fragments(), registration.fragments(), [&](int i) {
    return absl::StrCat("box of '", parameter(before.fragments(i).parameter()), "': its ");
  });
  if (!alike.ok()) return alike;
  alike = compare("groups", before.groups(), registration.groups(),
                  [](int i) { return absl::StrCat("option: groups[", i, "]."); });
  if (!alike.ok()) return alike;
  if (before.bucket_bytes() != registration.bucket_bytes()) {
    return differs(absl::StrCat("bucket_bytes: ", registration.bucket_bytes(), ", before ",
                                before.bucket_bytes()));
  }
  return absl::OkStatus();
}

node::Actions NodeJob::Register(uint64_t id, v1::Registration registration,
                                std::shared_ptr<const Registration> layout) {
  v1::MemberMessage message;
  *message.mutable_registration() = Pack(registration);
  ranks_.Register(id, std::move(registration), std::move(layout));
  Tell(std::move(message));
  return Take();
}

std::optional<absl::Status> NodeJob::WhyNotYetMapped(uint64_t id) const {
  const auto not_yet = Error(absl::StatusCode::kDeadlineExceeded, "GROUP_NOT_READY",
                             scheduler::Say("not every node's lanes were ready in time"));
  if (!job_->steps.has_value() || lanes_come() || epoch_ == 0) return not_yet;
  // A replacement joins the attempt after the one that its predecessor's death has ended.
  const RankTable::Vacancy* vacancy = ranks_.VacancyOf(ranks_.Find(id)->rank);
  if (vacancy != nullptr && job_->steps->open().attempt <= vacancy->attempt) return not_yet;
  return std::nullopt;
}

node::Actions NodeJob::BeginMapping(uint64_t id, v1::LaneCommand command) {
  ranks_.BeginMapping(id, command);
  // Lanes have been replaced since the rank could map its memory: the new ones are told of it with
  // all that is attached, when they are ready.
  const bool lanes_begin =
      job_->phase == Phase::kStarting || job_->phase == Phase::kRestoring || parked();
  if (lanes_begin && job_->over_old_memory) return Take();
  // A lane that is gone is replaced, and the new one maps what is attached.
  node::CommandLanes order;
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    order.lanes.emplace_back(static_cast<int32_t>(i));
  }
  order.command = std::move(command);
  Do(std::move(order));
  return Take();
}

bool NodeJob::AllMapped(uint64_t id) const {
  return !lanes_come() && job_->steps.has_value() &&
         ranks_.Find(id)->lanes_mapped.size() == job_->lanes.size();
}

node::Actions NodeJob::Attach(uint64_t id, std::vector<std::string> weight_digests,
                              bool broadcast) {
  ranks_.Attach(id, job_->steps->open().attempt, std::move(weight_digests), broadcast);
  node::Actions publishes;
  if (job_->has_state) publishes = PublishSince(id, /*has=*/0);
  for (node::Action& action : publishes) Do(std::move(action));
  Tell(NewsOfAttached(*ranks_.Find(id)));
  Wake();
  return Take();
}

node::Actions NodeJob::PublishSince(uint64_t id, uint64_t has) {
  const Attempt open = job_->steps->open().attempt;
  // Lanes that are new since then publish to everybody, under an attempt of the new epoch.
  if (open.value() - 1 <= has || lanes_come() || EpochOf(open).value() != epoch_) return Take();
  v1::LaneCommand republish;
  republish.mutable_republish()->set_attempt(open.value() - 1);
  republish.mutable_republish()->add_ranks(ranks_.Find(id)->rank);
  ToReadyLanes(republish);
  return Take();
}

node::Actions NodeJob::Acknowledge(uint64_t id) {
  ranks_.Acknowledge(id);
  if (!lanes_come()) Tell(NewsOfAttached(*ranks_.Find(id)));
  Wake();
  return Take();
}

// ---- their end ----

node::Actions NodeJob::Close(uint64_t id) {
  EndSession(id, /*closed=*/true,
             absl::StrCat("rank ", ranks_.Find(id)->rank, " closed its session"));
  return Take();
}

node::Actions NodeJob::OnTrainerGone(uint64_t id, const std::string& why) {
  if (ranks_.Find(id) != nullptr) EndSession(id, /*closed=*/false, why);
  return Take();
}

void NodeJob::EndSession(uint64_t id, bool closed, const std::string& detail,
                         const absl::Status& refused) {
  std::optional<Attempt> vacant;
  // The coordinator knows whether there is something to wait for, or all have to begin anew.
  if (!closed && refused.ok() && planned() && job_->failed.ok()) {
    // The attempt that ends with it. One that a job has gone back to waits for all ranks instead.
    vacant = job_->steps.has_value() && !begins_from_snapshot() ? job_->steps->open().attempt
                                                                : Attempt(0);
  }
  const RankTable::Session session = ranks_.End(id, vacant);
  const bool own_memory = ranks_.HasOwnMemory(session);
  // The lanes keep what a dead trainer has: the daemon holds that memory, what is committed is
  // published into it, and the replacement maps it again. But they wait for nothing that its GPU
  // was still to say, or a step that is decided would not be published. Memory for its own process
  // alone is of no use any more: no replacement maps it.
  if (session.mapped() || own_memory) {
    v1::LaneCommand command;
    if (closed || own_memory) {
      command.mutable_detach()->set_rank(session.rank);
      command.mutable_detach()->set_incarnation(session.incarnation);
    } else {
      command.mutable_trainer_gone()->set_rank(session.rank);
      command.mutable_trainer_gone()->set_incarnation(session.incarnation);
    }
    ToReadyLanes(command);
  }
  if (own_memory) job_->lanes.BeginUnmapping(session.rank, session.incarnation);
  if (closed) {
    Say(node::Note::Level::kInfo, "session closed",
        {{"rank", session.rank}, PidField<node::Note::Field>(session.pid)});
  } else {
    Say(node::Note::Level::kWarn, refused.ok() ? "trainer gone" : "session refused",
        {{"step", LastCommitted()},
         {"rank", session.rank},
         PidField<node::Note::Field>(session.pid),
         {"what", detail}});
  }
  Do(node::SessionEnded{id, refused.ok() ? std::nullopt : std::optional(refused)});
  Wake();
  // The coordinator may have taken one that is refused. For it that one has died: the rank may come
  // again, as one that has closed its session may not.
  v1::MemberMessage message;
  v1::RankGone& gone = *message.mutable_rank_gone();
  gone.set_rank(session.rank);
  gone.set_closed(closed);
  gone.set_detail(detail);
  gone.set_incarnation(session.incarnation);
  ranks_.KeepGone(gone);
  if (closed || own_memory) ranks_.DropAttachment(session.rank);
  Tell(std::move(message));
  if (!ranks_.empty()) return;
  if (job_->phase == Phase::kFailed) return EndJob("nobody is left in a job that was lost");
  // One that the group has not planned is nobody's but its sessions'. The coordinator may have a
  // job of this name that another launch has begun, and this node's ranks are to join that one.
  if (planned() || job_->goes_back) return;
  refused.ok() ? EndJob("nobody is left in a job that registered") : job_.reset();
}

void NodeJob::OnExpel(const v1::ExpelRank& expel) {
  const RankTable::Session* session = ranks_.OfRank(expel.rank());
  if (session == nullptr) return;
  // One that began with a later attempt is another one.
  const Attempt first = session->first_attempt;
  if (first.value() > expel.attempt()) {
    Drops(OfAnotherAttempt(Attempt(expel.attempt()), first), "expel");
    return;
  }
  EndSession(session->id, /*closed=*/false,
             absl::StrCat("rank ", session->rank, " (", SayPid(session->pid).text,
                          ") counts as dead: ", expel.detail()));
}

bool NodeJob::Expel(const std::vector<int32_t>& ranks, const std::string& why) {
  bool any = false;
  for (const int32_t rank : ranks) {
    const RankTable::Session* session = ranks_.OfRank(rank);
    if (session == nullptr) continue;
    any = true;
    EndSession(session->id, /*closed=*/false,
               absl::StrCat("rank ", rank, " (", SayPid(session->pid).text,
                            ") counts as dead: it has submitted, and its device has not come to "
                            "it; ",
                            why));
  }
  return any;
}

}  // namespace dmuond::scheduler
