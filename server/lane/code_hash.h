// What decides a lane's bits, as a hash. It is in a source of its own, which is all that a change
// of the lane's or the kernels' sources compiles beside them.
#ifndef DMUOND_SERVER_LANE_CODE_HASH_H_
#define DMUOND_SERVER_LANE_CODE_HASH_H_

namespace dmuond::server::lane {

extern const char kCodeHash[];  // 16 hexadecimal digits

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_CODE_HASH_H_
