// What streams do: copies, fills, words and kernels.
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "tests/fake_cuda/driver/state.h"

using namespace dmuond::fake_cuda;  // NOLINT: the driver's interface is global

namespace {

struct Rows {
  uintptr_t address;
  size_t pitch;
  [[nodiscard]] size_t Bytes(size_t width, size_t height) const {
    return (height - 1) * pitch + width;
  }
};

void MoveRows(std::byte* to, size_t to_pitch, const std::byte* from, size_t from_pitch,
              size_t width, size_t height) {
  for (size_t row = 0; row < height; ++row) {
    std::memmove(to + row * to_pitch, from + row * from_pitch, width);
  }
}

// Rows of `width` bytes, one for a plain copy. `peer`: either side may be another device's.
CUresult AddCopy(CUstream stream, const char* name, const Rows& to, const Rows& from, size_t width,
                 size_t height, bool peer = false) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  if (width == 0 || height == 0) return CUDA_SUCCESS;
  const Context& context = *found->context();
  Work work;
  work.name = name;
  work.bytes = width * height;
  bool to_pageable = false;
  bool from_pageable = false;
  {
    std::lock_guard lock(All().mutex);
    for (const Rows* side : {&to, &from}) {
      const size_t bytes = side->Bytes(width, height);
      if (!peer && !Accessible(side->address, bytes, context, Use::kCopy)) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      work.ranges.push_back({side->address, bytes});
    }
    const int to_device = OwnerOf(to.address);
    const int from_device = OwnerOf(from.address);
    work.kind = to_device >= 0 && to_device == from_device ? WorkKind::kKernel : WorkKind::kEngine;
    to_pageable = to_device < 0 && !IsPinned(to.address, to.Bytes(width, height));
    from_pageable = from_device < 0 && !IsPinned(from.address, from.Bytes(width, height));
  }
  std::byte* const target = Alias(to.address);
  const std::byte* const source = Alias(from.address);
  if (from_pageable) {
    // The source may change when the call has returned.
    std::vector<std::byte> kept(width * height);
    MoveRows(kept.data(), width, source, from.pitch, width, height);
    work.run = [=, kept = std::move(kept)] {
      MoveRows(target, to.pitch, kept.data(), width, width, height);
      return CUDA_SUCCESS;
    };
  } else {
    work.run = [=] {
      MoveRows(target, to.pitch, source, from.pitch, width, height);
      return CUDA_SUCCESS;
    };
  }
  if (!to_pageable) {
    found->Add(std::move(work));
    return CUDA_SUCCESS;
  }
  LogCall("a copy to pageable memory");
  auto point = std::make_shared<Point>();
  work.point = point;
  found->Add(std::move(work));
  point->Wait();
  return found->context()->error;
}

