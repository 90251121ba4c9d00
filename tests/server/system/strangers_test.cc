// What who may connect, and has no session, does to a daemon on which others train: nothing.
#include <grp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_test.h"
#include "tests/sanitized.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond::testing {
namespace {

using Stub = RawTrainer::Stub;

constexpr uid_t kNobody = 65534;

int64_t OfProcess(pid_t pid, const std::string& what) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(what + ":")) return std::stoll(line.substr(what.size() + 1));
  }
  ADD_FAILURE() << "no process " << pid;
  return 0;
}

// -1: refused.
int Connect(const std::string& path, int type) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const int socket = ::socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return socket;
  }
  ::close(socket);
  return -1;
}

// Pushes that say nothing, each with a stream of its own.
class SilentPushes {
 public:
  SilentPushes(const std::string& address, int connections, int streams) {
    for (int i = 0; i < connections; ++i) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      stubs_.push_back(v1::Trainer::NewStub(grpc::CreateCustomChannel(
          "unix:" + address, grpc::InsecureChannelCredentials(), arguments)));
      for (int j = 0; j < streams; ++j) {
        pushes_.push_back(std::make_unique<Push>());
        Push& push = *pushes_.back();
        push.writer = stubs_.back()->AsyncPushParameters(&push.context, &push.reply, &queue_,
                                                         pushes_.back().get());
      }
    }
  }
  ~SilentPushes() {
    for (const auto& push : pushes_) push->context.TryCancel();
    for (const auto& push : pushes_) push->writer->Finish(&push->status, nullptr);
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  // So many have begun, as far as this end knows.
  void WaitForBegun(size_t count) {
    void* tag = nullptr;
    bool ok = false;
    const auto deadline = std::chrono::system_clock::now() + std::chrono::seconds(10);
    for (size_t begun = 0; begun < count; ++begun) {
      ASSERT_EQ(queue_.AsyncNext(&tag, &ok, deadline), grpc::CompletionQueue::GOT_EVENT) << begun;
    }
  }

 private:
  struct Push {
    grpc::ClientContext context;
    v1::PushParametersReply reply;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncWriter<v1::PushParametersRequest>> writer;
  };
  std::vector<std::unique_ptr<Stub>> stubs_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Push>> pushes_;
};

