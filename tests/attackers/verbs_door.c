// verbs_door.c: what an attacker does with a device, in one piece for ctypes: datagrams to anybody, and queue pairs that it joins to whom it
// likes. Nothing of it is ours that runs: `verbs_client.py` compiles it. No function waits.
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kDatagrams = 64, kDatagramBytes = 512, kRouteBytes = 40, kReceives = 16, kReceiveBytes = 16384, kSends = 64, kPort = 1 };

struct door {
  struct ibv_context* context;
  struct ibv_pd* pd;
  struct ibv_cq* cq;
  struct ibv_qp* qp;
  struct ibv_mr* mr;
  uint8_t* bytes;
  union ibv_gid gid;
  int gid_index;
  uint32_t sent;
};

struct pair {
  struct ibv_cq* cq;
  struct ibv_qp* qp;
  struct ibv_mr* mr;
  uint8_t* bytes;
  uint32_t sent;
};

static int receive(struct ibv_qp* qp, struct ibv_mr* mr, uint8_t* at, uint32_t length, uint64_t slot) {
  struct ibv_sge piece = {(uint64_t)(uintptr_t)at, length, mr->lkey};
  struct ibv_recv_wr request = {.wr_id = slot, .sg_list = &piece, .num_sge = 1}, *bad;
  return ibv_post_recv(qp, &request, &bad);
}

// The GID of an IPv4 address, with the version of RoCE that is routed.
static int find_gid(struct door* door) {
  struct ibv_gid_entry entries[64];
  const long count = ibv_query_gid_table(door->context, entries, 64, 0);
  for (long i = 0; i < count; ++i)
    if (entries[i].port_num == kPort && entries[i].gid_type == IBV_GID_TYPE_ROCE_V2 && entries[i].gid.raw[10] == 0xff &&
        entries[i].gid.raw[11] == 0xff) {
      door->gid = entries[i].gid;
      door->gid_index = (int)entries[i].gid_index;
      return 0;
    }
  return -1;
}

void door_close(struct door* door) {
  if (door->qp) ibv_destroy_qp(door->qp);
  if (door->mr) ibv_dereg_mr(door->mr);
  if (door->cq) ibv_destroy_cq(door->cq);
  if (door->pd) ibv_dealloc_pd(door->pd);
  if (door->context) ibv_close_device(door->context);
  free(door->bytes);
  free(door);
}

