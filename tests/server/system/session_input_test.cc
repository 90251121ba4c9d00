// Sessions and buffers that cannot be, against a real daemon on which another session goes on: rows
// of the table "what bad input gets" (layout_input_test.cc says where the others are).
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_test.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond::testing {
namespace {

using absl::StatusCode;
using Stub = RawTrainer::Stub;

constexpr char kToken[] = "correct horse";
constexpr int64_t kHugeExtent = int64_t{1} << 14;  // squared: 1 GiB of fp32
constexpr int64_t kResidentSlackKib = 64 << 10;    // far less; what gRPC and sanitizers take

int64_t PeakResidentKib(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6));
  }
  ADD_FAILURE() << "no process " << pid;
  return 0;
}

// A trainer of rank 0 in a world of two that rank 1 of the tests disturbs. Both train at the end.
class SessionInputTest : public DaemonTest {
 protected:
  void SetUp() override {
    token_file_ =
        std::filesystem::temp_directory_path() / ("dmuond-token-" + std::to_string(::getpid()));
    std::ofstream(token_file_) << kToken << "\n";
    std::filesystem::permissions(token_file_, std::filesystem::perms::owner_read);
    std::vector<std::string> flags = {"--token_file=" + token_file_.string(), "--jobs_max=1"};
    flags.insert(flags.end(), more_flags_.begin(), more_flags_.end());
    ASSERT_NO_FATAL_FAILURE(StartDaemon({.flags = flags}));
    first_ = Trainer();
    ASSERT_TRUE(OpenWithToken(*first_, 0).ok());
  }
  void TearDown() override {
    std::filesystem::remove(token_file_);
    DaemonTest::TearDown();
  }

  std::unique_ptr<RawTrainer> Trainer() { return std::make_unique<RawTrainer>(daemon_->address()); }
  static v1::OpenSessionRequest Request(const RawTrainer& trainer, int32_t rank) {
    v1::OpenSessionRequest request = trainer.OpenRequest(rank, 2);
    request.set_token(kToken);
    return request;
  }
  static absl::Status Open(RawTrainer& trainer, const v1::OpenSessionRequest& request) {
    v1::OpenSessionReply reply;
    absl::Status status = trainer.Call(&Stub::OpenSession, request, &reply);
    trainer.key().set_session(reply.session());
    trainer.key().set_incarnation(reply.incarnation());
    trainer.key().set_secret(reply.secret());
    return status;
  }
  absl::Status OpenWithToken(RawTrainer& trainer, int32_t rank) {
    return Open(trainer, Request(trainer, rank));
  }
  // A call that is repeated, because its answer was lost say, gets the same one.
  void ExpectNotOpened(const std::function<void(v1::OpenSessionRequest&)>& change,
                       const Refusal& refusal) {
    const auto bad = Trainer();
    v1::OpenSessionRequest request = Request(*bad, 1);
    change(request);
    ExpectRefused(Open(*bad, request), refusal);
    ExpectRefused(Open(*bad, request), refusal);
  }
  static v1::StateChunk Chunk(int64_t first, int64_t elements) {
    v1::StateChunk chunk;
    chunk.set_parameter("matrix");
    chunk.set_kind(v1::STATE_KIND_MASTER);
    chunk.set_first_element(first);
    chunk.set_data(std::string(elements * sizeof(float), 0));
    return chunk;
  }
  // Returns what a load_state_dict of these chunks gets.
  static absl::Status PushState(RawTrainer& trainer, const std::vector<v1::StateChunk>& chunks) {
    grpc::ClientContext context;
    v1::PushParametersReply reply;
    const auto writer = trainer.stub().PushParameters(&context, &reply);
    v1::PushParametersRequest message;
    *message.mutable_key() = trainer.key();
    message.set_state(true);
    message.set_step(2);
    bool heard = writer->Write(message);
    message.Clear();
    for (const v1::StateChunk& chunk : chunks) {
      message.clear_chunks();
      *message.add_chunks() = chunk;
      heard = heard && writer->Write(message);  // a refusal may come before the last one
    }
    writer->WritesDone();
    return server::FromGrpc(writer->Finish());
  }
  // Both ranks train two steps; nothing of the above is left.
  void BothTrain() {
    const auto second = Trainer();
    ASSERT_TRUE(OpenWithToken(*second, 1).ok());
    BothTrain(*first_, *second);
  }
  static void BothTrain(RawTrainer& a, RawTrainer& b) {
    std::thread other([&] { Train(b); });
    Train(a);
    other.join();
  }
  static void Train(RawTrainer& trainer) {
    absl::Status status = trainer.Register();
    if (status.ok()) status = trainer.Attach();
    if (status.ok()) status = trainer.Push();
    for (int64_t step = 1; status.ok() && step <= 2; ++step) status = trainer.Step(step);
    EXPECT_TRUE(status.ok()) << status;
  }

