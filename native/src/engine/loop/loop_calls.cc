// loop_calls.cc: how the event loop goes to sleep and wakes up. Event loop's thread (one thread at a time), as a caller thread under the engine lock while the worker sleeps.
#include <sched.h>

#include "engine/native_engine.h"

namespace asyncfabric {

namespace {

constexpr int kCallerPasses = 4;  // of the event loop, before it calls the worker for what keeps coming
constexpr uint64_t kAssistNs = 1'000'000;
constexpr uint32_t kVainSleeps = 16;  // of the worker, after the rails woke the loop for nothing

}  // namespace

bool NativeEngine::has_completions() const {
  return !core_.ring.empty() || core_.backlogged.load(std::memory_order_seq_cst);
}

bool NativeEngine::arm() {
  if (has_completions()) return false;
  core_.poll_turn.stop();
  if (core_.poll_turn.napping()) core_.gate.notify();
  if (core_.may_hand_over() && turn_.worth_lingering() && core_.gate.sleeping() && linger()) return false;
  if (core_.config.polling == PollingMode::kBusy && turn_.worth_lingering() && watch_ring()) return false;
  core_.loop_gate.prepare();
  if (has_completions()) {
    core_.loop_gate.finish();
    return false;
  }
  core_.arms.fetch_add(1, std::memory_order_relaxed);
  armed_ns_ = now_ns();
  return true;
}

// The loop may have been woken by a rail.
void NativeEngine::disarm() {
  core_.loop_gate.finish();
  if (!core_.may_hand_over() && core_.config.polling != PollingMode::kBusy) return;
  turn_.slept(now_ns() - armed_ns_, core_.config.spin_ns);
  if (!core_.may_hand_over() || !core_.gate.sleeping()) return;
  EngineLock::Caller caller(core_.engine_lock);
  bool quiet = false;
  if (caller.try_lock()) {
    const size_t events = serve_rails(&quiet);
    if (events != 0 && !has_completions()) {  // arrivals that nobody here waits for: the worker's, for a while
      core_.vain_sleeps = kVainSleeps;
      quiet = false;
    }
    caller.unlock();
  }
  if (!quiet) core_.gate.notify();
}

// A program that polls keeps a core. If only the worker moved its bytes, each of them would wait until the scheduler takes that core,
// or another, from somebody. So the poller steps the engine itself, as long as a pass finds something to do.
void NativeEngine::assist() {
  if (core_.config.polling != PollingMode::kAdaptive) return;
  const uint64_t begin = now_ns();
  const bool quick = core_.poll_turn.begin(begin);
  bool quiet = true;
  {
    EngineLock::Caller caller(core_.engine_lock);
    if (!caller.try_lock()) {
      core_.poll_turn.end(begin, quick);
      sched_yield();
      return;
    }
    const bool armed = core_.gate.sleeping() && !core_.poll_turn.napping();
    if (armed && !quick)
      (void)serve_rails(&quiet);
    else
      while (core_.step() != 0 && !has_completions() && now_ns() - begin < kAssistNs) {}
    quiet = quiet && !(armed && quick);  // a worker that sleeps on armed rails is called, to nap
    caller.unlock();
  }
  core_.poll_turn.end(now_ns(), quick);
  if (!quiet) core_.gate.notify();
}

bool NativeEngine::look() {
  if (has_completions()) return true;
  assist();
  return has_completions();
}

// Under the engine lock, while the worker sleeps: does what is to do and arms the rails again, as if the worker had. Not quiet: wake it.
size_t NativeEngine::serve_rails(bool* quiet) {
  size_t events = 0;
  *quiet = false;
  for (int pass = 0; pass < kCallerPasses && core_.gate.sleeping() && !*quiet; ++pass) {
    for (const auto& rail : core_.rails) rail->rail->cancel_wait();
    events += core_.step();
    *quiet = core_.settled() && core_.can_sleep();
  }
  return events;
}

// Who gave the worker a core of its own has one for the loop as well: an answer that comes soon is met awake, since falling asleep
// and being rung costs more than it took to come. True: completions came.
bool NativeEngine::watch_ring() {
  const uint64_t until = now_ns() + core_.config.spin_ns;
  while (!has_completions() && now_ns() < until) cpu_pause();
  const bool came = has_completions();
  turn_.lingered(!came);
  return came;
}

// Looks at the rails for a moment before sleeping; peers need not ring meanwhile. True: completions came.
bool NativeEngine::linger() {
  const uint64_t until = now_ns() + turn_.patience(core_.config.spin_ns);
  bool quiet = false;
  {
    EngineLock::Caller caller(core_.engine_lock);
    if (!caller.try_lock()) return false;
    if (!core_.gate.sleeping()) {
      caller.unlock();
      return false;
    }
    for (const auto& rail : core_.rails) rail->rail->cancel_wait();
    while (!has_completions() && now_ns() < until) {
      if (core_.step() == 0) cpu_pause();
      if (!core_.settled()) break;
    }
    (void)serve_rails(&quiet);
    caller.unlock();
  }
  if (!quiet) core_.gate.notify();
  const bool came = has_completions();
  turn_.lingered(!came);
  return came;
}

}  // namespace asyncfabric
