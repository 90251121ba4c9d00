#include "server/daemon/calls/attach_calls.h"

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "dmuond/wire/timeline.h"
#include "scheduler/job/refusals.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/awaited.h"
#include "server/daemon/calls/session_calls.h"

namespace dmuond::server {
namespace {

using scheduler::NodeJob;
using scheduler::RankTable;

constexpr size_t kArenasMax = 64;
constexpr size_t kDigestBytes = 16;

absl::Status CheckDigests(const RankTable::Session& session,
                          const v1::AttachBuffersRequest& request) {
  const int fragments = session.registration.fragments_size();
  if (!request.weight_digests().empty() && request.weight_digests_size() != fragments) {
    return Error(absl::StatusCode::kInvalidArgument, "DIGEST_INVALID",
                 Say("rank ", Named("rank", session.rank), " sends digests of ",
                     Named("digests", request.weight_digests_size()), " weights; it registered ",
                     Named("fragments", fragments), " fragments"));
  }
  for (int f = 0; f < request.weight_digests_size(); ++f) {
    const size_t bytes = request.weight_digests(f).size();
    if (bytes == 0 || bytes == kDigestBytes) continue;
    return Error(absl::StatusCode::kInvalidArgument, "DIGEST_INVALID",
                 Say("rank ", Named("rank", session.rank), ": the digest of fragment ",
                     Named("fragment", f), " has ", Named("bytes", bytes), " bytes; it must have ",
                     Named("bytes_wanted", kDigestBytes), ", or none"));
  }
  return absl::OkStatus();
}

// `device_uuid`: of the device that the trainer computes with; empty: it has none.
absl::Status CheckArenas(const NodeDevice& device, const RankTable::Session& session,
                         const std::string& device_uuid, const v1::AttachBuffersRequest& request) {
  if (request.arenas_size() > static_cast<int>(kArenasMax)) {
    return Error(absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
                 Say("rank ", Named("rank", session.rank), " asks for ",
                     Named("arenas", request.arenas_size()), " arenas; at most ",
                     Named("arenas_max", kArenasMax), " are allowed"));
  }
  std::map<uint32_t, int64_t> sizes;
  for (const v1::Arena& arena : request.arenas()) {
    if (arena.size_bytes() <= 0) {
      return Error(
          absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
          Say("arena ", Named("arena", arena.id()), " of rank ", Named("rank", session.rank),
              " has ", Named("bytes", arena.size_bytes()), " bytes"));
    }
    if (absl::Status maps = device.CheckArena(session.rank, device_uuid, arena); !maps.ok()) {
      return maps;
    }
    if (!sizes.emplace(arena.id(), arena.size_bytes()).second) {
      return Error(absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
                   Say("arena ", Named("arena", arena.id()), " of rank ",
                       Named("rank", session.rank), " is named twice"));
    }
  }
  for (const scheduler::Fragment& fragment : session.layout->fragments) {
    const scheduler::Parameter& parameter = session.layout->parameters[fragment.parameter];
    if (parameter.route == scheduler::Route::kTrainer || scheduler::Empty(fragment.box)) continue;
    const auto check = [&](const char* what, const scheduler::Slice& slice,
                           scheduler::ElementType type) -> absl::Status {
      int64_t end = 0;
      absl::Status status = scheduler::SliceEnd(slice, fragment.box, type, end);
      if (!status.ok()) {
        return Error(
            absl::StatusCode::kInvalidArgument, "ARENA_TOO_SMALL",
            Say(Named("tensor", what), " of parameter '", Named("parameter", parameter.name),
                "', rank ", Named("rank", session.rank), ": ", scheduler::MessageOf(status)));
      }
      const auto size = sizes.find(slice.arena);
      if (size == sizes.end()) {
        return Error(
            absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
            Say(Named("tensor", what), " of parameter '", Named("parameter", parameter.name),
                "', rank ", Named("rank", session.rank), ": arena ", Named("arena", slice.arena),
                " is not attached"));
      }
      if (end > size->second) {
        return Error(
            absl::StatusCode::kInvalidArgument, "ARENA_TOO_SMALL",
            Say(Named("tensor", what), " of parameter '", Named("parameter", parameter.name),
                "', rank ", Named("rank", session.rank), ": ends at byte ", Named("end_bytes", end),
                " of arena ", Named("arena", slice.arena), ", which has ",
                Named("arena_bytes", size->second)));
      }
      return absl::OkStatus();
    };
    absl::Status status = check("gradient", fragment.gradient, parameter.gradient_type);
    if (!status.ok()) return status;
    status = check("weight", fragment.weight, parameter.weight_type);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::AttachBuffersReply> AttachCalls::AttachBuffers(
    const v1::AttachBuffersRequest& request, const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  // Its descriptors go out once: a call that is repeated gets the answer of the first.
  const std::string bytes = request.SerializeAsString();
  if (!(*found)->attach_request.empty()) {
    if ((*found)->attach_request != bytes) {
      return Error(absl::StatusCode::kFailedPrecondition, "ARENA_INVALID",
                   Say("rank ", Named("rank", (*found)->rank),
                       " has attached other buffers before; close the session first"));
    }
    absl::StatusOr<bool> ended = core_.Wait(
        [&]() DMUOND_REQUIRES(core_.mutex) {
          found = core_.Find(request.key());
          return !found.ok() || (*found)->attach_request.empty() ||
                 (*found)->attach_reply.has_value();
        },
        Core::Deadline::max(), cancelled);
    if (!ended.ok()) return ended.status();
    if (!found.ok()) return found.status();
    if ((*found)->attach_reply.has_value()) return *(*found)->attach_reply;
  }
  (*found)->attach_request = bytes;
  // To its end, though the caller's connection may be cut: the caller will ask again.
  absl::StatusOr<v1::AttachBuffersReply> reply = AttachOnce(request);
  found = core_.Find(request.key());
  if (found.ok() && reply.ok()) {
    core_.job.TellAttached((*found)->id);
    core_.WriteRecord();
    (*found)->attach_reply = *reply;
  } else if (found.ok()) {
    (*found)->attach_request.clear();
  }
  core_.mutex.Changed();
  return reply;
}

absl::Status AttachCalls::SendToTrainer(const v1::SessionKey& key, const v1::AttachFrame& frame,
                                        int fd) {
  constexpr std::chrono::seconds kUntilNoticed{10};
  absl::StatusOr<Client*> found = core_.Find(key);
  if (!found.ok()) return found.status();
  absl::Status sent = core_.attach->Send((*found)->attach, frame, fd);
  if (ReasonOf(sent) != "TRAINER_LOST") return sent;
  absl::StatusOr<bool> noticed = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        found = core_.Find(key);
        return !found.ok();
      },
      std::chrono::steady_clock::now() + kUntilNoticed, [] { return false; });
  return noticed.ok() && *noticed ? found.status() : sent;
}

absl::StatusOr<AttachCalls::TrainerMemory> AttachCalls::Allocate(
    const v1::AttachBuffersRequest& request, uint32_t buckets) {
  const scheduler::TrainerRank rank((*core_.Find(request.key()))->rank);
  // A predecessor's call may still be at it, whose descriptors go when the rank asks again.
  absl::StatusOr<bool> alone = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) { return !core_.allocating.contains(rank.value()); },
      Core::Deadline::max(), [] { return false; });
  if (!alone.ok()) return alone.status();
  if (absl::StatusOr<Client*> found = core_.Find(request.key()); !found.ok()) {
    return found.status();
  }
  const Client& client = **core_.Find(request.key());
  const std::string device_uuid = client.device_uuid;
  const std::shared_ptr<JobMemory> memory = core_.memory.memory();
  const bool kept = memory->KeepFromOthers(rank, *client.process);
  if (kept) {
    log::Warn("a replacement gets arenas of its own: the process before it may still write",
              {{"job", core_.job.name()},
               {"rank", rank.value()},
               {"kept_bytes", memory->KeptBytes(rank)}});
  }
  // Its process still uses what it has mapped, which goes with the last who does.
  if (request.fresh()) memory->DropArenas(rank);
  if (kept || request.fresh()) core_.job.DropAttachment(rank.value());
  core_.allocating.insert(rank.value());
  core_.mutex.Unlock();
  absl::StatusOr<TrainerMemory> made = [&]() -> absl::StatusOr<TrainerMemory> {
    TrainerMemory made;
    for (const v1::Arena& arena : request.arenas()) {
      TrainerMemory::Arena& place = made.arenas.emplace_back();
      if (arena.has_cuda_ipc()) continue;  // the trainer has it
      absl::StatusOr<int> fd =
          memory->Arena(rank, device_uuid, arena.id(), arena.size_bytes(), place.kept);
      if (!fd.ok()) return fd.status();
      place.fd = *fd;
    }
    absl::StatusOr<int> timeline = memory->Timeline(rank, buckets);
    if (!timeline.ok()) return timeline.status();
    made.timeline = *timeline;
    return made;
  }();
  core_.mutex.Lock();
  core_.allocating.erase(rank.value());
  core_.mutex.Changed();
  return made;
}

