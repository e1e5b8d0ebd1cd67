// verbs_loop.cc: the bare libibverbs loop of the bench; see verbs_loop.h. One thread, one queue pair, one CQ, one region, completions
// counted, nothing else: this is the limit that the rail and the engine are measured against. It opens the device as the rail does.
#include "bench/verbs_loop.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "providers/verbs/device.h"
#include "providers/verbs/queue_pair.h"

namespace asyncfabric::bench {
namespace {

using verbs::own;
using verbs::Owned;

constexpr uint32_t kDepth = 1024;
constexpr int kReap = 64;
constexpr uint64_t kReceiveMark = 1ull << 63;

struct Hello {  // what the two sides tell each other
  verbs::RailAddress address;
  verbs::QueueEnd end;
  uint64_t base = 0;
  uint32_t rkey = 0;
};

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Call>
bool whole(Call call, void* data, size_t size) {
  for (char* at = static_cast<char*>(data); size > 0;) {
    const ssize_t moved = call(at, size);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    at += moved;
    size -= static_cast<size_t>(moved);
  }
  return true;
}

bool send_all(int fd, void* data, size_t size) {
  return whole([fd](void* at, size_t left) { return write(fd, at, left); }, data, size);
}

bool receive_all(int fd, void* data, size_t size) {
  return whole([fd](void* at, size_t left) { return read(fd, at, left); }, data, size);
}

bool readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

// The same bytes on both sides without sending them: the target compares without help.
char pattern(uint64_t offset) { return static_cast<char>((offset * 0x9e3779b97f4a7c15ull) >> 56); }

struct Side {
  const LoopConfig& config;
  int control;
  LoopResult* result;
  std::unique_ptr<verbs::Device> device;
  char* region = nullptr;
  Owned<ibv_cq> cq;
  Owned<ibv_mr> mr;
  verbs::QueuePair pair;
  Hello theirs;
  uint64_t sent = 0;  // completions of our writes
  uint64_t came = 0;  // immediates of the peer

