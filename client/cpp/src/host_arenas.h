// Arenas in host memory.
#ifndef DMUOND_CLIENT_CPP_SRC_HOST_ARENAS_H_
#define DMUOND_CLIENT_CPP_SRC_HOST_ARENAS_H_

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "client/cpp/src/mapping.h"
#include "dmuond/client/arenas.h"

namespace dmuond::client {

class HostArenas final : public Arenas {
 public:
  [[nodiscard]] std::string device_uuid() const override { return ""; }
  absl::StatusOr<std::unique_ptr<Memory>> Map(int fd, size_t bytes) override {
    ASSIGN_OR_RETURN(Mapping mapping, Mapping::Of(fd, bytes));
    return std::make_unique<HostMemory>(std::move(mapping));
  }
  absl::StatusOr<Own> Export(std::byte* /*memory*/, size_t /*bytes*/) override {
    return absl::FailedPreconditionError(
        "memory of its own is a GPU's (Options::arenas), and this session's arenas lie in host "
        "memory");
  }
  absl::StatusOr<std::unique_ptr<Words>> MakeWords(void* /*page*/, size_t /*bytes*/) override {
    return nullptr;
  }

 private:
  class HostMemory final : public Memory {
   public:
    explicit HostMemory(Mapping mapping) : mapping_(std::move(mapping)) {}
    [[nodiscard]] std::byte* data() const override { return mapping_.data(); }
    [[nodiscard]] size_t bytes() const override { return mapping_.bytes(); }
    absl::Status Read(std::byte* to) const override {
      std::copy_n(data(), bytes(), to);
      return absl::OkStatus();
    }
    absl::Status Write(const std::byte* from) override {
      std::copy_n(from, bytes(), data());
      return absl::OkStatus();
    }
    absl::Status MoveTo(Memory& place) override {
      return mapping_.MoveTo(static_cast<HostMemory&>(place).mapping_);
    }

   private:
    Mapping mapping_;
  };
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_HOST_ARENAS_H_
