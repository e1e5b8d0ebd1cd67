// step.cc: one pass of the engine, and the look that decides whether the worker may sleep. Under the engine lock.
#include <algorithm>
#include <utility>

#include "engine/core.h"

namespace asyncfabric {

size_t Core::step() {
  size_t events = 0;
  while (MailLink* link = mailbox.pop()) {
    start(*static_cast<Op*>(link));
    ++events;
  }
  if (inbox.due()) {
    credit_senders();
    ++events;
  }
  if (!closings_there.empty()) {
    take_closings();
    ++events;
  }
  if (counters.has_closed()) {
    report_closings();
    ++events;
  }
  // After the submissions: who cancels has submitted before.
  while (MailLink* link = cancels.pop()) {
    Op& op = *static_cast<Op::CancelLink*>(link)->op;
    op.cancel_queued.store(0, std::memory_order_seq_cst);
    if (op.cancel_generation.load(std::memory_order_seq_cst) == op.generation.load(std::memory_order_relaxed))
      cancel(op);
    ++events;
  }
  if (!marked.empty()) events += start_marked();
  if (!outgoing.empty()) events += flush_outgoing();
  for (uint32_t rail = 0; rail < rails.size(); ++rail) {
    events += post(rail);
    events += poll(rail);
  }
  events += watches.look([this](uint64_t cookie, uint64_t value) {
    publish({.cookie = cookie, .kind = CompletionKind::kWatch, .value = value});
  });
  if (events != 0) nap_ns = kShortestNapNs;
  // Ops that are in flight are watched: their peer may have been stopped.
  if (events == 0 && live_count != 0 && next_tick_ns == ~0ull) next_tick_ns = now_ns() + kPulseNs;
  // Reading the clock costs as much as an idle pass: look only when a deadline can be near.
  if (next_tick_ns != ~0ull && (events == 0 || next_tick_ns == 0))
    if (const uint64_t now = now_ns(); now >= next_tick_ns) tick(now);
  if (writable_wanted.load(std::memory_order_acquire)) notify_writable();
  flush_completions();
  tallies.steps.add(1);
  return events;
}

void Core::publish(const Completion& completion) {
  hurry = hurry || completion.kind != CompletionKind::kOp || !completion.status.ok() || completion.bytes < kBulkBytes;
  if (!backlog.empty() || !ring.stage(completion)) backlog.push_back(completion);
}

bool Core::has_room() const {
  // Completions that nobody took count too, so the ring that carries them cannot run over.
  return submitted.load(std::memory_order_relaxed) - consumed.load(std::memory_order_relaxed) < 2ull * config.max_ops &&
         ops.has_free();
}

void Core::notify_writable() {
  if (!has_room()) return;  // looked at again when an op ends and when completions are taken
  const std::lock_guard lock(writable_mutex);
  writable_wanted.store(false, std::memory_order_release);
  for (const uint64_t cookie : writable_cookies) publish({.cookie = cookie, .kind = CompletionKind::kWritable});
  writable_cookies.clear();
}

void Core::note_error(std::string text) {
  const std::lock_guard lock(error_mutex);
  last_error = std::move(text);
}

// Cookies grow, so the first one is the oldest.
void Core::note_reason(uint64_t cookie, const std::string& text) {
  constexpr size_t kMostReasons = 64;
  if (text.empty()) return;
  const std::lock_guard lock(error_mutex);
  reasons[cookie] = text;
  if (reasons.size() > kMostReasons) reasons.erase(reasons.begin());
}

void Core::flush_completions() {
  if (!backlog.empty()) {
    size_t moved = 0;
    while (moved < backlog.size() && ring.stage(backlog[moved])) ++moved;
    backlog.erase(backlog.begin(), backlog.begin() + static_cast<ptrdiff_t>(moved));
    backlogged.store(!backlog.empty(), std::memory_order_seq_cst);
  }
  if (ring.has_staged()) {
    ring.publish();
    ring_owed = true;
  }
  // Waking a sleeper costs this thread microseconds. While there is bulk left to copy nobody gains by learning of each piece at
  // once, so the ring is owed for a few passes; can_sleep() and Moment see that it is paid.
  if (!ring_owed || (!hurry && ring_delay++ < kRingDelay && bulk_waits())) return;
  ring_loop();
}

void Core::ring_loop() {
  ring_owed = hurry = false;
  ring_delay = 0;
  if (loop_gate.notify()) tallies.loop_wakes.add(1);
}

bool Core::bulk_waits() const {
  return std::any_of(rails.begin(), rails.end(), [](const auto& rail) { return !rail->bulk.empty(); });
}

// After a caller thread's pass: is there anything that needs a thread which stays?
bool Core::settled() const {
  if (!mailbox.empty() || !cancels.empty() || !outgoing.empty() || !marked.empty() || next_tick_ns < worker_until_ns ||
      !closings_there.empty() || counters.has_closed() || inbox.due())
    return false;
  for (const auto& rail : rails)
    if (!rail->urgent.empty() || !rail->bulk.empty()) return false;
  return true;
}

bool Core::can_sleep() {
  if (!mailbox.empty() || !cancels.empty() || !outgoing.empty() || !marked.empty() || ring.has_staged() || ring_owed ||
      !closings_there.empty() || counters.has_closed() || inbox.due())
    return false;
  for (const auto& rail : rails)
    if (rail->up.load(std::memory_order_relaxed) && (!rail->urgent.empty() || !rail->bulk.empty())) return false;
  for (size_t i = 0; i < rails.size(); ++i)
    if (!rails[i]->rail->prepare_wait()) {
      for (size_t undo = 0; undo <= i; ++undo) rails[undo]->rail->cancel_wait();
      return false;
    }
  return true;
}

// Then the worker need not spin either: it would only stand between the rails and the loop.
bool Core::loop_may_have_rails() const {
  return may_hand_over() && vain_sleeps == 0 && live_count == 0 && loop_gate.sleeping();
}

// A loop that sleeps, or came to sleep since the worker's last look, will see the rails before the worker could wake it.
bool Core::loop_takes_rails() {
  const uint64_t seen = std::exchange(arms_seen, arms.load(std::memory_order_relaxed));
  if (vain_sleeps != 0) {
    --vain_sleeps;
    return false;
  }
  return may_hand_over() && live_count == 0 && (loop_gate.sleeping() || seen != arms_seen);
}

uint64_t Core::sleep_limit_ns(bool loop_has_rails) {
  const uint64_t now = now_ns();
  uint64_t limit = 3'600'000'000'000ull;
  if (next_tick_ns != ~0ull) limit = next_tick_ns > now ? next_tick_ns - now : 0;
  if (loop_has_rails) {
    limit = std::min(limit, std::min(nap_ns * kLoopNaps, kLongestNapNs));
    nap_ns = std::max(nap_ns, std::min(nap_ns * 2, kLongestNapNs));
  }
  if (watches.any_armed()) limit = std::min<uint64_t>(limit, 50'000);  // stores to a word ring nothing
  for (const auto& rail : rails)
    if (rail->rail->wait_fd() < 0) {
      limit = std::min(limit, live_count != 0 ? kShortestNapNs : nap_ns);
      nap_ns =
          nap_ns < kLongestNapNs ? std::min(nap_ns * 2, kLongestNapNs) : std::min(nap_ns + nap_ns / 64, kIdleNapNs);
    }
  worker_until_ns = now + limit;
  return limit;
}

}  // namespace asyncfabric
