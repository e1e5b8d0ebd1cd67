// control.h: the control thread. Registration, connecting and attaching run here, one job after the other, so that none of them
// ever stalls the data path. Jobs may block; they take the engine lock themselves for the moment in which they touch engine state. What waits
// for a peer does not block: it looks, and has itself called again later, so that it keeps nobody else waiting.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/start_thread.h"

namespace asyncfabric {

// How long a job that waits for a peer waits before it looks again: longer each time.
struct Pauses {
  static constexpr uint64_t kFirstNs = 200'000, kLongestNs = 20'000'000;
  uint64_t latest_ns = 0;  // 0: it has not looked yet
  uint64_t next_ns() { return latest_ns = latest_ns == 0 ? kFirstNs : std::min(latest_ns * 2, kLongestNs); }
};

class Control {
 public:
  ~Control() { stop(); }

  Status start(std::string* detail) {
    return start_thread([this] { run(); }, &thread_, detail);
  }

  void post(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    ready_.notify_one();
  }

  // For strangers: when nobody else has a job, or many had theirs first.
  void post_behind(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      behind_.push_back(std::move(job));
    }
    ready_.notify_one();
  }

  // Behind the jobs that are queued by then.
  void post_later(uint64_t pause_ns, std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      later_.emplace(now_ns() + pause_ns, std::move(job));
    }
    ready_.notify_one();
  }

  // Finishes the jobs that are queued, then joins. What was to come later, and what is of strangers, is dropped.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    ready_.notify_one();
    if (thread_.joinable()) thread_.join();
    later_.clear();
    behind_.clear();
  }

 private:
  static constexpr uint32_t kMostBefore = 16;

  void run() {
    uint32_t before = 0;  // jobs that one of a stranger has let pass
    std::unique_lock lock(mutex_);
    for (;;) {
      for (const uint64_t now = now_ns(); !later_.empty() && later_.begin()->first <= now;)
        jobs_.push_back(std::move(later_.extract(later_.begin()).mapped()));
      if (jobs_.empty() && stopping_) return;
      const bool behind = !behind_.empty() && (jobs_.empty() || before >= kMostBefore);
      std::deque<std::function<void()>>& queue = behind ? behind_ : jobs_;
      if (queue.empty()) {
        if (later_.empty())
          ready_.wait(lock);
        else if (const uint64_t now = now_ns(); later_.begin()->first > now)
          ready_.wait_for(lock, std::chrono::nanoseconds(later_.begin()->first - now));
        continue;
      }
      const std::function<void()> job = std::move(queue.front());
      queue.pop_front();
      before = behind || behind_.empty() ? 0 : before + 1;
      lock.unlock();
      job();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> jobs_, behind_;
  std::multimap<uint64_t, std::function<void()>> later_;  // by when they are due
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace asyncfabric
