// The peer group over NCCL, on its fake: every member is a process with a GPU of its own.
#include "server/lane/nccl_group.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "server/lane/nccl_library.h"
#include "server/lane/rail_stamp.h"
#include "tests/fake_cuda/driver/fake_cuda.h"
#include "tests/fake_cuda/fake_machine.h"

#if __has_include(<nccl.h>)
#include <nccl.h>
#endif

namespace dmuond::server::lane {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kPatience{20};
constexpr size_t kBytes = 1 << 20;

#ifdef NCCL_VERSION_CODE
// What is declared here is what NCCL has.
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, nvlink_centric_sched) ==
              offsetof(ncclConfig_t, nvlinkCentricSched));
static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(static_cast<int>(NcclResult::kInProgress) == ncclInProgress);
static_assert(static_cast<int>(NcclType::kUint8) == ncclUint8);
static_assert(static_cast<int>(NcclType::kFloat32) == ncclFloat32);
static_assert(static_cast<int>(NcclOp::kSum) == ncclSum);
#endif

// One member, in its own process. What fails there ends it with 1.
class Member {
 public:
  // `line`: to the test.
  Member(int rank, int size, int line) : rank_(rank), size_(size), line_(line) {}

  void Make(int device_number) {
    device_ = *Must(kernels::cuda::CudaDevice::Create(device_number));
    stream_ = *Must(device_->CreateStream());
    MakeGroup();
    memory_ = *Must(device_->AllocateScratch(4 * kBytes));
  }
  absl::Status Connect() {
    Say(group_->blob());
    std::vector<std::string> blobs(size_);
    for (std::string& blob : blobs) blob = Hear();
    if (absl::Status begun = group_->Connect(blobs); !begun.ok()) return begun;
    return WaitFor([&] { return group_->Ready(); });
  }
  void MakeGroup() {
    group_ = *Must(MakeNcclGroup({.rank = rank_,
                                  .size = size_,
                                  .device = device_.get(),
                                  .stream = stream_.get(),
                                  .notify = [] {}}));
  }
  void MakeAndConnect() {
    Make(rank_);
    MustBeOk(Connect());
  }

  // By quarter of the member's memory.
  [[nodiscard]] std::byte* At(int quarter) const { return memory_->data() + quarter * kBytes; }
  // What the device has there. Nothing may be under way.
  [[nodiscard]] std::byte* Seen(int quarter) const {
    return static_cast<std::byte*>(fakeCudaAlias(At(quarter)));
  }
  void Fill(int quarter, int value, size_t bytes = kBytes) const {
    std::memset(Seen(quarter), value, bytes);
  }
  void MustHave(int quarter, int value, size_t bytes = kBytes) const {
    for (size_t i = 0; i < bytes; ++i) {
      if (Seen(quarter)[i] != std::byte(value)) Die("quarter ", quarter, " at byte ", i);
    }
  }
  PeerGroup::Message To(int peer, int quarter, size_t bytes = kBytes) const {
    return {true, peer, At(quarter), bytes};
  }
  PeerGroup::Message From(int peer, int quarter, size_t bytes = kBytes) const {
    return {false, peer, At(quarter), bytes};
  }
  absl::StatusOr<int64_t> Start(uint64_t tag, std::vector<PeerGroup::Message> messages) {
    return group_->Start(tag, messages);
  }
  absl::Status Finish(const absl::StatusOr<int64_t>& ticket) {
    if (!ticket.ok()) return ticket.status();
    return WaitFor([&] { return group_->Done(*ticket); });
  }
  template <typename Ask>
  absl::Status WaitFor(Ask ask, std::chrono::milliseconds patience = kPatience) {
    const Clock::time_point deadline = Clock::now() + patience;
    while (Clock::now() < deadline) {
      const Clock::time_point before = Clock::now();
      const absl::StatusOr<bool> answer = ask();
      if (Clock::now() - before > std::chrono::seconds(1)) Die("a call has blocked");
      if (!answer.ok()) return answer.status();
      if (*answer) return absl::OkStatus();
      ::usleep(50);
    }
    return absl::DeadlineExceededError("it has not come");
  }