  Side(const LoopConfig& c, int fd, LoopResult* r) : config(c), control(fd), result(r) {}
  ~Side() {
    pair.qp.reset();
    mr.reset();
    if (region != nullptr) munmap(region, config.region_bytes);
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  int fail(const char* what, int error) {
    result->error = std::string(what) + ": " + std::strerror(error);
    return error != 0 ? error : EIO;
  }

  int open() {
    const verbs::Library* library = verbs::open_library(config.library, &result->error);
    if (library == nullptr) return ENOENT;
    verbs::Options options;
    options.device = config.address;
    if (!verbs::Device::open(*library, options, &device, &result->error).ok()) return ENODEV;
    result->provider = "verbs " + device->name();
    result->library = library->path;
    void* mapped =
        mmap(nullptr, config.region_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (mapped == MAP_FAILED) return fail("mapping the region", errno);
    region = static_cast<char*>(mapped);
    mr = own(library->ibv_reg_mr_iova2(device->pd(), region, config.region_bytes, reinterpret_cast<uint64_t>(region),
                                       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING),
             library->ibv_dereg_mr);
    if (!mr) return fail("registering the region", errno);
    cq = own(library->ibv_create_cq(device->context(), 2 * kDepth + 64, nullptr, nullptr, 0), library->ibv_destroy_cq);
    if (!cq) return fail("ibv_create_cq", errno);
    const Status made = make_queue_pair(*device, cq.get(), nullptr, {kDepth, kDepth, 220}, &pair);
    return made.ok() ? meet() : fail("ibv_create_qp", made.raw);
  }

  int meet() {
    Hello mine;
    mine.address.gid = device->gid().gid;
    mine.address.lid = device->lid();
    mine.address.mtu = static_cast<uint8_t>(device->mtu());
    mine.end = {pair.qp->qp_num, pair.psn};
    mine.base = reinterpret_cast<uint64_t>(region);
    mine.rkey = mr->rkey;
    if (!send_all(control, &mine, sizeof mine) || !receive_all(control, &theirs, sizeof theirs))
      return fail("the other side is gone", EPIPE);
    Status status = ready_to_receive(*device, pair, theirs.address, theirs.end);
    for (uint32_t i = 0; i < kDepth && status.ok(); ++i) post_receive();
    if (status.ok()) status = ready_to_send(*device, pair);
    if (!status.ok()) return fail("connecting the queue pair", status.raw);
    char ready = 1;  // nobody sends before both receive
    if (!send_all(control, &ready, 1) || !receive_all(control, &ready, 1)) return fail("the other side is gone", EPIPE);
    return 0;
  }

  void post_receive() const {
    ibv_recv_wr request{};
    request.wr_id = kReceiveMark;
    ibv_recv_wr* bad = nullptr;
    (void)ibv_post_recv(pair.qp.get(), &request, &bad);
  }

  int reap() {
    ibv_wc done[kReap];
    const int count = ibv_poll_cq(cq.get(), kReap, done);
    for (int i = 0; i < count; ++i) {
      if (done[i].status != IBV_WC_SUCCESS) return fail(device->library().ibv_wc_status_str(done[i].status), EIO);
      if ((done[i].wr_id & kReceiveMark) == 0) {
        sent += done[i].wr_id;
      } else {
        ++came;
        post_receive();
      }
    }
    return count < 0 ? fail("ibv_poll_cq", EIO) : 0;
  }

  // `ends`: how many writes its completion stands for, 0: none is asked for.
  int write(uint64_t at, uint64_t bytes, bool with_imm, uint64_t ends) {
    ibv_sge piece{reinterpret_cast<uint64_t>(region + at), static_cast<uint32_t>(bytes), mr->lkey};
    ibv_send_wr request{};
    request.wr_id = ends;
    request.sg_list = &piece;
    request.num_sge = bytes != 0 ? 1 : 0;
    request.opcode = with_imm ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    if (ends != 0) request.send_flags = IBV_SEND_SIGNALED;
    if (bytes <= pair.sizes.inline_bytes) request.send_flags |= IBV_SEND_INLINE;
    request.wr.rdma.remote_addr = theirs.base + at;
    request.wr.rdma.rkey = theirs.rkey;
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(pair.qp.get(), &request, &bad);
    return error == 0 ? 0 : fail("ibv_post_send", error);
  }

  int until(const uint64_t& counter, uint64_t target) {
    while (counter < target)
      if (const int error = reap(); error != 0) return error;
    return 0;
  }
};

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
  return index % std::clamp<uint64_t>(config.region_bytes / std::max<uint64_t>(1, config.bytes), 1, 64) * config.bytes;
}

uint64_t immediates(const LoopConfig& config) {
  return config.workload == LoopWorkload::kPages ? config.rounds + 1 : config.operations + config.warmup;
}

bool check(const Side& side) {
  const LoopConfig& config = side.config;
  const bool pages = config.workload == LoopWorkload::kPages;
  const std::vector<uint64_t> order = pages ? page_order(config) : std::vector<uint64_t>();
  const uint64_t places = pages ? config.pages : std::min<uint64_t>(64, config.operations);
  for (uint64_t i = 0; i < places; ++i) {
    const uint64_t at = pages ? order[i % order.size()] * config.bytes : place(config, i);
    for (uint64_t byte = at; byte < at + config.bytes; ++byte)
      if (side.region[byte] != pattern(byte)) return false;
  }
  return true;
}

int writes(Side& side, uint64_t first, uint64_t count) {
  const uint64_t base = side.sent;
  for (uint64_t i = 0; i < count; ++i) {
    if (i >= side.config.window)
      if (const int error = side.until(side.sent, base + i + 1 - side.config.window); error != 0) return error;
    if (const int error = side.write(place(side.config, first + i), side.config.bytes, true, 1); error != 0)
      return error;
  }
  return side.until(side.sent, base + count);
}

// Every 32nd page asks for a completion.
int page_batch(Side& side, const std::vector<uint64_t>& order) {
  const uint64_t base = side.sent;
  uint64_t unasked = 0;
  for (uint32_t i = 0; i < side.config.pages; ++i) {
    if (i >= kDepth)
      if (const int error = side.until(side.sent, base + i + 1 - kDepth); error != 0) return error;
    const bool last = i + 1 == side.config.pages;
    ++unasked;
    const uint64_t ends = last || unasked == 32 ? std::exchange(unasked, 0) : 0;
    if (const int error = side.write(order[i % order.size()] * side.config.bytes, side.config.bytes, last, ends);
        error != 0)
      return error;
  }
  return side.until(side.sent, base + side.config.pages);
}

int ping_pong(Side& side) {
  const LoopConfig& config = side.config;
  std::vector<double> times(config.operations);
  for (uint64_t i = 0; i < config.warmup + config.operations; ++i) {
    const double start = seconds_now();
    if (const int error = side.write(0, 0, true, 1); error != 0) return error;
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
  return config.window >= 1 && config.window <= kDepth && config.operations >= 1 && config.warmup >= 1 &&
         config.pages >= 1 && config.rounds >= 1 && config.bytes <= config.region_bytes &&
         (config.bytes >= 1 || config.workload == LoopWorkload::kPingPong) && config.region_bytes >= 1;
}

}  // namespace

int verbs_target(const LoopConfig& config, int control_fd, LoopResult* result) {
  Side side(config, control_fd, result);
  if (!valid(config)) return side.fail("the configuration makes no sense", EINVAL);
  if (const int error = side.open(); error != 0) return error;
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
      if (const int error = side.write(0, 0, true, 1); error != 0) return error;
    idle = side.came == before ? idle + 1 : 0;
    if ((idle & 1023) == 1023 && readable(control_fd)) break;  // the initiator is done, or gone
  }
  char done = 0;
  if (!receive_all(control_fd, &done, 1)) return side.fail("the initiator is gone", EPIPE);
  result->verified = echo ? side.came == immediates(config) : check(side);
  char verdict = result->verified ? 1 : 0;
  return send_all(control_fd, &verdict, 1) ? 0 : side.fail("the initiator is gone", EPIPE);
}

int verbs_initiator(const LoopConfig& config, int control_fd, LoopResult* result) {
  Side side(config, control_fd, result);
  if (!valid(config)) return side.fail("the configuration makes no sense", EINVAL);
  if (const int error = side.open(); error != 0) return error;
  fill(side);
  const int error = config.workload == LoopWorkload::kPingPong ? ping_pong(side) : timed_writes(side);
  char done = 1;
  char verdict = 0;
  if (!send_all(control_fd, &done, 1) || !receive_all(control_fd, &verdict, 1))
    return side.fail("the target is gone", EPIPE);
  result->verified = verdict == 1;
  return error;
}

}  // namespace asyncfabric::bench
