// The threads inside one lane. Work is handed out by index; what an index computes never depends on
// who computes it, so results are the same for any number of threads.
//
//   pool.ParallelFor(blocks, [&](int64_t block, int worker) { … });
//
// Threads: one thread, the lane's dispatching one, may call ParallelFor; it works too.
#ifndef DMUOND_KERNELS_CPU_THREAD_POOL_H_
#define DMUOND_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/mutex.h"

namespace dmuond::kernels::cpu {

class ThreadPool {
 public:
  // REQUIRES: threads >= 1, the caller's own counted.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int threads() const { return static_cast<int>(workers_.size()) + 1; }

  using Work = absl::FunctionRef<void(int64_t index, int worker)>;
  // Calls work(i, w) once for each i in [0, count), with w in [0, threads()) never used by two
  // calls at a time. Returns when all calls have. `work` must not throw.
  void ParallelFor(int64_t count, Work work) DMUOND_EXCLUDES(mutex_);

 private:
  void WorkerLoop(int worker) DMUOND_EXCLUDES(mutex_);
  void Drain(const Work& work, int64_t count, int worker);

  Mutex mutex_;
  CondVar start_;
  CondVar finished_;
  uint64_t round_ DMUOND_GUARDED_BY(mutex_) = 0;
  int busy_ DMUOND_GUARDED_BY(mutex_) = 0;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  const Work* work_ DMUOND_GUARDED_BY(mutex_) = nullptr;
  int64_t count_ DMUOND_GUARDED_BY(mutex_) = 0;
  std::atomic<int64_t> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_THREAD_POOL_H_
