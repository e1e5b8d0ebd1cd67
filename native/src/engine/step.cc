// step.cc: one pass of the engine, and the look that decides whether the worker may sleep. Helm.
#include <algorithm>

#include "engine/core.h"

namespace asyncfabric {

size_t Core::step() {
  size_t events = 0;
  while (MailLink* link = mailbox.pop()) {
    start(*static_cast<Op*>(link));
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
  if (writable_wanted.load(std::memory_order_acquire)) tell_writable();
  flush_completions();
  tallies.steps.add(1);
  return events;
}

void Core::publish(const Completion& completion) {
  if (!backlog.empty() || !ring.stage(completion)) backlog.push_back(completion);
}

bool Core::has_room() const {
  // Completions that nobody took count too, so the ring that carries them cannot run over.
  return submitted.load(std::memory_order_relaxed) - consumed.load(std::memory_order_relaxed) < 2ull * config.max_ops &&
         ops.has_free();
}

void Core::tell_writable() {
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

void Core::flush_completions() {
  if (!backlog.empty()) {
    size_t moved = 0;
    while (moved < backlog.size() && ring.stage(backlog[moved])) ++moved;
    backlog.erase(backlog.begin(), backlog.begin() + static_cast<ptrdiff_t>(moved));
    backlogged.store(!backlog.empty(), std::memory_order_seq_cst);
  }
  if (!ring.has_staged()) return;
  ring.publish();
  if (loop_gate.notify()) tallies.loop_wakes.add(1);
}

// After a guest's pass: is there anything that needs a thread which stays?
bool Core::settled() const {
  if (!mailbox.empty() || !cancels.empty() || !outgoing.empty() || next_tick_ns == 0) return false;
  for (const auto& rail : rails)
    if (!rail->urgent.empty() || !rail->bulk.empty()) return false;
  return true;
}

bool Core::can_sleep() {
  if (!mailbox.empty() || !cancels.empty() || !outgoing.empty() || ring.has_staged()) return false;
  for (const auto& rail : rails)
    if (rail->up.load(std::memory_order_relaxed) && (!rail->urgent.empty() || !rail->bulk.empty())) return false;
  for (size_t i = 0; i < rails.size(); ++i)
    if (!rails[i]->rail->prepare_wait()) {
      for (size_t undo = 0; undo <= i; ++undo) rails[undo]->rail->cancel_wait();
      return false;
    }
  return true;
}

uint64_t Core::sleep_limit_ns() {
  uint64_t limit = 3'600'000'000'000ull;
  if (next_tick_ns != ~0ull) {
    const uint64_t now = now_ns();
    limit = next_tick_ns > now ? next_tick_ns - now : 0;
  }
  if (watches.any_armed()) limit = std::min<uint64_t>(limit, 50'000);  // stores to a word ring nothing
  for (const auto& rail : rails)
    if (rail->rail->wait_fd() < 0) {
      limit = std::min(limit, live_count != 0 ? kShortestNapNs : nap_ns);
      nap_ns = std::min(nap_ns * 2, kLongestNapNs);
    }
  return limit;
}

}  // namespace asyncfabric
