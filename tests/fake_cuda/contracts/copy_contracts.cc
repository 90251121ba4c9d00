// Copies: what they wait for, and what computes them.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/fake_cuda/contracts/contract.h"

namespace dmuond::contracts {
namespace {

constexpr size_t kBytes = 8 * kMiB;

// Whether the call returns while its stream stands; what it enqueued is complete afterwards.
template <typename Call>
bool ReturnsAtOnce(CUstream stream, Call call) {
  Gate gate;
  gate.Close(stream);
  gate.OpenAfter(300);
  call();
  const bool at_once = !gate.open();
  MUST(cuStreamSynchronize, stream);
  return at_once;
}

CONTRACT(copies_to_pinned_memory_do_not_wait,
         "copies between device and pinned memory are enqueued without waiting for the stream") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  uint64_t* host = Pinned(kBytes);
  CUstream stream = MakeStream();
  const bool out =
      ReturnsAtOnce(stream, [&] { MUST(cuMemcpyAsync, At(host), memory, kBytes, stream); });
  const bool in =
      ReturnsAtOnce(stream, [&] { MUST(cuMemcpyAsync, memory, At(host), kBytes, stream); });
  return out && in ? Holds() : Fails(Text("to the host %d, to the device %d", out, in));
}

CONTRACT(copies_to_pageable_memory_wait,
         "a copy from the device to pageable memory returns when it is complete") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  Set(memory, kBytes, 51);
  std::vector<uint32_t> host(kBytes / 4);
  CUstream stream = MakeStream();
  Gate gate;
  gate.Close(stream);
  gate.OpenAfter(300);
  MUST(cuMemcpyAsync, At(host.data()), memory, kBytes, stream);
  const bool waited = gate.open();
  const bool complete = host.back() == 51;
  MUST(cuStreamSynchronize, stream);
  return waited && complete ? Holds() : Fails(Text("waited %d, complete %d", waited, complete));
}

CONTRACT(
    pageable_sources_may_change,
    "after a copy from pageable memory to the device has returned, its source may be changed") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  std::string seen;
  for (const size_t bytes : {size_t{4096}, size_t{32768}, size_t{65536}, size_t{131072}, kBytes}) {
    std::vector<uint32_t> host(bytes / 4, 52);
    CUstream stream = MakeStream();
    Gate gate;
    gate.Close(stream);
    gate.OpenAfter(200);
    MUST(cuMemcpyAsync, memory, At(host.data()), bytes, stream);
    const bool waited = gate.open();
    std::fill(host.begin(), host.end(), 0);
    MUST(cuStreamSynchronize, stream);
    std::string word;
    if (!All(memory, bytes, 52, &word)) return Fails(Text("%zu bytes: %s", bytes, word.c_str()));
    seen += Text("%s%zu KiB %s", seen.empty() ? "" : ", ", bytes / 1024,
                 waited ? "waits" : "does not wait");
  }
  return Holds(seen);
}

CUDA_MEMCPY2D Rows(CUdeviceptr to, size_t to_pitch, CUdeviceptr from, size_t from_pitch,
                   size_t width, size_t height) {
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = from;
  copy.srcPitch = from_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.dstDevice = to;
  copy.dstPitch = to_pitch;
  copy.WidthInBytes = width;
  copy.Height = height;
  return copy;
}

CONTRACT(rows_of_any_pitch_are_copied,
         "rows of any width and pitch are copied within the device and from and to pinned memory") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  const CUdeviceptr other = Map(Make(kBytes), kBytes);
  uint64_t* pinned = Pinned(kBytes);
  auto* bytes = reinterpret_cast<uint8_t*>(pinned);
  CUstream stream = MakeStream();
  const struct {
    size_t width, from, to, height;
  } shapes[] = {
      {2, 6, 10, 1000}, {1026, 3002, 1026, 900}, {4096, 4098, 8192, 500}, {14, 1048578, 14, 7}};
  for (const auto& shape : shapes) {
    for (size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<uint8_t>(i * 2654435761U >> 13);
    std::vector<uint8_t> expected(kBytes, 0);
    for (size_t row = 0; row < shape.height; ++row) {
      std::memcpy(&expected[row * shape.to + 2], bytes + row * shape.from + 2, shape.width);
    }
    MUST(cuMemcpyAsync, memory, At(pinned), kBytes, stream);
    MUST(cuMemsetD8Async, other, 0, kBytes, stream);
    CUDA_MEMCPY2D copy =
        Rows(other + 2, shape.to, memory + 2, shape.from, shape.width, shape.height);
    MUST(cuMemcpy2DAsync, &copy, stream);
    MUST(cuStreamSynchronize, stream);
    std::memset(pinned, 0, kBytes);
    copy = Rows(At(pinned) + 2, shape.to, other + 2, shape.to, shape.width, shape.height);
    MUST(cuMemcpy2DAsync, &copy, stream);
    MUST(cuStreamSynchronize, stream);
    if (std::memcmp(bytes, expected.data(), kBytes) != 0) {
      return Fails(Text("width %zu, pitches %zu and %zu", shape.width, shape.from, shape.to));
    }
  }
  return Holds();
}

