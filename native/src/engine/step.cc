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
    if (op.cancel_generation.load(std::memory_order_seq_cst) == op.generation.load(std::memory_order_relaxed)) cancel(op);
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
  // Reading the clock costs as much as an idle pass: look only when a deadline can be near.
  if (next_tick_ns != ~0ull && (events == 0 || next_tick_ns == 0))
    if (const uint64_t now = now_ns(); now >= next_tick_ns) tick(now);
  flush_completions();
  tallies.steps.add(1);
  return events;
}

void Core::publish(const Completion& completion) {
  if (!backlog.empty() || !ring.stage(completion)) backlog.push_back(completion);
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

uint64_t Core::sleep_limit_ns() const {
  uint64_t limit = 3'600'000'000'000ull;
  if (next_tick_ns != ~0ull) {
    const uint64_t now = now_ns();
    limit = next_tick_ns > now ? next_tick_ns - now : 0;
  }
  if (watches.any_armed()) limit = std::min<uint64_t>(limit, 50'000);  // stores to a word ring nothing
  for (const auto& rail : rails)
    if (rail->rail->wait_fd() < 0) limit = std::min<uint64_t>(limit, live_count != 0 ? 50'000 : 1'000'000);
  return limit;
}

}  // namespace asyncfabric
