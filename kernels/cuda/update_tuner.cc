#include "kernels/cuda/update_tuner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/library_product.h"
#include "kernels/cuda/muon_graph.h"
#include "kernels/cuda/tuner_data.h"

namespace dmuond::kernels::cuda {
namespace {

// What fp16 and bf16 may differ from fp32 on random gradients; docs/maths.md, section 4.
constexpr double kErrorMax = 4e-2;
// One of those in which bits must be the same; it is not timed.
constexpr int32_t kOddBatch = 3;
// So much faster than the device's default must another way be.
constexpr double kGainMin = 0.015;
// Candidates are compared on a batch that takes about so long, in turns of the second length.
constexpr double kCompareMicroseconds = 3000;
constexpr double kCompareTurnMicroseconds = 10e3;
constexpr int kCompareRounds = 5;
// A candidate that takes so much longer than the fastest, each alone, is not compared.
constexpr double kHopeless = 1.25;
// Larger batches are not timed: their slope is known by then.
constexpr double kBatchMicrosecondsMax = 80e3;
// Batches take turns, without a pause between them: a chip at its power limit is faster after any.
// The first turn heats it.
constexpr int kTurns = 4;
constexpr int kTurnsMin = 3;
constexpr double kTurnMicrosecondsMax = 40e3;
constexpr double kTurnMicrosecondsMin = 5e3;
// Turns of batches that leave the chip so idle, by the time of a matrix in the best batch, are
// short: others would be faster after them than they are after one another.
constexpr double kIdle = 1.15;
constexpr double kIdleTurn = 0.25;
// What is planned with: a turn is not cut short.
constexpr double kPartOfTime = 0.97;
// Of the memory, for the matrices' state and for what their products work in; the rest is for the
// fp32 update that is right.
constexpr double kPartForState = 0.55;
constexpr double kPartForWorkspace = 0.3;

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

// The state of matrices, on the device: of one shape after the other, all at the same place.
class TunerState {
 public:
  // Between the matrices of a shape.
  static int64_t Slot(const TuningTask& task) { return (task.rows * task.cols + 63) / 64 * 64; }
  static size_t BytesPerMatrix(const TuningTask& task) { return Slot(task) * kElementBytes; }

