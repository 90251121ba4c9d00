// Streams, events, and words that streams write and wait for.
#include <sys/mman.h>
#include <unistd.h>

#include "tests/fake_cuda/contracts/contract.h"

namespace dmuond::contracts {
namespace {

constexpr size_t kBytes = 8 * kMiB;

CONTRACT(new_event_is_done, "an event that was never recorded counts as done") {
  UseContext();
  const CUresult result = CU(cuEventQuery)(MakeEvent());
  return result == CUDA_SUCCESS ? Holds() : Fails(Name(result));
}

CONTRACT(event_follows_its_work, "an event is done when all work before it is, and not earlier") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  uint64_t* host = Pinned(kBytes);
  CUstream stream = MakeStream();
  CUevent event = MakeEvent();
  for (int round = 1; round <= 20; ++round) {
    Gate gate;
    gate.Close(stream);
    MUST(cuMemsetD32Async, memory, round, kBytes / 4, stream);
    MUST(cuMemcpyDtoHAsync, host, memory, kBytes, stream);
    MUST(cuEventRecord, event, stream);
    if (CU(cuEventQuery)(event) != CUDA_ERROR_NOT_READY) return Fails("it is done before its work");
    gate.Open();
    if (!Within(5000, [&] { return CU(cuEventQuery)(event) == CUDA_SUCCESS; })) {
      return Fails("it is not done after its work");
    }
    const uint64_t expected = static_cast<uint64_t>(round) << 32 | round;
    if (host[kBytes / 8 - 1] != expected) return Fails("its work was not complete");
  }
  return Holds("20 rounds");
}

CONTRACT(events_order_streams, "a stream that waits for an event starts after it") {
  UseContext();
  uint64_t* host = Pinned(4096);
  CUstream first = MakeStream();
  CUstream second = MakeStream();
  CUevent event = MakeEvent();
  Gate gate;
  gate.Close(first);
  MUST(cuEventRecord, event, first);
  MUST(cuStreamWaitEvent, second, event, 0);
  MUST(cuStreamWriteValue64, second, At(host), 1, 0);
  ::usleep(20000);
  if (__atomic_load_n(host, __ATOMIC_ACQUIRE) != 0) return Fails("it did not wait");
  gate.Open();
  MUST(cuStreamSynchronize, second);
  return *host == 1 ? Holds() : Fails("it did not go on");
}

CONTRACT(wait_means_the_last_record,
         "a wait stands for the record before it, whatever is recorded afterwards") {
  UseContext();
  uint64_t* host = Pinned(4096);
  CUstream first = MakeStream();
  CUstream second = MakeStream();
  CUevent event = MakeEvent();
  MUST(cuEventRecord, event, first);
  MUST(cuStreamWaitEvent, second, event, 0);
  Gate gate;
  gate.Close(first);
  MUST(cuEventRecord, event, first);
  MUST(cuStreamWriteValue64, second, At(host), 1, 0);
  const bool passed = Within(2000, [&] { return __atomic_load_n(host, __ATOMIC_ACQUIRE) == 1; });
  return passed ? Holds() : Fails("it waits for the later record");
}

CONTRACT(events_can_be_destroyed_early,
         "an event may be destroyed while a stream waits for it, a stream while it has work") {
  UseContext();
  uint64_t* host = Pinned(4096);
  CUstream first = MakeStream();
  CUstream second = MakeStream();
  CUevent event = MakeEvent();
  Gate gate;
  gate.Close(first);
  MUST(cuEventRecord, event, first);
  MUST(cuStreamWaitEvent, second, event, 0);
  MUST(cuStreamWriteValue64, second, At(host), 1, 0);
  gate.OpenAfter(100);
  const double start = NowMs();
  MUST(cuEventDestroy, event);
  MUST(cuStreamDestroy, second);
  const double took = NowMs() - start;
  const bool waited = gate.open();
  if (!Within(5000, [&] { return __atomic_load_n(host, __ATOMIC_ACQUIRE) == 1; })) {
    return Fails("the stream's work is not done");
  }
  return Holds(Text("destroying %s, %.1f ms", waited ? "waits" : "does not wait", took));
}

CONTRACT(events_measure_time, "two events with timing are as far apart as their work takes") {
  UseContext();
  CUstream stream = MakeStream();
  CUevent begin = MakeEvent(CU_EVENT_DEFAULT);
  CUevent end = MakeEvent(CU_EVENT_DEFAULT);
  Gate gate;
  MUST(cuEventRecord, begin, stream);
  gate.Close(stream);
  MUST(cuEventRecord, end, stream);
  gate.OpenAfter(50);
  MUST(cuEventSynchronize, end);
  float ms = 0;
  MUST(cuEventElapsedTime, &ms, begin, end);
  const CUresult without = CU(cuEventElapsedTime)(&ms, MakeEvent(), end);
  const std::string seen = Text("%.1f ms of 50; without timing: %s", ms, Name(without).c_str());
  return without == CUDA_ERROR_INVALID_HANDLE ? Holds(seen) : Fails(seen);
}

CONTRACT(streams_are_apart_from_the_default_one,
         "a non-blocking stream runs while the default stream stands") {
  UseContext();
  uint64_t* host = Pinned(4096);
  Gate gate;
  gate.Close(nullptr);
  CUstream stream = MakeStream();
  MUST(cuStreamWriteValue64, stream, At(host), 1, 0);
  const bool passed = Within(2000, [&] { return __atomic_load_n(host, __ATOMIC_ACQUIRE) == 1; });
  return passed ? Holds() : Fails("it waits for the default stream");
}

CONTRACT(events_stay_with_their_device, "a stream refuses to record another device's event") {
  if (Devices() < 2) return Skipped("needs two devices");
  UseContext(1);
  CUevent event = MakeEvent();
  UseContext(0);
  const CUresult result = CU(cuEventRecord)(event, MakeStream());
  return result != CUDA_SUCCESS ? Holds(Name(result)) : Fails("it does");
}

// A page that two processes map, as a timeline is.
struct Page {
  Page() {
    fd = ::memfd_create("timeline", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, 4096) != 0) throw Broken{"memfd_create"};
    words =
        static_cast<uint64_t*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    if (words == MAP_FAILED) throw Broken{"mmap"};
  }
  // For streams.
  CUdeviceptr Register() const {
    MUST(cuMemHostRegister, words, 4096,
         CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    CUdeviceptr address = 0;
    MUST(cuMemHostGetDevicePointer, &address, words, 0);
    return address;
  }
  int fd = -1;
  uint64_t* words = nullptr;
};

CONTRACT(registered_pages_have_one_address,
         "a shared page that is registered has the same address on the device") {
  UseContext();
  const Page page;
  const CUdeviceptr address = page.Register();
  if (address != At(page.words)) return Fails("it has another");
  MUST(cuMemHostUnregister, page.words);
  return Holds();
}

CONTRACT(written_words_reach_other_processes,
         "a word that a stream writes into a shared page is seen by another process's CPU, after "
         "what was copied before it") {
  Page page;
  uint64_t* data = static_cast<uint64_t*>(
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  Child reader([&](Channel& parent) {
    for (uint64_t round = 1; round <= 50; ++round) {
      if (!Within(5000, [&] { return __atomic_load_n(page.words, __ATOMIC_ACQUIRE) == round; })) {
        throw Broken{Text("word of round %d is not seen", static_cast<int>(round))};
      }
      const uint64_t last = data[kBytes / 8 - 1];
      if (last != (round << 32 | round)) throw Broken{"the word is seen before the copy"};
      parent.Send("seen");
    }
  });
  UseContext();
  const CUdeviceptr word = page.Register();
  MUST(cuMemHostRegister, data, kBytes, CU_MEMHOSTREGISTER_PORTABLE);
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  CUstream stream = MakeStream();
  for (uint32_t round = 1; round <= 50; ++round) {
    MUST(cuMemsetD32Async, memory, round, kBytes / 4, stream);
    MUST(cuMemcpyDtoHAsync, data, memory, kBytes, stream);
    MUST(cuStreamWriteValue64, stream, word, round, 0);
    reader.channel().Receive();
  }
  return Holds("50 rounds");
}

CONTRACT(stored_words_reach_streams,
         "a stream that waits for a word of a shared page sees what another process stores") {
  Page page;
  Child writer([&](Channel& parent) {
    for (uint64_t round = 1; round <= 50; ++round) {
      parent.Receive();
      __atomic_store_n(page.words, round, __ATOMIC_RELEASE);
    }
    ::pause();
  });
  UseContext();
  const CUdeviceptr word = page.Register();
  CUstream stream = MakeStream();
  double longest = 0;
  for (uint64_t round = 1; round <= 50; ++round) {
    MUST(cuStreamWaitValue64, stream, word, round, CU_STREAM_WAIT_VALUE_GEQ);
    if (CU(cuStreamQuery)(stream) != CUDA_ERROR_NOT_READY) return Fails("it did not wait");
    const double start = NowMs();
    writer.channel().Send("now");
    if (!Within(5000, [&] { return CU(cuStreamQuery)(stream) == CUDA_SUCCESS; })) {
      return Fails("it is not seen");
    }
    longest = std::max(longest, NowMs() - start);
  }
  return Holds(Text("50 rounds, longest %.2f ms", longest));
}

CONTRACT(poison_ends_every_wait, "a wait for a word ends by a word that is larger, up to 2^62") {
  UseContext();
  const Page page;
  const CUdeviceptr word = page.Register();
  CUstream stream = MakeStream();
  const uint64_t attempt = (uint64_t{0x7FFF} << 32) + 5;
  MUST(cuStreamWaitValue64, stream, word, attempt, CU_STREAM_WAIT_VALUE_GEQ);
  __atomic_store_n(page.words, attempt - 1, __ATOMIC_RELEASE);
  ::usleep(20000);
  if (CU(cuStreamQuery)(stream) != CUDA_ERROR_NOT_READY) return Fails("it ends by a smaller one");
  __atomic_store_n(page.words, uint64_t{1} << 62, __ATOMIC_RELEASE);
  const bool ended = Within(5000, [&] { return CU(cuStreamQuery)(stream) == CUDA_SUCCESS; });
  return ended ? Holds() : Fails("it does not end");
}

CONTRACT(captures_are_told, "a stream says that it is being captured into a graph, and when not") {
  UseContext();
  CUstream stream = MakeStream();
  const auto told = [stream] {
    CUstreamCaptureStatus status{};
    MUST(cuStreamIsCapturing, stream, &status);
    return status;
  };
  if (told() != CU_STREAM_CAPTURE_STATUS_NONE) return Fails("it says so before");
  MUST(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
  if (told() != CU_STREAM_CAPTURE_STATUS_ACTIVE) return Fails("it does not say so");
  CUgraph graph = nullptr;
  MUST(cuStreamEndCapture, stream, &graph);
  MUST(cuGraphDestroy, graph);
  return told() == CU_STREAM_CAPTURE_STATUS_NONE ? Holds() : Fails("it says so afterwards");
}

CONTRACT(words_must_be_aligned, "a word whose address is no multiple of 8 is refused") {
  UseContext();
  const Page page;
  const CUdeviceptr word = page.Register();
  CUstream stream = MakeStream();
  const CUresult write = CU(cuStreamWriteValue64)(stream, word + 4, 1, 0);
  const CUresult wait = CU(cuStreamWaitValue64)(stream, word + 4, 0, CU_STREAM_WAIT_VALUE_GEQ);
  const std::string seen = Text("write: %s, wait: %s", Name(write).c_str(), Name(wait).c_str());
  return write != CUDA_SUCCESS && wait != CUDA_SUCCESS ? Holds(seen) : Fails(seen);
}

CONTRACT(words_in_device_memory, "streams write and wait for words in device memory too") {
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  CUstream first = MakeStream();
  CUstream second = MakeStream();
  MUST(cuStreamWaitValue64, second, memory, 3, CU_STREAM_WAIT_VALUE_GEQ);
  ::usleep(10000);
  if (CU(cuStreamQuery)(second) != CUDA_ERROR_NOT_READY) return Fails("it did not wait");
  MUST(cuStreamWriteValue64, first, memory, 3, 0);
  const bool ended = Within(5000, [&] { return CU(cuStreamQuery)(second) == CUDA_SUCCESS; });
  return ended ? Holds() : Fails("it does not end");
}

CONTRACT(unregistered_pages_are_refused,
         "a word of host memory that is not registered is refused") {
  UseContext();
  const Page page;
  const CUresult result = CU(cuStreamWriteValue64)(MakeStream(), At(page.words), 1, 0);
  return result != CUDA_SUCCESS ? Holds(Name(result)) : Fails("it is taken");
}

CONTRACT(waiting_processes_end_at_once,
         "a process whose stream waits for a word ends by _exit, and by SIGKILL") {
  const auto wait = [](Channel& parent, bool exits) {
    UseContext();
    Gate gate;
    gate.Close(MakeStream());
    parent.Send("waits");
    if (exits) ::_exit(0);
    ::pause();
  };
  Child exits([&](Channel& parent) { wait(parent, true); });
  Child killed([&](Channel& parent) { wait(parent, false); });
  exits.channel().Receive();
  double start = NowMs();
  exits.Wait();
  const double exit_ms = NowMs() - start;
  killed.channel().Receive();
  start = NowMs();
  killed.Kill();
  return Holds(Text("_exit %.0f ms, SIGKILL %.0f ms", exit_ms, NowMs() - start));
}

// Milliseconds from a kernel's call until it is done, of many with a gap after each.
double KernelMs(CUstream stream, CUdeviceptr memory) {
  constexpr int kKernels = 50;
  const double start = NowMs();
  for (int i = 1; i <= kKernels; ++i) {
    Store(stream, memory, i);
    MUST(cuStreamSynchronize, stream);
  }
  return (NowMs() - start) / kKernels;
}

// What another process does: something holds up its streams, from "begin" until "go on".
void BeHeldUp(Channel& parent, const std::function<void(CUdeviceptr word)>& enqueue) {
  parent.Receive();
  UseContext();
  uint64_t* const word = Pinned(4096);
  enqueue(At(word));
  parent.Send("is held up");
  parent.Receive();
  std::atomic_ref(*word).store(1);
  MUST(cuCtxSynchronize);
  parent.Send("has gone on");
}

CUstream HeldUpBy(CUdeviceptr word) {
  CUstream stream = MakeStream();
  MUST(cuStreamWaitValue64, stream, word, 1, CU_STREAM_WAIT_VALUE_GEQ);
  return stream;
}

CONTRACT(streams_that_words_hold_up_take_no_turns,
         "a process whose streams words hold up slows no other process's kernels") {
  Child words([](Channel& parent) {
    BeHeldUp(parent, [](CUdeviceptr word) {
      HeldUpBy(word);
      HeldUpBy(word);
    });
  });
  Child event([](Channel& parent) {
    BeHeldUp(parent, [](CUdeviceptr word) {
      CUevent reached = nullptr;
      MUST(cuEventCreate, &reached, CU_EVENT_DISABLE_TIMING);
      MUST(cuEventRecord, reached, HeldUpBy(word));
      MUST(cuStreamWaitEvent, MakeStream(), reached, 0);
    });
  });
  UseContext();
  const CUdeviceptr memory = Map(Make(2 * kMiB), 2 * kMiB);
  CUstream stream = MakeStream();
  const auto beside = [&](Child& other) {
    other.channel().Send("begin");
    other.channel().Receive();
    const double ms = KernelMs(stream, memory);
    other.channel().Send("go on");
    other.channel().Receive();
    return ms;
  };
  KernelMs(stream, memory);
  const double alone_ms = KernelMs(stream, memory);
  const double words_ms = beside(words);
  const std::string seen =
      Text("a kernel in %.3f ms, beside words in %.3f, beside an event in %.3f", alone_ms, words_ms,
           beside(event));
  return words_ms < 3 * alone_ms + 0.3 ? Holds(seen) : Fails(seen);
}

}  // namespace
}  // namespace dmuond::contracts
