// What `dmuonctl doctor` says of machines with GPUs, well and unwell: the real dmuonctl asks the
// real lane's program, which asks the fake driver.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "nlohmann/json.hpp"
#include "tests/client/daemon_process.h"
#include "tests/fake_cuda/fake_machine.h"
#include "tests/server/ctl/ctl_process.h"

namespace dmuond::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Said {
  std::string verdict;
  std::string detail;
  std::string remedy;
};

class GpuDoctorTest : public ::testing::Test {
 protected:
  GpuDoctorTest() {
    std::string directory = fs::temp_directory_path() / "dmuond-doctor-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
    machine_.Set("CUDA_MPS_PIPE_DIRECTORY", directory_);  // not this machine's
  }
  ~GpuDoctorTest() override { fs::remove_all(directory_); }

  // What it found, by name. It is asked where no daemon serves, unless `flags` name one.
  std::map<std::string, Said> Doctor(std::vector<std::string> flags = {}) {
    std::vector<std::string> arguments = {"doctor", "--json", "--address=" + directory_ + "/d.sock",
                                          FakeMachine::LaneFlag()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const CtlResult result = RunCtl(arguments);
    std::map<std::string, Said> found;
    for (const auto& finding : result.json()) {
      const Said said{finding["verdict"], finding["detail"], finding["remedy"]};
      EXPECT_EQ(said.remedy.empty(), said.verdict == "ok") << finding;
      EXPECT_TRUE(found.emplace(finding["what"], said).second) << finding;
    }
    return found;
  }
  // A lane's program that says this and no more.
  std::string LaneThatSays(const std::string& lines) {
    const std::string path = directory_ + "/lane";
    std::ofstream(path) << "#!/bin/sh\ncat <<END\n" << lines << "\nEND\n";
    EXPECT_EQ(::chmod(path.c_str(), 0700), 0);
    return "--lane_binary=" + path;
  }

  FakeMachine machine_{2};
  std::string directory_;
};

TEST_F(GpuDoctorTest, FindsAMachineWell) {
  auto found = Doctor();
  const std::string whose = "the environment is that of this command, for no daemon answers";
  EXPECT_THAT(found["CUDA driver"].detail, HasSubstr("speaks CUDA"));
  for (const int device : {0, 1}) {
    const Said& said = found["cuda:" + std::to_string(device)];
    EXPECT_EQ(said.verdict, "ok");
    EXPECT_THAT(said.detail,
                AllOf(HasSubstr("Fake GPU, " + FakeMachine::Uuid(device)),
                      HasSubstr("compute capability 9.0"), HasSubstr("of 4.0 GiB free")));
  }
  EXPECT_THAT(found["CUDA_VISIBLE_DEVICES"].detail,
              AllOf(HasSubstr("not set, shows 2"), HasSubstr(whose)));
  EXPECT_THAT(found["peer access"].detail, HasSubstr("each of the 2 reaches"));
  EXPECT_THAT(found["MPS"].detail,
              AllOf(HasSubstr("does not run, no control daemon in " + directory_),
                    HasSubstr("take turns")));
  EXPECT_THAT(found["NCCL"].detail, HasSubstr("version 2.28.9"));
  EXPECT_THAT(found["locked memory"].detail, HasSubstr("RLIMIT_MEMLOCK of this command"));
  EXPECT_THAT(found["/dev/shm"].detail, HasSubstr("free"));
  for (const char* what :
       {"CUDA driver", "CUDA_VISIBLE_DEVICES", "peer access", "memory by descriptor",
        "memory by handle", "stream operations", "MPS", "NCCL", "namespaces"}) {
    EXPECT_EQ(found[what].verdict, "ok") << what << ": " << found[what].detail;
  }
}

TEST_F(GpuDoctorTest, SaysInOneLineThatThereIsNoDriver) {
  const std::string none = R"({"driver":{"found":false,"error":"no CUDA driver: libcuda.so.1"}}
{"done":true})";
  for (const std::string& lines : {none, std::string("{\"cuda\":false}\n{\"done\":true}")}) {
    auto found = Doctor({LaneThatSays(lines)});
    EXPECT_NE(found["GPUs"].verdict, "fail");
    EXPECT_THAT(found["GPUs"].detail + found["GPUs"].remedy, HasSubstr("only --devices=cpu:N"));
    for (const char* what : {"CUDA driver", "cuda:0", "MPS", "NCCL", "/dev/shm"}) {
      EXPECT_FALSE(found.contains(what)) << what;
    }
  }
}

