#include "kernels/cuda/update_tuner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/library_product.h"
#include "kernels/cuda/muon_set.h"
#include "kernels/cuda/tuner_data.h"

namespace dmuond::kernels::cuda {
namespace {

// What fp16 and bf16 may differ from fp32 on random gradients; docs/maths.md, section 4.
constexpr double kErrorMax = 4e-2;
// One of those in which bits must be the same; it is not timed.
constexpr int32_t kOddBatch = 3;
// So much faster than the device's default must another way be.
constexpr double kGainMin = 0.015;
// Candidates are compared on a batch that takes about so long.
constexpr double kCompareMicroseconds = 3000;
constexpr int kCompareRounds = 5;
// Larger batches are not timed: their slope is known by then.
constexpr double kBatchMicrosecondsMax = 80e3;
// Batches take turns of so long, without a pause between them: a chip at its power limit is faster
// after any.
constexpr double kTurnMicroseconds = 20e3;
// The part of the time for that heats the chip.
constexpr double kWarmPart = 0.35;
constexpr int kTurnsMin = 3;
// What is planned with: turns are not cut short.
constexpr double kPartOfTime = 0.94;
constexpr int kTurnsMax = 60;

class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  // Frees what was there.
  absl::Status Allocate(size_t bytes) {
    cudaFree(std::exchange(data_, nullptr));
    return CudaStatus(cudaMalloc(&data_, bytes), absl::StrCat("cudaMalloc of ", bytes, " bytes"));
  }
  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

class Clock {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Matrices of one shape with all their state, on the device.
class TunerState {
 public:
  static size_t BytesPerMatrix(int64_t rows, int64_t cols) { return Slot(rows, cols) * 22; }

  absl::Status Allocate(int64_t rows, int64_t cols, int64_t count, cudaStream_t stream) {
    slot_ = Slot(rows, cols);
    elements_ = rows * cols;
    const int64_t all = slot_ * count;
    if (absl::Status status = memory_.Allocate(all * 22); !status.ok()) return status;
    gradient_ = memory_.as<float>();
    momentum_ = gradient_ + all;
    master_ = momentum_ + all;
    momentum_out_ = master_ + all;
    master_out_ = momentum_out_ + all;
    weight_ = reinterpret_cast<std::byte*>(master_out_ + all);
    absl::Status status = CudaStatus(LaunchRandom(stream, gradient_, all, 1, 1e-3F), "random data");
    // Masters are zero: the new ones are the update itself.
    if (status.ok()) {
      status = CudaStatus(cudaMemsetAsync(momentum_, 0, all * 8, stream), "clearing state");
    }
    return status;
  }
  // Poisons what an update writes.
  absl::Status Poison(int64_t count, cudaStream_t stream) {
    return CudaStatus(cudaMemsetAsync(master_out_, 0xFF, slot_ * count * 4, stream), "poison");
  }
  // Copies of `first` and those after it.
  [[nodiscard]] std::vector<PassMatrix> Matrices(int64_t count) const {
    std::vector<PassMatrix> matrices;
    for (int64_t i = 0; i < count; ++i) {
      PassMatrix m{gradient_ + i * slot_,
                   momentum_ + i * slot_,
                   momentum_out_ + i * slot_,
                   master_ + i * slot_,
                   master_out_ + i * slot_,
                   weight_ + i * slot_ * 2,
                   {}};
      m.scalars.learning_rate = 1;
      m.scalars.momentum = 0.95;
      m.scalars.gradient_factor = 1;
      m.scalars.active = 1;
      matrices.push_back(m);
    }
    return matrices;
  }
  [[nodiscard]] const float* master_out() const { return master_out_; }
  [[nodiscard]] int64_t elements() const { return elements_; }

 private:
  static int64_t Slot(int64_t rows, int64_t cols) { return (rows * cols + 63) / 64 * 64; }

  DeviceMemory memory_;
  int64_t slot_ = 0;
  int64_t elements_ = 0;
  float* gradient_ = nullptr;
  float* momentum_ = nullptr;
  float* momentum_out_ = nullptr;
  float* master_ = nullptr;
  float* master_out_ = nullptr;
  std::byte* weight_ = nullptr;
};

// One way of updating the matrices of a shape.
struct Way {
  KernelChoice choice;
  MuonConfig config;
  NewtonSchulzProgram program;

