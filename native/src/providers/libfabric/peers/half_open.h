// half_open.h: connections to a rail whose other side sends nothing. libfabric accepts whoever comes, and keeps the socket until that side ends
// it, or for good; beyond a few of them the oldest are hung up on, so that they take no descriptors from others. Over sockets. Engine lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace asyncfabric::libfabric {

class HalfOpen {
 public:
  static constexpr size_t kMost = 64;
  static constexpr size_t kNewDescriptors = 32;  // so many later it is looked again

  // After a poll: is it time to look? Before sleep it always is.
  bool is_due() { return ++polls_ % kPolls == 0; }
  // `name`: of the endpoint that they come to; `forgets`: the provider is `net`; `sleeps`: nobody looks again before something comes. Costs a
  // system call before each sleep, else one in kEveryNs, while few descriptors are opened in the process. True: some were hung up on, and there
  // may be more.
  bool look(const std::string& name, bool forgets, bool sleeps);

 private:
  static constexpr uint32_t kPolls = 64;
  static constexpr uint64_t kEveryNs = 20'000'000;
  static constexpr uint32_t kLooksOfSilent = 50;  // while there are any: so often in that many

  uint32_t polls_ = 0;
  uint32_t looks_left_ = 0;  // until they are looked at although few descriptors are new
  uint64_t next_ns_ = 0;
  size_t descriptors_ = 0;  // of the process: the fewest since it was looked last
  bool crowded_ = false, any_ = false;
};

}  // namespace asyncfabric::libfabric