TEST_F(GpuDoctorTest, FailsADriverThatIsTooOld) {
  machine_.Set("FAKE_CUDA_VERSION", "11080");
  auto found = Doctor();
  EXPECT_EQ(found["CUDA driver"].verdict, "fail");
  EXPECT_THAT(found["CUDA driver"].detail, HasSubstr("speaks CUDA 11.8, which is older"));
  EXPECT_FALSE(found.contains("cuda:0"));
}

TEST_F(GpuDoctorTest, FailsADeviceThatLanesDoNotComputeOn) {
  machine_.Set("FAKE_CUDA_CAPABILITY", "7.5");
  auto found = Doctor();
  EXPECT_EQ(found["cuda:0"].verdict, "fail");
  EXPECT_THAT(found["cuda:0"].remedy, HasSubstr("8.0"));
  machine_.Set("FAKE_CUDA_CAPABILITY", "8.0");
  found = Doctor();
  EXPECT_EQ(found["cuda:0"].verdict, "ok");
  EXPECT_THAT(found["cuda:0"].detail, HasSubstr("cuBLASLt"));
  machine_.Set("FAKE_CUDA_COMPUTE_MODE", "3");
  found = Doctor();
  EXPECT_EQ(found["cuda:0"].verdict, "fail");
  EXPECT_THAT(found["cuda:0"].detail, HasSubstr("exclusive process"));
}

TEST_F(GpuDoctorTest, WarnsOfWhatADeviceCannotDo) {
  machine_.Set("FAKE_CUDA_PEERS", "0");
  machine_.Set("FAKE_CUDA_STREAM_OPS", "0");
  auto found = Doctor();
  EXPECT_EQ(found["peer access"].verdict, "warn");
  EXPECT_THAT(found["peer access"].detail, HasSubstr("0→1 1→0"));
  EXPECT_THAT(found["peer access"].remedy, HasSubstr("nodes of one group"));
  EXPECT_EQ(found["stream operations"].verdict, "fail");
  EXPECT_THAT(found["stream operations"].detail, HasSubstr("on cuda:0, cuda:1"));
}

TEST_F(GpuDoctorTest, SaysWhatMpsMeansAndWhereItsTwoSignsDiffer) {
  machine_.Set("FAKE_CUDA_MPS", "1");
  auto found = Doctor();
  EXPECT_EQ(found["MPS"].verdict, "warn");
  EXPECT_THAT(found["MPS"].detail, HasSubstr("no control daemon in " + directory_));
  EXPECT_THAT(found["MPS"].remedy, HasSubstr("CUDA_MPS_PIPE_DIRECTORY"));
  std::ofstream(directory_ + "/control") << "";
  found = Doctor();
  EXPECT_EQ(found["MPS"].verdict, "ok");
  EXPECT_THAT(found["MPS"].detail, AllOf(HasSubstr("side by side"), HasSubstr("ends all others")));
  machine_.Set("FAKE_CUDA_MPS", "0");
  found = Doctor();
  EXPECT_EQ(found["MPS"].verdict, "warn");
  EXPECT_THAT(found["MPS"].detail, HasSubstr("not used"));
}

TEST_F(GpuDoctorTest, WarnsOfNcclThatIsOldOrCannotBeLoaded) {
  machine_.Set("FAKE_NCCL_VERSION", "22705");
  auto found = Doctor();
  EXPECT_EQ(found["NCCL"].verdict, "warn");
  EXPECT_THAT(found["NCCL"].detail,
              AllOf(HasSubstr("2.27.5"), HasSubstr("a single node does not need it"),
                    Not(HasSubstr("install"))));
  EXPECT_THAT(found["NCCL"].remedy, HasSubstr("2.28"));
  std::ofstream(directory_ + "/libnccl.so.2") << "no library";
  machine_.Set("LD_LIBRARY_PATH", directory_);
  found = Doctor();
  EXPECT_EQ(found["NCCL"].verdict, "warn");
  EXPECT_THAT(found["NCCL"].detail, HasSubstr("no NCCL"));
}

