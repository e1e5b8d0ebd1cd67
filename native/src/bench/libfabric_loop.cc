// libfabric_loop.cc: the bare libfabric loop of the bench; see libfabric_loop.h. One thread, one endpoint, one CQ, one
// region, completions counted, nothing else: this is the limit that the rail and the engine are measured against.
#include "bench/libfabric_loop.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "providers/libfabric/library.h"
#include "providers/libfabric/profile.h"

namespace asyncfabric::bench {
namespace {

using libfabric::Info;
using libfabric::Library;

constexpr uint64_t kKey = 0x5eed;
constexpr uint32_t kMaxWindow = 1024;
constexpr size_t kReap = 64;

struct Hello {  // what the two sides tell each other
  uint32_t name_bytes = 0;
  uint64_t key = 0;
  uint64_t base = 0;
  char name[128] = {};
};

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool send_all(int fd, const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = write(fd, at, size);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int fd, void* data, size_t size) {
  char* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t got = read(fd, at, size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

bool readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

struct Side {
  const LoopConfig& config;
  int control;
  LoopResult* result;
  const Library* library = nullptr;
  Info info;
  fid_fabric* fabric = nullptr;
  fid_domain* domain = nullptr;
  fid_cq* cq = nullptr;
  fid_av* av = nullptr;
  fid_ep* ep = nullptr;
  fid_mr* mr = nullptr;
  char* region = nullptr;
  void* desc = nullptr;
  fi_addr_t peer = FI_ADDR_UNSPEC;
  uint64_t remote_key = 0;
  uint64_t remote_base = 0;
  uint64_t sent = 0;  // completions of our writes
  uint64_t came = 0;  // immediates of the peer
  fi_context2 contexts[kMaxWindow] = {};

  Side(const LoopConfig& c, int fd, LoopResult* r) : config(c), control(fd), result(r) {}
  ~Side() {
    if (ep != nullptr) fi_close(&ep->fid);
    if (mr != nullptr) fi_close(&mr->fid);
    if (av != nullptr) fi_close(&av->fid);
    if (cq != nullptr) fi_close(&cq->fid);
    if (domain != nullptr) fi_close(&domain->fid);
    if (fabric != nullptr) fi_close(&fabric->fid);
    if (region != nullptr) munmap(region, config.region_bytes);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  int fail(const char* what, int error) {
    result->error = std::string(what) + ": " + (library != nullptr ? library->fi_strerror(std::abs(error)) : "");
    return std::abs(error);
  }

  int open() {
    const libfabric::Profile* profile = libfabric::find_profile(config.profile);
    if (profile == nullptr) return fail("unknown profile", EINVAL);
    library = libfabric::open_library(config.library, &result->error);
    if (library == nullptr) return ENOENT;
    info = libfabric::select_info(*library, *profile, {config.provider, config.address, ""}, &result->error);
    if (!info) return ENODEV;
    result->provider = info->fabric_attr->prov_name;
    result->library = library->path;
    fi_cq_attr cq_attr{};
    cq_attr.size = 4096;
    cq_attr.format = FI_CQ_FORMAT_DATA;
    cq_attr.wait_obj = FI_WAIT_NONE;
    fi_av_attr av_attr{};
    int error = library->fi_fabric(info->fabric_attr, &fabric, nullptr);
    if (error == 0) error = fi_domain(fabric, info.get(), &domain, nullptr);
    if (error == 0) error = fi_cq_open(domain, &cq_attr, &cq, nullptr);
    if (error == 0) error = fi_av_open(domain, &av_attr, &av, nullptr);
    if (error == 0) error = fi_endpoint(domain, info.get(), &ep, nullptr);
    if (error == 0 && profile->configure_endpoint != nullptr && !profile->configure_endpoint(ep, &result->error))
      return EINVAL;
    if (error == 0) error = fi_ep_bind(ep, &av->fid, 0);
    if (error == 0) error = fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV);
    if (error == 0) error = fi_enable(ep);
    if (error != 0) return fail("opening the endpoint", error);
    return map_region();
  }

  int map_region() {
    void* mapped =
        mmap(nullptr, config.region_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (mapped == MAP_FAILED) return fail("mapping the region", errno);
    region = static_cast<char*>(mapped);
    const uint64_t access = FI_WRITE | FI_READ | FI_REMOTE_WRITE | FI_REMOTE_READ;
    int error = fi_mr_reg(domain, region, config.region_bytes, access, 0, kKey, 0, &mr, nullptr);
    if (error == 0 && (info->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
      error = fi_mr_bind(mr, &ep->fid, 0);
      if (error == 0) error = fi_mr_enable(mr);
    }
    if (error != 0) return fail("registering the region", error);
    desc = fi_mr_desc(mr);
    return 0;
  }

  int meet() {
    Hello mine;
    Hello theirs;
    size_t size = sizeof mine.name;
    int error = fi_getname(&ep->fid, mine.name, &size);
    if (error != 0) return fail("fi_getname", error);
    mine.name_bytes = static_cast<uint32_t>(size);
    mine.key = fi_mr_key(mr);
    mine.base = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uint64_t>(region) : 0;
    if (!send_all(control, &mine, sizeof mine) || !receive_all(control, &theirs, sizeof theirs))
      return fail("the other side is gone", EPIPE);
    remote_key = theirs.key;
    remote_base = theirs.base;
    return fi_av_insert(av, theirs.name, 1, &peer, 0, nullptr) == 1 ? 0 : fail("fi_av_insert", EINVAL);
  }

  int reap() {  // also drives the progress of providers that have none of their own
    fi_cq_data_entry entries[kReap];
    const ssize_t count = fi_cq_read(cq, entries, kReap);
    if (count == -FI_EAGAIN) return 0;
    if (count < 0) {
      fi_cq_err_entry error{};
      (void)fi_cq_readerr(cq, &error, 0);
      return fail("a completion failed", error.err);
    }
    for (ssize_t i = 0; i < count; ++i) {
      if ((entries[i].flags & FI_REMOTE_CQ_DATA) != 0)
        ++came;
      else
        ++sent;
    }
    return 0;
  }

  int write(uint64_t from, uint64_t to, uint64_t bytes, bool with_imm, uint64_t slot) {
    for (;;) {
      void* context = &contexts[slot % kMaxWindow];
      const ssize_t posted =
          with_imm ? fi_writedata(ep, region + from, bytes, desc, slot, peer, remote_base + to, remote_key, context)
                   : fi_write(ep, region + from, bytes, desc, peer, remote_base + to, remote_key, context);
      if (posted == 0) return 0;
      if (posted != -FI_EAGAIN) return fail("posting a write", static_cast<int>(posted));
      if (const int error = reap(); error != 0) return error;
    }
  }

  int until(const uint64_t& counter, uint64_t target) {
    while (counter < target)
      if (const int error = reap(); error != 0) return error;
    return 0;
  }
};

// The same bytes on both sides without sending them: the target compares without help.
char pattern(uint64_t offset) { return static_cast<char>((offset * 0x9e3779b97f4a7c15ull) >> 56); }

void fill(Side& side) {
  for (uint64_t i = 0; i < side.config.region_bytes; ++i) side.region[i] = pattern(i);
}

// Pseudo-random page order, equal on both sides.
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

uint64_t place(const LoopConfig& config, uint64_t index) {
  const uint64_t slots =
      std::max<uint64_t>(1, std::min<uint64_t>(config.region_bytes / std::max<uint64_t>(1, config.bytes), 64));
  return index % slots * config.bytes;
}

uint64_t immediates(const LoopConfig& config) {
  return config.workload == LoopWorkload::kPages ? config.rounds + 1 : config.operations + config.warmup;
}

bool check(const Side& side) {
  const LoopConfig& config = side.config;
  auto same = [&side, &config](uint64_t at) {
    for (uint64_t i = at; i < at + config.bytes; ++i)
      if (side.region[i] != pattern(i)) return false;
    return true;
  };
  if (config.workload == LoopWorkload::kPages) {
    const std::vector<uint64_t> order = page_order(config);
    for (uint32_t i = 0; i < config.pages; ++i)
      if (!same(order[i % order.size()] * config.bytes)) return false;
    return true;
  }
  for (uint64_t i = 0; i < std::min<uint64_t>(64, config.operations); ++i)
    if (!same(place(config, i))) return false;
  return true;
}

int writes(Side& side, uint64_t first, uint64_t count) {
  const uint64_t base = side.sent;
  for (uint64_t i = 0; i < count; ++i) {
    if (i >= side.config.window)
      if (const int error = side.until(side.sent, base + i + 1 - side.config.window); error != 0) return error;
    const uint64_t at = place(side.config, first + i);
    if (const int error = side.write(at, at, side.config.bytes, true, i); error != 0) return error;
  }
  return side.until(side.sent, base + count);
}

int page_batch(Side& side, const std::vector<uint64_t>& order) {
  const uint64_t base = side.sent;
  for (uint32_t i = 0; i < side.config.pages; ++i) {
    if (i >= kMaxWindow)
      if (const int error = side.until(side.sent, base + i + 1 - kMaxWindow); error != 0) return error;
    const uint64_t at = order[i % order.size()] * side.config.bytes;
    if (const int error = side.write(at, at, side.config.bytes, i + 1 == side.config.pages, i); error != 0)
      return error;
  }
  return side.until(side.sent, base + side.config.pages);
}

int ping_pong(Side& side) {
  const LoopConfig& config = side.config;
  std::vector<double> times(config.operations);
  for (uint64_t i = 0; i < config.warmup + config.operations; ++i) {
    const double start = seconds_now();
    if (const int error = side.write(0, 0, 0, true, i); error != 0) return error;
    if (const int error = side.until(side.came, i + 1); error != 0) return error;
    if (i >= config.warmup) times[i - config.warmup] = seconds_now() - start;
  }
  for (const double time : times) side.result->seconds += time;
  std::sort(times.begin(), times.end());
  side.result->p50_us = times[times.size() / 2] * 1e6;
  side.result->p99_us = times[times.size() * 99 / 100] * 1e6;
  side.result->operations = config.operations;
  return 0;
}

int timed_writes(Side& side) {
  const LoopConfig& config = side.config;
  const bool pages = config.workload == LoopWorkload::kPages;
  const std::vector<uint64_t> order = pages ? page_order(config) : std::vector<uint64_t>();
  if (const int error = pages ? page_batch(side, order) : writes(side, 0, config.warmup); error != 0) return error;
  if (const int error = side.until(side.came, 1); error != 0) return error;  // the target has the warm-up
  const double start = seconds_now();
  if (pages) {
    for (uint32_t round = 0; round < config.rounds; ++round)
      if (const int error = page_batch(side, order); error != 0) return error;
  } else if (const int error = writes(side, config.warmup, config.operations); error != 0) {
    return error;
  }
  if (const int error = side.until(side.came, 2); error != 0) return error;  // and everything
  side.result->seconds = seconds_now() - start;
  side.result->operations = pages ? uint64_t{config.rounds} * config.pages : config.operations;
  side.result->bytes = side.result->operations * config.bytes;
  return 0;
}

bool valid(const LoopConfig& config) {
  return config.window >= 1 && config.window <= kMaxWindow && config.operations >= 1 && config.warmup >= 1 &&
         config.pages >= 1 && config.rounds >= 1 && config.bytes <= config.region_bytes &&
         (config.bytes >= 1 || config.workload == LoopWorkload::kPingPong) && config.region_bytes >= 1;
}

}  // namespace

int libfabric_target(const LoopConfig& config, int control_fd, LoopResult* result) {
  Side side(config, control_fd, result);
  if (!valid(config)) return side.fail("the configuration makes no sense", EINVAL);
  if (const int error = side.open(); error != 0) return error;
  std::memset(side.region, 0xee, config.region_bytes);
  if (const int error = side.meet(); error != 0) return error;
  const bool echo = config.workload == LoopWorkload::kPingPong;
  const uint64_t first = config.workload == LoopWorkload::kPages ? 1 : config.warmup;
  uint64_t answered = 0;
  uint32_t idle = 0;
  for (;;) {
    const uint64_t before = side.came;
    if (const int error = side.reap(); error != 0) return error;
    const uint64_t due =
        echo ? side.came : (side.came >= first ? 1u : 0u) + (side.came >= immediates(config) ? 1u : 0u);
    for (; answered < due; ++answered)
      if (const int error = side.write(0, 0, 0, true, answered); error != 0) return error;
    idle = side.came == before ? idle + 1 : 0;
    if ((idle & 1023) == 1023 && readable(control_fd)) break;  // the initiator is done, or gone
  }
  char done = 0;
  if (!receive_all(control_fd, &done, 1)) return side.fail("the initiator is gone", EPIPE);
  result->verified = echo ? side.came == immediates(config) : check(side);
  const char verdict = result->verified ? 1 : 0;
  return send_all(control_fd, &verdict, 1) ? 0 : side.fail("the initiator is gone", EPIPE);
}

int libfabric_initiator(const LoopConfig& config, int control_fd, LoopResult* result) {
  Side side(config, control_fd, result);
  if (!valid(config)) return side.fail("the configuration makes no sense", EINVAL);
  if (const int error = side.open(); error != 0) return error;
  fill(side);
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

}  // namespace asyncfabric::bench