absl::Status AttachCalls::WaitUntilMappable(const v1::SessionKey& key) {
  absl::StatusOr<Client*> found = core_.Find(key);
  if (!found.ok()) return found.status();
  const int64_t refusals = core_.SessionOf(**found).refusals;
  std::optional<absl::Status> not_yet;
  const auto ready = [&]() DMUOND_REQUIRES(core_.mutex) {
    found = core_.Find(key);
    if (!found.ok() || core_.SessionOf(**found).refusals > refusals ||
        !core_.job.WhyNoLanesCome().ok()) {
      return true;
    }
    not_yet = core_.job.WhyNotYetMapped((*found)->id);
    return !not_yet.has_value();
  };
  absl::StatusOr<bool> come = false;
  // As long as nodes get something done, which the coordinator watches: a snapshot may be large.
  do {
    come = core_.Wait(ready,
                      std::chrono::steady_clock::now() + core_.options.coordinator.register_timeout,
                      [] { return false; });
  } while (come.ok() && !*come && core_.job.exists() &&
           (core_.job.restores_somewhere() || core_.job.parked()));
  if (!come.ok()) return come.status();
  if (!found.ok()) return found.status();
  const RankTable::Session& session = core_.SessionOf(**found);
  if (session.refusals > refusals) return RefusalOf(session);
  if (absl::Status over = core_.job.WhyNoLanesCome(); !over.ok()) return over;
  if (not_yet.has_value()) return *not_yet;
  // What is being published still goes to the memory that the lanes have mapped now.
  return core_.WaitUntilPublished([] { return false; });
}

