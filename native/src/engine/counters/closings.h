// closings.h: the two ends of closing a counter. Its owner asks each peer, in numbered lists of imms; a peer confirms a list when all counted work
// that it had submitted for those imms before it took the list has ended (INV-1: only then the owner opens such an imm again). A list is taken
// once, however often and in whatever order it comes, so a late copy never brings an old generation back. Pure, engine lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "asyncfabric/types.h"

namespace asyncfabric {

// A closed imm and the generation of its next opening, in one word.
constexpr uint32_t closing_of(uint32_t imm, uint32_t generation) { return imm << 2 | (generation & 3); }
constexpr uint32_t closed_imm(uint32_t closing) { return closing >> 2; }

using Closings = std::vector<uint32_t>;

constexpr uint64_t kListsAtOnce = 64;                                         // unconfirmed, of one peer
constexpr size_t kClosingsPerList = kMaxMessageBytes / sizeof(uint32_t) / 2;  // well within one message

// The owner's end, for one peer.
class ClosingsAsked {
 public:
  bool empty() const { return unsent_.empty() && lists_.empty(); }
  void add(uint32_t closing) { unsent_.push_back(closing); }

  // Calls send(number, closings) for what was added, as far as lists may be open at a time.
  template <class Send>
  void send_new(Send send) {
    while (!unsent_.empty() && lists_.size() < kListsAtOnce) {
      const size_t count = std::min(unsent_.size(), kClosingsPerList);
      List& list = lists_[++last_];
      list.closings.assign(unsent_.begin(), unsent_.begin() + static_cast<ptrdiff_t>(count));
      unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<ptrdiff_t>(count));
      send(last_, list.closings);
    }
  }
  // The same for all lists that are not confirmed: a message may have been lost.
  template <class Send>
  void send_again(Send send) const {
    for (const auto& [number, list] : lists_) send(number, list.closings);
  }

  // The confirmation that came over one of `lanes` lanes. Behind it nothing old comes over that lane, so it takes all of them; then these are
  // the closings of the list, else none.
  Closings confirmed(uint64_t number, uint32_t lane, uint32_t lanes) {
    const auto found = lists_.find(number);
    if (found == lists_.end() || lanes == 0 || lanes > 64 || lane >= lanes) return {};
    List& list = found->second;
    if (list.lanes != lanes) list.seen = 0;
    list.lanes = lanes;
    list.seen |= uint64_t{1} << lane;
    if (list.seen != ~uint64_t{0} >> (64 - lanes)) return {};
    Closings closings = std::move(list.closings);
    lists_.erase(found);
    return closings;
  }

  template <class Visit>
  void for_each(Visit visit) const {
    for (const auto& [number, list] : lists_)
      for (const uint32_t closing : list.closings) visit(closing);
    for (const uint32_t closing : unsent_) visit(closing);
  }

 private:
  struct List {
    Closings closings;
    uint32_t lanes = 0;
    uint64_t seen = 0;
  };
  Closings unsent_;
  std::map<uint64_t, List> lists_;
  uint64_t last_ = 0;
};

// A peer's end, for one owner.
class ClosingsTaken {
 public:
  enum class Verdict { kNew, kUnderWay, kConfirmed, kRefused };

  // kNew: it is held once, until release().
  Verdict take(uint64_t number) {
    if (number <= all_below_) return Verdict::kConfirmed;
    if (number > all_below_ + kListsAtOnce) return Verdict::kRefused;  // an owner waits before it goes so far
    const auto [found, fresh] = holds_.emplace(number, 1);
    if (fresh) return Verdict::kNew;
    return found->second == 0 ? Verdict::kConfirmed : Verdict::kUnderWay;
  }
  void hold(uint64_t number) { ++holds_.at(number); }
  // True: nothing holds the list any more.
  bool release(uint64_t number) {
    if (--holds_.at(number) != 0) return false;
    while (!holds_.empty() && holds_.begin()->first == all_below_ + 1 && holds_.begin()->second == 0) {
      holds_.erase(holds_.begin());
      ++all_below_;
    }
    return true;
  }

 private:
  uint64_t all_below_ = 0;              // and this one are confirmed
  std::map<uint64_t, uint32_t> holds_;  // of the others that came: what they wait for
};

}  // namespace asyncfabric
