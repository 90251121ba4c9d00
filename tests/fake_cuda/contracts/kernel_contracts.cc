// The kernel that the Python client carries as a text: the driver compiles it, and it does as
// client/python/kernels/same_bytes.cu says.
#include <cstdint>
#include <vector>

#include "same_bytes_ptx.h"
#include "tests/fake_cuda/contracts/contract.h"

namespace dmuond::contracts {
namespace {

constexpr unsigned kThreads = 256;
constexpr uint64_t kChunkBytes = 16384;
constexpr uint32_t kFilling = 0x5A5A5A5A;

struct Pair {
  CUdeviceptr a;
  CUdeviceptr b;
  uint64_t bytes;
  uint64_t first_chunk;
};

// Pairs of one comparison. They stay in pinned memory, and the kernel gets a copy of them.
class Comparison {
 public:
  Comparison() {
    MUST(cuModuleLoadData, &module_, kSameBytesPtx);
    MUST(cuModuleGetFunction, &kernel_, module_, "dmuond_same_bytes");
  }
  void Add(CUdeviceptr a, CUdeviceptr b, uint64_t bytes) {
    if (count_ == kPairs) throw Broken{"too many pairs"};
    pairs_[count_++] = {a, b, bytes, chunks_};
    chunks_ += (bytes + kChunkBytes - 1) / kChunkBytes;
  }
  void Launch(CUstream stream, unsigned blocks) {
    MUST(cuMemcpyAsync, table_, At(pairs_), kPairs * sizeof(Pair), stream);
    ++round_;
    CUdeviceptr different = At(different_);
    void* parameters[] = {&table_, &different, &chunks_, &round_, &count_};
    MUST(cuLaunchKernel, kernel_, blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr);
  }
  // Of the last launch, which is complete.
  [[nodiscard]] std::vector<uint32_t> Differing() const {
    std::vector<uint32_t> found;
    for (uint32_t i = 0; i < count_; ++i) {
      if (different_[i] == round_) found.push_back(i);
    }
    return found;
  }

 private:
  static constexpr uint32_t kPairs = 1024;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  CUdeviceptr table_ = Map(Make(2 * kMiB), 2 * kMiB);
  Pair* pairs_ = reinterpret_cast<Pair*>(Pinned(kPairs * sizeof(Pair)));
  uint64_t* different_ = Pinned(kPairs * sizeof(uint64_t));
  uint64_t chunks_ = 0;
  uint64_t round_ = 0;
  uint32_t count_ = 0;
};

CONTRACT(same_bytes_are_told_from_others,
         "the Python client's kernel says which ranges differ, by any byte and at any alignment") {
  UseContext();
  constexpr size_t kBytes = 64 * kMiB;
  const CUdeviceptr a = Map(Make(kBytes), kBytes);
  const CUdeviceptr b = Map(Make(kBytes), kBytes);
  Set(a, kBytes, kFilling);
  Set(b, kBytes, kFilling);
  CUstream stream = MakeStream();
  Comparison comparison;
  std::vector<uint32_t> expected;
  uint32_t index = 0;
  CUdeviceptr at = 0;
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{15}, uint64_t{33}, kChunkBytes,
                               kChunkBytes + 1, 5 * kChunkBytes - 3}) {
    for (const uint64_t shift : {0, 1, 2, 4, 8, 15}) {
      // Nothing differs, the first byte does, the last one; and always the bytes on both sides.
      for (int which = 0; which < 3; ++which, ++index) {
        at += 16;
        comparison.Add(a + at, b + at + shift, bytes);
        MUST(cuMemsetD8Async, b + at + shift - 1, 1, 1, stream);
        MUST(cuMemsetD8Async, b + at + shift + bytes, 1, 1, stream);
        if (which > 0 && bytes > 0) {
          const uint64_t other = which == 1 ? 0 : bytes - 1;
          MUST(cuMemsetD8Async, b + at + shift + other, 2, 1, stream);
          expected.push_back(index);
        }
        at += (bytes + 63) / 16 * 16;
      }
    }
  }
  for (const unsigned blocks : {1U, 7U, 132U, 528U, 5000U}) {
    comparison.Launch(stream, blocks);
    MUST(cuStreamSynchronize, stream);
    if (comparison.Differing() != expected) {
      return Fails(Text("%zu pairs of %u differ, by %u blocks, and not %zu",
                        comparison.Differing().size(), index, blocks, expected.size()));
    }
  }
  return Holds(Text("%zu pairs of %u", expected.size(), index));
}

// How many GB/s ten times `enqueue` read and write, which has so many bytes to.
template <typename Enqueue>
double Speed(CUstream stream, size_t bytes, Enqueue enqueue) {
  constexpr int kRounds = 10;
  CUevent begin = MakeEvent(CU_EVENT_DEFAULT);
  CUevent end = MakeEvent(CU_EVENT_DEFAULT);
  enqueue();
  MUST(cuEventRecord, begin, stream);
  for (int round = 0; round < kRounds; ++round) enqueue();
  MUST(cuEventRecord, end, stream);
  MUST(cuEventSynchronize, end);
  float ms = 0;
  MUST(cuEventElapsedTime, &ms, begin, end);
  return kRounds * static_cast<double>(bytes) / ms * 1e-6;
}

CONTRACT(same_bytes_are_found_fast,
         "the Python client's kernel compares aligned ranges, one or a thousand, at two thirds of "
         "a copy's speed or faster") {
  if (IsFake()) return Skipped("nothing is fast there");
  UseContext();
  constexpr size_t kBytes = 1024 * kMiB;
  const CUdeviceptr a = Map(Make(kBytes), kBytes);
  const CUdeviceptr b = Map(Make(kBytes), kBytes);
  Set(a, kBytes, kFilling);
  CUstream stream = MakeStream();
  const auto blocks =
      static_cast<unsigned>(4 * Attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  const double copy = Speed(stream, 2 * kBytes, [&] { MUST(cuMemcpyAsync, b, a, kBytes, stream); });
  std::string seen = Text("a copy: %.0f GB/s", copy);
  bool fast = true;
  // `shift`: so many bytes later one side begins.
  const auto measure = [&](uint64_t pairs, uint64_t shift) {
    const uint64_t bytes = kBytes / pairs / 16 * 16;
    Comparison comparison;
    for (uint64_t i = 0; i < pairs; ++i) {
      comparison.Add(a + i * bytes, b + i * bytes + shift, bytes - shift);
    }
    const double speed =
        Speed(stream, 2 * pairs * (bytes - shift), [&] { comparison.Launch(stream, blocks); });
    if (!comparison.Differing().empty()) throw Broken{"equal bytes differ"};
    seen += Text("; %d pairs, shifted by %d: %.0f", static_cast<int>(pairs),
                 static_cast<int>(shift), speed);
    if (shift == 0) fast = fast && speed >= copy * 2 / 3;
  };
  measure(1, 0);
  measure(1000, 0);
  for (const uint64_t shift : {4, 2, 1}) measure(1, shift);
  return fast ? Holds(seen) : Fails(seen);
}

}  // namespace
}  // namespace dmuond::contracts
