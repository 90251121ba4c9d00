// How fast a lane's file is written and read, beside plain write + fsync and read of as many bytes
// in the same directory, in turns.
//
//   snapshot_bench [DIRECTORY [MiB [ROUNDS]]]        default: a temporary directory, 512, 3
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "server/storage/manifest.h"
#include "server/storage/posix_storage.h"
#include "server/storage/safetensors_reader.h"
#include "server/storage/snapshot_store.h"
#include "server/storage/state_file.h"

namespace dmuond::server::storage {
namespace {

constexpr int64_t kRows = 4096;
constexpr int64_t kCols = 1024;
constexpr int64_t kTensorBytes = kRows * kCols * 4;
constexpr char kJob[] = "bench";
const SnapshotId kId{scheduler::Attempt(1), scheduler::StepId(1)};

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "snapshot_bench: %s\n", std::string(status.message()).c_str());
  std::exit(1);
}
void Check(bool fine, const char* what) {
  if (!fine) Check(absl::UnavailableError(std::string(what) + ": " + std::strerror(errno)));
}

// What a lane's host copy holds: tensors in memory, one after the other.
std::vector<float> MakeState(int64_t tensors) {
  std::vector<float> state(tensors * kRows * kCols);
  for (size_t i = 0; i < state.size(); ++i) state[i] = static_cast<float>(i * 2654435761U);
  return state;
}
std::span<const std::byte> TensorOf(const std::vector<float>& state, int64_t tensor) {
  return std::as_bytes(std::span(state)).subspan(tensor * kTensorBytes, kTensorBytes);
}

// Pages of the file leave the cache, so that reading reads.
void Forget(const std::string& path) {
  const wire::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  Check(fd.valid(), "open");
  Check(::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED) == 0, "fadvise");
}

void WritePlain(const std::string& path, const std::vector<float>& state) {
  const wire::UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  Check(fd.valid(), "open");
  const auto bytes = std::as_bytes(std::span(state));
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n =
        ::write(fd.get(), bytes.data() + at, std::min<size_t>(bytes.size() - at, kTensorBytes));
    Check(n > 0, "write");
    at += n;
  }
  Check(::fsync(fd.get()) == 0, "fsync");
}

void ReadPlain(const std::string& path) {
  const wire::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  Check(fd.valid(), "open");
  std::vector<std::byte> buffer(1 << 20);
  ssize_t n = 0;
  while ((n = ::read(fd.get(), buffer.data(), buffer.size())) > 0) {
  }
  Check(n == 0, "read");
}

v1::SnapshotFile WriteSnapshot(Storage& storage, const std::vector<float>& state, int64_t tensors) {
  StateFile file{.id = kId, .job = kJob};
  for (int64_t unit = 0; unit < tensors / 2; ++unit) {
    file.units.push_back({.parameter = "layers." + std::to_string(unit) + ".weight",
                          .parameter_shape = {kRows, kCols},
                          .box = scheduler::WholeBox({kRows, kCols})});
  }
  auto writer = CreateStateFile(storage, file);
  Check(writer.status());
  for (int64_t tensor = 0; tensor < tensors; ++tensor) {
    Check((*writer)->Append(TensorOf(state, tensor)));
  }
  auto record = (*writer)->Finish();
  Check(record.status());
  return *std::move(record);
}

void ReadSnapshot(Storage& storage, const std::string& path, const v1::SnapshotFile& record,
                  std::vector<float>& to) {
  auto reader = SafetensorsReader::Open(storage, path, SummaryOf(record));
  Check(reader.status());
  for (size_t i = 0; i < (*reader)->header().tensors.size(); ++i) {
    Check((*reader)->ReadTensor(i, [&](int64_t offset, std::span<const std::byte> data) {
      std::memcpy(reinterpret_cast<std::byte*>(to.data()) + offset, data.data(), data.size());
    }));
  }
}

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int Main(int argc, char** argv) {
  const std::string directory =
      (argc > 1 ? std::filesystem::path(argv[1]) : std::filesystem::temp_directory_path()) /
      ("snapshot-bench-" + std::to_string(::getpid()));
  const int64_t tensors =
      std::max<int64_t>(2, (argc > 2 ? std::atoll(argv[2]) : 512) * (1 << 20) / kTensorBytes) & ~1;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 3;
  std::filesystem::create_directories(directory);
  auto storage = OpenPosixStorage(directory);
  Check(storage.status());
  SnapshotStore store = SnapshotStore::Create(**storage, kJob).value();
  Check(store.Prepare(kId));
  const std::string path =
      absl::StrCat(store.PathOf(kId), "/", StateFileName(scheduler::LaneId(0)));
  const std::string file = absl::StrCat(directory, "/", path);
  const std::vector<float> state = MakeState(tensors);
  std::vector<float> to(kRows * kCols);
  const double gigabytes = static_cast<double>(tensors * kTensorBytes) / 1e9;

  std::printf("# %s, %.2f GB, GB/s\n", directory.c_str(), gigabytes);
  std::printf("%6s %12s %12s %8s %12s %12s %8s\n", "round", "plain write", "snapshot", "ratio",
              "plain read", "snapshot", "ratio");
  for (int round = 0; round < rounds; ++round) {
    const std::string plain = directory + "/plain";
    const double plain_write = Seconds([&] { WritePlain(plain, state); });
    v1::SnapshotFile record;
    const double snapshot_write =
        Seconds([&] { record = WriteSnapshot(**storage, state, tensors); });
    Forget(plain);
    Forget(file);
    const double plain_read = Seconds([&] { ReadPlain(plain); });
    const double snapshot_read = Seconds([&] { ReadSnapshot(**storage, path, record, to); });
    std::printf("%6d %12.2f %12.2f %8.2f %12.2f %12.2f %8.2f\n", round, gigabytes / plain_write,
                gigabytes / snapshot_write, plain_write / snapshot_write, gigabytes / plain_read,
                gigabytes / snapshot_read, plain_read / snapshot_read);
    std::filesystem::remove(plain);
    std::filesystem::remove(file);
  }
  std::filesystem::remove_all(directory);
  return 0;
}

}  // namespace
}  // namespace dmuond::server::storage

int main(int argc, char** argv) { return dmuond::server::storage::Main(argc, argv); }
