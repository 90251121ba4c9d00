// dmuonctl routing
#include <iostream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "server/ctl/connection.h"
#include "server/ctl/table.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {
namespace {

// "0-3 5": a replicated tensor has a piece on every lane.
std::string Owners(const google::protobuf::RepeatedField<int32_t>& lanes) {
  std::string text;
  for (int i = 0; i < lanes.size();) {
    int last = i;
    while (last + 1 < lanes.size() && lanes[last + 1] == lanes[last] + 1) ++last;
    absl::StrAppend(&text, text.empty() ? "" : " ", lanes[i]);
    if (last > i) absl::StrAppend(&text, "-", lanes[last]);
    i = last + 1;
  }
  return text;
}

std::string RouteName(v1::Route route) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::Route_Name(route), "ROUTE_"));
}

}  // namespace

int RunRouting(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("routing takes no arguments");
  const auto reply =
      Call(options, &v1::Admin::Stub::GetRouting, AboutJob<v1::GetRoutingRequest>(options));
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
    return kExitOk;
  }
  Table routing({"parameter", "route", ">matrices", "owners", ">bucket", "why"});
  for (const v1::RoutingRow& row : reply->rows()) {
    routing.Add({row.parameter(), RouteName(row.route()),
                 row.route() == v1::ROUTE_MUON ? absl::StrCat(row.matrices()) : "",
                 Owners(row.owners()), row.bucket() < 0 ? "" : absl::StrCat(row.bucket()),
                 row.why()});
  }
  std::cout << PictureAge(reply->picture_age_ms()) << routing.Text();
  return kExitOk;
}

}  // namespace dmuond::server::ctl
