// bare_loop.cc: see bare_loop.h. What does not depend on the API.
#include "bench/bare_loop.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>

namespace asyncfabric::bench::bare {
namespace {

constexpr uint64_t kMostPlaces = 64;  // that single writes walk round

char pattern(uint64_t offset) { return static_cast<char>((offset * 0x9e3779b97f4a7c15ull) >> 56); }

template <class Call, class Byte>
bool whole(Call call, Byte* at, size_t size) {
  while (size > 0) {
    const ssize_t moved = call(at, size);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    at += moved;
    size -= static_cast<size_t>(moved);
  }
  return true;
}

}  // namespace

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool send_all(int fd, const void* data, size_t size) {
  return whole([fd](const char* at, size_t left) { return write(fd, at, left); }, static_cast<const char*>(data), size);
}

bool receive_all(int fd, void* data, size_t size) {
  return whole([fd](char* at, size_t left) { return read(fd, at, left); }, static_cast<char*>(data), size);
}

bool readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

char* map_region(uint64_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  return mapped != MAP_FAILED ? static_cast<char*>(mapped) : nullptr;
}

void fill(char* region, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) region[i] = pattern(i);
}

bool is_filled(const char* region, uint64_t at, uint64_t bytes) {
  for (uint64_t i = at; i < at + bytes; ++i)
    if (region[i] != pattern(i)) return false;
  return true;
}

std::vector<uint64_t> page_order(const LoopConfig& config) {
  std::vector<uint64_t> order(config.region_bytes / config.bytes);
  for (uint64_t i = 0; i < order.size(); ++i) order[i] = i;
  uint64_t state = 88172645463325252ull;
  for (uint64_t i = order.size(); i > 1; --i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::swap(order[i - 1], order[state % i]);
  }
  return order;
}

uint64_t place(const LoopConfig& config, uint64_t operation) {
  const uint64_t fit = config.region_bytes / std::max<uint64_t>(1, config.bytes);
  return operation % std::clamp<uint64_t>(fit, 1, kMostPlaces) * config.bytes;
}

uint64_t immediates(const LoopConfig& config) {
  return config.workload == LoopWorkload::kPages ? config.rounds + 1 : config.operations + config.warmup;
}

bool valid(const LoopConfig& config, uint32_t most_in_flight) {
  return config.window >= 1 && config.window <= most_in_flight && config.operations >= 1 && config.warmup >= 1 &&
         config.pages >= 1 && config.rounds >= 1 && config.bytes <= config.region_bytes &&
         (config.bytes >= 1 || config.workload == LoopWorkload::kPingPong) && config.region_bytes >= 1;
}

bool arrived(const LoopConfig& config, const char* region) {
  const bool pages = config.workload == LoopWorkload::kPages;
  const std::vector<uint64_t> order = pages ? page_order(config) : std::vector<uint64_t>();
  const uint64_t pieces = pages ? config.pages : std::min(kMostPlaces, config.operations);
  for (uint64_t i = 0; i < pieces; ++i)
    if (!is_filled(region, pages ? order[i % order.size()] * config.bytes : place(config, i), config.bytes))
      return false;
  return true;
}

int End::fail(const std::string& what, int error, const char* text) const {
  result->error = what + ": " + (text != nullptr ? text : std::strerror(error));
  return error != 0 ? error : EIO;
}

}  // namespace asyncfabric::bench::bare