  // The test and the member: a word in each direction.
  void Say(const std::string& text) const {
    const auto size = static_cast<uint32_t>(text.size());
    if (::write(line_, &size, sizeof(size)) < 0 || ::write(line_, text.data(), size) < 0)
      ::_exit(3);
  }
  std::string Hear() const {  // NOLINT(modernize-use-nodiscard)
    uint32_t size = 0;
    if (::recv(line_, &size, sizeof(size), MSG_WAITALL) != sizeof(size)) ::_exit(3);
    std::string text(size, '\0');
    if (size > 0 && ::recv(line_, text.data(), size, MSG_WAITALL) != size) ::_exit(3);
    return text;
  }
  // All members have come so far.
  void Meet() const {
    Say("");
    static_cast<void>(Hear());
  }

  template <typename... Words>
  [[noreturn]] void Die(Words... words) const {
    std::cerr << "member " << rank_ << ": ";
    (std::cerr << ... << words) << std::endl;
    ::_exit(1);
  }
  void MustBeOk(const absl::Status& status) const {
    if (!status.ok()) Die(status);
  }
  template <typename T>
  absl::StatusOr<T> Must(absl::StatusOr<T> value) const {
    MustBeOk(value.status());
    return value;
  }
  void MustSay(const absl::Status& status, absl::StatusCode code,
               const std::vector<std::string>& words) const {
    if (status.code() != code) Die(status);
    for (const std::string& word : words) {
      if (status.message().find(word) == absl::string_view::npos) {
        Die("no '", word, "' in: ", status);
      }
    }
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] PeerGroup& group() { return *group_; }
  void End() { group_.reset(); }

 private:
  const int rank_;
  const int size_;
  const int line_;
  std::unique_ptr<kernels::cuda::CudaDevice> device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<kernels::Mapping> memory_;
  std::unique_ptr<PeerGroup> group_;
};

// The test's process has no driver: members are forked from it.
class NcclGroupTest : public ::testing::Test {
 protected:
  using Work = std::function<void(Member&)>;

  ~NcclGroupTest() override {
    for (const Process& member : members_) {
      if (member.pid > 0) ::kill(member.pid, SIGKILL);
      if (member.pid > 0) ::waitpid(member.pid, nullptr, 0);
      ::close(member.line);
    }
  }
  void StartMembers(int size, const Work& work) {
    for (int rank = 0; rank < size; ++rank) {
      int ends[2];
      ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
      const pid_t pid = ::fork();
      if (pid == 0) {
        Member member(rank, size, ends[1]);
        work(member);
        member.End();
        ::_exit(0);
      }
      ::close(ends[1]);
      members_.push_back({pid, ends[0]});
    }
  }
  // Every member's blob, to every member.
  void Rendezvous() {
    std::vector<std::string> blobs;
    for (const Process& member : members_) blobs.push_back(Hear(member));
    for (const Process& member : members_) {
      for (const std::string& blob : blobs) Say(member, blob);
    }
  }
  // All that live have met, and go on.
  void Meet() {
    WaitForAll();
    LetGo();
  }
  void WaitForAll() {
    for (const Process& member : members_) {
      if (member.pid > 0) Hear(member);
    }
  }
  void WaitFor(int rank) { Hear(members_[rank]); }
  void LetGo(int rank) { Say(members_[rank], ""); }
  void LetGo() {
    for (const Process& member : members_) {
      if (member.pid > 0) Say(member, "");
    }
  }
  void Signal(int rank, int signal) {
    ::kill(members_[rank].pid, signal);
    // Its threads stop one after the other.
    int status = 0;
    if (signal == SIGSTOP) ::waitpid(members_[rank].pid, &status, WUNTRACED);
  }
  void Kill(int rank) {
    Signal(rank, SIGKILL);
    int status = 0;
    ::waitpid(std::exchange(members_[rank].pid, 0), &status, 0);
  }
  // They end by themselves, and well.
  void ExpectEnd() {
    for (size_t rank = 0; rank < members_.size(); ++rank) {
      if (members_[rank].pid == 0) continue;
      int status = -1;
      const Clock::time_point deadline = Clock::now() + kPatience + kPatience;
      while (::waitpid(members_[rank].pid, &status, WNOHANG) == 0 && Clock::now() < deadline) {
        ::usleep(1000);
      }
      if (Clock::now() < deadline) members_[rank].pid = 0;
      EXPECT_EQ(status, 0) << "member " << rank;
    }
  }
  // Connected members work, and meet so often on their way.
  void Run(int size, int meetings, const Work& work) {
    StartMembers(size, [&](Member& member) {
      member.MakeAndConnect();
      work(member);
    });
    Rendezvous();
    for (int i = 0; i < meetings; ++i) Meet();
    ExpectEnd();
    Forget();
  }
  void Forget() {
    for (const Process& member : members_) ::close(member.line);
    members_.clear();
  }

