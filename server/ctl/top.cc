// dmuonctl top
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/ctl/connection.h"
#include "server/ctl/screen.h"
#include "server/ctl/status_text.h"

namespace dmuond::server::ctl {
namespace {

// How fast the steps come, from one look to the next.
class StepRate {
 public:
  // Empty: not known yet.
  std::string Look(const v1::GetStatusReply& status, absl::Time now) {
    const v1::JobStatus& job = status.job();
    std::optional<Seen> seen;
    if (status.has_job()) seen = {job.name(), job.incarnation(), job.last_committed_step(), now};
    std::string text;
    if (seen && last_ && seen->job == last_->job && seen->incarnation == last_->incarnation) {
      const double rate = static_cast<double>(seen->step - last_->step) /
                          absl::ToDoubleSeconds(seen->when - last_->when);
      text = absl::StrFormat("%.2f steps a second\n", rate);
    }
    last_ = std::move(seen);
    return text;
  }

 private:
  struct Seen {
    std::string job;
    uint64_t incarnation = 0;
    int64_t step = 0;
    absl::Time when;
  };
  std::optional<Seen> last_;
};

}  // namespace

int RunTop(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("top takes no arguments");
  if (options.json) return FailUsage("top has no --json: status has");
  if (options.interval <= absl::ZeroDuration()) return FailUsage("--interval must be above 0");
  if (options.count < 0) return FailUsage("--count is 0 (for ever) or more");
  StepRate rate;
  absl::Status answered;
  {
    Screen screen;
    for (int64_t shown = 1;; ++shown) {
      const auto status =
          Call(options, &v1::Admin::Stub::GetStatus, AboutJob<v1::GetStatusRequest>(options));
      answered = status.status();
      // One that ends may have a successor.
      const std::string text =
          answered.ok() ? StatusText(*status) + rate.Look(*status, absl::Now())
                        : absl::StrCat("the daemon does not answer: ", answered.message(), "\n");
      if (!screen.Show(text) || shown == options.count || screen.EndsWithin(options.interval)) {
        break;
      }
    }
  }
  return answered.ok() ? kExitOk : Fail(answered);
}

}  // namespace dmuond::server::ctl
