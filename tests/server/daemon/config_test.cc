#include "server/daemon/process/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/daemon/process/config_flags.h"
#include "tests/server/certificates.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Sets a variable for the length of a test.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~ScopedVariable() { ::unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
};

// Without a secret there is no group of several nodes.
std::string SecretFile() {
  static const TempDir dir;
  const std::string path = dir / "secret";
  WriteFile(path, "a secret that nobody but this test knows");
  EXPECT_EQ(::chmod(path.c_str(), 0600), 0);
  return path;
}

absl::StatusOr<Config> Load(std::vector<std::string> arguments) {
  const absl::FlagSaver saver;
  arguments.insert(arguments.begin(),
                   {"dmuond", "--lane_binary=/bin/true", "--peer_secret_file=" + SecretFile()});
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return LoadConfig(static_cast<int>(arguments.size()), argv.data());
}

Config LoadOk(std::vector<std::string> arguments) {
  absl::StatusOr<Config> config = Load(std::move(arguments));
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(Config());
}

std::string Mistake(std::vector<std::string> arguments) {
  const absl::Status status = Load(std::move(arguments)).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

TEST(ConfigTest, OneDaemonAloneNeedsNoSettings) {
  const Config config = LoadOk({});
  EXPECT_EQ(config.lanes, 1);
  EXPECT_GE(config.threads, 1);
  EXPECT_EQ(config.nodes, 1);
  EXPECT_EQ(config.coordinator, "");
  EXPECT_THAT(config.group_name, EndsWith(":" + config.socket));
  EXPECT_EQ(config.peer_listen, "");
  EXPECT_EQ(config.socket_mode(), 0600);
  EXPECT_EQ(config.step_timeout, std::chrono::minutes(10));
  EXPECT_EQ(config.register_timeout, std::chrono::minutes(2));
  EXPECT_EQ(config.lane_timeout, std::chrono::seconds(30));
  EXPECT_EQ(*config.ReadToken(), "");
  EXPECT_FALSE(config.print_config);
}

TEST(ConfigTest, SocketLiesInTheUsersRuntimeDirectory) {
  {
    const ScopedVariable runtime("XDG_RUNTIME_DIR", "/run/user/1");
    EXPECT_EQ(LoadOk({}).socket, absl::StrCat("/run/user/1/dmuond-", ::geteuid(), "/dmuond.sock"));
  }
  EXPECT_EQ(LoadOk({}).socket, absl::StrCat("/tmp/dmuond-", ::geteuid(), "/dmuond.sock"));
  EXPECT_EQ(LoadOk({"--socket=unix:/tmp/x/./d.sock"}).socket, "/tmp/x/d.sock");
}

TEST(ConfigTest, ThreadsShareTheCoresAmongLanes) {
  const Config many = LoadOk({"--devices=cpu:256"});
  EXPECT_EQ(many.lanes, 256);
  EXPECT_GE(many.threads, 1);
  EXPECT_EQ(LoadOk({"--threads=3"}).threads, 3);
}

TEST(ConfigTest, GpusAreCountedOrListed) {
  const Config first = LoadOk({"--devices=cuda:3"});
  EXPECT_EQ(first.lanes, 3);
  EXPECT_EQ(first.devices.type, "cuda");
  EXPECT_THAT(first.devices.ordinals, ElementsAre(0, 1, 2));
  const Config listed = LoadOk({"--devices=cuda:2,0", "--mps=off"});
  EXPECT_EQ(listed.lanes, 2);
  EXPECT_THAT(listed.devices.ordinals, ElementsAre(2, 0));
  EXPECT_FALSE(listed.lanes_use_mps);
  EXPECT_TRUE(first.lanes_use_mps);
  EXPECT_EQ(first.mps_folder, "");
  const Config managed = LoadOk({"--devices=cuda:1", "--mps=managed", "--socket=/tmp/a.sock"});
  EXPECT_TRUE(managed.lanes_use_mps);
  EXPECT_EQ(managed.mps_folder, "/tmp/a.sock.mps");
}

TEST(ConfigTest, FlagsWinOverEnvironmentOverFileOverDefaults) {
  const TempDir dir;
  WriteFile(dir / "config",
            "socket: \"/tmp/file.sock\"\nskips_max: 7\nreflection: true\nallowed_uids: [1, 2]\n"
            "step_timeout: \"90s\"\n");
  const std::string file = "--config=" + (dir / "config");
  const Config from_file = LoadOk({file});
  EXPECT_EQ(from_file.socket, "/tmp/file.sock");
  EXPECT_EQ(from_file.skips_max, 7);
  EXPECT_TRUE(from_file.reflection);
  EXPECT_THAT(from_file.allowed_uids, ElementsAre(1, 2));
  EXPECT_EQ(from_file.step_timeout, std::chrono::seconds(90));

  const ScopedVariable socket("DMUOND_SOCKET", "/tmp/environment.sock");
  EXPECT_EQ(LoadOk({file}).socket, "/tmp/environment.sock");

  const Config from_flags = LoadOk({file, "--socket=/tmp/flag.sock", "--skips_max=50",
                                    "--noreflection", "--allowed_uids=3,4,5", "--step_timeout=1h"});
  EXPECT_EQ(from_flags.socket, "/tmp/flag.sock");
  EXPECT_EQ(from_flags.skips_max, 50) << "a flag that says the default still wins";
  EXPECT_FALSE(from_flags.reflection);
  EXPECT_THAT(from_flags.allowed_uids, ElementsAre(3, 4, 5));
  EXPECT_EQ(from_flags.step_timeout, std::chrono::hours(1));
}

TEST(ConfigTest, GroupComesFromTheEnvironmentToo) {
  const ScopedVariable nodes("DMUOND_NODES", "2");
  const ScopedVariable rank("DMUOND_NODE_RANK", "1");
  const ScopedVariable coordinator("DMUOND_COORDINATOR", "127.0.0.1:7077");
  const Config config = LoadOk({});
  EXPECT_EQ(config.nodes, 2);
  EXPECT_EQ(config.node_rank, 1);
  EXPECT_EQ(config.coordinator, "127.0.0.1:7077");
  EXPECT_EQ(config.group_name, config.coordinator);
  EXPECT_EQ(config.peer_listen, "127.0.0.1:0");
  EXPECT_EQ(LoadOk({"--node_rank=0"}).peer_listen, "127.0.0.1:7077");
}

TEST(ConfigTest, WrongEnvironmentIsNamed) {
  const ScopedVariable nodes("DMUOND_NODES", "two");
  EXPECT_THAT(Mistake({}), HasSubstr("DMUOND_NODES"));
  EXPECT_THAT(Mistake({}), HasSubstr("two"));
}

TEST(ConfigTest, AddressesOfAGroupAreFilledIn) {
  const std::vector<std::string> group = {"--nodes=2", "--node_rank=0", "--allow_plaintext_peers",
                                          "--coordinator=localhost:7077"};
  std::vector<std::string> everywhere = group;
  everywhere.emplace_back("--peer_listen=0.0.0.0:7077");
  const Config config = LoadOk(everywhere);
  EXPECT_THAT(config.peer_advertise, Not(HasSubstr("0.0.0.0")));
  EXPECT_TRUE(absl::EndsWith(config.peer_advertise, ":7077")) << config.peer_advertise;
  EXPECT_TRUE(absl::StartsWith(config.peer_advertise, config.rail_address + ":"));

  std::vector<std::string> explicit_ones = group;
  explicit_ones.insert(explicit_ones.end(),
                       {"--peer_listen=[::]:1", "--peer_advertise=[fe80::1]:2"});
  const Config given = LoadOk(explicit_ones);
  EXPECT_EQ(given.peer_listen, "[::]:1");
  EXPECT_EQ(given.peer_advertise, "[fe80::1]:2");
  EXPECT_EQ(given.rail_address, "fe80::1");
}

// As the name of a machine does on Debian: lanes would listen on it, and every job fail.
TEST(ConfigTest, AnAdvertisedAddressThatLeadsToLoopbackIsRefusedWithTheRemedy) {
  const std::vector<std::string> group = {"--nodes=2", "--node_rank=1", "--allow_plaintext_peers",
                                          "--coordinator=node0:7077"};
  for (const char* host : {"127.0.1.1", "localhost", "[::1]"}) {
    std::vector<std::string> here = group;
    here.push_back(absl::StrCat("--peer_advertise=", host, ":0"));
    EXPECT_THAT(Mistake(here), AllOf(HasSubstr(absl::StrCat("--peer_advertise=", host, ":0")),
                                     HasSubstr("--coordinator=node0:7077"),
                                     HasSubstr("--peer_advertise=ADDRESS:0")));
    here[3] = "--coordinator=localhost:7077";  // all of them are here
    LoadOk(here);
  }
  std::vector<std::string> beyond = group;
  beyond.insert(beyond.end(), {"--peer_advertise=192.0.2.1:0", "--rail_address=127.0.0.1"});
  LoadOk(beyond);
}

// 203.0.113.0/24 is for documents alone, and .invalid is no domain (RFC 5737, RFC 2606).
TEST(ConfigTest, ARailAddressThatThisMachineDoesNotHaveIsRefusedWithTheRemedy) {
  const std::vector<std::string> group = {"--nodes=2", "--node_rank=1", "--allow_plaintext_peers",
                                          "--coordinator=node0.invalid:7077"};
  for (const char* flag : {"--rail_address=203.0.113.1", "--peer_advertise=203.0.113.1:0"}) {
    std::vector<std::string> elsewhere = group;
    elsewhere.emplace_back(flag);
    elsewhere.emplace_back("--peer_listen=127.0.0.1:0");
    EXPECT_THAT(Mistake(elsewhere), AllOf(HasSubstr("--rail_address=203.0.113.1"),
                                          HasSubstr("no address of this machine"),
                                          HasSubstr("give --peer_advertise or --rail_address")));
  }
  std::vector<std::string> unknown = group;
  unknown.emplace_back("--peer_advertise=node1.invalid:0");
  EXPECT_EQ(LoadOk(unknown).rail_address, "node1.invalid") << "a name may become known later";
  LoadOk({"--nodes=1", "--rail_address=203.0.113.1"});
}

TEST(ConfigTest, ACoordinatorThatIsNotHereIsNoticedOnNode0Alone) {
  const auto noticed = [](const std::string& rank, const std::string& coordinator) {
    return LoadOk({"--nodes=2", "--node_rank=" + rank, "--allow_plaintext_peers",
                   "--coordinator=" + coordinator, "--peer_advertise=node.invalid:0"})
        .coordinator_elsewhere;
  };
  EXPECT_TRUE(noticed("0", "203.0.113.1:7077"));
  EXPECT_FALSE(noticed("1", "203.0.113.1:7077"));
  EXPECT_FALSE(noticed("0", "localhost:7077"));
  EXPECT_FALSE(noticed("0", "node0.invalid:7077"));
}

TEST(ConfigTest, PlaintextBeyondLoopbackIsRefused) {
  const std::string mistake =
      Mistake({"--nodes=2", "--coordinator=node0:7077", "--peer_advertise=192.0.2.1:0"});
  EXPECT_THAT(mistake, HasSubstr("--coordinator=node0:7077"));
  EXPECT_THAT(mistake, HasSubstr("--allow_plaintext_peers"));
  EXPECT_THAT(Mistake({"--nodes=2", "--coordinator=localhost:1", "--peer_listen=0.0.0.0:2"}),
              HasSubstr("--peer_listen=0.0.0.0:2"));
  LoadOk({"--nodes=2", "--coordinator=localhost:7077"});
}

TEST(ConfigTest, TlsFilesGoTogetherAndMustBeWhatTheyAreMeantToBe) {
  const dmuond::testing::Certificates certificates;
  const std::vector<std::string> all = {"--nodes=2",
                                        "--coordinator=node0:7077",
                                        "--peer_advertise=192.0.2.1:0",
                                        "--rail_address=127.0.0.1",
                                        "--peer_tls_ca=" + certificates.Path("ours-ca.pem"),
                                        "--peer_tls_certificate=" + certificates.Path("ours.pem"),
                                        "--peer_tls_key=" + certificates.Path("ours.key")};
  EXPECT_EQ(LoadOk(all).peer_tls_key, certificates.Path("ours.key"));
  std::vector<std::string> wide = all;
  wide.back() = "--rail_address=rail0.invalid";
  wide.insert(wide.end(), {all.back(), "--allow_plaintext_rail=false"});
  EXPECT_THAT(Mistake(wide),
              AllOf(HasSubstr("--rail_address=rail0.invalid"), HasSubstr("without TLS")));
  wide.back() = "--allow_plaintext_rail";
  EXPECT_EQ(LoadOk(wide).rail_address, "rail0.invalid");
  EXPECT_THAT(Mistake({"--peer_tls_ca=" + certificates.Path("ours-ca.pem")}),
              HasSubstr("all three"));
  std::vector<std::string> missing = all;
  missing.back() = "--peer_tls_key=/nowhere/key";
  EXPECT_THAT(Mistake(missing), HasSubstr("--peer_tls_key=/nowhere/key"));
  missing.back() = "--peer_tls_key=" + certificates.Path("ours.csr");
  EXPECT_THAT(Mistake(missing), HasSubstr("holds no private key in PEM"));
}

TEST(ConfigTest, ASnapshotDirectoryIsMadeForOwnerAndGroupAndWhatKeepsItFromBeingMadeIsSaid) {
  const TempDir dir;
  const std::string made = dir / "a/b";
  const mode_t before = ::umask(0);
  EXPECT_EQ(LoadOk({"--snapshot_dir=" + made}).snapshot_dir, made);
  ::umask(before);
  struct stat status {};
  ASSERT_EQ(::stat(made.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0750U);
  // /proc takes no directories, for root neither.
  EXPECT_THAT(Mistake({"--snapshot_dir=/proc/dmuond/snapshots"}),
              AllOf(HasSubstr("--snapshot_dir=/proc/dmuond/snapshots cannot be made"),
                    HasSubstr("No such file")));
  WriteFile(dir / "file", "");
  EXPECT_THAT(Mistake({"--snapshot_dir=" + (dir / "file/x")}),
              AllOf(HasSubstr("cannot be made"), HasSubstr("Not a directory")));
}

TEST(ConfigTest, ALogFileMustBeWritable) {
  const TempDir dir;
  EXPECT_EQ(LoadOk({"--log_file=" + (dir / "x/../d.log")}).log_file, dir / "d.log");
  EXPECT_THAT(Mistake({"--log_file=/nowhere/d.log"}),
              HasSubstr("--log_file=/nowhere/d.log cannot be written"));
}

// On loopback too, where every user of the machine comes.
TEST(ConfigTest, DaemonsOfAGroupProveThemselvesByASecretOrByNamesInCertificates) {
  const TempDir dir;
  const dmuond::testing::Certificates certificates;
  const auto with = [&](std::vector<std::string> arguments, bool tls) {
    arguments.insert(arguments.begin(), {"--nodes=2", "--coordinator=127.0.0.1:7077"});
    if (!tls) return arguments;
    arguments.insert(arguments.end(), {"--peer_tls_ca=" + certificates.Path("ours-ca.pem"),
                                       "--peer_tls_certificate=" + certificates.Path("ours.pem"),
                                       "--peer_tls_key=" + certificates.Path("ours.key")});
    return arguments;
  };
  EXPECT_THAT(Mistake(with({"--peer_secret_file="}, false)),
              AllOf(HasSubstr("--peer_secret_file= "), HasSubstr("dmuonctl secret new FILE")));
  EXPECT_THAT(Mistake(with({"--peer_secret_file=", "--allow_plaintext_peers"}, false)),
              HasSubstr("dmuonctl secret new FILE"));
  EXPECT_THAT(Mistake(with({"--peer_secret_file="}, true)),
              AllOf(HasSubstr("--peer_tls_names"), HasSubstr("dmuonctl secret new FILE")));
  EXPECT_THAT(LoadOk(with({"--peer_secret_file=", "--peer_tls_names=node{rank}.cluster"}, true))
                  .peer_tls_names,
              ElementsAre("node0.cluster", "node1.cluster"));
  EXPECT_THAT(LoadOk(with({"--peer_tls_names=a,10.0.0.2"}, true)).peer_tls_names,
              ElementsAre("a", "10.0.0.2"));
  EXPECT_THAT(Mistake(with({"--peer_tls_names=a,b"}, false)), HasSubstr("--peer_tls_ files"));
  EXPECT_THAT(Mistake(with({"--peer_tls_names=a,b,c"}, true)), HasSubstr("3 names for 2 nodes"));
  EXPECT_THAT(Mistake(with({"--peer_tls_names=a,a"}, true)), HasSubstr("'a'"));
  EXPECT_THAT(Mistake(with({"--peer_tls_names=*.a,b"}, true)), HasSubstr("wildcards"));

  const std::string secret = dir / "secret";
  const std::string good = "00112233445566778899aabbccddeeff";  // 16 bytes
  WriteFile(secret, good + "\n");
  ASSERT_EQ(::chmod(secret.c_str(), 0640), 0);
  const std::string flag = "--peer_secret_file=" + secret;
  EXPECT_EQ(*LoadOk(with({flag}, false)).ReadPeerSecret(), good);
  ASSERT_EQ(::chmod(secret.c_str(), 0604), 0);
  EXPECT_THAT(Mistake({flag}), HasSubstr("open to everybody"));
  ASSERT_EQ(::chmod(secret.c_str(), 0600), 0);
  WriteFile(secret, "hunter2");
  EXPECT_THAT(Mistake({flag}), AllOf(HasSubstr("7 characters"), HasSubstr("at least 32")));
  // What nobody has drawn: zeros as bytes, as digits, and a pattern.
  for (const std::string& weak : {std::string(64, '\0'), std::string(64, '0'),
                                  std::string("0102030405060701020304050607010203"),
                                  std::string("changemechangemechangemechangeme")}) {
    WriteFile(secret, weak);
    EXPECT_THAT(Mistake({flag}), AllOf(HasSubstr(flag), HasSubstr("different bytes"),
                                       HasSubstr("dmuonctl secret new FILE")))
        << weak;
  }
}

TEST(ConfigTest, EveryMistakeNamesFlagAndValue) {
  const std::map<std::string, std::string> wrong = {
      {"--devices=cpu", ""},
      {"--devices=cpu:0", ""},
      {"--devices=tpu:1", ""},
      {"--devices=cpu:1,2", "cpu:N or cuda:N"},
      {"--devices=cuda", ""},
      {"--devices=cuda:0", "between 1 and 256"},
      {"--devices=cuda:0,", "as in cuda:0,2"},
      {"--devices=cuda:0,-1", "as in cuda:0,2"},
      {"--devices=cuda:3,1,3", "names device 3 twice"},
      {"--mps=on", "none of auto, managed and off"},
      {"--mps=managed", "--devices=cuda:1"},
      {"--threads=-1", ""},
      {"--lane_memory_bytes=-1", ""},
      {"--cost_table=/nowhere/costs", "/nowhere/costs"},
      {"--job_memory_bytes=-1", ""},
      {"--connections_max=0", ""},
      {"--claim_timeout=0s", "as in 90s"},
      {"--connections_per_uid=0", ""},
      {"--socket_group=nobody-has-this-group", ""},
      {"--nodes=0", ""},
      {"--node_rank=1", "--nodes=1"},
      {"--coordinator=node0", "host:port"},
      {"--coordinator=node0:0", "host:port"},
      {"--coordinator=::1:5", "host:port"},
      {"--group_name=two words", "no spaces"},
      {"--group_name=" + std::string(129, 'g'), "1 to 128"},
      {"--peer_listen=:5", "host:port"},
      {"--peer_advertise=h:65536", "host:port"},
      {"--metrics_address=9464", "host:port"},
      {"--register_timeout=0", "as in 90s"},
      {"--session_linger=-1s", "as in 90s"},
      {"--skips_max=0", ""},
      {"--log_level=loud", "trace"},
      {"--log_format=xml", "json"},
      {"--lane_binary=/bin", "no program"},
      {"--snapshot_dir=/proc/nowhere", "cannot be made"},
      {"--token_file=/nowhere/token", "cannot be read: No such file or directory"},
      {"--peer_secret_file=/nowhere/secret", "cannot be read"},
      {"--peer_message_bytes_max=1000", "is not between"},
      {"--config=/nowhere/config", "cannot be read: No such file or directory"},
      {"--config=/tmp", "cannot be read: Is a directory"},
  };
  for (const auto& [argument, also] : wrong) {
    const std::string mistake = Mistake({argument});
    EXPECT_THAT(mistake, HasSubstr(argument));
    EXPECT_THAT(mistake, HasSubstr(also));
  }
  EXPECT_THAT(Mistake({"--nodes=2"}), HasSubstr("--coordinator="));
}

TEST(ConfigTest, AllMistakesAreReportedAtOnce) {
  const std::string mistakes = Mistake({"--threads=-1", "--log_level=loud", "--skips_max=0"});
  EXPECT_THAT(mistakes, HasSubstr("--threads=-1"));
  EXPECT_THAT(mistakes, HasSubstr("--log_level=loud"));
  EXPECT_THAT(mistakes, HasSubstr("--skips_max=0"));
}

TEST(ConfigTest, WhatCannotBeReadIsReportedWithWhatIsWrong) {
  const std::string mistakes =
      Mistake({"--step_timeout=abc", "--threads=many", "--nosuch", "--register_timeout=0s"});
  EXPECT_THAT(mistakes, HasSubstr("--step_timeout=abc"));
  EXPECT_THAT(mistakes, HasSubstr("--threads=many"));
  EXPECT_THAT(mistakes, HasSubstr("'--nosuch'"));
  EXPECT_THAT(mistakes, HasSubstr("--register_timeout=0s "));
}

TEST(ConfigTest, FlagsAreGivenInAnyOfTheUsualWays) {
  const Config config = LoadOk({"--threads", "3", "-skips_max=7", "--reflection", "--noreplan"});
  EXPECT_EQ(config.threads, 3);
  EXPECT_EQ(config.skips_max, 7);
  EXPECT_TRUE(config.reflection);
  EXPECT_FALSE(config.replan);
  EXPECT_THAT(Mistake({"--threads"}), HasSubstr("--threads needs a value"));
}

TEST(ConfigTest, ArgumentThatIsNoFlagIsNamed) {
  EXPECT_THAT(Mistake({"start"}), HasSubstr("'start'"));
}

TEST(ConfigTest, TooLongSocketNamesLengthAndLimit) {
  const std::string socket = "/tmp/" + std::string(96, 's');
  EXPECT_THAT(Mistake({"--socket=" + socket}), HasSubstr("108 bytes, at most 107"));
  const std::string shorter = "--socket=/tmp/" + std::string(79, 's');
  EXPECT_EQ(LoadOk({shorter, "--devices=cuda:1", "--mps=managed"}).mps_folder.size(), 88);
  EXPECT_THAT(Mistake({shorter + "s", "--devices=cuda:1", "--mps=managed"}),
              AllOf(HasSubstr("/control_privileged"), HasSubstr("108 bytes, at most 107")));
}

TEST(ConfigTest, SocketWithoutAPathIsRefused) {
  EXPECT_THAT(Mistake({"--socket=unix:"}), HasSubstr("names no path"));
}

TEST(ConfigTest, MistakeInFileHasItsPlace) {
  const TempDir dir;
  WriteFile(dir / "config", "nodes: 2\nnode: 1\n");
  EXPECT_THAT(Mistake({"--config=" + (dir / "config")}), HasSubstr((dir / "config") + ":2:"));
  WriteFile(dir / "config", "nodes: \"two\"\n");
  EXPECT_THAT(Mistake({"--config=" + (dir / "config")}), HasSubstr((dir / "config") + ":1:"));
}

TEST(ConfigTest, TokenIsReadFromItsFile) {
  const TempDir dir;
  const std::string path = dir / "token";
  WriteFile(path, "secret \n");
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  EXPECT_EQ(*LoadOk({"--token_file=" + path}).ReadToken(), "secret");
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  EXPECT_THAT(Mistake({"--token_file=" + path}), HasSubstr("open to everybody"));
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  WriteFile(path, "\n");
  EXPECT_THAT(Mistake({"--token_file=" + path}), HasSubstr("empty"));
}

TEST(ConfigTest, UsersShareJobsWhereTheyAreLetIn) {
  const Config own = LoadOk({"--allowed_uids=7,8", "--admin_uids=9"});
  EXPECT_FALSE(own.job_uids.MayTakePart(7, 8));
  EXPECT_TRUE(own.job_uids.MayTakePart(7, 9));
  EXPECT_TRUE(own.job_uids.MayTakePart(7, ::geteuid()));
  EXPECT_TRUE(LoadOk({"--allowed_uids=7,8", "--job_uids=any"}).job_uids.MayTakePart(7, 8));
  const Config two = LoadOk({"--allowed_uids=7,8,9", "--job_uids=7,8"});
  EXPECT_TRUE(two.job_uids.MayTakePart(7, 8));
  EXPECT_FALSE(two.job_uids.MayTakePart(7, 9));
  EXPECT_THAT(Mistake({"--allowed_uids=7", "--job_uids=7,8"}),
              HasSubstr("names uid 8, which is not in --allowed_uids"));
  EXPECT_THAT(Mistake({"--allowed_uids=7", "--job_uids=all"}), HasSubstr("is none of same, any,"));
  EXPECT_THAT(Mistake({"--job_uids=any"}), HasSubstr("without --allowed_uids"));
}

TEST(ConfigTest, SnapshotsOfEndedJobsStayOrGoAfterATime) {
  const TempDir dir;
  const std::string there = "--snapshot_dir=" + (dir / "a");
  const std::string name = "--group_name=ours";
  EXPECT_EQ(LoadOk({there}).snapshots_of_ended_jobs.count(), 0);
  EXPECT_EQ(LoadOk({there, name, "--snapshots_of_ended_jobs=30d"}).snapshots_of_ended_jobs,
            std::chrono::hours(720));
  EXPECT_EQ(LoadOk({there, name, "--snapshots_of_ended_jobs=1h30m"}).snapshots_of_ended_jobs,
            std::chrono::minutes(90));
  for (const char* wrong : {"0", "-1d", "9000000d", "soon", "1dd"}) {
    EXPECT_THAT(Mistake({there, absl::StrCat("--snapshots_of_ended_jobs=", wrong)}),
                HasSubstr("is neither keep nor a time"));
  }
  EXPECT_THAT(Mistake({"--snapshots_of_ended_jobs=1d"}), HasSubstr("needs --snapshot_dir"));
  EXPECT_THAT(Mistake({there, "--snapshots_of_ended_jobs=1d"}),
              HasSubstr("--snapshots_of_ended_jobs=1d needs --group_name"))
      << "names by default collide";
}

TEST(ConfigTest, SocketGroupOpensTheSocketToTheGroup) {
  const Config config = LoadOk({absl::StrCat("--socket_group=", ::getegid())});
  EXPECT_EQ(config.socket_gid, ::getegid());
  EXPECT_EQ(config.socket_mode(), 0660);
}

TEST(ConfigTest, SnapshotDirIsMadeAndLeftEmpty) {
  const TempDir dir;
  EXPECT_EQ(LoadOk({"--snapshot_dir=" + (dir / "a/b")}).snapshot_dir, dir / "a/b");
  EXPECT_EQ(CountEntries(dir / "a/b"), 0);
}

TEST(ConfigTest, PrintedConfigReadsBackTheSame) {
  const TempDir dir;
  const Config config =
      LoadOk({"--devices=cpu:3", "--nodes=2", "--coordinator=localhost:9", "--print_config",
              "--allowed_uids=7,8", "--step_timeout=90s", "--log_format=json"});
  EXPECT_TRUE(config.print_config);
  WriteFile(dir / "config", ToText(config));
  const Config again = LoadOk({"--config=" + (dir / "config")});
  EXPECT_EQ(ToText(again), ToText(config));
  EXPECT_EQ(again.lanes, 3);
  EXPECT_EQ(again.log_format, log::Format::kJson);
  EXPECT_FALSE(again.print_config);
}

// Rows of the page's table of flags: name -> default.
std::map<std::string, std::string> DocumentedFlags() {
  std::ifstream file("docs/configuration.md");
  EXPECT_TRUE(file.good()) << "the test runs in the repository's root";
  const std::regex row(R"(\| `--([a-z_]+)` \|\s*(?:`([^`]*)`)?\s*\| .+ \|)");
  std::map<std::string, std::string> flags;
  for (std::string line; std::getline(file, line);) {
    std::smatch match;
    if (!std::regex_match(line, match, row)) continue;
    EXPECT_TRUE(flags.emplace(match[1], match[2]).second) << "twice: " << line;
  }
  return flags;
}

TEST(ConfigTest, PageListsEveryFlagWithItsDefaultAndNoOther) {
  std::map<std::string, std::string> documented = DocumentedFlags();
  std::set<std::string> flags = {"config", "print_config", "check_config"};
  const google::protobuf::Descriptor& settings = *config::ConfigFile::descriptor();
  for (int i = 0; i < settings.field_count(); ++i) flags.insert(settings.field(i)->name());
  for (const std::string& name : flags) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    ASSERT_NE(flag, nullptr) << name;
    EXPECT_FALSE(flag->Help().empty()) << name;
    ASSERT_TRUE(documented.contains(name)) << "--" << name << " is missing in the page";
    EXPECT_EQ(documented[name], flag->DefaultValue()) << name;
    documented.erase(name);
  }
  EXPECT_THAT(documented, IsEmpty()) << "in the page, but no flag";
}

TEST(ConfigTest, EveryFlagOfTheProgramIsASetting) {
  std::set<std::string> settings = {"config", "print_config", "check_config"};
  const google::protobuf::Descriptor& descriptor = *config::ConfigFile::descriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) settings.insert(descriptor.field(i)->name());
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (!absl::EndsWith(flag->Filename(), "config_flags.cc")) continue;
    EXPECT_TRUE(settings.contains(std::string(name))) << name << " has no field in config.proto";
  }
}

}  // namespace
}  // namespace dmuond::server