absl::Status AttachCalls::HandOut(const v1::AttachBuffersRequest& request,
                                  const TrainerMemory& memory,
                                  v1::LaneCommand::AttachTrainer& attach) {
  const uint64_t session = request.key().session();
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  core_.memory.memory()->GiveTo(scheduler::TrainerRank((*found)->rank), (*found)->process);
  for (size_t i = 0; i < memory.arenas.size(); ++i) {
    const v1::Arena& arena = request.arenas(static_cast<int>(i));
    *attach.add_arenas() = arena;
    if (arena.has_cuda_ipc()) continue;
    v1::AttachFrame frame;
    v1::AttachFrame::ArenaMemory& told = *frame.mutable_arena();
    told.set_session(session);
    told.set_arena(arena.id());
    told.set_size_bytes(arena.size_bytes());
    told.set_kept(memory.arenas[i].kept);
    absl::Status sent = SendToTrainer(request.key(), frame, memory.arenas[i].fd);
    if (!sent.ok()) return sent;
  }
  const auto timeline_bytes = static_cast<int64_t>(wire::TimelineBytes(attach.buckets()));
  v1::AttachFrame frame;
  frame.mutable_timeline()->set_session(session);
  frame.mutable_timeline()->set_buckets(attach.buckets());
  frame.mutable_timeline()->set_size_bytes(timeline_bytes);
  attach.set_timeline_bytes(timeline_bytes);
  return SendToTrainer(request.key(), frame, memory.timeline);
}

