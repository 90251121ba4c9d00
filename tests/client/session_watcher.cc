#include "tests/client/session_watcher.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::testing {
namespace {

std::unique_ptr<v1::Trainer::Stub> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  return v1::Trainer::NewStub(grpc::CreateCustomChannel(
      absl::StrCat("unix:", address), grpc::InsecureChannelCredentials(), arguments));
}

}  // namespace

SessionWatcher::SessionWatcher(const std::string& address, v1::SessionKey key)
    : stub_(Connect(address)), key_(std::move(key)), thread_([this] { Run(); }) {}

SessionWatcher::~SessionWatcher() {
  {
    MutexLock lock(mutex_);
    ends_ = true;
    if (watching_ != nullptr) watching_->TryCancel();
  }
  thread_.join();
}

bool SessionWatcher::HearsOf(int64_t step, uint64_t attempt) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  MutexLock lock(mutex_);
  while (newest_.step() != step || newest_.attempt() != attempt ||
         newest_.kind() != v1::Outcome::KIND_COMMITTED) {
    if (!changed_.WaitUntil(mutex_, deadline)) return false;
  }
  return true;
}

void SessionWatcher::Run() {
  v1::WatchSessionRequest request;
  *request.mutable_key() = key_;
  for (;;) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    {
      MutexLock lock(mutex_);
      if (ends_) return;
      watching_ = &context;
    }
    const auto reader = stub_->WatchSession(&context, request);
    v1::SessionEvent event;
    while (reader->Read(&event)) {
      MutexLock lock(mutex_);
      if (event.has_outcome()) newest_ = event.outcome();
      changed_.NotifyAll();
    }
    const grpc::Status status = reader->Finish();
    MutexLock lock(mutex_);
    watching_ = nullptr;
    if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return;  // the session has ended
  }
}

}  // namespace dmuond::testing
