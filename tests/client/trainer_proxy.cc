#include "tests/client/trainer_proxy.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "dmuond/wire/layout_parts.h"
#include "grpcpp/grpcpp.h"
#include "tests/client/socket_relay.h"

namespace dmuond::testing {
namespace {

constexpr std::chrono::milliseconds kDelay{15};
constexpr int kMuchLater = 4;  // calls
constexpr int kMessageBytesMax = 256 << 20;

std::string TemporaryDirectory() {
  std::string directory = std::filesystem::temp_directory_path() / "dmuond-proxy-XXXXXX";
  if (::mkdtemp(directory.data()) == nullptr) std::abort();
  return directory;
}

// What must be equal in two answers to one call: all but how long things took. Empty: no answer
// yet, which agrees with any.
template <typename Reply>
std::string Essence(Reply reply) {
  if constexpr (requires { reply.clear_timing(); }) reply.clear_timing();
  return reply.SerializeAsString();
}

grpc::Status Broken(const char* what) {
  return {grpc::StatusCode::UNAVAILABLE, absl::StrCat("the test's proxy: ", what)};
}

}  // namespace

const char* Name(Fault fault) {
  constexpr const char* kNames[] = {"None",  "TwiceAtOnce", "AgainLater", "AgainMuchLater",
                                    "Delay", "LoseRequest", "LoseReply",  "Cut"};
  return kNames[static_cast<size_t>(fault)];
}

class TrainerProxy::Impl final : public v1::Trainer::Service {
  using Stub = v1::Trainer::Stub;
  using Context = grpc::ServerContext;
  template <typename Request, typename Reply>
  using Unary = grpc::Status (Stub::*)(grpc::ClientContext*, const Request&, Reply*);