TEST_F(GpuDoctorTest, CountsWhatTheEnvironmentShows) {
  machine_.Set("CUDA_VISIBLE_DEVICES", "1");
  auto found = Doctor();
  EXPECT_THAT(found["cuda:0"].detail, HasSubstr(FakeMachine::Uuid(1)));
  EXPECT_FALSE(found.contains("cuda:1"));
  EXPECT_THAT(found["CUDA_VISIBLE_DEVICES"].detail, HasSubstr("'1', shows 1"));
  machine_.Set("CUDA_VISIBLE_DEVICES", "");
  found = Doctor();
  EXPECT_EQ(found["CUDA_VISIBLE_DEVICES"].verdict, "fail");
  EXPECT_EQ(found["CUDA driver"].verdict, "fail");
  EXPECT_THAT(found["CUDA driver"].detail, HasSubstr("CUDA_ERROR_NO_DEVICE"));
}

TEST_F(GpuDoctorTest, LooksAtTheDaemonsEnvironmentWhereOneRuns) {
  machine_.Set("CUDA_VISIBLE_DEVICES", "1");
  auto daemon = DaemonProcess::Start({.devices = "cuda:1", .flags = {FakeMachine::LaneFlag()}});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  machine_.Set("CUDA_VISIBLE_DEVICES", "0,1");
  auto found = Doctor({"--address=" + (*daemon)->address()});
  EXPECT_THAT(found["cuda:0"].detail, HasSubstr(FakeMachine::Uuid(1)));
  const Said& visible = found["CUDA_VISIBLE_DEVICES"];
  EXPECT_EQ(visible.verdict, "warn");
  EXPECT_THAT(visible.detail,
              AllOf(HasSubstr("'1', shows 1"), HasSubstr("here it is '0,1'"),
                    HasSubstr("the daemon (pid " + std::to_string((*daemon)->pid()) + ")")));
  EXPECT_THAT(found["namespaces"].detail, HasSubstr("shared with the daemon: pid, ipc, net"));
  EXPECT_THAT(found["locked memory"].detail, HasSubstr("RLIMIT_MEMLOCK of the daemon"));
}

// A driver's call that does not return: nobody answers the fault point.
TEST_F(GpuDoctorTest, NamesTheCallOfADriverThatHangsAndEndsItsProcess) {
  const std::string path = directory_ + "/fault";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const wire::UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
            0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  machine_.Set("DMUOND_FAULT_SOCKET", path);
  machine_.Set("DMUOND_FAULT_POINTS", "cuda.create");
  // On a busy machine it may not come as far in the first of these times.
  std::map<std::string, Said> found;
  pollfd reached{listener.get(), POLLIN, 0};
  for (const char* timeout : {"1s", "5s", "25s"}) {
    found = Doctor({std::string("--gpu_timeout=") + timeout});
    if (::poll(&reached, 1, 0) > 0) break;
  }
  EXPECT_EQ(found["GPUs"].verdict, "fail");
  EXPECT_THAT(found["GPUs"].detail, AllOf(HasSubstr("the driver hangs: no answer in"),
                                          HasSubstr("memory by descriptor on cuda:0 (Fake GPU)")));
  const wire::UniqueFd hangs(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  char text[64] = "";
  ASSERT_GT(::recv(hangs.get(), text, sizeof(text) - 1, 0), 0);
  EXPECT_EQ(::kill(std::atoi(text), 0), -1) << text;
  EXPECT_EQ(errno, ESRCH);
}

TEST_F(GpuDoctorTest, SaysWhatALaneSaidThatCouldNotEvenStart) {
  auto found = Doctor({LaneThatSays("error while loading shared libraries")});
  EXPECT_EQ(found["GPUs"].verdict, "fail");
  EXPECT_THAT(found["GPUs"].detail, HasSubstr("error while loading shared libraries"));
  found = Doctor({"--lane_binary=/nowhere/lane"});
  EXPECT_EQ(found["GPUs"].verdict, "warn");
  EXPECT_THAT(found["GPUs"].detail, HasSubstr("/nowhere/lane"));
}

}  // namespace
}  // namespace dmuond::testing
