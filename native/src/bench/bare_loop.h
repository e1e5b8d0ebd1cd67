// bare_loop.h: what the bare loops of the bench have in common: their configuration, and the workloads over a Side, which is one end on
// one API: one thread, one connection, one region, completions counted, nothing else. No engine, no rail: this is the limit that
// those are measured against. The two ends are two processes that meet over a socket; they block, busy-poll and need no GIL.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace asyncfabric::bench {

enum class LoopWorkload : uint32_t {
  kWrites = 0,  // `operations` writes of `bytes`, `window` in flight, each with an immediate
  kPages = 1,   // `rounds` batches of `pages` pages of `bytes` at random places, an immediate with the last of a batch
  kPingPong = 2,  // `operations` empty writes with an immediate, each answered by one
};

struct LoopConfig {
  std::string profile = "tcp";  // libfabric: tcp or efa, as for the rail
  std::string provider;         // libfabric's own provider name, "": the profile's choice
  std::string address;          // libfabric: IP address to bind, "": 127.0.0.1; verbs: device, "": the first
  std::string library;          // file of the library, "": the loader's choice
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

namespace bare {

double seconds_now();
bool send_all(int fd, const void* data, size_t size);
bool receive_all(int fd, void* data, size_t size);
bool readable(int fd);
char* map_region(uint64_t bytes);  // null: errno states why

// The same bytes on both sides without sending them: the target compares without help.
void fill(char* region, uint64_t bytes);
bool is_filled(const char* region, uint64_t at, uint64_t bytes);

std::vector<uint64_t> page_order(const LoopConfig& config);    // pseudo-random, equal on both sides
uint64_t place(const LoopConfig& config, uint64_t operation);  // where its bytes are
uint64_t immediates(const LoopConfig& config);
bool valid(const LoopConfig& config, uint32_t most_in_flight);
bool arrived(const LoopConfig& config, const char* region);

// What every Side has. One derives from it and adds kMostInFlight, kChain (writes per completion in a batch of pages), open(), meet(),
// reap() and write(); these return 0 or an errno, by fail().
struct End {
  const LoopConfig& config;
  int control;
  LoopResult* result;
  char* region = nullptr;
  uint64_t sent = 0;  // completed writes of ours
  uint64_t came = 0;  // immediates of the peer

