#include "server/daemon/calls/tensor_calls.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cpu/cpu_memory.h"
#include "scheduler/convert/convert.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/shared/state_table.h"

namespace dmuond::server {
namespace {

constexpr int64_t kChunkElements = (int64_t{1} << 20) / static_cast<int64_t>(sizeof(float));
constexpr int64_t kPartElements = int64_t{1} << 19;  // of one WriteState: half of gRPC's 4 MiB
constexpr std::chrono::seconds kUnitIoTimeout{60};

constexpr v1::StateKind kAllKinds[] = {v1::STATE_KIND_MASTER, v1::STATE_KIND_MOMENTUM,
                                       v1::STATE_KIND_EXP_AVG, v1::STATE_KIND_EXP_AVG_SQ,
                                       v1::STATE_KIND_STEP};

// A push that is sent again brings anew what the one that broke off has brought, which goes when
// its end is noticed: a session may hold so many times its whole state.
constexpr int64_t kPushesHeld = 4;

// Whether the daemon keeps such a tensor of the parameter.
bool KeepsState(const scheduler::Parameter& parameter, v1::StateKind kind) {
  switch (parameter.route) {
    case scheduler::Route::kMuon:
      return HasState(scheduler::UnitKind::kMatrix, kind);
    case scheduler::Route::kAdamW:
      return HasState(scheduler::UnitKind::kPiece, kind);
    case scheduler::Route::kTrainer:
      return false;
  }
  return false;
}

// Of a state tensor of a fragment, as on the wire.
int64_t TensorBytes(const scheduler::Fragment& fragment, v1::StateKind kind) {
  if (kind == v1::STATE_KIND_STEP) return sizeof(double);
  return scheduler::Elements(fragment.box) * static_cast<int64_t>(sizeof(float));
}

// All that a trainer can push, in bytes. REQUIRES: its weights lie in arenas that there are.
int64_t WholeState(const scheduler::Registration& layout) {
  int64_t bytes = 0;
  for (const scheduler::Fragment& fragment : layout.fragments) {
    for (const v1::StateKind kind : kAllKinds) {
      if (!KeepsState(layout.parameters[fragment.parameter], kind)) continue;
      bytes += TensorBytes(fragment, kind);
    }
  }
  return bytes;
}

// Sends one tensor of one fragment in chunks.
bool WriteChunks(const v1::StateChunk& name, absl::string_view bytes, int64_t element_bytes,
                 int64_t step, const std::function<bool(const v1::PullParametersReply&)>& write) {
  const int64_t elements = static_cast<int64_t>(bytes.size()) / element_bytes;
  for (int64_t first = 0; first < elements || first == 0; first += kChunkElements) {
    const int64_t count = std::min(kChunkElements, elements - first);
    v1::PullParametersReply reply;
    reply.set_step(step);
    *reply.mutable_chunk() = name;
    reply.mutable_chunk()->set_first_element(first);
    reply.mutable_chunk()->set_data(
        std::string(bytes.substr(first * element_bytes, count * element_bytes)));
    if (!write(reply)) return false;
    if (elements == 0) break;
  }
  return true;
}

// Units are in order of their parameters.
std::vector<scheduler::UnitId> UnitsOf(const scheduler::Plan& plan, int32_t parameter) {
  std::vector<scheduler::UnitId> units;
  auto unit = std::partition_point(
      plan.units.begin(), plan.units.end(),
      [parameter](const scheduler::Unit& before) { return before.parameter < parameter; });
  for (; unit != plan.units.end() && unit->parameter == parameter; ++unit) {
    units.push_back(unit->id);
  }
  return units;
}

absl::StatusOr<StateTensor> CopyOf(int memory, size_t elements) {
  auto mapping = kernels::cpu::MapShared(memory, elements * sizeof(float));
  if (!mapping.ok()) return mapping.status();
  StateTensor tensor(elements);
  std::memcpy(tensor.data(), (*mapping)->data(), elements * sizeof(float));
  return tensor;
}

// One part of a push. Errors name what does not fit.
absl::Status KeepPart(PendingState& pending, const scheduler::Unit& unit,
                      const v1::WriteStateRequest& part) {
  if (part.kind() == v1::STATE_KIND_STEP) {
    double updates = 0;
    if (part.data().size() != sizeof(updates)) {
      return Error(absl::StatusCode::kInvalidArgument, "STATE_INVALID", "a step of another size");
    }
    std::memcpy(&updates, part.data().data(), sizeof(updates));
    return pending.SetUpdates(part.attempt(), unit.id, updates);
  }
  absl::StatusOr<scheduler::Box> box = FromProto(part.box());
  if (!box.ok()) return box.status();
  const auto bytes = static_cast<int64_t>(part.data().size());
  if (box->begin.size() != unit.box.begin.size() || !scheduler::Contains(unit.box, *box) ||
      bytes != scheduler::Elements(*box) * static_cast<int64_t>(sizeof(float))) {
    return Error(
        absl::StatusCode::kInvalidArgument, "STATE_INVALID",
        Say("box ", Named("box", scheduler::ToString(*box)), " with ", Named("bytes", bytes),
            " bytes does not fit unit ", Named("unit_box", scheduler::ToString(unit.box))));
  }
  StateTensor values(part.data().size() / sizeof(float));
  std::memcpy(values.data(), part.data().data(), part.data().size());
  return WithReason(pending.Add(part.attempt(), unit, part.kind(), *box, values),
                    "MEMORY_EXHAUSTED");
}

}  // namespace

absl::StatusOr<StateTensor> TensorCalls::ReadUnit(scheduler::UnitId id, v1::StateKind kind,
                                                  const Core::Cancelled& cancelled) {
  const std::shared_ptr<const scheduler::Plan> plan = core_.job.plan();
  const scheduler::Unit& unit = plan->units[id.value()];
  const auto elements = static_cast<size_t>(scheduler::Elements(unit.box));
  const int32_t node = core_.NodeOf(unit.owner);
  if (node != core_.options.node) {
    v1::ReadStateRequest request;
    request.set_place(core_.place);
    request.set_job_incarnation(core_.job.wire().job_incarnation());
    request.set_unit(id.value());
    request.set_kind(kind);
    core_.mutex.Unlock();
    absl::StatusOr<StateTensor> remote = core_.peers->ReadState(node, request, elements);
    core_.mutex.Lock();
    return remote;
  }
  const size_t bytes = elements * sizeof(float);
  kernels::cpu::CpuMemoryHolder holder;
  core_.mutex.Unlock();
  absl::StatusOr<wire::UniqueFd> memory = holder.Allocate(bytes, "state transfer");
  core_.mutex.Lock();
  if (!memory.ok()) return WithReason(memory.status(), "MEMORY_EXHAUSTED");
  v1::LaneCommand command;
  command.mutable_read_unit()->set_unit(id.value());
  command.mutable_read_unit()->set_kind(kind);
  const scheduler::LaneIndex lane = core_.RailOf(unit.owner);
  for (bool answered = false; !answered;) {
    // A lane that is replaced meanwhile has a successor with the same state.
    if (absl::Status published = core_.WaitUntilPublished(cancelled); !published.ok())
      return published;
    if (!core_.job.exists() || core_.job.plan() != plan) {
      return Error(absl::StatusCode::kUnavailable, "JOB_ENDED", "the job ended");
    }
    const int64_t request = ++core_.unit_requests;
    const uint64_t generation = core_.lanes.generation();
    command.mutable_read_unit()->set_request(request);
    absl::Status sent = core_.lanes.Send(lane, command, {memory->get()});
    if (!sent.ok() && !absl::IsUnavailable(sent)) return sent;
    absl::StatusOr<bool> ended = core_.Wait(
        [&]() DMUOND_REQUIRES(core_.mutex) {
          return core_.unit_answers.contains(request) || !core_.job.failure().ok() ||
                 core_.lanes.generation() != generation;
        },
        std::chrono::steady_clock::now() + kUnitIoTimeout, cancelled);
    if (!ended.ok()) return ended.status();
    const auto answer = core_.unit_answers.extract(request);
    if (!answer.empty() && !answer.mapped().empty()) return absl::InternalError(answer.mapped());
    answered = !answer.empty();
    if (absl::Status failure = core_.job.failure(); !answered && !failure.ok()) return failure;
    if (!answered && core_.lanes.generation() == generation) {
      return Error(absl::StatusCode::kDeadlineExceeded, "LANE_LOST",
                   Say("lane ", Named("lane", lane.value()), " has not answered in time"));
    }
  }
  core_.mutex.Unlock();
  absl::StatusOr<StateTensor> tensor = CopyOf(memory->get(), elements);
  core_.mutex.Lock();
  return tensor;
}

absl::StatusOr<double> TensorCalls::ReadUpdates(scheduler::UnitId id) {
  const scheduler::Unit& unit = core_.job.plan()->units[id.value()];
  const int32_t node = core_.NodeOf(unit.owner);
  if (node != core_.options.node) {
    v1::ReadStateRequest request;
    request.set_place(core_.place);
    request.set_job_incarnation(core_.job.wire().job_incarnation());
    request.set_unit(id.value());
    request.set_kind(v1::STATE_KIND_STEP);
    core_.mutex.Unlock();
    absl::StatusOr<StateTensor> remote = core_.peers->ReadState(node, request, 1);
    core_.mutex.Lock();
    if (!remote.ok()) return remote.status();
    return static_cast<double>(remote->front());
  }
  const auto table = core_.memory.memory()->table(core_.RailOf(unit.owner));
  const auto* entries = reinterpret_cast<const lane::StateEntry*>(table->data());
  return static_cast<double>(lane::ReadEntry(entries[id.value()]).updates);
}

absl::Status TensorCalls::PullParameters(
    const v1::PullParametersRequest& request, const Core::Cancelled& cancelled,
    const std::function<bool(const v1::PullParametersReply&)>& write) {
  StateLock lock(core_.mutex);
  absl::StatusOr<Client*> found = core_.FindGoingOn(request.key());
  if (!found.ok()) return found.status();
  if (core_.job.steps() == nullptr || !core_.job.has_state()) {
    return Error(absl::StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE",
                 "no weights have been pushed yet: there is no state to read");
  }
  absl::Status published = core_.WaitUntilPublished(cancelled);
  if (!published.ok()) return published;
  found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  const int64_t step = core_.job.steps()->last_committed().value();
  // Copies: the lock is given up while lanes and peers answer, and while the caller takes what it
  // gets, who may be stopped.
  const std::shared_ptr<const scheduler::Plan> plan = core_.job.plan();
  const auto unlocked_write = [&](const v1::PullParametersReply& reply)
                                  DMUOND_REQUIRES(core_.mutex) {
                                    core_.mutex.Unlock();
                                    const bool written = write(reply);
                                    core_.mutex.Lock();
                                    return written;
                                  };
  const auto check_same = [&]() DMUOND_REQUIRES(core_.mutex) -> absl::Status {
    const absl::StatusOr<Client*> session = core_.FindGoingOn(request.key());
    if (!session.ok()) return session.status();
    if (core_.job.plan() == plan) return absl::OkStatus();
    return Error(absl::StatusCode::kUnavailable, "JOB_ENDED", "the job ended");
  };
  const std::shared_ptr<const scheduler::Registration> registered_layout =
      core_.SessionOf(**found).layout;
  const scheduler::Registration& layout = *registered_layout;
  const std::vector<int32_t> job_parameter = (*found)->job_parameter;
  absl::flat_hash_set<absl::string_view> registered;
  for (const scheduler::Parameter& parameter : layout.parameters) registered.insert(parameter.name);
  for (const std::string& name : request.parameters()) {
    if (!registered.contains(name)) {
      return Error(absl::StatusCode::kInvalidArgument, "PARAMETER_UNKNOWN",
                   Say("rank ", Named("rank", (*found)->rank), " has not registered '",
                       Named("parameter", name), "'"));
    }
  }
  const absl::flat_hash_set<absl::string_view> named(request.parameters().begin(),
                                                     request.parameters().end());
  const auto wanted_parameter = [&](const std::string& name) {
    return named.empty() || named.contains(name);
  };
  const auto wanted_kind = [&](v1::StateKind kind) {
    return request.kinds().empty() ||
           std::find(request.kinds().begin(), request.kinds().end(), kind) != request.kinds().end();
  };
  std::vector<std::vector<int32_t>> fragments(layout.parameters.size());
  for (size_t f = 0; f < layout.fragments.size(); ++f) {
    fragments[layout.fragments[f].parameter].push_back(static_cast<int32_t>(f));
  }
  for (size_t p = 0; p < layout.parameters.size(); ++p) {
    const scheduler::Parameter& parameter = layout.parameters[p];
    if (parameter.route == scheduler::Route::kTrainer || !wanted_parameter(parameter.name))
      continue;
    const std::vector<scheduler::UnitId> units = UnitsOf(*plan, job_parameter[p]);
    for (const v1::StateKind kind : kAllKinds) {
      if (!wanted_kind(kind)) continue;
      if (units.empty() || !HasState(plan->units[units[0].value()].kind, kind)) continue;
      int32_t index = 0;  // among this rank's fragments of the parameter
      for (const int32_t f : fragments[p]) {
        const scheduler::Fragment& fragment = layout.fragments[f];
        v1::StateChunk name;
        name.set_parameter(parameter.name);
        name.set_fragment(index++);
        name.set_kind(kind);
        if (kind == v1::STATE_KIND_STEP) {
          absl::StatusOr<double> updates = ReadUpdates(units[0]);
          if (!updates.ok()) return updates.status();
          const std::string bytes(reinterpret_cast<const char*>(&*updates), sizeof(double));
          if (!WriteChunks(name, bytes, sizeof(double), step, unlocked_write)) {
            return absl::OkStatus();
          }
          if (absl::Status same = check_same(); !same.ok()) return same;
          continue;
        }
        StateTensor tensor(static_cast<size_t>(scheduler::Elements(fragment.box)));
        for (const scheduler::UnitId id : units) {
          const scheduler::Box box = plan->units[id.value()].box;
          if (scheduler::Empty(scheduler::Intersect(box, fragment.box))) continue;
          absl::StatusOr<StateTensor> unit = ReadUnit(id, kind, cancelled);
          if (!unit.ok()) return unit.status();
          if (absl::Status same = check_same(); !same.ok()) return same;
          core_.mutex.Unlock();
          CopyIntersection(box, *unit, fragment.box, tensor);
          core_.mutex.Lock();
        }
        const absl::string_view bytes(reinterpret_cast<const char*>(tensor.data()),
                                      tensor.size() * sizeof(float));
        if (!WriteChunks(name, bytes, sizeof(float), step, unlocked_write)) {
          return absl::OkStatus();
        }
        if (absl::Status same = check_same(); !same.ok()) return same;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status TensorCalls::CheckRoom(const Client& client, const scheduler::Message& tensor,
                                    int64_t bytes, int64_t bytes_max) {
  const auto refuse = [&](const scheduler::Message& holder, int64_t held, int64_t limit,
                          const char* whose) {
    return Error(
        absl::StatusCode::kResourceExhausted, "MEMORY_EXHAUSTED",
        Say(tensor, ": ", Named("wanted_bytes", bytes), " bytes pushed, ", holder, " holds ",
            Named("held_bytes", held), " of at most ", Named("limit_bytes", limit), whose));
  };
  const int64_t held = client.pushed_bytes->load();
  if (bytes > bytes_max - held) {
    return refuse(Say("the session"), held, bytes_max, " of pushed state");
  }
  int64_t of_job = core_.memory.memory()->bytes();
  for (const auto& [id, other] : core_.clients.all()) of_job += other.pushed_bytes->load();
  if (core_.options.job_memory_bytes > 0 && bytes > core_.options.job_memory_bytes - of_job) {
    return refuse(Say("job ", Named("job", core_.job.name())), of_job,
                  core_.options.job_memory_bytes, " (--job_memory_bytes)");
  }
  return absl::OkStatus();
}

absl::Status TensorCalls::CheckMayPush(const v1::SessionKey& key) {
  StateLock lock(core_.mutex);
  return core_.FindPusher(key).status();
}

absl::StatusOr<std::string*> TensorCalls::PlaceOfChunk(const v1::SessionKey& key,
                                                       const v1::StateChunk& chunk,
                                                       PushedState& state) {
  absl::StatusOr<Client*> found = core_.FindPusher(key);
  if (!found.ok()) return found.status();
  const Client& client = **found;
  const scheduler::Registration& layout = *core_.SessionOf(client).layout;
  const scheduler::Message what =
      Say("state ", Named("kind", v1::StateKind_Name(chunk.kind())), " of parameter '",
          Named("parameter", chunk.parameter()), "', fragment ",
          Named("fragment", chunk.fragment()), ", rank ", Named("rank", client.rank));
  const auto refuse = [&](const scheduler::Message& why) {
    return Error(absl::StatusCode::kInvalidArgument, "STATE_INVALID", Say(what, ": ", why));
  };
  const scheduler::Fragment* fragment = nullptr;
  int32_t seen = 0;
  for (const scheduler::Fragment& candidate : layout.fragments) {
    if (layout.parameters[candidate.parameter].name != chunk.parameter()) continue;
    if (seen++ == chunk.fragment()) fragment = &candidate;
  }
  if (fragment == nullptr) return refuse(Say("this rank has registered no such fragment"));
  const scheduler::Parameter& parameter = layout.parameters[fragment->parameter];
  if (!KeepsState(parameter, chunk.kind())) {
    return refuse(Say("on route ", Named("route", scheduler::Name(parameter.route)),
                      " it has no such state"));
  }
  const int64_t element_bytes =
      chunk.kind() == v1::STATE_KIND_STEP ? sizeof(double) : sizeof(float);
  const int64_t elements = TensorBytes(*fragment, chunk.kind()) / element_bytes;
  const auto bytes = static_cast<int64_t>(chunk.data().size());
  const std::pair<int32_t, v1::StateKind> where(
      static_cast<int32_t>(fragment - layout.fragments.data()), chunk.kind());
  const auto before = state.tensors.find(where);
  const int64_t next =
      before == state.tensors.end() ? 0 : std::ssize(before->second) / element_bytes;
  if (chunk.first_element() != next) {
    return refuse(Say("a chunk begins at element ", Named("first_element", chunk.first_element()),
                      ", and ", Named("next_element", next), " is the next one"));
  }
  if (bytes % element_bytes != 0 || bytes / element_bytes > elements - next) {
    return refuse(Say("elements ", Named("first_element", next), " and on, ", Named("bytes", bytes),
                      " bytes, do not fit into ", Named("elements", elements), " elements of ",
                      element_bytes, " bytes"));
  }
  if (state.held == nullptr) {
    state.held = client.pushed_bytes;
    state.held_max = kPushesHeld * WholeState(layout);
  }
  absl::Status room = CheckRoom(client, what, bytes, state.held_max);
  if (!room.ok()) return room;
  state.bytes += bytes;
  *state.held += bytes;
  return &state.tensors[where];
}

absl::Status TensorCalls::KeepStateChunk(const v1::SessionKey& key, const v1::StateChunk& chunk,
                                         PushedState& state) {
  std::string* tensor = nullptr;
  {
    StateLock lock(core_.mutex);
    absl::StatusOr<std::string*> place = PlaceOfChunk(key, chunk, state);
    if (!place.ok()) return place.status();
    tensor = *place;
  }
  // Without the lock: what has come is copied when it grows.
  tensor->append(chunk.data());
  return absl::OkStatus();
}

// Brings what a rank has pushed to the units' owners; they keep it until the load commits.
absl::Status TensorCalls::LoadPushedState(const v1::SessionKey& key, const PushedState& state,
                                          const Core::Cancelled& cancelled) {
  absl::StatusOr<Client*> found = core_.Find(key);
  if (!found.ok()) return found.status();
  const uint64_t attempt = core_.job.steps()->open().attempt.value();
  if ((*found)->load_attempt != attempt) {
    (*found)->load_attempt = attempt;
    (*found)->loading = true;
    core_.mutex.Unlock();
    absl::Status spread = SpreadPushedState(key, state, attempt);
    core_.mutex.Lock();
    found = core_.Find(key);
    if (!found.ok()) return found.status();
    if ((*found)->load_attempt == attempt) {
      (*found)->loading = false;
      if (!spread.ok()) (*found)->load_attempt = 0;  // a corrected one may follow
    }
    core_.mutex.Changed();
    return spread;
  }
  absl::StatusOr<bool> loaded = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        found = core_.Find(key);
        return !found.ok() || !(*found)->loading || !core_.job.failure().ok();
      },
      Core::Deadline::max(), cancelled);
  return loaded.ok() ? found.status() : loaded.status();
}

// Everything but the parts' places is done without the lock: tensors may have gigabytes.
absl::Status TensorCalls::SpreadPushedState(const v1::SessionKey& key, const PushedState& pushed,
                                            uint64_t attempt) {
  std::shared_ptr<const scheduler::Registration> registered;
  std::vector<int32_t> job_parameter;
  std::shared_ptr<const scheduler::Plan> plan;
  v1::WriteStateRequest part;
  part.set_place(core_.place);
  part.set_attempt(attempt);
  {
    StateLock lock(core_.mutex);
    absl::StatusOr<Client*> found = core_.FindPusher(key);
    if (!found.ok()) return found.status();
    registered = core_.SessionOf(**found).layout;
    job_parameter = (*found)->job_parameter;
    plan = core_.job.plan();
    part.set_job_incarnation(core_.job.wire().job_incarnation());
  }
  const scheduler::Registration& layout = *registered;
  for (const auto& [where, bytes] : pushed.tensors) {
    const auto& [fragment_index, kind] = where;
    const scheduler::Fragment& fragment = layout.fragments[fragment_index];
    if (const int64_t wanted = TensorBytes(fragment, kind); std::ssize(bytes) != wanted) {
      return Error(absl::StatusCode::kInvalidArgument, "STATE_INVALID",
                   Say("state ", Named("kind", v1::StateKind_Name(kind)), " of parameter '",
                       Named("parameter", layout.parameters[fragment.parameter].name), "', rank ",
                       Named("rank", layout.rank.value()), ": ", Named("given_bytes", bytes.size()),
                       " of ", Named("bytes", wanted), " bytes were pushed"));
    }
    StateTensor values;
    if (kind != v1::STATE_KIND_STEP) {
      values.resize(bytes.size() / sizeof(float));
      std::memcpy(values.data(), bytes.data(), bytes.size());
    }
    for (const scheduler::Unit& unit : plan->units) {
      if (unit.parameter != job_parameter[fragment.parameter] || !HasState(unit.kind, kind))
        continue;
      part.set_unit(unit.id.value());
      part.set_kind(kind);
      part.clear_box();
      absl::Status written;
      if (kind == v1::STATE_KIND_STEP) {
        part.set_data(bytes);
        written = BringToOwner(unit, part);
      } else {
        const scheduler::Box both = scheduler::Intersect(unit.box, fragment.box);
        for (const scheduler::Box& box : SplitBox(both, kPartElements)) {
          StateTensor cut(static_cast<size_t>(scheduler::Elements(box)));
          CopyIntersection(fragment.box, values, box, cut);
          *part.mutable_box() = ToProto(box);
          part.set_data(
              std::string(reinterpret_cast<const char*>(cut.data()), cut.size() * sizeof(float)));
          written = BringToOwner(unit, part);
          if (!written.ok()) break;
        }
      }
      if (!written.ok()) return written;
    }
  }
  return absl::OkStatus();
}

absl::Status TensorCalls::BringToOwner(const scheduler::Unit& unit,
                                       const v1::WriteStateRequest& part) {
  const int32_t node = core_.NodeOf(unit.owner);
  return node == core_.options.node ? WriteStateForPeer(part) : core_.peers->WriteState(node, part);
}

absl::Status TensorCalls::WriteStateForPeer(const v1::WriteStateRequest& part) {
  std::shared_ptr<PendingState> pending;
  std::shared_ptr<const scheduler::Plan> plan;
  {
    StateLock lock(core_.mutex);
    if (!core_.job.exists() || core_.job.plan() == nullptr ||
        core_.job.wire().job_incarnation() != part.job_incarnation() || part.unit() < 0 ||
        part.unit() >= static_cast<int32_t>(core_.job.plan()->units.size())) {
      return Error(
          absl::StatusCode::kFailedPrecondition, "JOB_ENDED",
          Say("state for unit ", Named("unit", part.unit()), " of job incarnation ",
              Named("job_incarnation", part.job_incarnation()), ", which does not run here"));
    }
    pending = core_.memory.pending();
    plan = core_.job.plan();
  }
  return KeepPart(*pending, plan->units[part.unit()], part);
}

absl::StatusOr<StateTensor> TensorCalls::ReadStateForPeer(const v1::ReadStateRequest& request,
                                                          const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  if (!core_.job.exists() || core_.job.plan() == nullptr ||
      core_.job.wire().job_incarnation() != request.job_incarnation() || request.unit() < 0 ||
      request.unit() >= static_cast<int32_t>(core_.job.plan()->units.size())) {
    return Error(absl::StatusCode::kFailedPrecondition, "JOB_ENDED",
                 Say("unit ", Named("unit", request.unit()), " of job incarnation ",
                     Named("job_incarnation", request.job_incarnation()), " is not here"));
  }
  const scheduler::UnitId id(request.unit());
  if (core_.NodeOf(core_.job.plan()->units[request.unit()].owner) != core_.options.node) {
    return Error(absl::StatusCode::kFailedPrecondition, "JOB_ENDED",
                 Say("unit ", Named("unit", request.unit()), " is owned by another node"));
  }
  absl::Status published = core_.WaitUntilPublished(cancelled);
  if (!published.ok()) return published;
  if (request.kind() == v1::STATE_KIND_STEP) {
    absl::StatusOr<double> updates = ReadUpdates(id);
    if (!updates.ok()) return updates.status();
    return StateTensor{static_cast<float>(*updates)};
  }
  return ReadUnit(id, request.kind(), cancelled);
}

}  // namespace dmuond::server