absl::StatusOr<v1::AttachBuffersReply> AttachCalls::AttachOnce(
    const v1::AttachBuffersRequest& request) {
  NodeJob& job = core_.held_job();
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  const uint64_t id = (*found)->id;
  {
    const RankTable::Session& session = core_.SessionOf(**found);
    if (session.state == RankTable::State::kOpen && session.refusals > 0) {
      return RefusalOf(session);
    }
    if (job.plan() == nullptr || session.state == RankTable::State::kOpen) {
      return Error(absl::StatusCode::kFailedPrecondition, "LAYOUT_MISSING",
                   Say("rank ", Named("rank", session.rank), " must register its layout first"));
    }
    absl::Status checked = CheckArenas(core_.device, session, (*found)->device_uuid, request);
    checked.Update(CheckDigests(session, request));
    if (!checked.ok()) return checked;
  }
  if (absl::Status mappable = WaitUntilMappable(request.key()); !mappable.ok()) return mappable;
  if (found = core_.Find(request.key()); !found.ok()) return found.status();

  v1::LaneCommand command;
  v1::LaneCommand::AttachTrainer& attach = *command.mutable_attach();
  attach.set_rank((*found)->rank);
  attach.set_incarnation((*found)->incarnation);
  attach.set_buckets(static_cast<uint32_t>(job.plan()->buckets));
  attach.set_poison_parameters((*found)->poison);
  absl::StatusOr<TrainerMemory> memory = Allocate(request, attach.buckets());
  if (found = core_.Find(request.key()); !found.ok()) return found.status();
  if (absl::Status failure = job.failure(); !failure.ok()) return failure;
  if (!memory.ok()) {
    const scheduler::TrainerRank rank((*found)->rank);
    const int64_t kept_bytes = core_.memory.memory()->KeptBytes(rank);
    return kept_bytes == 0
               ? WithReason(memory.status(), "MEMORY_EXHAUSTED")
               : scheduler::PredecessorUnseen(rank.value(), kept_bytes, memory.status());
  }
  absl::Status handed = HandOut(request, *memory, attach);
  if (!handed.ok()) return handed;
  if (found = core_.Find(request.key()); !found.ok()) return found.status();
  fault::FaultPoint("daemon.attach");
  const int64_t timeline_bytes = attach.timeline_bytes();
  core_.Do(job.BeginMapping(id, std::move(command)));

  const auto from_now = [this] {
    return std::chrono::steady_clock::now() + core_.options.coordinator.register_timeout;
  };
  absl::StatusOr<bool> attached = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        found = core_.Find(request.key());
        return !found.ok() || job.AllMapped(id) || !job.WhyNoLanesCome().ok();
      },
      from_now(), [] { return false; });
  if (!attached.ok()) return attached.status();
  if (!found.ok()) return found.status();
  if (absl::Status over = job.WhyNoLanesCome(); !over.ok()) return over;
  if (!job.AllMapped(id)) {
    return Error(absl::StatusCode::kDeadlineExceeded, "GROUP_NOT_READY",
                 "not every lane has mapped the trainer's memory in time");
  }
  if (absl::Status mapped = core_.SessionOf(**found).map_error; !mapped.ok()) return mapped;
  fault::FaultPoint("daemon.attached");
  // A job from a snapshot begins when every rank is attached, with the snapshot's weights.
  const bool begins = job.begins_from_snapshot();
  core_.Do(job.Attach(id, {request.weight_digests().begin(), request.weight_digests().end()},
                      request.broadcast()));
  // Its weights may not be those of other ranks: then the job has ended.
  if (found = core_.Find(request.key()); !found.ok()) return found.status();
  if (absl::Status failure = job.failure(); !failure.ok()) return failure;
  if (begins) {
    absl::StatusOr<bool> begun =
        WaitUntilRestarted(request.key(), from_now(), [] { return false; });
    if (!begun.ok()) return begun.status();
    if (found = core_.Find(request.key()); !found.ok()) return found.status();
    if (!*begun) {
      return Error(absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
                   Say("job '", Named("job", job.name()), "' begins at step ",
                       Named("step", job.wire().restore().step() + 1),
                       " when every rank has attached its buffers; these have not in time: ",
                       Named("missing", MissingRanks(core_, [](const RankTable::Session* one) {
                               return one != nullptr && one->mapped();
                             }))));
    }
    core_.Do(job.PublishSince(id, job.applied_attempt()));
  }
  v1::AttachBuffersReply reply;
  reply.set_timeline_bytes(timeline_bytes);
  reply.set_next_attempt(job.steps()->open().attempt.value());
  reply.set_published(job.has_state());
  if (job.has_state()) {
    reply.set_last_committed_step(job.LastCommitted());
    reply.set_trainer_state(job.TrainerStateOf((*found)->rank));
  }
  return reply;
}