CONTRACT(nothing_is_copied_as_well, "copies and fills of no bytes succeed") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  CUstream stream = MakeStream();
  MUST(cuMemcpyAsync, memory, memory + 4096, 0, stream);
  MUST(cuMemsetD32Async, memory, 1, 0, stream);
  MUST(cuStreamSynchronize, stream);
  return Holds();
}

CONTRACT(fills_must_be_aligned, "a fill of 4-byte values at an odd address is refused") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  const CUresult result = CU(cuMemsetD32Async)(memory + 2, 1, 16, MakeStream());
  return result != CUDA_SUCCESS ? Holds(Name(result)) : Fails("it is taken");
}

CONTRACT(copies_beyond_the_end_are_refused, "a copy that runs over a mapping's end is refused") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  uint64_t* host = Pinned(kBytes);
  CUstream stream = MakeStream();
  CUresult result = CU(cuMemcpyAsync)(memory + kBytes - 4096, At(host), 8192, stream);
  const std::string at_call = Name(result);
  if (result == CUDA_SUCCESS) result = CU(cuStreamSynchronize)(stream);
  const std::string seen = "call: " + at_call + ", then: " + Name(result);
  return result != CUDA_SUCCESS ? Holds(seen) : Fails(seen);
}

// Whether work is done while a kernel has every multiprocessor.
template <typename Enqueue>
bool ByEngine(Enqueue enqueue) {
  CUstream stream = MakeStream();
  CUevent event = MakeEvent();
  enqueue(stream);  // what the first call needs is there then
  MUST(cuStreamSynchronize, stream);
  bool done = false;
  {
    Spin spin;
    enqueue(stream);
    MUST(cuEventRecord, event, stream);
    done = Within(150, [&] { return CU(cuEventQuery)(event) == CUDA_SUCCESS; });
  }
  MUST(cuStreamSynchronize, stream);
  return done;
}

CONTRACT(host_copies_take_an_engine,
         "copies between device and pinned memory need no multiprocessor, rows neither") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  uint64_t* host = Pinned(kBytes);
  const auto copy = [&](CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return ByEngine([=](CUstream s) { MUST(cuMemcpyAsync, to, from, bytes, s); });
  };
  const auto rows = [&](CUdeviceptr to, CUdeviceptr from, size_t width) {
    return ByEngine([=](CUstream s) {
      const CUDA_MEMCPY2D parameters = Rows(to, 8192, from, 8192, width, 512);
      MUST(cuMemcpy2DAsync, &parameters, s);
    });
  };
  const bool out = copy(At(host), memory, kBytes) && copy(At(host), memory, 64);
  const bool in = copy(memory, At(host), kBytes) && copy(memory, At(host), 64);
  const bool rows_out = rows(At(host), memory, 4096) && rows(At(host), memory, 6);
  const bool rows_in = rows(memory, At(host), 4096) && rows(memory, At(host), 6);
  const std::string seen =
      Text("to the host %d, to the device %d, rows %d and %d", out, in, rows_out, rows_in);
  return out && in && rows_out && rows_in ? Holds(seen) : Fails(seen);
}

