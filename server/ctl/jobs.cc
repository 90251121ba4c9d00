// dmuonctl jobs
#include <iostream>

#include "absl/strings/str_cat.h"
#include "server/ctl/connection.h"
#include "server/ctl/job_text.h"
#include "server/ctl/table.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {

int RunJobs(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("jobs takes no arguments");
  const auto reply = Call(options, &v1::Admin::Stub::ListJobs, v1::ListJobsRequest());
  if (!reply.ok()) return Fail(reply.status());
  if (options.json) {
    PrintJson(ToJson(*reply));
    return kExitOk;
  }
  Table jobs({"job", ">owner", "state", ">world", ">step", ">durable", ">attempt", ">skipped",
              ">aborted", ">snapshots failed", ">left out", ">parameters", ">matrices"});
  for (const v1::JobStatus& job : reply->jobs()) {
    jobs.Add({job.name(), job.has_owner_uid() ? absl::StrCat(job.owner_uid()) : "", job.state(),
              absl::StrCat(job.world_size()), absl::StrCat(job.last_committed_step()),
              DurableStep(job), OpenAttempt(job), absl::StrCat(job.skipped_steps()),
              absl::StrCat(job.aborted_attempts()), absl::StrCat(job.snapshots_failed()),
              absl::StrCat(job.snapshots_left_out()), absl::StrCat(job.parameters()),
              absl::StrCat(job.matrices())});
  }
  std::cout << PictureAge(reply->picture_age_ms())
            << (reply->jobs_size() > 0 ? jobs.Text() : "no job\n");
  return kExitOk;
}

}  // namespace dmuond::server::ctl
