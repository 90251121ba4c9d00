// Shared memory that is unmapped when its owner goes. Move-only.
#ifndef DMUOND_CLIENT_CPP_SRC_MAPPING_H_
#define DMUOND_CLIENT_CPP_SRC_MAPPING_H_

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dmuond::client {

class Mapping {
 public:
  // Maps the descriptor's first `bytes` for reading and writing; keeps no hold of it.
  static absl::StatusOr<Mapping> Of(int fd, size_t bytes) {
    void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap of the daemon's memory");
    return Mapping(data, bytes);
  }
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }

  // At the addresses of `place`, which gives them up. REQUIRES: equal sizes.
  absl::Status MoveTo(Mapping& place) {
    void* moved = ::mremap(data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, place.data_);
    if (moved == MAP_FAILED) return absl::ErrnoToStatus(errno, "mremap of the daemon's memory");
    data_ = std::exchange(place.data_, nullptr);
    place.bytes_ = 0;
    return absl::OkStatus();
  }

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(data_); }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  Mapping(void* data, size_t bytes) : data_(data), bytes_(bytes) {}
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_MAPPING_H_