struct door* door_open(const char* name, uint32_t qkey, uint8_t* gid, uint32_t* qpn) {
  int count = 0;
  struct ibv_device** devices = ibv_get_device_list(&count);
  struct door* door = calloc(1, sizeof *door);
  for (int i = 0; i < count; ++i)
    if (strcmp(ibv_get_device_name(devices[i]), name) == 0) door->context = ibv_open_device(devices[i]);
  if (devices) ibv_free_device_list(devices);
  const size_t length = (kDatagrams + kSends) * kDatagramBytes;
  if (door->context && find_gid(door) == 0) door->pd = ibv_alloc_pd(door->context);
  if (door->pd) door->cq = ibv_create_cq(door->context, kDatagrams + kSends, NULL, NULL, 0);
  if (door->cq) door->mr = ibv_reg_mr(door->pd, door->bytes = calloc(1, length), length, IBV_ACCESS_LOCAL_WRITE);
  if (door->mr) {
    struct ibv_qp_init_attr made = {.send_cq = door->cq, .recv_cq = door->cq, .qp_type = IBV_QPT_UD, .sq_sig_all = 1};
    made.cap = (struct ibv_qp_cap){kSends, kDatagrams, 1, 1, 0};
    door->qp = ibv_create_qp(door->pd, &made);
  }
  if (!door->qp) {
    door_close(door);
    return NULL;
  }
  struct ibv_qp_attr as = {.qp_state = IBV_QPS_INIT, .port_num = kPort, .qkey = qkey};
  ibv_modify_qp(door->qp, &as, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  for (uint64_t i = 0; i < kDatagrams; ++i)
    receive(door->qp, door->mr, door->bytes + i * kDatagramBytes, kDatagramBytes, i);
  as.qp_state = IBV_QPS_RTR;
  ibv_modify_qp(door->qp, &as, IBV_QP_STATE);
  as.qp_state = IBV_QPS_RTS;
  ibv_modify_qp(door->qp, &as, IBV_QP_STATE | IBV_QP_SQ_PSN);
  memcpy(gid, door->gid.raw, sizeof door->gid.raw);
  *qpn = door->qp->qp_num;
  return door;
}

static struct ibv_ah_attr way_to(const struct door* door, const uint8_t* gid) {
  struct ibv_ah_attr way = {.is_global = 1, .port_num = kPort};
  memcpy(way.grh.dgid.raw, gid, sizeof way.grh.dgid.raw);
  way.grh.sgid_index = (uint8_t)door->gid_index;
  way.grh.hop_limit = 64;
  return way;
}

int door_send(struct door* door, const uint8_t* gid, uint32_t qpn, uint32_t qkey, const void* bytes, uint32_t length) {
  if (length > kDatagramBytes) return -1;
  struct ibv_ah_attr way = way_to(door, gid);
  struct ibv_ah* route = ibv_create_ah(door->pd, &way);
  if (!route) return -1;
  uint8_t* at = door->bytes + (kDatagrams + door->sent++ % kSends) * kDatagramBytes;
  memcpy(at, bytes, length);
  struct ibv_sge piece = {(uint64_t)(uintptr_t)at, length, door->mr->lkey};
  struct ibv_send_wr request = {.wr_id = kDatagrams, .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
  request.wr.ud.ah = route;
  request.wr.ud.remote_qpn = qpn;
  request.wr.ud.remote_qkey = qkey;
  const int status = ibv_post_send(door->qp, &request, &bad);
  ibv_destroy_ah(route);
  return status;
}

// The length of a datagram that came, 0 where none did.
long door_take(struct door* door, void* out) {
  struct ibv_wc done;
  while (ibv_poll_cq(door->cq, 1, &done) > 0) {
    if (done.wr_id >= kDatagrams || done.status != IBV_WC_SUCCESS) continue;
    uint8_t* at = door->bytes + done.wr_id * kDatagramBytes;
    const long length = (long)done.byte_len - kRouteBytes;
    if (length > 0) memcpy(out, at + kRouteBytes, (size_t)length);
    receive(door->qp, door->mr, at, kDatagramBytes, done.wr_id);
    if (length > 0) return length;
  }
  return 0;
}

void pair_close(struct pair* pair) {
  if (pair->qp) ibv_destroy_qp(pair->qp);
  if (pair->mr) ibv_dereg_mr(pair->mr);
  if (pair->cq) ibv_destroy_cq(pair->cq);
  free(pair->bytes);
  free(pair);
}

struct pair* pair_open(struct door* door, uint32_t* qpn) {
  struct pair* pair = calloc(1, sizeof *pair);
  const size_t length = (kReceives + 1) * kReceiveBytes;
  pair->cq = ibv_create_cq(door->context, kReceives + kSends, NULL, NULL, 0);
  pair->mr = ibv_reg_mr(door->pd, pair->bytes = calloc(1, length), length, IBV_ACCESS_LOCAL_WRITE);
  if (pair->cq && pair->mr) {
    struct ibv_qp_init_attr made = {.send_cq = pair->cq, .recv_cq = pair->cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    made.cap = (struct ibv_qp_cap){kSends, kReceives, 1, 1, 0};
    pair->qp = ibv_create_qp(door->pd, &made);
  }
  if (!pair->qp) {
    pair_close(pair);
    return NULL;
  }
  struct ibv_qp_attr as = {.qp_state = IBV_QPS_INIT, .port_num = kPort};
  ibv_modify_qp(pair->qp, &as, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  for (uint64_t i = 0; i < kReceives; ++i)
    receive(pair->qp, pair->mr, pair->bytes + i * kReceiveBytes, kReceiveBytes, i);
  *qpn = pair->qp->qp_num;
  return pair;
}

int pair_join(struct door* door, struct pair* pair, const uint8_t* gid, int mtu, uint32_t qpn, uint32_t psn, uint32_t own) {
  struct ibv_qp_attr as = {.qp_state = IBV_QPS_RTR, .path_mtu = (enum ibv_mtu)mtu, .dest_qp_num = qpn, .rq_psn = psn};
  as.max_dest_rd_atomic = 4;
  as.min_rnr_timer = 4;
  as.ah_attr = way_to(door, gid);
  int status = ibv_modify_qp(pair->qp, &as,
                             IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  as = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 3, .rnr_retry = 3, .sq_psn = own};
  as.max_rd_atomic = 4;
  if (status == 0)
    status = ibv_modify_qp(pair->qp, &as,
                           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                               IBV_QP_MAX_QP_RD_ATOMIC);
  return status;
}

// What is read lands in the bytes behind the receives. `work`: 0 send, 1 write, 2 write with an immediate, 3 read.
int pair_post(struct pair* pair, int work, const void* bytes, uint32_t length, uint32_t imm, uint64_t at, uint32_t rkey) {
  static const enum ibv_wr_opcode kWork[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ};
  uint8_t* from = pair->bytes + kReceives * kReceiveBytes;
  if (length > kReceiveBytes) return -1;
  if (work != 3) memcpy(from, bytes, length);
  struct ibv_sge piece = {(uint64_t)(uintptr_t)from, length, pair->mr->lkey};
  struct ibv_send_wr request = {.wr_id = kReceives, .sg_list = &piece, .num_sge = length != 0, .opcode = kWork[work]}, *bad;
  request.imm_data = imm;
  request.wr.rdma.remote_addr = at;
  request.wr.rdma.rkey = rkey;
  return ibv_post_send(pair->qp, &request, &bad);
}

// The length of a message that came; -1: nothing; -2: what was posted has ended, as `status` names it.
long pair_take(struct pair* pair, void* out, int* status) {
  struct ibv_wc done;
  if (ibv_poll_cq(pair->cq, 1, &done) <= 0) return -1;
  *status = (int)done.status;
  if (done.wr_id >= kReceives || done.status != IBV_WC_SUCCESS) return -2;
  uint8_t* at = pair->bytes + done.wr_id * kReceiveBytes;
  const long length = (long)done.byte_len;
  memcpy(out, at, (size_t)length);
  receive(pair->qp, pair->mr, at, kReceiveBytes, done.wr_id);
  return length;
}
