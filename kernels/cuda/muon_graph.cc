#include "kernels/cuda/muon_set.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

namespace dmuond::kernels::cuda {

namespace {

double Work(const MuonSetBatch& batch) {
  const auto p = static_cast<double>(batch.program->p);
  const auto q = static_cast<double>(batch.program->q);
  return static_cast<double>(batch.matrices) * p * p * (6 * q + 14 * p);
}

// Which branch each batch belongs to: sizes by falling work to the branch that has least.
std::vector<int> AssignBranches(std::span<const MuonSetBatch> batches, int branches) {
  std::map<int64_t, double> sizes;  // elements of a matrix
  const auto size_of = [](const MuonSetBatch& batch) {
    return batch.program->p * batch.program->q;
  };
  for (const MuonSetBatch& batch : batches) sizes[size_of(batch)] += Work(batch);
  std::vector<std::pair<double, int64_t>> ordered;
  for (const auto& [size, work] : sizes) ordered.emplace_back(work, size);
  std::sort(ordered.rbegin(), ordered.rend());
  std::vector<double> loads(branches, 0);
  std::map<int64_t, int> branch_of_size;
  for (const auto& [work, size] : ordered) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += work;
    branch_of_size[size] = static_cast<int>(least - loads.begin());
  }
  std::vector<int> branch_of;
  for (const MuonSetBatch& batch : batches) branch_of.push_back(branch_of_size[size_of(batch)]);
  return branch_of;
}

// Of each branch's workspace.
std::vector<size_t> BranchBytes(std::span<const MuonSetBatch> batches,
                                std::span<const int> branch_of, int branches) {
  std::vector<size_t> bytes(branches, 0);
  for (size_t i = 0; i < batches.size(); ++i) {
    bytes[branch_of[i]] = std::max(
        bytes[branch_of[i]],
        MuonUpdate::WorkspaceBytes(*batches[i].program, batches[i].matrices, batches[i].engine));
  }
  return bytes;
}

// Floating-point operations of a product above which branches cost more than they bring: about a
// millisecond's.
constexpr double kLongProduct = 6e11;

}  // namespace

int MuonSet::Branches(std::span<const MuonSetBatch> batches) {
  double work = 0;
  double products = 0;
  for (const MuonSetBatch& batch : batches) {
    work += Work(batch);
    products += static_cast<double>(batch.program->products.size());
  }
  return work > kLongProduct * products ? 1 : kBranchesMax;
}

size_t MuonSet::WorkspaceBytes(std::span<const MuonSetBatch> batches, int branches) {
  if (branches == 0) branches = Branches(batches);
  const std::vector<size_t> bytes =
      BranchBytes(batches, AssignBranches(batches, branches), branches);
  return std::accumulate(bytes.begin(), bytes.end(), size_t{0});
}

std::unique_ptr<MuonSet> MuonSet::Create(std::span<const MuonSetBatch> batches, void* workspace,
                                         TileTuner* tuner, std::string* error, int branches) {
  if (branches == 0) branches = Branches(batches);
  std::unique_ptr<MuonSet> set(new MuonSet());
  for (const MuonSetBatch& batch : batches) set->matrices_ += batch.matrices;
  const size_t bytes = set->matrices_ * sizeof(PassMatrix);
  cudaError_t result = cudaMalloc(&set->list_, bytes);
  for (Staging& staging : set->staging_) {
    if (result == cudaSuccess) {
      result = cudaHostAlloc(reinterpret_cast<void**>(&staging.list), bytes, cudaHostAllocDefault);
    }
    if (result == cudaSuccess) {
      result = cudaEventCreateWithFlags(&staging.copied, cudaEventDisableTiming);
    }
  }
  if (result != cudaSuccess) {
    *error = std::string("cannot prepare a list of matrices: ") + cudaGetErrorString(result);
    return nullptr;
  }
  const std::vector<int> branch_of = AssignBranches(batches, branches);
  const std::vector<size_t> branch_bytes = BranchBytes(batches, branch_of, branches);
  const PassMatrix* list = set->list_;
  for (size_t i = 0; i < batches.size(); ++i) {
    const MuonSetBatch& batch = batches[i];
    auto* const place =
        static_cast<std::byte*>(workspace) +
        std::accumulate(branch_bytes.begin(), branch_bytes.begin() + branch_of[i], size_t{0});
    std::unique_ptr<MuonUpdate> update =
        MuonUpdate::Create(*batch.config, *batch.program, batch.weight, batch.matrices, list, place,
                           {batch.engine, tuner, batch.separate}, error);
    if (update == nullptr) return nullptr;
    set->updates_.push_back(std::move(update));
    list += batch.matrices;
  }
  result = set->Capture(branch_of);
  if (result != cudaSuccess) {
    *error = std::string("cannot capture a set of updates: ") + cudaGetErrorString(result);
    return nullptr;
  }
  return set;
}

