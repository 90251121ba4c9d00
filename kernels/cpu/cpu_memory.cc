#include "kernels/cpu/cpu_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/cpu/available_memory.h"

namespace dmuond::kernels::cpu {
namespace {

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

class CpuMapping final : public Mapping {
 public:
  CpuMapping(void* data, size_t size) : data_(static_cast<std::byte*>(data)), size_(size) {}
  ~CpuMapping() override { ::munmap(data_, size_); }
  CpuMapping(const CpuMapping&) = delete;
  CpuMapping& operator=(const CpuMapping&) = delete;
  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] size_t size() const override { return size_; }

 private:
  std::byte* data_;
  size_t size_;
};

absl::StatusOr<uint64_t> FileBytes(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return absl::ErrnoToStatus(errno, "fstat of device memory");
  return static_cast<uint64_t>(status.st_size);
}

absl::StatusOr<std::unique_ptr<Mapping>> MapOrError(int fd, size_t bytes, int flags) {
  if (bytes == 0) return absl::InvalidArgumentError("cannot map 0 bytes");
  if (const int error = fault::FaultPoint("memory.map")) {
    return absl::ErrnoToStatus(error, absl::StrCat("mmap of ", bytes, " bytes"));
  }
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("mmap of ", bytes, " bytes"));
  }
  return std::make_unique<CpuMapping>(data, bytes);
}

// Counts the bytes that this process's allocations are about to take. Without it several
// allocations that begin at once would each find the same memory available, and the kernel would
// end the process that takes it.
struct Ledger {
  Mutex mutex;
  uint64_t awaited DMUOND_GUARDED_BY(mutex) = 0;
};
Ledger& TheLedger() {
  static Ledger& ledger = *new Ledger;  // threads may allocate until the process ends
  return ledger;
}

// Bytes that are reserved until they are taken, or until its end.
class Reservation {
 public:
  Reservation() = default;
  ~Reservation() { Took(bytes_); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // RESOURCE_EXHAUSTED: so much is not there, with what others have reserved.
  absl::Status Reserve(uint64_t bytes, const std::string& name, std::string& available_words) {
    Ledger& ledger = TheLedger();
    MutexLock lock(ledger.mutex);
    const AvailableMemory available = ReadAvailableMemory().value_or(
        AvailableMemory{.bytes = static_cast<uint64_t>(std::numeric_limits<off_t>::max())});
    available_words = available.Words();
    if (ledger.awaited > 0) {
      absl::StrAppend(&available_words, ", of which ", ledger.awaited, " are being taken");
    }
    if (ledger.awaited > available.bytes || bytes > available.bytes - ledger.awaited) {
      return absl::ResourceExhaustedError(
          absl::StrCat("memory '", name, "': ", bytes, " bytes wanted, ", available_words));
    }
    ledger.awaited += bytes;
    bytes_ = bytes;
    return absl::OkStatus();
  }
  // The kernel counts them as used from now on.
  void Took(uint64_t bytes) {
    Ledger& ledger = TheLedger();
    MutexLock lock(ledger.mutex);
    ledger.awaited -= bytes;
    bytes_ -= bytes;
  }

 private:
  uint64_t bytes_ = 0;
};

// Makes all pages of the file, a part after the other, so that little counts twice meanwhile: as
// used, and as reserved. An errno value; 0: done.
int MakePages(int fd, uint64_t bytes, Reservation& reserved) {
  constexpr uint64_t kPart = uint64_t{64} << 20;
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t part = std::min(kPart, bytes - at);
    int error = 0;
    do {
      error = ::posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(part));
    } while (error == EINTR);
    if (error != 0) return error;
    reserved.Took(part);
    at += part;
  }
  return 0;
}

}  // namespace

absl::StatusOr<UniqueFd> CpuMemoryHolder::Allocate(size_t bytes, const std::string& name) {
  if (bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("memory '", name, "': 0 bytes wanted"));
  }
  Reservation reserved;
  std::string available;
  RETURN_IF_ERROR(reserved.Reserve(bytes, name, available));
  if (const int error = fault::FaultPoint("memory.create")) {
    return absl::ErrnoToStatus(error, absl::StrCat("memfd_create '", name, "'"));
  }
  // The kernel refuses names longer than 249 bytes.
  UniqueFd fd(::memfd_create(name.substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("memfd_create '", name, "'"));
  int error = fault::FaultPoint("memory.allocate");
  if (error == 0) error = MakePages(fd.get(), bytes, reserved);
  if (error != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("memory '", name, "': ", bytes, " bytes wanted, ", available, ": ",
                     absl::ErrnoToStatus(error, "posix_fallocate").message()));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("sealing memory '", name, "'"));
  }
  return fd;
}

absl::Status CpuMemoryHolder::Check(int fd, size_t bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return absl::InvalidArgumentError("descriptor is not sealable memory (memfd)");
  }
  const int mode = ::fcntl(fd, F_GETFL);
  if ((mode & O_ACCMODE) != O_RDWR || (seals & F_SEAL_WRITE) != 0) {
    return absl::FailedPreconditionError("memory cannot be written");
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError("memory is not sealed against shrinking");
  }
  ASSIGN_OR_RETURN(const uint64_t size, FileBytes(fd));
  if (size < bytes) {
    return absl::OutOfRangeError(
        absl::StrCat("memory has ", size, " bytes, ", bytes, " are needed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Mapping>> MapShared(int fd, size_t bytes) {
  ASSIGN_OR_RETURN(const uint64_t size, FileBytes(fd));
  if (bytes > size) {
    return absl::OutOfRangeError(
        absl::StrCat("cannot map ", bytes, " bytes of memory that has ", size));
  }
  return MapOrError(fd, bytes, MAP_SHARED);
}

absl::StatusOr<std::unique_ptr<Mapping>> MapPrivate(size_t bytes) {
  auto mapping = MapOrError(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS);
  // A wish: workspaces are swept from end to end, and small pages cost a miss every 4 KiB.
  if (mapping.ok()) ::madvise((*mapping)->data(), bytes, MADV_HUGEPAGE);
  return mapping;
}

}  // namespace dmuond::kernels::cpu
