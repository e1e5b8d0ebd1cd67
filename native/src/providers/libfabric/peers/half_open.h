// half_open.h: connections to a rail whose other side sends nothing. libfabric accepts whoever comes, and keeps the socket until that side ends
// it; beyond a few of them the oldest are hung up on, so that they take no descriptors from others. Over sockets. Engine lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace asyncfabric::libfabric {

class HalfOpen {
 public:
  static constexpr size_t kMost = 64;
  static constexpr int kNewDescriptors = 32;  // so many later it is looked again

  // After a poll: is it time to look?
  bool is_due() { return ++polls_ % kPolls == 0; }
  // `name`: of the endpoint that they come to. Costs two system calls while few descriptors are opened in the process.
  void look(const std::string& name);

 private:
  static constexpr uint32_t kPolls = 64;
  static constexpr uint64_t kEveryNs = 20'000'000;

  uint32_t polls_ = 0;
  uint64_t next_ns_ = 0;
  int free_descriptor_ = 0;  // the lowest, when it was looked last
};

}  // namespace asyncfabric::libfabric
