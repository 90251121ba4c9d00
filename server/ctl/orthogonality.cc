// dmuonctl orthogonality: how far from orthogonal the updates of some matrices are.
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/ctl/connection.h"
#include "server/ctl/table.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunOrthogonality(const Options& options, const Arguments& arguments) {
  auto request = AboutJob<v1::SampleUpdatesRequest>(options);
  for (const auto& name : arguments) request.add_parameters(std::string(name));
  request.set_matrices(options.matrices);
  request.set_timeout_ms(absl::ToInt64Milliseconds(options.sample_timeout));
  Options patient = options;
  patient.timeout += options.sample_timeout;
  const auto sampled = Call(patient, &v1::Admin::Stub::SampleUpdates, request);
  if (!sampled.ok()) return Fail(sampled.status());
  if (options.json) {
    PrintJson(ToJson(*sampled));
    return kExitOk;
  }
  Table rows({"parameter", ">matrix", ">step", ">error", ">update RMS", ">lane", ">held"});
  for (const v1::SampleUpdatesReply::Row& row : sampled->rows()) {
    const bool updated = row.has_orthogonality_error();
    rows.Add({row.parameter(), absl::StrCat(row.rows(), " x ", row.cols()),
              absl::StrCat(row.step()),
              updated ? absl::StrFormat("%.4f", row.orthogonality_error()) : "no update",
              updated ? absl::StrFormat("%.4f", row.update_rms()) : "", absl::StrCat(row.lane()),
              absl::StrFormat("%.1f ms", row.held_us() / 1e3)});
  }
  std::cout << rows.Text();
  return kExitOk;
}

}  // namespace dmuond::server::ctl
