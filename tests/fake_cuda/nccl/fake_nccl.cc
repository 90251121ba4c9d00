// NCCL's interface, as much of it as rails use.
#include "tests/fake_cuda/nccl/fake_nccl.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "server/lane/nccl_library.h"
#include "tests/fake_cuda/driver/fake_cuda.h"

using dmuond::fake_nccl::Abort;
using dmuond::fake_nccl::Mesh;
using dmuond::fake_nccl::Message;
using dmuond::server::lane::NcclConfig;
using dmuond::server::lane::NcclOp;
using dmuond::server::lane::NcclResult;
using dmuond::server::lane::NcclType;
using dmuond::server::lane::NcclUniqueId;

namespace {

constexpr auto kSuccess = NcclResult::kSuccess;
constexpr auto kInProgress = NcclResult::kInProgress;
constexpr auto kInvalidArgument = static_cast<NcclResult>(4);
constexpr auto kInvalidUsage = static_cast<NcclResult>(5);

int64_t Number(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoll(value, nullptr, 10);
}
int Version() { return static_cast<int>(Number("FAKE_NCCL_VERSION", 22809)); }

// What a member gives to one group, as it was called.
struct Call {
  enum class Kind : uint8_t { kSend, kReceive, kReduce, kBroadcast };
  Kind kind = Kind::kSend;
  const void* in = nullptr;
  void* out = nullptr;
  size_t bytes = 0;
  int peer = 0;  // or root
};

struct Group {
  ncclComm* comm = nullptr;
  CUstream stream = nullptr;
  std::vector<Call> calls;
};

thread_local int depth = 0;
thread_local std::unique_ptr<Group> open_group;

}  // namespace

struct ncclComm {
  int rank = 0;
  int size = 0;
  std::unique_ptr<Mesh> mesh;
  std::thread meeting;
  std::mt19937_64 random;
  int64_t in_progress_max = 0;
  std::chrono::milliseconds ends_within{0};  // after its stream's work, by ncclCommAbort()
  CUstream stream = nullptr;                 // of the first group
  // Of the dispatching thread.
  int64_t polls_left = 0;
  std::unique_ptr<Group> in_progress;

  std::mutex mutex;
  std::condition_variable changed;
  bool met = false;
  std::string wrong;
  int queued = 0;  // groups in the stream
};

