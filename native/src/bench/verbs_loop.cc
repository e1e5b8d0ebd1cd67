// verbs_loop.cc: the bare libibverbs loop of the bench; see verbs_loop.h. One thread, one queue pair, one CQ, one region, completions
// counted, nothing else: this is the limit that the rail and the engine are measured against. It opens the device as the rail does.
#include "bench/verbs_loop.h"

#include <sys/mman.h>

#include <memory>

#include "providers/verbs/device/device.h"
#include "providers/verbs/peers/queue_pair.h"

namespace asyncfabric::bench {
namespace {

using verbs::own;
using verbs::Owned;

constexpr int kReap = 64;
constexpr uint64_t kReceiveMark = 1ull << 63;

struct Hello {  // what the two sides send each other
  verbs::RailAddress address;
  verbs::QueueEnd end;
  uint64_t base = 0;
  uint32_t rkey = 0;
};

struct Side : bare::End {
  static constexpr uint32_t kMostInFlight = 1024;
  static constexpr uint64_t kChain = 32;

  std::unique_ptr<verbs::Device> device;
  Owned<ibv_cq> cq;
  Owned<ibv_mr> mr;
  verbs::QueuePair pair;
  Hello theirs;

  using End::End;
  ~Side() {
    pair.qp.reset();
    mr.reset();
    if (region != nullptr) munmap(region, config.region_bytes);
  }

  int open() {
    const verbs::Library* library = verbs::open_library(config.library, &result->error);
    if (library == nullptr) return ENOENT;
    verbs::Options options;
    options.device = config.address;
    if (!verbs::Device::open(*library, options, &device, &result->error).ok()) return ENODEV;
    result->provider = "verbs " + device->name();
    result->library = library->path;
    region = bare::map_region(config.region_bytes);
    if (region == nullptr) return fail("mapping the region", errno);
    mr = own(library->ibv_reg_mr_iova2(device->pd(), region, config.region_bytes, reinterpret_cast<uint64_t>(region),
                                       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING),
             library->ibv_dereg_mr);
    if (!mr) return fail("registering the region", errno);
    cq = own(library->ibv_create_cq(device->context(), 2 * kMostInFlight + 64, nullptr, nullptr, 0),
             library->ibv_destroy_cq);
    if (!cq) return fail("ibv_create_cq", errno);
    const Status made = make_queue_pair(*device, cq.get(), nullptr, {kMostInFlight, kMostInFlight, 220}, &pair);
    return made.ok() ? 0 : fail("ibv_create_qp", made.raw);
  }

  int meet() {
    Hello mine;
    mine.address.gid = device->gid().gid;
    mine.address.lid = device->lid();
    mine.address.mtu = static_cast<uint8_t>(device->mtu());
    mine.end = {pair.qp->qp_num, pair.psn};
    mine.base = reinterpret_cast<uint64_t>(region);
    mine.rkey = mr->rkey;
    if (!bare::send_all(control, &mine, sizeof mine) || !bare::receive_all(control, &theirs, sizeof theirs))
      return fail("the other side is gone", EPIPE);
    Status status = ready_to_receive(*device, pair, theirs.address, theirs.end);
    for (uint32_t i = 0; i < kMostInFlight && status.ok(); ++i) post_receive();
    if (status.ok()) status = ready_to_send(*device, pair);
    if (!status.ok()) return fail("connecting the queue pair", status.raw);
    char ready = 1;  // nobody sends before both receive
    if (!bare::send_all(control, &ready, 1) || !bare::receive_all(control, &ready, 1))
      return fail("the other side is gone", EPIPE);
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
  int write(uint64_t at, uint64_t bytes, bool with_imm, uint64_t, uint64_t ends) {
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
};

}  // namespace

int verbs_target(const LoopConfig& config, int control_fd, LoopResult* result) {
  return bare::target<Side>(config, control_fd, result);
}

int verbs_initiator(const LoopConfig& config, int control_fd, LoopResult* result) {
  return bare::initiator<Side>(config, control_fd, result);
}

}  // namespace asyncfabric::bench
