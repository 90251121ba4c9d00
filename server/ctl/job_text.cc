#include "server/ctl/job_text.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "scheduler/shown_pid.h"
#include "server/ctl/table.h"

namespace dmuond::server::ctl {

std::string DurableStep(const v1::JobStatus& job) {
  return job.has_durable_step() ? absl::StrCat(job.durable_step()) : "none";
}

std::string OpenAttempt(const v1::JobStatus& job) {
  if (job.attempt() == 0) return "none";
  return absl::StrCat(job.attempt() >> 32, ".", job.attempt() & 0xffffffff);
}

std::string CheckText(const v1::CheckDone& check) {
  std::string text = absl::StrCat(
      check.different() == 0 ? "all copies are equal"
                             : absl::StrCat("copies that differ: ", check.different()),
      ": ", check.digests(), " digests compared, weights of ", check.ranks(), " ranks; it took ",
      HumanMicroseconds(static_cast<double>(check.took_ms()) * 1e3),
      " and kept no step waiting for longer than ", HumanMicroseconds(check.held_us()), "\n");
  if (check.differences().empty()) return text;
  Table rows({"parameter", "box", "kind", ">node", "rank or lane", "digest", "expected", "as in"});
  for (const v1::CheckDone::Difference& difference : check.differences()) {
    std::vector<std::string> ranges;
    for (int d = 0; d < difference.box().begin_size(); ++d) {
      ranges.push_back(absl::StrCat(difference.box().begin(d), ":", difference.box().end(d)));
    }
    rows.Add({difference.parameter(), absl::StrCat("[", absl::StrJoin(ranges, ","), "]"),
              difference.kind(), absl::StrCat(difference.node()),
              difference.ranks().empty()
                  ? absl::StrCat("lane ", difference.lane())
                  : absl::StrCat("rank ", absl::StrJoin(difference.ranks(), ",")),
              absl::StrFormat("%016x", difference.digest()),
              absl::StrFormat("%016x", difference.expected_digest()), difference.against()});
  }
  absl::StrAppend(&text, rows.Text());
  if (const int64_t more = check.different() - check.differences_size(); more > 0) {
    absl::StrAppend(&text, "and ", more, " more\n");
  }
  return text;
}

std::string JobText(const v1::JobStatus& job) {
  std::string text = absl::StrCat(
      "job ", job.name(), ": ", job.state(), ", world ", job.world_size(), ", incarnation ",
      job.incarnation(), job.has_owner_uid() ? absl::StrCat(", of uid ", job.owner_uid()) : "",
      "\n", "step ", job.last_committed_step(), " committed, ", DurableStep(job),
      " durable, attempt ", OpenAttempt(job), " open; ", job.skipped_steps(), " skipped, ",
      job.aborted_attempts(), " attempts aborted; snapshots: ", job.snapshots_failed(), " failed, ",
      job.snapshots_left_out(), " left out\n", job.parameters(), " parameters, ", job.matrices(),
      " matrices orthogonalised, gradient norm ", absl::StrFormat("%.6g", job.gradient_norm()),
      "\n");
  if (job.snapshot_bytes() > 0) {
    absl::StrAppend(&text, "the newest snapshot has ", HumanBytes(job.snapshot_bytes()),
                    " and took ", absl::StrFormat("%.3g", job.snapshot_ms() / 1000.0), " s\n");
  }
  if (!job.snapshot_error().empty()) {
    absl::StrAppend(&text, "the newest snapshot failed: ", job.snapshot_error(), "\n");
  }
  if (job.has_check() && !job.check().result().error().empty()) {
    absl::StrAppend(&text, "copies were not compared: ", job.check().result().error(), "\n");
    if (job.check().result().different() > 0) {
      absl::StrAppend(&text, CheckText(job.check().result()));
    }
  } else if (job.has_check()) {
    const absl::Duration ago = absl::Now() - absl::FromUnixMillis(job.check().unix_ms());
    absl::StrAppend(&text, "checked ", HumanSeconds(absl::ToInt64Seconds(ago)),
                    " ago: ", CheckText(job.check().result()));
  }
  for (const v1::Awaited& awaited : job.awaited()) {
    absl::StrAppend(&text, "waits, for ", HumanSeconds(awaited.since_ms() / 1000), " now, for ",
                    awaited.what());
    if (awaited.patience_ms() > 0) {
      absl::StrAppend(&text, "; in ", HumanSeconds(awaited.patience_ms() / 1000), " ",
                      awaited.otherwise());
    }
    absl::StrAppend(&text, "\n");
  }
  if (job.has_timing()) {
    const v1::StepTiming& timing = job.timing();
    Table times({">collect", ">decide", ">update", ">publish", ">quiet", ">to other nodes"});
    times.Add({HumanMicroseconds(timing.collect_us()), HumanMicroseconds(timing.decide_us()),
               HumanMicroseconds(timing.update_us()), HumanMicroseconds(timing.publish_us()),
               HumanMicroseconds(timing.quiet_us()), HumanBytes(timing.rail_bytes())});
    absl::StrAppend(&text, "\nlast step\n", times.Text());
  }
  if (job.trainers_size() > 0) {
    Table trainers({">rank", ">pid", ">uid", ">incarnation", "state", "client"});
    for (const v1::TrainerStatus& trainer : job.trainers()) {
      trainers.Add({absl::StrCat(trainer.rank()), scheduler::ShownPid(trainer.pid()),
                    absl::StrCat(trainer.uid()), absl::StrCat(trainer.incarnation()),
                    trainer.state(), trainer.client()});
    }
    absl::StrAppend(&text, "\ntrainers of this node\n", trainers.Text());
  }
  return text;
}

}  // namespace dmuond::server::ctl
