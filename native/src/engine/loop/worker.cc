// worker.cc: see worker.h.
#include "engine/loop/worker.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/start_thread.h"

namespace asyncfabric {

Status Worker::start(std::string* detail) {
  if (const Status status = start_thread([this] { run(); }, &thread_, detail); !status.ok()) return status;
  pthread_setname_np(thread_.native_handle(), "af-worker");
  const int32_t cpu = core_.config.worker_cpu;
  if (cpu < 0) return {};
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(static_cast<size_t>(cpu), &cpus);  // beyond its size: stays empty, and is refused
  if (pthread_setaffinity_np(thread_.native_handle(), sizeof cpus, &cpus) == 0) return {};
  stop();
  *detail = "worker_cpu " + std::to_string(cpu) + " is no core that this process may use";
  return StatusCode::kInvalidArgument;
}

void Worker::stop() {
  stopping_.store(true, std::memory_order_seq_cst);
  core_.gate.notify();  // sleep() looks at stopping_ after it armed the gate
  if (thread_.joinable()) thread_.join();
}

void Worker::run() {
  const bool busy = core_.config.polling == PollingMode::kBusy;
  const bool polls =
      std::any_of(core_.rails.begin(), core_.rails.end(), [](const auto& rail) { return rail->rail->wait_fd() < 0; });
  uint64_t idle_since = 0, last_event = 0;
  bool worked = false;
  while (!stopping_.load(std::memory_order_relaxed)) {
    if (core_.poll_turn.held(now_ns)) {
      nap();
      idle_since = 0;
      continue;
    }
    core_.engine_lock.lock_as_worker();
    const size_t events = core_.step();
    const bool loop_watches = events == 0 && core_.loop_may_have_rails();
    core_.engine_lock.unlock();
    if (events != 0) {
      idle_since = 0;
      worked = true;
      continue;
    }
    cpu_pause();
    if (busy) continue;
    const uint64_t now = now_ns();
    if (idle_since == 0) idle_since = now;
    if (std::exchange(worked, false)) last_event = now;
    if (!loop_watches && (now - idle_since < spin_ns_ || (polls && now - last_event < kPollingSpinNs))) {
      // Beyond the spin that was asked for the core is only borrowed: whoever wants it gets it.
      if (now - idle_since > core_.config.spin_ns) sched_yield();
      continue;
    }
    // Nobody came in a long sleep: nobody is expected the moment after it either.
    if (sleep() < kLongSleepNs) idle_since = 0;
  }
}

// Threads that poll run the engine. The rails are not armed, so nothing but the gate and the time ends it.
void Worker::nap() {
  core_.engine_lock.lock_as_worker();
  core_.gate.prepare();
  core_.poll_turn.nap(true);
  core_.worker_until_ns = now_ns() + PollTurn::kNapNs;
  core_.tallies.sleeps.add(1);
  core_.engine_lock.unlock();
  if (!stopping_.load(std::memory_order_seq_cst)) core_.rail_watch.sleep(true, PollTurn::kNapNs);
  core_.poll_turn.nap(false);
  core_.gate.finish();
}

uint64_t Worker::sleep() {
  core_.engine_lock.lock_as_worker();
  core_.gate.prepare();
  // Looked at after prepare(): whoever rings later finds us sleeping, whoever rang before is seen here.
  const bool sleepy = core_.can_sleep() && !stopping_.load(std::memory_order_seq_cst);
  const bool loop_has_rails = sleepy && core_.loop_takes_rails();
  const uint64_t limit = sleepy ? core_.sleep_limit_ns(loop_has_rails) : 0;
  if (sleepy) {
    core_.tallies.sleeps.add(1);
    core_.trace.point(TracePoint::kSleep, 0, limit);
  }
  core_.engine_lock.unlock();
  if (!sleepy) {
    core_.gate.finish();
    return 0;
  }
  uint64_t slept_ns = 0;
  if (limit != 0) {
    const uint64_t before = now_ns();
    core_.rail_watch.sleep(loop_has_rails, limit);
    slept_ns = now_ns() - before;
    adapt_spin(loop_has_rails ? kLongSleepNs : slept_ns);
  }
  core_.engine_lock.lock_as_worker();
  core_.gate.finish();
  for (const auto& rail : core_.rails) rail->rail->cancel_wait();
  core_.trace.point(TracePoint::kWake, 0, 0);
  core_.engine_lock.unlock();
  return slept_ns;
}

// A sleep that turns out short costs both ends more than spinning through it: the peer pays for the ring, we for the wake-up. So
// while work keeps coming in short gaps the spin grows to span them, and a long sleep takes it back.
void Worker::adapt_spin(uint64_t slept_ns) {
  const uint64_t asked = core_.config.spin_ns;
  if (slept_ns < kShortSleepNs)
    spin_ns_ = std::min(spin_ns_ * 2, asked * kMostSpins);
  else if (slept_ns >= kLongSleepNs)
    spin_ns_ = asked;
}

}  // namespace asyncfabric
