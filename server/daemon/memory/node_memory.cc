#include "server/daemon/memory/node_memory.h"

#include <cstring>
#include <utility>

#include "server/common/errors.h"

namespace dmuond::server {

NodeMemory::NodeMemory(Options options, NodeDevice& device, Planner& planner,
                       std::function<void(const std::function<void()>&)> enter)
    : options_(options), device_(device), planner_(planner), enter_(std::move(enter)) {}

void NodeMemory::Prepare(const scheduler::node::Prepare& order, Done done) {
  preparing_ = std::make_shared<PrepareProgress>();
  if (worker_ == nullptr) {
    preparing_.reset();
    return done(Error(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving"), false);
  }
  PrepareOptions options;
  options.node = options_.node;
  options.lanes = options_.lanes;
  options.job_memory_bytes = options_.job_memory_bytes;
  options.host_copies = options_.host_copies;
  options.resume = order.resume;
  worker_->Post([this, wire = order.inputs, options = std::move(options), progress = preparing_,
                 done = std::move(done)] {
    auto prepared = std::make_shared<absl::StatusOr<PreparedJob>>(
        PrepareJob(planner_, device_, wire, options, *progress));
    enter_([&] {
      if (preparing_ != progress) {
        // The job has ended, or is prepared anew.
        LetGo(std::move(prepared));
        return;
      }
      preparing_.reset();
      if (!prepared->ok()) return done(prepared->status(), false);
      memory_ = std::move((*prepared)->memory);
      programs_ = std::move((*prepared)->programs);
      host_ = std::move((*prepared)->host);
      done(std::move((*prepared)->planned), host_ != nullptr);
    });
  });
}

void NodeMemory::Drop() {
  if (preparing_ != nullptr) preparing_->unwanted = true;
  preparing_.reset();
  programs_.clear();
  host_.reset();
  if (memory_ == nullptr) return;
  memory_->PoisonAll();
  LetGo(std::exchange(memory_, nullptr));
}

void NodeMemory::Poison() {
  if (memory_ != nullptr) memory_->PoisonAll();
}

void NodeMemory::MarkRollback(uint32_t epoch, uint64_t awaited) {
  if (memory_ != nullptr) memory_->MarkRollback(epoch, awaited);
}

void NodeMemory::VoidState(int32_t lanes) {
  for (int32_t i = 0; i < lanes; ++i) {
    const auto table = memory_->table(scheduler::LaneIndex(i));
    std::memset(table->data(), 0, table->size());
  }
}

void NodeMemory::LetGo(std::shared_ptr<void> memory) {
  if (worker_ != nullptr) worker_->Post([memory = std::move(memory)] {});
}

void NodeMemory::ForgetPending() {
  LetGo(std::exchange(pending_, std::make_shared<PendingState>()));
}

}  // namespace dmuond::server
