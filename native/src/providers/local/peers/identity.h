// identity.h: who we are on this host, and the address that peers connect to. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "asyncfabric/status.h"

namespace asyncfabric::local {

// Two processes can share memory when all of these agree: kernel boot, pid and network namespace, user. Hashed.
struct HostIdentity {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const HostIdentity&) const = default;
};

const HostIdentity& host_identity();

struct ProcessState {
  // In clock ticks since boot: distinguishes a process from a later one with the same pid. 0: there is no such process,
  // or no descriptor to read its state with.
  uint64_t start = 0;
  bool leaving = false;  // the kernel takes it down: its main thread runs no more
};
ProcessState process_state(pid_t pid);
inline uint64_t process_start(pid_t pid) { return process_state(pid).start; }

uint64_t random_word();

struct RailAddress {
  HostIdentity host;
  int32_t pid = 0;
  uint64_t process_start = 0;
  uint64_t rail_id = 0;
  std::string socket;  // name in the abstract namespace, without its leading zero byte
};

std::string encode_address(const RailAddress& address);
Status decode_address(std::string_view bytes, RailAddress* out);  // kInvalidArgument on anything odd

}  // namespace asyncfabric::local
