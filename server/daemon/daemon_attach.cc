// AttachBuffers: a trainer's arenas and timeline, made or kept, handed out and mapped by the lanes.
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/fault/fault_point.h"
#include "dmuond/wire/timeline.h"
#include "server/common/errors.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {
namespace {

constexpr size_t kArenasMax = 64;
constexpr size_t kCudaIpcHandleBytes = 64;
constexpr size_t kDigestBytes = 16;

absl::Status CheckDigests(const Session& session, const v1::AttachBuffersRequest& request) {
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

}  // namespace

absl::Status Daemon::CheckArenas(const Session& session, const v1::AttachBuffersRequest& request) {
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
    if (arena.has_cuda_ipc()) {
      const size_t length = arena.cuda_ipc().handle().size();
      if (length != kCudaIpcHandleBytes) {
        return Error(
            absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
            Say("arena ", Named("arena", arena.id()), " of rank ", Named("rank", session.rank),
                ": a CUDA IPC handle has ", Named("handle_bytes_wanted", kCudaIpcHandleBytes),
                " bytes, this one ", Named("handle_bytes", length)));
      }
      return Error(
          absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
          Say("arena ", Named("arena", arena.id()), " of rank ", Named("rank", session.rank),
              " is a CUDA IPC handle, but this daemon's device is the CPU"));
    }
    if (!sizes.emplace(arena.id(), arena.size_bytes()).second) {
      return Error(absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
                   Say("arena ", Named("arena", arena.id()), " of rank ",
                       Named("rank", session.rank), " is named twice"));
    }
  }
  for (const scheduler::Fragment& fragment : session.layout.fragments) {
    const scheduler::Parameter& parameter = session.layout.parameters[fragment.parameter];
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

absl::StatusOr<v1::AttachBuffersReply> Daemon::AttachBuffers(
    const v1::AttachBuffersRequest& request, const Cancelled& cancelled) {
  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  // Its descriptors go out once: a call that is repeated gets the answer of the first.
  const std::string bytes = request.SerializeAsString();
  if (!(*found)->attach_request.empty()) {
    if ((*found)->attach_request != bytes) {
      return Error(absl::StatusCode::kFailedPrecondition, "ARENA_INVALID",
                   Say("rank ", Named("rank", (*found)->rank),
                       " has attached other buffers before; close the session first"));
    }
    absl::StatusOr<bool> ended = Wait(
        [&]() DMUOND_REQUIRES(mutex_) {
          found = Find(request.key());
          return !found.ok() || (*found)->attach_request.empty() ||
                 (*found)->attach_reply.has_value();
        },
        Deadline::max(), cancelled);
    if (!ended.ok()) return ended.status();
    if (!found.ok()) return found.status();
    if ((*found)->attach_reply.has_value()) return *(*found)->attach_reply;
  }
  (*found)->attach_request = bytes;
  // To its end, though the caller's connection may be cut: the caller will ask again.
  absl::StatusOr<v1::AttachBuffersReply> reply = AttachOnce(request, [] { return false; });
  found = Find(request.key());
  if (found.ok()) {
    if (reply.ok()) (*found)->attach_reply = *reply;
    if (!reply.ok()) (*found)->attach_request.clear();
  }
  mutex_.Changed();
  return reply;
}

absl::Status Daemon::SendToTrainer(const v1::SessionKey& key, const v1::AttachFrame& frame,
                                   int fd) {
  constexpr std::chrono::seconds kUntilNoticed{10};
  absl::StatusOr<Session*> found = Find(key);
  if (!found.ok()) return found.status();
  absl::Status sent = attach_->Send((*found)->attach, frame, fd);
  if (ReasonOf(sent) != "TRAINER_LOST") return sent;
  absl::StatusOr<bool> noticed = Wait(
      [&]() DMUOND_REQUIRES(mutex_) {
        found = Find(key);
        return !found.ok();
      },
      std::chrono::steady_clock::now() + kUntilNoticed, [] { return false; });
  return noticed.ok() && *noticed ? found.status() : sent;
}

void Daemon::PublishSince(const Session& session, uint64_t has) {
  const scheduler::Attempt open = job_->steps->open().attempt;
  // Lanes that are new since then publish to everybody, under an attempt of the new epoch.
  if (open.value() - 1 <= has || job_->reforming || EpochOf(open).value() != epoch_) return;
  v1::LaneCommand republish;
  republish.mutable_republish()->set_attempt(open.value() - 1);
  republish.mutable_republish()->add_ranks(session.rank);
  ToLanes(republish);
}

absl::StatusOr<Daemon::TrainerMemory> Daemon::AllocateForTrainer(
    const v1::AttachBuffersRequest& request, uint32_t buckets) {
  const scheduler::TrainerRank rank(Find(request.key()).value()->rank);
  // A predecessor's call may still be at it, whose descriptors go when the rank asks again.
  absl::StatusOr<bool> alone =
      Wait([&]() DMUOND_REQUIRES(mutex_) { return !allocating_.contains(rank.value()); },
           Deadline::max(), [] { return false; });
  if (!alone.ok()) return alone.status();
  if (absl::StatusOr<Session*> found = Find(request.key()); !found.ok()) return found.status();
  const std::shared_ptr<JobMemory> memory = job_->memory;
  allocating_.insert(rank.value());
  mutex_.Unlock();
  absl::StatusOr<TrainerMemory> made = [&]() -> absl::StatusOr<TrainerMemory> {
    TrainerMemory made;
    if (request.fresh()) memory->DropArenas(rank);
    for (const v1::Arena& arena : request.arenas()) {
      TrainerMemory::Arena& place = made.arenas.emplace_back();
      absl::StatusOr<int> fd = memory->Arena(rank, arena.id(), arena.size_bytes(), place.kept);
      if (!fd.ok()) return fd.status();
      place.fd = *fd;
    }
    absl::StatusOr<int> timeline = memory->Timeline(rank, buckets);
    if (!timeline.ok()) return timeline.status();
    made.timeline = *timeline;
    return made;
  }();
  mutex_.Lock();
  allocating_.erase(rank.value());
  mutex_.Changed();
  return made;
}

absl::StatusOr<v1::AttachBuffersReply> Daemon::AttachOnce(const v1::AttachBuffersRequest& request,
                                                          const Cancelled& cancelled) {
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  Session* session = *found;
  if (session->state == Session::State::kOpen && session->refusals > 0) {
    return RefusalOf(*session);
  }
  if (job_->plan == nullptr || session->state == Session::State::kOpen) {
    return Error(absl::StatusCode::kFailedPrecondition, "LAYOUT_MISSING",
                 Say("rank ", Named("rank", session->rank), " must register its layout first"));
  }
  absl::Status checked = CheckArenas(*session, request);
  checked.Update(CheckDigests(*session, request));
  if (!checked.ok()) return checked;
  const auto from_now = [this] {
    return std::chrono::steady_clock::now() + options_.coordinator.register_timeout;
  };
  const int64_t refusals = session->refusals;
  // Lanes take trainers when they are ready, and an attempt opens when every node's are.
  const auto lanes_ready = [&]() DMUOND_REQUIRES(mutex_) {
    found = Find(request.key());
    if (!found.ok() || (*found)->refusals > refusals || !JobFailure().ok()) return true;
    if (!job_->steps.has_value() || job_->reforming || epoch_ == 0) return false;
    // A replacement joins the attempt after the one that its predecessor's death has ended.
    const auto vacancy = job_->vacancies.find((*found)->rank);
    return vacancy == job_->vacancies.end() ||
           job_->steps->open().attempt > vacancy->second.attempt;
  };
  absl::StatusOr<bool> ready = false;
  // As long as nodes get something done, which the coordinator watches: a snapshot may be large.
  do {
    ready = Wait(lanes_ready, from_now(), cancelled);
  } while (ready.ok() && !*ready && RestoresSomewhere());
  if (!ready.ok()) return ready.status();
  if (!found.ok()) return found.status();
  if ((*found)->refusals > refusals) return RefusalOf(**found);
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  if (!*ready) {
    return Error(absl::StatusCode::kDeadlineExceeded, "GROUP_NOT_READY",
                 "not every node's lanes were ready in time");
  }
  // What is being published still goes to the memory that the lanes have mapped now.
  absl::Status published = WaitUntilPublished(cancelled);
  if (!published.ok()) return published;
  found = Find(request.key());
  if (!found.ok()) return found.status();
  session = *found;

  const auto buckets = static_cast<uint32_t>(job_->plan->buckets);
  v1::LaneCommand command;
  v1::LaneCommand::AttachTrainer& attach = *command.mutable_attach();
  attach.set_rank(session->rank);
  attach.set_incarnation(session->incarnation);
  attach.set_buckets(buckets);
  attach.set_poison_parameters(session->poison);
  // Its process still uses what it has mapped, which goes with the last who does.
  if (request.fresh()) job_->attachments.erase(session->rank);
  absl::StatusOr<TrainerMemory> memory = AllocateForTrainer(request, buckets);
  if (found = Find(request.key()); !found.ok()) return found.status();
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  if (!memory.ok()) return WithReason(memory.status(), "MEMORY_EXHAUSTED");
  session = *found;
  std::vector<int> fds;
  for (size_t i = 0; i < memory->arenas.size(); ++i) {
    const v1::Arena& arena = request.arenas(static_cast<int>(i));
    v1::AttachFrame frame;
    v1::AttachFrame::ArenaMemory& told = *frame.mutable_arena();
    told.set_session(session->id);
    told.set_arena(arena.id());
    told.set_size_bytes(arena.size_bytes());
    told.set_kept(memory->arenas[i].kept);
    absl::Status sent = SendToTrainer(request.key(), frame, memory->arenas[i].fd);
    if (!sent.ok()) return sent;
    session->arenas[arena.id()] = arena.size_bytes();
    *attach.add_arenas() = arena;
    fds.push_back(memory->arenas[i].fd);
  }
  const auto timeline_bytes = static_cast<int64_t>(wire::TimelineBytes(buckets));
  v1::AttachFrame frame;
  frame.mutable_timeline()->set_session(session->id);
  frame.mutable_timeline()->set_buckets(buckets);
  frame.mutable_timeline()->set_size_bytes(timeline_bytes);
  absl::Status sent = SendToTrainer(request.key(), frame, memory->timeline);
  if (!sent.ok()) return sent;
  attach.set_timeline_bytes(timeline_bytes);
  fds.push_back(memory->timeline);
  fault::FaultPoint("daemon.attach");
  session->lanes_attached.clear();
  session->attach_error = absl::OkStatus();
  job_->attachments[session->rank] = command;
  // A lane that is gone is replaced, and the new one maps what is attached.
  for (int32_t i = 0; i < options_.lanes; ++i) ToLane(scheduler::LaneIndex(i), command, fds);

  absl::StatusOr<bool> attached = Wait(
      [&]() DMUOND_REQUIRES(mutex_) {
        found = Find(request.key());
        if (!found.ok() || !JobFailure().ok()) return true;
        return !job_->reforming && job_->steps.has_value() &&
               (*found)->lanes_attached.size() == job_->lanes.size();
      },
      from_now(), cancelled);
  if (!attached.ok()) return attached.status();
  if (!found.ok()) return found.status();
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  if (!*attached) {
    return Error(absl::StatusCode::kDeadlineExceeded, "GROUP_NOT_READY",
                 "not every lane has mapped the trainer's memory in time");
  }
  session = *found;
  if (!session->attach_error.ok()) return session->attach_error;
  fault::FaultPoint("daemon.attached");
  session->state = Session::State::kAttached;
  session->weight_digests.assign(request.weight_digests().begin(), request.weight_digests().end());
  session->broadcast = request.broadcast();
  session->first_attempt = job_->steps->open().attempt;
  job_->vacancies.erase(session->rank);
  if (job_->has_state) PublishSince(*session, /*has=*/0);
  // A job from a snapshot begins when every rank is attached, with the snapshot's weights.
  const bool begins = !job_->has_state && job_->wire.restore_step() > 0;
  Tell(NewsOfAttached(*session));
  // Its weights may not be those of other ranks: then the job has ended.
  found = Find(request.key());
  if (!found.ok()) return found.status();
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  session = *found;
  if (begins) {
    absl::StatusOr<bool> begun = WaitUntilRestarted(request.key(), from_now(), cancelled);
    if (!begun.ok()) return begun.status();
    found = Find(request.key());
    if (!found.ok()) return found.status();
    session = *found;
    if (!*begun) {
      return Error(absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
                   Say("job '", Named("job", job_->name), "' begins at step ",
                       Named("step", job_->wire.restore_step() + 1),
                       " when every rank has attached its buffers; not all have in time: `dmuonctl "
                       "status` on each node lists those that have"));
    }
    PublishSince(*session, job_->applied_attempt);
  }
  v1::AttachBuffersReply reply;
  reply.set_timeline_bytes(timeline_bytes);
  reply.set_next_attempt(job_->steps->open().attempt.value());
  reply.set_published(job_->has_state);
  if (job_->has_state) {
    reply.set_last_committed_step(LastCommitted());
    reply.set_trainer_state(TrainerStateOf(session->rank));
  }
  return reply;
}

}  // namespace dmuond::server
