// inbound.h: who may be writing to us: the connections that peers opened towards this rail, as they reported when they began. A fence asks them.
// A connection ends without a word, and a fence may not come for weeks; so whoever begins one in a crowd has some of the others looked after:
// those that are gone are taken out, and there is room for the living. [control] and [engine lock] calls, which never overlap on these rails.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::libfabric {

class InboundList {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMost = 4096;  // hostile introductions must not grow without bound
  static constexpr size_t kCrowd = 16;   // so few are left alone
  static constexpr int kTurns = 4;
  static constexpr std::chrono::seconds kAnswersWithin{1}, kLately{10};

  struct One {
    uint64_t connection = 0;
    RailAddress sender;
    uint64_t answered = 0;    // newest fence number it answered
    Clock::time_point asked;  // when it was looked after, if it has not answered since
    std::string stream;       // the far end of the stream that it comes over, by its own word; empty: unknown
    bool streamless = false;  // no stream of it was left when it was asked last, and it has not answered since
    bool gone = false;
  };

  // What those have done who named a stream as theirs.
  struct Claim {
    bool answered = true;
    bool shut_out = false;
  };

  // False: known, and on a new stream now, or there is no room.
  bool add(uint64_t connection, RailAddress sender) {
    if (One* known = find(connection)) known->stream.clear();
    if (found_.size() >= kMost || find(connection) != nullptr) return false;
    One& one = found_.emplace_back();
    one.connection = connection;
    one.sender = std::move(sender);
    return true;
  }

  // Who has not answered at its next turn is probed, refuses(sender), and not before: to probe another host opens a connection there.
  template <class Ask, class Refuses>
  void look_after(Clock::time_point now, Ask ask, Refuses refuses) {
    for (int turn = 0; turn < kTurns && found_.size() > kCrowd; ++turn) {
      turn_ = (turn_ + 1) % found_.size();
      One& one = found_[turn_];
      const bool asked = one.asked != Clock::time_point{};
      if (!one.gone && asked && now < one.asked + kAnswersWithin) continue;
      if (one.gone || (asked && refuses(one.sender))) {
        found_.erase(found_.begin() + static_cast<ptrdiff_t>(turn_));
        last_gone_ = now;
        continue;
      }
      one.asked = now;
      ask(one);
    }
  }

  void answer(uint64_t connection, uint64_t number, bool gone, std::string_view stream) {
    One* one = find(connection);
    if (one == nullptr) return;
    one->asked = {};
    one->streamless = false;
    if (!stream.empty()) one->stream = stream;
    if (gone)
      one->gone = true;
    else
      one->answered = std::max(one->answered, number);
  }

  static bool is_open(const One& one, uint64_t number) { return !one.gone && one.answered < number; }
  bool any_open(uint64_t number) const {
    return std::any_of(found_.begin(), found_.end(), [number](const One& one) { return is_open(one, number); });
  }
  // When the first of those was asked that have not answered.
  Clock::time_point asked_since(uint64_t number, Clock::time_point now) const {
    for (const One& one : found_)
      if (is_open(one, number) && one.asked != Clock::time_point{}) now = std::min(now, one.asked);
    return now;
  }
  bool only_streamless_open(uint64_t number) const {
    return std::all_of(found_.begin(), found_.end(),
                       [number](const One& one) { return !is_open(one, number) || one.streamless; });
  }
  template <class ShutOut>
  std::unordered_map<std::string, Claim> claims(uint64_t number, ShutOut is_shut_out) const {
    std::unordered_map<std::string, Claim> found;
    for (const One& one : found_) {
      if (one.stream.empty()) continue;
      Claim& claim = found[one.stream];
      claim.answered = claim.answered && !is_open(one, number);
      claim.shut_out = claim.shut_out || is_shut_out(one);
    }
    return found;
  }
  // None of those that have not answered has a stream left, so nothing of them is on its way. One that lives may open another: unless it is
  // dead it is asked again by the next fence.
  template <class Dead>
  void conclude(uint64_t number, Dead is_dead) {
    std::erase_if(found_, [&](One& one) {
      if (!is_open(one, number)) return false;
      one.answered = number;
      one.streamless = true;
      return static_cast<bool>(is_dead(one.sender));
    });
  }
  // The stream of one that is gone may still bring what the kernel holds.
  bool any_gone_lately(Clock::time_point now) const {
    return (last_gone_ != Clock::time_point{} && now < last_gone_ + kLately) ||
           std::any_of(found_.begin(), found_.end(), [](const One& one) { return one.gone; });
  }
  void drop_gone() {
    std::erase_if(found_, [](const One& one) { return one.gone; });
  }

  auto begin() { return found_.begin(); }
  auto end() { return found_.end(); }
  size_t size() const { return found_.size(); }

 private:
  One* find(uint64_t connection) {
    const auto found = std::find_if(found_.begin(), found_.end(),
                                    [connection](const One& one) { return one.connection == connection; });
    return found != found_.end() ? &*found : nullptr;
  }

  std::vector<One> found_;
  size_t turn_ = 0;  // whose turn was last
  Clock::time_point last_gone_;
};

}  // namespace asyncfabric::libfabric