CUresult AddFill(CUstream stream, const char* name, CUdeviceptr address, size_t element,
                 uint32_t value, size_t count) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  if (count == 0) return CUDA_SUCCESS;
  if (address % element != 0) return CUDA_ERROR_INVALID_VALUE;
  {
    std::lock_guard lock(All().mutex);
    if (!Accessible(address, count * element, *found->context(), Use::kKernel)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  Work work;
  work.kind = WorkKind::kKernel;
  work.name = name;
  work.bytes = count * element;
  work.ranges.push_back({address, count * element});
  work.run = [=, to = Alias(address)] {
    if (element == 4) {
      std::fill_n(reinterpret_cast<uint32_t*>(to), count, value);
    } else if (element == 2) {
      std::fill_n(reinterpret_cast<uint16_t*>(to), count, static_cast<uint16_t>(value));
    } else {
      std::memset(to, static_cast<int>(value), count);
    }
    return CUDA_SUCCESS;
  };
  found->Add(std::move(work));
  return CUDA_SUCCESS;
}

// The worker's address of a 64-bit word.
CUresult FindWord(const Stream& stream, CUdeviceptr address, uint64_t** word) {
  if (address % 8 != 0) return CUDA_ERROR_INVALID_VALUE;
  {
    std::lock_guard lock(All().mutex);
    if (!Accessible(address, 8, *stream.context(), Use::kKernel)) return CUDA_ERROR_INVALID_VALUE;
  }
  *word = reinterpret_cast<uint64_t*>(Alias(address));
  return CUDA_SUCCESS;
}

bool Satisfied(uint64_t word, uint64_t value, unsigned flags) {
  switch (flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
      return static_cast<int64_t>(word - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return word == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (word & value) != 0;
    default:
      return ~(word | value) != 0;
  }
}

// ---- Kernels that are found by name ----

// A launch of one. `ranges`: what is known of it when it is enqueued.
struct Prepared {
  std::vector<Range> ranges;
  std::function<CUresult(const Context&)> run;
};
// Returns a parameter of a launch.
template <typename T>
T Parameter(void** parameters, int i) {
  return *static_cast<const T*>(parameters[i]);
}

// Those of ../contract_kernels.h.
Prepared Spin(void** parameters, size_t blocks) {
  const auto stop = Parameter<uintptr_t>(parameters, 0);
  const auto started = Parameter<uintptr_t>(parameters, 1);
  return {{{stop, 8}, {started, blocks * 8}}, [=](const Context&) {
            auto* words = reinterpret_cast<uint64_t*>(Alias(started));
            for (size_t i = 0; i < blocks; ++i) __atomic_store_n(words + i, 1, __ATOMIC_RELEASE);
            const auto* word = reinterpret_cast<const uint64_t*>(Alias(stop));
            while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0) ::usleep(50);
            return CUDA_SUCCESS;
          }};
}
Prepared StoreWord(void** parameters, size_t) {
  const auto to = Parameter<uintptr_t>(parameters, 0);
  const auto value = Parameter<uint64_t>(parameters, 1);
  return {{{to, 8}}, [=](const Context&) {
            __atomic_store_n(reinterpret_cast<uint64_t*>(Alias(to)), value, __ATOMIC_RELEASE);
            return CUDA_SUCCESS;
          }};
}

// client/python/kernels/same_bytes.cu. What it compares is known when it begins.
struct Pair {
  uintptr_t a;
  uintptr_t b;
  size_t bytes;
  uint64_t first_chunk;
};
CUresult CompareAll(const Context& context, const Pair* pairs, size_t count, uint64_t chunks,
                    uint64_t round, uint64_t* different) {
  constexpr size_t kChunkBytes = 16384;
  uint64_t before = 0;
  for (size_t i = 0; i < count; ++i) {
    const Pair& pair = pairs[i];
    if (pair.first_chunk != before) {
      Abort("pair %zu begins at chunk %" PRIu64 ", after %" PRIu64, i, pair.first_chunk, before);
    }
    before += (pair.bytes + kChunkBytes - 1) / kChunkBytes;
    if (pair.bytes == 0) continue;
    {
      std::lock_guard lock(All().mutex);
      if (!Accessible(pair.a, pair.bytes, context, Use::kKernel) ||
          !Accessible(pair.b, pair.bytes, context, Use::kKernel)) {
        return CUDA_ERROR_ILLEGAL_ADDRESS;
      }
    }
    if (std::memcmp(Alias(pair.a), Alias(pair.b), pair.bytes) != 0) different[i] = round;
  }
  if (chunks != before) {
    Abort("%" PRIu64 " chunks are compared, and the pairs have %" PRIu64, chunks, before);
  }
  return CUDA_SUCCESS;
}
Prepared SameBytes(void** parameters, size_t) {
  const auto pairs = Parameter<uintptr_t>(parameters, 0);
  const auto different = Parameter<uintptr_t>(parameters, 1);
  const auto chunks = Parameter<uint64_t>(parameters, 2);
  const auto round = Parameter<uint64_t>(parameters, 3);
  const auto count = Parameter<uint32_t>(parameters, 4);
  if (pairs % alignof(Pair) != 0 || different % 8 != 0) {
    Abort("dmuond_same_bytes gets the addresses %#zx and %#zx, of which one is not aligned", pairs,
          different);
  }
  return {{{pairs, count * sizeof(Pair)}, {different, count * sizeof(uint64_t)}},
          [=](const Context& context) {
            return CompareAll(context, reinterpret_cast<const Pair*>(Alias(pairs)), count, chunks,
                              round, reinterpret_cast<uint64_t*>(Alias(different)));
          }};
}

struct KnownKernel {
  const char* name;
  Prepared (*prepare)(void** parameters, size_t blocks);
};
const KnownKernel kKernels[] = {
    {"contract_spin", Spin}, {"contract_store", StoreWord}, {"dmuond_same_bytes", SameBytes}};

// Whether this kernel is the one that fails.
bool Fails() {
  State& all = All();
  const int64_t number = ++all.kernels;
  const bool told = dmuond::fault::FaultPoint("cuda.kernel") != 0;
  return told || number == all.settings.fault_kernel;
}

void AddKernel(Stream& stream, std::string name, std::vector<Range> ranges,
               std::function<CUresult()> run, WorkKind kind = WorkKind::kKernel) {
  Work work;
  work.kind = kind;
  work.name = std::move(name);
  for (const Range& range : ranges) work.bytes += range.bytes;
  work.ranges = std::move(ranges);
  work.run = [context = stream.context(), checked = work.ranges, run = std::move(run)] {
    if (Fails()) return CUDA_ERROR_ILLEGAL_ADDRESS;
    {
      std::lock_guard lock(All().mutex);
      for (const Range& range : checked) {
        if (!Accessible(range.begin, range.bytes, *context, Use::kKernel)) {
          return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
      }
    }
    return run();
  };
  stream.Add(std::move(work));
}

CUresult Launch(CUstream stream, const char* name, const FakeCudaRange* ranges, size_t count,
                void (*run)(void* argument), void* argument, WorkKind kind) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  std::vector<Range> used;
  for (size_t i = 0; i < count; ++i) {
    const auto begin = reinterpret_cast<uintptr_t>(ranges[i].address);
    if (begin == 0 || ranges[i].bytes == 0) continue;
    if (begin % ranges[i].alignment != 0) {
      Abort("%s gets the address %#zx, which is no multiple of %zu", name, begin,
            ranges[i].alignment);
    }
    used.push_back({begin, ranges[i].bytes});
  }
  AddKernel(
      *found, name, std::move(used),
      [run, argument] {
        run(argument);
        return CUDA_SUCCESS;
      },
      kind);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return AddCopy(stream, "cuMemcpyAsync", {to, bytes}, {from, bytes}, bytes, 1);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return cuMemcpyAsync(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream);
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes,
                           CUstream stream) {
  return AddCopy(stream, "cuMemcpyPeerAsync", {to, bytes}, {from, bytes}, bytes, 1, /*peer=*/true);
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  if (copy->srcMemoryType != CU_MEMORYTYPE_UNIFIED ||
      copy->dstMemoryType != CU_MEMORYTYPE_UNIFIED || copy->srcPitch < copy->WidthInBytes ||
      copy->dstPitch < copy->WidthInBytes || copy->srcPitch > INT32_MAX ||
      copy->dstPitch > INT32_MAX) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return AddCopy(stream, "cuMemcpy2DAsync", {copy->dstDevice, copy->dstPitch},
                 {copy->srcDevice, copy->srcPitch}, copy->WidthInBytes, copy->Height);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return AddFill(stream, "cuMemsetD8Async", to, 1, value, count);
}

CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return AddFill(stream, "cuMemsetD16Async", to, 2, value, count);
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  return AddFill(stream, "cuMemsetD32Async", to, 4, value, count);
}

CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  uint64_t* word = nullptr;
  if (const CUresult result = FindWord(*found, address, &word); result != CUDA_SUCCESS) {
    return result;
  }
  Work work;
  work.kind = WorkKind::kWord;
  work.name = "cuStreamWriteValue64";
  work.bytes = 8;
  work.ranges.push_back({address, 8});
  work.run = [word, value] {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
  };
  found->Add(std::move(work));
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                             unsigned flags) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  uint64_t* word = nullptr;
  if (const CUresult result = FindWord(*found, address, &word); result != CUDA_SUCCESS) {
    return result;
  }
  Work work;
  work.name = "cuStreamWaitValue64";
  work.ranges.push_back({address, 8});
  work.run = [=, context = found->context()] {
    while (!Satisfied(__atomic_load_n(word, __ATOMIC_ACQUIRE), value, flags)) {
      if (context->error != CUDA_SUCCESS) break;
      ::usleep(20);
    }
    return CUDA_SUCCESS;
  };
  found->Add(std::move(work));
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void*) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  *module = reinterpret_cast<CUmodule>(context);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  for (const KnownKernel& kernel : kKernels) {
    if (std::strcmp(kernel.name, name) != 0) continue;
    *function = reinterpret_cast<CUfunction>(const_cast<KnownKernel*>(&kernel));
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuLaunchKernel(CUfunction function, unsigned blocks, unsigned, unsigned, unsigned,
                        unsigned, unsigned, unsigned, CUstream stream, void** parameters, void**) {
  std::shared_ptr<Stream> found;
  if (const CUresult result = NeedStream(stream, &found); result != CUDA_SUCCESS) return result;
  const auto* kernel = reinterpret_cast<const KnownKernel*>(function);
  Prepared prepared = kernel->prepare(parameters, blocks);
  AddKernel(*found, kernel->name, std::move(prepared.ranges),
            [context = found->context(), run = std::move(prepared.run)] { return run(*context); });
  return CUDA_SUCCESS;
}

CUresult fakeCudaLaunch(CUstream stream, const char* name, const FakeCudaRange* ranges,
                        size_t count, void (*run)(void* argument), void* argument) {
  return Launch(stream, name, ranges, count, run, argument, WorkKind::kKernel);
}

CUresult fakeCudaLaunchBeside(CUstream stream, const char* name, const FakeCudaRange* ranges,
                              size_t count, void (*run)(void* argument), void* argument) {
  return Launch(stream, name, ranges, count, run, argument, WorkKind::kKernelBeside);
}

}  // extern "C"
