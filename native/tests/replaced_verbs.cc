// replaced_verbs.cc: a library in place of libibverbs.so.1, see replaced_verbs.h. Each copy of the file is a library of its own.
#pragma GCC visibility push(default)
#include <infiniband/verbs.h>
#pragma GCC visibility pop

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>

#include "replaced_verbs.h"

namespace {

using asyncfabric::testing::ReplacedVerbs;

std::mutex lock;
std::deque<ibv_async_event> events;
int events_fd = -1;
ibv_device device{};
uint32_t next_number = 1;

void happens(int event, int port) {
  const std::lock_guard guard(lock);
  ibv_async_event made{};
  made.event_type = static_cast<ibv_event_type>(event);
  made.element.port_num = port;
  events.push_back(made);
  (void)eventfd_write(events_fd, 1);
}

ibv_ah_attr path{};  // lock

ibv_ah_attr newest_path() {
  const std::lock_guard guard(lock);
  return path;
}

ReplacedVerbs decisions{.newest_path = newest_path, .happens = happens};

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

int nothing_done(ibv_cq*, int, ibv_wc*) { return 0; }
int armed(ibv_cq*, int) { return 0; }
int taken(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) { return 0; }
int taken_by_srq(ibv_srq*, ibv_recv_wr*, ibv_recv_wr**) { return 0; }
int refused(ibv_qp*, ibv_send_wr*, ibv_send_wr**) { return ENOMEM; }

verbs_context* make_context() {
  auto* const made = new verbs_context{};
  made->sz = sizeof(verbs_context);
  made->query_port = query_port;
  made->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  made->context.device = &device;
  made->context.ops.poll_cq = nothing_done;
  made->context.ops.req_notify_cq = armed;
  made->context.ops.post_recv = taken;
  made->context.ops.post_srq_recv = taken_by_srq;
  made->context.ops.post_send = refused;
  made->context.async_fd = events_fd = eventfd(0, EFD_CLOEXEC);
  return made;
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
ibv_context* ibv_open_device(ibv_device*) { return &make_context()->context; }
int ibv_close_device(ibv_context* context) {
  close(context->async_fd);
  delete reinterpret_cast<verbs_context*>(reinterpret_cast<char*>(context) - offsetof(verbs_context, context));
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

int ibv_get_async_event(ibv_context*, ibv_async_event* event) {
  const std::lock_guard guard(lock);
  if (events.empty()) {
    errno = EAGAIN;
    return -1;
  }
  *event = events.front();
  events.pop_front();
  eventfd_t rung = 0;
  if (events.empty()) (void)eventfd_read(events_fd, &rung);
  ++decisions.unacknowledged;
  return 0;
}
void ibv_ack_async_event(ibv_async_event*) {
  const std::lock_guard guard(lock);
  --decisions.unacknowledged;
}

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  auto* const pd = new ibv_pd{};
  pd->context = context;
  return pd;
}
int ibv_dealloc_pd(ibv_pd* pd) {
  delete pd;
  return 0;
}
ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* base, size_t length, uint64_t, unsigned) {
  const std::lock_guard guard(lock);
  auto* const mr = new ibv_mr{};
  mr->context = pd->context;
  mr->addr = base;
  mr->length = length;
  mr->lkey = mr->rkey = next_number++;
  ++decisions.registrations;
  return mr;
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd*, uint64_t, size_t, uint64_t, int, int) {
  errno = EOPNOTSUPP;
  return nullptr;
}
int ibv_dereg_mr(ibv_mr* mr) {
  const std::lock_guard guard(lock);
  --decisions.registrations;
  delete mr;
  return 0;
}
ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  auto* const channel = new ibv_comp_channel{};
  channel->context = context;
  channel->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return channel;
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  close(channel->fd);
  delete channel;
  return 0;
}
ibv_cq* ibv_create_cq(ibv_context* context, int entries, void*, ibv_comp_channel* channel, int) {
  auto* const cq = new ibv_cq{};
  cq->context = context;
  cq->channel = channel;
  cq->cqe = entries;
  return cq;
}
int ibv_destroy_cq(ibv_cq* cq) {
  delete cq;
  return 0;
}
int ibv_get_cq_event(ibv_comp_channel*, ibv_cq**, void**) { return -1; }
void ibv_ack_cq_events(ibv_cq*, unsigned) {}
ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr*) {
  auto* const srq = new ibv_srq{};
  srq->context = pd->context;
  return srq;
}
int ibv_modify_srq(ibv_srq*, ibv_srq_attr*, int) { return 0; }
int ibv_destroy_srq(ibv_srq* srq) {
  delete srq;
  return 0;
}
ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr*) {
  const std::lock_guard guard(lock);
  auto* const qp = new ibv_qp{};
  qp->context = pd->context;
  qp->qp_num = next_number++;
  return qp;
}
int ibv_modify_qp(ibv_qp*, ibv_qp_attr*, int) { return 0; }
int ibv_destroy_qp(ibv_qp* qp) {
  delete qp;
  return 0;
}
ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* wanted) {
  const std::lock_guard guard(lock);
  path = *wanted;
  auto* const handle = new ibv_ah{};
  handle->context = pd->context;
  return handle;
}
int ibv_destroy_ah(ibv_ah* handle) {
  delete handle;
  return 0;
}
const char* ibv_wc_status_str(ibv_wc_status) { return ""; }

}  // extern "C"
#pragma GCC visibility pop
