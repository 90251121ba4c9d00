// Lanes on GPUs, as their daemon sees them. The daemon makes and holds the memory of the devices by
// descriptor, which needs the driver and no context: it takes none of their memory itself, and
// nothing that happens on a device reaches it.
//
// Needs the headers of CUDA alone; the driver is loaded when a device is opened.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_CUDA_NODE_DEVICE_H_
#define DMUOND_SERVER_DAEMON_MEMORY_CUDA_NODE_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

// REQUIRES: the driver has not been loaded by this process, and no other thread uses the
// environment. UNAVAILABLE: no driver, or one that is too old; NOT_FOUND: no such device;
// ALREADY_EXISTS: two lanes would have one device, or another daemon has it. All name devices.
[[nodiscard]] absl::StatusOr<std::unique_ptr<NodeDevice>> OpenCudaNodeDevice(
    const DeviceList& list, const NodeDeviceOptions& options);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_CUDA_NODE_DEVICE_H_
