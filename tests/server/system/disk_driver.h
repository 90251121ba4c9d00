// A disk that does to daemons what a test wants: at each thing that they do with it they are asked
// for, and told to go on, to fail, or killed; or held, as by a file server that does not answer.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_DISK_DRIVER_H_
#define DMUOND_TESTS_SERVER_SYSTEM_DISK_DRIVER_H_

#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"

namespace dmuond::testing {

// Answers the points of the storage (fault_point.h) in the daemons that are started while it lives.
class DiskDriver {
 public:
  // What is said to a process that has come to a point: "go", "fail ERRNO", or, until Release(),
  // nothing ("hold"); it may be killed first.
  using Decide = std::function<std::string(pid_t pid, const std::string& point)>;

  // `points`: further ones that are asked about, separated by commas.
  DiskDriver(const std::string& path, Decide decide, const std::string& points = "")
      : decide_(std::move(decide)), socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", path.c_str());
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(socket_.get(), 64), 0);
    ::setenv("DMUOND_FAULT_SOCKET", path.c_str(), 1);
    const std::string all =
        "storage.create,storage.write,storage.fsync,storage.rename,storage.fsync_directory,"
        "storage.read," +
        points;
    ::setenv("DMUOND_FAULT_POINTS", all.c_str(), 1);
    thread_ = std::thread([this] { Serve(); });
  }
  ~DiskDriver() {
    ::unsetenv("DMUOND_FAULT_SOCKET");
    ::unsetenv("DMUOND_FAULT_POINTS");
    ::shutdown(socket_.get(), SHUT_RDWR);
    thread_.join();
  }
  // Who is held goes on.
  void Release() {
    MutexLock lock(mutex_);
    held_.clear();
  }
  // Whether somebody is held.
  bool held() {
    MutexLock lock(mutex_);
    return !held_.empty();
  }
  // Whether somebody comes to be held within kHangsAfter.
  bool WaitHeld() {
    const auto deadline = std::chrono::steady_clock::now() + kHangsAfter;
    MutexLock lock(mutex_);
    while (held_.empty()) {
      if (!changed_.WaitUntil(mutex_, deadline)) return !held_.empty();
    }
    return true;
  }
  DiskDriver(const DiskDriver&) = delete;
  DiskDriver& operator=(const DiskDriver&) = delete;

 private:
  void Serve() {
    for (;;) {
      wire::UniqueFd asking(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!asking.valid()) return;
      char text[256] = {};
      if (::recv(asking.get(), text, sizeof(text) - 1, 0) <= 0) continue;
      int pid = 0;
      char point[200] = {};
      if (std::sscanf(text, "%d %199s", &pid, point) != 2) continue;
      const std::string answer = decide_(pid, point);
      if (answer == "hold") {
        MutexLock lock(mutex_);
        held_.push_back(std::move(asking));
        changed_.NotifyAll();
        continue;
      }
      ::send(asking.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    }
  }

  const Decide decide_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<wire::UniqueFd> held_ DMUOND_GUARDED_BY(mutex_);
  const wire::UniqueFd socket_;
  std::thread thread_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_DISK_DRIVER_H_