namespace {

std::byte* Find(const void* address) { return static_cast<std::byte*>(fakeCudaAlias(address)); }

// All members' values, added up by rank, at the root.
void Add(const ncclComm& comm, const Call& call,
         const std::vector<std::vector<std::byte>>& values) {
  const size_t count = call.bytes / sizeof(float);
  std::vector<float> total(count);
  for (int rank = 0; rank < comm.size; ++rank) {
    const auto* from =
        reinterpret_cast<const float*>(rank == comm.rank ? Find(call.in) : values[rank].data());
    for (size_t i = 0; i < count; ++i) total[i] += from[i];
  }
  std::memcpy(Find(call.out), total.data(), call.bytes);
}

// By a worker of the stream.
void Run(void* argument) {
  const std::unique_ptr<Group> group(static_cast<Group*>(argument));
  ncclComm& comm = *group->comm;
  std::vector<Message> messages;
  // What comes to a root, by call and rank.
  std::vector<std::vector<std::vector<std::byte>>> values(group->calls.size());
  for (size_t i = 0; i < group->calls.size(); ++i) {
    const Call& call = group->calls[i];
    const bool root = call.peer == comm.rank;
    std::byte* const in = Find(call.in);
    std::byte* const out = Find(call.out);
    using Kind = Message::Kind;
    switch (call.kind) {
      case Call::Kind::kSend:
        messages.push_back({Kind::kSend, call.peer, in, call.bytes});
        continue;
      case Call::Kind::kReceive:
        messages.push_back({Kind::kReceive, call.peer, out, call.bytes});
        continue;
      case Call::Kind::kReduce:
        if (root) values[i].resize(comm.size);
        break;
      case Call::Kind::kBroadcast:
        if (root && in != out) std::memcpy(out, in, call.bytes);
        break;
    }
    const bool reduce = call.kind == Call::Kind::kReduce;
    for (int peer = 0; peer < comm.size; ++peer) {
      if (peer == comm.rank) continue;
      if (reduce && root) {
        values[i][peer].resize(call.bytes);
        messages.push_back({Kind::kReduceIn, peer, values[i][peer].data(), call.bytes});
      } else if (reduce && peer == call.peer) {
        messages.push_back({Kind::kReduceOut, peer, in, call.bytes});
      } else if (!reduce && root) {
        messages.push_back({Kind::kBroadcastOut, peer, in, call.bytes});
      } else if (!reduce && peer == call.peer) {
        messages.push_back({Kind::kBroadcastIn, peer, out, call.bytes});
      }
    }
  }
  comm.mesh->Exchange(messages);
  for (size_t i = 0; i < group->calls.size() && !comm.mesh->stopped(); ++i) {
    if (!values[i].empty()) Add(comm, group->calls[i], values[i]);
  }
  std::lock_guard lock(comm.mutex);
  --comm.queued;
  comm.changed.notify_all();
}

void Launch(std::unique_ptr<Group> group) {
  ncclComm& comm = *group->comm;
  std::vector<FakeCudaRange> ranges;
  for (const Call& call : group->calls) {
    if (call.in != nullptr) ranges.push_back({call.in, call.bytes, 1});
    if (call.out != nullptr) ranges.push_back({call.out, call.bytes, 1});
  }
  {
    std::lock_guard lock(comm.mutex);
    ++comm.queued;
  }
  CUstream stream = group->stream;
  const CUresult result =
      fakeCudaLaunchBeside(stream, "nccl", ranges.data(), ranges.size(), Run, group.release());
  if (result != CUDA_SUCCESS) Abort("the driver takes no group: %d", static_cast<int>(result));
}

NcclResult Add(ncclComm* comm, CUstream stream, Call call) {
  if (comm == nullptr || call.peer < 0 || call.peer >= comm->size) return kInvalidArgument;
  if (depth == 0) Abort("an operation outside of a group is not in this library yet");
  if (comm->in_progress != nullptr || comm->polls_left > 0) {
    Abort("member %d uses its communicator while it is in progress", comm->rank);
  }
  if (comm->stream == nullptr) comm->stream = stream;
  if (comm->stream != stream) Abort("member %d has work in two streams", comm->rank);
  if (open_group == nullptr) open_group = std::make_unique<Group>(Group{comm, stream, {}});
  if (open_group->comm != comm) Abort("a group of two communicators");
  open_group->calls.push_back(call);
  return kSuccess;
}

size_t BytesOf(NcclType type, size_t count) {
  return type == NcclType::kFloat32 ? count * sizeof(float) : count;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT NcclResult ncclGetVersion(int* version) {
  *version = Version();
  return kSuccess;
}

EXPORT NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  std::snprintf(id->bytes, sizeof(id->bytes), "fake-nccl-%d-%lld-%ld", static_cast<int>(::getpid()),
                static_cast<long long>(now.tv_sec), now.tv_nsec);
  return kSuccess;
}

EXPORT NcclResult ncclCommInitRankConfig(ncclComm** made, int size, NcclUniqueId id, int rank,
                                         NcclConfig* config) {
  CUdevice device = 0;
  CUuuid uuid{};
  if (cuCtxGetDevice(&device) != CUDA_SUCCESS || cuDeviceGetUuid(&uuid, device) != CUDA_SUCCESS) {
    Abort("a communicator is made where no context is current");
  }
  if (config->magic != 0xcafebeef || config->size != sizeof(NcclConfig) || config->blocking != 0) {
    Abort("a communicator whose calls may block");
  }
  if (size < 1 || rank < 0 || rank >= size || id.bytes[0] == '\0') return kInvalidArgument;
  auto* const comm = new ncclComm();
  *made = comm;
  comm->rank = rank;
  comm->size = size;
  comm->random.seed(static_cast<uint64_t>(Number("FAKE_NCCL_SEED", 1)) * 1000003 +
                    static_cast<uint64_t>(rank));
  comm->in_progress_max = Number("FAKE_NCCL_IN_PROGRESS", 3);
  comm->ends_within = std::chrono::milliseconds(Number("FAKE_NCCL_ABORT_MS", 0));
  comm->polls_left = 1;
  comm->mesh = std::make_unique<Mesh>(id.bytes, rank, size, Version(), uuid);
  comm->meeting = std::thread([comm] {
    std::string wrong = comm->mesh->Meet();
    std::lock_guard lock(comm->mutex);
    comm->wrong = std::move(wrong);
    comm->met = true;
  });
  return kInProgress;
}

EXPORT NcclResult ncclCommGetAsyncError(ncclComm* comm, NcclResult* state) {
  *state = kSuccess;
  {
    std::lock_guard lock(comm->mutex);
    if (!comm->wrong.empty()) *state = kInvalidUsage;
    if (!comm->met) *state = kInProgress;
  }
  if (*state != kSuccess) return kSuccess;
  if (comm->polls_left > 0) --comm->polls_left;
  if (comm->polls_left > 0) {
    *state = kInProgress;
  } else if (comm->in_progress != nullptr) {
    Launch(std::move(comm->in_progress));
  }
  return kSuccess;
}

EXPORT NcclResult ncclCommAbort(ncclComm* comm) {
  comm->mesh->Stop();
  comm->meeting.join();
  {
    std::unique_lock lock(comm->mutex);
    comm->changed.wait(lock, [comm] { return comm->queued == 0; });
  }
  std::this_thread::sleep_for(comm->ends_within);
  delete comm;
  return kSuccess;
}

EXPORT NcclResult ncclGroupStart() {
  ++depth;
  return kSuccess;
}

EXPORT NcclResult ncclGroupEnd() {
  if (depth == 0) return kInvalidUsage;
  if (--depth > 0 || open_group == nullptr) return kSuccess;
  std::unique_ptr<Group> group = std::move(open_group);
  ncclComm& comm = *group->comm;
  comm.polls_left = static_cast<int64_t>(comm.random() % (comm.in_progress_max + 1));
  if (comm.polls_left == 0) {
    Launch(std::move(group));
    return kSuccess;
  }
  comm.in_progress = std::move(group);
  return kInProgress;
}

EXPORT NcclResult ncclSend(const void* data, size_t count, NcclType type, int peer, ncclComm* comm,
                           CUstream stream) {
  return Add(comm, stream, {Call::Kind::kSend, data, nullptr, BytesOf(type, count), peer});
}

EXPORT NcclResult ncclRecv(void* data, size_t count, NcclType type, int peer, ncclComm* comm,
                           CUstream stream) {
  return Add(comm, stream, {Call::Kind::kReceive, nullptr, data, BytesOf(type, count), peer});
}

EXPORT NcclResult ncclReduce(const void* in, void* out, size_t count, NcclType type, NcclOp op,
                             int root, ncclComm* comm, CUstream stream) {
  if (type != NcclType::kFloat32 || op != NcclOp::kSum) Abort("this sum is not here yet");
  return Add(comm, stream, {Call::Kind::kReduce, in, out, BytesOf(type, count), root});
}

EXPORT NcclResult ncclBroadcast(const void* in, void* out, size_t count, NcclType type, int root,
                                ncclComm* comm, CUstream stream) {
  return Add(comm, stream, {Call::Kind::kBroadcast, in, out, BytesOf(type, count), root});
}

EXPORT const char* ncclGetErrorString(NcclResult result) {
  if (result == kSuccess) return "no error";
  return result == kInvalidUsage ? "invalid usage" : "invalid argument";
}

EXPORT const char* ncclGetLastError(ncclComm* comm) {
  if (comm == nullptr) return "";
  std::lock_guard lock(comm->mutex);
  return comm->wrong.c_str();
}