 public:
  Impl(const std::string& daemon, Schedule schedule)
      : schedule_(std::move(schedule)), directory_(TemporaryDirectory()) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    stub_ = v1::Trainer::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("unix:", daemon), grpc::InsecureChannelCredentials(), arguments));
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("unix:", directory_, "/inner"),
                             grpc::InsecureServerCredentials());
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) std::abort();
    relay_ = std::make_unique<SocketRelay>(address(), directory_ + "/inner", daemon);
  }
  ~Impl() override {
    for (const Late& late : std::exchange(late_, {})) late.send();
    server_->Shutdown(std::chrono::system_clock::now());
    relay_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  [[nodiscard]] std::string address() const { return directory_ + "/dmuond.sock"; }

  // ---- the service ----
  grpc::Status Hello(Context* context, const v1::HelloRequest* request,
                     v1::HelloReply* reply) override {
    return Call("Hello", context, &Stub::Hello, *request, reply);
  }
  grpc::Status OpenSession(Context* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionReply* reply) override {
    grpc::Status status = Call("OpenSession", context, &Stub::OpenSession, *request, reply);
    if (status.ok()) {
      MutexLock lock(mutex_);
      key_.set_session(reply->session());
      key_.set_incarnation(reply->incarnation());
      key_.set_secret(reply->secret());
    }
    return status;
  }
  grpc::Status RegisterLayout(
      Context* context,
      grpc::ServerReaderWriter<v1::RegisterLayoutReply, v1::RegisterLayoutRequest>* stream)
      override {
    v1::RegisterLayoutRequest request;
    if (!wire::ReadParts(*stream, request)) return Broken("the request has not come");
    v1::RegisterLayoutReply reply;
    grpc::Status status = Apply<v1::RegisterLayoutReply>(
        "RegisterLayout", context, &reply,
        [this, request](grpc::ClientContext& upstream, v1::RegisterLayoutReply& answer) {
          return wire::RegisterLayout(*stub_, &upstream, request, &answer);
        });
    if (status.ok()) wire::WriteParts(*stream, reply);
    return status;
  }
  grpc::Status AttachBuffers(Context* context, const v1::AttachBuffersRequest* request,
                             v1::AttachBuffersReply* reply) override {
    return Call("AttachBuffers", context, &Stub::AttachBuffers, *request, reply);
  }
  grpc::Status SubmitStep(Context* context, const v1::SubmitStepRequest* request,
                          v1::SubmitStepReply* reply) override {
    return Call("SubmitStep", context, &Stub::SubmitStep, *request, reply);
  }
  grpc::Status WaitStep(Context* context, const v1::WaitStepRequest* request,
                        v1::WaitStepReply* reply) override {
    return Call("WaitStep", context, &Stub::WaitStep, *request, reply);
  }
  grpc::Status AckRollback(Context* context, const v1::AckRollbackRequest* request,
                           v1::AckRollbackReply* reply) override {
    return Call("AckRollback", context, &Stub::AckRollback, *request, reply);
  }
  grpc::Status SaveSnapshot(Context* context, const v1::SaveSnapshotRequest* request,
                            v1::SaveSnapshotReply* reply) override {
    return Call("SaveSnapshot", context, &Stub::SaveSnapshot, *request, reply);
  }
  grpc::Status LoadSnapshot(Context* context, const v1::LoadSnapshotRequest* request,
                            v1::LoadSnapshotReply* reply) override {
    return Call("LoadSnapshot", context, &Stub::LoadSnapshot, *request, reply);
  }
  grpc::Status CloseSession(Context* context, const v1::CloseSessionRequest* request,
                            v1::CloseSessionReply* reply) override {
    return Call("CloseSession", context, &Stub::CloseSession, *request, reply);
  }
  grpc::Status PushParameters(Context* context,
                              grpc::ServerReader<v1::PushParametersRequest>* reader,
                              v1::PushParametersReply* reply) override {
    std::vector<v1::PushParametersRequest> messages(1);
    while (reader->Read(&messages.back())) messages.emplace_back();
    messages.pop_back();
    return Apply<v1::PushParametersReply>(
        "PushParameters", context, reply,
        [this, messages](grpc::ClientContext& upstream, v1::PushParametersReply& answer) {
          const auto writer = stub_->PushParameters(&upstream, &answer);
          for (const v1::PushParametersRequest& message : messages) {
            if (!writer->Write(message)) break;
          }
          writer->WritesDone();
          return writer->Finish();
        });
  }
  grpc::Status PullParameters(Context* context, const v1::PullParametersRequest* request,
                              grpc::ServerWriter<v1::PullParametersReply>* writer) override {
    Replies<v1::PullParametersReply> replies;
    grpc::Status status = Apply<Replies<v1::PullParametersReply>>(
        "PullParameters", context, &replies,
        [this, request = *request](grpc::ClientContext& upstream, auto& answer) {
          const auto reader = stub_->PullParameters(&upstream, request);
          answer.messages.clear();
          v1::PullParametersReply message;
          while (reader->Read(&message)) answer.messages.push_back(message);
          return reader->Finish();
        });
    // A stream that breaks has brought a part.
    const size_t count = status.ok() ? replies.messages.size() : replies.messages.size() / 2;
    for (size_t i = 0; i < count; ++i) writer->Write(replies.messages[i]);
    return status;
  }

  // A stream that lasts: what befalls it befalls its beginning.
  grpc::Status WatchSession(Context* context, const v1::WatchSessionRequest* request,
                            grpc::ServerWriter<v1::SessionEvent>* writer) override {
    const Fault fault = Draw("WatchSession");
    const auto watch = [this, request = *request](grpc::ClientContext& upstream, const auto& take) {
      const auto reader = stub_->WatchSession(&upstream, request);
      v1::SessionEvent event;
      while (reader->Read(&event)) {
        Note(event);
        if (!take(event)) upstream.TryCancel();
      }
      return reader->Finish();
    };
    const auto drop = [](const v1::SessionEvent&) { return false; };
    const auto keep = [](const v1::SessionEvent&) { return true; };
    if (fault == Fault::kLoseRequest) return Broken("the request is lost");
    if (fault == Fault::kDelay) std::this_thread::sleep_for(kDelay);  // the fault itself
    if (fault == Fault::kAgainLater || fault == Fault::kAgainMuchLater) {
      SendLater(fault, [watch, drop] {
        grpc::ClientContext again;
        again.set_deadline(std::chrono::system_clock::now() + kDelay);
        [[maybe_unused]] const grpc::Status status = watch(again, drop);
      });
    }
    const auto upstream = grpc::ClientContext::FromServerContext(*context);
    if (fault == Fault::kLoseReply) {
      [[maybe_unused]] const grpc::Status status = watch(*upstream, drop);
      return Broken("an event is lost");
    }
    const auto other = grpc::ClientContext::FromServerContext(*context);
    std::thread beside([&] {
      if (fault == Fault::kCut) relay_->Cut();
      if (fault == Fault::kTwiceAtOnce) {
        [[maybe_unused]] const grpc::Status status = watch(*other, keep);
      }
    });
    grpc::Status status =
        watch(*upstream, [writer](const v1::SessionEvent& event) { return writer->Write(event); });
    other->TryCancel();
    beside.join();
    return status;
  }

  [[nodiscard]] v1::SessionKey key() const {
    MutexLock lock(mutex_);
    return key_;
  }
  [[nodiscard]] std::vector<std::string> complaints() const {
    MutexLock lock(mutex_);
    return complaints_;
  }
  [[nodiscard]] std::map<std::pair<std::string, Fault>, int> done() const {
    MutexLock lock(mutex_);
    return done_;
  }

 private:
  // A copy that is sent when the trainer has made so many further calls.
  struct Late {
    int calls = 0;
    std::function<void()> send;
  };
  template <typename Message>
  struct Replies {
    std::vector<Message> messages;
    [[nodiscard]] std::string SerializeAsString() const {
      std::string all;
      for (const Message& message : messages) all += message.SerializeAsString();
      return all;
    }
  };
  template <typename Reply>
  using Forward = std::function<grpc::Status(grpc::ClientContext&, Reply&)>;

  template <typename Request, typename Reply>
  grpc::Status Call(const std::string& method, Context* context, Unary<Request, Reply> call,
                    const Request& request, Reply* reply) {
    return Apply<Reply>(method, context, reply,
                        [this, call, request](grpc::ClientContext& upstream, Reply& answer) {
                          return (stub_.get()->*call)(&upstream, request, &answer);
                        });
  }

  Fault Draw(const std::string& method) {
    MutexLock lock(mutex_);
    const Fault fault = schedule_(method, calls_[method]++);
    ++done_[{method, fault}];
    return fault;
  }

  template <typename Reply>
  grpc::Status Apply(const std::string& method, Context* context, Reply* reply,
                     Forward<Reply> forward) {
    const Fault fault = Draw(method);
    std::vector<Late> due;
    {
      MutexLock lock(mutex_);
      for (Late& late : std::exchange(late_, {})) {
        (--late.calls == 0 ? due : late_).push_back(std::move(late));
      }
    }
    grpc::Status status = Suffer(fault, method, context, reply, forward);
    for (const Late& late : due) late.send();
    if (fault == Fault::kAgainLater || fault == Fault::kAgainMuchLater) {
      SendLater(fault, [forward] {
        grpc::ClientContext again;
        Reply ignored;
        [[maybe_unused]] const grpc::Status status = forward(again, ignored);
      });
    }
    return status;
  }
  void SendLater(Fault fault, std::function<void()> send) {
    MutexLock lock(mutex_);
    late_.push_back({fault == Fault::kAgainLater ? 1 : kMuchLater, std::move(send)});
  }

  template <typename Reply>
  grpc::Status Suffer(Fault fault, const std::string& method, Context* context, Reply* reply,
                      const Forward<Reply>& forward) {
    // A trainer that hangs up, or is cut off, hangs up on the daemon.
    const auto upstream = grpc::ClientContext::FromServerContext(*context);
    switch (fault) {
      case Fault::kLoseRequest:
        return Broken("the request is lost");
      case Fault::kLoseReply: {
        Reply lost;
        [[maybe_unused]] const grpc::Status status = forward(*upstream, lost);
        *reply = lost;
        return Broken("the reply is lost");
      }
      case Fault::kTwiceAtOnce: {
        Reply second;
        grpc::Status status_of_second;
        std::thread twin([&] {
          const auto other = grpc::ClientContext::FromServerContext(*context);
          status_of_second = forward(*other, second);
        });
        grpc::Status status = forward(*upstream, *reply);
        twin.join();
        // What another call's cut has cancelled has no answer of the daemon's.
        if (!context->IsCancelled()) {
          Compare(method, {status, Essence(*reply)}, {status_of_second, Essence(second)});
        }
        return status;
      }
      case Fault::kDelay:
        std::this_thread::sleep_for(kDelay);  // the fault itself; nothing is waited for
        return forward(*upstream, *reply);
      case Fault::kCut: {
        std::thread cutter([this] { relay_->Cut(); });
        grpc::Status status = forward(*upstream, *reply);
        cutter.join();
        return status;
      }
      default:
        return forward(*upstream, *reply);
    }
  }

  using Answer = std::pair<grpc::Status, std::string>;
  void Compare(const std::string& method, const Answer& first, const Answer& second) {
    const bool same = first.first.error_code() == second.first.error_code() &&
                      (!first.first.ok() || first.second.empty() || second.second.empty() ||
                       first.second == second.second);
    if (same) return;
    MutexLock lock(mutex_);
    complaints_.push_back(
        absl::StrCat(method, " was sent twice and answered differently: ", first.first.error_code(),
                     " '", first.first.error_message(), "' and ", second.first.error_code(), " '",
                     second.first.error_message(), "'"));
  }

  // Everybody who watches hears the same of an attempt.
  void Note(const v1::SessionEvent& event) {
    if (!event.has_outcome()) return;
    MutexLock lock(mutex_);
    const auto [known, fresh] =
        watched_.emplace(event.outcome().attempt(), event.SerializeAsString());
    if (fresh || known->second == event.SerializeAsString()) return;
    complaints_.push_back(
        absl::StrCat("WatchSession tells two things of attempt ", event.outcome().attempt()));
  }

  const Schedule schedule_;
  const std::string directory_;
  std::unique_ptr<Stub> stub_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<SocketRelay> relay_;
  mutable Mutex mutex_;
  std::map<std::string, int> calls_ DMUOND_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, Fault>, int> done_ DMUOND_GUARDED_BY(mutex_);
  std::vector<std::string> complaints_ DMUOND_GUARDED_BY(mutex_);
  std::vector<Late> late_ DMUOND_GUARDED_BY(mutex_);
  std::map<uint64_t, std::string> watched_ DMUOND_GUARDED_BY(mutex_);  // events by attempt
  v1::SessionKey key_ DMUOND_GUARDED_BY(mutex_);
};

TrainerProxy::TrainerProxy(const std::string& daemon, Schedule schedule)
    : impl_(std::make_unique<Impl>(daemon, std::move(schedule))) {}
TrainerProxy::~TrainerProxy() = default;
std::string TrainerProxy::address() const { return impl_->address(); }
v1::SessionKey TrainerProxy::key() const { return impl_->key(); }
std::vector<std::string> TrainerProxy::complaints() const { return impl_->complaints(); }
std::map<std::pair<std::string, Fault>, int> TrainerProxy::done() const { return impl_->done(); }

}  // namespace dmuond::testing
