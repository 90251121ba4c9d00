// On a GPU. The host computes, in copies of its own, and the stream takes them there and back;
// signals and waits are the stream's, so that a step has as much under way on the device as a real
// one. SIGUSR1 has a kernel of the next step make an illegal access, SIGUSR2 one compute for ever.
#include <cuda.h>

#include <csignal>
#include <cstring>
#include <iostream>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/src/status.h"
#include "dmuond/client/device_arenas.h"
#include "tests/faults/trainer_memory.h"
#include "tests/faults/wrong_kernels.h"

namespace dmuond::testing {
namespace {

using client::Outcome;
using client::Session;

absl::Status Check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, " failed: ", static_cast<int>(result)));
}

enum Disturbance { kNone, kIllegalAccess, kLongKernel };
volatile std::sig_atomic_t due = kNone;

// A kernel that fills the GPU and does not end. Returns, and says so, when it runs.
absl::Status SpinForEver(CUstream stream) {
  constexpr unsigned kBlocks = 512;
  void* words = nullptr;
  absl::Status status =
      Check(cuMemHostAlloc(&words, (kBlocks + 1) * sizeof(uint64_t), 0), "cuMemHostAlloc");
  if (!status.ok()) return status;
  std::memset(words, 0, (kBlocks + 1) * sizeof(uint64_t));
  auto* const started = static_cast<uint64_t*>(words) + 1;
  auto stop_address = reinterpret_cast<CUdeviceptr>(words);
  auto started_address = reinterpret_cast<CUdeviceptr>(started);
  void* parameters[] = {&stop_address, &started_address};
  status = Check(LaunchContractKernel("contract_spin", kBlocks, stream, parameters),
                 "launching contract_spin");
  if (!status.ok()) return status;
  while (__atomic_load_n(started, __ATOMIC_ACQUIRE) == 0) std::this_thread::yield();
  std::cout << "a kernel runs for ever\n" << std::flush;
  return absl::OkStatus();
}

class DeviceMemory final : public TrainerMemory {
 public:
  DeviceMemory(std::shared_ptr<client::Arenas> arenas, CUstream stream, bool own,
               int32_t parameters)
      : arenas_(std::move(arenas)),
        stream_(stream),
        own_(own),
        weights_(parameters),
        gradients_(parameters) {}

  absl::Status Place(client::Layout& layout) override {
    absl::Status made;
    for (client::ArenaSpec& arena : layout.arenas) {
      if (!own_ || !made.ok()) break;
      CUdeviceptr memory = 0;
      made = Check(cuMemAlloc(&memory, arena.size_bytes), "cuMemAlloc");
      arena.memory = reinterpret_cast<std::byte*>(memory);
    }
    return made;
  }
  [[nodiscard]] std::shared_ptr<client::Arenas> arenas() const override { return arenas_; }
  std::span<float> Weights(Session& session, int32_t parameter) override {
    return Sized(weights_[parameter], session, parameter);
  }
  std::span<float> Gradients(Session& session, int32_t parameter) override {
    return Sized(gradients_[parameter], session, parameter);
  }
  absl::Status SendGradients(Session& session, int32_t parameter) override {
    return Copy(session.GradientBytes(parameter), gradients_[parameter].data(),
                gradients_[parameter].size());
  }
  absl::Status SendWeights(Session& session) override {
    absl::Status status;
    for (size_t p = 0; p < weights_.size() && status.ok(); ++p) {
      status = Copy(session.WeightBytes(static_cast<int32_t>(p)), weights_[p].data(),
                    weights_[p].size());
    }
    return status.ok() ? Synchronize() : status;
  }
  absl::Status FetchWeights(Session& session) override {
    absl::Status status;
    for (size_t p = 0; p < weights_.size() && status.ok(); ++p) {
      const auto parameter = static_cast<int32_t>(p);
      const std::span<float> weights = Weights(session, parameter);
      status = Copy(weights.data(), session.WeightBytes(parameter), weights.size());
    }
    return status.ok() ? Synchronize() : status;
  }
  absl::Status MarkReady(Session& session, int32_t bucket) override {
    return session.MarkReady(bucket, stream_);
  }

  absl::StatusOr<Outcome> Step(Session& session, const client::StepScalars& scalars,
                               const client::SubmitOptions& given) override {
    client::SubmitOptions options = given;
    options.stream = stream_;
    if (due != kNone) {
      absl::Status launched = due == kLongKernel
                                  ? SpinForEver(stream_)
                                  : Check(StoreNowhere(stream_), "launching contract_store");
      if (!launched.ok()) return launched;
    }
    absl::StatusOr<Outcome> outcome;
    do {
      outcome = session.Submit(scalars, options);
    } while (outcome.ok() && outcome->kind == Outcome::Kind::kAborted && outcome->retry);
    if (!outcome.ok()) return outcome;
    if (outcome->kind == Outcome::Kind::kAborted) return client::Aborted(*outcome);
    absl::Status status;
    if (outcome->kind != Outcome::Kind::kRolledBack) status = session.WaitPublished(stream_);
    if (status.ok()) status = FetchWeights(session);
    // The stream goes on where they cannot come any more: this says whether they have.
    if (status.ok()) status = session.WaitPublished();
    if (client::ReasonOf(status) == "ROLLED_BACK") {
      outcome->kind = Outcome::Kind::kRolledBack;
      outcome->to_step = session.last_committed_step();
      status = FetchWeights(session);
    }
    if (!status.ok()) return status;
    return outcome;
  }

 private:
  static std::span<float> Sized(std::vector<float>& values, Session& session, int32_t parameter) {
    values.resize(session.Size(parameter));
    return values;
  }
  absl::Status Copy(void* to, const void* from, size_t count) {
    if (count == 0) return absl::OkStatus();
    return Check(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to),
                               reinterpret_cast<CUdeviceptr>(from), count * sizeof(float), stream_),
                 "cuMemcpyAsync");
  }
  absl::Status Synchronize() { return Check(cuStreamSynchronize(stream_), "cuStreamSynchronize"); }

  const std::shared_ptr<client::Arenas> arenas_;
  const CUstream stream_;
  const bool own_;
  std::vector<std::vector<float>> weights_;  // by parameter
  std::vector<std::vector<float>> gradients_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TrainerMemory>> MakeTrainerMemory(const std::string& device,
                                                                 int32_t parameters) {
  absl::string_view rest = device;
  int ordinal = 0;
  const bool own = absl::ConsumeSuffix(&rest, ",own");
  if (!absl::ConsumePrefix(&rest, "cuda:") || !absl::SimpleAtoi(rest, &ordinal)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device=", device, " is not cuda:ORDINAL or cuda:ORDINAL,own"));
  }
  absl::StatusOr<std::shared_ptr<client::Arenas>> arenas = client::DeviceArenas::Open(ordinal);
  if (!arenas.ok()) return arenas.status();
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  absl::Status status =
      Check(cuDevicePrimaryCtxRetain(&context, ordinal), "cuDevicePrimaryCtxRetain");
  if (status.ok()) status = Check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  if (status.ok())
    status = Check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  if (!status.ok()) return status;
  std::signal(SIGUSR1, [](int) { due = kIllegalAccess; });
  std::signal(SIGUSR2, [](int) { due = kLongKernel; });
  return std::make_unique<DeviceMemory>(*std::move(arenas), stream, own, parameters);
}

}  // namespace dmuond::testing
