// counters.cc: see counters.h.
#include "engine/counters/counters.h"

#include <utility>

namespace asyncfabric {

namespace {

constexpr uint32_t state_of(uint32_t word) { return word & 3; }
constexpr uint32_t generation_in(uint32_t word) { return word >> 2 & 3; }
constexpr uint32_t kUnconfirmed = 1u << 4;
constexpr uint32_t opens_in(uint32_t word) { return word >> 8; }
constexpr uint32_t make_word(uint32_t state, uint32_t generation, uint32_t opens) {
  return state | (generation & 3) << 2 | opens << 8;
}
constexpr CounterId make_id(uint32_t imm, uint32_t opens) { return uint64_t{opens & 0xffffff} << 32 | (imm + 1); }

// Two threads may raise one flag: it only grows.
void raise(uint64_t* flag, uint64_t value) {
  std::atomic_ref word(*flag);
  uint64_t now = word.load(std::memory_order_relaxed);
  while (now < value && !word.compare_exchange_weak(now, value, std::memory_order_release)) {}
}

}  // namespace

CounterTable::Entry& CounterTable::entry(uint32_t imm) {
  const uint32_t index = imm >> kPageBits;
  Page* page = pages_[index].load(std::memory_order_acquire);
  if (page == nullptr) {
    const std::lock_guard lock(mutex_);
    page = pages_[index].load(std::memory_order_relaxed);
    if (page == nullptr) {
      owned_[index] = std::make_unique<Page>();
      page = owned_[index].get();
      pages_[index].store(page, std::memory_order_release);
    }
  }
  return (*page)[imm & ((1u << kPageBits) - 1)];
}

CounterTable::Entry* CounterTable::find(CounterId id) const {
  const uint32_t imm = static_cast<uint32_t>(id) - 1;
  if (imm > kMaxImm) return nullptr;
  Page* page = pages_[imm >> kPageBits].load(std::memory_order_acquire);
  if (page == nullptr) return nullptr;
  Entry& found = (*page)[imm & ((1u << kPageBits) - 1)];
  const uint32_t word = found.state.load(std::memory_order_acquire);
  return state_of(word) == kOpen && (opens_in(word) & 0xffffff) == id >> 32 ? &found : nullptr;
}

CounterArrival CounterTable::reach(Entry& target, uint64_t value) {
  CounterArrival arrival;
  arrival.value = value;
  uint64_t armed = target.armed_target.load(std::memory_order_seq_cst);
  if (armed != kNever && value >= armed &&
      target.armed_target.compare_exchange_strong(armed, kNever, std::memory_order_acq_rel)) {
    arrival.reached = true;
    arrival.cookie = target.cookie.load(std::memory_order_acquire);
  }
  return arrival;
}

CounterArrival CounterTable::arrive(uint32_t imm32, bool* unseen) {
  Entry& target = entry(imm_of(imm32));
  for (;;) {
    const uint32_t word = target.state.load(std::memory_order_acquire);
    if (state_of(word) == kShut || generation_in(word) != generation_of(imm32)) return {.stale = true};
    uint64_t value = target.value.load(std::memory_order_relaxed);
    // The tag names the opening for which this value counts. Without it an arrival that was judged before a close and added after the
    // next open would count for the wrong user. The first open keeps what came early: tags 0 and 1 are the same counter.
    const uint64_t tag = value >> kTagShift;
    const bool same = state_of(word) == kUnused ? tag <= 1 : tag == (opens_in(word) & 0xff);
    if (!same) continue;  // open() is between its two stores
    // seq_cst: pairs with arm(): either we see its target or it sees our value.
    if (!target.value.compare_exchange_weak(value, value + worth_of(imm32), std::memory_order_seq_cst)) continue;
    if (uint64_t* flag = target.flag.load(std::memory_order_seq_cst); flag != nullptr) {
      if (unseen != nullptr && *unseen) *unseen = !make_visible_();
      if (unseen == nullptr || !*unseen) raise(flag, (value & kCountMask) + worth_of(imm32));
    }
    CounterArrival arrival = reach(target, (value & kCountMask) + worth_of(imm32));
    arrival.early = state_of(word) == kUnused;
    return arrival;
  }
}

CounterArrival CounterTable::check_armed(uint32_t imm) {
  Entry& target = entry(imm);
  return reach(target, target.value.load(std::memory_order_seq_cst) & kCountMask);
}

Status CounterTable::open(int64_t imm, CounterId* id, uint32_t* imm_out) {
  if (imm < kNoImm || imm > kMaxImm) return StatusCode::kInvalidArgument;
  uint32_t chosen = static_cast<uint32_t>(imm);
  if (imm == kNoImm) {
    // Going round the upper half: an imm comes back only after half a million others, and its peers have long confirmed.
    StatusCode none = StatusCode::kBusy;
    for (uint32_t tries = 0;; ++tries) {
      if (tries > kMaxImm - kFirstPicked) return none;
      chosen = next_pick_.load(std::memory_order_relaxed);
      next_pick_.store(chosen == kMaxImm ? kFirstPicked : chosen + 1, std::memory_order_relaxed);
      const Entry& candidate = entry(chosen);
      const uint32_t word = candidate.state.load(std::memory_order_acquire);
      if ((word & kUnconfirmed) != 0)
        none = StatusCode::kUnconfirmed;
      else if (state_of(word) == kShut ||
               (state_of(word) == kUnused && (candidate.value.load(std::memory_order_relaxed) & kCountMask) == 0))
        break;
    }
  }
  Entry& target = entry(chosen);
  const std::lock_guard lock(mutex_);
  const uint32_t word = target.state.load(std::memory_order_relaxed);
  if (state_of(word) == kOpen) return StatusCode::kBusy;
  if ((word & kUnconfirmed) != 0) return StatusCode::kUnconfirmed;
  const uint32_t opens = (opens_in(word) + 1) & 0xffffff;
  const uint64_t tag = uint64_t{opens & 0xff} << kTagShift;
  if (state_of(word) == kShut) {
    target.value.store(tag, std::memory_order_seq_cst);
  } else {
    uint64_t early = target.value.load(std::memory_order_relaxed);
    while (!target.value.compare_exchange_weak(early, tag | (early & kCountMask), std::memory_order_seq_cst)) {}
  }
  target.armed_target.store(kNever, std::memory_order_relaxed);
  target.state.store(make_word(kOpen, generation_in(word), opens), std::memory_order_release);
  *id = make_id(chosen, opens);
  *imm_out = chosen;
  return {};
}

void CounterTable::close(CounterId id) {
  const std::lock_guard lock(mutex_);
  Entry* target = find(id);
  if (target == nullptr) return;
  const uint32_t word = target->state.load(std::memory_order_relaxed), generation = (generation_in(word) + 1) & 3;
  target->armed_target.store(kNever, std::memory_order_seq_cst);
  // An arrival that is being counted may have the flag in its hands: it is handed on by the lock's holder, between two arrivals.
  uint64_t* flag = target->flag.exchange(nullptr, std::memory_order_seq_cst);
  if (flag != nullptr) SharedWords::release(flag);
  target->state.store(make_word(kShut, generation, opens_in(word)) | kUnconfirmed, std::memory_order_release);
  closed_.push_back({static_cast<uint32_t>(id) - 1, generation, flag});
  any_closed_.store(true, std::memory_order_seq_cst);
}

std::vector<CounterTable::Closed> CounterTable::closed_since() {
  const std::lock_guard lock(mutex_);
  any_closed_.store(false, std::memory_order_seq_cst);
  for (const Closed& closed : closed_)
    if (closed.flag != nullptr) flag_words_->give_back(closed.flag);
  return std::exchange(closed_, {});
}

void CounterTable::confirm_closed(uint32_t imm) {
  Entry& target = entry(imm);
  const std::lock_guard lock(mutex_);
  target.state.fetch_and(~kUnconfirmed, std::memory_order_release);
}

bool CounterTable::is_open(CounterId id) const { return find(id) != nullptr; }

uint64_t CounterTable::value(CounterId id) const {
  const Entry* target = find(id);
  return target == nullptr ? 0 : target->value.load(std::memory_order_acquire) & kCountMask;
}

bool CounterTable::arm(CounterId id, uint64_t cookie, uint64_t target) {
  Entry* armed = find(id);
  if (armed == nullptr) return false;
  armed->cookie.store(cookie, std::memory_order_release);
  armed->armed_target.store(target, std::memory_order_seq_cst);
  return (armed->value.load(std::memory_order_seq_cst) & kCountMask) >= target;
}

uint64_t* CounterTable::flag(CounterId id, SharedWords& words) {
  const std::lock_guard lock(mutex_);
  Entry* target = find(id);
  if (target == nullptr) return nullptr;
  uint64_t* flag = target->flag.load(std::memory_order_relaxed);
  if (flag != nullptr) return flag;
  flag_words_ = &words;
  flag = words.take_flag();
  if (flag == nullptr) return nullptr;
  target->flag.store(flag, std::memory_order_seq_cst);
  // What was counted before there was a flag was made visible by nobody. In this order: it covers what the value covers.
  const uint64_t counted = target->value.load(std::memory_order_seq_cst) & kCountMask;
  if (counted == 0 || make_visible_()) raise(flag, counted);
  return flag;
}

uint32_t CounterTable::generation(uint32_t imm) const {
  const Page* page = pages_[imm >> kPageBits].load(std::memory_order_acquire);
  if (page == nullptr) return 0;
  return generation_in((*page)[imm & ((1u << kPageBits) - 1)].state.load(std::memory_order_acquire));
}

}  // namespace asyncfabric
