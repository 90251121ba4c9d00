// A rail over NCCL. For a GPU's memory: lanes of the CUDA device.
//
// NCCL pairs messages by the order in which members start them, and neither it nor a GPU says so
// when these orders differ: one waits, or gets the bytes of another bucket. So with every group of
// messages each two of its members exchange a stamp (tag, number of the group between the two,
// sizes in their order), and Done() says what differs, even where the group itself never ends.
//
// NCCL says nothing of a peer that has died either: what is under way waits until the lane ends.
#ifndef DMUOND_SERVER_LANE_NCCL_GROUP_H_
#define DMUOND_SERVER_LANE_NCCL_GROUP_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/lane/peer_group.h"

namespace dmuond::server::lane {

// `setup` has a CudaDevice and a stream of it. The group is ready when every member has exchanged a
// message with every other, so that no step waits for connections. UNAVAILABLE, with what to
// install: there is no library that will do. `library`: its file; tests name others.
absl::StatusOr<std::unique_ptr<PeerGroup>> MakeNcclGroupOf(const std::string& library,
                                                           const PeerGroupSetup& setup);
absl::StatusOr<std::unique_ptr<PeerGroup>> MakeNcclGroup(const PeerGroupSetup& setup);

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_NCCL_GROUP_H_
