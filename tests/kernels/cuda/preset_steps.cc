// Steps of Muon on one matrix, for preset_steps.py: reads what to do, writes what became of it.
//
//   preset_steps PRESET ROWS COLS STEPS < input > weights
//
// input: the weights, then for each step learning rate, momentum and weight decay (fp64) and the
// gradient; matrices are fp32, row-major. Exit status: 1, with a message, where anything is wrong.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/presets.h"

namespace dmuond::kernels::cuda {
namespace {

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "preset_steps: %s\n", what.c_str());
  std::exit(1);
}
void Check(const absl::Status& status) {
  if (!status.ok()) Fail(std::string(status.message()));
}
template <typename T>
T Get(absl::StatusOr<T> result) {
  Check(result.status());
  return *std::move(result);
}
template <typename T>
void Read(std::vector<T>& into) {
  if (std::fread(into.data(), sizeof(T), into.size(), stdin) != into.size()) {
    Fail("the input ends too early");
  }
}

int Main(int argc, char** argv) {
  if (argc != 5) Fail("usage: preset_steps PRESET ROWS COLS STEPS < input > weights");
  const MuonConfig config = Get(FindPreset(argv[1]));
  const int64_t rows = std::atoll(argv[2]);
  const int64_t cols = std::atoll(argv[3]);
  const int64_t steps = std::atoll(argv[4]);
  if (rows < 1 || cols < 1 || steps < 1) Fail("rows, columns and steps are at least 1");
  const auto device = Get(CudaDevice::Create(0));
  const auto stream = Get(device->CreateStream());
  const int64_t n = rows * cols;
  const int64_t slot = (n + 63) / 64 * 64;
  enum { kGradient, kMomentum, kMomentumOut, kMaster, kMasterOut, kWeight, kParts };
  const auto memory = Get(device->AllocateScratch(kParts * slot * sizeof(float)));
  float* parts[kParts];
  for (int i = 0; i < kParts; ++i) {
    parts[i] = reinterpret_cast<float*>(memory->data()) + i * slot;
  }
  // A copy from pageable memory returns before its last part has arrived, which only work on the
  // default stream waits for.
  const auto copy = [&](void* to, const void* from) {
    if (cudaMemcpy(to, from, n * sizeof(float), cudaMemcpyDefault) != cudaSuccess ||
        cudaDeviceSynchronize() != cudaSuccess) {
      Fail("cudaMemcpy");
    }
  };
  const auto workspace =
      Get(device->AllocateScratch(device->ops().MuonWorkspaceBytes(rows, cols, 1, config)));
  std::vector<float> host(n);
  copy(parts[kMomentum], host.data());  // zeros
  Read(host);
  copy(parts[kMaster], host.data());
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<double> numbers(3);
    Read(numbers);
    Read(host);
    copy(parts[kGradient], host.data());
    UpdateScalars scalars;
    scalars.learning_rate = numbers[0];
    scalars.momentum = numbers[1];
    scalars.weight_decay = numbers[2];
    const MuonMatrix matrix{parts[kGradient], parts[kMomentum],  parts[kMomentumOut],
                            parts[kMaster],   parts[kMasterOut], parts[kWeight],
                            &scalars};
    Check(device->ops().UpdateMuon(*stream, {rows, cols, DType::kBF16, &config, {&matrix, 1}},
                                   workspace->data()));
    Check(stream->Synchronize());
    std::swap(parts[kMomentum], parts[kMomentumOut]);
    std::swap(parts[kMaster], parts[kMasterOut]);
  }
  copy(host.data(), parts[kMaster]);
  if (std::fwrite(host.data(), sizeof(float), host.size(), stdout) != host.size()) Fail("write");
  return 0;
}

}  // namespace
}  // namespace dmuond::kernels::cuda

int main(int argc, char** argv) { return dmuond::kernels::cuda::Main(argc, argv); }