  testing::FakeMachine machine_{4};

 private:
  struct Process {
    pid_t pid = 0;  // 0: it has ended
    int line = -1;
  };
  static void Say(const Process& member, const std::string& text) {
    const auto size = static_cast<uint32_t>(text.size());
    std::string frame(reinterpret_cast<const char*>(&size), sizeof(size));
    frame += text;
    EXPECT_EQ(::send(member.line, frame.data(), frame.size(), MSG_NOSIGNAL), frame.size());
  }
  static std::string Hear(const Process& member) {
    uint32_t size = 0;
    std::string text;
    if (::recv(member.line, &size, sizeof(size), MSG_WAITALL) == sizeof(size)) {
      text.resize(size);
      if (size > 0) size -= ::recv(member.line, text.data(), size, MSG_WAITALL);
      EXPECT_EQ(size, 0);
    }
    return text;
  }

  std::vector<Process> members_;
};

TEST_F(NcclGroupTest, BytesArriveWhereTheyBelong) {
  for (const char* in_progress : {"0", "1", "20"}) {
    machine_.Set("FAKE_NCCL_IN_PROGRESS", in_progress);
    Run(3, 4, [](Member& member) {
      for (int round = 1; round <= 4; ++round) {
        member.Fill(0, 16 * round + member.rank());
        std::vector<PeerGroup::Message> messages;
        for (int peer = 0; peer < 3; ++peer) {
          if (peer == member.rank()) continue;
          messages.push_back(member.To(peer, 0));
          messages.push_back(member.From(peer, 1 + peer));
        }
        member.MustBeOk(member.Finish(member.Start(round, messages)));
        for (int peer = 0; peer < 3; ++peer) {
          if (peer != member.rank()) member.MustHave(1 + peer, 16 * round + peer);
        }
        member.Meet();
      }
    });
  }
}

TEST_F(NcclGroupTest, GroupsFollowEachOtherWithoutWaiting) {
  Run(2, 1, [](Member& member) {
    constexpr int kGroups = 40;
    constexpr size_t kPart = kBytes / kGroups;
    const int peer = 1 - member.rank();
    for (int i = 0; i < kGroups; ++i) std::memset(member.Seen(0) + i * kPart, i, kPart);
    std::vector<int64_t> tickets;
    for (int i = 0; i < kGroups; ++i) {
      // Each in one direction, some of nothing at all.
      const bool send = (i % 2 == 0) == (member.rank() == 0);
      const PeerGroup::Message message{send, peer, member.At(send ? 0 : 1) + i * kPart, kPart};
      tickets.push_back(*member.Must(member.Start(
          100 + i, i % 5 == 4 ? std::vector<PeerGroup::Message>{} : std::vector{message})));
    }
    member.MustBeOk(member.Finish(tickets.back()));
    for (const int64_t ticket : tickets) {
      if (!*member.group().Done(ticket)) member.Die("ticket ", ticket);
    }
    if (member.group().needs_polls()) member.Die("nothing is under way");
    for (int i = 0; i < kGroups; ++i) {
      const bool received = (i % 2 == 0) == (member.rank() == 1) && i % 5 != 4;
      const std::byte* const part = member.Seen(1) + i * kPart;
      if (received && (part[0] != std::byte(i) || part[kPart - 1] != std::byte(i))) {
        member.Die("group ", i);
      }
    }
    member.Meet();
  });
}

