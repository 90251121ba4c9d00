// Trainers of a test: threads that open, register, attach and push at once, as a world does.
#ifndef DMUOND_TESTS_CLIENT_TRAINERS_H_
#define DMUOND_TESTS_CLIENT_TRAINERS_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dmuond/client/session.h"
#include "gtest/gtest.h"

namespace dmuond::testing {

// Runs `trainer` in one thread for each rank and waits for all.
inline void OnEveryRank(int32_t world_size, const std::function<void(int32_t rank)>& trainer) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world_size; ++rank) threads.emplace_back(trainer, rank);
  for (std::thread& thread : threads) thread.join();
}

// The layout of a rank.
using MakeLayout = std::function<client::Layout(int32_t rank)>;
// Writes a rank's first weights.
using Fill = std::function<void(client::Session& session)>;

// A world of sessions after Push(). Failures are the test's.
class World {
 public:
  World(const std::string& address, int32_t size, const MakeLayout& layout, const Fill& fill)
      : sessions_(size) {
    OnEveryRank(size, [&](int32_t rank) {
      // Whoever loses a daemon here hears of it at once.
      auto session = client::Session::Open({.address = address,
                                            .rank = rank,
                                            .world_size = size,
                                            .reconnect_timeout = std::chrono::milliseconds(0)});
      ASSERT_TRUE(session.ok()) << session.status();
      auto registered = (*session)->Register(layout(rank));
      ASSERT_TRUE(registered.ok()) << registered.status();
      absl::Status status = (*session)->Attach();
      ASSERT_TRUE(status.ok()) << status;
      fill(**session);
      status = (*session)->Push();
      ASSERT_TRUE(status.ok()) << status;
      sessions_[rank] = *std::move(session);
    });
  }

  [[nodiscard]] bool complete() const {
    for (const auto& session : sessions_) {
      if (session == nullptr) return false;
    }
    return true;
  }
  [[nodiscard]] int32_t size() const { return static_cast<int32_t>(sessions_.size()); }
  client::Session& operator[](int32_t rank) { return *sessions_[rank]; }

  // One step on every rank; the outcomes by rank.
  std::vector<absl::StatusOr<client::Outcome>> Step(const client::StepScalars& scalars,
                                                    const client::SubmitOptions& options = {}) {
    std::vector<absl::StatusOr<client::Outcome>> outcomes(size());
    OnEveryRank(size(),
                [&](int32_t rank) { outcomes[rank] = (*this)[rank].Step(scalars, options); });
    return outcomes;
  }
  void Close() {
    OnEveryRank(size(), [&](int32_t rank) {
      absl::Status status = (*this)[rank].Close();
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  void Drop(int32_t rank) { sessions_[rank].reset(); }

 private:
  std::vector<std::unique_ptr<client::Session>> sessions_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_TRAINERS_H_
