// Values of the client to the messages of the wire contract, and back. Threads: any.
#ifndef DMUOND_CLIENT_CPP_SRC_CONVERT_H_
#define DMUOND_CLIENT_CPP_SRC_CONVERT_H_

#include "dmuond/client/layout.h"
#include "dmuond/client/types.h"
#include "dmuond/v1/trainer.pb.h"

namespace dmuond::client {

// Parameters, fragments, groups and bucket size; not the key.
void ToProto(const Layout& layout, v1::RegisterLayoutRequest& request);
// Overwrites without allocating, once the message has been used.
void ToProto(const StepScalars& scalars, v1::StepScalars& message);

[[nodiscard]] Registered FromProto(const v1::RegisterLayoutReply& reply);
[[nodiscard]] Outcome FromProto(const v1::Outcome& outcome);  // unset: kPending
[[nodiscard]] StepTiming FromProto(const v1::StepTiming& timing);

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_CONVERT_H_
