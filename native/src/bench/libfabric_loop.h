// libfabric_loop.h: the bare loop that the libfabric rail is compared with: what a C programmer would write straight on
// libfabric, in two processes, with the same provider, order and registration modes as the rail. No engine, no rail.
// Both calls block, busy-poll, need no GIL, and meet over a socket (`control_fd`, bidirectional, owned by the caller).
#pragma once

#include <cstdint>
#include <string>

namespace asyncfabric::bench {

enum class LoopWorkload : uint32_t {
  kWrites = 0,  // `operations` writes of `bytes`, `window` in flight, each with an immediate
  kPages =
      1,  // `rounds` batches of `pages` pages of `bytes` at random places; the last of a batch carries an immediate
  kPingPong = 2,  // `operations` empty writes with an immediate, each answered by one
};

struct LoopConfig {
  std::string profile = "tcp";  // tcp, shm or efa, as for the rail
  std::string provider;         // libfabric's own provider name, "": the profile's choice
  std::string address;          // IP address to bind, "": 127.0.0.1
  std::string library;          // file of libfabric, "": the loader's choice
  LoopWorkload workload = LoopWorkload::kWrites;
  uint64_t bytes = 1 << 20;
  uint64_t operations = 256;
  uint64_t warmup = 16;  // operations before the clock starts
  uint32_t window = 16;
  uint32_t pages = 1024;
  uint32_t rounds = 4;
  uint64_t region_bytes = 256ull << 20;
};

struct LoopResult {
  bool verified = false;  // the target compared what arrived with what was sent
  double seconds = 0;     // first post until the target's word that the last immediate came
  uint64_t bytes = 0;
  uint64_t operations = 0;
  double p50_us = 0;  // kPingPong: round trip
  double p99_us = 0;
  std::string provider;
  std::string library;
  std::string error;  // a sentence when the return value is not 0
};

// 0, or an errno.
int libfabric_target(const LoopConfig& config, int control_fd, LoopResult* result);
int libfabric_initiator(const LoopConfig& config, int control_fd, LoopResult* result);

}  // namespace asyncfabric::bench
