// loop_turn.h: when the event loop, about to sleep, should linger for the answer instead. Event loop's thread.
// Going to sleep and being woken costs both ends more than a short spin. So after two sleeps that turned out short the next one
// begins with a spin, as long as the answers took: an answer from a peer that must be woken itself takes several times spin_ns, and
// only a spin that spans it ever finds both ends awake. Each spin in vain doubles the number of short sleeps that are asked for before the next try, so that two
// programs which share a core, where spinning only delays the answer, stop doing it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace asyncfabric {

class LoopTurn {
 public:
  bool worth_lingering() const { return short_sleeps_ >= asked_; }

  void lingered(bool in_vain) {
    asked_ = in_vain ? std::min(asked_ * 2, kMostAsked) : kFewestAsked;
    if (in_vain) short_sleeps_ = 0;
  }

  void slept(uint64_t ns, uint64_t spin_ns) {
    const bool was_short = ns < kShortSpins * spin_ns;
    short_sleeps_ = was_short ? short_sleeps_ + 1 : 0;
    longest_ns_ = was_short ? std::max(ns, longest_ns_ - longest_ns_ / 8) : 0;
  }

  // How long to linger, ns.
  uint64_t patience(uint64_t spin_ns) const {
    return std::clamp(longest_ns_ + longest_ns_ / 2, spin_ns, kShortSpins * spin_ns);
  }

 private:
  static constexpr uint32_t kFewestAsked = 2;
  static constexpr uint32_t kMostAsked = 4096;
  static constexpr uint64_t kShortSpins = 4;  // waking up is a part of the sleep

  uint32_t short_sleeps_ = 0;
  uint32_t asked_ = kFewestAsked;
  uint64_t longest_ns_ = 0;  // of the latest short sleeps, fading
};

}  // namespace asyncfabric