CONTRACT(own_copies_need_a_kernel,
         "copies within one device, rows and large fills included, need a multiprocessor") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  const CUdeviceptr other = Map(Make(kBytes), kBytes);
  const bool large = ByEngine([=](CUstream s) { MUST(cuMemcpyAsync, memory, other, kBytes, s); });
  const bool small = ByEngine([=](CUstream s) { MUST(cuMemcpyAsync, memory, other, 64, s); });
  const bool rows = ByEngine([=](CUstream s) {
    const CUDA_MEMCPY2D parameters = Rows(memory, 8192, other, 8192, 4096, 512);
    MUST(cuMemcpy2DAsync, &parameters, s);
  });
  const bool fill = ByEngine([=](CUstream s) { MUST(cuMemsetD32Async, memory, 1, kBytes / 4, s); });
  size_t largest = 0;  // of small fills, as a stream's words are written
  for (const size_t bytes : {size_t{4}, size_t{64}, size_t{1024}, size_t{65536}}) {
    if (!ByEngine([=](CUstream s) { MUST(cuMemsetD32Async, memory, 1, bytes / 4, s); })) break;
    largest = bytes;
  }
  const std::string seen = Text(
      "by engine: 8 MiB %d, 64 bytes %d, rows %d, fill of 8 MiB %d; fills without a kernel up to "
      "%zu bytes",
      large, small, rows, fill, largest);
  return !large && !small && !rows && !fill ? Holds(seen) : Fails(seen);
}

CONTRACT(copies_run_beside_other_processes,
         "while another process's kernel has the whole device, copies by engine are done; a kernel "
         "too where processes take turns, under MPS when there is room again") {
  Child other([](Channel& parent) {
    UseContext();
    const Spin spin;
    parent.Send("runs");
    parent.Receive();
  });
  other.channel().Receive();
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  uint64_t* host = Pinned(kBytes);
  CUstream stream = MakeStream();
  double start = NowMs();
  MUST(cuMemcpyAsync, At(host), memory, kBytes, stream);
  if (!Within(5000, [&] { return CU(cuStreamQuery)(stream) == CUDA_SUCCESS; })) {
    return Fails("the copy is not done");
  }
  const double copy_ms = NowMs() - start;
  start = NowMs();
  Store(stream, memory, 1);
  const bool stored = Within(5000, [&] { return CU(cuStreamQuery)(stream) == CUDA_SUCCESS; });
  const double store_ms = NowMs() - start;
  other.channel().Send("end");
  const bool shared = Attribute(CU_DEVICE_ATTRIBUTE_MPS_ENABLED) != 0;
  const std::string seen = Text("copy in %.1f ms, kernel %s %.1f ms, MPS %d", copy_ms,
                                stored ? "in" : "not within", store_ms, shared);
  return stored != shared ? Holds(seen) : Fails(seen);
}

CONTRACT(words_are_written_without_a_kernel,
         "words are written to host and device memory without a multiprocessor") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  uint64_t* host = Pinned(4096);
  const bool out = ByEngine([=](CUstream s) { MUST(cuStreamWriteValue64, s, At(host), 1, 0); });
  const bool in = ByEngine([=](CUstream s) { MUST(cuStreamWriteValue64, s, memory, 1, 0); });
  return out && in ? Holds() : Fails(Text("host %d, device %d", out, in));
}

CONTRACT(peer_copies_take_an_engine,
         "copies between two devices' memories, rows included, need no multiprocessor of either") {
  if (Devices() < 2) return Skipped("needs two devices");
  int can = 0;
  MUST(cuDeviceCanAccessPeer, &can, 0, 1);
  if (can == 0) return Skipped("device 0 cannot access device 1");
  UseContext();
  const CUdeviceptr ours = Map(Make(kBytes), kBytes);
  const CUdeviceptr theirs = Map(Make(kBytes, 1), kBytes, 0);
  const auto copy = [&](CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return ByEngine([=](CUstream s) { MUST(cuMemcpyAsync, to, from, bytes, s); });
  };
  const auto rows = [&](CUdeviceptr to, CUdeviceptr from, size_t width) {
    return ByEngine([=](CUstream s) {
      const CUDA_MEMCPY2D parameters = Rows(to, 8192, from, 8192, width, 512);
      MUST(cuMemcpy2DAsync, &parameters, s);
    });
  };
  const bool in = copy(ours, theirs, kBytes) && copy(ours, theirs, 64);
  const bool out = copy(theirs, ours, kBytes) && copy(theirs, ours, 64);
  const bool wide = rows(ours, theirs, 4096) && rows(theirs, ours, 4096);
  const bool narrow = rows(ours, theirs, 6) && rows(theirs, ours, 6);
  const std::string seen =
      Text("by engine: in %d, out %d, rows of 4096 bytes %d, of 6 %d", in, out, wide, narrow);
  return in && out && wide && narrow ? Holds(seen) : Fails(seen);
}

}  // namespace
}  // namespace dmuond::contracts
