#include "kernels/cpu/thread_pool.h"

namespace dmuond::kernels::cpu {

ThreadPool::ThreadPool(int threads) {
  for (int worker = 1; worker < threads; ++worker) {
    workers_.emplace_back([this, worker] { WorkerLoop(worker); });
  }
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  start_.NotifyAll();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t count, Work work) {
  if (workers_.empty() || count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i, 0);
    return;
  }
  next_.store(0, std::memory_order_relaxed);
  {
    MutexLock lock(mutex_);
    work_ = &work;
    count_ = count;
    busy_ = static_cast<int>(workers_.size());
    ++round_;
  }
  start_.NotifyAll();
  Drain(work, count, 0);
  MutexLock lock(mutex_);
  while (busy_ > 0) finished_.Wait(mutex_);
  work_ = nullptr;
}

void ThreadPool::Drain(const Work& work, int64_t count, int worker) {
  for (;;) {
    const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= count) return;
    work(index, worker);
  }
}

void ThreadPool::WorkerLoop(int worker) {
  uint64_t seen = 0;
  for (;;) {
    const Work* work = nullptr;
    int64_t count = 0;
    {
      MutexLock lock(mutex_);
      while (!stop_ && round_ == seen) start_.Wait(mutex_);
      if (stop_) return;
      seen = round_;
      work = work_;
      count = count_;
    }
    Drain(*work, count, worker);
    MutexLock lock(mutex_);
    if (--busy_ == 0) finished_.NotifyOne();
  }
}

}  // namespace dmuond::kernels::cpu
