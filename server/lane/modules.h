// Which machine code a lane computes with: its program, and the libraries that it has loaded.
//
// Threads: any.
#ifndef DMUOND_SERVER_LANE_MODULES_H_
#define DMUOND_SERVER_LANE_MODULES_H_

#include "dmuond/v1/peer.pb.h"

namespace dmuond::server::lane {

// Adds the program and each library whose code decides bits, as this process has loaded them, in
// the order of their names. A file that was replaced on disk meanwhile counts as what was loaded.
void AddModules(v1::LaneBits& bits);

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_MODULES_H_
