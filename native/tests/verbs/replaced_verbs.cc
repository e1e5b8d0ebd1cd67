// replaced_verbs.cc: a library in place of libibverbs.so.1, see replaced_verbs.h. Each copy of the file is a library of its own.
#pragma GCC visibility push(default)
#include <infiniband/verbs.h>
#pragma GCC visibility pop

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "replaced_verbs.h"

namespace {

using asyncfabric::testing::ReplacedVerbs;

std::mutex lock;  // everything below
ibv_device device{};
uint32_t next_number = 1;

struct Context {
  verbs_context made{};
  std::deque<ibv_async_event> events;
  uint32_t objects = 0;
  bool dead = false;  // takes requests, and does nothing
};
std::vector<Context*> contexts;  // that are open

struct Channel {
  ibv_comp_channel made{};
  ibv_cq* rings = nullptr;
};
struct Queue {
  ibv_cq made{};
  std::deque<ibv_wc> done;
  bool armed = false;
};
struct Shared {
  ibv_srq made{};
  std::deque<ibv_recv_wr> receives;
  std::deque<ibv_sge> pieces;
};
struct Pair {
  ibv_qp made{};
  ibv_qp_type type = IBV_QPT_RC;
  Shared* shared = nullptr;
  std::deque<std::pair<uint64_t, ibv_sge>> receives;
  uint32_t qkey = 0;
  uint32_t to = 0;
};
std::map<uint32_t, Pair*> pairs;
std::map<uint32_t, ibv_mr*> keys;

Context& context_of(ibv_context* context) {
  return *reinterpret_cast<Context*>(reinterpret_cast<char*>(context) - offsetof(verbs_context, context));
}

void happens(int event, int port) {
  const std::lock_guard guard(lock);
  if (contexts.empty()) return;
  Context& first = *contexts.front();
  ibv_async_event made{};
  made.event_type = static_cast<ibv_event_type>(event);
  made.element.port_num = port;
  first.events.push_back(made);
  first.dead = first.dead || event == IBV_EVENT_DEVICE_FATAL;
  (void)eventfd_write(first.made.context.async_fd, 1);
}

void complete(ibv_cq* to, const ibv_wc& work) {
  auto& queue = *reinterpret_cast<Queue*>(to);
  queue.done.push_back(work);
  if (!queue.armed || to->channel == nullptr) return;
  queue.armed = false;
  reinterpret_cast<Channel*>(to->channel)->rings = to;
  (void)eventfd_write(to->channel->fd, 1);
}

// The next receive of a queue pair; false: none is posted.
bool take_receive(Pair& pair, uint64_t* id, ibv_sge* piece) {
  if (pair.shared != nullptr) {
    if (pair.shared->receives.empty()) return false;
    *id = pair.shared->receives.front().wr_id;
    *piece = pair.shared->pieces.front();
    pair.shared->receives.pop_front();
    pair.shared->pieces.pop_front();
    return true;
  }
  if (pair.receives.empty()) return false;
  *id = pair.receives.front().first;
  *piece = pair.receives.front().second;
  pair.receives.pop_front();
  return true;
}

ibv_wc_status carry_out(Pair& from, const ibv_send_wr& request) {
  const bool datagram = from.type == IBV_QPT_UD;
  const auto found = pairs.find(datagram ? request.wr.ud.remote_qpn : from.to);
  const bool there = found != pairs.end() && !context_of(found->second->made.context).dead;
  if (datagram && (!there || found->second->qkey != request.wr.ud.remote_qkey)) return IBV_WC_SUCCESS;
  if (!there) return IBV_WC_RETRY_EXC_ERR;
  Pair& to = *found->second;
  const void* bytes = request.num_sge != 0 ? reinterpret_cast<void*>(request.sg_list->addr) : nullptr;
  const uint32_t length = request.num_sge != 0 ? request.sg_list->length : 0;
  const bool sends = request.opcode == IBV_WR_SEND;
  if (!sends && length != 0) {
    const auto key = keys.find(request.wr.rdma.rkey);
    if (key == keys.end() || key->second->context != to.made.context) return IBV_WC_REM_ACCESS_ERR;
    std::memcpy(reinterpret_cast<void*>(request.wr.rdma.remote_addr), bytes, length);
  }
  if (!sends && request.opcode != IBV_WR_RDMA_WRITE_WITH_IMM) return IBV_WC_SUCCESS;
  ibv_wc work{};
  ibv_sge piece{};
  if (!take_receive(to, &work.wr_id, &piece)) return datagram ? IBV_WC_SUCCESS : IBV_WC_RNR_RETRY_EXC_ERR;
  const uint32_t header = datagram ? 40 : 0;
  if (sends && length != 0) std::memcpy(reinterpret_cast<char*>(piece.addr) + header, bytes, length);
  work.byte_len = length + header;
  work.opcode = sends ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM;
  work.imm_data = request.imm_data;
  work.qp_num = to.made.qp_num;
  complete(to.made.recv_cq, work);
  return IBV_WC_SUCCESS;
}

ibv_ah_attr path{};  // lock

ibv_ah_attr newest_path() {
  const std::lock_guard guard(lock);
  return path;
}

void datagram(uint32_t qpn, uint32_t qkey, const void* bytes, size_t length) {
  const std::lock_guard guard(lock);
  Pair stranger;
  stranger.type = IBV_QPT_UD;
  ibv_sge piece{reinterpret_cast<uint64_t>(bytes), static_cast<uint32_t>(length), 0};
  ibv_send_wr request{};
  request.opcode = IBV_WR_SEND;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.wr.ud.remote_qpn = qpn;
  request.wr.ud.remote_qkey = qkey;
  (void)carry_out(stranger, request);
}

ReplacedVerbs decisions{.newest_path = newest_path, .happens = happens, .datagram = datagram};

int query_port(ibv_context*, uint8_t, ibv_port_attr* port, size_t length) {
  const std::lock_guard guard(lock);
  std::memset(port, 0, length);
  port->state = IBV_PORT_ACTIVE;
  port->active_mtu = port->max_mtu = IBV_MTU_4096;
  port->gid_tbl_len = 16;
  port->pkey_tbl_len = 1;
  port->max_msg_sz = 1u << 30;
  port->lid = decisions.lid;
  port->link_layer = decisions.link_layer;
  port->active_speed = decisions.active_speed;
  port->active_width = decisions.active_width;
  return 0;
}

int poll(ibv_cq* from, int most, ibv_wc* out) {
  const std::lock_guard guard(lock);
  auto& done = reinterpret_cast<Queue*>(from)->done;
  int count = 0;
  for (; count < most && !done.empty(); ++count) {
    out[count] = done.front();
    done.pop_front();
  }
  return count;
}

int arm(ibv_cq* cq, int) {
  const std::lock_guard guard(lock);
  reinterpret_cast<Queue*>(cq)->armed = true;
  return 0;
}

int post_receive(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr**) {
  const std::lock_guard guard(lock);
  for (; request != nullptr; request = request->next)
    reinterpret_cast<Pair*>(qp)->receives.emplace_back(request->wr_id,
                                                       request->num_sge != 0 ? *request->sg_list : ibv_sge{});
  return 0;
}

int post_shared_receive(ibv_srq* srq, ibv_recv_wr* request, ibv_recv_wr**) {
  const std::lock_guard guard(lock);
  auto& shared = *reinterpret_cast<Shared*>(srq);
  for (; request != nullptr; request = request->next) {
    shared.receives.push_back(*request);
    shared.pieces.push_back(request->num_sge != 0 ? *request->sg_list : ibv_sge{});
  }
  return 0;
}

int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr**) {
  const std::lock_guard guard(lock);
  auto& from = *reinterpret_cast<Pair*>(qp);
  if (context_of(qp->context).dead) return 0;
  for (; request != nullptr; request = request->next) {
    ibv_wc work{};
    work.wr_id = request->wr_id;
    work.status = qp->state == IBV_QPS_ERR ? IBV_WC_WR_FLUSH_ERR : carry_out(from, *request);
    work.qp_num = qp->qp_num;
    if (work.status != IBV_WC_SUCCESS) qp->state = IBV_QPS_ERR;
    if (work.status != IBV_WC_SUCCESS || from.type == IBV_QPT_UD || (request->send_flags & IBV_SEND_SIGNALED) != 0)
      complete(qp->send_cq, work);
  }
  return 0;
}

