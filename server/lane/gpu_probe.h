// What the CUDA driver and NCCL say of this machine. `dmuonctl doctor` has no driver of its own and
// runs `dmuond-lane --probe` for it, which it can end if the driver hangs.
#ifndef DMUOND_SERVER_LANE_GPU_PROBE_H_
#define DMUOND_SERVER_LANE_GPU_PROBE_H_

namespace dmuond::server::lane {

// Prints JSON objects to stdout, one a line, each as soon as it is known:
//
//   {"at": "cuInit"}                what is done next: the last one names the call that hangs
//   {"nccl": {"version"}}           or {"error", "remedy"}
//   {"driver": {"version", "name"}} or {"error", "found"}: whether there is a libcuda.so.1
//   {"device": {…}}                 one for each device that this process sees, in their order
//   {"done": true}
//
// A device's object has ordinal, name, uuid, major, minor, compute_mode, mps, stream_ops_64, peers
// (ordinals of those whose memory it can access), free_bytes and total_bytes where they are known,
// and the errors `context`, `descriptor` and `handle`: of making a context, memory by descriptor,
// and memory by 64-byte handle; an error that is not there did not happen.
//
// Makes a context on each device, and allocates a granule of its memory, until the process ends.
// REQUIRES: this process has one thread and has not loaded the driver.
void PrintGpuProbe();

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_GPU_PROBE_H_
