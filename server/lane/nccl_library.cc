#include "server/lane/nccl_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace dmuond::server::lane {
namespace {

// What is relied on was read in the documentation of this version and measured with it.
constexpr int kOldestVersion = 22800;

template <typename Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

// The name of the function that the library does not have; null: it has all of them.
const char* FindAll(void* library, Nccl& nccl) {
#define DMUOND_FIND(member, function) \
  if (!Find(library, #function, nccl.member)) return #function;
  DMUOND_FIND(get_unique_id, ncclGetUniqueId)
  DMUOND_FIND(comm_init_rank_config, ncclCommInitRankConfig)
  DMUOND_FIND(comm_get_async_error, ncclCommGetAsyncError)
  DMUOND_FIND(comm_abort, ncclCommAbort)
  DMUOND_FIND(group_start, ncclGroupStart)
  DMUOND_FIND(group_end, ncclGroupEnd)
  DMUOND_FIND(send, ncclSend)
  DMUOND_FIND(recv, ncclRecv)
  DMUOND_FIND(reduce, ncclReduce)
  DMUOND_FIND(broadcast, ncclBroadcast)
  DMUOND_FIND(get_error_string, ncclGetErrorString)
  DMUOND_FIND(get_last_error, ncclGetLastError)
#undef DMUOND_FIND
  return nullptr;
}

}  // namespace

absl::StatusOr<Nccl> Nccl::Load(const std::string& file) {
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnavailableError(absl::StrCat("no NCCL: ", ::dlerror(), "; ", kNcclToInstall));
  }
  Nccl nccl{};
  if (!Find(library, "ncclGetVersion", nccl.get_version) ||
      nccl.get_version(&nccl.version) != NcclResult::kSuccess) {
    return absl::UnavailableError(
        absl::StrCat(file, " does not say its version; ", kNcclToInstall));
  }
  if (nccl.version < kOldestVersion) {
    return absl::UnavailableError(
        absl::StrCat(file, " is NCCL ", Nccl::VersionText(nccl.version), "; ", kNcclToInstall));
  }
  if (const char* const missing = FindAll(library, nccl); missing != nullptr) {
    return absl::UnavailableError(absl::StrCat(file, ", NCCL ", Nccl::VersionText(nccl.version),
                                               ", has no ", missing, "; ", kNcclToInstall));
  }
  return nccl;
}

absl::Status Nccl::Check(NcclResult result, absl::string_view call, NcclComm comm) const {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return absl::OkStatus();
  const char* const detail = get_last_error(comm);
  return absl::UnavailableError(absl::StrCat(
      call, " failed: ", get_error_string(result), " (", static_cast<int>(result), ")",
      detail == nullptr || *detail == '\0' ? "" : ": ", detail == nullptr ? "" : detail));
}

std::string Nccl::VersionText(int version) {
  return absl::StrCat(version / 10000, ".", version % 10000 / 100, ".", version % 100);
}

}  // namespace dmuond::server::lane