  absl::Status Allocate(size_t bytes) {
    elements_ = static_cast<int64_t>(bytes / kElementBytes);
    RETURN_IF_ERROR(memory_.Allocate(bytes));
    gradient_ = memory_.as<float>();
    momentum_ = gradient_ + elements_;
    master_ = momentum_ + elements_;
    momentum_out_ = master_ + elements_;
    master_out_ = momentum_out_ + elements_;
    weight_ = reinterpret_cast<std::byte*>(master_out_ + elements_);
    return absl::OkStatus();
  }
  // Random gradients; masters are zero, so that the new ones are the update itself.
  absl::Status FillForChecks(cudaStream_t stream) {
    RETURN_IF_ERROR(
        CudaStatus(LaunchRandom(stream, WeightType::kF32, gradient_, elements_, 1, 1e-3F),
                   "random gradients"));
    return CudaStatus(cudaMemsetAsync(momentum_, 0, elements_ * 8, stream), "clearing state");
  }
  // Momentum and masters as of a running job: zeros take less power, and a chip at its limit is
  // faster with them.
  absl::Status FillForTimes(cudaStream_t stream) {
    RETURN_IF_ERROR(CudaStatus(
        LaunchRandom(stream, WeightType::kF32, momentum_, elements_, 2, 4e-3F), "random momentum"));
    return CudaStatus(LaunchRandom(stream, WeightType::kF32, master_, elements_, 3, 2e-2F),
                      "random masters");
  }
  // Poisons what an update writes.
  absl::Status Poison(const TuningTask& task, int64_t count, cudaStream_t stream) {
    return CudaStatus(cudaMemsetAsync(master_out_, 0xFF, Slot(task) * count * 4, stream), "poison");
  }
  [[nodiscard]] std::vector<PassMatrix> Matrices(const TuningTask& task, int64_t count) const {
    std::vector<PassMatrix> matrices;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i * Slot(task);
      PassMatrix m{gradient_ + at,
                   momentum_ + at,
                   momentum_out_ + at,
                   master_ + at,
                   master_out_ + at,
                   weight_ + at * 4,
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

 private:
  static constexpr size_t kElementBytes = 24;  // weights may be fp32

  DeviceMemory memory_;
  int64_t elements_ = 0;
  float* gradient_ = nullptr;
  float* momentum_ = nullptr;
  float* master_ = nullptr;
  float* momentum_out_ = nullptr;
  float* master_out_ = nullptr;
  std::byte* weight_ = nullptr;
};

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// One way of updating the matrices of a shape.
struct Way {
  KernelChoice choice;
  MuonConfig config;
  NewtonSchulzProgram program;

  [[nodiscard]] MuonGraphBatch Batch(DType weight, int64_t count) const {
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
  ASSIGN_OR_RETURN(way.program, BuildNewtonSchulz(newton_schulz, rows, cols));
  return way;
}

// A task on its way: the ways of its shape, and what has been found out.
struct Subject {
  TuningTask task;
  std::vector<Way> ways;
  int32_t batch_max = 0;
  Way exact;                   // in fp32
  size_t workspace_bytes = 0;  // of any way
  size_t exact_bytes = 0;      // of the exact one
  TunedShape shape;
};

// One of a subject's ways, prepared for a batch.
struct Timed {
  Subject* subject;
  size_t way;  // in the subject's
  int32_t batch;
  std::unique_ptr<MuonGraph> graph;
  double once_us;
  std::vector<double> times;  // microseconds, one a turn
};

class Tuner {
 public:
  explicit Tuner(const TuningOptions& options) : options_(options) {}
  ~Tuner() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  absl::Status Start(std::span<const TuningTask> tasks) {
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
    size_t state_bytes = 0;
    size_t workspace_bytes = 0;
    size_t exact_bytes = 0;
    int64_t elements = 0;
    for (const TuningTask& task : tasks) {
      if (status.ok()) status = Add(task);
      if (!status.ok()) return status;
      const Subject& subject = subjects_.back();
      state_bytes =
          std::max(state_bytes, subject.batch_max * TunerState::BytesPerMatrix(subject.task));
      workspace_bytes = std::max(workspace_bytes, subject.workspace_bytes);
      exact_bytes = std::max(exact_bytes, subject.exact_bytes);
      elements = std::max(elements, subject.task.rows * subject.task.cols);
    }
    if (status.ok()) status = differences_.Allocate(sizeof(Difference));
    if (status.ok()) status = state_.Allocate(state_bytes);
    if (status.ok()) status = workspace_.Allocate(workspace_bytes);
    if (status.ok()) status = exact_workspace_.Allocate(exact_bytes);
    for (DeviceMemory* memory : {&expected_, &alone_}) {
      if (status.ok()) status = memory->Allocate(elements * 4);
    }
    return status;
  }

  // What needs the host between one launch and the next comes first, for all shapes; then the
  // winners' batches are timed in one go.
  absl::StatusOr<std::vector<TunedShape>> Tune(const Clock& clock, double seconds) {
    absl::Status status = state_.FillForChecks(stream_);
    for (Subject& subject : subjects_) {
      if (status.ok()) status = Check(subject);
    }
    if (status.ok()) status = state_.FillForTimes(stream_);
    for (Subject& subject : subjects_) {
      if (status.ok()) status = PrepareWays(subject);
    }
    if (status.ok()) status = CompareWays();
    for (Subject& subject : subjects_) {
      if (status.ok()) status = PrepareBatches(subject);
    }
    if (status.ok()) status = TimeBatches(clock, seconds);
    if (!status.ok()) return status;
    std::vector<TunedShape> shapes;
    for (Subject& subject : subjects_) shapes.push_back(std::move(subject.shape));
    return shapes;
  }

 private:
  absl::Status Add(const TuningTask& task) {
    Subject subject;
    subject.task = task;
    subject.shape.rows = task.rows;
    subject.shape.cols = task.cols;
    ASSIGN_OR_RETURN(subject.ways, Ways(task.rows, task.cols));
    if (subject.ways.empty()) return CheckLibrary();  // neither engine is there
    ASSIGN_OR_RETURN(subject.exact,
                     MakeWay(task.rows, task.cols, options_.config, ProductEngine::kOwn,
                             options_.config.newton_schulz.form, DType::kF32));
    subject.exact_bytes = MuonGraph::WorkspaceBytes(subject.exact.Batch(options_.weight, 1));
    const auto bytes = static_cast<double>(memory_bytes_);
    const auto state_max = static_cast<size_t>(bytes * kPartForState);
    const auto workspace_max = static_cast<size_t>(bytes * kPartForWorkspace);
    const bool checkable = subject.exact_bytes + task.rows * task.cols * 8 <=
                           memory_bytes_ - state_max - workspace_max;
    for (const int32_t batch : task.batches) {
      size_t workspace = 0;
      for (const Way& way : subject.ways) {
        workspace =
            std::max(workspace, MuonGraph::WorkspaceBytes(way.Batch(options_.weight, batch)));
      }
      if (!checkable || batch * TunerState::BytesPerMatrix(task) > state_max ||
          workspace > workspace_max) {
        break;
      }
      subject.batch_max = batch;
      subject.workspace_bytes = workspace;
    }
    if (subject.batch_max < 1) {
      return absl::ResourceExhaustedError(absl::StrCat("a matrix of ", task.rows, " x ", task.cols,
                                                       " does not fit ", memory_bytes_, " bytes"));
    }
    subjects_.push_back(std::move(subject));
    return absl::OkStatus();
  }

  // The device's default first; with nothing else, unless bits may depend on what was measured.
  absl::StatusOr<std::vector<Way>> Ways(int64_t rows, int64_t cols) const {
    std::vector<Way> ways;
    const NewtonSchulzConfig& config = options_.config.newton_schulz;
    for (const ProductEngine engine : {ProductEngine::kOwn, ProductEngine::kLibrary}) {
      if (engine == ProductEngine::kOwn ? !own_ : !library_) continue;
      for (const NewtonSchulzForm form : {NewtonSchulzForm::kGram, NewtonSchulzForm::kStandard}) {
        if (form == NewtonSchulzForm::kGram && config.form != form) continue;
        ASSIGN_OR_RETURN(Way way, MakeWay(rows, cols, options_.config, engine, form, config.dtype));
        ways.push_back(std::move(way));
        if (!options_.fastest) return ways;
      }
    }
    return ways;
  }

  // No tile changes a bit.
  absl::StatusOr<std::unique_ptr<MuonGraph>> Prepare(const Way& way, int64_t count, void* workspace,
                                                     TileTuner& tiles) {
    RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"));
    std::string error;
    std::unique_ptr<MuonGraph> graph =
        MuonGraph::Create(way.Batch(options_.weight, count), workspace, &tiles, &error);
    if (graph == nullptr) return absl::InternalError(error);
    return graph;
  }

  absl::Status Launch(const Subject& subject, MuonGraph& graph, int64_t count) {
    return CudaStatus(graph.Launch(stream_, state_.Matrices(subject.task, count)), "an update");
  }

  absl::StatusOr<Difference> CompareWith(const Subject& subject, const DeviceMemory& expected) {
    absl::Status status = CudaStatus(
        cudaMemsetAsync(differences_.as<void>(), 0, sizeof(Difference), stream_), "clearing sums");
    if (status.ok()) {
      status = CudaStatus(
          LaunchCompare(stream_, state_.master_out(), expected.as<float>(),
                        subject.task.rows * subject.task.cols, differences_.as<Difference>()),
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
  absl::Status UpdateFirst(const Subject& subject, const Way& way, int64_t count, void* workspace,
                           DeviceMemory* to) {
    absl::Status status = state_.Poison(subject.task, count, stream_);
    if (!status.ok()) return status;
    // Not every batch that is checked is timed as well.
    TileTuner& tiles = count == kOddBatch ? rule_tiles_ : tiles_;
    ASSIGN_OR_RETURN(std::unique_ptr<MuonGraph> graph, Prepare(way, count, workspace, tiles));
    status = Launch(subject, *graph, count);
    if (status.ok() && to != nullptr) {
      status = CudaStatus(
          cudaMemcpyAsync(to->as<void>(), state_.master_out(),
                          subject.task.rows * subject.task.cols * 4, cudaMemcpyDefault, stream_),
          "a copy");
    }
    // The graph must outlive its launch.
    if (status.ok()) status = CudaStatus(cudaStreamSynchronize(stream_), "an update");
    return status;
  }

  // Whether each way's numbers are right, and independent of the batch.
  absl::Status Check(Subject& subject) {
    absl::Status status =
        UpdateFirst(subject, subject.exact, 1, exact_workspace_.as<void>(), &expected_);
    if (!status.ok()) return status;
    for (const Way& way : subject.ways) {
      TunedCandidate candidate{way.choice, 0, 0, 0, ""};
      status = UpdateFirst(subject, way, 1, workspace_.as<void>(), &alone_);
      if (status.code() == absl::StatusCode::kInternal) {  // a library without an algorithm
        candidate.refused = std::string(status.message());
        subject.shape.candidates.push_back(candidate);
        continue;
      }
      if (!status.ok()) return status;
      ASSIGN_OR_RETURN(const Difference d, CompareWith(subject, expected_));
      candidate.error = std::sqrt(d.squares / d.reference);
      uint64_t different = 0;
      for (const int32_t batch : {std::min(kOddBatch, subject.batch_max), subject.batch_max}) {
        if (batch == 1 || options_.fastest) continue;
        status = UpdateFirst(subject, way, batch, workspace_.as<void>(), nullptr);
        if (!status.ok()) return status;
        ASSIGN_OR_RETURN(const Difference bits, CompareWith(subject, alone_));
        different += bits.different;
      }
      candidate.refused = RefusalOf(candidate.error, d.not_finite, different, options_.fastest);
      subject.shape.candidates.push_back(candidate);
    }
    return absl::OkStatus();
  }

  // Microseconds of a launch, of `launches` one after the other.
  absl::StatusOr<double> Time(const Subject& subject, MuonGraph& graph, int64_t count,
                              int launches) {
    absl::Status status = CudaStatus(cudaEventRecord(events_[0], stream_), "cudaEventRecord");
    for (int i = 0; i < launches && status.ok(); ++i) status = Launch(subject, graph, count);
    if (status.ok()) status = CudaStatus(cudaEventRecord(events_[1], stream_), "cudaEventRecord");
    if (status.ok()) status = CudaStatus(cudaEventSynchronize(events_[1]), "an update");
    float ms = 0;
    if (status.ok()) {
      status = CudaStatus(cudaEventElapsedTime(&ms, events_[0], events_[1]), "a time");
    }
    if (!status.ok()) return status;
    return 1e3 * static_cast<double>(ms) / launches;
  }

  // With the time of a launch: the shorter of two, after a first one.
  absl::StatusOr<Timed> PrepareTimed(Subject& subject, size_t way, int32_t batch) {
    ASSIGN_OR_RETURN(std::unique_ptr<MuonGraph> graph,
                     Prepare(subject.ways[way], batch, workspace_.as<void>(), tiles_));
    Timed timed{&subject, way, batch, std::move(graph), 0, {}};
    for (int launch = 0; launch < 3; ++launch) {
      ASSIGN_OR_RETURN(const double time, Time(subject, *timed.graph, batch, 1));
      timed.once_us = launch < 2 ? time : std::min(timed.once_us, time);
    }
    return timed;
  }

  // Launches for about so long; appends a time.
  absl::Status Turn(Timed& timed, double microseconds) {
    const int launches = std::clamp(static_cast<int>(microseconds / timed.once_us), 1, 500);
    const absl::StatusOr<double> time = Time(*timed.subject, *timed.graph, timed.batch, launches);
    if (time.ok()) timed.times.push_back(*time);
    return time.status();
  }

  // The ways that are right and not hopeless, in batches of one size. The device's default is among
  // them if it is right, however slow it seems.
  absl::Status PrepareWays(Subject& subject) {
    std::vector<TunedCandidate>& candidates = subject.shape.candidates;
    std::vector<Timed> ways;
    int32_t batch = 0;
    double fastest_us = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < subject.ways.size(); ++i) {
      if (!candidates[i].refused.empty()) continue;
      if (batch == 0) {  // the first one's
        ASSIGN_OR_RETURN(Timed one, PrepareTimed(subject, i, 1));
        batch = std::clamp(static_cast<int32_t>(2 * kCompareMicroseconds / one.once_us), 1,
                           subject.batch_max);
      }
      ASSIGN_OR_RETURN(Timed way, PrepareTimed(subject, i, batch));
      candidates[i].microseconds = way.once_us;
      candidates[i].batch = batch;
      fastest_us = std::min(fastest_us, way.once_us);
      ways.push_back(std::move(way));
    }
    if (ways.empty()) {
      return absl::UnavailableError(absl::StrCat("no way of updating ", subject.task.rows, " x ",
                                                 subject.task.cols,
                                                 " is right: ", candidates.front().refused));
    }
    for (Timed& way : ways) {
      if (way.way == 0 || way.once_us <= kHopeless * fastest_us) {
        compared_.push_back(std::move(way));
      }
    }
    return absl::OkStatus();
  }

  // The fastest ones, under sustained load.
  absl::Status CompareWays() {
    for (int round = 0; round <= kCompareRounds; ++round) {
      for (Timed& way : compared_) {
        RETURN_IF_ERROR(Turn(way, kCompareTurnMicroseconds));
        if (round == 0) way.times.clear();  // it heats the chip
      }
    }
    const Subject* subject = nullptr;
    for (const Timed& way : compared_) {
      TunedShape& shape = way.subject->shape;
      TunedCandidate& candidate = shape.candidates[way.way];
      candidate.microseconds = Median(way.times);
      const bool first = std::exchange(subject, way.subject) != way.subject;
      if (first ||
          candidate.microseconds < (1 - kGainMin) * shape.candidates[shape.winner].microseconds) {
        shape.winner = way.way;
      }
    }
    compared_.clear();
    return absl::OkStatus();
  }

  absl::Status PrepareBatches(Subject& subject) {
    for (const int32_t batch : subject.task.batches) {
      if (batch > subject.batch_max) break;
      ASSIGN_OR_RETURN(Timed timed, PrepareTimed(subject, subject.shape.winner, batch));
      timed_.push_back(std::move(timed));
      if (timed_.back().once_us > kBatchMicrosecondsMax) break;
    }
    return absl::OkStatus();
  }

  // The batches of all shapes under sustained load, until `seconds` of the clock are over.
  absl::Status TimeBatches(const Clock& clock, double seconds) {
    if (timed_.empty()) return absl::OkStatus();
    const double left_us = 1e6 * std::max(0.0, seconds - clock.seconds());
    const double turn_us = std::clamp(left_us / (kTurns * static_cast<double>(timed_.size())),
                                      kTurnMicrosecondsMin, kTurnMicrosecondsMax);
    std::map<const Subject*, double> best_us;  // of a matrix
    for (const Timed& t : timed_) {
      const double us = t.once_us / t.batch;
      const auto [best, first] = best_us.emplace(t.subject, us);
      best->second = std::min(best->second, us);
    }
    for (int turn = 0; turn < kTurnsMin || clock.seconds() < seconds; ++turn) {
      for (Timed& t : timed_) {
        if (turn >= kTurnsMin && clock.seconds() > seconds) break;
        const bool idle = t.once_us / t.batch > kIdle * best_us[t.subject];
        RETURN_IF_ERROR(Turn(t, idle ? kIdleTurn * turn_us : turn_us));
        if (turn == 0) t.times.clear();
      }
    }
    for (Timed& t : timed_) t.subject->shape.times.emplace_back(t.batch, Median(t.times));
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
  DeviceMemory exact_workspace_;
  DeviceMemory expected_;
  DeviceMemory alone_;
  DeviceMemory differences_;
  std::deque<Subject> subjects_;  // pointed to
  std::vector<Timed> compared_;
  std::vector<Timed> timed_;
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

absl::StatusOr<std::vector<TunedShape>> TuneUpdates(std::span<const TuningTask> tasks,
                                                    const TuningOptions& options) {
  const Clock clock;
  Tuner tuner(options);
  RETURN_IF_ERROR(tuner.Start(tasks));
  return tuner.Tune(clock, kPartOfTime * options.seconds);
}

}  // namespace dmuond::kernels::cuda
