// queue_pair.h: RC queue pairs: making them and taking them to the state in which they carry. A connection has its own pairs for
// each direction: the sender's end posts, the target's end only receives (and gives credits back). So crossing and repeated
// connects never have to agree on who keeps what; the price is twice the queue pairs of a shared one. Service thread.
#pragma once

#include "providers/verbs/device/device.h"

namespace asyncfabric::verbs {

struct QueueSizes {
  uint32_t sends = 1;
  uint32_t receives = 0;      // of its own; 0 with an SRQ
  uint32_t inline_bytes = 0;  // asked for
};

struct QueuePair {
  Owned<ibv_qp> qp;
  QueueSizes sizes;  // what the device really gave
  uint32_t psn =
      0;  // of the first packet that we send: random, so that packets of an earlier pair are not taken for ours
};

Status make_queue_pair(const Device& device, ibv_cq* cq, ibv_srq* srq, QueueSizes wanted, QueuePair* out);

// INIT -> RTR: ready to receive what `remote` sends.
Status ready_to_receive(const Device& device, const QueuePair& pair, const RailAddress& remote, QueueEnd end);
// RTR -> RTS.
Status ready_to_send(const Device& device, const QueuePair& pair);

uint32_t random_bits(unsigned bits);
uint64_t random_word();

}  // namespace asyncfabric::verbs
