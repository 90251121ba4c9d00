#include "server/daemon/group/unproven_streams.h"

namespace dmuond::server {

UnprovenStreams::Entry UnprovenStreams::Enter(TimePoint now, std::function<void()> cancel) {
  MutexLock lock(mutex_);
  for (auto oldest = streams_.begin(); live_ >= streams_max_; ++oldest) Cancel(oldest->second);
  streams_[++last_id_] = {now, std::move(cancel)};
  ++live_;
  return {*this, last_id_};
}

void UnprovenStreams::Tick(TimePoint now) {
  MutexLock lock(mutex_);
  for (auto& [id, stream] : streams_) {
    if (now - stream.began >= patience_) Cancel(stream);
  }
}

void UnprovenStreams::Leave(uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = streams_.find(id);
  if (found->second.cancel) --live_;
  streams_.erase(found);
}

void UnprovenStreams::Cancel(Stream& stream) {
  if (!stream.cancel) return;
  std::exchange(stream.cancel, nullptr)();
  --live_;
}

}  // namespace dmuond::server