absl::StatusOr<bool> AttachCalls::WaitUntilRestarted(const v1::SessionKey& key,
                                                     Core::Deadline deadline,
                                                     const Core::Cancelled& cancelled) {
  const NodeJob& job = core_.held_job();
  absl::StatusOr<Client*> found = core_.Find(key);
  absl::StatusOr<bool> begun = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        found = core_.Find(key);
        return !found.ok() || !job.failure().ok() ||
               core_.SessionOf(**found).must_acknowledge.has_value() ||
               job.WhyNotRestarted().has_value() || job.Restarted();
      },
      deadline, cancelled);
  if (!begun.ok()) return begun.status();
  if (!found.ok()) return found.status();
  if (absl::Status failure = job.failure(); !failure.ok()) return failure;
  if (const auto why = job.WhyNotRestarted(); why.has_value()) {
    return Error(absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
                 Say("job '", Named("job", job.name()), "' does not go on from step ",
                     Named("to_step", job.wire().restore().step()), ": ", *why));
  }
  return begun;
}

absl::StatusOr<v1::AckRollbackReply> AttachCalls::AckRollback(const v1::AckRollbackRequest& request,
                                                              const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  NodeJob& job = core_.held_job();
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  const RankTable::Session& session = core_.SessionOf(**found);
  const scheduler::Rollback acknowledged{request.to_step(), request.epoch()};
  if (session.must_acknowledge.has_value()) {
    // A late call of an earlier one is no answer to this one.
    if (session.must_acknowledge != acknowledged) return NodeJob::CheckNotRolledBack(session);
    (*found)->acknowledge_reply.reset();
    fault::FaultPoint("daemon.acknowledged");
    core_.Do(job.Acknowledge(session.id));
  } else if (session.acknowledged != acknowledged) {
    return Error(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
                 Say("rank ", Named("rank", session.rank), " acknowledges step ",
                     Named("to_step", request.to_step()), " in epoch ",
                     Named("epoch", request.epoch()), ", and the job has not gone back then"));
  }
  // The coordinator ends it by then: a rank that lives has step_timeout to come, and its place
  // waits session_linger. Ours, a little later, is for a coordinator that is gone.
  const DaemonOptions& options = core_.options;
  const auto begun_within = options.coordinator.step.session_linger + options.step_timeout +
                            options.coordinator.register_timeout + std::chrono::seconds(10);
  absl::StatusOr<bool> begun = false;
  do {
    begun = WaitUntilRestarted(request.key(), std::chrono::steady_clock::now() + begun_within,
                               cancelled);
  } while (begun.ok() && !*begun && job.restores());
  if (!begun.ok()) return begun.status();
  if (found = core_.Find(request.key()); !found.ok()) return found.status();
  absl::Status again = NodeJob::CheckNotRolledBack(core_.SessionOf(**found));
  if (!again.ok()) return again;
  if (!*begun) {
    return Error(absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
                 Say("the coordinator has not said within ",
                     Named("timeout_ms", std::chrono::milliseconds(begun_within).count()),
                     " ms that every rank has acknowledged, or come back. Missing: ",
                     Named("missing", MissingRanks(core_, [](const RankTable::Session* one) {
                             return one != nullptr && one->mapped() &&
                                    !one->must_acknowledge.has_value();
                           }))));
  }
  // Once: a copy of the call may be late, and the trainer write its weights meanwhile.
  std::optional<v1::AckRollbackReply>& reply = (*found)->acknowledge_reply;
  if (!reply.has_value()) {
    core_.Do(job.PublishSince((*found)->id, job.applied_attempt()));
    reply.emplace();
    reply->set_trainer_state(job.TrainerStateOf((*found)->rank));
    reply->set_next_attempt(job.steps()->open().attempt.value());
  }
  return *reply;
}

}  // namespace dmuond::server