  std::vector<std::string> more_flags_;
  std::filesystem::path token_file_;
  std::unique_ptr<RawTrainer> first_;
};

TEST_F(SessionInputTest, SessionsThatCannotBeAreRefusedAndTheOtherGoesOn) {
  ExpectNotOpened([](auto& request) { request.set_token("another job's"); },
                  {StatusCode::kPermissionDenied, "TOKEN_WRONG", {"rank 1", "'raw'"}});
  ExpectNotOpened([](auto& request) { request.clear_token(); },
                  {StatusCode::kPermissionDenied, "TOKEN_WRONG", {"rank 1"}});
  ExpectNotOpened([](auto& request) { request.set_job("../etc"); },
                  {StatusCode::kInvalidArgument, "JOB_NAME_INVALID", {"../etc"}});
  for (const char* name : {".", "..", ".hidden"}) {
    ExpectNotOpened([name](auto& request) { request.set_job(name); },
                    {StatusCode::kInvalidArgument, "JOB_NAME_INVALID", {name, "first"}});
  }
  ExpectNotOpened([](auto& request) { request.set_job(std::string(1 << 20, 'j')); },
                  {StatusCode::kInvalidArgument, "JOB_NAME_INVALID", {"job", "1048576", "128"}});
  ExpectNotOpened([](auto& request) { request.set_client(std::string(1 << 20, 'c')); },
                  {StatusCode::kInvalidArgument, "STRING_TOO_LONG", {"client", "1048576", "256"}});
  ExpectNotOpened([](auto& request) { request.set_launch(std::string(129, 'l')); },
                  {StatusCode::kInvalidArgument, "STRING_TOO_LONG", {"launch", "129", "128"}});
  ExpectNotOpened([](auto& request) { request.set_rank(2); },
                  {StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE", {"rank 2", "world of 2"}});
  ExpectNotOpened([](auto& request) { request.set_rank(-1); },
                  {StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE", {"rank -1"}});
  ExpectNotOpened([](auto& request) { request.set_device_uuid("GPU-1"); },
                  {StatusCode::kInvalidArgument, "DEVICE_UNKNOWN", {"rank 1", "GPU-1", "CPU"}});
  ExpectNotOpened([](auto& request) { request.set_home_lane(7); },
                  {StatusCode::kInvalidArgument, "LANE_OUT_OF_RANGE", {"rank 1", "7", "0 to 0"}});
  ExpectNotOpened([](auto& request) { request.set_world_size(3); },
                  {StatusCode::kFailedPrecondition,
                   "WORLD_DIFFERS",
                   {"'raw'", "world_size 2", "rank 1", "says 3"}});
  ExpectNotOpened([](auto& request) { request.set_rank(0); },
                  {StatusCode::kAlreadyExists, "RANK_TWICE", {"rank 0", "'raw'", "pid"}});
  ExpectNotOpened([](auto& request) { request.set_job("other"); },
                  {StatusCode::kFailedPrecondition, "OTHER_JOB", {"'raw'", "'other'"}});
  ExpectNotOpened([](auto& request) { request.set_resume(v1::OpenSessionRequest::RESUME_REQUIRE); },
                  {StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE", {"'raw'"}});
  ExpectNotOpened(
      [](auto& request) { request.set_resume(static_cast<v1::OpenSessionRequest::Resume>(9)); },
      {StatusCode::kInvalidArgument, "RESUME_INVALID", {"rank 1", "'raw'", "9"}});
  ExpectNotOpened([](auto& request) { request.set_resume(v1::OpenSessionRequest::RESUME_DISCARD); },
                  {StatusCode::kInvalidArgument, "LAUNCH_INVALID", {"rank 1", "DMUOND_LAUNCH"}});
  ExpectNotOpened(
      [](auto& request) {
        request.set_resume(v1::OpenSessionRequest::RESUME_DISCARD);
        request.set_launch("second");
      },
      {StatusCode::kFailedPrecondition,
       "JOB_IN_USE",
       {"rank 1", "rank 0", "pid", "dmuonctl job end raw"}});
  BothTrain();
}

TEST_F(SessionInputTest, NoncesOfNobodyAndKeysOfOthersAreRefused) {
  const auto stranger = Trainer();
  v1::OpenSessionRequest request = Request(*stranger, 1);
  request.set_nonce("0123456789abcdef");
  ExpectRefused(Open(*stranger, request), {StatusCode::kUnauthenticated, "NONCE_UNKNOWN", {}});
  // The nonce of a session that is open opens no other one.
  v1::OpenSessionRequest stolen = Request(*first_, 1);
  ExpectRefused(Open(*stranger, stolen), {StatusCode::kUnauthenticated, "NONCE_UNKNOWN", {}});

  v1::RegisterLayoutRequest layout = stranger->LayoutRequest();
  v1::RegisterLayoutReply reply;
  const uint64_t nobodys = first_->key().session() + 1000;
  layout.mutable_key()->set_session(nobodys);
  ExpectRefused(
      stranger->Call(layout, &reply),
      {StatusCode::kFailedPrecondition, "INCARNATION_OLD", {absl::StrCat("session ", nobodys)}});
  *layout.mutable_key() = first_->key();
  layout.mutable_key()->set_incarnation(first_->key().incarnation() - 1);
  ExpectRefused(stranger->Call(layout, &reply), {StatusCode::kFailedPrecondition,
                                                 "INCARNATION_OLD",
                                                 {"rank 0", "incarnation 1", "carries 0"}});
  v1::HelloRequest hello;
  v1::HelloReply answer;
  hello.set_version_min(1);
  hello.set_version_max(1);
  ExpectRefused(stranger->Call(&Stub::Hello, hello, &answer),
                {StatusCode::kFailedPrecondition,
                 "VERSION_MISMATCH",
                 {"1 to 1", "speaks 2", "update the client"}});
  hello.set_version_min(7);
  hello.set_version_max(9);
  ExpectRefused(stranger->Call(&Stub::Hello, hello, &answer),
                {StatusCode::kFailedPrecondition,
                 "VERSION_MISMATCH",
                 {"7 to 9", "speaks 2", "update the daemon"}});
  BothTrain();
}

// Before, keys were sequential numbers, and who could count could close another's session.
TEST_F(SessionInputTest, TheNumberOfAnothersSessionWithoutItsSecretIsAsGoodAsNone) {
  const auto second = Trainer();
  ASSERT_TRUE(OpenWithToken(*second, 1).ok());
  const v1::SessionKey own = second->key();
  EXPECT_NE(own.session(), first_->key().session() + 1);
  for (const uint64_t secret : {uint64_t{0}, own.secret(), first_->key().secret() ^ 1}) {
    second->key() = first_->key();
    second->key().set_secret(secret);
    const Refusal unknown = {StatusCode::kFailedPrecondition,
                             "INCARNATION_OLD",
                             {absl::StrCat("session ", first_->key().session(), " is not open")}};
    ExpectRefused(second->Close(), unknown);
    ExpectRefused(second->Register(), unknown);
    ExpectRefused(PushState(*second, {}), unknown);
  }
  second->key() = own;
  BothTrain(*first_, *second);
  // Nor does the answer to who has closed go to anybody else.
  const v1::SessionKey firsts = first_->key();
  ASSERT_TRUE(first_->Close().ok());
  second->key() = firsts;
  second->key().set_secret(own.secret());
  ExpectRefused(second->Close(), {StatusCode::kFailedPrecondition, "INCARNATION_OLD", {}});
}

TEST_F(SessionInputTest, AClientsNameCommandsNoTerminalAndMakesNoLineOfTheLog) {
  const auto second = Trainer();
  v1::OpenSessionRequest request = Request(*second, 1);
  request.set_client("\x1b[2J\nlevel=error");
  ASSERT_TRUE(Open(*second, request).ok());
  ExpectNotOpened([](auto&) {}, {StatusCode::kAlreadyExists, "RANK_TWICE", {"b[2J\\nlevel=error"}});
  EXPECT_TRUE(daemon_->WaitLogged(R"(client="\u001b[2J\nlevel=error")")) << daemon_->Log();
  BothTrain(*first_, *second);
}

TEST_F(SessionInputTest, BuffersThatCannotBeAreRefusedAndRightOnesAreTakenAfterwards) {
  const auto second = Trainer();
  ASSERT_TRUE(OpenWithToken(*second, 1).ok());
  v1::AttachBuffersReply reply;
  ExpectRefused(second->Call(&Stub::AttachBuffers, second->AttachRequest(), &reply),
                {StatusCode::kFailedPrecondition, "LAYOUT_MISSING", {"rank 1"}});
  std::thread other([this] { EXPECT_TRUE(first_->Register().ok()); });
  ASSERT_TRUE(second->Register().ok());
  other.join();

  const auto expect = [&](const std::function<void(v1::AttachBuffersRequest&)>& change,
                          const Refusal& refusal) {
    v1::AttachBuffersRequest request = second->AttachRequest();
    change(request);
    ExpectRefused(second->Call(&Stub::AttachBuffers, request, &reply), refusal);
    EXPECT_FALSE(second->HasFrame()) << "memory was handed out";
  };
  const auto code = StatusCode::kInvalidArgument;
  expect([](auto& request) { request.mutable_arenas(1)->set_size_bytes(511); },
         {code, "ARENA_TOO_SMALL", {"weight", "'matrix'", "rank 1", "512", "arena 2", "511"}});
  expect([](auto& request) { request.mutable_arenas(0)->set_size_bytes(-1); },
         {code, "ARENA_INVALID", {"arena 1", "rank 1", "-1"}});
  expect([](auto& request) { request.mutable_arenas()->RemoveLast(); },
         {code, "ARENA_INVALID", {"weight", "'matrix'", "rank 1", "arena 2"}});
  expect([](auto& request) { request.mutable_arenas(1)->set_id(1); },
         {code, "ARENA_INVALID", {"arena 1", "rank 1", "twice"}});
  expect([](auto& request) { request.mutable_arenas(0)->mutable_cuda_ipc()->set_handle("short"); },
         {code, "ARENA_INVALID", {"arena 1", "rank 1", "64 bytes", "5"}});
  expect(
      [](auto& request) {
        request.mutable_arenas(0)->mutable_cuda_ipc()->set_handle(std::string(64, 'x'));
      },
      {code, "ARENA_INVALID", {"arena 1", "rank 1", "CPU"}});
  expect(
      [](auto& request) {
        while (request.arenas_size() < 65) {
          v1::Arena& arena = *request.add_arenas();
          arena = request.arenas(0);
          arena.set_id(request.arenas_size());
        }
      },
      {code, "ARENA_INVALID", {"rank 1", "65", "64"}});
  expect([](auto& request) { request.add_weight_digests("short"); },
         {code, "DIGEST_INVALID", {"rank 1", "fragment 0", "5 bytes", "16"}});
  expect(
      [](auto& request) {
        request.add_weight_digests();
        request.add_weight_digests();
      },
      {code, "DIGEST_INVALID", {"rank 1", "digests of 2 weights", "1 fragments"}});
  // More than any machine has, asked for after what fits: that one is given back.
  v1::AttachBuffersRequest huge = second->AttachRequest();
  huge.mutable_arenas(1)->set_size_bytes(int64_t{1} << 60);
  ExpectRefused(second->Call(&Stub::AttachBuffers, huge, &reply),
                {StatusCode::kResourceExhausted, "MEMORY_EXHAUSTED", {"1152921504606846976"}});
  BothTrain(*first_, *second);
}

TEST_F(SessionInputTest, BuffersMayBeAttachedAgainAlikeButNotOtherwise) {
  const auto second = Trainer();
  ASSERT_TRUE(OpenWithToken(*second, 1).ok());
  BothTrain(*first_, *second);
  v1::AttachBuffersReply reply;
  EXPECT_TRUE(second->Call(&Stub::AttachBuffers, second->AttachRequest(), &reply).ok());
  EXPECT_FALSE(second->HasFrame()) << "descriptors were sent again";
  v1::AttachBuffersRequest larger = second->AttachRequest();
  larger.mutable_arenas(0)->set_size_bytes(1 << 20);
  ExpectRefused(second->Call(&Stub::AttachBuffers, larger, &reply),
                {StatusCode::kFailedPrecondition, "ARENA_INVALID", {"rank 1"}});
}

// A rank whose partner is missing registers a huge matrix, and pushes its first element.
TEST_F(SessionInputTest, StatePushedBeforeBuffersAreThereIsRefusedAndTakesNoMemory) {
  auto alone = Trainer();
  ASSERT_TRUE(OpenWithToken(*alone, 1).ok());
  ExpectRefused(PushState(*alone, {}),
                {StatusCode::kFailedPrecondition, "BUFFERS_MISSING", {"rank 1"}});
  v1::RegisterLayoutRequest huge = alone->LayoutRequest();
  for (const int dimension : {0, 1}) {
    huge.mutable_parameters(0)->set_shape(dimension, kHugeExtent);
    huge.mutable_fragments(0)->mutable_box()->set_end(dimension, kHugeExtent);
  }
  for (v1::Slice* slice : {huge.mutable_fragments(0)->mutable_gradient(),
                           huge.mutable_fragments(0)->mutable_weight()}) {
    slice->set_strides(0, kHugeExtent);
  }
  grpc::ClientContext waits;  // for rank 0
  std::thread registering([&] {
    v1::RegisterLayoutReply reply;
    EXPECT_FALSE(wire::RegisterLayout(alone->stub(), &waits, huge, &reply).ok());
  });
  DaemonStatus status(daemon_->address());
  EXPECT_TRUE(status.WaitForTrainer(1, "registered"));
  const int64_t before = PeakResidentKib(daemon_->pid());
  ExpectRefused(PushState(*alone, {Chunk(0, 1)}),
                {StatusCode::kFailedPrecondition, "BUFFERS_MISSING", {"rank 1"}});
  EXPECT_LT(PeakResidentKib(daemon_->pid()), before + kResidentSlackKib);
  waits.TryCancel();
  registering.join();
  ASSERT_TRUE(alone->Close().ok());
  alone.reset();
  BothTrain();
}

TEST_F(SessionInputTest, ChunksOfStateThatCannotBeAreRefusedByName) {
  const auto second = Trainer();
  ASSERT_TRUE(OpenWithToken(*second, 1).ok());
  BothTrain(*first_, *second);
  const auto code = StatusCode::kInvalidArgument;
  ExpectRefused(PushState(*second, {Chunk(0, 64), Chunk(65, 1)}),
                {code, "STATE_INVALID", {"MASTER", "'matrix'", "rank 1", "element 65", "64 is"}});
  ExpectRefused(PushState(*second, {Chunk(0, 64), Chunk(0, 64)}),
                {code, "STATE_INVALID", {"'matrix'", "rank 1", "element 0", "64 is"}});
  ExpectRefused(PushState(*second, {Chunk(0, 129)}),
                {code, "STATE_INVALID", {"'matrix'", "rank 1", "516 bytes", "128 elements"}});
  ExpectRefused(PushState(*second, {Chunk(0, 64)}),
                {code, "STATE_INVALID", {"'matrix'", "rank 1", "256 of 512"}});
  v1::StateChunk other = Chunk(0, 128);
  other.set_kind(v1::STATE_KIND_EXP_AVG);
  ExpectRefused(PushState(*second, {other}),
                {code, "STATE_INVALID", {"EXP_AVG", "'matrix'", "rank 1", "route muon"}});
  other.set_kind(static_cast<v1::StateKind>(77));
  ExpectRefused(PushState(*second, {other}), {code, "STATE_INVALID", {"'matrix'", "rank 1"}});
  other.set_parameter("vector");
  ExpectRefused(PushState(*second, {other}), {code, "STATE_INVALID", {"'vector'", "rank 1"}});
  std::thread step([this] { EXPECT_TRUE(first_->Step(3).ok()); });
  EXPECT_TRUE(second->Step(3).ok());
  step.join();
}

// On the CPU all memory is the daemon's, sealed: it cannot vanish under a lane.
TEST_F(SessionInputTest, ATrainerCannotTakeItsMemoryAway) {
  const auto second = Trainer();
  ASSERT_TRUE(OpenWithToken(*second, 1).ok());
  BothTrain(*first_, *second);
  for (const int arena : {0, 1}) {
    EXPECT_EQ(::ftruncate(second->arena(arena).get(), 0), -1);
    EXPECT_EQ(errno, EPERM);
    EXPECT_EQ(::ftruncate(second->arena(arena).get(), 1 << 20), -1);
  }
  std::thread other([this] { EXPECT_TRUE(first_->Step(3).ok()); });
  EXPECT_TRUE(second->Step(3).ok());
  other.join();
}

// Rank 1 has left the job, rank 0 has not yet.
class ClosedSessionTest : public SessionInputTest {
 protected:
  ClosedSessionTest() { more_flags_ = {"--register_timeout=2s"}; }
  void SetUp() override {
    SessionInputTest::SetUp();
    const auto second = Trainer();
    ASSERT_TRUE(OpenWithToken(*second, 1).ok());
    BothTrain(*first_, *second);
    ASSERT_TRUE(second->Close().ok());
  }
};

TEST_F(ClosedSessionTest, TheNextJobOfAScriptWaitsUntilTheOthersHaveLeftTheLastOne) {
  const auto next = Trainer();
  absl::Status opened;
  std::thread opens([&] { opened = OpenWithToken(*next, 1); });
  ASSERT_TRUE(daemon_->WaitLogged("a trainer waits to begin")) << daemon_->Log();
  ASSERT_TRUE(first_->Close().ok());
  opens.join();
  EXPECT_TRUE(opened.ok()) << opened;
}

TEST_F(ClosedSessionTest, AFreshStartUnderTheNameOfAJobWithStateNamesItsStepAndChangesNothing) {
  const auto bad = Trainer();
  v1::OpenSessionRequest request = Request(*bad, 1);
  ExpectRefused(Open(*bad, request), {StatusCode::kFailedPrecondition,
                                      "JOB_HAS_STATE",
                                      {"'raw'", "step 2", "\"if_present\"", "DMUOND_RESUME=discard",
                                       "another job name"}});
  const auto other = Trainer();
  request = Request(*other, 1);
  request.set_resume(v1::OpenSessionRequest::RESUME_IF_PRESENT);
  ExpectRefused(Open(*other, request),
                {StatusCode::kUnavailable, "TRAINER_LOST", {"rank 1", "'raw'", "step 2"}});
  // The other one's optimizer state is still there, and its next step names who has left.
  grpc::ClientContext context;
  v1::PullParametersRequest pull;
  *pull.mutable_key() = first_->key();
  const auto reader = first_->stub().PullParameters(&context, pull);
  v1::PullParametersReply part;
  int parts = 0;
  while (reader->Read(&part)) {
    EXPECT_EQ(part.step(), 2);
    ++parts;
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_GT(parts, 0);
  v1::SubmitStepReply reply;
  const absl::Status status = first_->Submit(first_->SubmitRequest(3), &reply);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(reply.outcome().kind(), v1::Outcome::KIND_ABORTED);
  EXPECT_FALSE(reply.outcome().retry());
  EXPECT_THAT(reply.outcome().detail(), ::testing::HasSubstr("rank 1"));
}

}  // namespace
}  // namespace dmuond::testing
