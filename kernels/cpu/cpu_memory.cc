#include "kernels/cpu/cpu_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/fault/fault_point.h"
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

}  // namespace

absl::StatusOr<UniqueFd> CpuMemoryHolder::Allocate(size_t bytes, const std::string& name) {
  if (bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("memory '", name, "': 0 bytes wanted"));
  }
  const AvailableMemory available = ReadAvailableMemory().value_or(
      AvailableMemory{.bytes = static_cast<uint64_t>(std::numeric_limits<off_t>::max())});
  if (bytes > available.bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("memory '", name, "': ", bytes, " bytes wanted, ", available.Words()));
  }
  if (const int error = fault::FaultPoint("memory.create")) {
    return absl::ErrnoToStatus(error, absl::StrCat("memfd_create '", name, "'"));
  }
  // The kernel refuses names longer than 249 bytes.
  UniqueFd fd(::memfd_create(name.substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("memfd_create '", name, "'"));
  const auto length = static_cast<off_t>(bytes);
  int error = fault::FaultPoint("memory.allocate");
  if (error == 0) {
    do {
      error = ::posix_fallocate(fd.get(), 0, length);
    } while (error == EINTR);
  }
  if (error != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("memory '", name, "': ", bytes, " bytes wanted, ", available.Words(), ": ",
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
  const absl::StatusOr<uint64_t> size = FileBytes(fd);
  if (!size.ok()) return size.status();
  if (*size < bytes) {
    return absl::OutOfRangeError(
        absl::StrCat("memory has ", *size, " bytes, ", bytes, " are needed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Mapping>> MapShared(int fd, size_t bytes) {
  const absl::StatusOr<uint64_t> size = FileBytes(fd);
  if (!size.ok()) return size.status();
  if (bytes > *size) {
    return absl::OutOfRangeError(
        absl::StrCat("cannot map ", bytes, " bytes of memory that has ", *size));
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
