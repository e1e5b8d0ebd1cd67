// control.h: the control thread. Registration, connecting and attaching run here, one job after the other, so that none of them
// ever stalls the data path. Jobs may block; they take the engine lock themselves for the moment in which they touch engine state. What waits
// for a peer does not block: it looks, and has itself called again later, so that it keeps nobody else waiting.
#pragma once

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

  // Behind the jobs that are queued by then.
  void post_later(uint64_t pause_ns, std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      later_.emplace(now_ns() + pause_ns, std::move(job));
    }
    ready_.notify_one();
  }

  // Finishes the jobs that are queued, then joins. What was to come later is dropped.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    ready_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      for (const uint64_t now = now_ns(); !later_.empty() && later_.begin()->first <= now;)
        jobs_.push_back(std::move(later_.extract(later_.begin()).mapped()));
      if (jobs_.empty() && stopping_) return;
      if (jobs_.empty()) {
        if (later_.empty())
          ready_.wait(lock);
        else if (const uint64_t now = now_ns(); later_.begin()->first > now)
          ready_.wait_for(lock, std::chrono::nanoseconds(later_.begin()->first - now));
        continue;
      }
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> jobs_;
  std::multimap<uint64_t, std::function<void()>> later_;  // by when they are due
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace asyncfabric
