// Double of muon_set.h. The CPU device has one engine and one form: choices change no bits here.
#include "kernels/cuda/muon_set.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "tests/fake_cuda/doubles/doubles.h"

namespace dmuond::kernels::cuda {
namespace {

struct Batch {
  MuonConfig config;
  int64_t rows;
  int64_t cols;
  DType weight;
  int64_t matrices;
};
struct Set {
  std::vector<Batch> batches;
  void* workspace;
  size_t workspace_bytes;
};

Batch Of(const MuonSetBatch& batch) {
  const NewtonSchulzProgram& program = *batch.program;
  return {*batch.config, program.tall ? program.q : program.p, program.tall ? program.p : program.q,
          batch.weight, batch.matrices};
}

// MuonSet has no room for what it was made for.
std::mutex mutex;
std::map<const MuonSet*, Set>& Sets() {
  static std::map<const MuonSet*, Set>& sets = *new std::map<const MuonSet*, Set>();
  return sets;
}

UpdateScalars Scalars(const PassScalars& s) {
  return {.learning_rate = s.learning_rate,
          .momentum = s.momentum,
          .weight_decay = s.weight_decay,
          .gradient_factor = s.gradient_factor,
          .active = s.active};
}

void AddMatrix(const Batch& batch, const PassMatrix& m, Ranges& ranges) {
  const auto elements = static_cast<size_t>(batch.rows * batch.cols);
  for (const float* data : {m.gradient, m.momentum_in, static_cast<const float*>(m.momentum_out),
                            m.master_in, static_cast<const float*>(m.master_out)}) {
    ranges.Add(data, elements * sizeof(float));
  }
  ranges.Add(m.weight_out, elements * SizeOf(batch.weight));
}

absl::Status Update(const Batch& batch, std::span<const PassMatrix> matrices, void* workspace,
                    Ops& ops, Stream& stream) {
  std::vector<UpdateScalars> scalars;
  for (const PassMatrix& m : matrices) scalars.push_back(Scalars(m.scalars));
  std::vector<MuonMatrix> found;
  for (const PassMatrix& m : matrices) {
    found.push_back({.gradient = OnWorker(m.gradient),
                     .momentum_in = OnWorker(m.momentum_in),
                     .momentum_out = OnWorker(m.momentum_out),
                     .master_in = OnWorker(m.master_in),
                     .master_out = OnWorker(m.master_out),
                     .weight_out = fakeCudaAlias(m.weight_out),
                     .scalars = &scalars[found.size()]});
  }
  return ops.UpdateMuon(stream, {batch.rows, batch.cols, batch.weight, &batch.config, found},
                        workspace);
}

}  // namespace

int MuonSet::Branches(std::span<const MuonSetBatch>) { return 1; }

size_t MuonSet::WorkspaceBytes(std::span<const MuonSetBatch> batches, int) {
  size_t bytes = 0;
  for (const MuonSetBatch& each : batches) {
    const Batch batch = Of(each);
    bytes = std::max(bytes, CpuOfThread().ops().MuonWorkspaceBytes(batch.rows, batch.cols,
                                                                   batch.matrices, batch.config));
  }
  return bytes;
}

std::unique_ptr<MuonSet> MuonSet::Create(std::span<const MuonSetBatch> batches, void* workspace,
                                         TileTuner* tuner, std::string*, int) {
  for (const MuonSetBatch& batch : batches) {
    GemmProblem product;
    product.d = {.rows = batch.program->p, .cols = batch.program->p};
    product.a = {.rows = batch.program->p, .cols = batch.program->q};
    product.batch = static_cast<int>(batch.matrices);
    tuner->Fastest(product, {});
  }
  std::unique_ptr<MuonSet> set(new MuonSet());
  Set made{{}, workspace, WorkspaceBytes(batches)};
  for (const MuonSetBatch& batch : batches) made.batches.push_back(Of(batch));
  std::lock_guard lock(mutex);
  Sets()[set.get()] = std::move(made);
  return set;
}

MuonSet::~MuonSet() {
  std::lock_guard lock(mutex);
  Sets().erase(this);
}

cudaError_t MuonSet::Launch(cudaStream_t stream, std::span<const PassMatrix> matrices) {
  Set set;
  {
    std::lock_guard lock(mutex);
    set = Sets().at(this);
  }
  Ranges ranges;
  ranges.Add(set.workspace, set.workspace_bytes, 256);
  auto next = matrices.begin();
  for (const Batch& batch : set.batches) {
    for (int64_t i = 0; i < batch.matrices; ++i) AddMatrix(batch, *next++, ranges);
  }
  std::vector<PassMatrix> kept(matrices.begin(), matrices.end());
  return LaunchDouble(
      stream, "muon", ranges, [set = std::move(set), kept = std::move(kept)](Ops& ops, Stream& s) {
        std::span<const PassMatrix> left = kept;
        for (const Batch& batch : set.batches) {
          const auto count = static_cast<size_t>(batch.matrices);
          absl::Status status = Update(batch, left.first(count), OnWorker(set.workspace), ops, s);
          if (!status.ok()) return status;
          left = left.subspan(count);
        }
        return absl::OkStatus();
      });
}

}  // namespace dmuond::kernels::cuda
