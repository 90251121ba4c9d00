// A planned departure: this node asks for the job to be halted, and leaves.
#include <chrono>
#include <utility>

#include "scheduler/job/node_job.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

node::Actions NodeJob::AskToHalt(std::chrono::milliseconds patience) {
  v1::MemberMessage message;
  message.mutable_leaving()->set_node(options_.node);
  message.mutable_leaving()->set_patience_ms(patience.count());
  Tell(std::move(message));
  return Take();
}

void NodeJob::OnHalted(const v1::Halted& halted) {
  Do(node::Note{node::Note::Level::kInfo,
                "a daemon is leaving",
                {{"node", halted.node()}, {"step", halted.step()}}});
  // Whoever leaves, nothing is decided before the group has formed anew.
  if (job_ != nullptr && job_->steps.has_value()) halted_attempt_ = job_->steps->open().attempt;
  if (halted.node() == options_.node) halted_ = true;
  Wake();
}

node::Actions NodeJob::Leave() {
  leaves_ = true;
  if (job_ != nullptr) {
    if (job_->failed.ok()) {
      job_->failed =
          Error(absl::StatusCode::kUnavailable, "DRAINING",
                scheduler::Say("the daemon of node ", Named("node", options_.node), " is leaving"));
    }
    Do(node::GiveUpCopies{"the daemon is leaving"});
    EndJob("the daemon is leaving");
  }
  Wake();
  return Take();
}

}  // namespace dmuond::scheduler