class StrangersTest : public DaemonTest {
 protected:
  void SetUp() override {
    rlimit limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  void Start(std::vector<std::string> flags = {}) {
    StartDaemon({.devices = "cpu:1", .flags = std::move(flags)});
  }
  // A trainer that has made a step.
  void Train() {
    trainer_ = std::make_unique<RawTrainer>(daemon_->address());
    absl::Status status = trainer_->Open(0, 1);
    if (status.ok()) status = trainer_->Register();
    if (status.ok()) status = trainer_->Attach();
    if (status.ok()) status = trainer_->Push();
    if (status.ok()) status = trainer_->Step(1);
    ASSERT_TRUE(status.ok()) << status;
  }
  // In a process of another user, who may open the sockets; its exit code.
  static int AsNobody(const std::function<int()>& act) {
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setgroups(0, nullptr) != 0 || ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) {
        ::_exit(100);
      }
      ::_exit(act());
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  // For users of the sockets' group to get there at all.
  void OpenTheWay() const {
    for (auto at = std::filesystem::path(daemon_->address()).parent_path(); at.has_relative_path();
         at = at.parent_path()) {
      std::filesystem::permissions(at, std::filesystem::perms::others_exec,
                                   std::filesystem::perm_options::add);
    }
  }

  std::unique_ptr<RawTrainer> trainer_;
};

TEST_F(StrangersTest, NineHundredSilentPushesHoldNeitherATrainerNorManyThreads) {
  Start();
  Train();
  const int64_t threads = OfProcess(daemon_->pid(), "Threads");
  SilentPushes silent(daemon_->address(), 113, 8);
  silent.WaitForBegun(8 * 64);
  for (int64_t step = 2; step <= 10; ++step) {
    const absl::Status stepped = trainer_->Step(step);
    EXPECT_TRUE(stepped.ok()) << stepped;
  }
  EXPECT_EQ(DaemonStatus(daemon_->address()).Get().job().last_committed_step(), 10);
  // 64 connections of a user may prove nothing, with 8 streams each.
  EXPECT_LT(OfProcess(daemon_->pid(), "Threads"), threads + 8 * 64 + 50);
  EXPECT_TRUE(trainer_->Close().ok());
}

TEST_F(StrangersTest, TwelveHugeHellosAreRefusedBeforeTheyTakeMemory) {
  Start();
  Train();
  const int64_t before = OfProcess(daemon_->pid(), "VmHWM");
  v1::HelloRequest hello;
  hello.set_client(std::string(60 << 20, 'x'));
  for (int i = 0; i < 12; ++i) {
    RawTrainer stranger(daemon_->address());
    v1::HelloReply reply;
    const absl::Status refused = stranger.Call(&Stub::Hello, hello, &reply);
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    EXPECT_NE(refused.message().find("4194304"), std::string::npos) << refused;
  }
  // The next one may be read while another thread gives the last one's memory back; twelve have 720
  // MiB. The address sanitizer keeps 256 MiB of what was freed, and redzones (seen: 387 MiB).
  const int64_t most_mib = 2 * 60 + 20 + (kSanitized ? 2 * 256 : 0);
  EXPECT_LT(OfProcess(daemon_->pid(), "VmHWM"), before + (most_mib << 10)) << "kB";
  EXPECT_TRUE(trainer_->Step(2).ok());
}

TEST_F(StrangersTest, FourHundredIdleConnectionsKeepNobodyOut) {
  Start();
  std::vector<wire::UniqueFd> idle;
  for (int i = 0; i < 400; ++i) {
    for (const auto& [suffix, type] :
         {std::pair("", SOCK_STREAM), {".attach", SOCK_SEQPACKET}, {".admin", SOCK_STREAM}}) {
      const int socket = Connect(daemon_->address() + suffix, type);
      ASSERT_GE(socket, 0) << suffix;
      idle.emplace_back(socket);
    }
  }
  EXPECT_FALSE(DaemonStatus(daemon_->address()).Get().version().empty());
  Train();
  EXPECT_EQ(DaemonStatus(daemon_->address()).Get().job().last_committed_step(), 1);
  EXPECT_TRUE(trainer_->Close().ok());
}

// Administration is on a socket of its own; a dmuonctl of before hears where.
TEST_F(StrangersTest, TheTrainersSocketSaysWhereAdministrationIs) {
  Start();
  v1::Admin::Stub admin(
      grpc::CreateChannel("unix:" + daemon_->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::GetStatusReply reply;
  const grpc::Status status = admin.GetStatus(&context, {}, &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_NE(status.error_message().find(daemon_->address() + ".admin"), std::string::npos)
      << status.error_message();
  struct stat socket {};
  ASSERT_EQ(::stat((daemon_->address() + ".admin").c_str(), &socket), 0);
  EXPECT_EQ(socket.st_mode & 0777, 0600);
}

TEST_F(StrangersTest, AUserWhoIsNotAllowedIsHungUpOnBeforeAByteIsRead) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  Start({absl::StrCat("--socket_group=", kNobody)});
  OpenTheWay();
  const std::string path = daemon_->address();
  EXPECT_EQ(AsNobody([&path] {
              for (int i = 0; i < 200; ++i) {
                const int socket = Connect(path, SOCK_STREAM);
                char byte = 0;
                // The server's own preface would be a byte.
                if (socket < 0) return 1;
                if (::read(socket, &byte, 1) > 0) return 2;
                ::close(socket);
              }
              return 0;
            }),
            0);
  Train();
}

TEST_F(StrangersTest, WhatOneUserHoldsIsTakenFromNoOther) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  Start({absl::StrCat("--socket_group=", kNobody), "--allowed_uids=0,65534",
         "--connections_max=100", "--connections_per_uid=90"});
  OpenTheWay();
  const std::string path = daemon_->address();
  int held[2];
  ASSERT_EQ(::pipe(held), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgroups(0, nullptr) != 0 || ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) {
      ::_exit(100);
    }
    for (int i = 0; i < 200; ++i) {
      if (Connect(path, SOCK_STREAM) < 0 || Connect(path + ".attach", SOCK_SEQPACKET) < 0 ||
          Connect(path + ".admin", SOCK_STREAM) < 0) {
        ::_exit(1);
      }
    }
    [[maybe_unused]] const ssize_t told = ::write(held[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  ::close(held[1]);
  char byte = 0;
  EXPECT_EQ(::read(held[0], &byte, 1), 1) << "it could not connect";
  Train();
  EXPECT_EQ(DaemonStatus(path).Get().job().last_committed_step(), 1);
  ::close(held[0]);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace dmuond::testing