TEST_F(NcclGroupTest, ReduceAddsUpAllMembersAtItsRootAndBroadcastBringsItBack) {
  Run(3, 1, [](Member& member) {
    constexpr size_t kCount = 1000;
    constexpr int kRoot = 1;
    auto* const values = reinterpret_cast<float*>(member.Seen(0));
    for (size_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(1000 * member.rank() + i);
    const std::span<float> in(reinterpret_cast<float*>(member.At(0)), kCount);
    const std::span<float> out(reinterpret_cast<float*>(member.At(1)), kCount);
    member.MustBeOk(member.Finish(
        member.group().Reduce(7, in, member.rank() == kRoot ? out : std::span<float>(), kRoot)));
    member.MustBeOk(member.Finish(member.group().Broadcast(8, {member.At(1), 4 * kCount}, kRoot)));
    const auto* const sums = reinterpret_cast<const float*>(member.Seen(1));
    for (size_t i = 0; i < kCount; ++i) {
      if (sums[i] != static_cast<float>(3000 + 3 * i)) member.Die("sum ", i, " is ", sums[i]);
    }
    member.Meet();
  });
}

TEST_F(NcclGroupTest, AnotherOrderIsSeenByEveryMember) {
  Run(2, 1, [](Member& member) {
    const int peer = 1 - member.rank();
    const auto start = [&](uint64_t tag) {
      return member.Start(tag, {member.To(peer, 0), member.From(peer, 1)});
    };
    const auto first = start(member.rank() == 0 ? 0x11 : 0x22);
    const auto second = start(member.rank() == 0 ? 0x22 : 0x11);
    member.MustSay(member.Finish(first), absl::StatusCode::kInternal,
                   {"members", "tag 0x11", "tag 0x22", "1048576 bytes"});
    if (member.Finish(second).ok()) member.Die("the group goes on");
    member.Meet();
  });
}

TEST_F(NcclGroupTest, OtherSizesAreSeenThoughTheGroupNeverEnds) {
  machine_.Set("FAKE_NCCL_MISMATCH", "hang");
  Run(2, 1, [](Member& member) {
    const int peer = 1 - member.rank();
    const size_t bytes = member.rank() == 0 ? 1000 : 2000;
    const auto ticket = member.Start(5, {member.To(peer, 0, bytes), member.From(peer, 1, bytes)});
    member.MustSay(member.Finish(ticket), absl::StatusCode::kInternal,
                   {"sends 1000 bytes and receives 1000", "sends 2000 bytes and receives 2000"});
    member.Meet();
  });
}

TEST_F(NcclGroupTest, AMissingMessageIsSeenWithTheNextGroup) {
  machine_.Set("FAKE_NCCL_MISMATCH", "hang");
  Run(2, 1, [](Member& member) {
    const int peer = 1 - member.rank();
    if (member.rank() == 0) member.MustBeOk(member.Start(6, {member.To(peer, 0, 64)}).status());
    const auto ticket = member.Start(7, {member.To(peer, 0), member.From(peer, 1)});
    member.MustSay(member.Finish(ticket), absl::StatusCode::kInternal, {"tag 0x6", "tag 0x7"});
    member.Meet();
  });
}

TEST_F(NcclGroupTest, NothingIsHeardOfADeadPeerUntilTheGroupIsAborted) {
  machine_.Set("FAKE_NCCL_ABORT_MS", "3600000");  // a group's end does not wait for it
  StartMembers(3, [](Member& member) {
    member.MakeAndConnect();
    member.Meet();
    if (member.rank() == 2) ::pause();
    member.Hear();  // it is dead
    const auto among_the_living =
        member.Start(1, {member.rank() == 0 ? member.To(1, 0) : member.From(0, 0)});
    member.MustBeOk(member.Finish(among_the_living));
    const auto ticket = member.Start(2, {member.To(2, 0), member.From(2, 1)});
    const auto done = [&] { return member.group().Done(*ticket); };
    member.MustSay(member.WaitFor(done, std::chrono::milliseconds(300)),
                   absl::StatusCode::kDeadlineExceeded, {});
    if (!member.group().needs_polls()) member.Die("nothing is under way");
    member.group().Abort();
    if (member.group().needs_polls()) member.Die("something is under way");
    member.MustSay(done().status(), absl::StatusCode::kAborted, {"ended by this member"});
    member.MustSay(member.Start(3, {}).status(), absl::StatusCode::kAborted, {});
    if (!*member.group().Done(*among_the_living)) member.Die("it was through");
    member.End();
  });
  Rendezvous();
  Meet();
  Kill(2);
  LetGo();
  ExpectEnd();
}

TEST_F(NcclGroupTest, OneCommunicatorAtATimeEndsBehindTheLanesBack) {
  StartMembers(2, [](Member& member) {
    ::setenv("FAKE_NCCL_ABORT_MS", "3600000", 1);
    member.MakeAndConnect();
    member.End();
    ::setenv("FAKE_NCCL_ABORT_MS", "300", 1);
    member.MakeGroup();
    member.MustBeOk(member.Connect());
    const auto begin = std::chrono::steady_clock::now();
    member.End();
    const auto took = std::chrono::steady_clock::now() - begin;
    if (took < std::chrono::milliseconds(300)) member.Die("the second was not waited for");
  });
  Rendezvous();
  Rendezvous();
  ExpectEnd();
}

TEST_F(NcclGroupTest, AStoppedPeerIsWaitedFor) {
  StartMembers(2, [](Member& member) {
    member.MakeAndConnect();
    member.Meet();
    const int peer = 1 - member.rank();
    if (member.rank() == 0) member.Hear();  // the other is stopped
    const auto ticket = member.Start(2, {member.To(peer, 0), member.From(peer, 1)});
    const auto done = [&] { return member.group().Done(*ticket); };
    if (member.rank() == 0) {
      member.MustSay(member.WaitFor(done, std::chrono::milliseconds(300)),
                     absl::StatusCode::kDeadlineExceeded, {});
      member.Say("");
    }
    member.MustBeOk(member.WaitFor(done));
    member.Meet();
  });
  Rendezvous();
  WaitForAll();
  Signal(1, SIGSTOP);
  LetGo();
  LetGo(0);
  WaitFor(0);
  Signal(1, SIGCONT);
  Meet();
  ExpectEnd();
}

TEST_F(NcclGroupTest, APeerThatNeverComesIsWaitedForUntilTheGroupEnds) {
  StartMembers(3, [](Member& member) {
    member.Make(member.rank());
    member.Say(member.group().blob());
    std::vector<std::string> blobs(3);
    for (std::string& blob : blobs) blob = member.Hear();
    if (member.rank() == 0) ::pause();
    member.Hear();  // it is dead
    member.MustBeOk(member.group().Connect(blobs));
    member.MustSay(
        member.WaitFor([&] { return member.group().Ready(); }, std::chrono::milliseconds(300)),
        absl::StatusCode::kDeadlineExceeded, {});
    if (!member.group().needs_polls()) member.Die("nothing is under way");
  });
  Rendezvous();
  Kill(0);
  LetGo();
  ExpectEnd();
}

TEST_F(NcclGroupTest, MembersNeedTheSameLibrary) {
  StartMembers(2, [](Member& member) {
    if (member.rank() == 1) ::setenv("FAKE_NCCL_VERSION", "22907", 1);
    member.Make(member.rank());
    member.MustSay(member.Connect(), absl::StatusCode::kFailedPrecondition,
                   {"2.28.9", "2.29.7", "member 0", "member 1"});
  });
  Rendezvous();
  ExpectEnd();
}

TEST_F(NcclGroupTest, OneGpuIsNotTwoMembers) {
  StartMembers(2, [](Member& member) {
    member.Make(3);
    member.MustSay(member.Connect(), absl::StatusCode::kAborted, {"Duplicate GPU"});
  });
  Rendezvous();
  ExpectEnd();
}

TEST_F(NcclGroupTest, WhatCannotBeIsRefusedByName) {
  Run(2, 1, [](Member& member) {
    const auto refused = [&](const absl::Status& status, const char* word) {
      member.MustSay(status, absl::StatusCode::kInvalidArgument, {word});
    };
    refused(member.Start(1, {member.To(member.rank(), 0)}).status(), "message for member");
    refused(member.Start(1, {member.To(2, 0)}).status(), "message for member 2");
    std::vector<float> values(4);
    refused(member.group().Reduce(1, values, values, 2).status(), "root 2");
    refused(member.group().Reduce(1, values, {}, member.rank()).status(), "4 values");
    refused(member.group().Broadcast(1, {}, -1).status(), "root -1");
    refused(member.group().Connect({"", ""}), "not NCCL's");
    refused(member.group().Connect({}), "got 0");
    member.Meet();
  });
}

TEST(NcclLibraryTest, AMissingOrOldOneIsNamedWithWhatToInstall) {
  const auto missing = Nccl::Load("libnccl-that-is-not-there.so.2");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(missing.status().message()),
              AllOf(HasSubstr("libnccl-that-is-not-there.so.2"), HasSubstr("install libnccl2"),
                    HasSubstr("nvidia-nccl-cu13"), HasSubstr("LD_LIBRARY_PATH")));
  testing::Environment old;
  old.Set("FAKE_NCCL_VERSION", "21805");
  EXPECT_THAT(std::string(Nccl::Load().status().message()),
              AllOf(HasSubstr("is NCCL 2.18.5"), HasSubstr("needs NCCL 2.28")));
  // One that says no version is something else.
  EXPECT_THAT(std::string(Nccl::Load("libcuda.so.1").status().message()),
              HasSubstr("does not say its version"));
}

TEST(RailStampTest, AnswersWhatMirrorsIt) {
  alignas(8) std::byte place[RailStamp::kPlaceBytes] = {};
  EXPECT_FALSE(RailStamp::ReadFrom(place).has_value());
  RailStamp own(3, 1);
  own.AddSent(100);
  own.AddSent(50);
  own.AddReceived(7);
  RailStamp peer(3, 1);
  peer.AddSent(7);
  peer.AddReceived(100);
  peer.AddReceived(50);
  peer.WriteTo(place);
  EXPECT_TRUE(RailStamp::ReadFrom(place)->Answers(own));
  RailStamp swapped(3, 1);
  swapped.AddSent(7);
  swapped.AddReceived(50);
  swapped.AddReceived(100);
  EXPECT_FALSE(swapped.Answers(own));
  EXPECT_FALSE(own.Answers(own));
  for (size_t byte = 0; byte < 7 * sizeof(uint64_t); ++byte) {
    place[byte] ^= std::byte{1};
    EXPECT_FALSE(RailStamp::ReadFrom(place).has_value()) << "byte " << byte;
    place[byte] ^= std::byte{1};
  }
}

}  // namespace
}  // namespace dmuond::server::lane
