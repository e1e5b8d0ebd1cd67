// postbox.cc: see postbox.h.
#include "providers/verbs/peers/postbox.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "providers/verbs/device/errors.h"
#include "providers/verbs/peers/queue_pair.h"

namespace asyncfabric::verbs {
namespace {

constexpr size_t kHeaderBytes = 40;  // room for the global routing header before each received datagram
constexpr size_t kReceiveBytes = 512;
constexpr size_t kRoutes = 64;
constexpr uint64_t kSendMark = 1ull << 32;  // wr_id of sends; receives are their slot's number

static_assert(kHeaderBytes + kMaxDatagramBytes <= kReceiveBytes);

}  // namespace

Status Postbox::open(const Device& device, std::unique_ptr<Postbox>* out, std::string* detail) {
  std::unique_ptr<Postbox> box(new Postbox(device));
  int error = box->make();
  if (error == 0) error = box->bring_up();
  if (error != 0) {
    *detail = "verbs: " + device.name() + ": the datagram queue pair for connecting could not be set up (" +
              std::strerror(error) + ")";
    return {StatusCode::kNoProvider, error};
  }
  *out = std::move(box);
  return {};
}

Postbox::~Postbox() = default;  // members go in the order that the library demands: queue pair, memory, CQ, channel

int Postbox::make() {
  const Library& library = device_.library();
  bytes_ = std::make_unique<uint8_t[]>(kReceives * kReceiveBytes + kSends * kMaxDatagramBytes);
  channel_ = own(library.ibv_create_comp_channel(device_.context()), library.ibv_destroy_comp_channel);
  if (!channel_) return errno;
  (void)fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  cq_ = own(library.ibv_create_cq(device_.context(), kReceives + kSends, nullptr, channel_.get(), 0),
            library.ibv_destroy_cq);
  if (!cq_) return errno;
  const size_t length = kReceives * kReceiveBytes + kSends * kMaxDatagramBytes;
  mr_ = own(library.ibv_reg_mr_iova2(device_.pd(), bytes_.get(), length, reinterpret_cast<uint64_t>(bytes_.get()),
                                     IBV_ACCESS_LOCAL_WRITE),
            library.ibv_dereg_mr);
  if (!mr_) return errno;
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = cq_.get();
  attributes.qp_type = IBV_QPT_UD;
  attributes.sq_sig_all = 1;
  attributes.cap.max_send_wr = kSends;
  attributes.cap.max_recv_wr = kReceives;
  attributes.cap.max_send_sge = attributes.cap.max_recv_sge = 1;
  qp_ = own(library.ibv_create_qp(device_.pd(), &attributes), library.ibv_destroy_qp);
  qkey_ = random_bits(31);  // the highest bit marks privileged keys
  return qp_ ? 0 : errno;
}

int Postbox::bring_up() {
  const Library& library = device_.library();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_.port();
  attributes.pkey_index = static_cast<uint16_t>(device_.options().pkey);
  attributes.qkey = qkey_;
  int error =
      library.ibv_modify_qp(qp_.get(), &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  for (size_t slot = 0; slot < kReceives && error == 0; ++slot)
    if (!post_receive(slot)) error = ENOMEM;
  attributes.qp_state = IBV_QPS_RTR;
  if (error == 0) error = library.ibv_modify_qp(qp_.get(), &attributes, IBV_QP_STATE);
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = random_bits(24);
  if (error == 0) error = library.ibv_modify_qp(qp_.get(), &attributes, IBV_QP_STATE | IBV_QP_SQ_PSN);
  free_sends_.clear();
  for (size_t slot = 0; slot < kSends; ++slot) free_sends_.push_back(slot);
  if (error == 0) error = ibv_req_notify_cq(cq_.get(), 0);
  return error;
}

// A datagram that could not leave (the interface is down) stops the queue pair. Its number and key stay the same: peers know them.
void Postbox::revive() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RESET;
  (void)device_.library().ibv_modify_qp(qp_.get(), &attributes, IBV_QP_STATE);
  std::array<ibv_wc, 16> gone;
  while (ibv_poll_cq(cq_.get(), static_cast<int>(gone.size()), gone.data()) > 0) {}
  stopped_ = bring_up() != 0;
}

bool Postbox::post_receive(size_t slot) {
  ibv_sge piece{reinterpret_cast<uint64_t>(bytes_.get() + slot * kReceiveBytes), kReceiveBytes, mr_->lkey};
  ibv_recv_wr request{};
  request.wr_id = slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(qp_.get(), &request, &bad) == 0;
}

ibv_ah* Postbox::route_to(const RailAddress& remote) {
  if (routes_old_ && idle()) {  // a handle in use must stay
    routes_.clear();
    routes_old_ = false;
  }
  for (const Route& route : routes_)
    if (route.gid == remote.gid && route.lid == remote.lid) return route.handle.get();
  ibv_ah_attr path = device_.path_to(remote);
  Route route{remote.gid, remote.lid,
              own(device_.library().ibv_create_ah(device_.pd(), &path), device_.library().ibv_destroy_ah)};
  if (!route.handle) return nullptr;
  if (routes_.size() >= kRoutes && idle()) routes_.erase(routes_.begin());  // likewise
  routes_.push_back(std::move(route));
  return routes_.back().handle.get();
}

bool Postbox::send(const RailAddress& to, std::string_view bytes) {
  if (free_sends_.empty() || bytes.size() > kMaxDatagramBytes) return false;
  ibv_ah* route = route_to(to);
  if (route == nullptr) return false;
  const size_t slot = free_sends_.back();
  uint8_t* copy = bytes_.get() + kReceives * kReceiveBytes + slot * kMaxDatagramBytes;
  std::memcpy(copy, bytes.data(), bytes.size());
  ibv_sge piece{reinterpret_cast<uint64_t>(copy), static_cast<uint32_t>(bytes.size()), mr_->lkey};
  ibv_send_wr request{};
  request.wr_id = kSendMark | slot;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.ud.ah = route;
  request.wr.ud.remote_qpn = to.qpn;
  request.wr.ud.remote_qkey = to.qkey;
  ibv_send_wr* bad = nullptr;
  if (ibv_post_send(qp_.get(), &request, &bad) != 0) return false;
  free_sends_.pop_back();
  return true;
}

size_t Postbox::take_completions(const std::function<void(std::string_view)>& take) {
  std::array<ibv_wc, 16> done;
  const int count = ibv_poll_cq(cq_.get(), static_cast<int>(done.size()), done.data());
  for (int i = 0; i < count; ++i) {
    const ibv_wc& each = done[static_cast<size_t>(i)];
    if ((each.wr_id & kSendMark) != 0) {
      free_sends_.push_back(each.wr_id & (kSendMark - 1));
      stopped_ = stopped_ || each.status != IBV_WC_SUCCESS;
      continue;
    }
    const uint8_t* at = bytes_.get() + each.wr_id * kReceiveBytes;
    if (each.status == IBV_WC_SUCCESS && each.byte_len > kHeaderBytes && each.byte_len <= kReceiveBytes)
      take({reinterpret_cast<const char*>(at) + kHeaderBytes, each.byte_len - kHeaderBytes});
    if (!stopped_) (void)post_receive(each.wr_id);
  }
  return count > 0 ? static_cast<size_t>(count) : 0;
}

void Postbox::collect(const std::function<void(std::string_view)>& take) {
  ibv_cq* cq = nullptr;
  void* unused = nullptr;
  unsigned events = 0;
  while (device_.library().ibv_get_cq_event(channel_.get(), &cq, &unused) == 0) ++events;
  if (events != 0) device_.library().ibv_ack_cq_events(cq_.get(), events);
  while (take_completions(take) != 0) {}
  (void)ibv_req_notify_cq(cq_.get(), 0);
  while (take_completions(take) != 0) {}
  if (stopped_) revive();
}

}  // namespace asyncfabric::verbs
