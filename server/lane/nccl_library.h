// NCCL's functions that a rail needs, found at run time: programs start where there is no NCCL.
// They are declared here as nccl.h of NCCL 2.28 does, so that none is needed to build either.
#ifndef DMUOND_SERVER_LANE_NCCL_LIBRARY_H_
#define DMUOND_SERVER_LANE_NCCL_LIBRARY_H_

#include <cuda.h>

#include <climits>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

struct ncclComm;

namespace dmuond::server::lane {

inline constexpr char kNcclLibrary[] = "libnccl.so.2";
// How Load()'s errors end, after "; ".
inline constexpr char kNcclToInstall[] =
    "a group of several nodes with GPUs needs NCCL 2.28 or newer: install libnccl2 of NVIDIA's "
    "package repository, or the Python package nvidia-nccl-cu13 and give the daemon its folder "
    "nvidia/nccl/lib in LD_LIBRARY_PATH";

using NcclComm = ::ncclComm*;

// What ncclResult_t, ncclDataType_t and ncclRedOp_t have, of what is used.
enum class NcclResult : int { kSuccess = 0, kInProgress = 7 };
enum class NcclType : int { kUint8 = 1, kFloat32 = 7 };
enum class NcclOp : int { kSum = 0 };

struct NcclUniqueId {
  char bytes[128];
};

struct NcclConfig {
  static constexpr int kUndefined = INT_MIN;
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 22800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int n_channels_per_net_peer = kUndefined;
  int nvlink_centric_sched = kUndefined;
};

// Threads: those of NCCL's functions, whose calls for one communicator come one after the other.
struct Nccl {
  int version = 0;  // as ncclGetVersion() says it: 22809 is 2.28.9

  NcclResult (*get_version)(int* version);
  NcclResult (*get_unique_id)(NcclUniqueId* id);
  NcclResult (*comm_init_rank_config)(NcclComm* comm, int size, NcclUniqueId id, int rank,
                                      NcclConfig* config);
  NcclResult (*comm_get_async_error)(NcclComm comm, NcclResult* state);
  NcclResult (*comm_abort)(NcclComm comm);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*send)(const void* data, size_t count, NcclType type, int peer, NcclComm comm,
                     CUstream stream);
  NcclResult (*recv)(void* data, size_t count, NcclType type, int peer, NcclComm comm,
                     CUstream stream);
  NcclResult (*reduce)(const void* in, void* out, size_t count, NcclType type, NcclOp op, int root,
                       NcclComm comm, CUstream stream);
  NcclResult (*broadcast)(const void* in, void* out, size_t count, NcclType type, int root,
                          NcclComm comm, CUstream stream);
  const char* (*get_error_string)(NcclResult result);
  const char* (*get_last_error)(NcclComm comm);

  // Loads the library; it stays until the process ends. UNAVAILABLE, with what to install: there is
  // none, or it is older than 2.28.
  static absl::StatusOr<Nccl> Load(const std::string& file = kNcclLibrary);

  // OK also for what has begun and is in progress. Otherwise UNAVAILABLE, with the call, the result
  // and what the library says of it. `comm` null: there is none yet.
  [[nodiscard]] absl::Status Check(NcclResult result, absl::string_view call, NcclComm comm) const;
  // "2.28.9"
  [[nodiscard]] static std::string VersionText(int version);
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_NCCL_LIBRARY_H_
