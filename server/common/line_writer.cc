#include "server/common/line_writer.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <ctime>
#include <thread>
#include <utility>

namespace dmuond::server {

LineWriter::LineWriter(int fd, size_t waiting_bytes_max, Lost lost)
    : fd_(fd), waiting_bytes_max_(waiting_bytes_max), lost_(std::move(lost)) {
  // Signals are other threads' business.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  std::thread([this] { Run(); }).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void LineWriter::Write(std::string line) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_bytes_ += line.size();
    waiting_.push_back(std::move(line));
    taken_.fetch_add(1);
    while (waiting_bytes_ > waiting_bytes_max_) {
      waiting_bytes_ -= waiting_.front().size();
      waiting_.pop_front();
      ++dropped_;
      done_.fetch_add(1);
    }
  }
  came_.notify_one();
}

bool LineWriter::Flush(std::chrono::milliseconds within) const {
  const uint64_t all = taken_.load();
  constexpr std::chrono::milliseconds kLook{1};
  for (auto waited = std::chrono::milliseconds(0); done_.load() < all; waited += kLook) {
    if (waited >= within) return false;
    const timespec look{0, std::chrono::nanoseconds(kLook).count()};
    ::nanosleep(&look, nullptr);
  }
  return true;
}

void LineWriter::Redirect(wire::UniqueFd fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  redirected_ = std::move(fd);
}

void LineWriter::Run() {
  int64_t unwritten = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    came_.wait(lock, [this] { return !waiting_.empty() || dropped_ > 0; });
    int64_t dropped = std::exchange(dropped_, 0);
    if (redirected_.valid()) {
      owned_ = std::move(redirected_);
      fd_ = owned_.get();
    }
    std::string line;
    const bool has_line = !waiting_.empty();
    if (has_line) {
      line = std::move(waiting_.front());
      waiting_.pop_front();
      waiting_bytes_ -= line.size();
    }
    lock.unlock();
    dropped += std::exchange(unwritten, 0);
    if (dropped > 0 && !WriteWhole(lost_(dropped))) unwritten = dropped;
    if (has_line) {
      if (!WriteWhole(line)) ++unwritten;
      done_.fetch_add(1);
    }
    lock.lock();
  }
}

bool LineWriter::WriteWhole(const std::string& line) const {
  for (size_t written = 0; written < line.size();) {
    const ssize_t n = ::write(fd_, line.data() + written, line.size() - written);
    if (n >= 0) {
      written += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      // Another process that shares the descriptor has made it so.
      pollfd polled{fd_, POLLOUT, 0};
      ::poll(&polled, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace dmuond::server
