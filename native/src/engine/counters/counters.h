// counters.h: the table of ImmCounters of one fabric: one 64-bit value per imm, kept from the first arrival on.
// arrive() runs under the engine lock; open, close, value and arm may be called from any thread.
// INV-1: a value only grows, and grows only by arrivals of the counter's own generation.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "asyncfabric/types.h"
#include "engine/counters/words.h"

namespace asyncfabric {

// imm32 on the wire: user imm (20 bits) << 12 | generation (2 bits) << 10 | worth - 1 (10 bits).
constexpr uint32_t kMaxWorth = 1024;
constexpr uint32_t pack_imm(uint32_t imm, uint32_t generation, uint32_t worth) {
  return imm << 12 | (generation & 3) << 10 | (worth - 1);
}
constexpr uint32_t imm_of(uint32_t imm32) { return imm32 >> 12; }
constexpr uint32_t generation_of(uint32_t imm32) { return imm32 >> 10 & 3; }
constexpr uint32_t worth_of(uint32_t imm32) { return (imm32 & 1023) + 1; }

struct CounterArrival {
  bool stale = false;    // nobody will ever see it
  bool early = false;    // kept, its counter is not open yet
  bool reached = false;  // the armed target is reached: publish a completion with `cookie` and `value`
  uint64_t cookie = 0;
  uint64_t value = 0;
};

class CounterTable {
 public:
  CounterTable() = default;

  // Called before a flag is raised: returns true once what the arrivals announce is visible to kernels. Set before any arrival.
  using MakeVisible = std::function<bool()>;
  void before_flags(MakeVisible make_visible) { make_visible_ = std::move(make_visible); }

  // Under the engine lock. `unseen`: bytes that arrivals announced may not be visible to kernels yet; cleared when they are.
  CounterArrival arrive(uint32_t imm32, bool* unseen = nullptr);
  CounterArrival check_armed(uint32_t imm);  // engine lock: after arm() returned that the target is already reached

  // kNoImm picks one that was not used for the longest time. kUnconfirmed: it was closed, and confirm_closed() has not come.
  Status open(int64_t imm, CounterId* id, uint32_t* imm_out);
  // From here on arrivals are stale. The imm gets the generation of its next opening, for which peers have to be asked.
  void close(CounterId id);
  bool has_closed() const { return any_closed_.load(std::memory_order_seq_cst); }
  // Under the engine lock: calls visit(imm, generation of its next opening) for each that was closed since the last call.
  template <class Visit>
  void take_closed(Visit visit) {
    for (const Closed& closed : closed_since()) visit(closed.imm, closed.generation);
  }
  void confirm_closed(uint32_t imm);  // no arrival of an earlier generation can come any more
  bool is_open(CounterId id) const;
  uint64_t value(CounterId id) const;  // of a closed counter: 0
  // True: target already reached; the caller lets the lock's holder call check_armed(). False: a completion will come. Replaces.
  bool arm(CounterId id, uint64_t cookie, uint64_t target);
  uint32_t generation(uint32_t imm) const;
  // A word that follows the value, for kernels and streams: taken from `words` at the first call. Null: closed, or none is free.
  uint64_t* flag(CounterId id, SharedWords& words);

 private:
  static constexpr uint64_t kNever = ~0ull;
  static constexpr int kTagShift = 56;
  static constexpr uint64_t kCountMask = (1ull << kTagShift) - 1;
  static constexpr uint32_t kPageBits = 10;
  static constexpr uint32_t kFirstPicked = 1u
                                           << 19;  // picked imms live in the upper half, user-named ones usually below

  enum State : uint32_t { kUnused = 0, kOpen = 1, kShut = 2 };

  struct Entry {
    std::atomic<uint64_t> value{
        0};  // opens << 56 | count; partner: engine lock swaps, open() re-tags, any thread loads
    std::atomic<uint64_t> armed_target{kNever};  // partner: loop thread stores, engine lock compares and swaps
    std::atomic<uint64_t> cookie{0};             // stored before armed_target
    std::atomic<uint64_t*> flag{
        nullptr};  // partner: flag() stores, then reads value; the lock's holder adds to value, then loads
    std::atomic<uint32_t> state{
        kUnused};  // state | generation << 2 | unconfirmed << 4 | opens << 8; partner: mutex holders store, engine lock loads
  };
  using Page = std::array<Entry, 1u << kPageBits>;

  Entry& entry(uint32_t imm);
  CounterArrival reach(Entry& target, uint64_t value);
  Entry* find(CounterId id) const;
  struct Closed {
    uint32_t imm = 0;
    uint32_t generation = 0;
    uint64_t* flag = nullptr;
  };
  std::vector<Closed> closed_since();

  MakeVisible make_visible_ = [] { return true; };
  std::mutex mutex_;  // open, close, flags, and making of pages
  SharedWords* flag_words_ = nullptr;
  std::vector<Closed> closed_;  // since the lock holder's last look; guarded by mutex_
  std::atomic<bool> any_closed_{
      false};  // partner: close() stores, the lock's holder and a worker that goes to sleep load
  std::array<std::atomic<Page*>, ((kMaxImm + 1) >> kPageBits)> pages_{};
  std::array<std::unique_ptr<Page>, ((kMaxImm + 1) >> kPageBits)> owned_;
  std::atomic<uint32_t> next_pick_{kFirstPicked};  // relaxed: a guess where the next free one is
};

}  // namespace asyncfabric
