#include "bench/recovery/calm.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/unique_fd.h"
#include "bench/recovery/group.h"

namespace dmuond::bench {
namespace {

constexpr int kTrainers = 2;
constexpr int kWarmUp = 100;
constexpr int kCounted = 50;

const Model kNothing{.vector = 1};

// A driver that lets everybody go on, and counts.
class Counter {
 public:
  explicit Counter(std::string path)
      : path_(std::move(path)), socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", path_.c_str());
    listens_ = ::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
               ::listen(socket_.get(), 256) == 0;
    ::setenv("DMUOND_FAULT_SOCKET", path_.c_str(), 1);
    ::setenv("DMUOND_FAULT_POINTS", "*", 1);
    thread_ = std::thread([this] { Serve(); });
  }
  ~Counter() {
    ::unsetenv("DMUOND_FAULT_SOCKET");
    ::unsetenv("DMUOND_FAULT_POINTS");
    ::shutdown(socket_.get(), SHUT_RDWR);
    thread_.join();
    std::filesystem::remove(path_);
  }
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  [[nodiscard]] bool listens() const { return listens_; }
  [[nodiscard]] int64_t count() const { return count_.load(); }

 private:
  void Serve() {
    for (;;) {
      const wire::UniqueFd asking(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!asking.valid()) return;
      ++count_;
      ::send(asking.get(), "go", 2, MSG_NOSIGNAL);
    }
  }

  const std::string path_;
  const wire::UniqueFd socket_;
  bool listens_ = false;
  std::atomic<int64_t> count_{0};
  std::thread thread_;
};

// Steps of rank 0 without those that warm up, ascending, in microseconds.
absl::StatusOr<std::vector<double>> Steps(bool survives, int steps) {
  std::vector<std::string> flags = {"--threads=1"};
  if (survives) {
    flags.emplace_back("--snapshot_dir");
    flags.push_back(absl::StrCat("--snapshot_every_steps=", 1 << 30));
  } else {
    flags.emplace_back("--session_linger=0s");
  }
  auto group = Group::Start(1, "cpu:1", flags);
  if (!group.ok()) return group.status();
  for (int32_t rank = 0; rank < kTrainers; ++rank) {
    const absl::Status started =
        (*group)->StartTrainer({.rank = rank,
                                .trainers = kTrainers,
                                .model = kNothing,
                                .steps = kWarmUp + steps,
                                .trainer_state_bytes = survives ? 1024 : 0});
    if (!started.ok()) return started;
  }
  for (int32_t rank = 0; rank < kTrainers; ++rank) {
    const int code = (*group)->trainer(rank).process().Wait(std::chrono::minutes(10));
    if (code != 0) return absl::InternalError(absl::StrCat("trainer ", rank, " ends with ", code));
  }
  std::vector<double> step_us;
  for (const Record& record : (*group)->trainer(0).Records()) {
    if (record.kind != Record::Kind::kCommitted || record.step <= kWarmUp) continue;
    step_us.push_back(static_cast<double>(record.end - record.begin) / 1e3);
  }
  std::sort(step_us.begin(), step_us.end());
  return step_us;
}

absl::StatusOr<double> CountPoints() {
  const std::string path =
      std::filesystem::temp_directory_path() / absl::StrCat("dmuond-points-", ::getpid());
  const auto count = [&](int steps) -> absl::StatusOr<int64_t> {
    const Counter counter(path);
    if (!counter.listens()) return absl::InternalError("no socket " + path);
    const auto ran = Steps(/*survives=*/true, steps);
    if (!ran.ok()) return ran.status();
    return counter.count();
  };
  // What comes before and after the steps is in both.
  const absl::StatusOr<int64_t> few = count(kCounted);
  if (!few.ok()) return few.status();
  const absl::StatusOr<int64_t> more = count(2 * kCounted);
  if (!more.ok()) return more.status();
  return static_cast<double>(*more - *few) / kCounted;
}

double PointNanoseconds() {
  constexpr int kTimes = 20'000'000;
  int failed = 0;
  const int64_t begin = Now();
  for (int i = 0; i < kTimes; ++i) failed += fault::FaultPoint("bench.point") != 0 ? 1 : 0;
  const int64_t end = Now();
  return failed == 0 ? static_cast<double>(end - begin) / kTimes : 0;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

absl::StatusOr<Calm> CompareCalm(int rounds, int steps) {
  std::vector<double> bare;
  std::vector<double> survives;
  for (int round = 0; round < rounds; ++round) {
    for (const bool with : {round % 2 == 0, round % 2 != 0}) {
      const absl::StatusOr<std::vector<double>> step_us = Steps(with, steps);
      if (!step_us.ok()) return step_us.status();
      if (step_us->empty()) return absl::InternalError("no step was committed");
      (with ? survives : bare).push_back((*step_us)[step_us->size() / 2]);
    }
  }
  const absl::StatusOr<double> points = CountPoints();
  if (!points.ok()) return points.status();
  return Calm{.rounds = rounds,
              .bare_us = Median(bare),
              .survives_us = Median(survives),
              .points = *points,
              .point_ns = PointNanoseconds()};
}

}  // namespace dmuond::bench
