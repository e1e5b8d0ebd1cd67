// mute_addresses.h: addresses on this host where nobody answered when somebody who had connected to us was to be connected to. Whoever connects
// may accept nothing itself, and be many; its peers' calls on the control thread must not wait for it. Control thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace asyncfabric {

class MuteAddresses {
 public:
  // An answer takes microseconds; a sender that is late with it repeats its hello, and is tried again.
  static constexpr uint64_t kAnswerNs = 50'000'000, kMuteAnswerNs = 1'000'000, kMuteNs = 200'000'000;
  static constexpr size_t kMost = 256;

  uint64_t patience_ns(const std::string& address, uint64_t now) const {
    const auto found = until_.find(address);
    return found != until_.end() && now < found->second ? kMuteAnswerNs : kAnswerNs;
  }

  void note(const std::string& address, uint64_t now) {
    if (until_.size() >= kMost) until_.clear();
    until_[address] = now + kMuteNs;
  }

 private:
  std::map<std::string, uint64_t> until_;
};

}  // namespace asyncfabric