  [[nodiscard]] MuonSetBatch Batch(DType weight, int64_t count) const {
    return {&config, &program, weight, count, choice.engine};
  }
};

absl::StatusOr<Way> MakeWay(int64_t rows, int64_t cols, const MuonConfig& config,
                            ProductEngine engine, NewtonSchulzForm form, DType dtype) {
  Way way{{rows, cols, dtype, engine, form}, config, {}};
  NewtonSchulzConfig& newton_schulz = way.config.newton_schulz;
  newton_schulz.dtype = dtype;
  if (form != newton_schulz.form) newton_schulz.restarts.clear();
  newton_schulz.form = form;
  absl::StatusOr<NewtonSchulzProgram> program = BuildNewtonSchulz(newton_schulz, rows, cols);
  if (!program.ok()) return program.status();
  way.program = *std::move(program);
  return way;
}

class Tuner {
 public:
  explicit Tuner(const TuningOptions& options) : options_(options) {}
  ~Tuner() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  absl::Status Start() {
    int device = 0;
    cudaDeviceProp properties{};
    absl::Status status =
        CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
    events_.resize(2, nullptr);
    for (cudaEvent_t& event : events_) {
      if (status.ok()) status = CudaStatus(cudaEventCreate(&event), "an event");
    }
    if (status.ok()) status = CudaStatus(cudaGetDevice(&device), "cudaGetDevice");
    if (status.ok()) {
      status = CudaStatus(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    }
    if (!status.ok()) return status;
    own_ = properties.major == 9 && properties.minor == 0;
    library_ = CheckLibrary().ok();
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    status = CudaStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    memory_bytes_ = options_.memory_bytes_max != 0 ? options_.memory_bytes_max : free_bytes / 3 * 2;
    if (status.ok()) status = differences_.Allocate(sizeof(Difference));
    return status;
  }

  // `seconds`: what this shape may take.
  absl::StatusOr<TunedShape> Tune(const TuningTask& task, double seconds) {
    const Clock clock;
    TunedShape shape;
    shape.rows = task.rows;
    shape.cols = task.cols;
    absl::StatusOr<std::vector<Way>> ways = Ways(task.rows, task.cols);
    if (!ways.ok()) return ways.status();
    const int32_t batch_max = LargestBatch(task, *ways);
    if (batch_max < 1) {
      return absl::ResourceExhaustedError(absl::StrCat("a matrix of ", task.rows, " x ", task.cols,
                                                       " does not fit ", memory_bytes_, " bytes"));
    }
    size_t workspace_bytes = 0;
    for (const Way& way : *ways) {
      const MuonSetBatch batch = way.Batch(options_.weight, batch_max);
      workspace_bytes = std::max(workspace_bytes, MuonSet::WorkspaceBytes({&batch, 1}));
    }
    absl::Status status = state_.Allocate(task.rows, task.cols, batch_max, stream_);
    if (status.ok()) status = workspace_.Allocate(workspace_bytes);
    if (status.ok()) status = Check(*ways, batch_max, shape);
    if (status.ok()) status = Compare(*ways, batch_max, 0.4 * seconds, shape);
    if (!status.ok()) return status;
    const Way& winner = (*ways)[shape.winner];
    std::vector<int32_t> batches;
    for (const int32_t batch : task.batches) {
      if (batch <= batch_max) batches.push_back(batch);
    }
    status = TimeBatches(winner, batches, clock, seconds, shape);
    if (!status.ok()) return status;
    shape.seconds = clock.seconds();
    return shape;
  }

 private:
  // The device's default first.
  absl::StatusOr<std::vector<Way>> Ways(int64_t rows, int64_t cols) const {
    std::vector<Way> ways;
    const NewtonSchulzConfig& config = options_.config.newton_schulz;
    for (const ProductEngine engine : {ProductEngine::kOwn, ProductEngine::kLibrary}) {
      if (engine == ProductEngine::kOwn ? !own_ : !library_) continue;
      for (const NewtonSchulzForm form : {NewtonSchulzForm::kGram, NewtonSchulzForm::kStandard}) {
        if (form == NewtonSchulzForm::kGram && config.form != form) continue;
        absl::StatusOr<Way> way = MakeWay(rows, cols, options_.config, engine, form, config.dtype);
        if (!way.ok()) return way.status();
        ways.push_back(*std::move(way));
      }
    }
    return ways;
  }

  [[nodiscard]] int32_t LargestBatch(const TuningTask& task, const std::vector<Way>& ways) const {
    int32_t largest = 0;
    for (const int32_t batch : task.batches) {
      size_t workspace = 0;
      for (const Way& way : ways) {
        const MuonSetBatch one = way.Batch(options_.weight, batch);
        workspace = std::max(workspace, MuonSet::WorkspaceBytes({&one, 1}));
      }
      if (batch * TunerState::BytesPerMatrix(task.rows, task.cols) + workspace <= memory_bytes_) {
        largest = std::max(largest, batch);
      }
    }
    return largest;
  }

  // No tile changes a bit.
  absl::StatusOr<std::unique_ptr<MuonSet>> Prepare(const Way& way, int64_t count, void* workspace,
                                                   TileTuner& tiles) {
    const MuonSetBatch batch = way.Batch(options_.weight, count);
    absl::Status status = CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    if (!status.ok()) return status;
    std::string error;
    std::unique_ptr<MuonSet> set = MuonSet::Create({&batch, 1}, workspace, &tiles, &error);
    if (set == nullptr) return absl::InternalError(error);
    return set;
  }

  absl::Status Launch(MuonSet& set, int64_t count) {
    return CudaStatus(set.Launch(stream_, state_.Matrices(count)), "an update");
  }

  absl::StatusOr<Difference> CompareWith(const DeviceMemory& expected) {
    absl::Status status = CudaStatus(
        cudaMemsetAsync(differences_.as<void>(), 0, sizeof(Difference), stream_), "clearing sums");
    if (status.ok()) {
      status = CudaStatus(LaunchCompare(stream_, state_.master_out(), expected.as<float>(),
                                        state_.elements(), differences_.as<Difference>()),
                          "a comparison");
    }
    Difference difference;
    if (status.ok()) {
      status = CudaStatus(cudaMemcpyAsync(&difference, differences_.as<void>(), sizeof(Difference),
                                          cudaMemcpyDefault, stream_),
                          "sums of a comparison");
    }
    if (status.ok()) status = CudaStatus(cudaStreamSynchronize(stream_), "a comparison");
    if (!status.ok()) return status;
    return difference;
  }

  // The first matrix's update, in a batch of `count`; into `to` if not null.
  absl::Status UpdateFirst(const Way& way, int64_t count, void* workspace, DeviceMemory* to) {
    absl::Status status = state_.Poison(count, stream_);
    if (!status.ok()) return status;
    // Not every batch that is checked is timed as well.
    TileTuner& tiles = count == kOddBatch ? rule_tiles_ : tiles_;
    absl::StatusOr<std::unique_ptr<MuonSet>> set = Prepare(way, count, workspace, tiles);
    if (!set.ok()) return set.status();
    status = Launch(**set, count);
    if (status.ok() && to != nullptr) {
      status = CudaStatus(cudaMemcpyAsync(to->as<void>(), state_.master_out(),
                                          state_.elements() * 4, cudaMemcpyDefault, stream_),
                          "a copy");
    }
    // The set must outlive its launch.
    if (status.ok()) status = CudaStatus(cudaStreamSynchronize(stream_), "an update");
    return status;
  }

  // Whether each way's numbers are right, and independent of the batch.
  absl::Status Check(const std::vector<Way>& ways, int32_t batch_max, TunedShape& shape) {
    const KernelChoice& first = ways.front().choice;
    const absl::StatusOr<Way> exact =
        MakeWay(first.rows, first.cols, options_.config, ProductEngine::kOwn,
                options_.config.newton_schulz.form, DType::kF32);
    if (!exact.ok()) return exact.status();
    DeviceMemory workspace;
    DeviceMemory expected;
    DeviceMemory alone;
    const MuonSetBatch one = exact->Batch(options_.weight, 1);
    absl::Status status = workspace.Allocate(MuonSet::WorkspaceBytes({&one, 1}));
    for (DeviceMemory* memory : {&expected, &alone}) {
      if (status.ok()) status = memory->Allocate(state_.elements() * 4);
    }
    if (status.ok()) status = UpdateFirst(*exact, 1, workspace.as<void>(), &expected);
    if (!status.ok()) return status;
    for (const Way& way : ways) {
      TunedCandidate candidate{way.choice, 0, 0, 0, ""};
      status = UpdateFirst(way, 1, workspace_.as<void>(), &alone);
      if (status.code() == absl::StatusCode::kInternal) {  // a library without an algorithm
        candidate.refused = std::string(status.message());
        shape.candidates.push_back(candidate);
        continue;
      }
      if (!status.ok()) return status;
      const absl::StatusOr<Difference> d = CompareWith(expected);
      if (!d.ok()) return d.status();
      candidate.error = std::sqrt(d->squares / d->reference);
      uint64_t different = 0;
      for (const int32_t batch : {std::min(kOddBatch, batch_max), batch_max}) {
        if (batch == 1 || options_.fastest) continue;
        status = UpdateFirst(way, batch, workspace_.as<void>(), nullptr);
        if (!status.ok()) return status;
        const absl::StatusOr<Difference> bits = CompareWith(alone);
        if (!bits.ok()) return bits.status();
        different += bits->different;
      }
      candidate.refused = RefusalOf(candidate.error, d->not_finite, different, options_.fastest);
      shape.candidates.push_back(candidate);
    }
    return absl::OkStatus();
  }

  // Microseconds of a launch, of `launches` one after the other.
  absl::StatusOr<double> Time(MuonSet& set, int64_t count, int launches) {
    absl::Status status = CudaStatus(cudaEventRecord(events_[0], stream_), "cudaEventRecord");
    for (int i = 0; i < launches && status.ok(); ++i) status = Launch(set, count);
    if (status.ok()) status = CudaStatus(cudaEventRecord(events_[1], stream_), "cudaEventRecord");
    if (status.ok()) status = CudaStatus(cudaEventSynchronize(events_[1]), "an update");
    float ms = 0;
    if (status.ok()) {
      status = CudaStatus(cudaEventElapsedTime(&ms, events_[0], events_[1]), "a time");
    }
    if (!status.ok()) return status;
    return 1e3 * static_cast<double>(ms) / launches;
  }

  // The fastest of the ways that are right.
  absl::Status Compare(const std::vector<Way>& ways, int32_t batch_max, double seconds,
                       TunedShape& shape) {
    std::vector<std::unique_ptr<MuonSet>> sets(ways.size());
    std::vector<std::vector<double>> times(ways.size());
    int32_t batch = batch_max;
    double once_us = 0;
    for (size_t i = 0; i < ways.size(); ++i) {
      if (!shape.candidates[i].refused.empty()) continue;
      if (once_us == 0) {  // the batch is the first one's
        absl::StatusOr<std::unique_ptr<MuonSet>> one =
            Prepare(ways[i], 1, workspace_.as<void>(), tiles_);
        if (!one.ok()) return one.status();
        absl::StatusOr<double> time = Time(**one, 1, 1);
        if (time.ok()) time = Time(**one, 1, 1);
        if (!time.ok()) return time.status();
        batch = std::clamp(static_cast<int32_t>(2 * kCompareMicroseconds / *time), 1, batch_max);
        once_us = *time;
      }
      absl::StatusOr<std::unique_ptr<MuonSet>> set =
          Prepare(ways[i], batch, workspace_.as<void>(), tiles_);
      if (!set.ok()) return set.status();
      sets[i] = *std::move(set);
    }
    if (once_us == 0) {
      return absl::UnavailableError(absl::StrCat("no way of updating ", shape.rows, " x ",
                                                 shape.cols,
                                                 " is right: ", shape.candidates.front().refused));
    }
    const Clock clock;
    for (int round = 0; round < kCompareRounds + 1; ++round) {
      if (round > 2 && clock.seconds() > seconds) break;
      for (size_t i = 0; i < ways.size(); ++i) {
        if (sets[i] == nullptr) continue;
        const int launches = std::clamp(static_cast<int>(10e3 / (once_us * batch)), 1, 20);
        const absl::StatusOr<double> time = Time(*sets[i], batch, launches);
        if (!time.ok()) return time.status();
        if (round > 0) times[i].push_back(*time);
      }
    }
    std::optional<size_t> winner;
    for (size_t i = 0; i < ways.size(); ++i) {
      if (sets[i] == nullptr) continue;
      std::nth_element(times[i].begin(), times[i].begin() + times[i].size() / 2, times[i].end());
      TunedCandidate& candidate = shape.candidates[i];
      candidate.microseconds = times[i][times[i].size() / 2];
      candidate.batch = batch;
      const double gain = winner.has_value() ? kGainMin : 0;
      if (!winner.has_value() ||
          candidate.microseconds < (1 - gain) * shape.candidates[*winner].microseconds) {
        winner = i;
      }
    }
    shape.winner = *winner;
    return absl::OkStatus();
  }

  struct Timed {
    int32_t batch;
    std::unique_ptr<MuonSet> set;
    int launches;
    std::vector<double> times;
  };

  // Each batch under sustained load, until `seconds` of the clock are over.
  absl::Status TimeBatches(const Way& way, const std::vector<int32_t>& batches, const Clock& clock,
                           double seconds, TunedShape& shape) {
    std::vector<Timed> timed;
    for (const int32_t batch : batches) {
      absl::StatusOr<std::unique_ptr<MuonSet>> set =
          Prepare(way, batch, workspace_.as<void>(), tiles_);
      if (!set.ok()) return set.status();
      absl::StatusOr<double> once = Time(**set, batch, 1);
      if (once.ok()) once = Time(**set, batch, 1);
      if (!once.ok()) return once.status();
      const int launches = std::clamp(static_cast<int>(kTurnMicroseconds / *once), 1, 500);
      timed.push_back({batch, *std::move(set), launches, {}});
      if (*once > kBatchMicrosecondsMax) break;
    }
    const double warm_until =
        clock.seconds() + kWarmPart * std::max(0.0, seconds - clock.seconds());
    for (int turn = 0; turn < kTurnsMax; ++turn) {
      for (Timed& t : timed) {
        const absl::StatusOr<double> time = Time(*t.set, t.batch, t.launches);
        if (!time.ok()) return time.status();
        // The first turn counts if there is no time for others.
        if (turn == 0 || clock.seconds() > warm_until) t.times.push_back(*time);
      }
      if (turn + 1 >= kTurnsMin && clock.seconds() > seconds) break;
    }
    for (Timed& t : timed) {
      if (t.times.size() > 1) t.times.erase(t.times.begin());
      std::sort(t.times.begin(), t.times.end());
      shape.times.emplace_back(t.batch, t.times[t.times.size() / 2]);
    }
    return absl::OkStatus();
  }

  const TuningOptions& options_;
  bool own_ = false;
  bool library_ = false;
  size_t memory_bytes_ = 0;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaEvent_t> events_;
  TileTuner tiles_;
  TileTuner rule_tiles_{/*measures=*/false};
  TunerState state_;
  DeviceMemory workspace_;
  DeviceMemory differences_;
};

}  // namespace

std::string RefusalOf(double error, uint64_t not_finite, uint64_t different, bool fastest) {
  if (not_finite != 0) return absl::StrCat(not_finite, " elements are not finite");
  if (!(error <= kErrorMax)) {
    return absl::StrCat("differs from fp32 by ", error, ", more than ", kErrorMax);
  }
  if (different != 0 && !fastest) {
    return absl::StrCat("bits depend on the batch: ", different, " elements differ");
  }
  return "";
}

absl::StatusOr<std::vector<TunedShape>> TuneUpdates(
    std::span<const TuningTask> tasks, const TuningOptions& options,
    const std::function<void(const TunedShape&)>& report) {
  const Clock clock;
  Tuner tuner(options);
  if (absl::Status status = tuner.Start(); !status.ok()) return status;
  std::vector<TunedShape> shapes;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const double left = kPartOfTime * options.seconds - clock.seconds();
    absl::StatusOr<TunedShape> shape =
        tuner.Tune(tasks[i], std::max(0.1, left / static_cast<double>(tasks.size() - i)));
    if (!shape.ok()) return shape.status();
    report(*shape);
    shapes.push_back(*std::move(shape));
  }
  return shapes;
}

}  // namespace dmuond::kernels::cuda
