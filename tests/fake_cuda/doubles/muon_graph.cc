// Double of muon_graph.h. The CPU device has one engine and one form: choices change no bits here.
#include "kernels/cuda/muon_graph.h"

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
struct Graph {
  Batch batch;
  void* workspace;
  size_t workspace_bytes;
};

Batch Of(const MuonGraphBatch& batch) {
  const NewtonSchulzProgram& program = *batch.program;
  return {*batch.config, program.tall ? program.q : program.p, program.tall ? program.p : program.q,
          batch.weight, batch.matrices};
}

// MuonGraph has no room for what it was made for.
std::mutex mutex;
std::map<const MuonGraph*, Graph>& Graphs() {
  static std::map<const MuonGraph*, Graph>& graphs = *new std::map<const MuonGraph*, Graph>();
  return graphs;
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

size_t MuonGraph::WorkspaceBytes(const MuonGraphBatch& of) {
  const Batch batch = Of(of);
  return CpuOfThread().ops().MuonWorkspaceBytes(batch.rows, batch.cols, batch.matrices,
                                                batch.config);
}

std::unique_ptr<MuonGraph> MuonGraph::Create(const MuonGraphBatch& batch, void* workspace,
                                             TileTuner* tuner, std::string*) {
  GemmProblem product;
  product.d = {.rows = batch.program->p, .cols = batch.program->p};
  product.a = {.rows = batch.program->p, .cols = batch.program->q};
  product.batch = static_cast<int>(batch.matrices);
  tuner->Fastest(product, {});
  std::unique_ptr<MuonGraph> graph(new MuonGraph());
  std::lock_guard lock(mutex);
  Graphs()[graph.get()] = {Of(batch), workspace, WorkspaceBytes(batch)};
  return graph;
}

MuonGraph::~MuonGraph() {
  std::lock_guard lock(mutex);
  Graphs().erase(this);
}

cudaError_t MuonGraph::Launch(cudaStream_t stream, std::span<const PassMatrix> matrices) {
  Graph graph;
  {
    std::lock_guard lock(mutex);
    graph = Graphs().at(this);
  }
  Ranges ranges;
  ranges.Add(graph.workspace, graph.workspace_bytes, 256);
  for (const PassMatrix& m : matrices) AddMatrix(graph.batch, m, ranges);
  std::vector<PassMatrix> kept(matrices.begin(), matrices.end());
  return LaunchDouble(stream, "muon", ranges,
                      [graph = std::move(graph), kept = std::move(kept)](Ops& ops, Stream& s) {
                        return Update(graph.batch, kept, OnWorker(graph.workspace), ops, s);
                      });
}

}  // namespace dmuond::kernels::cuda
