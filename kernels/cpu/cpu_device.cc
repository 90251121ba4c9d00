#include "kernels/cpu/cpu_device.h"

#include <cblas.h>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_memory.h"

namespace dmuond::kernels::cpu {
namespace {

class DoneEvent final : public Event {
 public:
  absl::StatusOr<bool> Done() override { return true; }
};

class SynchronousStream final : public Stream {
 public:
  absl::Status Record(Event&) override { return absl::OkStatus(); }
  absl::Status WaitFor(Event&) override { return absl::OkStatus(); }
  absl::Status Synchronize() override { return absl::OkStatus(); }
};

}  // namespace

absl::StatusOr<std::unique_ptr<CpuDevice>> CpuDevice::Create(int threads) {
  if (threads < 1 || threads > kThreadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("a CPU lane has 1 to ", kThreadsMax, " threads, not ", threads));
  }
  // The lane's own threads call it side by side; OpenBLAS's would change bits with their number.
  openblas_set_num_threads(1);
  return std::unique_ptr<CpuDevice>(new CpuDevice(threads));
}

std::string CpuDevice::Library() { return openblas_get_config(); }

std::string CpuDevice::CoreType() { return openblas_get_corename(); }

std::string CpuDevice::Describe() const {
  return absl::StrCat("cpu threads=", pool_.threads(), " openblas=", CoreType());
}

absl::StatusOr<std::unique_ptr<Mapping>> CpuDevice::Map(int fd, size_t bytes) {
  return MapShared(fd, bytes);
}

absl::StatusOr<std::unique_ptr<Mapping>> CpuDevice::AllocateScratch(size_t bytes) {
  return MapPrivate(bytes);
}

absl::StatusOr<std::unique_ptr<Mapping>> CpuDevice::AllocateHost(size_t bytes) {
  return MapPrivate(bytes);
}

absl::StatusOr<std::unique_ptr<Stream>> CpuDevice::CreateStream() {
  return std::make_unique<SynchronousStream>();
}

absl::StatusOr<std::unique_ptr<Event>> CpuDevice::CreateEvent() {
  return std::make_unique<DoneEvent>();
}

}  // namespace dmuond::kernels::cpu
