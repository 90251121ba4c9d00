// A device on which nothing is done when a call returns, as on a GPU: work waits in its stream, and
// each look at an event does one piece of it. Who reads results before their event is complete, or
// gives memory back too early, computes something else.
#ifndef DMUOND_TESTS_SERVER_LANE_LATE_DEVICE_H_
#define DMUOND_TESTS_SERVER_LANE_LATE_DEVICE_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "kernels/ops.h"

namespace dmuond::server::lane::testing {

class LateStream final : public kernels::Stream {
 public:
  using Work = std::function<absl::Status()>;
  explicit LateStream(std::unique_ptr<kernels::Stream> inner) : inner_(std::move(inner)) {}
  void Add(Work work) { waiting_.push_back(std::move(work)); }
  kernels::Stream& inner() { return *inner_; }
  absl::Status RunOne() {
    if (waiting_.empty()) return absl::OkStatus();
    const Work work = std::move(waiting_.front());
    waiting_.pop_front();
    return work();
  }

  absl::Status Record(kernels::Event& event) override;
  absl::Status WaitFor(kernels::Event&) override { return absl::UnimplementedError("WaitFor"); }
  absl::Status Synchronize() override {
    while (!waiting_.empty()) {
      if (absl::Status status = RunOne(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<kernels::Stream> inner_;
  std::deque<Work> waiting_;
};

class LateEvent final : public kernels::Event {
 public:
  absl::StatusOr<bool> Done() override {
    if (*done_) return true;
    if (absl::Status status = stream_->RunOne(); !status.ok()) return status;
    return false;
  }

 private:
  friend class LateStream;
  LateStream* stream_ = nullptr;
  std::shared_ptr<bool> done_ = std::make_shared<bool>(true);
};

inline absl::Status LateStream::Record(kernels::Event& event) {
  auto& late = static_cast<LateEvent&>(event);
  late.stream_ = this;
  late.done_ = std::make_shared<bool>(false);
  Add([done = late.done_] {
    *done = true;
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

class LateOps final : public kernels::Ops {
 public:
  explicit LateOps(kernels::Ops& inner) : inner_(inner) {}

  absl::Status Copy(kernels::Stream& stream, const kernels::StridedBox& dst,
                    const kernels::StridedBox& src) override {
    return Later(stream, [=, this](kernels::Stream& s) { return inner_.Copy(s, dst, src); });
  }
  absl::Status Fill(kernels::Stream& stream, const kernels::StridedBox& dst, float value) override {
    return Later(stream, [=, this](kernels::Stream& s) { return inner_.Fill(s, dst, value); });
  }
  absl::Status Sum(kernels::Stream& stream, std::span<const kernels::SumTask> tasks) override {
    for (const kernels::SumTask& task : tasks) {
      std::vector<kernels::StridedBox> sources(task.sources.begin(), task.sources.end());
      std::vector<uint8_t> levels(task.levels.begin(), task.levels.end());
      absl::Status status = Later(stream, [=, this](kernels::Stream& s) {
        kernels::SumTask kept = task;
        kept.sources = sources;
        kept.levels = levels;
        return inner_.Sum(s, {&kept, 1});
      });
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::Status SumsOfSquares(kernels::Stream& stream,
                             std::span<const kernels::NormTask> tasks) override {
    std::vector<kernels::NormTask> kept(tasks.begin(), tasks.end());
    return Later(stream, [=, this](kernels::Stream& s) { return inner_.SumsOfSquares(s, kept); });
  }
  size_t MuonWorkspaceBytes(int64_t rows, int64_t cols, int64_t matrices,
                            const kernels::MuonConfig& config) const override {
    return inner_.MuonWorkspaceBytes(rows, cols, matrices, config);
  }
  absl::Status UpdateMuon(kernels::Stream& stream, const kernels::MuonBatch& batch,
                          void* workspace) override {
    std::vector<kernels::MuonMatrix> matrices(batch.matrices.begin(), batch.matrices.end());
    return Later(stream, [=, this](kernels::Stream& s) {
      kernels::MuonBatch kept = batch;
      kept.matrices = matrices;
      return inner_.UpdateMuon(s, kept, workspace);
    });
  }
  absl::Status UpdateAdamW(kernels::Stream& stream,
                           std::span<const kernels::AdamWPiece> pieces) override {
    std::vector<kernels::AdamWPiece> kept(pieces.begin(), pieces.end());
    return Later(stream, [=, this](kernels::Stream& s) { return inner_.UpdateAdamW(s, kept); });
  }

 private:
  template <typename Work>
  absl::Status Later(kernels::Stream& stream, Work work) {
    auto& late = static_cast<LateStream&>(stream);
    late.Add([&late, work] { return work(late.inner()); });
    return absl::OkStatus();
  }
  kernels::Ops& inner_;
};

class LateDevice final : public kernels::Device {
 public:
  LateDevice() : inner_(*kernels::cpu::CpuDevice::Create(1)), ops_(inner_->ops()) {}

  std::string Describe() const override { return "late " + inner_->Describe(); }
  absl::StatusOr<std::unique_ptr<kernels::Mapping>> Map(int fd, size_t bytes) override {
    return inner_->Map(fd, bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::Mapping>> AllocateScratch(size_t bytes) override {
    return inner_->AllocateScratch(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::Mapping>> AllocateHost(size_t bytes) override {
    return inner_->AllocateHost(bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::Stream>> CreateStream() override {
    auto inner = inner_->CreateStream();
    if (!inner.ok()) return inner.status();
    return std::make_unique<LateStream>(*std::move(inner));
  }
  absl::StatusOr<std::unique_ptr<kernels::Event>> CreateEvent() override {
    return std::make_unique<LateEvent>();
  }
  kernels::Ops& ops() override { return ops_; }

 private:
  std::unique_ptr<kernels::cpu::CpuDevice> inner_;
  LateOps ops_;
};

}  // namespace dmuond::server::lane::testing

#endif  // DMUOND_TESTS_SERVER_LANE_LATE_DEVICE_H_
