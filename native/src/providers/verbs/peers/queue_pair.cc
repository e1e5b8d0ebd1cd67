// queue_pair.cc: see queue_pair.h.
#include "providers/verbs/peers/queue_pair.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "providers/verbs/device/errors.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint8_t kRnrTimer = 4;       // 0.04 ms until a sender that met no receive tries again
constexpr uint8_t kMaxReadDepth = 16;  // reads under way per queue pair

Status to_init(const Device& device, ibv_qp* qp) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device.port();
  attributes.pkey_index = static_cast<uint16_t>(device.options().pkey);
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  return status_of_call(device.library().ibv_modify_qp(
      qp, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
}

uint8_t read_depth(int limit) { return static_cast<uint8_t>(std::clamp<int>(limit, 0, kMaxReadDepth)); }

}  // namespace

uint64_t random_word() {
  uint64_t word = 0;
  if (getrandom(&word, sizeof word, 0) != sizeof word) std::abort();  // never blocks for 8 bytes once the system is up
  return word;
}

uint32_t random_bits(unsigned bits) { return static_cast<uint32_t>(random_word()) >> (32 - bits); }

Status make_queue_pair(const Device& device, ibv_cq* cq, ibv_srq* srq, QueueSizes wanted, QueuePair* out) {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq;
  attributes.srq = srq;
  attributes.qp_type = IBV_QPT_RC;
  attributes.sq_sig_all = 0;
  attributes.cap.max_send_wr = std::min(wanted.sends, static_cast<uint32_t>(device.limits().max_qp_wr));
  attributes.cap.max_recv_wr = wanted.receives;
  attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
  attributes.cap.max_inline_data = wanted.inline_bytes;
  ibv_qp* qp = device.library().ibv_create_qp(device.pd(), &attributes);
  if (qp == nullptr && wanted.inline_bytes != 0) {  // some devices refuse what they cannot inline instead of cutting it
    attributes.cap.max_inline_data = 0;
    qp = device.library().ibv_create_qp(device.pd(), &attributes);
  }
  if (qp == nullptr) return status_of_call(errno);
  out->qp = own(qp, device.library().ibv_destroy_qp);
  out->sizes = {std::min(attributes.cap.max_send_wr, wanted.sends), attributes.cap.max_recv_wr,
                attributes.cap.max_inline_data};
  out->psn = random_bits(24);
  return to_init(device, qp);
}

Status ready_to_receive(const Device& device, const QueuePair& pair, const RailAddress& remote, QueueEnd end) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = std::min(device.mtu(), static_cast<ibv_mtu>(remote.mtu));
  attributes.dest_qp_num = end.qpn;
  attributes.rq_psn = end.psn;
  attributes.max_dest_rd_atomic = read_depth(device.limits().max_qp_rd_atom);
  attributes.min_rnr_timer = kRnrTimer;
  attributes.ah_attr = device.path_to(remote);
  return status_of_call(device.library().ibv_modify_qp(pair.qp.get(), &attributes,
                                                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                                           IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                                           IBV_QP_MIN_RNR_TIMER));
}

Status ready_to_send(const Device& device, const QueuePair& pair) {
  const Options& options = device.options();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = static_cast<uint8_t>(options.timeout);
  attributes.retry_cnt = static_cast<uint8_t>(options.retry);
  attributes.rnr_retry = static_cast<uint8_t>(options.rnr_retry);
  attributes.sq_psn = pair.psn;
  attributes.max_rd_atomic = read_depth(device.limits().max_qp_init_rd_atom);
  return status_of_call(device.library().ibv_modify_qp(
      pair.qp.get(), &attributes,
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

}  // namespace asyncfabric::verbs
