// What the fake driver has beyond the real one's interface, for the doubles of kernels and for
// tests. libcuda.so.1 of this folder behaves as the statements in ../contracts say, with host
// memory for device memory and threads for streams, and ends the process, with a reason, where the
// product does what it must never do:
//
//   * memory is unmapped, freed or unregistered that queued work uses;
//   * work goes to a stream of another device than the current context's;
//   * a kernel gets an address that is not aligned as it needs;
//   * a program that may have no context (FAKE_CUDA_NO_CONTEXT) asks for one.
//
// The address of device memory is mapped for nobody: a host that reads or writes it gets SIGSEGV.
//
// Fault points (base/fault_point.h), at which a test can stop the process, too: cuda.create
// (fails: out of memory), cuda.map (the same) and cuda.kernel (fails: illegal access).
//
// Environment, read by cuInit():
//   FAKE_CUDA_DEVICES       how many devices; 1
//   FAKE_CUDA_MEMORY_MIB    memory of each; 4096. Counted is what this process has made and what is
//                           held, by whomever
//   FAKE_CUDA_NAME          their name; "Fake GPU"
//   FAKE_CUDA_VERSION       of the CUDA that it speaks, as cuDriverGetVersion() says it; the
//                           headers'
//   FAKE_CUDA_MACHINE       a number that all uuids have in them: machines with different ones have
//                           no device in common; 0
//   FAKE_CUDA_CAPABILITY    compute capability; 9.0
//   FAKE_CUDA_PEERS         0: no device can access another's memory; 1
//   FAKE_CUDA_MPS           what the attribute says; 0
//   FAKE_CUDA_STREAM_OPS    what the attribute of 64-bit stream operations says; 1
//   FAKE_CUDA_COMPUTE_MODE  what the attribute says; 0. The fake lets every process in
//   FAKE_CUDA_NOT_READY     so many calls of cuInit() in this process, and then of
//                           cuDevicePrimaryCtxRetain(), are answered as an MPS server that recovers
//                           from a client's fault does: error 807; 0
//   FAKE_CUDA_DELAY_US      work begins up to so many microseconds late, at random; 50
//   FAKE_CUDA_SEED          of these delays; 1
//   FAKE_CUDA_FAULT_KERNEL  the kernel with this number (the process's first is 1) makes an illegal
//                           access: error 700, for all that the context does from then on
//   FAKE_CUDA_NO_CONTEXT    the name (as in /proc/PID/comm) of the program that may have no
//                           context, and whose CUDA_MPS_PIPE_DIRECTORY must be an empty folder
//   FAKE_CUDA_LOG           a folder: device-N.log has a line for each piece of work that is done:
//                           "begin_ns end_ns pid=P stream=S kernel|engine|word NAME bytes=B", times
//                           of CLOCK_MONOTONIC; calls.log one for each call that allocates,
//                           gives back or waits for a device, and for each kind of product that a
//                           double's tuner would measure: "ns pid=P NAME"
//   CUDA_VISIBLE_DEVICES    numbers alone
#ifndef DMUOND_TESTS_FAKE_CUDA_DRIVER_FAKE_CUDA_H_
#define DMUOND_TESTS_FAKE_CUDA_DRIVER_FAKE_CUDA_H_

#include <cuda.h>

#include <cstddef>

extern "C" {

struct FakeCudaRange {
  const void* address;  // nullptr: none
  size_t bytes;
  size_t alignment;
};

// Enqueues a kernel: a worker of the stream calls `run(argument)`. `ranges` are all the memory that
// it touches; if the stream's device may not access one of them, it fails with error 700 instead.
CUresult fakeCudaLaunch(CUstream stream, const char* name, const FakeCudaRange* ranges,
                        size_t count, void (*run)(void* argument), void* argument);
// The same for a kernel that waits for other processes. It leaves most of the device to others, so
// that their kernels run beside it.
CUresult fakeCudaLaunchBeside(CUstream stream, const char* name, const FakeCudaRange* ranges,
                              size_t count, void (*run)(void* argument), void* argument);
// Returns where a kernel finds what lies at a device address. Other addresses are returned as they
// are.
void* fakeCudaAlias(const void* address);
// How many streams of this process an event holds up: with one of them a process takes its turns on
// a GPU, as if it had work.
int fakeCudaHeldUpByEvents();
// A line of calls.log.
void fakeCudaLogCall(const char* name);

}  // extern "C"

#endif  // DMUOND_TESTS_FAKE_CUDA_DRIVER_FAKE_CUDA_H_
