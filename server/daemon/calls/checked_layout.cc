#include "server/daemon/calls/checked_layout.h"

#include <utility>

#include "scheduler/convert/convert.h"
#include "scheduler/limits.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

// What a lane would otherwise find out, and end.
absl::Status CheckGroups(const v1::Registration& registration) {
  if (registration.groups_size() > scheduler::kGroupsMax) {
    return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                 Say("rank ", Named("rank", registration.rank()), ": ",
                     Named("groups", registration.groups_size()), " groups; at most ",
                     Named("at_most", scheduler::kGroupsMax), " are allowed"));
  }
  for (int i = 0; i < registration.groups_size(); ++i) {
    const absl::Status valid = FromProto(registration.groups(i)).status();
    if (!valid.ok()) {
      return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                   Say("rank ", Named("rank", registration.rank()), ", groups[", Named("group", i),
                       "]: ", valid.message()));
    }
  }
  for (const v1::Parameter& parameter : registration.parameters()) {
    if (parameter.route() == v1::ROUTE_TRAINER) continue;
    if (parameter.group() < 0 || parameter.group() >= registration.groups_size()) {
      return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                   Say("rank ", Named("rank", registration.rank()), ": parameter '",
                       Named("parameter", parameter.name()), "' is of group ",
                       Named("group", parameter.group()), ", and there are ",
                       Named("groups", registration.groups_size()), " groups"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CheckedLayout> CheckLayout(v1::Registration who,
                                          const v1::RegisterLayoutRequest& request) {
  CheckedLayout checked;
  checked.wire = std::move(who);
  *checked.wire.mutable_parameters() = request.parameters();
  *checked.wire.mutable_fragments() = request.fragments();
  *checked.wire.mutable_groups() = request.groups();
  checked.wire.set_bucket_bytes(request.bucket_bytes());
  absl::StatusOr<scheduler::Registration> parsed = FromProto(checked.wire);
  if (!parsed.ok()) return WithReason(parsed.status(), "LAYOUT_INVALID");
  absl::Status valid = scheduler::Validate(*parsed);
  if (valid.ok()) valid = CheckGroups(checked.wire);
  if (!valid.ok()) return WithReason(valid, "LAYOUT_INVALID");
  checked.layout = *std::move(parsed);
  return checked;
}

}  // namespace dmuond::server