MuonSet::~MuonSet() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  for (Staging& staging : staging_) {
    if (staging.copied != nullptr) cudaEventDestroy(staging.copied);
    cudaFreeHost(staging.list);
  }
  cudaFree(list_);
}

cudaError_t MuonSet::Enqueue(size_t batch, cudaStream_t stream) const {
  const MuonUpdate& update = *updates_[batch];
  cudaError_t result = update.Input(stream);
  if (result == cudaSuccess) result = update.Products(stream);
  if (result == cudaSuccess) result = update.Apply(stream);
  return result;
}

cudaError_t MuonSet::Capture(std::span<const int> branch_of) {
  const int branches = 1 + *std::max_element(branch_of.begin(), branch_of.end());
  std::vector<cudaStream_t> streams(branches, nullptr);
  std::vector<cudaEvent_t> events(branches, nullptr);
  cudaError_t result = cudaSuccess;
  const auto then = [&](cudaError_t next) {
    if (result == cudaSuccess) result = next;
  };
  for (int b = 0; b < branches && result == cudaSuccess; ++b) {
    then(cudaStreamCreateWithFlags(&streams[b], cudaStreamNonBlocking));
    if (result == cudaSuccess) {
      then(cudaEventCreateWithFlags(&events[b], cudaEventDisableTiming));
    }
  }
  cudaGraph_t graph = nullptr;
  if (result == cudaSuccess) {
    then(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
    if (result == cudaSuccess) {
      then(cudaEventRecord(events[0], streams[0]));
      for (int b = 1; b < branches && result == cudaSuccess; ++b) {
        then(cudaStreamWaitEvent(streams[b], events[0], 0));
      }
      for (size_t i = 0; i < updates_.size() && result == cudaSuccess; ++i) {
        then(Enqueue(i, streams[branch_of[i]]));
      }
      for (int b = 1; b < branches && result == cudaSuccess; ++b) {
        then(cudaEventRecord(events[b], streams[b]));
        if (result == cudaSuccess) then(cudaStreamWaitEvent(streams[0], events[b], 0));
      }
      const cudaError_t ended = cudaStreamEndCapture(streams[0], &graph);
      then(ended);
    }
  }
  if (result == cudaSuccess) then(cudaGraphInstantiate(&graph_, graph, 0));
  if (graph != nullptr) cudaGraphDestroy(graph);
  for (cudaEvent_t event : events) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  for (cudaStream_t stream : streams) {
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
  return result;
}

cudaError_t MuonSet::Upload(cudaStream_t stream, std::span<const PassMatrix> matrices) {
  if (matrices.size() != matrices_) return cudaErrorInvalidValue;
  Staging& staging = staging_[next_staging_];
  next_staging_ = (next_staging_ + 1) % staging_.size();
  if (const cudaError_t result = cudaEventSynchronize(staging.copied); result != cudaSuccess) {
    return result;
  }
  const size_t bytes = matrices.size() * sizeof(PassMatrix);
  std::memcpy(staging.list, matrices.data(), bytes);
  const cudaError_t result =
      cudaMemcpyAsync(list_, staging.list, bytes, cudaMemcpyHostToDevice, stream);
  return result == cudaSuccess ? cudaEventRecord(staging.copied, stream) : result;
}

cudaError_t MuonSet::Launch(cudaStream_t stream, std::span<const PassMatrix> matrices) {
  const cudaError_t result = Upload(stream, matrices);
  return result == cudaSuccess ? cudaGraphLaunch(graph_, stream) : result;
}

}  // namespace dmuond::kernels::cuda