ibv_context* make_context() {
  auto* const context = new Context;
  verbs_context& made = context->made;
  made.sz = sizeof(verbs_context);
  made.query_port = query_port;
  made.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  made.context.device = &device;
  made.context.ops.poll_cq = poll;
  made.context.ops.req_notify_cq = arm;
  made.context.ops.post_recv = post_receive;
  made.context.ops.post_srq_recv = post_shared_receive;
  made.context.ops.post_send = post_send;
  made.context.async_fd = eventfd(0, EFD_CLOEXEC);
  contexts.push_back(context);
  return &made.context;
}

template <class Object>
Object* enter(ibv_context* context, Object* object) {
  ++context_of(context).objects;
  return object;
}
template <class Object>
int leave(ibv_context* context, Object* object) {
  const std::lock_guard guard(lock);
  --context_of(context).objects;
  delete object;
  return 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

ReplacedVerbs* replaced_verbs() { return &decisions; }

ibv_device** ibv_get_device_list(int* count) {
  static ibv_device* list[] = {&device, nullptr};
  std::strcpy(device.name, "mlx5_7");
  device.node_type = IBV_NODE_CA;
  device.transport_type = IBV_TRANSPORT_IB;
  *count = 1;
  return list;
}
void ibv_free_device_list(ibv_device**) {}
ibv_context* ibv_open_device(ibv_device*) {
  const std::lock_guard guard(lock);
  ++decisions.openings;
  if (decisions.refused_openings != 0) {
    --decisions.refused_openings;
    errno = ENODEV;
    return nullptr;
  }
  return make_context();
}
int ibv_close_device(ibv_context* context) {
  const std::lock_guard guard(lock);
  Context* const gone = &context_of(context);
  decisions.left += gone->objects;
  close(context->async_fd);
  std::erase(contexts, gone);
  delete gone;
  return 0;
}
int ibv_query_device(ibv_context*, ibv_device_attr* attributes) {
  *attributes = {};
  std::strcpy(attributes->fw_ver, "28.43.1014");
  attributes->phys_port_cnt = 1;
  attributes->max_cqe = attributes->max_qp_wr = attributes->max_srq_wr = 1 << 20;
  attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom = 16;
  return 0;
}
int ibv_query_pkey(ibv_context*, uint8_t, int, __be16*) { return 0; }

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  const std::lock_guard guard(lock);
  std::deque<ibv_async_event>& events = context_of(context).events;
  if (events.empty()) {
    errno = EAGAIN;
    return -1;
  }
  *event = events.front();
  events.pop_front();
  eventfd_t rung = 0;
  if (events.empty()) (void)eventfd_read(context->async_fd, &rung);
  ++decisions.unacknowledged;
  return 0;
}
void ibv_ack_async_event(ibv_async_event*) {
  const std::lock_guard guard(lock);
  --decisions.unacknowledged;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  const std::lock_guard guard(lock);
  auto* const pd = new ibv_pd{};
  pd->context = context;
  return enter(context, pd);
}
int ibv_dealloc_pd(ibv_pd* pd) { return leave(pd->context, pd); }
ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* base, size_t length, uint64_t, unsigned) {
  const std::lock_guard guard(lock);
  auto* const mr = new ibv_mr{};
  mr->context = pd->context;
  mr->addr = base;
  mr->length = length;
  mr->lkey = mr->rkey = next_number++;
  keys[mr->rkey] = mr;
  ++decisions.registrations;
  return enter(pd->context, mr);
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd*, uint64_t, size_t, uint64_t, int, int) {
  errno = EOPNOTSUPP;
  return nullptr;
}
int ibv_dereg_mr(ibv_mr* mr) {
  {
    const std::lock_guard guard(lock);
    --decisions.registrations;
    keys.erase(mr->rkey);
  }
  return leave(mr->context, mr);
}
ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  const std::lock_guard guard(lock);
  auto* const channel = new Channel;
  channel->made.context = context;
  channel->made.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return &enter(context, channel)->made;
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  close(channel->fd);
  return leave(channel->context, reinterpret_cast<Channel*>(channel));
}
ibv_cq* ibv_create_cq(ibv_context* context, int entries, void*, ibv_comp_channel* channel, int) {
  const std::lock_guard guard(lock);
  auto* const cq = new Queue;
  cq->made.context = context;
  cq->made.channel = channel;
  cq->made.cqe = entries;
  if (static_cast<uint32_t>(entries) > decisions.largest_queue)
    decisions.largest_queue = static_cast<uint32_t>(entries);
  return &enter(context, cq)->made;
}
int ibv_destroy_cq(ibv_cq* cq) { return leave(cq->context, reinterpret_cast<Queue*>(cq)); }
int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void**) {
  const std::lock_guard guard(lock);
  eventfd_t rung = 0;
  if (eventfd_read(channel->fd, &rung) != 0) return -1;
  *cq = reinterpret_cast<Channel*>(channel)->rings;
  return 0;
}
void ibv_ack_cq_events(ibv_cq*, unsigned) {}
ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr*) {
  const std::lock_guard guard(lock);
  auto* const srq = new Shared;
  srq->made.context = pd->context;
  return &enter(pd->context, srq)->made;
}
int ibv_modify_srq(ibv_srq*, ibv_srq_attr*, int) { return 0; }
int ibv_destroy_srq(ibv_srq* srq) { return leave(srq->context, reinterpret_cast<Shared*>(srq)); }
ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* wanted) {
  const std::lock_guard guard(lock);
  auto* const pair = new Pair;
  pair->made.context = pd->context;
  pair->made.qp_num = next_number++;
  pair->made.send_cq = wanted->send_cq;
  pair->made.recv_cq = wanted->recv_cq;
  pair->type = wanted->qp_type;
  pair->shared = reinterpret_cast<Shared*>(wanted->srq);
  pairs[pair->made.qp_num] = pair;
  return &enter(pd->context, pair)->made;
}
int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* wanted, int mask) {
  const std::lock_guard guard(lock);
  auto& pair = *reinterpret_cast<Pair*>(qp);
  if ((mask & IBV_QP_STATE) != 0) qp->state = wanted->qp_state;
  if ((mask & IBV_QP_QKEY) != 0) pair.qkey = wanted->qkey;
  if ((mask & IBV_QP_DEST_QPN) != 0) pair.to = wanted->dest_qp_num;
  return 0;
}
int ibv_destroy_qp(ibv_qp* qp) {
  {
    const std::lock_guard guard(lock);
    pairs.erase(qp->qp_num);
  }
  return leave(qp->context, reinterpret_cast<Pair*>(qp));
}
ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* wanted) {
  const std::lock_guard guard(lock);
  path = *wanted;
  auto* const handle = new ibv_ah{};
  handle->context = pd->context;
  return enter(pd->context, handle);
}
int ibv_destroy_ah(ibv_ah* handle) { return leave(handle->context, handle); }
const char* ibv_wc_status_str(ibv_wc_status) { return ""; }

}  // extern "C"
#pragma GCC visibility pop