  End(const LoopConfig& c, int fd, LoopResult* r) : config(c), control(fd), result(r) {}
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  int fail(const std::string& what, int error, const char* text = nullptr) const;
};

template <class Side>
int until(Side& side, const uint64_t& counter, uint64_t target) {
  while (counter < target)
    if (const int error = side.reap(); error != 0) return error;
  return 0;
}

template <class Side>
int writes(Side& side, uint64_t first, uint64_t count) {
  const uint64_t base = side.sent;
  for (uint64_t i = 0; i < count; ++i) {
    if (i >= side.config.window)
      if (const int error = until(side, side.sent, base + i + 1 - side.config.window); error != 0) return error;
    if (const int error = side.write(place(side.config, first + i), side.config.bytes, true, i, 1); error != 0)
      return error;
  }
  return until(side, side.sent, base + count);
}

template <class Side>
int page_batch(Side& side, const std::vector<uint64_t>& order) {
  const uint64_t base = side.sent;
  uint64_t unasked = 0;
  for (uint32_t i = 0; i < side.config.pages; ++i) {
    if (i >= Side::kMostInFlight)
      if (const int error = until(side, side.sent, base + i + 1 - Side::kMostInFlight); error != 0) return error;
    const bool last = i + 1 == side.config.pages;
    ++unasked;
    const uint64_t ends = last || unasked == Side::kChain ? std::exchange(unasked, 0) : 0;
    const uint64_t at = order[i % order.size()] * side.config.bytes;
    if (const int error = side.write(at, side.config.bytes, last, i, ends); error != 0) return error;
  }
  return until(side, side.sent, base + side.config.pages);
}

template <class Side>
int ping_pong(Side& side) {
  const LoopConfig& config = side.config;
  std::vector<double> times(config.operations);
  for (uint64_t i = 0; i < config.warmup + config.operations; ++i) {
    const double start = seconds_now();
    if (const int error = side.write(0, 0, true, i, 1); error != 0) return error;
    if (const int error = until(side, side.came, i + 1); error != 0) return error;
    if (i >= config.warmup) times[i - config.warmup] = seconds_now() - start;
  }
  for (const double time : times) side.result->seconds += time;
  std::sort(times.begin(), times.end());
  side.result->p50_us = times[times.size() / 2] * 1e6;
  side.result->p99_us = times[times.size() * 99 / 100] * 1e6;
  side.result->operations = config.operations;
  return 0;
}

template <class Side>
int timed_writes(Side& side) {
  const LoopConfig& config = side.config;
  const bool pages = config.workload == LoopWorkload::kPages;
  const std::vector<uint64_t> order = pages ? page_order(config) : std::vector<uint64_t>();
  if (const int error = pages ? page_batch(side, order) : writes(side, 0, config.warmup); error != 0) return error;
  if (const int error = until(side, side.came, 1); error != 0) return error;  // the target has the warm-up
  const double start = seconds_now();
  if (pages) {
    for (uint32_t round = 0; round < config.rounds; ++round)
      if (const int error = page_batch(side, order); error != 0) return error;
  } else if (const int error = writes(side, config.warmup, config.operations); error != 0) {
    return error;
  }
  if (const int error = until(side, side.came, 2); error != 0) return error;  // and everything
  side.result->seconds = seconds_now() - start;
  side.result->operations = pages ? uint64_t{config.rounds} * config.pages : config.operations;
  side.result->bytes = side.result->operations * config.bytes;
  return 0;
}

// Answers each ping, or notes when the warm-up and when everything came; until the initiator is done, or gone.
template <class Side>
int answer(Side& side) {
  const LoopConfig& config = side.config;
  const bool echo = config.workload == LoopWorkload::kPingPong;
  const uint64_t first = config.workload == LoopWorkload::kPages ? 1 : config.warmup;
  uint64_t answered = 0;
  for (uint32_t idle = 0;;) {
    const uint64_t before = side.came;
    if (const int error = side.reap(); error != 0) return error;
    const uint64_t due =
        echo ? side.came : (side.came >= first ? 1u : 0u) + (side.came >= immediates(config) ? 1u : 0u);
    for (; answered < due; ++answered)
      if (const int error = side.write(0, 0, true, answered, 1); error != 0) return error;
    idle = side.came == before ? idle + 1 : 0;
    if ((idle & 1023) == 1023 && readable(side.control)) return 0;
  }
}

template <class Side>
int target(const LoopConfig& config, int control_fd, LoopResult* result) {
  Side side(config, control_fd, result);
  if (!valid(config, Side::kMostInFlight)) return side.fail("the configuration makes no sense", EINVAL);
  if (const int error = side.open(); error != 0) return error;
  std::memset(side.region, 0xee, config.region_bytes);
  if (const int error = side.meet(); error != 0) return error;
  if (const int error = answer(side); error != 0) return error;
  char done = 0;
  if (!receive_all(control_fd, &done, 1)) return side.fail("the initiator is gone", EPIPE);
  const bool echo = config.workload == LoopWorkload::kPingPong;
  result->verified = echo ? side.came == immediates(config) : arrived(config, side.region);
  const char verdict = result->verified ? 1 : 0;
  return send_all(control_fd, &verdict, 1) ? 0 : side.fail("the initiator is gone", EPIPE);
}

template <class Side>
int initiator(const LoopConfig& config, int control_fd, LoopResult* result) {
  Side side(config, control_fd, result);
  if (!valid(config, Side::kMostInFlight)) return side.fail("the configuration makes no sense", EINVAL);
  if (const int error = side.open(); error != 0) return error;
  fill(side.region, config.region_bytes);
  if (const int error = side.meet(); error != 0) return error;
  const int error = config.workload == LoopWorkload::kPingPong ? ping_pong(side) : timed_writes(side);
  const char done = 1;
  char verdict = 0;
  if (!send_all(control_fd, &done, 1)) return side.fail("the target is gone", EPIPE);
  while (!readable(control_fd)) (void)side.reap();  // the target may still need our progress
  if (!receive_all(control_fd, &verdict, 1)) return side.fail("the target is gone", EPIPE);
  result->verified = verdict == 1;
  return error;
}

}  // namespace bare
}  // namespace asyncfabric::bench
